"""The hyperedges on the nodes of each tuple of different nodes, found once.

On these tuples a lightweight equivariant map reads nothing else. With the entries side by side, the queries of all
classes of attention are one product, the keys another, and all classes whose weight is one a third.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holonomy._shapes import Float, Int
from holonomy.layers.equivariant.basis.orbits import number_of_blocks, positions_of
from holonomy.layers.equivariant.basis.partitions import Partition
from holonomy.layers.equivariant.higher_order.maps import entry_patterns
from holonomy.layers.equivariant.linear import sparse
from holonomy.structures import HyperedgePlan


@dataclass(frozen=True)
class GatherPlan:
    """A stratum, and the hyperedges on the nodes of each of its tuples."""

    rows: Int[Tensor, " rows"]  # the tuples of the stratum, graph by graph
    tuples: HyperedgePlan  # the plan of their nodes
    graphs: Int[Tensor, " rows"]  # the graph of each
    # The hyperedges that each of them reads, on its nodes; the number of all where there is none.
    entries: Int[Tensor, "rows entries"]
    bounds: tuple[int, ...]  # where each graph starts among the rows, and the end


def gather_plan(edges: HyperedgePlan, asked: HyperedgePlan, pattern: Partition) -> GatherPlan:
    """Find the hyperedges on the nodes of each tuple of a stratum; kept in the plan of the hyperedges."""

    def make() -> GatherPlan:
        rows = sparse.in_pattern(asked.indices, pattern, exactly=True).nonzero()[:, 0]
        # Graph by graph, so that the rows of each are a slice.
        graphs, order = asked.graphs[rows].sort(stable=True)
        rows = rows[order]
        tuples = asked.indices[rows][:, list(positions_of(pattern))]
        every = range(edges.order)
        ordered, place = sparse.tuple_codes(edges.indices, every, edges.num_nodes).sort()
        # A hyperedge that is not listed reads the row of zeros behind the last one.
        place = torch.cat([place, place.new_tensor([len(place)])])
        columns: list[Tensor] = []
        for entry, blocks in entry_patterns(edges.order, number_of_blocks(pattern)):
            wanted = tuples[:, [blocks[block] for block in entry.pattern]]
            columns.append(place[sparse.places(sparse.tuple_codes(wanted, every, edges.num_nodes), ordered)])
        entries = torch.stack(columns, 1) if columns else rows.new_zeros(len(rows), 0)
        sizes = torch.bincount(graphs, minlength=edges.num_graphs).cumsum(0).tolist()
        return GatherPlan(rows, edges.at(tuples), graphs, entries, (0, *sizes))

    return edges.computed(("gather", pattern), make, asked)


def gather(padded: Float[Tensor, "edges_and_zeros dim"], plan: GatherPlan) -> Float[Tensor, "rows width"]:
    """The features of all hyperedges on the nodes of each tuple, side by side; the last row where there is none."""
    rows, entries = plan.entries.shape
    if entries == 0:
        return padded.new_ones(rows, 1)
    return padded.index_select(0, plan.entries.flatten()).view(rows, entries * padded.shape[1])
