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
from holonomy.structures import Hyperedges

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["Own", "entries", "own"]


@dataclass(frozen=True)
class Own:
    """A stratum, and what its tuples are made of.

    Attributes:
        rows: the tuples of the stratum, graph by graph.
        tuples: their nodes.
        graphs: the graph of each.
        sources: for each of them the hyperedges on its nodes, one for each lookup; their number where there is none.
        bounds: where each graph starts among the rows, and the end.
    """

    rows: Int[Tensor, " rows"]
    tuples: Int[Tensor, "rows order"]
    graphs: Int[Tensor, " rows"]
    sources: Int[Tensor, "rows lookups"]
    bounds: tuple[int, ...]


def own(
    edges: Hyperedges,
    indices: Int[Tensor, "tuples order"],
    pattern: Partition,
    lookups: Sequence[tuple[Source, tuple[int, ...]]],
) -> Own:
    """Look up the hyperedges on the nodes of each tuple of a stratum; planned once for the hyperedges."""

    def make() -> Own:
        if pattern:
            rows = sparse.in_pattern(indices, pattern, exactly=True).nonzero()[:, 0]
        else:
            rows = torch.arange(indices.shape[0], device=indices.device)
        graphs = edges.graphs_of(indices)[rows]
        graphs, order = graphs.sort(stable=True)
        rows = rows[order]
        tuples = indices[rows][:, list(positions_of(pattern))]
        every = range(edges.order)
        ordered, place = sparse.keys(edges.indices, every, edges.num_nodes).sort()
        columns: list[Tensor] = []
        for source, places in lookups:
            wanted = tuples[:, [places[block] for block in source.pattern]]
            key = sparse.keys(wanted, every, edges.num_nodes)
            at = torch.searchsorted(ordered, key).clamp(max=max(len(ordered) - 1, 0))
            met = ordered[at] == key if len(ordered) else torch.zeros_like(key, dtype=torch.bool)
            columns.append(torch.where(met, place[at], len(ordered)) if len(ordered) else torch.zeros_like(key))
        sources = torch.stack(columns, 1) if columns else rows.new_zeros(len(rows), 0)
        sizes = torch.bincount(graphs, minlength=edges.num_graphs).cumsum(0).tolist()
        return Own(rows, tuples, graphs, sources, (0, *sizes))

    return edges.planned(("own", pattern, tuple(lookups)), make, indices)


def entries(values: Float[Tensor, "edges dim"], plan: Own) -> Float[Tensor, "rows width"]:
    """The features of all hyperedges on the nodes of each tuple, side by side, zero where there is none."""
    rows, lookups = plan.sources.shape
    if lookups == 0:
        return values.new_ones(rows, 1)
    padded = torch.cat([values, values.new_zeros(1, values.shape[1])])
    return padded.index_select(0, plan.sources.flatten()).view(rows, lookups * values.shape[1])
