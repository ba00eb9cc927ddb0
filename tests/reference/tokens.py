"""Tokens, their transformer and random features again, from TokenGT's and Performer's equations, as loops.

Functions of ``(module, *inputs)`` read a module's parameters by name and its options, nothing else of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def features(x: Tensor, projection: Tensor) -> list[Tensor]:
    """Positive random features, Performer eq. 5: exp(w.x - |x|^2/2) / sqrt(F)."""
    square = sum(entry * entry for entry in x)
    return [
        torch.exp(sum(a * b for a, b in zip(row, x, strict=True)) - square / 2) / math.sqrt(len(projection))
        for row in projection
    ]


def kernel_attention(query: Tensor, key: Tensor, value: Tensor, projection: Tensor, mask: Tensor, scale: float):
    """One head, axes (n, d): query i averages the values with weights phi(q_i).phi(k_j); mask (n,) True at no key."""
    rows = []
    for q in query:
        numerator, denominator = value.new_zeros(value.shape[-1]), value.new_zeros(())
        of_query = features(q * math.sqrt(scale), projection)
        for k, v, hidden in zip(key, value, mask, strict=True):
            if hidden:
                continue
            of_key = features(k * math.sqrt(scale), projection)
            weight = sum(a * b for a, b in zip(of_query, of_key, strict=True))
            numerator, denominator = numerator + weight * v, denominator + weight
        rows.append(numerator / denominator if denominator > 0 else numerator)
    return torch.stack(rows)
