r"""Attention on hyperedges with the queries and keys of all classes out of one product each.

A class after the other reads every hyperedge fifteen times over for 2 -> 2. Here what the nodes of a tuple have of
their own (:mod:`holonomy.layers.equivariant.higher_order.maps`) is gathered once for each pattern, and multiplied
by the maps of all its classes together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holonomy._shapes import Float
from holonomy.layers.equivariant.basis.orbits import InputPattern, Orbit, free_axes, number_of_blocks
from holonomy.layers.equivariant.basis.partitions import Partition
from holonomy.layers.equivariant.higher_order import centering, sparse
from holonomy.layers.equivariant.higher_order.dense import quotient
from holonomy.layers.equivariant.higher_order.maps import (
    Classes,
    GatherPlan,
    Maps,
    by_class,
    entry_patterns,
    gather,
    gather_plan,
)
from holonomy.ops.performer import attend_pooled, log_features, pool_keys
from holonomy.ops.segments import contract, outer_sum
from holonomy.structures import HyperedgePlan, Hyperedges

# Tuples from which on the backward pass computes a class again instead of keeping it; of the softmax, which makes pairs
# of them, half a GiB at 32 features.
_RECOMPUTED_FROM = 2**18
_SOFTMAX_RECOMPUTED_FROM = 2**14


class End(NamedTuple):
    """The tuples of a pattern, and what they read, side by side."""

    plan: GatherPlan
    entries: Float[Tensor, "rows width"]

    def by_graph(self) -> Sequence[Float[Tensor, "rows width"]]:
        """The entries of each graph. One split, not slices: the gradient of each would be a whole table of zeros."""
        bounds = self.plan.bounds
        return (self.entries,) if len(bounds) == 2 else self.entries.split([b - a for a, b in pairwise(bounds)])


class Ends(NamedTuple):
    """All that is attended to and asked for, by pattern, and how many rows the result has."""

    inputs: dict[Partition, End]
    outputs: dict[Partition, End]
    rows: int


_Projected = dict[Partition, Tensor]


def both_ends(classes: Classes, x: Hyperedges, to: HyperedgePlan) -> Ends:
    """The entries of the tuples of each pattern, of the hyperedges and of those that are asked for."""
    # The last row is what hyperedges that are not listed read.
    padded = torch.cat([x.values, x.values.new_zeros(1, x.values.shape[1])])

    def gathered(tuples: HyperedgePlan, pattern: Partition) -> End:
        plan = gather_plan(x.plan, tuples, pattern)
        return End(plan, gather(padded, plan))

    patterns = sorted({orbit.writes.pattern for orbit in classes.orbits})
    inputs = {p: gathered(x.plan, p) for p in classes.by_input}
    known = inputs if to is x.plan else {}
    return Ends(inputs, {p: known.get(p) or gathered(to, p) for p in patterns}, to.indices.shape[0])


def coupled(
    classes: Classes, maps: Maps, x: Hyperedges, ends: Ends, keys: _Projected, queries: _Projected, *, softmax: bool
) -> Tensor:
    """Attend to the keys that share exactly the nodes of an orbit, one orbit after the other."""
    of_orbit = by_class(keys, classes.by_input) if softmax else _centered(classes, maps, x, ends, keys)
    recompute = _recompute(x, ends, _SOFTMAX_RECOMPUTED_FROM if softmax else _RECOMPUTED_FROM)

    def mixed(pattern: Partition) -> Tensor:
        orbits = classes.by_output[pattern]
        total = x.values.new_zeros(())
        for orbit, query in zip(orbits, queries[pattern].chunk(len(orbits), -1), strict=True):
            plan, end = ends.inputs[orbit.reads.pattern].plan, ends.outputs[pattern].plan
            value = x.values.index_select(0, plan.rows) @ maps.value[classes.orbits.index(orbit)]
            q, k, v = (z.unflatten(-1, (maps.heads, -1)) for z in (query, of_orbit[orbit], value))
            if softmax:
                attend, step = sparse.softmax_class, (orbit, plan.tuples, end.tuples, q, k, v)
            else:
                attend, step = sparse.coupled_class, (orbit, x.plan, plan, end, q, k, v, maps.projection)
            attended = _checkpointed(attend, step, recompute=recompute)
            total = total + attended.flatten(1) @ maps.out[classes.orbits.index(orbit)]
        return total

    return _written(classes, maps, x, ends, mixed)


def decoupled(classes: Classes, maps: Maps, x: Hyperedges, ends: Ends, keys: _Projected, queries: _Projected) -> Tensor:
    """Attend to all keys of a graph (HOT eq. 21): the orbits of a pattern stand side by side, as if they were heads."""
    centered, recompute = _centered(classes, maps, x, ends, keys), _recompute(x, ends, _RECOMPUTED_FROM)
    root, graphs = _root(maps), x.num_graphs

    def pool(key: Tensor, value: Tensor, rows: Tensor, top: Tensor) -> Tensor:
        phi = (log_features(key, maps.projection) - top.index_select(0, rows)).exp()
        counted = torch.cat([value, torch.ones_like(value[..., :1])], -1).to(phi.dtype)
        return outer_sum(phi, counted, rows, graphs)

    # Of each orbit the largest logarithms and the sums of each graph, HOT eq. 21.
    sums: dict[Orbit, tuple[Tensor, Tensor]] = {}
    for pattern, (plan, _) in ends.inputs.items():
        orbits = classes.by_input[pattern]
        key = torch.cat([centered[orbit] for orbit in orbits], -1).unflatten(-1, (len(orbits) * maps.heads, -1)) * root
        top = sparse.largest_logarithms(key.detach(), plan.graphs, graphs, maps.projection)
        matrix = maps.value[[classes.orbits.index(orbit) for orbit in orbits]].transpose(0, 1).flatten(1)
        value = (x.values.index_select(0, plan.rows) @ matrix).unflatten(-1, (len(orbits) * maps.heads, -1))
        table = _checkpointed(pool, (key, value, plan.graphs, top), recompute=recompute)
        columns = (part.chunk(len(orbits), 1) for part in (top, table))
        sums |= dict(zip(orbits, zip(*columns, strict=True), strict=True))

    def attend(query: Tensor, rows: Tensor, top: Tensor, table: Tensor) -> Tensor:
        # The largest logarithm that the keys were divided by comes back; a factor common to all features cancels.
        phi = (log_features(query, maps.projection, of_query=True) + top.index_select(0, rows)).softmax(-1)
        total = contract(phi, table, rows)
        return quotient(total, total[..., -1:])

    def mixed(pattern: Partition) -> Tensor:
        orbits = classes.by_output[pattern]
        top, table = (torch.cat(column, 1) for column in zip(*(sums[orbit] for orbit in orbits), strict=True))
        query = queries[pattern].unflatten(-1, (len(orbits) * maps.heads, -1)) * root
        attended = _checkpointed(attend, (query, ends.outputs[pattern].plan.graphs, top, table), recompute=recompute)
        out = maps.out[[classes.orbits.index(orbit) for orbit in orbits]].flatten(0, 1)
        return attended.flatten(1).to(out.dtype) @ out

    return _written(classes, maps, x, ends, mixed)


def pooled(classes: Classes, maps: Maps, x: Hyperedges, ends: Ends) -> Tensor:
    """:func:`decoupled` for few large graphs, one after the other, in chunks of rows that stay in cache."""
    away = centering.of_classes(classes, maps, centering.of_hyperedges(x, classes.entries))
    shift = {p: torch.cat([away[orbit] for orbit in orbits], -1) for p, orbits in classes.by_input.items()}
    parts: dict[Partition, list[Tensor]] = {p: [] for p in ends.outputs}
    inputs, outputs = ({p: end.by_graph() for p, end in side.items()} for side in (ends.inputs, ends.outputs))
    for graph in range(x.num_graphs):
        sums: dict[Orbit, tuple[Tensor, Tensor]] = {}
        for pattern, entries in inputs.items():
            sums |= _pooled(classes, maps, pattern, entries[graph], shift[pattern][graph])
        for pattern, entries in outputs.items():
            parts[pattern].append(_attend(classes, maps, pattern, entries[graph], sums))
    result = x.values.new_zeros(ends.rows, maps.value.shape[1])
    for pattern, (rows, *more) in parts.items():
        whole = torch.cat([rows, *more]) if more else rows
        result = result.index_add(0, ends.outputs[pattern].plan.rows, whole.to(result.dtype))
    return result


def _centered(classes: Classes, maps: Maps, x: Hyperedges, ends: Ends, keys: _Projected) -> dict[Orbit, Tensor]:
    """The keys of each orbit, counted from the center of their graph."""
    away = centering.of_classes(classes, maps, centering.of_hyperedges(x, classes.entries))
    cut = by_class(keys, classes.by_input)
    graphs = {pattern: end.plan.graphs for pattern, end in ends.inputs.items()}
    return {orbit: key - away[orbit].index_select(0, graphs[orbit.reads.pattern]) for orbit, key in cut.items()}


def _written(
    classes: Classes, maps: Maps, x: Hyperedges, ends: Ends, mixed: Callable[[Partition], Tensor]
) -> Float[Tensor, "tuples dim"]:
    """The result: orbits of weight one, which need no attention, and what is mixed at each output pattern."""
    result = x.values.new_zeros(ends.rows, maps.value.shape[1])
    for pattern, (plan, entries) in ends.outputs.items():
        total = entries @ _direct(classes, maps, pattern)
        if pattern in classes.by_output:
            total = total + mixed(pattern)
        result = result.index_add(0, plan.rows, total.to(result.dtype))
    return result


def _recompute(x: Hyperedges, ends: Ends, least: int) -> bool:
    return torch.is_grad_enabled() and max(x.indices.shape[0], ends.rows) > least


def _checkpointed(function: Callable[..., Tensor], inputs: tuple[Any, ...], *, recompute: bool) -> Tensor:
    """A step, computed again in the backward pass where what it makes on the way is too large to keep."""
    return checkpoint(function, *inputs, use_reentrant=False) if recompute else function(*inputs)


def _pooled(
    classes: Classes, maps: Maps, pattern: Partition, keys: Tensor, shift: Tensor
) -> dict[Orbit, tuple[Tensor, Tensor]]:
    """What the classes of an input pattern sum over the keys of a graph, mapped to the output."""
    orbits, features = classes.by_input[pattern], maps.value.shape[1]
    if keys.shape[0] == 0:
        logs = keys.new_zeros(len(orbits), maps.heads, maps.projection.shape[0])
        return dict(zip(orbits, zip(logs, logs.new_zeros(*logs.shape, features), strict=True), strict=True))
    # Values are the entry of the tuple itself: these columns of what is gathered.
    blocks = number_of_blocks(pattern)
    finest = tuple(range(blocks))
    itself = entry_patterns(classes.order_in, blocks).index((InputPattern(pattern, finest), finest)) * features
    weight, bias = maps.keys[pattern] * _root(maps), -shift * _root(maps)
    both = pool_keys(keys, weight, bias, maps.projection, itself, itself + features)
    logs, means = (x.unflatten(0, (len(orbits), -1)) for x in both)
    # Means of inputs go through value and output map together, which is less work than means of values.
    chosen = [classes.orbits.index(orbit) for orbit in orbits]
    value = maps.value[chosen].unflatten(-1, (maps.heads, -1)).transpose(1, 2)
    out = maps.out[chosen].unflatten(1, (maps.heads, -1))
    return dict(zip(orbits, zip(logs, means @ value @ out, strict=True), strict=True))


def _attend(
    classes: Classes, maps: Maps, pattern: Partition, queries: Tensor, sums: dict[Orbit, tuple[Tensor, Tensor]]
) -> Tensor:
    """The sum of all classes of an output pattern at the queries of a graph."""
    direct = _direct(classes, maps, pattern)
    orbits = classes.by_output.get(pattern, [])
    if not orbits:
        return queries @ direct
    weight, bias = maps.queries[pattern]
    logs, means = (torch.cat(column) for column in zip(*(sums[orbit] for orbit in orbits), strict=True))
    return attend_pooled(queries, weight * _root(maps), bias * _root(maps), maps.projection, logs, means, direct)


def _direct(classes: Classes, maps: Maps, pattern: Partition) -> Tensor:
    """What the classes whose weight is one do to the entries of a tuple."""
    ones = {
        (orbit.reads, orbit.writes.places): index
        for index, orbit in enumerate(classes.orbits)
        if orbit.writes.pattern == pattern and not free_axes(orbit)[0]
    }
    features = maps.value.shape[1]
    nothing = maps.value.new_zeros(features, features)
    at = entry_patterns(classes.order_in, number_of_blocks(pattern))
    if not at:
        return maps.value.new_zeros(1, features)  # the entry of no nodes, a one
    return torch.cat([maps.value[ones[entry]] @ maps.out[ones[entry]] if entry in ones else nothing for entry in at])


def _root(maps: Maps) -> float:
    return maps.projection.shape[1] ** -0.25
