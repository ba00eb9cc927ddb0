r"""Products with the adjacency matrix of a graph, with its self-loops: normalised on both sides, or averages.

Graphs come as ``edge_index``, ``(2, m)`` with sources in the first row and targets in the second, or as a
:class:`~holonomy.structures.Graph`. Self-loops that are listed are not counted twice; an edge listed twice weighs
two. With weights ``(m,)`` A has these entries, and a self-loop that is listed keeps its weight in place of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Float, Int
from holonomy.ops.csr import csr, multiply
from holonomy.structures import Graph


def looped_edges(
    edge_index: Int[Tensor, "2 edges"],
    nodes: int,
    dtype: torch.dtype,
    edge_weight: Float[Tensor, " edges"] | None = None,
) -> tuple[Int[Tensor, " entries"], Int[Tensor, " entries"], Float[Tensor, " entries"]]:
    """Sources, targets and weights of A + I, unsorted, the entries of I last; of float32 at least."""
    # Where an ``edge_weight`` is above one, all weights are divided by a power of two, so that their sums are finite.
    edge_index, loops = edge_index.long(), torch.arange(nodes, device=edge_index.device)
    source, target = torch.cat([edge_index, loops.expand(2, nodes)], dim=1)
    own = edge_index[0] == edge_index[1]
    at_loops = torch.ones_like(loops, dtype=_wide(dtype))  # bfloat16 counts to 256
    if edge_weight is None:
        at_edges = (~own).to(at_loops.dtype)
    else:
        edge_weight = edge_weight.to(at_loops.dtype)
        unit = numerics.power_of_two(torch.cat([edge_weight.detach().abs(), edge_weight.new_ones(1)]).amax())
        edge_weight = edge_weight / unit
        listed = torch.zeros_like(at_loops).index_add(0, edge_index[0], own.to(at_loops.dtype)) > 0
        kept = torch.zeros_like(at_loops).index_add(0, edge_index[0], edge_weight * own)
        at_loops, at_edges = torch.where(listed, kept, at_loops / unit), edge_weight * ~own
    return source, target, torch.cat([at_edges, at_loops])


def normalised_edges(
    edge_index: Int[Tensor, "2 edges"],
    nodes: int,
    dtype: torch.dtype,
    edge_weight: Float[Tensor, " edges"] | None = None,
) -> tuple[Int[Tensor, " entries"], Int[Tensor, " entries"], Float[Tensor, " entries"]]:
    """The entries of :math:`D^{-1/2} (A + I) D^{-1/2}`, unsorted, those of I last."""
    source, target, weight = looped_edges(edge_index, nodes, dtype, edge_weight)
    degree = weight.new_zeros(nodes).index_add(0, target, weight)
    # Without weights every node has its loop; with them a degree may be zero or less, and such a node keeps nothing.
    scale = torch.where(degree > 0, degree, 1.0).rsqrt() * (degree > 0)
    return source, target, (weight * scale[source] * scale[target]).to(dtype)


def propagation(
    edge_index: Int[Tensor, "2 edges"] | Graph,
    nodes: int,
    dtype: torch.dtype,
    edge_weight: Float[Tensor, " edges"] | None = None,
) -> Callable[[Tensor], Tensor]:
    r"""The map :math:`x \mapsto \hat A x` of a graph, differentiable in x and in the weights."""
    # CPU results repeat bit for bit. With weights, and where torch takes no CSR tensor, it is gather and ``index_add``.
    if (
        edge_weight is not None
        or torch.compiler.is_compiling()
        or _autograd.transformed()
        or getattr(edge_index, "is_meta", False)
    ):
        source, target, weight = normalised_edges(edge_list(edge_index), nodes, dtype, edge_weight)
        return partial(_gather, source=source, target=target, weight=weight)
    graph = edge_index if isinstance(edge_index, Graph) else _sorted_once(edge_index, nodes)
    incoming, outgoing = (
        csr(*neighbours, weight, (nodes, nodes)) for neighbours, weight in graph.normalised(_wide(dtype))
    )
    return partial(_propagate, forward=incoming, backward=outgoing)


def averaging(
    edge_index: Int[Tensor, "2 edges"] | Graph,
    nodes: int,
    dtype: torch.dtype,
    edge_weight: Float[Tensor, " edges"] | None = None,
) -> Callable[[Tensor], Tensor]:
    r"""The map :math:`x \mapsto D^{-1} (A + I)\, x`: the mean over each node and its neighbours, by weight."""
    # Zero where all weights are. Without weights it is by :func:`propagation`: D^{-1/2} A^ D^{1/2}, A^ its matrix.
    source, target, weight = looped_edges(edge_list(edge_index), nodes, dtype, edge_weight)
    degree = weight.new_zeros(nodes).index_add(0, target, weight)
    if edge_weight is not None:
        share = numerics.safe_div(weight, degree[target])
        return partial(_gather, source=source, target=target, weight=share)
    root = degree.sqrt().to(dtype)[:, None]
    propagate = propagation(edge_index, nodes, dtype)
    return lambda x: propagate(x * root) / root


def edge_list(edges: Int[Tensor, "2 edges"] | Graph) -> Int[Tensor, "2 edges"]:
    """The edges of a graph as ``edge_index``."""
    return edges.edge_index if isinstance(edges, Graph) else edges


# Of each tensor of edges its state, its numbers and the graph that was made of it, for as long as the tensor lives.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _sorted_once(edge_index: Tensor, nodes: int) -> Graph:
    """The graph of a list of edges, made anew where the list has changed in place."""
    if edge_index.is_inference():  # whose changes are not counted
        return Graph(edge_index, nodes)
    state = (edge_index.data_ptr(), edge_index._version, edge_index.shape, nodes)
    known = _known.get(edge_index)
    with _autograd.kept():
        if known is None or known[0] != state or checks.rewritten(edge_index, known[1]):
            known = _known[edge_index] = state, edge_index.clone(), Graph(edge_index, nodes)
    return known[2]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _gather(x: Tensor, *, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    messages = x.index_select(0, source).to(_wide(weight.dtype)) * weight[:, None]
    return messages.new_zeros(x.shape).index_add(0, target, messages).to(x.dtype)


def _propagate(x: Tensor, *, forward: Tensor, backward: Tensor) -> Tensor:
    return multiply(forward, x, lambda: backward).to(x.dtype)


def check_graph(
    x: Tensor, edges: Tensor | Graph, batch: Tensor | None = None, edge_weight: Tensor | None = None
) -> None:
    """Refuse node features, edges, their weights and the graphs of nodes that do not fit together."""
    if not isinstance(edges, Graph) or batch is not None:
        checks.graph(x, edge_list(edges), batch=batch)
    if edge_weight is not None:
        if isinstance(edges, Graph):
            raise ValueError(
                "edge_weight must be None beside a Graph, which has sorted its edges; pass the edge_index."
            )
        checks.floating("edge_weight", edge_weight)
        checks.shaped("edge_weight", edge_weight, edges.shape[1:], "(edges,) = ")
        checks.on_device(x.device, edge_weight=edge_weight)
    if not isinstance(edges, Graph):
        return
    if x.device != edges.device:
        raise ValueError(f"edge_index must be on the device of x ({x.device}), got {edges.device}.")
    if x.shape[:1] != (edges.num_nodes,):
        raise ValueError(f"x must have one row for each node of edge_index ({edges.num_nodes}), got {tuple(x.shape)}.")
