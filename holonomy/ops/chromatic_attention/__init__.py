r"""Chromatic attention as functions: a filter of channels for each pair of nodes (CSA section 3.2).

Axes: ``(graphs, nodes, channels)`` for nodes, ``(graphs, i, j, channels)`` for pairs: node i attends to node j.
Channels are ``heads`` blocks of equal width, head by head. A mask is boolean, ``True`` at nodes; values at padding, of
nodes or of pairs, have no effect, and the result there is zero.

The reference keeps about seven tensors of pairs times channels for the backward pass. The chunked form computes a few
graphs at a time, or a few rows of a large one, keeps two numbers for each node and channel, and recomputes the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holonomy._autograd import apply_function, transformed
from holonomy._shapes import Bool, Float
from holonomy.ops.chromatic_attention.chunked import ChunkedAttention, Options
from holonomy.ops.chromatic_attention.reference import chromatic_attention_reference, chromatic_filters, zero_padding

# Pairs times channels from which on chunks are used: of fewer, the reference trains up to twice as fast. At this size
# chunks train as fast as it, and are 1.1 to 1.4 times faster without gradients; of more they gain in both.
_FEWEST_ENTRIES = 2**16

__all__ = ["chromatic_attention", "chromatic_attention_reference", "chromatic_filters"]


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
) -> Float[Tensor, "graphs nodes channels"]:
    r"""Sums of messages through filters of channels, CSA eq. 7 (eq. 6 without edge values).

    .. math:: \sum_j \tilde a(i, j) \odot \bigl( V_j + E^{\mathrm{val}}_{ij} \bigr)

    with the filters of :func:`chromatic_filters`. With maps, the edge tensors are features: the bias is
    ``edge_bias @ bias_map.T``, the edge value ``edge_value @ value_map.T``, and no tensor of pairs times channels is
    stored. One tensor given as both is read once and gets one gradient. ``keep`` multiplies the filters, as dropout
    does.

    Without edges it is scaled dot-product attention. A bias of ``-inf`` forbids a pair; a node whose pairs are all
    forbidden gets zero. (In the additive form the activation is applied to ``-inf`` first, and SiLU of it is nan.)
    Softmax is computed in float32 at least. Second derivatives are those of the reference, at its cost.
    ``torch.func.grad`` works, ``vmap`` does not.

    The reference runs under ``torch.compile``, in forward mode, for few pairs times channels, and with biases for each
    head but no edge values, where no tensor of the reference is as large as pairs times channels.
    """
    biases = heads if edge_bias is None else edge_bias.shape[-1] if bias_map is None else bias_map.shape[0]
    channelwise = activation is not None or biases == query.shape[-1]
    use_chunked = (
        edge_bias is not None
        and (edge_value is not None or channelwise)
        and not torch.compiler.is_compiling()
        and not transformed()
        and query.numel() * query.shape[1] >= _FEWEST_ENTRIES
    )
    if edge_bias is None or not use_chunked:
        return chromatic_attention_reference(
            query, key, value, edge_bias, edge_value, mask, heads=heads, bias_map=bias_map, value_map=value_map,
            activation=activation, keep=keep,
        )  # fmt: skip
    options = Options(heads, activation, _entries(query), one_tensor=edge_value is edge_bias)
    value_edges = None if edge_value is None or options.one_tensor else edge_value.contiguous()
    inputs = (query, key, value, edge_bias.contiguous(), value_edges, bias_map, value_map, mask, keep)
    return zero_padding(apply_function(ChunkedAttention, *inputs, options)[0], mask)


def _entries(x: Tensor) -> int:
    """Entries of a buffer: on a CPU 1 MiB of float32 for each thread stays in its cache; a GPU wants large chunks."""
    return 2**18 * torch.get_num_threads() if x.device.type == "cpu" else 2**26
