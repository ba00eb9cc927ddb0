"""One block of a hyperbolic transformer (Hypformer section 4.6, figure 4), and of a decoder that reads a memory.

Points are ambient ``(..., d+1)``, time first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._parts import Group
from holonomy._shapes import Bool, Float
from holonomy.layers.hyperbolic.attention.linear import HypLinearAttention
from holonomy.layers.hyperbolic.attention.softmax import HypSoftmaxAttention
from holonomy.layers.hyperbolic.feedforward import ActivationDropout, FeedForward
from holonomy.layers.hyperbolic.linear import HTC
from holonomy.layers.hyperbolic.midpoint import HypPositionalEncoding, HypResidual, add_and_norm
from holonomy.layers.hyperbolic.norms import HypLayerNorm, HypRMSNorm
from holonomy.layers.hyperbolic.refinement import HRC, HypDropout, drop_some, resolve
from holonomy.manifolds import Lorentz
from holonomy.manifolds.lorentz import require_lorentz
from holonomy.ops.heads import KeyValueState, check_memory, without_padding
from holonomy.ops.linear_attention.causal import LinearState
from holonomy.ops.linear_attention.reference import AVERAGES, Average
from holonomy.ops.softmax_attention import SIMILARITIES, Similarity


class DecoderState(NamedTuple):
    """What a block with ``manifold_memory`` keeps, batch axes first.

    Attributes:
        own: of the tokens so far, by its attention.
        memory: of the memory, whose keys and values are computed once.
    """

    own: LinearState | KeyValueState
    memory: LinearState | KeyValueState


# A state holds tensors alone, so that torch.load(weights_only=True) may make one.
torch.serialization.add_safe_globals([DecoderState])

# What a block keeps of the tokens so far.
BlockState = LinearState | KeyValueState | DecoderState

Norm = Literal["layer", "rms"]
_NORMS: dict[str, type[HypLayerNorm | HypRMSNorm]] = {"layer": HypLayerNorm, "rms": HypRMSNorm}


class HypformerBlock(nn.Module):
    """Position, attention, residual, LayerNorm, feed-forward, residual, LayerNorm: one block of figure 4.

    Residuals are Lorentzian midpoints of two points of one manifold; the last norm moves the result to the next
    block's curvature.

    Args:
        features: dimension of the space.
        heads: number of attention heads, a divisor of ``features``.
        manifold_in: where the input lies.
        manifold_out: where the output lies; ``manifold_in`` if left out.
        manifold_attention: where queries, keys and values lie; ``manifold_in`` if left out.
        manifold_feedforward: where the hidden layer of the feed-forward lies; ``manifold_in`` if left out.
        feedforward: dimension of that hidden layer; ``4 * features`` if left out.
        attention: ``"linear"`` (eqs. 14-19) or ``"softmax"`` (eqs. 3-5).
        similarity: what softmax attention compares, see :class:`~holonomy.layers.HypSoftmaxAttention`.
        power: the sharpening exponent p of linear attention (eq. 19).
        average: of linear attention: ``"space"`` parts as printed, or the ``"midpoint"``.
        rope: of softmax attention: rotary positions. Linear attention takes none: turned before the feature map, its
            weights are no function of differences of positions; after it, some are negative, and what they mix is no
            average.
        manifold_memory: for a decoder of sequences, where the points of a ``memory`` lie: between the attention among
            its tokens and the feed-forward the block attends to these points, with a residual and a norm of its own.
        token_positions: move each token towards a position computed from it (eq. 20).
        dropout: probability of dropping a space coordinate after attention and inside the feed-forward.
        activation: of the feed-forward, a function of space parts.
        norm: after each residual, ``"layer"`` for :class:`~holonomy.layers.HypLayerNorm` or ``"rms"`` for
            :class:`~holonomy.layers.HypRMSNorm`.
        norm_eps: added to the variance or mean square by the norms; up to 1, a larger one buys a smaller
            Lipschitz constant.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        ValueError: if a choice is not allowed, or an option has no effect beside the others.

    >>> block = HypformerBlock(8, 2, Lorentz(-1.0))
    >>> block(block.manifold_in.lift(torch.zeros(5, 8))).shape
    torch.Size([5, 9])
    """

    def __init__(
        self,
        features: int,
        heads: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        manifold_attention: Lorentz | None = None,
        manifold_feedforward: Lorentz | None = None,
        feedforward: int | None = None,
        attention: Literal["linear", "softmax"] = "linear",
        similarity: Similarity = "geodesic_squared",
        power: float = 2.0,
        average: Average = "space",
        rope: bool = False,
        manifold_memory: Lorentz | None = None,
        token_positions: bool = True,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        norm: Norm = "layer",
        norm_eps: float = numerics.LAYER_NORM_EPS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(rope=rope, token_positions=token_positions)
        checks.one_of("attention", attention, ("linear", "softmax"))
        checks.one_of("similarity", similarity, SIMILARITIES)
        checks.one_of("average", average, AVERAGES)
        checks.in_range("dropout", dropout, 0.0, 1.0)
        normalise = _NORMS[checks.one_of("norm", norm, tuple(_NORMS))]
        checks.in_range("norm_eps", norm_eps, 0.0, math.inf)
        require_lorentz("manifold_in", manifold_in)
        inner = {"attention": manifold_attention, "feedforward": manifold_feedforward, "memory": manifold_memory}
        for name, manifold in inner.items():
            if manifold is not None:
                require_lorentz(f"manifold_{name}", manifold)
        checks.in_range("power", power, 1.0, math.inf)
        _refuse_unread(attention, similarity=similarity, rope=rope, power=power, average=average)
        hidden = 4 * features if feedforward is None else checks.positive_int("feedforward", feedforward)
        self.manifold_in = manifold_in
        _, self.manifold_attention = resolve(manifold_in, manifold_attention, "manifold_attention")
        _, self.manifold_feedforward = resolve(manifold_in, manifold_feedforward, "manifold_feedforward")
        inner = self.manifold_feedforward
        self.position: HypPositionalEncoding | nn.Identity = nn.Identity()
        if token_positions:
            self.position = HypPositionalEncoding(features, manifold_in, device=device, dtype=dtype)
        how: dict[str, Any] = {"manifold_hidden": self.manifold_attention, "device": device, "dtype": dtype}
        attend = partial(HypSoftmaxAttention, features, heads, manifold_in, similarity=similarity, **how)
        if attention == "linear":
            attend = partial(HypLinearAttention, features, heads, manifold_in, power=power, average=average, **how)
        self.attention = attend(rope=True) if rope else attend()
        self.drop = HypDropout(dropout, manifold_in)
        self.residual = HypResidual(manifold_in)
        self.norm_attention = normalise(features, manifold_in, eps=norm_eps, device=device, dtype=dtype)
        self.feedforward = FeedForward(
            HTC(features, hidden, manifold_in, inner, device=device, dtype=dtype),
            HRC(ActivationDropout(activation, dropout), inner),
            HTC(hidden, features, inner, manifold_in, device=device, dtype=dtype),
            HypDropout(dropout, manifold_in),
        )
        self.manifold_memory, self.cross_attention = manifold_memory, None
        if manifold_memory is not None:
            self.cross_attention = attend()
            self.norm_cross = normalise(features, manifold_in, eps=norm_eps, device=device, dtype=dtype)
        self.norm_feedforward = normalise(features, manifold_in, manifold_out, eps=norm_eps, device=device, dtype=dtype)

    @property
    def manifold_out(self) -> Lorentz:
        """Where the output lies."""
        return self.norm_feedforward.manifold_out

    def forward(
        self,
        x: Float[Tensor, "... nodes ambient"],
        key_padding_mask: Bool[Tensor, "... keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "... keys ambient"] | None = None,
        memory_key_padding_mask: Bool[Tensor, "... keys"] | None = None,
        group: Group | None = None,
    ) -> Float[Tensor, "... nodes ambient"]:
        """Apply the block.

        Args:
            x: points of ``manifold_in``, one graph ``(nodes, d+1)`` or padded ones ``(graphs, nodes, d+1)``.
            key_padding_mask: ``(graphs, nodes)``, ``True`` where a node is padding and not to be attended to; without
                ``manifold_memory`` of the tokens of ``memory`` if there is one.
            attn_mask: pairs that must not attend, with softmax attention; see
                :class:`~holonomy.layers.HypSoftmaxAttention`.
            is_causal: no node attends to later ones.
            memory: points of ``manifold_memory`` to which x attends after itself; without one, points of
                ``manifold_in`` to which x attends instead of to itself.
            memory_key_padding_mask: with ``manifold_memory``, ``True`` at padding of the memory.
            group: with linear attention, processes that share the nodes, of which x are those of this one; a memory of
                ``manifold_memory`` is whole in each.

        Returns:
            Points of ``manifold_out``, shaped as ``x``.

        Raises:
            ValueError: if there is an ``attn_mask`` with linear attention, a ``group`` with softmax attention,
                ``is_causal`` beside ``group``, or beside ``memory`` without ``manifold_memory``, which needs a memory.
        """
        checks.vectors(x=x)
        after, memory = (None, memory) if self.cross_attention is None else (memory, None)
        x = self._placed(x, key_padding_mask, memory)
        # An attention of the user's own need not know of processes.
        shared = {} if group is None else {"group": group}
        attended = self.attention(
            x, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal, memory=memory, **shared
        )
        return self._fed_forward(self._crossed(self._added(x, attended), after, memory_key_padding_mask))

    def weights(
        self,
        x: Float[Tensor, "*batch nodes ambient"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys ambient"] | None = None,
        memory_key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
    ) -> Float[Tensor, "*batch heads nodes keys"]:
        """The weights of the attention, ``(*batch, heads, nodes, keys)``.

        With ``manifold_memory`` and a memory they are those of the attention to it. Arguments are those of
        :meth:`forward`, see :meth:`holonomy.layers.HypSoftmaxAttention.weights`.
        """
        checks.vectors(x=x)
        masks: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal}
        if self.cross_attention is None or memory is None:
            if memory_key_padding_mask is not None:
                raise ValueError("memory_key_padding_mask must be None without a memory beside manifold_memory.")
            x = self._placed(x, key_padding_mask, memory)
            return self.attention.weights(x, key_padding_mask, **masks, memory=memory)
        x = self._placed(x, key_padding_mask, None)
        x = self._added(x, self.attention(x, key_padding_mask, **masks))
        memory = self._remembered(x, memory, memory_key_padding_mask)
        return self.cross_attention.weights(x, memory_key_padding_mask, memory=memory)

    def step(
        self,
        x: Float[Tensor, "... nodes ambient"],
        state: BlockState | None = None,
        key_padding_mask: Bool[Tensor, "... nodes"] | None = None,
        *,
        memory: Float[Tensor, "... keys ambient"] | None = None,
        memory_key_padding_mask: Bool[Tensor, "... keys"] | None = None,
    ) -> tuple[Float[Tensor, "... nodes ambient"], BlockState]:
        """The next tokens of a sequence and the state after them, see :meth:`holonomy.layers.HypSoftmaxAttention.step`.

        The state is that of the attention, or a :class:`DecoderState`. With ``manifold_memory`` the first step takes a
        ``memory``, whose keys and values the state holds; given again, they are computed anew. That no step had one is
        a ValueError. Hooks of this block and of its attention belong to ``forward`` and do not run.

        >>> block = HypformerBlock(8, 2, Lorentz(-1.0))
        >>> x = block.manifold_in.lift(torch.randn(6, 8))
        >>> first, state = block.step(x[:5])
        >>> last, state = block.step(x[5:], state)
        >>> torch.allclose(torch.cat([first, last]), block(x, is_causal=True), atol=1e-4)
        True
        """
        checks.vectors(x=x)
        if self.cross_attention is None:
            x, after = self._stepped(x, state, key_padding_mask)
            return self._fed_forward(self._crossed(x, memory, memory_key_padding_mask)), after
        own, there = self._parts(state)
        if memory is not None or there is None:
            kept = self._remembered(x, memory, memory_key_padding_mask)
            there = self.cross_attention.remember(kept, memory_key_padding_mask)
        elif memory_key_padding_mask is not None:
            raise ValueError("memory_key_padding_mask must be None without memory: the state holds that of its own.")
        x, after = self._stepped(x, own, key_padding_mask)
        x = self._read(x, self.cross_attention.recall(x, cast("Any", there)))
        return self._fed_forward(x), DecoderState(after, there)

    def _parts(self, state: BlockState | None) -> tuple[Any, Any]:
        """What a decoder keeps of its tokens, and of its memory."""
        if state is not None and not isinstance(state, DecoderState):
            raise TypeError(f"state must be what step returned, a DecoderState, got {type(state).__name__}.")
        own, there = (None, None) if state is None else state
        if (own is None or there is None) and state is not None:
            raise TypeError("state must be what step returned, got a DecoderState in which a part is None.")
        return own, there

    def _stepped(
        self, x: Tensor, state: Any, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, LinearState | KeyValueState]:
        """The next tokens after the attention, which refuses the state of the other one."""
        x = self._placed(x, key_padding_mask, None)
        attended, after = self.attention.step(x, state, key_padding_mask)
        return self._added(x, attended), after

    def _placed(self, x: Tensor, key_padding_mask: Tensor | None, memory: Tensor | None) -> Tensor:
        """Tokens with their positions; a mask may be that of the memory."""
        # Padding has no effect on other tokens, but the residual would pass it on, and it may be infinite.
        return self.position(without_padding(x, key_padding_mask) if memory is None else x)

    def _added(self, x: Tensor, attended: Tensor) -> Tensor:
        """Tokens after the attention."""
        return add_and_norm(self.residual, self.norm_attention, x, drop_some(self.drop, attended))

    def _crossed(self, x: Tensor, memory: Tensor | None, mask: Tensor | None) -> Tensor:
        """Tokens after a decoder's attention to the memory (Vaswani et al. 2017, figure 1, right)."""
        if self.cross_attention is None:
            for name, given in (("memory", memory), ("memory_key_padding_mask", mask)):
                if given is not None:
                    raise ValueError(f"{name} must be None without manifold_memory, got {type(given).__name__}.")
            return x
        return self._read(x, self.cross_attention(x, mask, memory=self._remembered(x, memory, mask)))

    def _read(self, x: Tensor, found: Tensor) -> Tensor:
        """Tokens with what they found in the memory."""
        return add_and_norm(self.residual, self.norm_cross, x, drop_some(self.drop, found))

    def _remembered(self, x: Tensor, memory: Tensor | None, mask: Tensor | None) -> Tensor:
        """The memory on the manifold of the tokens."""
        if memory is None or self.manifold_memory is None:
            raise ValueError("memory must be given to a block with manifold_memory, got None.")
        check_memory(x, memory, x.shape[-1], is_causal=False)
        memory = without_padding(memory, mask, "memory_key_padding_mask")
        return self.manifold_memory.rescale(memory, self.manifold_in)

    def _fed_forward(self, x: Tensor) -> Tensor:
        return add_and_norm(self.residual, self.norm_feedforward, x, self.feedforward(x))


# Of each attention, the options of the other with their defaults.
_UNREAD = {"linear": {"similarity": "geodesic_squared", "rope": False}, "softmax": {"power": 2.0, "average": "space"}}


def _refuse_unread(attention: str, **options: float | str | bool) -> None:
    for name, default in _UNREAD[attention].items():
        if options[name] != default:
            raise ValueError(
                f"{name} must be left out with attention {attention!r}, which does not take it, got {options[name]!r}."
            )
