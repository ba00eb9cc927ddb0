"""A graph whose edges are sorted once, for products with its adjacency matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd, checks
from holonomy._shapes import Float, Int
from holonomy.structures.padded import place_in_run

# A band of targets whose edges are sorted together has so many times as many edges as are read at once.
_BAND = 16


class Neighbours(NamedTuple):
    """The neighbours of every node in the layout of a CSR matrix.

    >>> Neighbours(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0])).rows()
    tensor([0, 0, 1])
    """

    #: where the neighbours of each node start, and where the last ones end, ``(n + 1,)``
    start: Int[Tensor, " nodes_plus_1"]
    node: Int[Tensor, " edges"]  #: the neighbours ``(m,)``, in memory or mapped to it

    def rows(self) -> Int[Tensor, " edges"]:
        """The node that each neighbour is a neighbour of, ``(m,)``, in order."""
        nodes = torch.arange(self.start.shape[0] - 1, device=self.start.device)
        return nodes.repeat_interleave(self.start.diff(), output_size=self.node.shape[0])

    def to(self, device: torch.device | str) -> Neighbours:
        """Move them to a device."""
        return Neighbours(self.start.to(device), self.node.to(device))


class NormalisedGraph(NamedTuple):
    r"""The matrix :math:`D^{-1/2} (A + I) D^{-1/2}` and its transpose, each as neighbours with weights."""

    incoming: tuple[Neighbours, Float[Tensor, " entries"]]
    outgoing: tuple[Neighbours, Float[Tensor, " entries"]]


class Graph:
    r"""A graph whose edges are sorted once: graph encoders accept it in place of ``edge_index``.

    The product with an adjacency matrix needs the edges sorted by target, and its gradient needs them sorted by source.
    Here both happen once, when the graph is made; sorting in every pass costs half of a GCN's time. Numbers of nodes
    are held as int32 where they fit. An edge that is listed twice counts twice.

    Args:
        edge_index: ``(2, m)`` integers, sources in the first row and targets in the second, both directions listed. A
            later change of this tensor does not change the graph.
        num_nodes: n.

    Raises:
        TypeError: if ``edge_index`` holds no integers.
        ValueError: if it has another shape, or names a node that is not there.

    >>> graph = Graph(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
    >>> graph.edge_index.tolist()
    [[1, 0, 2, 1], [0, 1, 1, 2]]
    >>> graph
    Graph(num_nodes=3, num_edges=4)
    """

    def __init__(self, edge_index: Int[Tensor, "2 edges"], num_nodes: int) -> None:
        checks.edges(edge_index, checks.nonnegative_int("num_nodes", num_nodes))
        self.num_nodes = num_nodes  #: n
        source, target = edge_index
        self.incoming = _sorted(target, source, num_nodes)  #: the sources of the edges to each node
        self.outgoing = _sorted(source, target, num_nodes)  #: the targets of the edges from each node
        self._normalised: dict[torch.dtype, NormalisedGraph] = {}

    @property
    def num_edges(self) -> int:
        """How many edges are listed."""
        return self.incoming.node.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the graph lies."""
        return self.incoming.node.device

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """The edges as int64, sorted by target."""
        return torch.stack([self.incoming.node.long(), self.incoming.rows()])

    def normalised(self, dtype: torch.dtype) -> NormalisedGraph:
        """The matrix :math:`D^{-1/2} (A + I) D^{-1/2}` and its transpose, computed once for a dtype and kept.

        D holds the row sums of A + I. A loop that is listed is not counted beside that of I.
        """
        if dtype not in self._normalised:
            with _autograd.kept():
                wide = torch.promote_types(dtype, torch.float32)  # bfloat16 counts to 256
                loops = (self.incoming.node == self.incoming.rows()).to(wide)
                degree = (self.incoming.start.diff() + 1).to(wide).index_add(0, self.incoming.rows(), -loops)
                sides = (_weighted(side, degree.rsqrt()) for side in (self.incoming, self.outgoing))
                self._normalised[dtype] = NormalisedGraph(*((held, weight.to(dtype)) for held, weight in sides))
        return self._normalised[dtype]

    def to(self, device: torch.device | str) -> Graph:
        """Move the graph to a device."""
        checks.device("device", device)
        moved = object.__new__(Graph)
        moved.num_nodes, moved._normalised = self.num_nodes, {}
        moved.incoming, moved.outgoing = self.incoming.to(device), self.outgoing.to(device)
        return moved

    def __repr__(self) -> str:
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges})"


def _sorted(by: Tensor, others: Tensor, nodes: int) -> Neighbours:
    start = functional.pad(torch.bincount(by, minlength=nodes).cumsum(0), (1, 0))
    fits = by.shape[0] + nodes <= torch.iinfo(torch.int32).max
    dtype = torch.int32 if fits else torch.int64
    return Neighbours(start.to(dtype), others[torch.argsort(by, stable=True)].to(dtype))


def _weighted(neighbours: Neighbours, scale: Tensor) -> tuple[Neighbours, Tensor]:
    """The neighbours with a loop after those of each node, and the weights of all, zero for loops that were listed."""
    start, node, row = *neighbours, neighbours.rows()
    nodes, edges = scale.shape[0], node.shape[0]
    each = torch.arange(nodes, device=node.device)
    # Before an edge of row i come i loops, and before the loop of node i come the edges of the rows up to i.
    places = torch.cat([torch.arange(edges, device=node.device) + row, start[1:] + each])
    weight = torch.cat([scale[row] * scale[node] * (row != node), scale.square()])
    held = Neighbours(
        (start + torch.arange(nodes + 1, device=node.device)).to(start.dtype),
        torch.empty_like(places, dtype=node.dtype).index_copy(0, places, torch.cat([node, each.to(node.dtype)])),
    )
    return held, torch.empty_like(weight).index_copy(0, places, weight)


def sort_edges(edge_index: Any, num_nodes: int, out: Any, *, entries: int = 2**22) -> Neighbours:
    """Sort edges by target, some at a time, for a graph whose edges do not fit in memory.

    The result is ``Graph(edge_index, num_nodes).incoming``: what :func:`~holonomy.distributed.propagate_rows` and
    :func:`neighbour_batches` read of a graph. ``edge_index`` is read once, and once more for every 16 ``entries``
    edges; memory is that of a number a node and of so many edges.

    Args:
        edge_index: ``(2, m)`` integers, a tensor or a numpy array, in memory or mapped to it.
        num_nodes: n.
        out: where the sources are written, ``(m,)`` integers that hold n, likewise.
        entries: how many edges are read at once.

    Returns:
        Where the neighbours of each node start, and ``out`` as a tensor.

    Raises:
        TypeError: if ``edge_index`` holds no integers, or ``out`` none that are large enough.
        ValueError: if a shape does not fit, an edge names a node that is not there, or ``out`` is read-only or part of
            ``edge_index``.

    >>> edges, out = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), torch.empty(4, dtype=torch.int32)
    >>> sort_edges(edges, 3, out).start, out
    (tensor([0, 1, 3, 4]), tensor([1, 0, 2, 1], dtype=torch.int32))
    """
    checks.positive_int("entries", entries)
    checks.nonnegative_int("num_nodes", num_nodes)
    checks.array("edge_index", edge_index)
    checks.array("out", out)
    if len(edge_index.shape) != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index must have shape (2, edges), got {tuple(edge_index.shape)}.")
    if tuple(out.shape) != tuple(edge_index.shape[1:]):
        raise ValueError(f"out must have shape (edges,) = {tuple(edge_index.shape[1:])}, got {tuple(out.shape)}.")
    node = _for_nodes(out, num_nodes)
    checks.apart("out", out, "edge_index", edge_index)
    count = torch.zeros(num_nodes, dtype=torch.int64)
    blocks = [slice(first, first + entries) for first in range(0, edge_index.shape[1], entries)]
    for block in blocks:
        edges = array_slice(edge_index, (slice(None), block))
        checks.integers("edge_index", edges, unsigned=True)
        edges = edges.long()  # of int16 no index, of uint32 no largest number
        checks.edges(edges, num_nodes)
        count += edges[1].bincount(minlength=num_nodes)
    start = functional.pad(count.cumsum(0), (1, 0))
    for band in pieces(start, _BAND * entries):
        place = start[band].clone()
        for block in blocks:
            source, target = array_slice(edge_index, (slice(None), block)).long()
            within = (target >= band.start) & (target < band.stop)
            row, order = (target[within] - band.start).sort(stable=True)
            count = row.bincount(minlength=len(place))
            # Behind those of the blocks before, in their order.
            node[place[row] + place_in_run(row, count)] = source[within][order].to(node.dtype)
            place += count
    return Neighbours(start, node)


def _for_nodes(out: Any, num_nodes: int) -> Tensor:
    """An array as a tensor to which numbers of nodes are written."""
    if not isinstance(out, Tensor) and not out.flags.writeable:  # of which torch makes a tensor that ends the process
        raise ValueError("out must be writable, got a read-only array.")
    node = out if isinstance(out, Tensor) else torch.from_numpy(out)
    # Those that torch writes by index.
    integers = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    if node.dtype not in integers or num_nodes - 1 > torch.iinfo(node.dtype).max:
        raise TypeError(f"out must hold integers up to num_nodes - 1 = {num_nodes - 1}, got {node.dtype}.")
    return node


def incoming_of(graph: Graph | Neighbours) -> Neighbours:
    """The sources of the edges to each node."""
    if not isinstance(graph, Graph | Neighbours):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"graph must be a Graph or Neighbours, got {type(graph).__name__}.")
    return graph.incoming if isinstance(graph, Graph) else graph


def array_slice(x: Any, places: Any) -> Tensor:
    """Part of a tensor or an array; of an array a copy, as it may be read-only."""
    found = x[places]
    return found if isinstance(found, Tensor) else torch.from_numpy(np.array(found))


def pieces(start: Int[Tensor, " nodes_plus_1"], entries: int) -> Iterator[slice]:
    """Nodes with about so many neighbours and themselves, one at least."""
    ends = start + torch.arange(len(start))
    first, last = 0, len(start) - 1
    while first < last:
        stop = int(torch.searchsorted(ends, ends[first] + entries, right=True)) - 1
        stop = min(max(stop, first + 1), last)
        yield slice(first, stop)
        first = stop
