"""N-simplicial attention as printed: all logits at once."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["two_simplicial_attention"]


def two_simplicial_attention(keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Simplicial, algorithm 2 at N = 2: one matrix product for the logits and one for the values.

    That is what einsum makes of it at best.
    """
    pairs = keys[0][..., :, None, :] * keys[1][..., None, :, :]
    logits = (pairs.flatten(-3, -2) @ keys[2].mT).unflatten(-2, pairs.shape[-3:-1]) / math.sqrt(keys[0].shape[-1])
    weights = logits.flatten(-2).softmax(-1).unflatten(-1, logits.shape[-2:])
    inner = (weights.flatten(-3, -2) @ values[1]).unflatten(-2, pairs.shape[-3:-1])
    return (inner * values[0][..., None, :, :]).sum(-2)
