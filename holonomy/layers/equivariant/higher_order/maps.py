"""What the evaluators of higher-order attention share: its classes by their two ends, its maps as matrices.

On tuples of different nodes a lightweight equivariant map reads nothing but the hyperedges on their nodes. With these
side by side, the queries of all classes are one product, the keys another, and all classes of weight one a third.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from holonomy._shapes import Float, Int
from holonomy.layers.equivariant.basis.orbits import (
    EVERYTHING,
    InputPattern,
    Orbit,
    Term,
    extensions,
    free_axes,
    number_of_blocks,
    orbits,
    positions_of,
    reads_entries,
)
from holonomy.layers.equivariant.basis.partitions import Partition
from holonomy.layers.equivariant.linear import sparse
from holonomy.structures import HyperedgePlan

EntryPattern = tuple[InputPattern, tuple[int, ...]]
"""What a lightweight map reads of a tuple: an entry of that input pattern, at those blocks of the tuple."""


class Classes(NamedTuple):
    """The classes of an attention."""

    order_in: int
    orbits: tuple[Orbit, ...]
    by_input: dict[Partition, list[Orbit]]
    by_output: dict[Partition, list[Orbit]]
    terms: dict[Orbit, tuple[Term, ...]]
    read: dict[Partition, tuple[Partition, ...]]
    entries: tuple[Partition, ...]


class Maps(NamedTuple):
    """What an attention has learned, as matrices from the entries of a tuple."""

    value: Tensor
    out: Tensor
    keys: dict[Partition, Tensor]
    queries: dict[Partition, tuple[Tensor, Tensor]]
    heads: int
    projection: Tensor


def classes_of(order_in: int, order_out: int, *, local: bool, coupled: bool) -> Classes:
    """Sort the classes of an attention."""
    # An orbit that shares no node averages over the whole graph, which `local` leaves out.
    chosen = tuple(orbit for orbit in orbits(order_in, order_out) if orbit.reads.kept or not local)
    # An orbit without free axes in the input has one key for each query, of weight one: nothing to attend to.
    attended = [orbit for orbit in chosen if free_axes(orbit)[0]]
    by_input = {p: [o for o in attended if o.reads.pattern == p] for p in sorted({o.reads.pattern for o in attended})}
    by_output = {
        p: [o for o in attended if o.writes.pattern == p] for p in sorted({o.writes.pattern for o in attended})
    }
    # What queries and keys of a pattern read, and all that is read.
    ends = (*by_input, *by_output)
    read = {p: tuple(entry.pattern for entry, _ in entry_patterns(order_in, number_of_blocks(p))) for p in ends}
    entries = tuple(sorted({pattern for found in read.values() for pattern in found}))
    terms = {orbit: extensions(orbit) if coupled else (EVERYTHING,) for orbit in attended}
    return Classes(order_in, chosen, by_input, by_output, terms, read, entries)


@lru_cache(maxsize=64)
def entry_patterns(order: int, blocks: int) -> tuple[EntryPattern, ...]:
    """What a lightweight map to tuples of different nodes reads, in the order of its weights."""
    return tuple((orbit.reads, orbit.writes.places) for orbit in orbits(order, blocks) if reads_entries(orbit))


def by_class(
    projected: dict[Partition, Tensor], ends: dict[Partition, list[Orbit]]
) -> dict[Orbit, Float[Tensor, "*rows width"]]:
    """Cut the queries or keys of all classes of a pattern into those of each."""
    # The maps of a pattern are one matrix, its orbits side by side in the order of `ends`.
    cut: dict[Orbit, Tensor] = {}
    for pattern, found in ends.items():
        cut.update(zip(found, projected[pattern].chunk(len(found), -1), strict=True))
    return cut


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
        sizes = map(int, torch.bincount(graphs, minlength=edges.num_graphs).cumsum(0).cpu())
        return GatherPlan(rows, edges.at(tuples), graphs, entries, (0, *sizes))

    return edges.computed(("gather", pattern), make, asked)


def gather(padded: Float[Tensor, "edges_and_zeros dim"], plan: GatherPlan) -> Float[Tensor, "rows width"]:
    """The features of all hyperedges on the nodes of each tuple, side by side; the last row where there is none."""
    rows, entries = plan.entries.shape
    if entries == 0:
        return padded.new_ones(rows, 1)
    return padded.index_select(0, plan.entries.flatten()).view(rows, entries * padded.shape[1])
