"""The same reductions and broadcasts for hyperedges: by the tuples of nodes that input and output share.

What keeps c axes is a table with one slot for each c-tuple of nodes that the output asks for: the graphs for c = 0, the
nodes for c = 1. Which hyperedge goes to which slot depends on the tuples only; it is computed once and kept in their
plan, so that the layers of a model share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomy import checks
from holonomy.layers.equivariant.basis.orbits import Group, Source, Target, positions_of
from holonomy.layers.equivariant.basis.partitions import Partition
from holonomy.structures import HyperedgePlan, Hyperedges
from holonomy.structures import plan as plans

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

__all__ = [
    "GroupPlan",
    "Slots",
    "check_hyperedges",
    "collect",
    "distribute",
    "group_plans",
    "in_pattern",
    "pruned_plans",
    "targets",
    "tuple_codes",
]


@dataclass(frozen=True)
class Slots:
    """Rows of a table of hyperedges, and the slot of each.

    Attributes:
        rows: which hyperedges take part.
        slots: the slot of each of these.
        whole: whether all rows take part, in their order, so that none needs to be looked up.
    """

    rows: Int[Tensor, " taking"]
    slots: Int[Tensor, " taking"]
    whole: bool

    def taken(self, values: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """The rows that take part."""
        return values if self.whole else values.index_select(0, self.rows)

    def added(self, result: Float[Tensor, "rows dim"], more: Float[Tensor, "taking dim"]) -> Float[Tensor, "rows dim"]:
        """Add to the rows that take part."""
        return result + more if self.whole else result.index_add(0, self.rows, more.to(result.dtype))


@dataclass(frozen=True)
class GroupPlan:
    """Where the hyperedges of input and output meet, for the classes of one group.

    Attributes:
        size: number of slots.
        graphs: the graph of each slot.
        sources: for each source of the group, input rows and their slots.
        targets: for each target of the group, output rows and their slots.
    """

    size: int
    graphs: Int[Tensor, " slots"]
    sources: tuple[Slots, ...]
    targets: tuple[Slots, ...]


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


def check_hyperedges(edges: Hyperedges, order: int, features: int) -> None:
    """Refuse hyperedges of another order or width."""
    if edges.order != order or edges.values.shape[1] != features:
        came = f"order {edges.order} with {edges.values.shape[1]}"
        raise ValueError(f"x must be hyperedges of order {order} with {features} features, got {came}.")


def targets(edges: Hyperedges, to: Int[Tensor, "tuples order_out"] | None, order: int) -> HyperedgePlan:
    """The tuples of a result: those asked for, or all of its order within a hyperedge (HOT section 4.2)."""
    if to is None:
        return edges.plan.projected(order)
    checks.integers("to", to)
    if to.ndim != 2 or to.shape[1] != order:
        raise ValueError(f"to must have shape (tuples, {order}), got {tuple(to.shape)}.")
    wanted = edges.plan.at(to)
    edges.plan.computed("checked", lambda: wanted is edges.plan or _check_tuples(wanted), wanted)
    return wanted


def _check_tuples(plan: HyperedgePlan) -> None:
    """Refuse tuples of nodes that are not there, or not of one graph: they would be looked up as others."""
    to = plan.indices
    if to.numel() == 0:
        return
    if int(to.min()) < 0 or int(to.max()) >= plan.num_nodes:
        raise ValueError(f"to must lie in [0, num_nodes = {plan.num_nodes}), got {int(to.min())} .. {int(to.max())}.")
    graphs = plan.batch[to]
    across = (graphs != graphs[:, :1]).any(1)
    if bool(across.any()):
        row = tuple(to[int(across.nonzero()[0])].tolist())
        raise ValueError(f"to must join nodes of one graph, got {row} across two.")


def tuple_codes(indices: Int[Tensor, "tuples order"], columns: Sequence[int], num_nodes: int) -> Int[Tensor, " tuples"]:
    """Number tuples of nodes, so that equal tuples get equal numbers."""
    codes = plans.tuple_codes(indices[:, list(columns)], num_nodes)
    if codes is None:
        raise ValueError(f"num_nodes must be below {int(2 ** (63 / len(columns)))} at this order, got {num_nodes}.")
    return codes


def group_plans(edges: HyperedgePlan, to: HyperedgePlan, groups: tuple[Group, ...]) -> tuple[GroupPlan, ...]:
    """Where hyperedges of the input meet tuples of the output, for each group of orbits."""
    return edges.computed(groups, lambda: tuple(_plan_group(edges, to, group) for group in groups), to)


def pruned_plans(
    edges: HyperedgePlan, to: HyperedgePlan, groups: tuple[Group, ...]
) -> tuple[tuple[GroupPlan, list[int], list[int]], ...]:
    """:func:`group_plans` without what no hyperedge of the input reaches: slots, and patterns without a row.

    Hyperedges of different nodes have no diagonals, and one direction of each does not reach the other: of the 52
    orbits of a lightweight map of order 3 one is left there.
    """
    return edges.computed(("pruned", groups), lambda: tuple(map(_pruned, group_plans(edges, to, groups))), to)


def _pruned(plan: GroupPlan) -> tuple[GroupPlan, list[int], list[int]]:
    reached = torch.zeros(plan.size, dtype=torch.bool, device=plan.graphs.device)
    for source in plan.sources:
        reached[source.slots] = True
    # Renumber the slots that some source reaches.
    number = reached.cumsum(0) - 1
    targets: list[Slots] = []
    for target in plan.targets:
        here = reached[target.slots]
        slots = number[target.slots[here]]
        targets.append(Slots(target.rows[here], slots, target.whole and len(slots) == len(here)))
    sources = [Slots(source.rows, number[source.slots], source.whole) for source in plan.sources]
    of_sources, of_targets = ([i for i, slots in enumerate(every) if len(slots.rows)] for every in (sources, targets))
    graphs = plan.graphs[reached]
    ends = tuple(sources[i] for i in of_sources), tuple(targets[i] for i in of_targets)
    return GroupPlan(len(graphs), graphs, *ends), of_sources, of_targets


def _plan_group(edges: HyperedgePlan, to: HyperedgePlan, group: Group) -> GroupPlan:
    ends = (edges.indices.shape[0], to.indices.shape[0])
    sources = [_rows(edges.indices, source.pattern) for source in group.sources]
    targets = [_rows(to.indices, target.pattern) for target in group.targets]
    if group.order == 0:
        slots_in = [edges.graphs[rows] for rows in sources]
        slots_out = [to.graphs[rows] for rows in targets]
        here = torch.arange(edges.num_graphs, device=edges.batch.device)
        return _paired(edges.num_graphs, here, sources, slots_in, targets, slots_out, ends)
    n = edges.num_nodes
    wanted_in = [_columns(edges.indices[rows], s) for rows, s in zip(sources, group.sources, strict=True)]
    wanted_out = [_columns(to.indices[rows], t) for rows, t in zip(targets, group.targets, strict=True)]
    columns = tuple(range(group.order))
    codes_in = [tuple_codes(tuples, columns, n) for tuples in wanted_in]
    codes_out = [tuple_codes(tuples, columns, n) for tuples in wanted_out]
    if group.order == 1:
        return _paired(n, edges.batch, sources, codes_in, targets, codes_out, ends)
    # Slots are the distinct node tuples that outputs ask for; inputs without a slot have no effect.
    distinct, inverse = torch.cat(codes_out).unique(return_inverse=True)
    slots_out = list(inverse.split([len(codes) for codes in codes_out]))
    slot_graphs = edges.batch[distinct // n ** (group.order - 1)]
    slots_in: list[Tensor] = []
    for index, code in enumerate(codes_in):
        place = torch.searchsorted(distinct, code).clamp(max=max(distinct.shape[0] - 1, 0))
        found = distinct[place] == code if distinct.shape[0] else torch.zeros_like(code, dtype=torch.bool)
        slots_in.append(place[found])
        sources[index] = sources[index][found]
    return _paired(distinct.shape[0], slot_graphs, sources, slots_in, targets, slots_out, ends)


def _paired(
    size: int,
    graphs: Tensor,
    sources: Sequence[Tensor],
    slots_in: Sequence[Tensor],
    targets: Sequence[Tensor],
    slots_out: Sequence[Tensor],
    ends: tuple[int, int],
) -> GroupPlan:
    ins, outs = (
        tuple(Slots(rows, slots, rows.shape[0] == end) for rows, slots in zip(every, where, strict=True))
        for every, where, end in zip((sources, targets), (slots_in, slots_out), ends, strict=True)
    )
    return GroupPlan(size, graphs, ins, outs)


def _rows(indices: Tensor, pattern: Partition) -> Tensor:
    return in_pattern(indices, pattern, exactly=False).nonzero()[:, 0]


def _columns(indices: Tensor, end: Source | Target) -> Tensor:
    first = positions_of(end.pattern)
    blocks = end.kept if isinstance(end, Source) else end.places
    return indices[:, [first[block] for block in blocks]]


def collect(values: Float[Tensor, "edges dim"], group: GroupPlan) -> Float[Tensor, "slots sources dim"]:
    """Sum the rows of each source into its slots."""
    empty = values.new_zeros(group.size, values.shape[1])
    columns = [empty.index_add(0, source.slots, source.taken(values)) for source in group.sources]
    return torch.stack(columns, 1)


def distribute(
    table: Float[Tensor, "slots targets dim"], group: GroupPlan, result: Float[Tensor, "tuples dim"]
) -> Float[Tensor, "tuples dim"]:
    """Add to each tuple of the output what lies in its slots."""
    # One unbind, not slices: the gradient of each slice would be a whole table of zeros.
    for column, target in zip(table.unbind(1), group.targets, strict=True):
        result = target.added(result, column.index_select(0, target.slots))
    return result
