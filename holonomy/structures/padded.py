"""Graphs of different sizes as one padded tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Bool, Float, Int, Shaped


@dataclass(frozen=True, eq=False)
class PaddedGraphs:
    """The nodes of several graphs, one graph a row, filled up with padding.

    >>> graphs = PaddedGraphs.of(torch.ones(3, 2), torch.tensor([0, 1, 0]))
    >>> graphs.values.shape, graphs.slots.tolist()
    (torch.Size([2, 2, 2]), [0, 2, 1])
    """

    values: Float[Tensor, "graphs nodes features"]  #: ``(graphs, nodes, features)``, zero at padding
    #: a ``key_padding_mask`` ``(graphs, nodes)``, ``True`` where there is no node
    padding: Bool[Tensor, "graphs nodes"]
    slots: Int[Tensor, " n"]  #: ``(n,)``, the place of each node in the flattened first two axes

    @staticmethod
    def of(x: Float[Tensor, "n features"], batch: Int[Tensor, " n"], num_graphs: int | None = None) -> PaddedGraphs:
        """Lay the rows of ``x`` ``(n, features)`` out by graph; nodes of one graph keep their order, and may be apart.

        ``batch`` ``(n,)`` is the graph of each node, numbered from zero, as in PyTorch Geometric; a number that no node
        has is an empty graph, and ``num_graphs`` counts those at the end, too. Shapes that do not fit are a ValueError.

        >>> graphs = PaddedGraphs.of(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 0]))
        >>> graphs.values.squeeze(-1).tolist(), graphs.padding.tolist()
        ([[1.0, 3.0], [2.0, 0.0]], [[False, False], [False, True]])
        """
        checks.matrix("x", x, "n", "features")
        checks.membership(batch, x.shape[0])
        batch = batch.long()
        graphs = checks.number_of_graphs(batch, num_graphs)
        sizes = torch.bincount(batch, minlength=graphs)
        widest = int(sizes.max()) if batch.numel() else 0
        # Row of the graph, and place of the node in it.
        slots = batch * widest + place_in_graph(batch, sizes)
        padding = torch.ones(graphs * widest, dtype=torch.bool, device=x.device)
        padding[slots] = False
        values = x.new_zeros(graphs * widest, x.shape[-1]).index_copy(0, slots, x)
        return PaddedGraphs(values.unflatten(0, (graphs, widest)), padding.unflatten(0, (graphs, widest)), slots)

    def rows(self, values: Float[Tensor, "graphs nodes features"]) -> Float[Tensor, "n features"]:
        """Padded values ``(graphs, nodes, features)`` as rows ``(n, features)``, in the order of the nodes that came.

        Values in another layout than that of this object are a ValueError.

        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> graphs = PaddedGraphs.of(x, torch.tensor([0, 1, 0]))
        >>> torch.equal(graphs.rows(graphs.values), x)
        True
        """
        checks.tensor("values", values)
        if values.shape[:2] != self.padding.shape:
            wanted = tuple(self.padding.shape)
            raise ValueError(f"values must have shape (graphs, nodes, ...) = {wanted}, got {tuple(values.shape)}.")
        return values.flatten(0, 1)[self.slots]

    def pairs(self, rows: Shaped[Tensor, " pairs *features"]) -> Shaped[Tensor, " graphs nodes nodes *features"]:
        """Pairs of nodes ``(pairs, ...)`` laid out by graph, ``(graphs, nodes, nodes, ...)``, with zeros at padding.

        Rows come graph after graph, one for each pair (i, j) of its nodes, j running faster: an ``(n, n, ...)`` tensor
        of each graph, its first two axes flattened, concatenated. Another number of rows is a ValueError.

        >>> graphs = PaddedGraphs.of(torch.ones(3, 1), torch.tensor([0, 1, 1]))
        >>> graphs.pairs(torch.arange(1, 6)).tolist()
        [[[1, 0], [0, 0]], [[2, 3], [4, 5]]]
        """
        checks.tensor("rows", rows)
        there = joint(~self.padding, 2)
        where = there.flatten().nonzero().squeeze(1)
        if rows.shape[:1] != where.shape:
            raise ValueError(f"rows must be one for each of the {where.shape[0]} pairs, got {tuple(rows.shape)}.")
        laid_out = rows.new_zeros(there.numel(), *rows.shape[1:]).index_copy(0, where, rows)
        return laid_out.unflatten(0, there.shape)


def joint(mask: Bool[Tensor, "*batch nodes"], order: int) -> Bool[Tensor, "..."]:
    """Which tuples of ``order`` axes consist of nodes only, by ``mask`` ``(*batch, n)``, ``True`` at nodes.

    The result is ``(*batch, n, .., n)``, without a node axis for order 0.

    >>> joint(torch.tensor([True, False]), 2).tolist()
    [[True, False], [False, False]]
    """
    checks.boolean("mask", mask, None, "nodes")
    if checks.nonnegative_int("order", order) == 0:
        return mask.new_ones(mask.shape[:-1])
    batch, width = mask.shape[:-1], mask.shape[-1]
    # One axis for each node of the tuple; they broadcast against each other.
    axes = (mask.reshape(*batch, *[1] * axis, width, *[1] * (order - 1 - axis)) for axis in range(order))
    return reduce(torch.logical_and, axes)


def place_in_graph(batch: Tensor, sizes: Tensor) -> Tensor:
    """Number the nodes of each graph from zero, in the order in which they come."""
    order = batch.argsort(stable=True)
    place = torch.empty_like(batch)
    place[order] = place_in_run(batch[order], sizes)
    return place


def place_in_run(ascending: Int[Tensor, " n"], sizes: Int[Tensor, " runs"]) -> Int[Tensor, " n"]:
    """Number the entries of each run of equal numbers from zero; ``sizes`` says how often each number is there."""
    return torch.arange(ascending.shape[0], device=ascending.device) - (sizes.cumsum(0) - sizes)[ascending]
