r"""Adam's step on rows of hyperboloid tables, a block of them at a time.

A point of the hyperboloid :math:`\langle x, x\rangle = 1/\kappa = -k` is held as ``(time, space)``.
In the chart of its space part the metric is :math:`G = I - e e^T` with :math:`e = x_s / t`, and its
inverse :math:`I + x_s x_s^T / k`. The step therefore adds up gradients as *covectors* ``w`` of that
chart, whose Riemannian length :math:`|w|^2 + (x_s \cdot w)^2 / k` is a sum of squares: nothing
cancels, however far out the point lies. The new point and the transported momentum are then
combinations of ``x`` and ``w`` whose coefficients are one number a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Float
from holonomy.manifolds.hyperboloid.views import dot

# Elements of one block on the CPU: its working copies, 4 MiB each in float32, stay in the last cache, and some sixty
# operations are dispatched for each block. Elsewhere launches cost more than bandwidth.
_BLOCK_ELEMENTS = 2**20
_DEVICE_BLOCK_ELEMENTS = 2**26


class Rule(NamedTuple):
    """Adam's constants at one step, ``rate`` and ``eps`` with the bias corrections in them."""

    rate: float | Tensor
    beta1: float
    beta2: float
    eps: float
    decay: float


class Rows(NamedTuple):
    """Rows of hyperboloid tables, changed in place; second moments are one number a row."""

    grad: Tensor
    point: Tensor
    momentum: Tensor
    second: Tensor
    largest: Tensor | None
    radius: Tensor

    def map(self, function: Callable[[Tensor], Tensor], radius: Tensor) -> Rows:
        """What a function makes of each table, beside a radius."""
        largest = None if self.largest is None else function(self.largest)
        return Rows(*map(function, self[:4]), largest=largest, radius=radius)

    def cut(self, start: int, stop: int) -> Rows:
        """Some rows, as views."""
        return self.map(lambda table: table[start:stop], self.radius)

    def store(self, stepped: Rows, write: Callable[[Tensor, Tensor], object]) -> None:
        """Write points and moments that were stepped elsewhere into those here."""
        for table, other in zip(self[1:5], stepped[1:5], strict=True):
            if table is not None and other is not None:
                write(table, other)


def _length(a: Float[Tensor, "rows ambient"]) -> Float[Tensor, "rows 1"]:
    """Lengths of space parts, for which no product is written down."""
    return torch.linalg.vector_norm(a[:, 1:], dim=-1, keepdim=True)


def _inner(a: Float[Tensor, "rows ambient"], b: Float[Tensor, "rows ambient"]) -> Float[Tensor, "rows 1"]:
    """Inner products of space parts in one pass, where torch writes the products down or may round them to bfloat16."""
    return torch.from_numpy(np.einsum("ij,ij->i", a[:, 1:].numpy(), b[:, 1:].numpy())).unsqueeze(-1)


def _step_in_place(rows: Rows, rule: Rule, scratch: Float[Tensor, "most ambient"], stored: torch.dtype) -> None:
    """One step in the rows' own dtype and memory; those too far out, or too long for it, by :func:`_step_beyond`."""
    # Fresh memory would cost more than the arithmetic, hence the scratch; whole rows are one stretch of memory.
    g, x, m, second, largest, radius = rows
    fresh = 1 - rule.beta1
    w = scratch[: x.shape[0]]
    time = torch.hypot(_length(x), radius)
    covector = g
    # The total derivative in the space chart, weight decay (of the ambient vector) included. It is
    # the gradient's space part itself for functions that read points by their space part.
    if rule.decay or bool(g[:, :1].any()):
        torch.addcmul(g, x, g[:, :1] / time + 2 * rule.decay, out=w)
        covector = w
    # The length of the gradient: |w|^2 + (x_s . w)^2 / k.
    radial = _inner(x, covector) / radius
    size2 = _length(covector).square_().addcmul_(radial, radial)
    slope = _inner(x, m) / time  # e . m
    # (1 - beta1) w = (1 - beta1) covector + beta1 (momentum, as a covector), and its part along x.
    torch.add(covector, m, alpha=rule.beta1 / fresh, out=w)
    slope = slope / time * (rule.beta1 / fresh)
    w.addcmul_(x, slope, value=-1)
    radial.addcmul_(slope, radius)
    length = torch.hypot(_length(w), radial)
    new_second = torch.lerp(second, size2, 1 - rule.beta2)
    seen = new_second if largest is None else torch.maximum(largest, new_second)
    radial /= radius
    length /= radius
    angle = (length / seen.sqrt().add_(rule.eps)).mul_(rule.rate * fresh)
    beyond = (~numerics.is_ordinary(time / radius, angle, size2, stored)).squeeze(-1).nonzero().squeeze(-1)
    others = None
    if beyond.numel():
        radii = radius.expand(len(x), 1).index_select(0, beyond)
        others = rows.map(lambda table: table.index_select(0, beyond), radii)
    second.copy_(new_second)
    if largest is not None:
        largest.copy_(seen)
    # x becomes (1 + along) x - pace w, and the momentum cosh w + turn x, along the geodesic of this angle.
    sinh = torch.sinh(angle)
    square = sinh.square()
    cosh = (square + 1).sqrt_()
    pace = sinh / numerics.positive(length)
    # cosh - 1 without cancellation: what a short step adds to x keeps its digits.
    along = (square / (cosh + 1)).addcmul_(pace, radial, value=-1)
    turn = radial.mul_(cosh).addcmul_(sinh, length, value=-1).mul_(fresh)
    torch.mul(w, cosh.mul_(fresh), out=m).addcmul_(x, turn)
    torch.mul(turn, time, out=m[:, :1])
    x.addcmul_(x, along).addcmul_(w, pace, value=-1)
    torch.hypot(_length(x), radius, out=x[:, :1])
    if others is not None:
        _step_beyond(others, rule, stored)
        rows.store(others, lambda table, stepped: table.index_copy_(0, beyond, stepped))


def _step_beyond(rows: Rows, rule: Rule, stored: torch.dtype) -> None:
    """The step of float32 rows in float64, where most are in its reach; of those beyond, the reference's."""
    if rows.point.dtype == torch.float64:
        _step_reference(rows, rule, stored)
        return
    wide = rows.map(numerics.widen, numerics.widen(rows.radius))
    _step_in_place(wide, rule, wide.point.new_empty(wide.point.shape), stored)
    rows.store(wide, lambda table, stepped: table.copy_(numerics.narrow(stepped, stored)))


def _step_reference(rows: Rows, rule: Rule, dtype: torch.dtype) -> None:
    """The step of :func:`_step_in_place` in float64, finite for whatever finite numbers of the stored dtype come in."""
    x, m, g, radius = map(numerics.widen, (rows.point, rows.momentum, rows.grad, rows.radius))
    space = x[:, 1:]
    time = numerics.hypot(numerics.norm(space, keepdim=True), radius)
    e, stretch = space / time, numerics.finite(time / radius)
    g = numerics.finite(g)
    covector = numerics.finite(g[:, 1:] + g[:, :1] * e + 2 * rule.decay * space)
    pull = numerics.finite(dot(e, covector))
    radial = numerics.finite(pull * stretch)
    size = numerics.hypot(numerics.norm(covector, keepdim=True), radial)
    # A gradient whose square the dtype cannot hold counts as the longest whose square it can: with the second moment
    # alone at its largest number, the step would be as long as the gradient.
    longest = math.sqrt(torch.finfo(dtype).max)
    share = torch.where(size > longest, longest / size, 1.0)
    covector, radial, size = covector * share, radial * share, size * share
    rows.second.lerp_(numerics.narrow(size.square(), dtype).to(rows.second), 1 - rule.beta2)
    seen = rows.second
    if rows.largest is not None:
        seen = torch.maximum(rows.largest, seen, out=rows.largest)
    lean = dot(e, m[:, 1:])  # e . m, the time of the momentum
    w = (1 - rule.beta1) * covector + rule.beta1 * (m[:, 1:] - lean * e)
    radial = (1 - rule.beta1) * radial + rule.beta1 * lean / stretch
    length = numerics.hypot(numerics.norm(w, keepdim=True), radial)
    # The new point is (cosh - p sinh) x - radius sinh q, a unit vector of the momentum (p, q).
    p, q = numerics.safe_div(radial, length), numerics.safe_div(w, length)
    pace = numerics.safe_div(
        torch.as_tensor(rule.rate, dtype=x.dtype, device=x.device), numerics.widen(seen).sqrt() + rule.eps
    )
    room = numerics.widest_rapidity(x.dtype) - time.log()
    room = room.clamp(min=1.0, max=numerics.widest_rapidity(dtype))
    angle = torch.minimum(numerics.finite(pace * length / radius), room)
    cosh, sinh = torch.cosh(angle), torch.sinh(angle)
    along = 2 * torch.sinh(angle / 2).square() - p * sinh
    new_space = numerics.shrink(space + along * space - radius * sinh * q, dtype)
    new_time = numerics.hypot(numerics.norm(new_space, keepdim=True), radius)
    flow = numerics.finite(cosh * q + (p * cosh - sinh) * numerics.finite(space / radius))
    limit = numerics.safe_div(x.new_tensor(torch.finfo(dtype).max / 4), numerics.norm(flow, keepdim=True))
    new_momentum = flow * torch.minimum(length, limit)
    rows.point.copy_(numerics.narrow(torch.cat((new_time, new_space), dim=-1), dtype))
    slope = dot(new_space / new_time, new_momentum)
    rows.momentum.copy_(numerics.narrow(torch.cat((slope, new_momentum), dim=-1), dtype))


def _blocks(tables: list[Rows], most: int) -> Iterator[list[Rows]]:
    """Tables of one width, dtype and device: long ones in slices, short ones in stacks."""
    stack: list[Rows] = []
    height = 0
    for table in tables:
        count = table.point.shape[0]
        if count > most // 16:  # copies into a stack and back would cost more than the dispatches that they save
            for start in range(0, count, most):
                yield [table.cut(start, start + most)]
            continue
        if height + count > most:
            yield stack
            stack, height = [], 0
        stack.append(table)
        height += count
    if height:
        yield stack


def _stacked(block: list[Rows]) -> Rows:
    *tables, largest, radii = zip(*block, strict=True)
    radius = radii[0]
    if any(other is not radius for other in radii):
        radius = torch.cat([r.expand(len(table.point), 1) for r, table in zip(radii, block, strict=True)])
    return Rows(*map(torch.cat, tables), largest=None if largest[0] is None else torch.cat(largest), radius=radius)


def _unstack(rows: Rows, block: list[Rows]) -> None:
    start = 0
    for table in block:
        stop = start + table.point.shape[0]
        table.store(rows.cut(start, stop), Tensor.copy_)
        start = stop


def step_tables(tables: list[Rows], rule: Rule) -> None:
    """Step all tables in place: small ones stacked into a block, large ones block by block."""
    point = tables[0].point
    on_cpu = point.device.type == "cpu"
    most = max(1, (_BLOCK_ELEMENTS if on_cpu else _DEVICE_BLOCK_ELEMENTS) // point.shape[1])
    scratch = None
    # Which rows are ordinary is read back from the tensors: free on the CPU, a stall elsewhere.
    if on_cpu and point.dtype in {torch.float32, torch.float64}:
        height = min(most, sum(table.point.shape[0] for table in tables))
        scratch = point.new_empty(height, point.shape[1])
    for block in _blocks(tables, most):
        rows = block[0] if len(block) == 1 else _stacked(block)
        if scratch is None:
            _step_reference(rows, rule, point.dtype)
        else:
            _step_in_place(rows, rule, scratch, point.dtype)
        if len(block) > 1:
            _unstack(rows, block)
