"""Hypergraphs as lists of node tuples with features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.structures.padded import joint, place_in_graph
from holonomy.structures.plan import HyperedgePlan, each_once


@dataclass(frozen=True, init=False, eq=False)
class Hyperedges:
    """The hyperedges of one or several hypergraphs with a feature vector each: a sparse order-k tensor.

    A hyperedge of order k is k nodes, the same ones in another order being another hyperedge. Order 2 are the
    entries of an adjacency matrix: a graph has its node features at the loops (v, v) and its edge features at
    (u, v), listed in both directions. Order 0 is one row a graph.

    ``indices`` and ``batch`` must stay as they are: layers refuse hyperedges whose tensors were changed in place.

    Args:
        indices: ``(m, k)`` nodes of each hyperedge, in any order, none twice.
        values: ``(m, features)``.
        num_nodes: n, of all graphs together.
        batch: ``(n,)``, the graph of each node, numbered from zero; one graph where it is not given.
        num_graphs: their number, where some at the end have no node.
        plan: what layers compute of the tuples, see :meth:`of`; made anew where it is not given, or of other indices,
            other numbers of nodes or graphs, or another batch.

    Raises:
        TypeError: if indices are not int64, or ``plan`` is no :class:`HyperedgePlan`.
        ValueError: if shapes do not fit, an index is out of range, a hyperedge is listed twice or joins two graphs.

    >>> edges = Hyperedges(torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 3), num_nodes=2)
    >>> edges.order, edges.to_dense()[0].shape
    (2, torch.Size([1, 2, 2, 3]))
    """

    indices: Int[Tensor, "edges order"]
    values: Float[Tensor, "edges features"]
    num_nodes: int
    batch: Int[Tensor, " nodes"]
    num_graphs: int
    plan: HyperedgePlan = field(repr=False)

    def __init__(
        self,
        indices: Int[Tensor, "edges order"],
        values: Float[Tensor, "edges features"],
        num_nodes: int,
        batch: Int[Tensor, " nodes"] | None = None,
        num_graphs: int = 0,
        *,
        plan: HyperedgePlan | None = None,
    ) -> None:
        checks.integers("indices", indices)
        checks.floating("values", values)
        if plan is not None:
            _require_plan(plan)
            same = plan.indices is indices and plan.num_nodes == num_nodes
            batch = plan.batch if same and batch is None else batch
            if not same or batch is not plan.batch or num_graphs not in (0, plan.num_graphs):
                plan = None
        plan = plan or HyperedgePlan(indices, num_nodes, batch, num_graphs)
        edges = plan.indices.shape[0]
        if values.ndim != 2 or values.shape[0] != edges:
            raise ValueError(f"values must have shape (edges = {edges}, features), got {tuple(values.shape)}.")
        vars(self).update(_fields(plan, values))

    @staticmethod
    def of(plan: HyperedgePlan, values: Float[Tensor, "edges features"]) -> Hyperedges:
        """Features ``(m, features)`` on the tuples of a plan, which is kept and used again.

        Anything but a plan is a TypeError, and anything but one row of values for each tuple a ValueError.

        >>> plan = HyperedgePlan(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> edges = Hyperedges.of(plan, torch.ones(2, 3))
        >>> edges.plan is plan
        True
        """
        _require_plan(plan)
        return Hyperedges(plan.indices, values, plan.num_nodes, plan=plan)

    @property
    def order(self) -> int:
        """How many nodes a hyperedge has."""
        return self.plan.order

    @property
    def graphs(self) -> Int[Tensor, " edges"]:
        """The graph of each hyperedge."""
        return self.plan.graphs

    def with_values(self, values: Float[Tensor, "edges dim"]) -> Hyperedges:
        """The same hyperedges with other features ``(m, features)`` and the same plan; nothing is checked again.

        >>> edges = Hyperedges(torch.tensor([[0], [1]]), torch.ones(2, 1), 2)
        >>> edges.with_values(torch.zeros(2, 4)).values.shape
        torch.Size([2, 4])
        """
        return _unchecked(self.plan, values)

    def at(self, indices: Int[Tensor, "tuples order"], values: Float[Tensor, "tuples dim"]) -> Hyperedges:
        """Other tuples ``(m', l)`` of the same nodes, none twice, with features ``(m', features)``; nothing is checked.

        >>> edges = Hyperedges(torch.tensor([[0], [1]]), torch.ones(2, 1), 2)
        >>> edges.at(torch.tensor([[0, 1]]), torch.ones(1, 1)).order
        2
        """
        return _unchecked(self.plan.at(indices), values)

    def to(self, device: torch.device | str) -> Hyperedges:
        """Move everything to a device; the hyperedges there have a plan of their own.

        >>> Hyperedges(torch.tensor([[0]]), torch.ones(1, 1), 1).to("cpu").values.device
        device(type='cpu')
        """
        return _unchecked(self.plan.to(device), self.values.to(device))

    def projected(self, order: int) -> Int[Tensor, "tuples order"]:
        """The tuples ``(m', l)`` of another order whose nodes all lie in one hyperedge.

        See :meth:`HyperedgePlan.projected`.

        >>> Hyperedges(torch.tensor([[0, 2]]), torch.ones(1, 1), 3).projected(1)
        tensor([[0],
                [2]])
        """
        return self.plan.projected(order).indices

    @staticmethod
    def from_graph(
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        edge_attr: Float[Tensor, "edges edge_dim"] | None = None,
        batch: Int[Tensor, " nodes"] | None = None,
        num_graphs: int = 0,
    ) -> Hyperedges:
        """A graph as hyperedges of order 2: nodes are loops ``[x, 0]``, edges ``[0, edge_attr]``, HOT section 4.4.

        Edges that are listed twice add up, and the attributes of a self-loop join the features of its node. Without
        attributes an edge has the single feature 1.

        Args:
            x: node features ``(n, d)``.
            edge_index: ``(2, m)``, both directions listed.
            edge_attr: ``(m, d')``.
            batch: ``(n,)``, the graph of each node.
            num_graphs: their number, where some at the end have no node.

        Returns:
            Hyperedges with ``d + d'`` features, the n loops first.

        Raises:
            ValueError: if shapes do not fit, an index is out of range or an edge joins two graphs.

        >>> edges = Hyperedges.from_graph(torch.zeros(2, 1), torch.tensor([[0, 1, 0], [1, 0, 1]]))
        >>> edges.indices.tolist(), edges.values[:, 1].tolist()
        ([[0, 0], [1, 1], [0, 1], [1, 0]], [0.0, 0.0, 2.0, 1.0])
        """
        checks.graph(x, edge_index, edge_attr, batch)
        checks.dense("x", x)
        nodes = x.shape[0]
        attributes = x.new_ones(edge_index.shape[1], 1) if edge_attr is None else edge_attr.to(x.dtype)
        at_nodes = torch.cat([x, x.new_zeros(nodes, attributes.shape[1])], 1)
        at_edges = torch.cat([x.new_zeros(attributes.shape[0], x.shape[1]), attributes], 1)
        with torch.inference_mode(mode=False):  # where a plan would keep nothing
            loops = torch.arange(nodes, device=x.device)[:, None].expand(nodes, 2)
            indices, place = each_once(torch.cat([loops, edge_index.t()]), nodes)
            batch = None if batch is None else batch.clone()
        values = x.new_zeros(indices.shape[0], at_nodes.shape[1]).index_add(0, place, torch.cat([at_nodes, at_edges]))
        return Hyperedges(indices, values, nodes, batch, num_graphs)

    @staticmethod
    def from_dense(x: Float[Tensor, "graphs ..."], mask: Bool[Tensor, "graphs nodes"] | None = None) -> Hyperedges:
        """Every tuple of nodes of dense tensors ``(graphs, n, .., n, features)``: the complete hypergraphs.

        ``mask`` ``(graphs, n)`` is ``True`` at nodes; without one, everything is a node. Hyperedges come in
        lexicographic order, nodes numbered through the graphs. Shapes that do not fit are a ValueError.

        >>> Hyperedges.from_dense(torch.zeros(2, 3, 3, 1)).indices.shape
        torch.Size([18, 2])
        """
        checks.floating("x", x)
        checks.dense("x", x)
        if x.ndim < 3 or any(size != x.shape[1] for size in x.shape[2:-1]):
            raise ValueError(f"x must have shape (graphs, n, .., n, features), got {tuple(x.shape)}.")
        graphs, width, order = x.shape[0], x.shape[1], x.ndim - 2
        if mask is not None:
            checks.boolean("mask", mask, (graphs, width), "nodes", "(graphs, n) = ")
        if mask is None:
            mask = x.new_ones(graphs, width, dtype=torch.bool)
        present = joint(mask, order)
        with torch.inference_mode(mode=False):  # where a plan would keep nothing
            number = mask.flatten().cumsum(0).reshape(graphs, width) - 1
            where = present.nonzero()
            indices = torch.stack([number[where[:, 0], where[:, axis + 1]] for axis in range(order)], 1)
            batch = mask.nonzero()[:, 0]
        return Hyperedges(indices, x[present], int(mask.sum()), batch, graphs)

    def to_dense(self) -> tuple[Float[Tensor, "graphs ..."], Bool[Tensor, "graphs nodes"]]:
        """The hyperedges as padded tensors ``(graphs, n, .., n, features)``, with zeros where there is none.

        The second result is the mask ``(graphs, n)``, ``True`` at nodes.

        >>> edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 1), 2)
        >>> edges.to_dense()[0].squeeze().tolist()
        [[0.0, 1.0], [0.0, 0.0]]
        """
        batch = self.batch
        sizes = torch.bincount(batch, minlength=self.num_graphs)
        width = int(sizes.max()) if len(sizes) else 0
        place = place_in_graph(batch, sizes)
        mask = torch.arange(width, device=place.device) < sizes[:, None]
        dense = self.values.new_zeros(self.num_graphs, *[width] * self.order, self.values.shape[1])
        where = (self.graphs, *(place[self.indices[:, axis]] for axis in range(self.order)))
        return dense.index_put(where, self.values), mask


def on_features(function: Callable[[Tensor], Tensor], x: Tensor | Hyperedges) -> Tensor | Hyperedges:
    """Apply a function of feature vectors ``(..., features)`` to a dense tensor or to the values of hyperedges.

    >>> on_features(torch.relu, torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    checks.function("function", function)
    if isinstance(x, Hyperedges):
        return x.with_values(function(x.values))
    checks.tensor("x", x)
    return function(x)


def _require_plan(plan: object) -> None:
    if not isinstance(plan, HyperedgePlan):
        raise TypeError(f"plan must be a HyperedgePlan, got {type(plan).__name__}.")


def _fields(plan: HyperedgePlan, values: Tensor) -> dict[str, Any]:
    names = ("indices", "num_nodes", "batch", "num_graphs")
    return {"plan": plan, "values": values, **{name: getattr(plan, name) for name in names}}


def _unchecked(plan: HyperedgePlan, values: Tensor) -> Hyperedges:
    edges = object.__new__(Hyperedges)
    vars(edges).update(_fields(plan, values))
    return edges
