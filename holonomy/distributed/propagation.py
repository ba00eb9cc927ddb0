"""Propagation ahead of training: its result is a feature of each node like any other, and rows of it are rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holonomy import checks
from holonomy.structures import Graph, Neighbours
from holonomy.structures.graph import array_slice, incoming_of, pieces


@torch.no_grad()
def propagate_rows(graph: Graph | Neighbours, x: Any, out: Any, *, entries: int = 2**20) -> None:
    r"""Write :math:`\hat A x`, :math:`\hat A = D^{-1/2} (A + I) D^{-1/2}`, some rows at a time.

    k calls, each of the result of the one before, give :math:`\hat A^k x`: what
    :class:`~holonomy.layers.Propagation` computes without teleport and GCNs without weights in between (Wu et al. 2019,
    *Simplifying Graph Convolutional Networks*). Afterwards a model reads rows, and needs no edges. Memory is that of a
    few numbers a node and of the rows of so many edges. The edges, x and out stay where they are, in files mapped to
    memory, say.

    Args:
        graph: on the CPU; its incoming edges alone where not all of it fits in memory, as
            :func:`~holonomy.structures.sort_edges` makes them.
        x: features ``(n, d)``: a numpy array of floating-point numbers, memory-mapped or not, or a tensor.
        out: where the result is written, an array or tensor of the same shape, not x itself.
        entries: about how many neighbours are gathered at once.

    Raises:
        TypeError: if ``x`` or ``out`` holds no floating-point numbers.
        ValueError: if shapes do not fit, or ``out`` shares memory with ``x``.

    >>> graph = Graph(torch.tensor([[0, 1], [1, 0]]), 3)
    >>> x, out = torch.tensor([[1.0], [3.0], [5.0]]), torch.empty(3, 1)
    >>> propagate_rows(graph, x, out)
    >>> out.flatten()
    tensor([2.0000, 2.0000, 5.0000])
    """
    checks.positive_int("entries", entries)
    edges = incoming_of(graph)
    start, nodes = edges.start.long(), len(edges.start) - 1
    for name, array in (("x", x), ("out", out)):
        checks.array(name, array)
        if len(array.shape) != 2 or array.shape[0] != nodes or array.shape[1] != x.shape[1]:
            wanted = f"(nodes, features) = ({nodes}, {x.shape[-1]})"
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(array.shape)}.")
        dtype = array_slice(array, slice(0, 0)).dtype
        if not dtype.is_floating_point:
            raise TypeError(f"{name} must hold floating-point numbers, got {dtype}.")
    checks.apart("out", out, "x", x)
    # Of float16, which counts to 2048, in float32.
    listed = torch.zeros(nodes, dtype=torch.promote_types(array_slice(x, slice(0, 0)).dtype, torch.float32))
    for rows in pieces(start, entries):
        source, row = _edges(edges, start, rows)
        listed[rows].index_add_(0, row, (source == row + rows.start).to(listed.dtype))
    scale = (start.diff() + 1 - listed).rsqrt()
    for rows in pieces(start, entries):
        source, row = _edges(edges, start, rows)
        own = array_slice(x, rows)
        weight = scale[source] * (source != row + rows.start)
        gathered = array_slice(x, source if isinstance(x, Tensor) else source.numpy())
        total = (own * scale[rows, None]).index_add_(0, row, gathered * weight[:, None]) * scale[rows, None]
        written: Any = total if isinstance(out, Tensor) else total.numpy()
        out[rows] = written


def _edges(edges: Neighbours, start: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """The sources of the edges to some rows, and which of these rows each leads to."""
    degree = start[rows.start : rows.stop + 1].diff()
    node = edges.node[start[rows.start] : start[rows.stop]].long()
    return node, torch.arange(len(degree)).repeat_interleave(degree)
