"""Reductions and broadcasts of dense tensors ``(*batch, n, .., n, features)``: how a class is computed without n^(k+l).

The node axes stand before the last one; whatever stands before them is batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce as fold
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomy.layers.equivariant.basis.orbits import InputPattern, OrbitGroup, OutputPattern, number_of_blocks
from holonomy.layers.equivariant.basis.partitions import Partition

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


def diagonal(x: Shaped[Tensor, "..."], pattern: Partition) -> Shaped[Tensor, "..."]:
    """View the entries whose indices are equal within each block of a pattern."""
    axes = list(pattern)
    for position in reversed(range(len(pattern))):
        first = axes.index(axes[position])
        if first != position:
            start = x.ndim - 1 - len(axes)
            x = x.diagonal(dim1=start + first, dim2=start + position).movedim(-1, start + first)
            axes.pop(position)  # not `del`, which the compiler of torch 2.6 does not know; nor sets as keys, below
    return x


def reduce(x: Float[Tensor, "..."], sources: Iterable[InputPattern]) -> list[Float[Tensor, "..."]]:
    """Take the diagonal of each source and sum the blocks that it does not keep; the total is the sum of row sums."""
    known: dict[InputPattern, Tensor] = {}
    return [_reduced(x, source, known) for source in sources]


def _reduced(x: Tensor, source: InputPattern, known: dict[InputPattern, Tensor]) -> Tensor:
    if source not in known:
        missing = [block for block in range(number_of_blocks(source.pattern)) if block not in source.kept]
        if missing:
            kept = tuple(sorted((*source.kept, missing[-1])))
            parent = _reduced(x, InputPattern(source.pattern, kept), known)
            known[source] = parent.sum(kept.index(missing[-1]) - len(kept) - 1)
        else:
            known[source] = diagonal(x, source.pattern)
    return known[source]


def place(x: Float[Tensor, "..."], places: Sequence[int], order: int) -> Float[Tensor, "..."]:
    """Bring node axes to their places among the axes of a larger tensor; the other axes have length one."""
    here = len(places)
    ascending = sorted(range(here), key=lambda axis: places[axis])
    batch = x.ndim - here - 1
    x = x.permute(*range(batch), *(batch + axis for axis in ascending), x.ndim - 1)
    taken = set(places)
    for axis in range(order):
        if axis not in taken:
            x = x.unsqueeze(batch + axis)
    return x


def spread(parts: Sequence[tuple[OutputPattern, Float[Tensor, "..."]]], order: int, nodes: int) -> Float[Tensor, "..."]:
    """Add up contributions, each broadcast over the tuples of its target."""
    patterns = sorted({target.pattern for target, _ in parts}, key=lambda p: (-number_of_blocks(p), p))
    sums = {pattern: _total([part for part in parts if part[0].pattern == pattern]) for pattern in patterns}
    finest = tuple(range(order))
    if order == 0:
        return sums[finest][0]
    batch = torch.broadcast_shapes(*(x.shape[: -1 - number_of_blocks(p)] for p, (x, _) in sums.items()))
    shape = (*batch, *[nodes] * order, parts[0][1].shape[-1])
    whole, fresh = sums.pop(finest, (None, True))
    if whole is None:
        result = parts[0][1].new_zeros(shape)
    elif whole.shape == shape:
        # In place only in a tensor made here, never in an input.
        result = whole if fresh or not sums else whole.clone()
    else:
        result = whole.expand(shape).contiguous()
    for pattern, (x, _) in sums.items():
        diagonal(result, pattern).add_(x)
    return result


def _total(parts: Sequence[tuple[OutputPattern, Tensor]]) -> tuple[Tensor, bool]:
    """Add the contributions to one pattern, those over the same axes first; whether the sum is new, not a view."""
    blocks = number_of_blocks(parts[0][0].pattern)
    by_axes: dict[tuple[int, ...], Tensor] = {}
    for target, x in parts:
        axes = tuple(sorted(target.places))
        placed = place(x, target.places, blocks)
        by_axes[axes] = by_axes[axes] + placed if axes in by_axes else placed
    smallest_first = sorted(by_axes, key=lambda axes: (len(axes), axes))
    first, *others = (by_axes[axes] for axes in smallest_first)
    return fold(_sum, others, (first, False))


def _sum(left: tuple[Tensor, bool], right: Tensor) -> tuple[Tensor, bool]:
    """A sum, in place where its left side is one already, whose shape it keeps."""
    total, fresh = left
    if fresh and total.shape == torch.broadcast_shapes(total.shape, right.shape):
        return total.add_(right), True
    return total + right, True


def combine(
    x: Float[Tensor, "..."],
    weights: Sequence[Float[Tensor, "..."]],
    groups: Sequence[OrbitGroup],
    order: int,
    biases: Sequence[tuple[Partition, Float[Tensor, " dim_out"]]] = (),
) -> Float[Tensor, "..."]:
    """Reduce, multiply and spread: the sum of all classes."""
    # Each is the transpose of another: a backward pass written by hand saved no time.
    parts: list[tuple[OutputPattern, Tensor]] = []
    known: dict[InputPattern, Tensor] = {}
    for group, weight in zip(groups, weights, strict=True):
        table = torch.cat([_reduced(x, source, known) for source in group.inputs], -1)
        if group.order == order:
            # As large as the result: one after the other, so that none has to be cut out of a larger one.
            parts += [(t, table @ w.flatten(0, 1)) for t, w in zip(group.outputs, weight.unbind(1), strict=True)]
        else:
            product = (table @ weight.transpose(1, 2).flatten(2).flatten(0, 1)).unflatten(-1, (len(group.outputs), -1))
            # Not unbind: a result that is one of its views could not be changed in place.
            parts += [(t, product.select(-2, index)) for index, t in enumerate(group.outputs)]
    parts += [(OutputPattern(pattern, ()), row.to(parts[0][1].dtype)) for pattern, row in biases]
    return spread(parts, order, x.shape[-2] if x.ndim > 1 else 0)
