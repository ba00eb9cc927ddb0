"""Reductions and broadcasts of dense tensors ``(*batch, n, .., n, features)``: how a class is computed without n^(k+l).

The node axes stand before the last one; whatever stands before them is batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy._shapes import Float, Shaped
from holonomy.layers.equivariant.basis.orbits import InputPattern, OrbitGroup, OutputPattern, number_of_blocks
from holonomy.layers.equivariant.basis.partitions import Partition


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
    if tuple(places) == tuple(range(order)):
        return x
    batch = x.ndim - len(places) - 1
    x = _permuted(x, sorted(range(len(places)), key=places.__getitem__))
    for axis in range(order):
        if axis not in places:
            x = x.unsqueeze(batch + axis)
    return x


def _permuted(x: Tensor, axes: Sequence[int]) -> Tensor:
    batch = x.ndim - len(axes) - 1
    return x.permute(*range(batch), *(batch + axis for axis in axes), x.ndim - 1)


def spread(parts: Sequence[tuple[OutputPattern, Float[Tensor, "..."]]], order: int, nodes: int) -> Float[Tensor, "..."]:
    """Add up contributions, each broadcast over the tuples of its target; where autograd is off, in their memory."""
    sums: dict[Partition, dict[tuple[int, ...], Tensor]] = {}
    for (pattern, places), x in parts:
        axes = tuple(sorted(places))
        of_pattern, placed = sums.setdefault(pattern, {}), place(x, places, number_of_blocks(pattern))
        of_pattern[axes] = _plus(of_pattern[axes], placed) if axes in of_pattern else placed
    totals = {pattern: _total(by_axes) for pattern, by_axes in sums.items()}
    finest = tuple(range(order))
    if order == 0:
        return totals[finest]
    batch = torch.broadcast_shapes(*(x.shape[: -1 - number_of_blocks(p)] for p, x in totals.items()))
    shape = (*batch, *[nodes] * order, parts[0][1].shape[-1])
    result = totals.pop(finest, None)
    if result is None:
        result = parts[0][1].new_zeros(shape)
    elif result.shape != shape:
        result = result.expand(shape).clone(memory_format=torch.contiguous_format)  # a view, where there is no node
    elif totals and not _overwrites() and sum(target.pattern == finest for target, _ in parts) == 1:
        result = result.clone()  # in place only in a tensor made here
    for pattern in sorted(totals, key=lambda p: (-number_of_blocks(p), p)):
        diagonal(result, pattern).add_(totals[pattern])
    return result


def _total(by_axes: dict[tuple[int, ...], Tensor]) -> Tensor:
    """The sum of tensors over some axes each, every one added to the smallest that covers it: few sums are large."""
    ascending = sorted(by_axes, key=lambda axes: (len(axes), axes))
    for rank, axes in enumerate(ascending[:-1], 1):
        covering = [other for other in ascending[rank:] if set(axes) < set(other)] or ascending[-1:]
        larger = covering[0]
        by_axes[larger] = _plus(by_axes[larger], by_axes[axes], covered=set(axes) < set(larger))
    return by_axes[ascending[-1]]


def _plus(total: Tensor, more: Tensor, *, covered: bool = True) -> Tensor:
    return total.add_(more) if covered and _overwrites() else total + more


def _overwrites() -> bool:
    return not (torch.is_grad_enabled() or _autograd.watched())


def combine(
    x: Float[Tensor, "..."],
    weights: Sequence[Float[Tensor, "..."]],
    groups: Sequence[OrbitGroup],
    order: int,
    biases: Sequence[tuple[Partition, Float[Tensor, " dim_out"]]] = (),
) -> Float[Tensor, "..."]:
    """Reduce, multiply and spread: the sum of all classes."""
    patterns, rows = [pattern for pattern, _ in biases], [row for _, row in biases]
    if _autograd.supports_custom_backward(x, *weights, *rows):
        return _autograd.apply_function(_Combine, x, tuple(groups), order, patterns, *weights, *rows)
    return combine_reference(x, groups, order, patterns, *weights, *rows)


def combine_reference(
    x: Float[Tensor, "..."], groups: Sequence[OrbitGroup], order: int, patterns: Sequence[Partition], *learned: Tensor
) -> Float[Tensor, "..."]:
    """The reference of :func:`combine`; ``learned`` are the weights of each group, then the biases of each pattern."""
    return _combined(x, _tables(x, groups), groups, order, patterns, learned)


def _tables(x: Tensor, groups: Sequence[OrbitGroup]) -> list[Tensor]:
    """What the input contributes to each group, side by side."""
    known: dict[InputPattern, Tensor] = {}
    return [_beside([_reduced(x, source, known) for source in group.inputs]) for group in groups]


def _beside(tables: list[Tensor]) -> Tensor:
    return tables[0] if len(tables) == 1 else torch.cat(tables, -1)


def _matrix(weight: Tensor) -> Tensor:
    return weight.transpose(1, 2).flatten(2).flatten(0, 1)


def _combined(
    x: Tensor,
    tables: Sequence[Tensor],
    groups: Sequence[OrbitGroup],
    order: int,
    patterns: Sequence[Partition],
    learned: Sequence[Tensor],
) -> Tensor:
    parts: list[tuple[OutputPattern, Tensor]] = []
    for group, table, weight in zip(groups, tables, learned[: len(groups)], strict=True):
        if group.order == order:
            # As large as the result: one after the other, so that none has to be cut out of a larger one.
            parts += [(t, table @ w.flatten(0, 1)) for t, w in zip(group.outputs, weight.unbind(1), strict=True)]
        else:
            product = (table @ _matrix(weight)).unflatten(-1, (len(group.outputs), -1))
            parts += zip(group.outputs, product.unbind(-2), strict=True)
    parts += [
        (OutputPattern(pattern, ()), row.to(parts[0][1].dtype))
        for pattern, row in zip(patterns, learned[len(groups) :], strict=True)
    ]
    return spread(parts, order, x.shape[-2])


class _Combine(torch.autograd.Function):
    """Forwards as written, backwards its transpose: reducing and spreading are each other's."""

    # With T a table of reductions of x, the result spreads T W. With G the same table of reductions of the gradient,
    # the gradient by W is T^T G, and that by x spreads G W^T.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: tuple[OrbitGroup, ...], order: int, patterns: list[Partition], *learned: Tensor
    ) -> Tensor:
        tables = _tables(x, groups)
        ctx.save_for_backward(x, *tables, *learned)
        ctx.classes = groups, order, patterns
        result = _combined(x, tables, groups, order, patterns, learned)
        return result.clone() if result._is_view() else result  # noqa: SLF001

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        groups, order, patterns = ctx.classes
        x, *saved = ctx.saved_tensors
        tables, learned = saved[: len(groups)], saved[len(groups) :]
        grad = grad_outputs[0]
        if _autograd.through_reference(grad):
            given = x, groups, order, patterns, *learned
            return _autograd.reference_gradients(combine_reference, given, grad, tuple(ctx.needs_input_grad))
        parts: list[tuple[OutputPattern, Tensor]] = []
        on_weights: list[Tensor] = []
        known: dict[InputPattern, Tensor] = {}
        for group, table, weight in zip(groups, tables, learned[: len(groups)], strict=True):
            rows = table.reshape(-1, table.shape[-1])
            on_weight, on_table = torch.empty_like(weight), torch.zeros_like(rows)
            one_by_one = [slice(place_of, place_of + 1) for place_of in range(len(group.outputs))]
            for chosen in one_by_one if group.order == order else [slice(None)]:
                back = _beside([_gathered(grad, target, known) for target in group.outputs[chosen]])
                back, part = back.reshape(-1, back.shape[-1]), on_weight[:, chosen].transpose(1, 2)
                part.copy_((rows.t() @ back).view(part.shape))
                if ctx.needs_input_grad[0]:
                    on_table.addmm_(back, _matrix(weight[:, chosen]).t())
            on_weights.append(on_weight)
            columns = on_table.view(table.shape).split(x.shape[-1], -1)
            parts += [(OutputPattern(*source), part) for source, part in zip(group.inputs, columns, strict=True)]
        on_x = spread(parts, len(groups[0].inputs[0].pattern), x.shape[-2]) if ctx.needs_input_grad[0] else None
        totals = [_reduced(grad, InputPattern(pattern, ()), known) for pattern in patterns]
        return on_x, None, None, None, *on_weights, *(total.reshape(-1, total.shape[-1]).sum(0) for total in totals)


def _gathered(grad: Tensor, target: OutputPattern, known: dict[InputPattern, Tensor]) -> Tensor:
    """The gradient on the axes of a table: the diagonal of a target, summed over what was broadcast."""
    ascending = tuple(sorted(target.places))
    reduced = _reduced(grad, InputPattern(target.pattern, ascending), known)
    return _permuted(reduced, [ascending.index(place) for place in target.places])
