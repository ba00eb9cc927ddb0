r"""Chromatic attention as it is defined: CSA eqs. 4 to 7 on whole tensors of pairs.

Axes are ``(graphs, i, j, channels)`` for pairs: node i attends to node j. A mask is boolean, ``True`` at nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from holonomy._shapes import Bool, Float
from holonomy.ops.dot_product import dot_product_attention
from holonomy.ops.heads import merge_heads, split_heads
from holonomy.structures import joint


def chromatic_filters(
    query: Float[Tensor, "graphs nodes channels"],
    key: Float[Tensor, "graphs nodes channels"],
    edge_bias: Float[Tensor, "graphs nodes nodes biases"] | None = None,
    mask: Bool[Tensor, "graphs nodes"] | None = None,
    *,
    heads: int,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "graphs nodes nodes channels"]:
    r"""The filters :math:`\tilde a(i, j)`: one number for each channel, with sum one over j. CSA eqs. 4 and 5.

    .. math:: a_c(i, j) = \exp\bigl( Q_i^h \cdot K_j^h / \sqrt{d_h} + E_{ij} \bigr), \qquad h \text{ the head of } c

    :math:`E_{ij}` has one bias for each channel (eq. 5) or for each head (eq. 4); the size of its last axis says which.
    With an activation :math:`\sigma` the filters are :math:`\exp \sigma(Q_i + K_j + E_{ij})` in each channel, without
    heads; without an activation the query would cancel in this additive form.
    """
    weights = _weights(query, key, _zero_padded_pairs(edge_bias, mask), mask, heads, activation)
    if mask is not None:
        weights = weights.masked_fill(~joint(mask, 2)[..., None, None], 0.0)
    return weights.expand(*weights.shape[:-1], query.shape[-1] // heads).flatten(-2)


def chromatic_attention_reference(
    query: Float[Tensor, "graphs nodes channels"],
    key: Float[Tensor, "graphs nodes channels"],
    value: Float[Tensor, "graphs nodes channels"],
    edge_bias: Float[Tensor, "graphs nodes nodes biases"] | None = None,
    edge_value: Float[Tensor, "graphs nodes nodes channels_v"] | None = None,
    mask: Bool[Tensor, "graphs nodes"] | None = None,
    *,
    heads: int,
    bias_map: Float[Tensor, "out biases"] | None = None,
    value_map: Float[Tensor, "channels channels_v"] | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
    keep: Float[Tensor, " graphs #nodes nodes"] | None = None,
) -> Float[Tensor, "graphs nodes channels"]:
    """The reference of :func:`~holonomy.ops.chromatic_attention.chromatic_attention`, with the same arguments."""
    if edge_bias is None and edge_value is None and activation is None and keep is None:
        q, k, v = (split_heads(x, heads) for x in (query, key, value))
        out = dot_product_attention(q, k, v, None if mask is None else mask[:, None, None, :])
        return zero_padding(merge_heads(out), mask)
    one_tensor = edge_value is edge_bias
    edge_bias = _zero_padded_pairs(edge_bias, mask)
    edge_value = edge_bias if one_tensor else _zero_padded_pairs(edge_value, mask)
    if edge_bias is not None and bias_map is not None:
        edge_bias = functional.linear(edge_bias, bias_map)
    if edge_value is not None and value_map is not None:
        edge_value = functional.linear(edge_value, value_map)
    weights = _weights(query, key, edge_bias, mask, heads, activation)
    if keep is not None:
        weights = weights * keep[..., None, None]
    values = value.to(weights.dtype).unflatten(-1, (heads, -1))
    if edge_value is not None:  # eq. 7
        out = (weights * (values[:, None] + edge_value.unflatten(-1, (heads, -1)))).sum(2)
    elif weights.shape[-1] == values.shape[-1]:  # eq. 6
        out = (weights * values[:, None]).sum(2)
    else:
        # Eq. 6 with one weight for each head is a matrix product.
        out = (weights[..., 0].permute(0, 3, 1, 2) @ values.transpose(1, 2)).transpose(1, 2)
    return zero_padding(out.flatten(-2).to(query.dtype), mask)


def _weights(
    query: Tensor, key: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int,
    activation: Callable[[Tensor], Tensor] | None,
) -> Tensor:  # fmt: skip
    """Normalised weights (graphs, i, j, heads, d / heads or 1), CSA eqs. 4 and 5."""
    q, k = query.unflatten(-1, (heads, -1)), key.unflatten(-1, (heads, -1))
    edges = None if bias is None else bias.unflatten(-1, (heads, -1))
    if activation is None:
        logits = ((q.transpose(1, 2) / math.sqrt(q.shape[-1])) @ k.permute(0, 2, 3, 1)).permute(0, 2, 3, 1)[..., None]
        logits = logits if edges is None else logits + edges
    else:
        summed = q[:, :, None] + k[:, None]
        logits = activation(summed if edges is None else summed + edges)
    if mask is not None:
        # A graph without nodes attends to its padding and is cleared afterwards: softmax of a row of -inf is nan.
        hidden = ~mask & mask.any(-1, keepdim=True)
        logits = logits.masked_fill(hidden[:, None, :, None, None], -math.inf)
    empty = (logits == -math.inf).all(2, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(2, dtype=torch.promote_types(logits.dtype, torch.float32))
    return weights.masked_fill(empty, 0.0)


def _zero_padded_pairs(edges: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if edges is None or mask is None:
        return edges
    return edges.masked_fill(~joint(mask, 2)[..., None], 0.0)


def zero_padding(out: Float[Tensor, "graphs nodes channels"], mask: Bool[Tensor, "graphs nodes"] | None) -> Tensor:
    """Zeros at padding."""
    return out if mask is None else out.masked_fill(~mask[..., None], 0.0)
