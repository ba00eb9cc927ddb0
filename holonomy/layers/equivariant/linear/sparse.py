"""The same reductions and broadcasts for hyperedges: by the tuples of nodes that input and output share.

What keeps c axes is a table with one slot for each c-tuple of nodes that the output asks for: the graphs for c = 0, the
nodes for c = 1. Which hyperedge goes to which slot depends on the tuples only; it is computed once and kept in their
plan, so that the layers of a model share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._autograd import eager
from holonomy._shapes import Bool, Float, Int, Shaped
from holonomy.layers.equivariant.basis.orbits import OrbitGroup, positions_of
from holonomy.layers.equivariant.basis.partitions import Partition
from holonomy.structures import HyperedgePlan, Hyperedges
from holonomy.structures import plan as plans


@dataclass(frozen=True)
class Slots:
    """Rows of a table of hyperedges, and the slot of each."""

    rows: Int[Tensor, " taking"]  # which hyperedges take part
    slots: Int[Tensor, " taking"]  # the slot of each of these
    whole: bool  # whether all rows take part, in their order, so that none needs to be looked up

    def taken(self, values: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """The rows that take part."""
        return values if self.whole else values.index_select(0, self.rows)

    def added(self, result: Float[Tensor, "rows dim"], more: Float[Tensor, "taking dim"]) -> Float[Tensor, "rows dim"]:
        """Add to the rows that take part."""
        return result + more if self.whole else result.index_add(0, self.rows, more.to(result.dtype))


@dataclass(frozen=True)
class GroupPlan:
    """Where the hyperedges of input and output meet, for the classes of one group."""

    size: int  # number of slots
    graphs: Int[Tensor, " slots"]  # the graph of each slot
    inputs: tuple[Slots, ...]  # for each input pattern of the group, rows of the input and their slots
    outputs: tuple[Slots, ...]  # for each output pattern of the group, rows of the output and their slots


def in_pattern(indices: Int[Tensor, "tuples order"], pattern: Partition, *, exactly: bool) -> Bool[Tensor, " tuples"]:
    """Which tuples are constant on each block of a pattern."""
    fits = indices.new_ones(indices.shape[0], dtype=torch.bool)
    for position, block in enumerate(pattern):
        first = pattern.index(block)
        if first != position:
            fits &= indices[:, first] == indices[:, position]
    if exactly:
        for one, other in combinations(positions_of(pattern), 2):
            fits &= indices[:, one] != indices[:, other]
    return fits


def check_hyperedges(edges: Hyperedges, order: int, features: int, layer: nn.Module) -> None:
    """Refuse hyperedges of another order or width, and values that a layer cannot multiply with."""
    if edges.order != order or edges.values.shape[1] != features:
        came = f"order {edges.order} with {edges.values.shape[1]}"
        raise ValueError(f"x must be hyperedges of order {order} with {features} features, got {came}.")
    checks.shaped("x.values", edges.values, (edges.indices.shape[0], features), "(edges, features) = ")
    checks.last_axis("x.values", edges.values, features, "features", layer)


def targets(edges: Hyperedges, to: Int[Tensor, "tuples order_out"] | None, order: int) -> HyperedgePlan:
    """The tuples of a result: those asked for, or all of its order within a hyperedge (HOT section 4.2)."""
    if to is None:
        return edges.plan.projected(order)
    checks.integers("to", to)
    if to.ndim != 2 or to.shape[1] != order:
        raise ValueError(f"to must have shape (tuples, {order}), got {tuple(to.shape)}.")
    wanted = edges.plan.at(to.long())
    if wanted is not edges.plan:
        # Nodes that are not there, or of another graph, would be looked up as others.
        check = partial(plans.check_nodes, "to", wanted.indices, wanted.num_nodes, wanted.batch)
        edges.plan.computed("checked", check, wanted)
    return wanted


@eager
def distinct_targets(edges: Hyperedges, to: Int[Tensor, "tuples order"], order: int) -> tuple[Tensor, Tensor | None]:
    """The tuples that are asked for without repeats, and where each stands among them, None without any."""
    wanted = targets(edges, to, order)

    def find() -> tuple[Tensor, Tensor | None]:
        different, place = plans.each_once(to, edges.num_nodes)
        return (to, None) if len(different) == len(to) else (different, place)

    return edges.plan.computed("each once", find, wanted)


def tuple_codes(indices: Int[Tensor, "tuples order"], columns: Sequence[int], num_nodes: int) -> Int[Tensor, " tuples"]:
    """Number tuples of nodes, so that equal tuples get equal numbers."""
    codes = plans.tuple_codes(indices[:, list(columns)], num_nodes)
    if codes is None:
        raise ValueError(f"num_nodes must be below {int(2 ** (63 / len(columns)))} at this order, got {num_nodes}.")
    return codes


def group_plans(edges: HyperedgePlan, to: HyperedgePlan, groups: tuple[OrbitGroup, ...]) -> tuple[GroupPlan, ...]:
    """Where hyperedges of the input meet tuples of the output, for each group of orbits."""
    return edges.computed(groups, lambda: tuple(_plan_group(edges, to, group) for group in groups), to)


def pruned_plans(
    edges: HyperedgePlan, to: HyperedgePlan, groups: tuple[OrbitGroup, ...]
) -> tuple[tuple[GroupPlan, list[int], list[int]], ...]:
    """:func:`group_plans` without slots that no hyperedge reaches, and patterns without a row: often one is left."""
    return edges.computed(("pruned", groups), lambda: tuple(map(_pruned, group_plans(edges, to, groups))), to)


def _pruned(plan: GroupPlan) -> tuple[GroupPlan, list[int], list[int]]:
    reached = torch.zeros(plan.size, dtype=torch.bool, device=plan.graphs.device)
    for part in plan.inputs:
        reached[part.slots] = True
    # Renumber the slots that some input reaches.
    number = reached.cumsum(0) - 1
    inputs = [Slots(part.rows, number[part.slots], part.whole) for part in plan.inputs]
    outputs: list[Slots] = []
    for part in plan.outputs:
        here = reached[part.slots]
        slots = number[part.slots[here]]
        outputs.append(Slots(part.rows[here], slots, part.whole and len(slots) == len(here)))
    left_in, left_out = ([i for i, part in enumerate(every) if len(part.rows)] for every in (inputs, outputs))
    graphs = plan.graphs[reached]
    ends = tuple(inputs[i] for i in left_in), tuple(outputs[i] for i in left_out)
    return GroupPlan(len(graphs), graphs, *ends), left_in, left_out


def _plan_group(edges: HyperedgePlan, to: HyperedgePlan, group: OrbitGroup) -> GroupPlan:
    rows_in = [in_pattern(edges.indices, end.pattern, exactly=False).nonzero()[:, 0] for end in group.inputs]
    rows_out = [in_pattern(to.indices, end.pattern, exactly=False).nonzero()[:, 0] for end in group.outputs]
    if group.order == 0:
        size, graphs = edges.num_graphs, torch.arange(edges.num_graphs, device=edges.batch.device)
        slots_in = [edges.graphs[rows] for rows in rows_in]
        slots_out = [to.graphs[rows] for rows in rows_out]
    else:
        size, graphs = edges.num_nodes, edges.batch
        slots_in = [_codes(edges, rows, end.pattern, end.kept) for rows, end in zip(rows_in, group.inputs, strict=True)]
        slots_out = [
            _codes(to, rows, end.pattern, end.places) for rows, end in zip(rows_out, group.outputs, strict=True)
        ]
    if group.order > 1:
        # Slots are the distinct node tuples that outputs ask for; inputs without a slot have no effect.
        distinct, inverse = torch.cat(slots_out).unique(return_inverse=True)
        size, graphs = len(distinct), edges.batch[distinct // edges.num_nodes ** (group.order - 1)]
        slots_out = inverse.split([len(codes) for codes in slots_out])
        found = [places(codes, distinct) for codes in slots_in]
        rows_in = [rows[place >= 0] for rows, place in zip(rows_in, found, strict=True)]
        slots_in = [place[place >= 0] for place in found]
    ends = (edges, rows_in, slots_in), (to, rows_out, slots_out)
    inputs, outputs = (
        tuple(Slots(r, s, len(r) == len(end.indices)) for r, s in zip(rows, slots, strict=True))
        for end, rows, slots in ends
    )
    return GroupPlan(size, graphs, inputs, outputs)


def _codes(plan: HyperedgePlan, rows: Tensor, pattern: Partition, blocks: Sequence[int]) -> Tensor:
    """The codes of the nodes that rows of a pattern have at some of its blocks."""
    first = positions_of(pattern)
    return tuple_codes(plan.indices[rows], [first[block] for block in blocks], plan.num_nodes)


def places(codes: Tensor, ascending: Tensor) -> Tensor:
    """Where codes stand in an ascending list, -1 where they do not."""
    if len(ascending) == 0:
        return torch.full_like(codes, -1)
    place = torch.searchsorted(ascending, codes).clamp(max=len(ascending) - 1)
    return torch.where(ascending[place] == codes, place, -1)


def collect(values: Float[Tensor, "edges dim"], group: GroupPlan) -> Float[Tensor, "slots inputs dim"]:
    """Sum the rows of each input pattern into its slots."""
    empty = values.new_zeros(group.size, values.shape[1])
    return torch.stack([empty.index_add(0, part.slots, part.taken(values)) for part in group.inputs], 1)


def distribute(
    table: Float[Tensor, "slots outputs dim"], group: GroupPlan, result: Float[Tensor, "tuples dim"]
) -> Float[Tensor, "tuples dim"]:
    """Add to each tuple of the output what lies in its slots."""
    # One unbind, not slices: the gradient of each slice would be a whole table of zeros.
    for column, part in zip(table.unbind(1), group.outputs, strict=True):
        result = part.added(result, column.index_select(0, part.slots))
    return result
