"""Chromatic self-attention written out, twice: as graph transformers write attention, and as lean as it gets."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["lean", "usual"]


def usual(
    query: Tensor, key: Tensor, value: Tensor, edge_bias: Tensor, edge_value: Tensor, mask: Tensor, *, heads: int,
    bias_map: Tensor | None = None, value_map: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """CSA eq. 7: scores clamped and exponentiated, masked, messages and edge values summed apart, then divided."""
    if bias_map is not None:
        edge_bias, edge_value = functional.linear(edge_bias, bias_map), functional.linear(edge_value, value_map)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (query, key, value))
    scores = torch.einsum("bihd,bjhd->bijh", q, k)[..., None] / math.sqrt(q.shape[-1])
    scores = torch.exp((scores + edge_bias.unflatten(-1, (heads, -1))).clamp(-5, 5))
    scores = scores * (mask[:, :, None] & mask[:, None, :])[..., None, None]
    messages = (scores * v[:, None]).sum(2) + (scores * edge_value.unflatten(-1, (heads, -1))).sum(2)
    return (messages / scores.sum(2)).flatten(-2)


def lean(
    query: Tensor, key: Tensor, value: Tensor, edge_bias: Tensor, edge_value: Tensor, mask: Tensor, *, heads: int,
    bias_map: Tensor | None = None, value_map: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same in as few tensors of pairs times channels as torch's operations allow; it knows no mask."""
    del mask
    if bias_map is not None:
        edge_bias, edge_value = functional.linear(edge_bias, bias_map), functional.linear(edge_value, value_map)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (query, key, value))
    scores = torch.einsum("bihd,bjhd->bijh", q, k)[..., None] / math.sqrt(q.shape[-1])
    filters = (scores + edge_bias.unflatten(-1, (heads, -1))).softmax(2)
    return (filters * (v[:, None] + edge_value.unflatten(-1, (heads, -1)))).sum(2).flatten(-2)
