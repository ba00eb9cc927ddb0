r"""The orbits of index tuples, sorted by what has to be computed for them.

An orbit, the equivalence class :math:`\mu` of HOT eq. 1, is a partition of the positions
:math:`(i_1 .. i_k, j_1 .. j_l)`. Cut between input and output it is a pattern of the input, a pattern of the output,
and the blocks that both share. What the input contributes, an :class:`InputPattern`, is its diagonal in that pattern,
summed over the blocks that the output does not share; where that goes, an :class:`OutputPattern`, is a choice of output
blocks for what is left. Many orbits read the same: the 203 of 3 -> 3 have 22 input patterns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from typing import NamedTuple

from holonomy.layers.equivariant.basis.partitions import Partition, canonical, set_partitions


class InputPattern(NamedTuple):
    """A pattern of the input and those of its blocks that are kept, ascending; the others are summed over."""

    pattern: Partition
    kept: tuple[int, ...]


class OutputPattern(NamedTuple):
    """A pattern of the output and the block that each kept axis goes to; the others are broadcast over."""

    pattern: Partition
    places: tuple[int, ...]


class Orbit(NamedTuple):
    """An orbit, cut into what is read and where it goes."""

    reads: InputPattern
    writes: OutputPattern


class Term(NamedTuple):
    """A partial matching of input and output blocks, with its sign in a sum."""

    sign: int
    kept: tuple[int, ...]
    places: tuple[int, ...]


EVERYTHING = Term(1, (), ())  #: the matching of nothing, the sum over all of the input, whatever the output


@dataclass(frozen=True)
class OrbitGroup:
    """All orbits that keep as many axes: any input pattern goes to any output pattern."""

    order: int  # the number of axes kept
    inputs: tuple[InputPattern, ...]  # what the input contributes
    outputs: tuple[OutputPattern, ...]  # where it goes
    # Index of the orbit of each input and output, in the order of set_partitions(k + l).
    classes: tuple[tuple[int, ...], ...]


def number_of_blocks(pattern: Partition) -> int:
    """Count the blocks of a partition."""
    return max(pattern, default=-1) + 1


def positions_of(pattern: Partition) -> tuple[int, ...]:
    """Return the first position of each block."""
    return tuple(pattern.index(block) for block in range(number_of_blocks(pattern)))


@lru_cache(maxsize=64)
def orbits(order_in: int, order_out: int) -> tuple[Orbit, ...]:
    """Cut every partition of the positions between input and output."""
    found: list[Orbit] = []
    for partition in set_partitions(order_in + order_out):
        # A block with positions on both sides is an axis that input and output share.
        labels_in, labels_out = partition[:order_in], partition[order_in:]
        pattern_out = canonical(labels_out)
        shared = sorted(set(labels_in) & set(labels_out))
        places = tuple(pattern_out[labels_out.index(block)] for block in shared)
        # The labels of the input, which come first, are canonical as they are.
        found.append(Orbit(InputPattern(labels_in, tuple(shared)), OutputPattern(pattern_out, places)))
    return tuple(found)


@lru_cache(maxsize=64)
def groups(order_in: int, order_out: int, chosen: tuple[int, ...]) -> tuple[OrbitGroup, ...]:
    """Sort orbits into groups in which any input pattern goes to any output pattern."""
    every = orbits(order_in, order_out)
    found: list[OrbitGroup] = []
    for order in range(min(order_in, order_out) + 1):
        members = {every[index]: index for index in chosen if len(every[index].reads.kept) == order}
        inputs = tuple(dict.fromkeys(orbit.reads for orbit in members))
        outputs = tuple(dict.fromkeys(orbit.writes for orbit in members))
        if members:
            classes = tuple(tuple(members[Orbit(i, o)] for o in outputs) for i in inputs)
            found.append(OrbitGroup(order, inputs, outputs, classes))
    return tuple(found)


def free_axes(orbit: Orbit) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the blocks of the input and of the output that an orbit does not share."""
    blocks_in, blocks_out = number_of_blocks(orbit.reads.pattern), number_of_blocks(orbit.writes.pattern)
    free_in = tuple(block for block in range(blocks_in) if block not in orbit.reads.kept)
    return free_in, tuple(block for block in range(blocks_out) if block not in orbit.writes.places)


def reads_entries(orbit: Orbit) -> bool:
    """Whether it reads entries by themselves, without a sum, for tuples of different nodes (HOT Prop. 1 and 2)."""
    pattern = orbit.writes.pattern
    return pattern == tuple(range(len(pattern))) and not free_axes(orbit)[0]


@lru_cache(maxsize=512)
def extensions(orbit: Orbit) -> tuple[Term, ...]:
    """The sum over exactly an orbit by sums that share at least some blocks."""
    # Inclusion and exclusion over the partial matchings of input and output blocks that contain the one of the orbit.
    free_in, free_out = free_axes(orbit)
    terms: list[Term] = []
    # Each further shared block changes the sign: sum over tuples that differ = sum of (-1)^more over those that agree.
    for more in range(min(len(free_in), len(free_out)) + 1):
        for chosen in combinations(free_in, more):
            for places in permutations(free_out, more):
                matching = sorted(zip((*orbit.reads.kept, *chosen), (*orbit.writes.places, *places), strict=True))
                terms.append(Term((-1) ** more, tuple(a for a, _ in matching), tuple(b for _, b in matching)))
    return tuple(terms)
