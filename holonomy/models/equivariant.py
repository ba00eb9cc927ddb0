"""What the models of order-k tensors share: an embedding, layers from order to order, a head, and their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._autograd import eager
from holonomy._shapes import Bool, Float, Int
from holonomy.layers.equivariant.linear.entrywise import lightweight
from holonomy.layers.equivariant.linear.sparse import distinct_targets
from holonomy.models.levels import ORDER, Level
from holonomy.structures import Hyperedges, on_features
from holonomy.structures.plan import tuple_codes


class EquivariantModel(nn.Module):
    """Layers between tensors of a list of orders, called with a graph, with hyperedges or with a dense tensor."""

    # ``layer`` makes the layer between two orders. The other arguments are those of the two models that are made of it,
    # :class:`~holonomy.models.HigherOrderTransformer` and :class:`~holonomy.models.InvariantGraphNetwork`.

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        level: Level | None,
        orders: Sequence[int] | None,
        edge_features: int,
        layer: Callable[[int, int], nn.Module],
        norm: bool,
        entrywise: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        checks.positive_int("hidden_features", hidden_features)
        if level is not None:
            checks.one_of("level", level, tuple(ORDER))
        orders = (2, 2, ORDER[level or "graph"]) if orders is None else orders
        orders = [checks.nonnegative_int("orders", order) for order in checks.sequence("orders", orders, "integers")]
        if len(orders) < 2 or 0 in orders[:-1]:
            raise ValueError(f"orders must be at least two, of which only the last may be 0, got {tuple(orders)}.")
        if level is not None and orders[-1] != ORDER[level]:
            raise ValueError(f"orders must end with {ORDER[level]} at the level {level!r}, got {tuple(orders)}.")
        if level == "edge" and orders[0] != 2:
            raise ValueError(f"orders must begin with 2 at the level 'edge', got {tuple(orders)}.")
        if checks.nonnegative_int("edge_features", edge_features) and orders[0] != 2:
            raise ValueError(f"edge_features must be 0 unless the first order is 2, got {edge_features}.")
        if level is None and orders[-1] < 2:  # from 2 on the result is hyperedges, which no level names
            level = "node" if orders[-1] else "graph"
        self.level, self.orders, self.edge_features = level, tuple(orders), edge_features
        self.in_features = checks.positive_int("in_features", in_features)
        first, last = self.orders[0], self.orders[-1]
        channels = in_features + edge_features
        self.embed = lightweight(first, channels, hidden_features, entrywise=entrywise, device=device, dtype=dtype)
        self.layers = nn.ModuleList(layer(a, b) for a, b in pairwise(self.orders))
        self.norm = nn.LayerNorm(hidden_features, device=device, dtype=dtype) if norm else nn.Identity()
        self.head = lightweight(last, hidden_features, out_features, entrywise=entrywise, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "nodes features"] | Hyperedges,
        edge_index: Int[Tensor, "2 edges"] | None = None,
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges edge_features"] | None = None,
        edge_weight: Float[Tensor, " edges"] | None = None,
        num_graphs: int | None = None,
        to: Int[Tensor, "tuples order_out"] | None = None,
    ) -> Float[Tensor, "rows out_features"] | Hyperedges:
        """Map graphs, sets or hyperedges, sparsely.

        A first order of 1 takes sets of nodes, one of 2 graphs: nodes on the diagonal, edges off it. Layers of the
        first order stay on the hyperedges that came, layers of order 1 have every node, others what HOT section 4.2
        projects to.

        Args:
            x: node features ``(n, in_features)``, or hyperedges of the first order.
            edge_index: ``(2, m)``, both directions listed; first order 2 only.
            batch: ``(n,)``, the graph of each node.
            edge_attr: ``(m, edge_features)``, exactly where the model has some.
            edge_weight: is not read; a weight of an edge is one of its features.
            num_graphs: their number, where some at the end have no node.
            to: ``(m', l)`` tuples of the result, where the last order is at least 2 and some layer comes to it from
                another; layers after that one stay on them. One that is listed twice counts once, and has two rows.

        Returns:
            ``(graphs, out_features)``, ``(n, out_features)`` at the level of nodes, or ``(m, out_features)`` of edges;
            hyperedges of the last order where ``orders`` end with 2 or more and no level was given.

        Raises:
            ValueError: if an argument is missing, or one comes that this input does not have.
        """
        checks.unread(self, "pass them as a column of edge_attr", edge_weight=edge_weight)
        edges = self._hyperedges(x, edge_index, edge_attr, batch, num_graphs)
        last = self.orders[-1]
        # The layer that comes to the last order, to stay.
        arrives = max([0, *(depth for depth, order in enumerate(self.orders, start=1) if order != last)])
        if to is not None and (last < 2 or arrives == 0 or self.level == "edge"):
            raise ValueError(f"to must be None for orders {self.orders}, which say the tuples of the result.")
        # HOT section 4.2: order 1 has every node, the first order the hyperedges that came, others are projected.
        known = {1: edges.plan.nodes.indices, self.orders[0]: edges.indices}
        wanted = [None if before == order else known.get(order) for before, order in pairwise(self.orders)]
        place = None
        if to is not None:
            wanted[arrives - 1], place = distinct_targets(edges, to, last)
        h = cast("Hyperedges", self.embed(edges))
        for layer, tuples in zip(self.layers, wanted, strict=True):
            h = cast("Hyperedges", layer(h, to=tuples))
        h = cast("Hyperedges", self.head(on_features(self.norm, h)))
        if to is not None and place is not None:
            h = h.at(to, h.values[place])
        if self.level == "edge" and edge_index is not None:
            return _rows_of(h, edge_index)
        return h.values if last < 2 or self.level == "edge" else h

    def tensor(self, x: Float[Tensor, "..."], mask: Bool[Tensor, "*batch nodes"] | None = None) -> Float[Tensor, "..."]:
        """Map a dense tensor; every tuple of nodes is there.

        Args:
            x: ``(*batch, n, .., n, channels)`` of the first order, ``in_features + edge_features`` channels.
            mask: ``(*batch, n)``, ``True`` at nodes.

        Returns:
            ``(*batch, n, .., n, out_features)`` of the last order, zero at padding.

        Raises:
            ValueError: if shapes do not fit.
        """
        h = self.embed(x, mask)
        for layer in self.layers:
            h = layer(h, mask)
        return self.head(self.norm(h), mask)

    @eager
    def _hyperedges(
        self,
        x: Tensor | Hyperedges,
        edge_index: Tensor | None,
        edge_attr: Tensor | None,
        batch: Tensor | None,
        num_graphs: int | None,
    ) -> Hyperedges:
        if isinstance(x, Hyperedges):
            if any(given is not None for given in (edge_index, edge_attr, batch, num_graphs)):
                raise ValueError("edge_index, edge_attr, batch and num_graphs must be None where x is hyperedges.")
            return x
        checks.floating("x", x)
        checks.only_with_batch(num_graphs, batch)
        first = self.orders[0]
        if (edge_index is not None) != (first == 2):
            raise ValueError(f"edge_index must be given exactly if the first order is 2, which is {first} here.")
        checks.edge_attr(edge_attr, self.edge_features)
        if first > 2:
            raise ValueError(f"x must be hyperedges where the first order is {first}, got {type(x).__name__}.")
        if edge_index is None:
            checks.nodes(x, batch)
        else:
            checks.graph(x, edge_index, edge_attr, batch)
        checks.last_axis("x", x, self.in_features, "in_features", self.embed)
        if edge_attr is not None:
            checks.last_axis("edge_attr", edge_attr, self.edge_features, "edge_features", self.embed)
        graphs = 0 if num_graphs is None else checks.number_of_graphs(batch, num_graphs)
        if edge_index is None:
            with torch.inference_mode(mode=False):  # where a plan would keep nothing
                indices = torch.arange(x.shape[0], device=x.device)[:, None]
                batch = None if batch is None else batch.clone()
            return Hyperedges(indices, x, x.shape[0], batch, graphs)
        attributes = x.new_zeros(edge_index.shape[1], 0) if edge_attr is None else edge_attr
        return Hyperedges.from_graph(x, edge_index, attributes, batch, graphs)


@eager
def _rows_of(pairs: Hyperedges, edge_index: Tensor) -> Tensor:
    """The row of each listed edge."""
    listed, wanted = (cast("Tensor", tuple_codes(x, pairs.num_nodes)) for x in (pairs.indices, edge_index.long().t()))
    known, place = listed.sort()
    return pairs.values[place[torch.searchsorted(known, wanted)]]
