"""Hypformer's blocks for sequences: :class:`torch.nn.TransformerEncoder` and ``TransformerDecoder`` of flat space.

Axes are ``(*batch, tokens, features)``; causal it is the decoder of a language model, which goes token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._shapes import Bool, Float, Int
from holonomy.layers import HypResidual
from holonomy.layers.hyperbolic.block import BlockState, DecoderState, Norm
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.ops.heads import KeyValueState, head_count, without_padding
from holonomy.ops.linear_attention.causal import LinearState
from holonomy.ops.linear_attention.reference import Average
from holonomy.ops.softmax_attention import Similarity

# About how long a space coordinate of a place is at first, in any dimension: as long as that of a token.
_PLACE = 0.5


class HypTransformer(nn.Module):
    r"""Hyperbolic blocks on a sequence (Hypformer section 4.6, figure 4, without a graph).

    Features are mapped to points by the exponential map at the origin, then by HTC, as in
    :class:`~holonomy.models.Hypformer`. With ``max_tokens`` each position has a learned point p of the same manifold,
    and a token becomes the Lorentzian midpoint of itself and p: the sum of eq. 20, once and not in each block, with a
    learned point instead of one computed from the token. These points are initialised with space coordinates of about
    0.5, the size of tokens of standardised features. Blocks follow.

    With ``manifold_memory`` it is the decoder of a model from sequences to sequences: each block attends to its tokens,
    then to the ``memory``, points that another model returned on that manifold.

    Args:
        in_features: number of features of a token.
        hidden_features: dimension of the hyperbolic spaces.
        layers: number of blocks.
        heads: attention heads per block, a divisor of ``hidden_features``.
        max_tokens: the longest sequence that has learned positions. Without it and ``rope`` the order of the tokens
            plays no part but through ``is_causal``.
        rope: with softmax attention, rotary positions in place of learned ones, in sequences of any length; see
            :class:`~holonomy.layers.HypSoftmaxAttention`.
        manifold_memory: where the points of a ``memory`` lie, as ``encoder.manifold_out``. Its curvature is then in
            both models: put them in one module, which gives it to an optimizer once.
        feedforward: hidden dimension of each feed-forward; ``4 * hidden_features`` if left out.
        attention: ``"linear"``, at a cost linear in the tokens, or ``"softmax"``.
        similarity: what softmax attention compares, see :class:`~holonomy.layers.HypSoftmaxAttention`.
        power: the sharpening exponent p of linear attention (eq. 19).
        average: of linear attention: ``"space"`` parts as printed, or the ``"midpoint"``.
        dropout: probability of dropping a space coordinate, after the first HTC and in the blocks.
        activation: a function of space parts, after the first HTC and in the feed-forwards.
        norm: ``"layer"`` or ``"rms"``, see :class:`~holonomy.layers.HypLayerNorm` and
            :class:`~holonomy.layers.HypRMSNorm`.
        norm_eps: added to the variance or mean square by the norms.
        curvature: the initial curvature of every manifold.
        learnable_curvature: whether the curvatures receive gradients.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        TypeError: if an argument is of another type than it says.
        ValueError: if a size, probability or choice is none of the allowed, or if an option of the other attention is
            given.

    A model that no token of which looks ahead:

    >>> _ = torch.manual_seed(0)
    >>> model = HypTransformer(3, 8, heads=2, max_tokens=10).eval()
    >>> x = torch.randn(2, 6, 3)
    >>> points = model(x, is_causal=True)
    >>> torch.allclose(model(x[:, :4], is_causal=True), points[:, :4], atol=1e-4)
    True
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        layers: int = 2,
        heads: int = 1,
        max_tokens: int | None = None,
        rope: bool = False,
        manifold_memory: Lorentz | None = None,
        feedforward: int | None = None,
        attention: Literal["linear", "softmax"] = "linear",
        similarity: Similarity = "geodesic_squared",
        power: float = 2.0,
        average: Average = "space",
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        norm: Norm = "layer",
        norm_eps: float = numerics.LAYER_NORM_EPS,
        curvature: float = -1.0,
        learnable_curvature: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(learnable_curvature=learnable_curvature)
        self.in_features = checks.positive_int("in_features", in_features)
        head_count(hidden_features, heads, "hidden_features")
        self.hidden_features = hidden_features
        if rope and max_tokens is not None:
            raise ValueError(f"max_tokens must be left out with rope, which takes its part, got {max_tokens}.")
        self.manifold_memory = manifold_memory
        self.manifold_out = Lorentz(curvature, learnable=learnable_curvature, device=device, dtype=dtype)
        self.encoder = HypformerEncoder(
            in_features,
            hidden_features,
            self.manifold_out,
            layers=layers,
            heads=heads,
            feedforward=feedforward,
            attention=attention,
            similarity=similarity,
            power=power,
            average=average,
            rope=rope,
            manifold_memory=manifold_memory,
            token_positions=max_tokens is None and not rope,
            dropout=dropout,
            activation=activation,
            norm=norm,
            norm_eps=norm_eps,
            curvature=curvature,
            learnable_curvature=learnable_curvature,
            device=device,
            dtype=dtype,
        )
        self.positions = None
        if max_tokens is not None:
            first = self.encoder.refine.manifold_out
            checks.positive_int("max_tokens", max_tokens)
            std = math.asinh(_PLACE * math.sqrt(hidden_features)) / math.sqrt(hidden_features)
            self.positions = LorentzEmbedding(max_tokens, hidden_features, first, std=std, device=device, dtype=dtype)
            self.residual = HypResidual(first)

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys ambient"] | None = None,
        memory_key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
    ) -> Float[Tensor, "*batch tokens ambient"]:
        """Encode.

        Args:
            x: ``(*batch, tokens, in_features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at padding, which has no effect.
            attn_mask: with softmax attention: pairs that must not attend, see
                :class:`~holonomy.layers.HypSoftmaxAttention`.
            is_causal: no token attends to later ones.
            memory: points ``(*batch, keys, hidden_features + 1)`` of ``manifold_memory``, exactly where there is one.
            memory_key_padding_mask: ``(*batch, keys)``, ``True`` at padding of the memory.

        Returns:
            Points ``(*batch, tokens, hidden_features + 1)`` of ``manifold_out``; finite at padding.

        Raises:
            ValueError: if there are more tokens than ``max_tokens``, a mask does not fit, or a memory is missing or
                comes for a model made without it.
        """
        points = self._start(x, key_padding_mask)
        other = self._remembered(memory, memory_key_padding_mask)
        return self.encoder(points, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal, **other)

    def attention_maps(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys ambient"] | None = None,
        memory_key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
    ) -> list[Tensor]:
        """The attention of every block and head; call it in evaluation mode.

        Arguments are those of :meth:`forward`. For each block there is ``(*batch, heads, tokens, tokens)``: rows attend
        to columns and sum to one, or are zero where a token attends to none. With a memory there follows, for each
        block, ``(*batch, heads, tokens, keys)``. More than 2**30 weights are a ValueError.

        >>> maps = HypTransformer(3, 8, layers=3, heads=2).eval().attention_maps(torch.randn(5, 3), is_causal=True)
        >>> len(maps), maps[0].shape
        (3, torch.Size([2, 5, 5]))
        """
        points = self._start(x, key_padding_mask)
        other = self._remembered(memory, memory_key_padding_mask)
        return self.encoder.attention_maps(points, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal, **other)

    def step(
        self,
        x: Float[Tensor, "*batch tokens features"],
        state: tuple[BlockState, ...] | None = None,
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        memory: Float[Tensor, "*batch keys ambient"] | None = None,
        memory_key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
    ) -> tuple[Float[Tensor, "*batch tokens ambient"], tuple[BlockState, ...]]:
        """The next tokens of a sequence, as the causal pass over all of it gives them.

        Hooks of this model and of its blocks belong to ``forward`` and do not run.

        Args:
            x: ``(*batch, tokens, in_features)``: one token, or several.
            state: what the step before returned; ``None`` at the first.
            key_padding_mask: ``(*batch, tokens)``, ``True`` where x is padding, to which no later step attends either.
            memory: as in :meth:`forward`, at the first step. The state holds its keys and values; given again, they are
                computed anew.
            memory_key_padding_mask: as in :meth:`forward`, beside ``memory``.

        Returns:
            Points ``(*batch, tokens, hidden_features + 1)`` of ``manifold_out``, and the state after them: that of each
            block, whose tensors have the batch first.

        Raises:
            TypeError: if ``state`` is not one of this model.
            ValueError: if it is of another batch or of other sizes, or there are more tokens than ``max_tokens``.

        >>> model, x = HypTransformer(3, 8, max_tokens=10).eval(), torch.randn(2, 6, 3)
        >>> first, state = model.step(x[:, :5])  # a prompt
        >>> last, state = model.step(x[:, 5:], state)
        >>> torch.allclose(last, model(x, is_causal=True)[:, 5:], atol=1e-4)
        True
        """
        checks.rows("x", x, self.in_features, "in_features", self.encoder.embedding)
        self.encoder.check_state(state)
        places = torch.arange(x.shape[-2], device=x.device)
        first = None if state is None else state[0]
        first = first.own if isinstance(first, DecoderState) else first
        if isinstance(first, tuple) and first[0].shape[:-3] != x.shape[:-2]:
            got = tuple(first[0].shape[:-3])
            raise ValueError(f"state must have the batch axes {tuple(x.shape[:-2])} of x, got {got}.")
        # Keys and values are as many as the tokens; sums hold their number, in each head.
        if isinstance(first, KeyValueState):
            places = places + first.key.shape[-2]
        elif isinstance(first, LinearState):
            places = places + first.tokens[..., :1, 0, 0].long()
        points = self._placed(without_padding(x, key_padding_mask), places)
        anew: dict[str, Tensor | None] = {"memory_key_padding_mask": memory_key_padding_mask}
        if state is None or memory is not None or self.manifold_memory is None:
            anew = self._remembered(memory, memory_key_padding_mask)
        return self.encoder.step(points, state, key_padding_mask, **anew)

    def curvatures(self) -> dict[str, Float[Tensor, " 1"]]:
        """The curvature of each manifold, named as in :meth:`holonomy.models.Hypformer.curvatures`.

        Of a decoder also ``"memory"``.
        """
        named = self.encoder.curvatures() | {"output": self.manifold_out.curvature}
        return named if self.manifold_memory is None else named | {"memory": self.manifold_memory.curvature}

    def _remembered(self, memory: Tensor | None, mask: Tensor | None) -> dict[str, Tensor | None]:
        """What blocks of a decoder are called with."""
        if (memory is None) != (self.manifold_memory is None):
            raise ValueError(
                f"memory must be given exactly if there is a manifold_memory, got {type(memory).__name__}."
            )
        if memory is None and mask is not None:
            raise ValueError(f"memory_key_padding_mask must be None without memory, got {type(mask).__name__}.")
        if memory is None:
            return {}
        checks.rows("memory", memory, self.hidden_features + 1, "hidden_features + 1")
        return {"memory": memory, "memory_key_padding_mask": mask}

    def _start(self, x: Tensor, key_padding_mask: Tensor | None) -> Float[Tensor, "*batch tokens ambient"]:
        """Points of a whole sequence."""
        checks.rows("x", x, self.in_features, "in_features", self.encoder.embedding)
        x = without_padding(x, key_padding_mask)
        return self._placed(x, torch.arange(x.shape[-2], device=x.device))

    def _placed(self, x: Tensor, places: Int[Tensor, "*#batch tokens"]) -> Float[Tensor, "*batch tokens ambient"]:
        """Points of the tokens, moved towards those of their places."""
        points = self.encoder.points(x)
        if self.positions is None:
            return points
        most = len(self.positions.unit)
        if x.shape[-2] > most:
            raise ValueError(f"x must have at most max_tokens = {most} tokens, got {x.shape[-2]}.")
        checks.codes("positions of x, after those of the state,", places, most, "max_tokens")
        return self.residual(points, self.positions(places).expand_as(points))
