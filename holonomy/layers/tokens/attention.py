r"""Attention of tokens with the exact softmax or by random features (TokenGT eq. 3 and section 5.2).

Axes are ``(*batch, tokens, features)``; a padding mask is boolean ``(*batch, tokens)``, ``True`` at padding, whose
content has no effect. Keys have no bias: softmax does not see it, and it would never receive a gradient.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._parts import Group
from holonomy._shapes import Bool, Float
from holonomy.layers.attention import KeyValueAttention, Masks
from holonomy.ops.dot_product import dot_product_attention
from holonomy.ops.heads import (
    KeyValueState,
    check_state,
    head_count,
    merge_heads,
    of_all_heads,
    refuse_shared_order,
    split_heads,
    without_padding,
)
from holonomy.ops.masks import masked_softmax, pair_masks, refuse_pairs
from holonomy.ops.performer import orthogonal_projection, performer_attention, redraw
from holonomy.ops.performer.causal import PerformerState, performer_attention_after


class TokenAttention(KeyValueAttention[nn.Linear]):
    r"""Multi-head attention of tokens to each other, TokenGT eq. 3, or to those of a memory.

    .. math:: \sum_h \alpha^h X w_h^V w_h^O, \qquad
        \alpha^h = \mathrm{softmax}\bigl( X w_h^Q (X w_h^K)^\top / \sqrt{d_H} \bigr)

    Args:
        features: width d of a token.
        heads: number of heads H.
        head_features: :math:`d_H`, of queries, keys and values; d / H if left out.
        kernel: ``"softmax"``, or ``"performer"``: FAVOR+, at a cost linear in the tokens.
        random_features: of ``"performer"``, :math:`2 d_H` if left out. They are drawn at construction and kept with
            the parameters; :meth:`redraw` draws others.
        dropout: probability that a weight of softmax attention is dropped in training.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size or choice is not allowed, or an option has no effect beside the others.

    >>> TokenAttention(8, 2)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    projection: Tensor | None

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        head_features: int | None = None,
        kernel: Literal["softmax", "performer"] = "softmax",
        random_features: int | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.features = checks.positive_int("features", features)
        self.heads = checks.positive_int("heads", heads)
        self.kernel = checks.one_of("kernel", kernel, ("softmax", "performer"))
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        if head_features is None:
            head_count(features, heads)
        width = features // heads if head_features is None else checks.positive_int("head_features", head_features)
        if kernel == "softmax" and random_features is not None:
            raise ValueError(f"random_features must be None with kernel 'softmax', got {random_features}.")
        if kernel == "performer" and dropout > 0:
            raise ValueError(f"dropout must be 0 with kernel 'performer', which has no weights to drop, got {dropout}.")
        self.query = nn.Linear(features, heads * width, device=device, dtype=dtype)
        self.key = nn.Linear(features, heads * width, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(features, heads * width, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(heads * width, features, device=device, dtype=dtype)
        projection = None
        if kernel == "performer":
            count = 2 * width if random_features is None else checks.positive_int("random_features", random_features)
            projection = orthogonal_projection(count, width, device=device, dtype=dtype)
        self.register_buffer("projection", projection)

    def reset_parameters(self) -> None:
        """Draw everything anew, random features among it."""
        for linear in (self.query, self.key, self.value, self.out):
            linear.reset_parameters()
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw other random features, from torch's seeded state without a generator; none for kernel ``"softmax"``."""
        redraw(self.projection, generator)

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys features"] | None = None,
        group: Group | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Attend.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at padding; of the tokens of ``memory`` if there is one.
            attn_mask: with kernel ``"softmax"``, as in :class:`torch.nn.MultiheadAttention`: boolean, ``True`` where a
                token must *not* attend to another, or floating-point, added to the logits. ``(tokens, keys)``,
                ``(*batch, heads, tokens, keys)``, what broadcasts to that, or ``(batch * heads, tokens, keys)``.
            is_causal: no token attends to later ones; with kernel ``"performer"`` still linear in time and memory.
            memory: ``(*batch, keys, features)``, to which x attends instead of to itself.
            group: with kernel ``"performer"``, processes that share the tokens: x, and ``memory`` if there is one, are
                those of this one, and attend to those of all. Random features must be the same on all.

        Returns:
            ``(*batch, tokens, features)``; the bias of the last map where x is padding, and at a token that may attend
            to none.

        Raises:
            TypeError: if a mask is of another dtype, or ``group`` is not a process group.
            ValueError: if a shape does not fit, there is an ``attn_mask`` with kernel ``"performer"`` or a ``group``
                with kernel ``"softmax"``, or for ``is_causal`` beside ``memory`` or ``group``.
        """
        query, key, value = self._projected(x, key_padding_mask, memory, is_causal=is_causal)
        if self.projection is None:
            if group is not None:
                raise ValueError(
                    "group must be None with kernel 'softmax', whose weights are of single pairs of tokens; kernel "
                    "'performer' takes tokens that processes share."
                )
            attended = self._average(query, key, value, Masks(key_padding_mask, attn_mask, is_causal))
        else:
            refuse_pairs(attn_mask)
            if group is not None:
                refuse_shared_order(is_causal=is_causal)
            mask = of_all_heads(key_padding_mask)
            attended = performer_attention(query, key, value, self.projection, mask, is_causal=is_causal, group=group)
        return self._result(attended, None if memory is not None else key_padding_mask)

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Float[Tensor, "*batch tokens features"],
        state: KeyValueState | PerformerState | None = None,
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, "*batch tokens features"], KeyValueState | PerformerState]:
        """The next tokens of a sequence and the state after them, see :meth:`holonomy.layers.HypSoftmaxAttention.step`.

        With kernel ``"performer"`` the state holds sums over keys, whose size does not depend on the number of tokens.
        """
        if self.projection is None:
            return super().step(x, cast("KeyValueState | None", state), key_padding_mask)
        query, key, value = self._projected(x, key_padding_mask, None, is_causal=True)
        start = PerformerState.empty(value, self.projection)
        before = start if state is None else check_state(cast("PerformerState", state), start)
        mask = of_all_heads(key_padding_mask)
        attended, after = performer_attention_after(query, key, value, self.projection, mask, before)
        return self._result(attended, key_padding_mask), after

    def _axis(self) -> tuple[int, str, nn.Module | None]:
        return self.features, "features", self.query

    def _split(self, project: nn.Linear, x: Tensor) -> Float[Tensor, "*batch heads tokens channels"]:
        return split_heads(project(x), self.heads)

    def _weights(self, query: Tensor, key: Tensor, masks: Masks) -> Float[Tensor, "*batch heads tokens keys"]:
        padding, attn_mask, is_causal = masks
        mask = of_all_heads(padding)
        if self.projection is None:
            hidden, bias = pair_masks(query, key.shape[-2], mask, attn_mask, is_causal=is_causal)
            return masked_softmax(query @ key.mT / math.sqrt(query.shape[-1]), hidden, bias)
        refuse_pairs(attn_mask)
        # The rows of the identity as values: the average of them is the row of weights.
        every = torch.eye(key.shape[-2], device=query.device, dtype=query.dtype).expand(*key.shape[:-1], -1)
        return performer_attention(query, key, every, self.projection, mask, is_causal=is_causal)

    def _average(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Tensor:
        """Averages with weights that are the softmax of logits; what torch's kernel skips by itself needs no mask."""
        padding, attn_mask, is_causal = masks
        keys, dropout = key.shape[-2], self.dropout if self.training else 0.0
        fused = is_causal and padding is None and attn_mask is None
        if query.shape[-2] != keys:  # in the line above it would make `fused` a symbol of the compiler, no bool
            fused = False
        hidden, bias = pair_masks(query, keys, of_all_heads(padding), attn_mask, is_causal=is_causal and not fused)
        allowed = None if hidden is None else ~hidden
        return dot_product_attention(query, key, value, allowed, bias=bias, is_causal=fused, dropout=dropout)

    def _result(self, attended: Tensor, padding: Tensor | None) -> Tensor:
        return self.out(without_padding(merge_heads(attended), padding))
