r"""Chromatic attention as pure functions: a filter of channels for each pair of nodes (CSA section 3.2).

Axes: ``(graphs, nodes, channels)`` for nodes, ``(graphs, i, j, channels)`` for pairs: node i attends, j is looked at.
Channels are ``heads`` blocks of equal width, head by head. A mask is boolean, ``True`` at nodes; what stands at
padding, in nodes or pairs, has no effect, and the result there is zero.

The plain definition keeps about seven tensors of pairs times channels for the way back. The fast form computes a few
graphs at a time, or a few rows of a large one, keeps two numbers a node and channel, and computes the rest again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomy._autograd import apply_function, transformed
from holonomy.ops.chromatic_attention.chunked import Options, RecomputedAttention
from holonomy.ops.dot_product import dot_product_attention
from holonomy.ops.heads import merge_heads, split_heads
from holonomy.structures import joint

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["chromatic_attention", "chromatic_filters", "plain_chromatic_attention"]

# Entries of a buffer: a MiB of float32 for each thread stays in its cache. A GPU wants large pieces.
_ENTRIES_OF_A_THREAD, _ENTRIES_OF_A_GPU = 2**18, 2**26


def chromatic_filters(
    query: Float[Tensor, "graphs nodes channels"],
    key: Float[Tensor, "graphs nodes channels"],
    edge_bias: Float[Tensor, "graphs nodes nodes biases"] | None = None,
    mask: Bool[Tensor, "graphs nodes"] | None = None,
    *,
    heads: int,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "graphs nodes nodes channels"]:
    r"""The filters :math:`\tilde a(i, j)` themselves, one number a channel, summing to one over j: CSA eqs. 4 and 5.

    .. math:: a_c(i, j) = \exp\bigl( Q_i^h \cdot K_j^h / \sqrt{d_h} + E_{ij} \bigr), \qquad h \text{ the head of } c

    :math:`E_{ij}` has one bias a channel (eq. 5) or one a head (eq. 4), as the last axis says. With an activation
    :math:`\sigma` they are :math:`\exp \sigma(Q_i + K_j + E_{ij})` in each channel, without heads; without one the
    query would cancel in this additive form.
    """
    weights = _weights(query, key, _cleaned(edge_bias, mask), mask, heads, activation)
    if mask is not None:
        weights = weights.masked_fill(~joint(mask, 2)[..., None, None], 0.0)
    return weights.expand(*weights.shape[:-1], query.shape[-1] // heads).flatten(-2)


def plain_chromatic_attention(
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
    """The definition of :func:`chromatic_attention`, with the same arguments."""
    if edge_bias is None and edge_value is None and activation is None and keep is None:
        q, k, v = (split_heads(x, heads) for x in (query, key, value))
        out = dot_product_attention(q, k, v, None if mask is None else mask[:, None, None, :])
        return _only_nodes(merge_heads(out), mask)
    same = edge_value is edge_bias
    edge_bias = _cleaned(edge_bias, mask)
    edge_value = edge_bias if same else _cleaned(edge_value, mask)
    if edge_bias is not None and bias_map is not None:
        edge_bias = torch.nn.functional.linear(edge_bias, bias_map)
    if edge_value is not None and value_map is not None:
        edge_value = torch.nn.functional.linear(edge_value, value_map)
    weights = _weights(query, key, edge_bias, mask, heads, activation)
    if keep is not None:
        weights = weights * keep[..., None, None]
    values = value.to(weights.dtype).unflatten(-1, (heads, -1))
    if edge_value is not None:
        out = (weights * (values[:, None] + edge_value.unflatten(-1, (heads, -1)))).sum(2)
    elif weights.shape[-1] == values.shape[-1]:
        out = (weights * values[:, None]).sum(2)
    else:
        out = (weights[..., 0].permute(0, 3, 1, 2) @ values.transpose(1, 2)).transpose(1, 2)
    return _only_nodes(out.flatten(-2).to(query.dtype), mask)


def chromatic_attention(
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
    chunk: int | None = None,
) -> Float[Tensor, "graphs nodes channels"]:
    r"""Sums of messages through filters of channels, CSA eq. 7 (eq. 6 without edge values).

    .. math:: \sum_j \tilde a(i, j) \odot \bigl( V_j + E^{\mathrm{val}}_{ij} \bigr)

    with the filters of :func:`chromatic_filters`. With maps, the edge tensors are features, and the bias is
    ``edge_bias @ bias_map.T``, the edge value ``edge_value @ value_map.T``: then no tensor of pairs times channels
    exists at any time. One tensor given as both is read once and gets one gradient.

    Without edges it is scaled dot-product attention. A bias of ``-inf`` forbids a pair; where it forbids all j, the sum
    is zero. (Not in the additive form, whose activation makes of it what it likes: SiLU makes nan.) Softmax is computed
    in float32 at least. Gradients of gradients are right: whenever autograd is asked for them, the plain definition is
    differentiated instead, at its price.
    ``torch.func.grad`` works, ``vmap`` does not.
    ``torch.compile`` takes the plain definition, and so do head-wise biases without edge values, where nothing is as
    large as pairs times channels.
    """
    biases = heads if edge_bias is None else edge_bias.shape[-1] if bias_map is None else bias_map.shape[0]
    filters = activation is not None or biases == query.shape[-1]
    fast = not (torch.compiler.is_compiling() or transformed())
    if edge_bias is None or not fast or (edge_value is None and not filters) or not query.numel():
        return plain_chromatic_attention(
            query, key, value, edge_bias, edge_value, mask, heads=heads, bias_map=bias_map, value_map=value_map,
            activation=activation, keep=keep,
        )  # fmt: skip
    if chunk is None:
        of_cpu = _ENTRIES_OF_A_THREAD * torch.get_num_threads()
        chunk = of_cpu if query.device.type == "cpu" else _ENTRIES_OF_A_GPU
    options = Options(heads, activation, chunk, plain_chromatic_attention, one_tensor=edge_value is edge_bias)
    second = None if edge_value is None or options.one_tensor else edge_value.contiguous()
    inputs = (query, key, value, edge_bias.contiguous(), second, bias_map, value_map, mask, keep)
    return _only_nodes(apply_function(RecomputedAttention, *inputs, options)[0], mask)


def _weights(
    query: Tensor, key: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int,
    activation: Callable[[Tensor], Tensor] | None,
) -> Tensor:  # fmt: skip
    """Normalised weights (graphs, i, j, heads, d / heads or 1)."""
    q, k = query.unflatten(-1, (heads, -1)), key.unflatten(-1, (heads, -1))
    edges = None if bias is None else bias.unflatten(-1, (heads, -1))
    if activation is None:
        logits = ((q.transpose(1, 2) / math.sqrt(q.shape[-1])) @ k.permute(0, 2, 3, 1)).permute(0, 2, 3, 1)[..., None]
        logits = logits if edges is None else logits + edges
    else:
        summed = q[:, :, None] + k[:, None]
        logits = activation(summed if edges is None else summed + edges)
    if mask is not None:
        # A graph without nodes attends to its padding, and is cleared afterwards: a row of -inf has no softmax.
        hidden = ~mask & mask.any(-1, keepdim=True)
        logits = logits.masked_fill(hidden[:, None, :, None, None], -math.inf)
    empty = (logits == -math.inf).all(2, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(2, dtype=torch.promote_types(logits.dtype, torch.float32))
    return weights.masked_fill(empty, 0.0)


def _cleaned(edges: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if edges is None or mask is None:
        return edges
    return edges.masked_fill(~joint(mask, 2)[..., None], 0.0)


def _only_nodes(out: Tensor, mask: Tensor | None) -> Tensor:
    return out if mask is None else out.masked_fill(~mask[..., None], 0.0)
