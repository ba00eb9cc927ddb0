r"""What the evaluators of higher-order attention share: its classes by their two ends, and its maps as matrices."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from holonomy.layers.equivariant.basis.orbits import (
    Pair,
    Source,
    Term,
    everything,
    extensions,
    free_axes,
    number_of_blocks,
    pairs,
)
from holonomy.layers.equivariant.basis.partitions import Partition

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["Classes", "Lookup", "Maps", "by_class", "classes_of", "lookups"]

Lookup = tuple[Source, tuple[int, ...]]
"""What a lightweight map reads of a tuple: an entry of that source, at those blocks of the tuple."""


class Classes(NamedTuple):
    """The classes of an attention."""

    order_in: int
    pairs: tuple[Pair, ...]
    by_input: dict[Partition, list[Pair]]
    by_output: dict[Partition, list[Pair]]
    terms: dict[Pair, tuple[Term, ...]]
    read: dict[Partition, tuple[Partition, ...]]
    sources: tuple[Partition, ...]


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
    chosen = tuple(pair for pair in pairs(order_in, order_out) if pair.source.kept or not local)
    attended = [pair for pair in chosen if free_axes(pair)[0]]
    by_input: dict[Partition, list[Pair]] = {}
    by_output: dict[Partition, list[Pair]] = {}
    for pair in attended:
        by_input.setdefault(pair.source.pattern, []).append(pair)
        by_output.setdefault(pair.target.pattern, []).append(pair)
    by_input, by_output = dict(sorted(by_input.items())), dict(sorted(by_output.items()))
    ends = (*by_input, *by_output)
    read = {p: tuple(source.pattern for source, _ in lookups(order_in, number_of_blocks(p))) for p in ends}
    sources = tuple(sorted({pattern for found in read.values() for pattern in found}))
    terms = {pair: extensions(pair) if coupled else (everything(),) for pair in attended}
    return Classes(order_in, chosen, by_input, by_output, terms, read, sources)


@lru_cache(maxsize=64)
def lookups(order: int, blocks: int) -> tuple[Lookup, ...]:
    """What a lightweight map to tuples of different nodes reads, in the order of its weights."""
    finest = tuple(range(blocks))
    every = pairs(order, blocks)
    return tuple((p.source, p.target.places) for p in every if p.target.pattern == finest and not free_axes(p)[0])


def by_class(
    projected: dict[Partition, Tensor], ends: dict[Partition, list[Pair]]
) -> dict[Pair, Float[Tensor, "*rows width"]]:
    """Cut the queries or keys of all classes of a pattern into those of each."""
    cut: dict[Pair, Tensor] = {}
    for pattern, found in ends.items():
        cut.update(zip(found, projected[pattern].chunk(len(found), -1), strict=True))
    return cut
