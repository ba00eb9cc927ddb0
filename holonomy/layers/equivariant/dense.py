"""Reductions and broadcasts of dense tensors ``(*batch, n, .., n, features)``: how a class is computed without n^(k+l).

The node axes stand before the last one; whatever stands before them is batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce as fold
from operator import add
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomy.layers.equivariant.classes import Source, Target, number_of_blocks
from holonomy.layers.equivariant.partitions import Partition

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

__all__ = ["diagonal", "place", "reduce", "spread"]


def diagonal(x: Shaped[Tensor, "..."], pattern: Partition) -> Shaped[Tensor, "..."]:
    """View the entries whose indices are equal within each block of a pattern.

    Args:
        x: ``(*batch, n, .., n, features)``, one node axis for each position of the pattern.
        pattern: a restricted growth string.

    Returns:
        ``(*batch, n, .., n, features)``, one node axis for each block; a view, so that it can be written to.

    >>> diagonal(torch.arange(4.0).reshape(2, 2, 1), (0, 0)).flatten()
    tensor([0., 3.])
    """
    axes = list(pattern)
    for position in reversed(range(len(pattern))):
        first = axes.index(axes[position])
        if first != position:
            start = x.ndim - 1 - len(axes)
            x = x.diagonal(dim1=start + first, dim2=start + position).movedim(-1, start + first)
            del axes[position]
    return x


def reduce(x: Float[Tensor, "..."], sources: Iterable[Source]) -> list[Float[Tensor, "..."]]:
    """Take the diagonal of each source and sum the blocks that it does not keep.

    Sums are shared: the total is the sum of the row sums.

    Args:
        x: ``(*batch, n, .., n, features)``, one node axis for each position of the patterns.
        sources: what to compute.

    Returns:
        For each source ``(*batch, n, .., n, features)``, one node axis for each block kept.

    >>> reduce(torch.ones(3, 3, 1), [Source((0, 1), (0,)), Source((0, 0), ())])
    [tensor([[3.], [3.], [3.]]), tensor([3.])]
    """
    known: dict[Source, Tensor] = {}
    return [_reduced(x, source, known) for source in sources]


def _reduced(x: Tensor, source: Source, known: dict[Source, Tensor]) -> Tensor:
    if source not in known:
        missing = [block for block in range(number_of_blocks(source.pattern)) if block not in source.kept]
        if missing:
            kept = tuple(sorted((*source.kept, missing[-1])))
            parent = _reduced(x, Source(source.pattern, kept), known)
            known[source] = parent.sum(kept.index(missing[-1]) - len(kept) - 1)
        else:
            known[source] = diagonal(x, source.pattern)
    return known[source]


def place(x: Float[Tensor, "..."], places: Sequence[int], order: int) -> Float[Tensor, "..."]:
    """Bring node axes to their places among the axes of a larger tensor; the other axes have length one.

    Args:
        x: ``(*batch, n, .., n, features)`` with one node axis for each place.
        places: the axis of the result, 0 .. order - 1, that each axis goes to.
        order: number of node axes of the result.

    Returns:
        ``(*batch, .., features)`` with ``order`` node axes of length n or 1.

    >>> place(torch.zeros(4, 5, 1), (1, 0), 3).shape
    torch.Size([5, 4, 1, 1])
    """
    here = len(places)
    ascending = sorted(range(here), key=lambda axis: places[axis])
    batch = x.ndim - here - 1
    x = x.permute(*range(batch), *(batch + axis for axis in ascending), x.ndim - 1)
    taken = set(places)
    for axis in range(order):
        if axis not in taken:
            x = x.unsqueeze(batch + axis)
    return x


def spread(parts: Sequence[tuple[Target, Float[Tensor, "..."]]], order: int, nodes: int) -> Float[Tensor, "..."]:
    """Add up contributions, each broadcast over the tuples of its target.

    Args:
        parts: targets and ``(*batch, n, .., n, features)`` with one node axis for each place.
        order: l, number of node axes of the result.
        nodes: n.

    Returns:
        ``(*batch, n, .., n, features)``.

    >>> parts = [(Target((0, 1), ()), torch.ones(1)), (Target((0, 0), (0,)), torch.tensor([[1.0], [2.0]]))]
    >>> spread(parts, 2, 2).squeeze(-1)
    tensor([[2., 1.],
            [1., 3.]])
    """
    patterns = sorted({target.pattern for target, _ in parts}, key=lambda p: (-number_of_blocks(p), p))
    sums = {pattern: _total([part for part in parts if part[0].pattern == pattern]) for pattern in patterns}
    finest = tuple(range(order))
    if order == 0:
        return sums[finest]
    batch = torch.broadcast_shapes(*(x.shape[: -1 - number_of_blocks(p)] for p, x in sums.items()))
    shape = (*batch, *[nodes] * order, parts[0][1].shape[-1])
    whole = sums.pop(finest, None)
    if whole is None:
        result = parts[0][1].new_zeros(shape)
    else:
        result = whole if whole.shape == shape else whole.expand(shape).contiguous()
    for pattern, x in sums.items():
        diagonal(result, pattern).add_(x)
    return result


def _total(parts: Sequence[tuple[Target, Tensor]]) -> Tensor:
    """Add the contributions to one pattern, those over the same axes first, so that few additions are large."""
    blocks = number_of_blocks(parts[0][0].pattern)
    by_axes: dict[frozenset[int], Tensor] = {}
    for target, x in parts:
        axes = frozenset(target.places)
        placed = place(x, target.places, blocks)
        by_axes[axes] = by_axes[axes] + placed if axes in by_axes else placed
    smallest_first = sorted(by_axes, key=lambda axes: (len(axes), sorted(axes)))
    return fold(add, (by_axes[axes] for axes in smallest_first))
