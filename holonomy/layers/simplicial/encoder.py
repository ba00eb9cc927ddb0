"""A pre-norm transformer layer of N-simplicial attention: all simplexes, or along paths (Simplicial section 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import checks
from holonomy.layers.simplicial.attention import ExpertChoice, PathRouter, SimplicialAttention
from holonomy.layers.tokens.encoder import PreNormLayer
from holonomy.ops.heads import without_padding
from holonomy.ops.simplicial_attention.logits import Form

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


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
            :class:`~holonomy.layers.simplicial.attention.PathRouter` chooses by the first two projections of the
            layer before (section 2.3); all simplexes if left out.
        distinct: with ``steps``: none to a token that is equal to an earlier one.
        capacity: attend among this many tokens only, by :class:`~holonomy.layers.simplicial.attention.ExpertChoice`;
            the others get the MLP alone.
        dropout: probability that an entry of what attention or MLP add, or of the hidden layer, is dropped.
        activation: of the MLP.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size, probability or choice is none of the allowed, or options exclude each other.

    >>> SimplicialEncoderLayer(12, 2, causal=True)(torch.randn(3, 5, 12)).shape
    torch.Size([3, 5, 12])
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
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        pair_mask: Bool[Tensor, "*#batch #tokens tokens"] | None = None,
        previous: tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Apply the layer.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at padding.
            pair_mask: ``(*batch, tokens, tokens)``, ``True`` where a token may attend to another.
            previous: as in :meth:`step`.

        Returns:
            ``(*batch, tokens, features)``; finite at padding.
        """
        return self.step(x, key_padding_mask, pair_mask=pair_mask, previous=previous)[0]

    def step(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        pair_mask: Bool[Tensor, "*#batch #tokens tokens"] | None = None,
        previous: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Float[Tensor, "*batch tokens features"], tuple[Tensor, Tensor] | None]:
        """Apply the layer, and hand on what the next one may choose its paths by.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at padding.
            pair_mask: ``(*batch, tokens, tokens)``, ``True`` where a token may attend to another.
            previous: with ``steps``: queries and first keys ``(*batch, heads, tokens, dim)`` of the layer before.

        Returns:
            ``(*batch, tokens, features)``, and queries and first keys of this layer, None where only some tokens
            have any.

        Raises:
            ValueError: if ``previous`` is missing or without use, or there is a pair mask beside paths or a choice.
        """
        if (previous is None) != (self.router is None):
            raise ValueError("previous must be the projections of the layer before where steps are set, else None.")
        if pair_mask is not None and (self.router is not None or isinstance(self.attention, ExpertChoice)):
            raise ValueError("pair_mask must be None with steps or capacity, which choose the simplexes.")
        checks.rows("x", x, self.features, "features", self.norm_attention)
        if pair_mask is not None:
            pairs = (*x.shape[:-1], x.shape[-2])
            checks.broadcasting_mask("pair_mask", pair_mask, pairs, 2, "(*batch, tokens, tokens)")
        if previous is not None and self.router is not None:
            _check_previous(previous, (*x.shape[:-2], self.router.gate.out_features, x.shape[-2]))
        x = without_padding(x, key_padding_mask)  # which goes nowhere, but would come out again
        # H = X + Attention(LN X); what padding holds after the norm is its bias, which keys must not see.
        normed, handed = without_padding(self.norm_attention(x), key_padding_mask), None
        if isinstance(self.attention, ExpertChoice):
            attended = self.attention.weighted(normed, key_padding_mask)
        else:
            keys, values = self.attention.projected(normed)
            handed = keys[0], keys[1]
            if self.router is None or previous is None:
                if key_padding_mask is not None:
                    there = ~key_padding_mask[..., None, :]
                    pair_mask = there if pair_mask is None else pair_mask & there
                attended = self.attention.attend(keys, values, pair_mask=pair_mask)
            else:
                neighbours, scores = self.router(normed, *previous, key_padding_mask)
                attended = self.attention.along_paths(keys, values, neighbours, scores)
        return self.fed_forward(x + self.branch(attended)), handed


def _check_previous(previous: tuple[Tensor, Tensor], leading: Sequence[int]) -> None:
    if not isinstance(previous, tuple) or len(previous) != 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
        raise TypeError(f"previous must be a tuple of queries and keys, got {type(previous).__name__}.")
    for part in previous:
        checks.vectors(previous=part)
        checks.shaped("previous", part, (*leading, part.shape[-1]), "(*batch, heads, tokens, dim) as x has them, ")
