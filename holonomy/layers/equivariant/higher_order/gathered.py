"""What tuples of different nodes are made of: the hyperedges on their nodes, looked up once.

On these tuples a lightweight equivariant map reads nothing else. With the entries side by side, the queries of all
classes of attention are one product, the keys another, and all classes whose weight is one a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomy.layers.equivariant.basis.orbits import Source, positions_of
from holonomy.layers.equivariant.basis.partitions import Partition
from holonomy.layers.equivariant.linear import sparse
from holonomy.structures import HyperedgePlan

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["Own", "entries", "own"]


@dataclass(frozen=True)
class Own:
    """A stratum, and what its tuples are made of.

    Attributes:
        rows: the tuples of the stratum, graph by graph.
        tuples: the plan of their nodes.
        graphs: the graph of each.
        sources: for each of them the hyperedges on its nodes, one for each lookup; their number where there is none.
        bounds: where each graph starts among the rows, and the end.
    """

    rows: Int[Tensor, " rows"]
    tuples: HyperedgePlan
    graphs: Int[Tensor, " rows"]
    sources: Int[Tensor, "rows lookups"]
    bounds: tuple[int, ...]


def own(
    edges: HyperedgePlan,
    asked: HyperedgePlan,
    pattern: Partition,
    lookups: Sequence[tuple[Source, tuple[int, ...]]],
) -> Own:
    """Look up the hyperedges on the nodes of each tuple of a stratum; planned once for the hyperedges."""

    def make() -> Own:
        rows = sparse.in_pattern(asked.indices, pattern, exactly=True).nonzero()[:, 0]
        graphs, order = asked.graphs[rows].sort(stable=True)
        rows = rows[order]
        tuples = asked.indices[rows][:, list(positions_of(pattern))]
        every = range(edges.order)
        ordered, place = sparse.tuple_codes(edges.indices, every, edges.num_nodes).sort()
        columns: list[Tensor] = []
        for source, places in lookups:
            wanted = tuples[:, [places[block] for block in source.pattern]]
            code = sparse.tuple_codes(wanted, every, edges.num_nodes)
            if len(ordered) == 0:
                columns.append(torch.zeros_like(code))
                continue
            at = torch.searchsorted(ordered, code).clamp(max=len(ordered) - 1)
            columns.append(torch.where(ordered[at] == code, place[at], len(ordered)))
        sources = torch.stack(columns, 1) if columns else rows.new_zeros(len(rows), 0)
        sizes = torch.bincount(graphs, minlength=edges.num_graphs).cumsum(0).tolist()
        return Own(rows, edges.at(tuples), graphs, sources, (0, *sizes))

    return edges.computed(("own", pattern, tuple(lookups)), make, asked)


def entries(values: Float[Tensor, "edges dim"], plan: Own) -> Float[Tensor, "rows width"]:
    """The features of all hyperedges on the nodes of each tuple, side by side, zero where there is none."""
    rows, lookups = plan.sources.shape
    if lookups == 0:
        return values.new_ones(rows, 1)
    padded = torch.cat([values, values.new_zeros(1, values.shape[1])])
    return padded.index_select(0, plan.sources.flatten()).view(rows, lookups * values.shape[1])
