"""A pre-norm transformer layer of N-simplicial attention: all simplexes, or along paths (Simplicial section 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import checks
from holonomy._shapes import Bool, Float
from holonomy.layers.simplicial.attention import SimplicialAttention
from holonomy.layers.simplicial.routers import ExpertChoice, PathRouter
from holonomy.layers.tokens.encoder import PreNormLayer
from holonomy.ops.heads import without_padding
from holonomy.ops.simplicial_attention.logits import Form


class SimplicialEncoderLayer(PreNormLayer):
    r"""Simplicial attention and an MLP, each with layer normalisation before and a skip connection around it.

    .. math:: H = X + \mathrm{Attention}(\mathrm{LN}\,X), \qquad H + \mathrm{MLP}(\mathrm{LN}\,H)

    Args:
        features: width d of a token.
        heads: number of attention heads.
        order: N; 1 is an ordinary transformer layer.
        feedforward: width of the MLP's one hidden layer, 4 d if left out.
        form: of the logits, ``"product"`` or ``"determinant"``.
        lower_orders: all orders 1 .. N in one softmax.
        causal: keys later than the query take no part.
        rope: turn queries and keys by their positions, see
            :class:`~holonomy.layers.simplicial.attention.SimplicialAttention`.
        steps: attend only along paths of this many steps from each token, which
            :class:`~holonomy.layers.simplicial.routers.PathRouter` chooses by the first two projections of the
            layer before (section 2.3); all simplexes if left out.
        distinct: with ``steps``: none to a token that is equal to an earlier one.
        capacity: attend among this many tokens only, by :class:`~holonomy.layers.simplicial.routers.ExpertChoice`;
            the others get the MLP alone.
        dropout: probability that an entry of what attention or MLP add, or of the hidden layer, is dropped.
        activation: of the MLP.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size, probability or choice is not allowed, or options exclude each other; from ``weights`` and
            ``step`` with ``steps`` or ``capacity``, which have none.

    >>> layer, x = SimplicialEncoderLayer(12, 2), torch.randn(6, 12)
    >>> first, state = layer.step(x[:5])
    >>> last, state = layer.step(x[5:], state)
    >>> torch.allclose(torch.cat([first, last]), layer(x, is_causal=True), atol=1e-5)
    True
    """

    attention: SimplicialAttention | ExpertChoice

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        order: int = 2,
        feedforward: int | None = None,
        form: Form = "product",
        lower_orders: bool = False,
        causal: bool = False,
        rope: bool = False,
        steps: int | None = None,
        distinct: bool = False,
        capacity: int | None = None,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.flags(lower_orders=lower_orders, causal=causal, rope=rope, distinct=distinct)
        if steps is not None:
            checks.positive_int("steps", steps)
        if steps is not None and lower_orders:
            raise ValueError("steps must be None with lower_orders, whose paths have other lengths.")
        if distinct and steps is None:
            raise ValueError("distinct must be False without steps, which it is about.")
        if capacity is not None and (causal or rope or steps is not None):
            raise ValueError(
                "capacity must be None with causal, rope or steps: the choice looks ahead and moves tokens."
            )
        attention = SimplicialAttention(
            features,
            heads,
            order=order,
            form=form,
            lower_orders=lower_orders,
            causal=causal,
            rope=rope,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            features,
            attention if capacity is None else ExpertChoice(features, capacity, attention, device=device, dtype=dtype),
            feedforward=feedforward,
            dropout=dropout,
            activation=activation,
            device=device,
            dtype=dtype,
        )
        self.router = None
        if steps is not None:
            self.router = PathRouter(
                features, heads, steps, causal=causal, distinct=distinct, device=device, dtype=dtype
            )

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        pair_mask: Bool[Tensor, "*#batch #tokens keys"] | None = None,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys features"] | None = None,
        previous: tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """The layer's result ``(*batch, tokens, features)``, finite at padding.

        The arguments are those of :meth:`holonomy.layers.SimplicialAttention.forward`; a ``memory`` is not normalised.
        ``previous``, exactly with ``steps``, are queries and first keys ``(*batch, heads, tokens, dim)`` of the layer
        before. A mask of pairs, ``is_causal`` or a memory beside ``steps`` or ``capacity`` is a ValueError.
        """
        masks: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "memory": memory}
        if not self._chooses:
            self._check_previous(x, previous)
            return self._around(x, key_padding_mask, pair_mask=pair_mask, **masks)
        checks.flags(is_causal=is_causal)
        if is_causal:
            raise ValueError("is_causal must be False with steps or capacity, which choose the simplexes, got True.")
        self._refuse_masks(pair_mask=pair_mask, attn_mask=attn_mask, memory=memory)
        return self.with_projections(x, key_padding_mask, previous=previous)[0]

    def with_projections(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        pair_mask: Bool[Tensor, "*#batch #tokens tokens"] | None = None,
        previous: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Float[Tensor, "*batch tokens features"], tuple[Tensor, Tensor] | None]:
        """The result of :meth:`forward`, and what the next layer may choose its paths by.

        That are queries and first keys of this layer, ``(*batch, heads, tokens, dim)``; None where only some tokens
        have any.
        """
        self._check_previous(x, previous)
        self._refuse_masks(pair_mask=pair_mask)
        x = self._unpadded(x, key_padding_mask, None)
        # H = X + Attention(LN X); what padding holds after the norm is its bias, which keys must not see.
        normed, handed = without_padding(self.norm_attention(x), key_padding_mask), None
        if isinstance(self.attention, ExpertChoice):
            attended = self.attention.weighted(normed, key_padding_mask)
        else:
            keys, values = self.attention.projected(normed)
            handed = keys[0], keys[1]
            if self.router is None or previous is None:
                attended = self.attention.attend(keys, values, key_padding_mask, pair_mask=pair_mask)
            else:
                neighbours, scores = self.router(normed, *previous, key_padding_mask)
                attended = self.attention.along_paths(keys, values, neighbours, scores)
        return self.fed_forward(x + self.branch(attended)), handed

    @property
    def _chooses(self) -> bool:
        """Whether ``steps`` or ``capacity`` choose among the simplexes."""
        return self.router is not None or isinstance(self.attention, ExpertChoice)

    def _refuse(self, method: str) -> None:
        if self._chooses:
            raise ValueError(f"steps and capacity must be None for {method}, which chooses no simplexes.")

    def _refuse_masks(self, **given: Tensor | None) -> None:
        for name, tensor in given.items():
            if tensor is not None and self._chooses:
                raise ValueError(f"{name} must be None with steps or capacity, which choose the simplexes.")

    def _check_previous(self, x: Tensor, previous: tuple[Tensor, Tensor] | None) -> None:
        if (previous is None) != (self.router is None):
            raise ValueError("previous must be the projections of the layer before where steps are set, else None.")
        checks.rows("x", x, self.features, "features", self.norm_attention)
        if previous is None or self.router is None:
            return
        if not isinstance(previous, tuple) or len(previous) != 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
            raise TypeError(f"previous must be a tuple of queries and keys, got {type(previous).__name__}.")
        leading = (*x.shape[:-2], self.router.heads, x.shape[-2])
        for part in previous:
            checks.vectors(previous=part)
            checks.shaped("previous", part, (*leading, part.shape[-1]), "(*batch, heads, tokens, dim) as x has them, ")
