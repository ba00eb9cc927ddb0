"""Masks of pairs of tokens, which all attentions take in the same words.

Masks of what is hidden are ``True`` there, as ``attn_mask`` of torch; masks of what is allowed are ``True`` where a
query may attend to a key. Axes are ``(*batch, heads, queries, keys)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from holonomy import checks, numerics
from holonomy._shapes import Bool, Float


def refuse_pairs(attn_mask: Tensor | None) -> None:
    """Refuse a mask of pairs where there are only sums over keys."""
    if attn_mask is not None:
        raise ValueError(
            "attn_mask must be None for linear attention, which never makes the weight of a single pair; "
            "is_causal and key_padding_mask are there for it."
        )


def later_keys(queries: int, keys: int, like: Tensor) -> Bool[Tensor, "queries keys"] | None:
    """Which keys come after each query, the queries being the last of the keys; None where none does."""
    if queries == 1:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=like.device).triu(keys - queries + 1)


def split_mask(
    attn_mask: Tensor | None, shape: Sequence[int], like: Tensor
) -> tuple[Bool[Tensor, "..."] | None, Float[Tensor, "..."] | None]:
    """Split torch's ``attn_mask`` into the pairs that it hides and what it adds to the logits of the others."""
    # A boolean mask is ``True`` at pairs that must not attend, a floating-point one is added to the logits. It
    # broadcasts to ``shape``, ``(*batch, heads, queries, keys)``, or is ``(batch * heads, queries, keys)``.
    if attn_mask is None:
        return None, None
    checks.tensor("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be boolean or floating-point, got {attn_mask.dtype}.")
    if len(shape) == 4 and attn_mask.shape == (shape[0] * shape[1], *shape[2:]):
        attn_mask = attn_mask.unflatten(0, shape[:2])
    checks.broadcasting("attn_mask", attn_mask, shape, 2, "(*batch, heads, nodes, keys)")
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    hidden = attn_mask == -math.inf
    # A lowest number of a wider dtype would become an infinity, and a row of those nan.
    return hidden, numerics.saturated(attn_mask.masked_fill(hidden, 0.0), like.dtype)


def pair_masks(
    query: Float[Tensor, "*batch query dim"],
    keys: int,
    padding: Bool[Tensor, "*#batch keys"] | None,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool,
) -> tuple[Bool[Tensor, "..."] | None, Float[Tensor, "..."] | None]:
    """Which pairs are hidden by any mask, and what is added to the logits of the others; queries are the last keys."""
    hidden, bias = split_mask(attn_mask, (*query.shape[:-1], keys), query)
    later = later_keys(query.shape[-2], keys, query) if is_causal else None
    for other in (later, None if padding is None else padding[..., None, :]):
        if other is not None:
            hidden = other if hidden is None else hidden | other
    return hidden, bias


def masked_softmax(
    logits: Float[Tensor, "*batch query keys"], hidden: Bool[Tensor, "..."] | None, bias: Float[Tensor, "..."] | None
) -> Float[Tensor, "*batch query keys"]:
    """Weights of pairs; zero where they are hidden, a row of zeros where all are."""
    if bias is not None:
        logits = logits + bias
    if hidden is None:
        return logits.softmax(-1)
    # The lowest finite number, because softmax of a row of -inf is nan. Such weights are set to zero afterwards.
    return logits.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(hidden, 0.0)


def allowed_pairs(
    query: Float[Tensor, "*batch heads query dim"],
    keys: int,
    padding: Bool[Tensor, "*batch keys"] | None,
    pair_mask: Bool[Tensor, "*#batch #query keys"] | None,
    attn_mask: Bool[Tensor, "..."] | None,
) -> Bool[Tensor, "..."] | None:
    """The pairs that no boolean mask hides: padding, pairs that may attend, and pairs that must not."""
    if attn_mask is not None:
        checks.boolean("attn_mask", attn_mask, None, "pairs that must not attend")
    hidden, _ = pair_masks(query, keys, None if padding is None else padding[..., None, :], attn_mask, is_causal=False)
    allowed = None if hidden is None else ~hidden
    if pair_mask is None:
        return allowed
    pairs = (*query.shape[:-3], query.shape[-2], keys)
    checks.broadcasting_mask("pair_mask", pair_mask, pairs, 2, "(*batch, tokens, keys)")
    return pair_mask[..., None, :, :] if allowed is None else pair_mask[..., None, :, :] & allowed
