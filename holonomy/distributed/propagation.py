"""Propagation ahead of training: its result is a feature of each node like any other, and rows of it are rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holonomy import checks
from holonomy.structures import Graph


@torch.no_grad()
def propagate_rows(graph: Graph, x: Any, out: Any, *, entries: int = 2**20) -> None:
    r"""Write :math:`\hat A x`, :math:`\hat A = D^{-1/2} (A + I) D^{-1/2}`, some rows at a time.

    k calls, each of the result of the one before, give :math:`\hat A^k x`: what
    :class:`~holonomy.layers.Propagation` computes without teleport and GCNs without weights in between (Wu et al. 2019,
    *Simplifying Graph Convolutional Networks*). Afterwards a model reads rows, and needs no edges. Memory is that of
    the graph and of the rows of so many edges; x and out stay where they are, in files mapped to memory, say.

    Args:
        graph: on the CPU.
        x: features ``(n, d)``: a numpy array of floating-point numbers, memory-mapped or not, or a tensor.
        out: where the result is written, an array or tensor of the same shape, not x itself.
        entries: about how many neighbours are gathered at once.

    Raises:
        ValueError: if shapes do not fit, or ``out`` is ``x``.

    >>> graph = Graph(torch.tensor([[0, 1], [1, 0]]), 3)
    >>> x, out = torch.tensor([[1.0], [3.0], [5.0]]), torch.empty(3, 1)
    >>> propagate_rows(graph, x, out)
    >>> out.flatten()
    tensor([2.0000, 2.0000, 5.0000])
    """
    checks.positive_int("entries", entries)
    if out is x:
        raise ValueError("out must be another array than x, whose rows are read until the end, got the same.")
    for name, array in (("x", x), ("out", out)):
        if len(array.shape) != 2 or array.shape[0] != graph.num_nodes or array.shape[1] != x.shape[1]:
            wanted = f"(nodes, features) = ({graph.num_nodes}, {x.shape[-1]})"
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(array.shape)}.")
    start = graph.incoming.start.long()
    listed = torch.zeros(graph.num_nodes, dtype=_rows(x, slice(0, 0)).dtype)
    for rows in _pieces(start, entries):
        source, row = _edges(graph, start, rows)
        listed[rows].index_add_(0, row, (source == row + rows.start).to(listed.dtype))
    scale = (start.diff() + 1 - listed).rsqrt()
    for rows in _pieces(start, entries):
        source, row = _edges(graph, start, rows)
        own = _rows(x, rows)
        weight = scale[source] * (source != row + rows.start)
        gathered = _rows(x, source if isinstance(x, Tensor) else source.numpy())
        total = (own * scale[rows, None]).index_add_(0, row, gathered * weight[:, None]) * scale[rows, None]
        written: Any = total if isinstance(out, Tensor) else total.numpy()
        out[rows] = written


def _rows(x: Any, rows: Any) -> Tensor:
    found = x[rows]
    return found if isinstance(found, Tensor) else torch.from_numpy(np.array(found))


def _pieces(start: Tensor, entries: int) -> Iterator[slice]:
    """Rows with about so many neighbours and themselves, one at least."""
    ends = start + torch.arange(len(start))
    first, last = 0, len(start) - 1
    while first < last:
        stop = int(torch.searchsorted(ends, ends[first] + entries, right=True)) - 1
        stop = min(max(stop, first + 1), last)
        yield slice(first, stop)
        first = stop


def _edges(graph: Graph, start: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """The sources of the edges to some rows, and which of these rows each leads to."""
    degree = start[rows.start : rows.stop + 1].diff()
    node = graph.incoming.node[start[rows.start] : start[rows.stop]].long()
    return node, torch.arange(len(degree)).repeat_interleave(degree)
