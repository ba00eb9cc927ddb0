"""Dropout that is decided by what it is applied to, so that a layer and its loops drop the same entries.

An entry is dropped by its digits, wherever and in whatever order it is reached. A tensor of ones is a mask in the
making, which has no digits: it is drawn from torch's seeded state, in which layer and loops come to it in one order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

_drawn, _attended = functional.dropout, functional.scaled_dot_product_attention


@contextmanager
def decided_dropout() -> Iterator[None]:
    """Decide every dropout of torch that runs inside."""
    with (
        mock.patch.object(functional, "dropout", _dropout),
        mock.patch.object(functional, "scaled_dot_product_attention", _attention),
    ):
        yield


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return x
    if not x.requires_grad and bool((x == 1).all()):
        return _drawn(x, p)
    mantissa = torch.frexp(x.detach().abs())[0]
    # Neither one, where tanh ends, nor any other power of two is where the choice flips.
    return x * ((64 * mantissa + 0.37) % 1 >= p) / (1 - p)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    if dropout_p == 0.0:
        return _attended(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
    logits = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones_like(logits, dtype=torch.bool).tril()
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    return _dropout(logits.softmax(-1), dropout_p) @ value
