r"""N-simplicial attention of tokens to each other, or to those of a memory (Simplicial section 2).

Axes are ``(*batch, tokens, features)`` as in :class:`torch.nn.TransformerEncoder` with ``batch_first=True``; padding is
``True`` in a ``key_padding_mask`` and has no effect, whatever it holds. ``attn_mask`` is ``True`` where a pair must not
attend, other masks where something takes part. Projections have no bias, as printed; at N = 1 the softmax would not see
that of the keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.layers.attention import KeyValueAttention, Masks
from holonomy.ops.heads import head_count, merge_heads, refuse_memory, split_heads, without_padding, without_queries
from holonomy.ops.masks import allowed_pairs
from holonomy.ops.simplicial_attention import (
    check_window,
    refuse_lower_orders,
    simplicial_attention,
    simplicial_weights,
)
from holonomy.ops.simplicial_attention.logits import FORMS, Form, chunks, rotary
from holonomy.ops.simplicial_attention.paths import simplicial_path_attention


class SimplicialAttention(KeyValueAttention[nn.Linear]):
    r"""Multi-head N-simplicial self-attention, without the skip connection.

    .. math:: x'_i = W_O \bigoplus_h \sum_{k_1 .. k_N} A^h_{i k_1 .. k_N} \prod_{m=1}^N W^h_{V,m} x_{k_m}, \qquad
        A^h_i = \mathrm{softmax}\bigl( \langle W^h_{K,0} x_i, W^h_{K,1} x_{k_1}, \dots \rangle / \sqrt{d_h} \bigr)

    See :func:`~holonomy.ops.simplicial_attention.simplicial_attention` for the forms, the masks and the cost:
    :math:`n^{N+1}` in time, :math:`n^{N-1}` in memory. With ``form="determinant"`` queries and keys have the largest
    multiple of N + 1 channels up to :math:`d_h`, so that none is idle.

    Args:
        features: width d of a token.
        heads: number of heads; each has d / heads channels.
        order: N; 1 is ordinary attention.
        form: of the logits: ``"product"`` (section 2.2) or ``"determinant"`` (section 2.4).
        lower_orders: all orders 1 .. N in one softmax (appendix F.1).
        causal: keys later than the query take no part.
        window: keys that are w places from the query or further take no part; one number, or one for each key. The
            window is one of places in the sequence: renumbering the tokens changes the result.
        rope: turn queries and keys by their positions (section 2.4). Only for logits that a common rotation does not
            change: determinants, or products at N = 1.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if sizes do not fit, or ``rope`` has no meaning with the form.

    >>> SimplicialAttention(12, 2, order=2)(torch.randn(3, 5, 12)).shape
    torch.Size([3, 5, 12])
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        order: int = 2,
        form: Form = "product",
        lower_orders: bool = False,
        causal: bool = False,
        window: int | tuple[int, ...] | None = None,
        rope: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(lower_orders=lower_orders, causal=causal, rope=rope)
        checks.floating_dtype(dtype)
        self.features, self.heads = features, head_count(features, heads)
        self.order = checks.positive_int("order", order)
        checks.one_of("form", form, FORMS)
        self.form: Form = form
        self.lower_orders, self.causal, self.rope = lower_orders, causal, rope
        self.window = check_window(window, order)
        if rope and form == "product" and order > 1:
            raise ValueError("rope must be False with form 'product' and order > 1: rotations change these logits.")
        if rope and lower_orders:
            raise ValueError("rope must be False with lower_orders: each order needs chunks of another size.")
        width = features // heads
        # Determinants read chunks of N + 1 channels: a remainder would never get a gradient.
        if form == "determinant":
            width = chunks(width, order) * (order + 1)
        self.key = nn.Linear(features, (order + 1) * heads * width, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(features, order * features, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(features, features, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights that keep the variance of a token: products of N + 1 projections are of order one, too."""
        for linear in (self.key, self.value):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(self.features))
        self.out.reset_parameters()

    def projected(
        self, x: Float[Tensor, "*batch tokens features"], positions: Int[Tensor, "*#batch tokens"] | None = None
    ) -> tuple[list[Float[Tensor, "*batch heads tokens dim"]], list[Float[Tensor, "*batch heads tokens values"]]]:
        r"""Queries and keys :math:`K_0, \dots, K_N` and values :math:`V_1, \dots, V_N` of ``x``, with an axis of heads.

        They are ``(*batch, heads, tokens, dim)`` and ``(*batch, heads, tokens, values)``. ``positions`` of the tokens
        are for ``rope``, 0 .. n - 1 if left out; without ``rope`` they are a ValueError, as is another shape.
        """
        checks.rows("x", x, self.features, "features", self.key)
        if positions is not None and not self.rope:
            raise ValueError("positions must be None without rope, which they are for.")
        if positions is not None:
            checks.integers("positions", positions)
            checks.broadcasting("positions", positions, x.shape[:-1], 1, "(*batch, tokens)")
        # One product for K_0 .. K_N, cut afterwards.
        keys = [split_heads(slot, self.heads) for slot in self.key(x).chunk(self.order + 1, -1)]
        if self.rope:
            at = None if positions is None else positions[..., None, :]
            keys = [rotary(key, at, size=self.order + 1) for key in keys]
        return keys, [split_heads(slot, self.heads) for slot in self.value(x).chunk(self.order, -1)]

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        pair_mask: Bool[Tensor, "*#batch #tokens keys"] | None = None,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys features"] | None = None,
        positions: Int[Tensor, "*#batch tokens"] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Attend.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at padding; of the tokens of ``memory`` if there is one.
            mask: which simplexes there are, for every head: ``(*batch, tokens, keys, .., keys)``, N axes of keys.
            pair_mask: ``(*batch, tokens, keys)``, ``True`` where a token may attend to another; a simplex needs it of
                all its keys.
            attn_mask: the same in torch's words, ``True`` where a token must *not* attend to another: ``(tokens,
                keys)``, ``(*batch, heads, tokens, keys)``, what broadcasts to that, or ``(batch * heads, tokens,
                keys)``.
            is_causal: keys later than the query take no part, as with ``causal``.
            memory: ``(*batch, keys, features)``, of which all keys and values are.
            positions: of the tokens, for ``rope``; 0 .. n - 1 if left out.

        Returns:
            ``(*batch, tokens, features)``; the bias of the last map where x is padding, and at tokens that are in no
            simplex.

        Raises:
            TypeError: if a mask is not boolean.
            ValueError: if the shape of one does not fit, or for ``is_causal``, ``causal``, ``window`` or ``rope``
                beside ``memory``.
        """
        keys, values = self._keys_and_values(x, key_padding_mask, memory, positions, is_causal=is_causal)
        masks = self._masks(keys, key_padding_mask, mask, pair_mask, attn_mask, is_causal=is_causal)
        attended = self._mixed(keys, values, **masks)
        return self._result(attended, None if memory is not None else key_padding_mask)

    def attend(
        self,
        keys: list[Float[Tensor, "*batch heads _ dim"]],
        values: list[Float[Tensor, "*batch heads keys values"]],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        pair_mask: Bool[Tensor, "*#batch #tokens keys"] | None = None,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Attend with the keys and values that :meth:`projected` gave.

        The masks are those of :meth:`forward`, and so are result and errors.
        """
        masks = self._masks(keys, key_padding_mask, mask, pair_mask, attn_mask, is_causal=is_causal)
        return self._result(self._mixed(keys, values, **masks), key_padding_mask)

    def weights(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        pair_mask: Bool[Tensor, "*#batch #tokens keys"] | None = None,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys features"] | None = None,
        positions: Int[Tensor, "*#batch tokens"] | None = None,
    ) -> Float[Tensor, "..."]:
        """The weights A of all tuples of N keys, ``(*batch, heads, tokens, keys, .., keys)``, for few tokens.

        Arguments are those of :meth:`forward`. Of each token they sum to one, or are zero where x is padding or the
        token is in no simplex. With ``lower_orders``, whose tuples have several sizes, there is no such tensor, and a
        ``ValueError``.
        """
        refuse_lower_orders(lower_orders=self.lower_orders)
        keys, _ = self._keys_and_values(x, key_padding_mask, memory, positions, is_causal=is_causal)
        masks = self._masks(keys, key_padding_mask, mask, pair_mask, attn_mask, is_causal=is_causal)
        found = simplicial_weights(keys, window=self.window, form=self.form, **masks)
        return found if memory is not None else without_queries(found, key_padding_mask, self.order)

    def _keys_and_values(
        self, x: Tensor, padding: Tensor | None, memory: Tensor | None, positions: Tensor | None, *, is_causal: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What :meth:`projected` gives: queries of x, keys and values of it or of the memory."""
        keys = self._keys_of(x, padding, memory, is_causal=self.causal or is_causal)
        if memory is None:
            return self.projected(keys, positions)
        refuse_memory(rope=self.rope, window=self.window)
        (query, *_), _ = self.projected(x, positions)
        (_, *others), values = self.projected(keys)
        return [query, *others], values

    def _masks(
        self,
        keys: list[Tensor],
        padding: Tensor | None,
        mask: Tensor | None,
        pair_mask: Tensor | None,
        attn_mask: Tensor | None,
        *,
        is_causal: bool,
    ) -> dict[str, Any]:
        """Which simplexes there are, as the operator is told."""
        checks.flags(is_causal=is_causal)
        query, there = keys[0], keys[1].shape[-2]
        if mask is not None:
            shape = (*query.shape[:-3], query.shape[-2], *[there] * self.order)
            checks.broadcasting_mask("mask", mask, shape, self.order + 1, "(*batch, tokens, keys, .., keys)")
            mask = mask.unsqueeze(-self.order - 2)
        pairs = allowed_pairs(query, there, padding, pair_mask, attn_mask)
        return {"mask": mask, "pair_mask": pairs, "causal": self.causal or is_causal}

    def _mixed(self, keys: list[Tensor], values: list[Tensor], **masks: Any) -> Tensor:
        how: dict[str, Any] = {"window": self.window, "form": self.form, "lower_orders": self.lower_orders}
        return simplicial_attention(keys, values, **masks, **how)

    def _axis(self) -> tuple[int, str, nn.Module | None]:
        return self.features, "features", self.key

    def _projected(
        self, x: Tensor, padding: Tensor | None, memory: Tensor | None, *, is_causal: bool, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values of all N, on an axis of their own behind that of the heads."""
        checks.rows("x", x, self.features, "features", self.key)
        positions = torch.arange(first, first + x.shape[-2], device=x.device) if self.rope else None
        (query, *key), value = self._keys_and_values(x, padding, memory, positions, is_causal=is_causal)
        return query, torch.stack(key, -3), torch.stack(value, -3)

    def _average(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Tensor:
        keys = [query, *key.unbind(-3)]
        how = self._masks(keys, masks.padding, None, None, None, is_causal=masks.is_causal)
        return self._mixed(keys, [*value.unbind(-3)], **how)

    def _result(self, attended: Tensor, padding: Tensor | None) -> Tensor:
        return self.out(without_padding(merge_heads(attended), padding))

    def along_paths(
        self,
        keys: list[Float[Tensor, "*batch heads tokens dim"]],
        values: list[Float[Tensor, "*batch heads tokens values"]],
        neighbours: Int[Tensor, "*#batch tokens k"],
        scores: Float[Tensor, "*#batch tokens k"] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Attend along paths of neighbours only, in linear time (section 2.3): ``(*batch, tokens, features)``.

        ``keys`` and ``values`` are those of :meth:`projected`. ``neighbours`` ``(*batch, tokens, k)``, which a
        :class:`~holonomy.layers.simplicial.routers.PathRouter` chooses, are tokens, or -1 for none; if none is later
        than its token this is causal. ``scores`` ``(*batch, tokens, k)`` are added to the logits, one for each step of
        a path. A token from which no path starts has the bias of the last map. With ``lower_orders``, whose paths have
        other lengths, or a ``window`` it is a ValueError, as are other shapes.

        >>> layer = SimplicialAttention(8, 2)
        >>> layer.along_paths(*layer.projected(torch.randn(5, 8)), torch.zeros(5, 1, dtype=torch.int64)).shape
        torch.Size([5, 8])
        """
        checks.integers("neighbours", neighbours)
        shape = (*keys[0].shape[:-3], keys[0].shape[-2], *neighbours.shape[-1:])
        checks.broadcasting("neighbours", neighbours, shape, 2, "(*batch, tokens, k)")
        if scores is not None:
            checks.floating("scores", scores)
            checks.broadcasting("scores", scores, shape, 2, "(*batch, tokens, k)")
        if self.lower_orders:
            raise ValueError("lower_orders must be False for attention along paths, got True.")
        if self.window is not None:
            raise ValueError(
                f"window must be None for attention along paths, got {self.window}: neighbours say it all."
            )
        scores = None if scores is None else scores[..., None, :, :]
        mixed = simplicial_path_attention(keys, values, neighbours[..., None, :, :], form=self.form, scores=scores)
        return self.out(merge_heads(mixed))
