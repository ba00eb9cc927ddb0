r"""The equivalence classes of an equivariant map, sorted by what has to be computed for them.

A class :math:`\mu` is a partition of the positions :math:`(i_1 .. i_k, j_1 .. j_l)`. Cut between input and output it is
a pattern of the input, a pattern of the output, and the blocks that both share. What the input contributes, a
:class:`Source`, is its diagonal in that pattern with the blocks that the output does not know summed away; where that
goes, a :class:`Target`, is a choice of output blocks for what is left. Many classes have the same source: the 203 of
3 -> 3 have 22.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from typing import NamedTuple

from holonomy.layers.equivariant.basis.partitions import Partition, canonical, set_partitions

__all__ = [
    "Group",
    "Pair",
    "Source",
    "Target",
    "Term",
    "everything",
    "extensions",
    "free_axes",
    "groups",
    "number_of_blocks",
    "pairs",
    "positions_of",
]


class Source(NamedTuple):
    """An input pattern and those of its blocks that stay, in ascending order; the others are summed over."""

    pattern: Partition
    kept: tuple[int, ...]


class Target(NamedTuple):
    """An output pattern and the block that each axis of a source goes to; the others are broadcast over."""

    pattern: Partition
    places: tuple[int, ...]


class Pair(NamedTuple):
    """A class, cut into source and target."""

    source: Source
    target: Target


class Term(NamedTuple):
    """A partial matching of input and output blocks, with its sign in a sum."""

    sign: int
    kept: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """All classes whose sources keep as many axes: any source goes to any target.

    Attributes:
        order: the number of axes kept.
        sources: what the input contributes.
        targets: where it goes.
        classes: index of the class of each source and target, in the order of ``set_partitions(k + l)``.
    """

    order: int
    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    classes: tuple[tuple[int, ...], ...]


def number_of_blocks(pattern: Partition) -> int:
    """Count the blocks of a partition."""
    return max(pattern, default=-1) + 1


def positions_of(pattern: Partition) -> tuple[int, ...]:
    """Return the first position of each block."""
    return tuple(pattern.index(block) for block in range(number_of_blocks(pattern)))


@lru_cache(maxsize=64)
def pairs(order_in: int, order_out: int) -> tuple[Pair, ...]:
    """Cut every class into source and target."""
    found: list[Pair] = []
    for partition in set_partitions(order_in + order_out):
        # A block with positions on both sides is an axis that input and output share.
        pattern_in, tail = partition[:order_in], partition[order_in:]
        pattern_out = canonical(tail)
        shared = sorted(set(pattern_in) & set(tail))
        places = tuple(pattern_out[tail.index(block)] for block in shared)
        found.append(Pair(Source(pattern_in, tuple(shared)), Target(pattern_out, places)))
    return tuple(found)


@lru_cache(maxsize=64)
def groups(order_in: int, order_out: int, chosen: tuple[int, ...]) -> tuple[Group, ...]:
    """Sort classes into groups in which any source goes to any target."""
    every = pairs(order_in, order_out)
    found: list[Group] = []
    for order in range(min(order_in, order_out) + 1):
        members = {every[index]: index for index in chosen if len(every[index].source.kept) == order}
        sources = tuple(dict.fromkeys(pair.source for pair in members))
        targets = tuple(dict.fromkeys(pair.target for pair in members))
        if members:
            classes = tuple(tuple(members[Pair(s, t)] for t in targets) for s in sources)
            found.append(Group(order, sources, targets, classes))
    return tuple(found)


def free_axes(pair: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the blocks of the input and of the output that a class does not share."""
    blocks_in, blocks_out = number_of_blocks(pair.source.pattern), number_of_blocks(pair.target.pattern)
    free_in = tuple(block for block in range(blocks_in) if block not in pair.source.kept)
    return free_in, tuple(block for block in range(blocks_out) if block not in pair.target.places)


def everything() -> Term:
    """Return the matching of nothing: the sum over all of the input, whatever the output."""
    return Term(1, (), ())


@lru_cache(maxsize=512)
def extensions(pair: Pair) -> tuple[Term, ...]:
    """Write the sum over the tuples of exactly a class by sums over those that share at least some blocks.

    Within the strata of tuples of different nodes, what a tuple of the input and one of the output share is a partial
    matching of their blocks, and inclusion and exclusion run over the matchings that contain the one of the class.
    """
    free_in, free_out = free_axes(pair)
    terms: list[Term] = []
    # Each further shared block changes the sign: sum over tuples that differ = sum of (-1)^more over those that agree.
    for more in range(min(len(free_in), len(free_out)) + 1):
        for chosen in combinations(free_in, more):
            for places in permutations(free_out, more):
                matching = sorted(zip((*pair.source.kept, *chosen), (*pair.target.places, *places), strict=True))
                terms.append(Term((-1) ** more, tuple(a for a, _ in matching), tuple(b for _, b in matching)))
    return tuple(terms)
