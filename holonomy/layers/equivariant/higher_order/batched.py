r"""Sparse kernel attention with the queries, keys and values of all classes out of one product each.

A class after the other reads every hyperedge fifteen times over for 2 -> 2. Here what the nodes of a tuple have of
their own (:mod:`holonomy.layers.equivariant.higher_order.gathered`) is gathered once for each pattern, and multiplied
by the maps of all its classes together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holonomy.layers.equivariant.basis.orbits import InputPattern, Orbit, free_axes, number_of_blocks
from holonomy.layers.equivariant.basis.partitions import Partition
from holonomy.layers.equivariant.higher_order import centering, sparse
from holonomy.layers.equivariant.higher_order.gathered import GatherPlan, gather, gather_plan
from holonomy.layers.equivariant.higher_order.maps import Classes, Maps, entry_patterns
from holonomy.ops.performer import attend_pooled, pool_keys
from holonomy.structures import HyperedgePlan, Hyperedges

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["coupled", "decoupled"]

# Hyperedges from which on the backward pass computes a class again instead of keeping it.
_RECOMPUTED_FROM = 2**18


def coupled(classes: Classes, maps: Maps, x: Hyperedges, to: HyperedgePlan) -> Float[Tensor, "tuples dim"]:
    """All queries at once, all keys and all values, then a class after the other."""
    ins, outs = _both_ends(classes, x, to)
    heads, again = maps.heads, torch.is_grad_enabled() and x.indices.shape[0] > _RECOMPUTED_FROM
    ends: dict[Orbit, tuple[GatherPlan, Tensor, Tensor]] = {}
    away = centering.of_classes(classes, maps, centering.of_hyperedges(x, classes.entries))
    for pattern, (plan, table) in ins.items():
        found = classes.by_input[pattern]
        shift = torch.cat([away[orbit] for orbit in found], -1).index_select(0, plan.graphs)
        # Keys less their center, and values, of all orbits of the pattern at once.
        keys = (table @ maps.keys[pattern] - shift).chunk(len(found), -1)
        matrix = maps.value[[classes.orbits.index(orbit) for orbit in found]].transpose(0, 1).flatten(1)
        values = (x.values.index_select(0, plan.rows) @ matrix).chunk(len(found), -1)
        ends |= {orbit: (plan, k, v) for orbit, k, v in zip(found, keys, values, strict=True)}
    result = x.values.new_zeros(to.indices.shape[0], maps.value.shape[1])
    for pattern, (plan, table) in outs.items():
        # Orbits of weight one first; to these the averages of the others are added, through their output maps.
        total = table @ _direct(classes, maps, pattern)
        found = classes.by_output.get(pattern, [])
        if found:
            weight, bias = maps.queries[pattern]
            for orbit, query in zip(found, (table @ weight + bias).chunk(len(found), -1), strict=True):
                rows, *of_keys = ends[orbit]
                q, k, v = (z.unflatten(-1, (heads, -1)) for z in (query, *of_keys))
                step = (orbit, x.plan, rows, plan, q, k, v, maps.projection)
                function = sparse.coupled_class
                mixed = checkpoint(function, *step, use_reentrant=False) if again else function(*step)
                total = total + mixed.flatten(1) @ maps.out[classes.orbits.index(orbit)]
        result = result.index_add(0, plan.rows, total.to(result.dtype))
    return result


def decoupled(classes: Classes, maps: Maps, x: Hyperedges, to: HyperedgePlan) -> Float[Tensor, "tuples dim"]:
    """The same where each class sums over all keys of a graph: all classes are pooled at once."""
    ins, outs = _both_ends(classes, x, to)
    away = centering.of_classes(classes, maps, centering.of_hyperedges(x, classes.entries))
    shift = {p: torch.cat([away[orbit] for orbit in found], -1) for p, found in classes.by_input.items()}
    parts: dict[Partition, list[Tensor]] = {p: [] for p in outs}
    for graph in range(x.num_graphs):
        sums: dict[Orbit, tuple[Tensor, Tensor]] = {}
        for pattern, (plan, table) in ins.items():
            here = table[plan.bounds[graph] : plan.bounds[graph + 1]]
            sums |= _pooled(classes, maps, pattern, here, shift[pattern][graph])
        for pattern, (plan, table) in outs.items():
            here = table[plan.bounds[graph] : plan.bounds[graph + 1]]
            parts[pattern].append(_attend(classes, maps, pattern, here, sums))
    result = x.values.new_zeros(to.indices.shape[0], maps.value.shape[1])
    for pattern, found in parts.items():
        result = result.index_add(0, outs[pattern][0].rows, torch.cat(found).to(result.dtype))
    return result


_Ends = dict[Partition, tuple[GatherPlan, Tensor]]


def _both_ends(classes: Classes, x: Hyperedges, to: HyperedgePlan) -> tuple[_Ends, _Ends]:
    """The entries of the tuples of each pattern, of the hyperedges and of those that are asked for."""

    def gathered(tuples: HyperedgePlan, pattern: Partition) -> tuple[GatherPlan, Tensor]:
        plan = gather_plan(x.plan, tuples, pattern)
        return plan, gather(x.values, plan)

    patterns = sorted({orbit.writes.pattern for orbit in classes.orbits})
    return {p: gathered(x.plan, p) for p in classes.by_input}, {p: gathered(to, p) for p in patterns}


def _pooled(
    classes: Classes, maps: Maps, pattern: Partition, keys: Tensor, shift: Tensor
) -> dict[Orbit, tuple[Tensor, Tensor]]:
    """What the classes of an input pattern sum over the keys of a graph, mapped to the output."""
    found, features = classes.by_input[pattern], maps.value.shape[1]
    if keys.shape[0] == 0:
        logs = keys.new_zeros(len(found), maps.heads, maps.projection.shape[0])
        return dict(zip(found, zip(logs, logs.new_zeros(*logs.shape, features), strict=True), strict=True))
    # Values are the entry of the tuple itself: these columns of what is gathered.
    blocks = number_of_blocks(pattern)
    finest = tuple(range(blocks))
    itself = entry_patterns(classes.order_in, blocks).index((InputPattern(pattern, finest), finest)) * features
    weight, bias = maps.keys[pattern] * _root(maps), -shift * _root(maps)
    both = pool_keys(keys, weight, bias, maps.projection, itself, itself + features)
    logs, means = (x.unflatten(0, (len(found), -1)) for x in both)
    # Means of inputs go through value and output map together, which is less work than means of values.
    chosen = [classes.orbits.index(orbit) for orbit in found]
    value = maps.value[chosen].unflatten(-1, (maps.heads, -1)).transpose(1, 2)
    out = maps.out[chosen].unflatten(1, (maps.heads, -1))
    return dict(zip(found, zip(logs, means @ value @ out, strict=True), strict=True))


def _attend(
    classes: Classes, maps: Maps, pattern: Partition, queries: Tensor, sums: dict[Orbit, tuple[Tensor, Tensor]]
) -> Tensor:
    """The sum of all classes of an output pattern at the queries of a graph."""
    direct = _direct(classes, maps, pattern)
    found = classes.by_output.get(pattern, [])
    if not found:
        return queries @ direct
    weight, bias = maps.queries[pattern]
    logs, means = (torch.cat(column) for column in zip(*(sums[orbit] for orbit in found), strict=True))
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
