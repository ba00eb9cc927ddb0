"""Rules of a tensor that stands for many: what each operation of torch makes of it.

Rules name what they are for: ``"add.Tensor!"`` is the overload of an operation, the mark for the one that overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from holonomy.theory.affine.arithmetic.entrywise import relu_lines
from holonomy.theory.affine.arithmetic.forms import ROUNDING
from holonomy.theory.affine.encoders.tracing import (
    Traced,
    constant,
    everything,
    joined,
    mapped,
    moves,
    nominal,
    rounded,
    rowwise,
    rule,
    traced,
)
from holonomy.theory.attention.projections import NotCoveredError

_ATEN: Any = torch.ops.aten


def called(encoder: Callable[..., Any], x: Traced, edges: Any) -> Traced:
    """What an encoder makes of features."""
    found = constant(encoder(x, edges), x.ball)
    if found.reads is not None:
        found.reads.append(everything(found))
    return found


@rule("view.default", "_unsafe_view.default")
def _reshaped(_: Any, x: Traced, size: Sequence[int]) -> Traced:
    shape = x.center.reshape(size).shape
    if not x.ndim or shape[:1] != x.shape[:1]:
        return mapped(x, lambda part: part.reshape(size))
    return rowwise(x, lambda part: part.reshape(*part.shape[: part.ndim - x.ndim + 1], *shape[1:]))


def _always(*_: Any, **_more: Any) -> bool:
    return True


@rule("clone.default", "detach.default", "alias.default", keeps=_always)
def _copied(func: Any, x: Traced, **more: Any) -> Traced:
    return rowwise(x, lambda part: func(part, **more))


@rule("_to_copy.default", keeps=_always)
def _converted(func: Any, x: Traced, **more: Any) -> Traced:
    if more.get("dtype") not in (None, x.dtype):
        raise NotCoveredError(f"graph_encoder must keep the dtype of its features, got {more['dtype']}.")
    return _copied(func, x, **more)


@rule("t.default", "transpose.int", "permute.default", "unsqueeze.default", "squeeze.dim", "expand.default")
@rule("slice.Tensor", "select.int", "repeat.default", "gather.default")
def _picked(func: Any, x: Any, *how: Any, **more: Any) -> Traced:
    if not isinstance(x, Traced):
        raise NotCoveredError(f"graph_encoder must index by what features do not move, got {func.name()}.")
    return mapped(x, lambda part: func(part, *how, **more))


def _of_rows(x: Any, dim: int, *_: Any) -> bool:
    return dim % x.ndim == 0


@rule("index_select.default", keeps=_of_rows)
def _selected(func: Any, x: Any, dim: int, index: Tensor) -> Traced:
    if not isinstance(x, Traced) or not _of_rows(x, dim):
        return _picked(func, x, dim, index)
    moved = x.rows[x.place]
    start = torch.searchsorted(moved, index)
    count = torch.searchsorted(moved, index, right=True) - start
    to = torch.arange(len(index)).repeat_interleave(count)
    pair = torch.arange(len(to)) + (start - count.cumsum(0) + count).repeat_interleave(count)
    bounds = x.bounds[:, torch.searchsorted(x.rows, index[count > 0])]
    pairs = to * x.ball.nodes + x.pairs[pair] % x.ball.nodes
    return traced(x.ball, func(x.center, dim, index), x.columns[:, pair], bounds, pairs)


def _of_first_axis(_: Any, index: Sequence[Tensor | None]) -> bool:
    return len(index) == 1 and index[0] is not None and index[0].ndim == 1


@rule("index.Tensor", keeps=_of_first_axis)
def _indexed(func: Any, x: Any, index: Sequence[Tensor]) -> Traced:
    if isinstance(x, Traced) and _of_first_axis(x, index):
        return _selected(_ATEN.index_select.default, x, 0, torch.arange(len(x))[index[0]])
    return _picked(func, x, index)


@rule("split.Tensor", "split_with_sizes.default", "unbind.int")
def _cut(func: Any, x: Traced, *how: Any, **more: Any) -> list[Traced]:
    parts = range(len(func(x.center, *how, **more)))
    return [mapped(x, lambda part, i=i: func(part, *how, **more)[i]) for i in parts]


@rule("sum.default", "sum.dim_IntList", "mean.default", "mean.dim")
def _totalled(func: Any, x: Traced, *how: Any, **more: Any) -> Traced:
    return mapped(x, lambda part: func(part, *how, **more), terms=x.numel() + 1)


@rule("cat.default")
def _beside(func: Any, parts: Sequence[Any], dim: int = 0) -> Traced:
    ball = next(part.ball for part in parts if isinstance(part, Traced))
    center = func(list(map(nominal, parts)), dim)
    every = [constant(part, ball) for part in parts if part.ndim == center.ndim]
    if dim % center.ndim:
        pairs = torch.cat([part.pairs for part in every]).unique()
        every = [part.with_pairs(pairs) for part in every]
    else:
        starts = torch.tensor([0, *map(len, every)]).cumsum(0).tolist()
        pairs = torch.cat([part.pairs + start * ball.nodes for part, start in zip(every, starts, strict=False)])
    columns, bounds = (
        torch.cat([getattr(part, name) for part in every], dim % center.ndim + 1) for name in ("columns", "bounds")
    )
    return traced(ball, center, columns, bounds, pairs)


@rule("stack.default")
def _stacked(_: Any, parts: Sequence[Any], dim: int = 0) -> Traced:
    axis = dim % (parts[0].ndim + 1)
    apart = [mapped(part, lambda one: one.unsqueeze(axis)) if moves(part) else part.unsqueeze(axis) for part in parts]
    return _beside(torch.cat, apart, axis)


@rule("new_zeros.default", "new_ones.default", "new_full.default", keeps=_always)
@rule("zeros_like.default", "ones_like.default", keeps=_always)
def _made(func: Any, x: Traced, *how: Any, **more: Any) -> Traced:
    return constant(func(x.center, *how, **more), x.ball)


def _adds(x: Any, y: Any) -> bool:
    """Whether the sum has the features of its parts: what else moves in it has been read before."""
    shape = torch.broadcast_shapes(*(part.shape for part in (x, y) if isinstance(part, Tensor)))
    return all(part.shape == shape for part in (x, y) if isinstance(part, Traced) and part.reads is not None)


@rule("add.Tensor!", "sub.Tensor!", keeps=_adds)
def _added(func: Any, x: Any, y: Any, *, alpha: float = 1) -> Traced:
    other = -alpha if func is _ATEN.sub.Tensor else alpha
    ball = next(part.ball for part in (x, y) if isinstance(part, Traced))
    x, y = (part if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.float64) for part in (x, y))
    shape = torch.broadcast_shapes(x.shape, y.shape)
    x, y = (constant(_expanded(part, shape), ball) for part in (x, y))
    pairs = torch.cat([x.pairs, y.pairs]).unique()
    x, y = x.with_pairs(pairs), y.with_pairs(pairs)
    columns = torch.add(x.columns, y.columns, alpha=other)
    bounds = rounded(x.bounds + abs(other) * y.bounds, 2)
    return traced(ball, x.center + other * y.center, columns, bounds, pairs)


def _expanded(x: Any, shape: Sequence[int]) -> Any:
    if x.shape == shape:
        return x
    return mapped(x, lambda part: part.expand(shape)) if moves(x) else nominal(x).expand(shape)


def _scales(x: Any, y: Any) -> bool:
    """Whether a factor is the same for all features."""
    factor = y if moves(x) else x
    if not isinstance(factor, Tensor) or factor.numel() == 1:
        return True
    return factor.ndim == 2 and bool((factor == factor[:, :1]).all())


@rule("mul.Tensor!", "div.Tensor!", "mul.Scalar", keeps=_scales)
@rule("neg.default", keeps=_always)
def _scaled(func: Any, x: Any, *by: Any) -> Traced:
    if func is _ATEN.mul.Tensor and not isinstance(x, Traced):
        x, by = by[0], (x,)
    if not isinstance(x, Traced) or any(isinstance(part, Traced) for part in by):
        raise NotCoveredError(f"graph_encoder must be linear but for ReLU, got {func.name()} by what features move.")
    by = tuple(part.to(x.dtype) if isinstance(part, Tensor) and part.dtype == torch.bool else part for part in by)
    if torch.broadcast_shapes(x.shape, *(part.shape for part in by if isinstance(part, Tensor))) != x.shape:
        return mapped(x, func, *by, terms=2)

    def at(part: Any, rows: Tensor) -> Any:
        every = isinstance(part, Tensor) and part.ndim == x.ndim > 0 and len(part) == len(x)
        return part[rows] if every else part

    return rowwise(x, func, *by, terms=2, at=at)


def _adds_rows(x: Any, y: Any) -> bool:
    return moves(y) and not moves(x)


@rule("mm.default", keeps=_adds_rows)
@rule("bmm.default")
def _multiplied(func: Any, x: Any, y: Any) -> Traced:
    if isinstance(x, Traced) and isinstance(y, Traced):
        raise NotCoveredError(f"graph_encoder must be linear but for ReLU, got {func.name()} by what features move.")
    terms, flat = x.shape[-1] + 1, func is _ATEN.mm.default
    if isinstance(x, Traced):
        return (rowwise if flat and y.layout == torch.strided else mapped)(x, torch.matmul, y, terms=terms)
    if not flat or x.layout not in {torch.strided, torch.sparse_coo}:
        return mapped(y, lambda part, x: func(x, part), x, terms=terms)
    center, parts = func(x, y.center), list[tuple[Tensor, Tensor, Tensor]]()
    for node, rows, columns in y.by_nodes():
        shares = x.index_select(1, rows).to_dense()
        some = (shares != 0).any(1).nonzero().squeeze(1)
        parts.append((node, some, shares[some] @ columns))
    found = joined(y, center, parts)
    size = x.index_select(0, found.rows).abs()
    shares = size.index_select(1, y.rows).to_dense()
    box, moved = shares @ y.bounds
    found.bounds = rounded(torch.stack([box, moved + func(size, y.center.abs())]), terms)
    return found


def _adds_rows_to(bias: Any, x: Any, y: Any, **_: Any) -> bool:
    return _adds_rows(x, y) and not moves(bias)


@rule("addmm.default", keeps=_adds_rows_to)
def _affine(_: Any, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Traced:
    product = _multiplied(_ATEN.mm.default, x, y) if isinstance(x, Traced) or isinstance(y, Traced) else torch.mm(x, y)
    return _added(_ATEN.add.Tensor, beta * bias, product, alpha=alpha)


@rule("native_batch_norm.default", "_native_batch_norm_legit_no_training.default")
def _standardised(
    func: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *how: Any
) -> tuple[Traced, Tensor, Tensor]:
    """By running statistics: a number and a shift for each entry."""
    if variance is None or (len(how) == 3 and how[0]):
        raise NotCoveredError(f"graph_encoder must normalise by running statistics, got {func.name()} of a batch.")
    gain = (variance + how[-1]).rsqrt() * (1.0 if weight is None else weight)
    mean, gain, shift = (
        part.view(-1, *(x.ndim - 2) * (1,)) for part in (mean, gain, torch.zeros_like(mean) if bias is None else bias)
    )
    found = _scaled(_ATEN.mul.Tensor, _added(_ATEN.sub.Tensor, x, mean), gain)
    found = _added(_ATEN.add.Tensor, found, shift)
    return found, mean.new_zeros(0), mean.new_zeros(0)


def _by_rows(x: Any, dim: int, index: Tensor, source: Any) -> bool:
    """Whether each row of what is added goes to one row."""
    if dim % x.ndim or x.shape[1:] != source.shape[1:] or len(index) != len(source):
        return False
    return index.ndim == 1 or (index.shape == source.shape and bool((index == index.flatten(1)[:, :1]).all()))


def _sums_rows(x: Any, dim: int, index: Tensor, source: Any, **_: Any) -> bool:
    return not moves(x) and _by_rows(x, dim, index, source)


@rule("index_add.default!", "scatter_add.default!", keeps=_sums_rows)
def _gathered(func: Any, x: Any, dim: int, index: Tensor, source: Any, *, alpha: float = 1) -> Traced:
    zero, terms = torch.zeros_like(nominal(x)), source.shape[dim] + 1
    if not isinstance(source, Traced):
        added = func(zero, dim, index, source)
    elif not _by_rows(x, dim, index, source):
        added = mapped(source, lambda part: func(zero, dim, index, part), terms=terms)
    else:
        to = index if index.ndim == 1 else index.flatten(1)[:, 0]
        nodes = source.ball.nodes
        pairs, place = (to[source.rows[source.place]] * nodes + source.pairs % nodes).unique(return_inverse=True)
        columns = source.columns.new_zeros(source.ball.first, len(pairs), *zero.shape[1:])
        columns = columns.index_add(1, place, source.columns)
        added = traced(source.ball, func(zero, dim, index, source.center), columns, source.bounds, pairs)
        others, none = torch.isin(to, added.rows), zero[added.rows]
        mine, all_of_them = (torch.searchsorted(added.rows, some) for some in (to[source.rows], to[others]))
        still = torch.stack([none, none.index_add(0, all_of_them, source.center[others].abs())])
        added.bounds = rounded(still.index_add(1, mine, source.bounds), terms)
    return _added(_ATEN.add.Tensor, x, added, alpha=alpha)


@rule("relu.default!")
def _rectified(func: Any, x: Traced) -> Traced:
    center, sizes = x.middle, x.columns.norm(dim=0)
    moved = x.total(sizes) if x.ball.each else x.total(sizes.square()).sqrt()
    reach = (moved + x.bounds[0]) * (1 + ROUNDING * len(x.pairs)) + ROUNDING * center.abs()
    slope, half, _ = relu_lines(center, reach)
    bounds = rounded(slope * x.bounds + torch.stack([half, 2 * half]), 32)
    middle = slope * center + half
    value = func(x.center).index_copy(0, x.rows, middle) if x.ndim else [*middle, func(x.center)][0]
    return traced(x.ball, value, slope[x.place] * x.columns, bounds, x.pairs)
