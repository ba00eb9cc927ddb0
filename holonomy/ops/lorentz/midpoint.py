r"""The Lorentzian midpoint of two points, right at every radius: its value and its gradients without cancellation.

With c minus the curvature, times X and Y, :math:`S = X + Y` and :math:`s = x + y` of space parts, the midpoint of x and
:math:`\epsilon y` is :math:`m = (x + \epsilon y)/\nu`, :math:`\nu^2 = (1 - \epsilon)^2 + \epsilon \nu_1^2`, where
:math:`\nu_1^2 = c(S^2 - |s|^2)` is a difference of large squares. With p the part of x - y across s, and k s the rest,

.. math::
    \nu_1^2 = \frac{S^2 (4 + c |p|^2)}{2/c + 2XY + 2 x \cdot y + |p|^2} \ \ (x \cdot y > 0), \qquad
    \nu_1^2 = 2 + 2c\,(XY - x \cdot y) \ \ (x \cdot y \le 0) .

As x - y, 2x and -2y differ by multiples of s, p is the part of the shortest of them. All terms are positive, and so
they are in the derivatives, which go through one vector, :math:`D = Y x - X y`:

.. math::
    \nabla_x \nu_1^2 = \frac{2c}{X} D, \quad -\nabla_y \nu_1^2 = \frac{2c}{Y} D, \quad
    \quad D = \frac{S}{2} p + \frac{k \nu_1^2}{2 c S} s \ \ (x \cdot y > 0), \qquad
    c\, \frac{\partial \nu_1^2}{\partial c} = \nu_1^2 \Bigl(\frac{c |p|^2}{4 + c |p|^2}
        + \frac{k^2 |s|^2}{c XY\,(2/c + 2XY + 2 x \cdot y + |p|^2)}\Bigr) \ \ (x \cdot y > 0), \qquad
    c\,\Bigl(\frac{X}{Y} |y|^2 + \frac{Y}{X} |x|^2 - 2 x \cdot y\Bigr) \ \ (x \cdot y \le 0) .

In float64 entries of p that are rounding of what p is the rest of count as zero. The result, with its gradient, is the
midpoint of points whose separation differs from the given one by at most an ulp of the longer row. Up to rapidity 17
such points are within 1e-8; from rapidity 37 on neighbouring numbers lie apart, and the midpoint of parallel rows that
were rounded is that of their common ray.

Float32 rows are computed in float32, with x - y in the place of the shortest and with :math:`c\, \partial \nu_1^2 /
\partial c = c\, |D|^2/(XY)`. In gradients, relative to their length, what rounding leaves of p is

.. math:: q = \frac{c\, |x - y|\, |x + \epsilon y|\, S}{2 \nu^2} \max\Bigl(\frac{\epsilon}{X}, \frac{1}{Y}\Bigr)

times that of float32: a few for points in different directions at any radius, but up to :math:`c S^2` for those on one
ray. Rows where it is above 32 are computed in float64, as are rows whose squares might leave the range. A compiled
graph cannot look: there all is float64, of which it keeps numbers of rows for the way back, and no table of entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Float
from holonomy.ops.lorentz.lifted import chunks, curvature_gradient, kept, scale_of

# The most that gradients of float32 rows stretch rounding: 1e-5 is left.
_STRETCH = 32.0
# Radii, times, also in radii, and gradients, of whose products none leaves the range of float32.
_ORDINARY, _WIDEST, _LONGEST = 2.0**10, 2.0**24, 2.0**40


def midpoint(
    x: Float[Tensor, "rows dim"], y: Float[Tensor, "rows dim"], curvature: Float[Tensor, "*one"], epsilon: float
) -> Float[Tensor, "rows ambient"]:
    """The midpoint of the points above x and of epsilon times those above y."""
    if _autograd.transformed():
        return midpoint_reference(x, y, curvature, epsilon)
    return _autograd.apply_function(_Midpoint, x, y, curvature, epsilon)


def midpoint_reference(
    x: Float[Tensor, "rows dim"], y: Float[Tensor, "rows dim"], curvature: Float[Tensor, "*one"], epsilon: float
) -> Float[Tensor, "rows ambient"]:
    """The same with the gradient that autograd derives."""
    return _forward(x, y, curvature, epsilon)[0]


class _Rows(NamedTuple):
    """Space parts in the dtype to compute in, multiplied by numbers of their rows for their squares to fit."""

    x: Tensor
    y: Tensor
    sum: Tensor
    factor: Tensor  # (n, 1), or one number
    radius: Tensor  # of curvature, multiplied as they are


class _Numbers(NamedTuple):
    """Of each of these rows ``(n, 1)``."""

    x_time: Tensor
    y_time: Tensor
    inverse: Tensor  # 1 / nu
    on_x: Tensor  # p, or D, is ``on_x * x + on_y * y - along * s``
    on_y: Tensor
    along: Tensor
    on_p: Tensor  # c D / nu^2 is ``on_p * p + on_sum * s``
    on_sum: Tensor
    rate: Tensor  # c times the derivative of nu_1^2 by c, over nu^2


def _forward(x: Tensor, y: Tensor, curvature: Tensor, epsilon: float) -> tuple[Tensor, _Numbers]:
    scale, dtype = scale_of(curvature), torch.promote_types(x.dtype, y.dtype)
    rows = _rows(x, y, scale)
    numbers = _numbers(rows, epsilon)
    share = numbers.inverse / rows.factor
    time = torch.add(numbers.x_time, numbers.y_time, alpha=epsilon) * share
    return torch.cat([numerics.narrow(part, dtype) for part in (time, _total(rows, epsilon) * share)], -1), numbers


class _Plain(NamedTuple):
    """Of rows that are computed in float32: the table of 2D / (X + Y), and numbers ``(n, 1)``."""

    bend: Tensor
    x_time: Tensor
    y_time: Tensor
    inverse: Tensor  # 1 / nu
    rate: Tensor  # |D|^2 / (XY)


class _Part(NamedTuple):
    """Rows, all of a chunk or some that replace those of the part before, and what was found of them."""

    rows: slice | Tensor
    numbers: _Plain | _Numbers


def _parts(x: Tensor, y: Tensor, curvature: Tensor, epsilon: float, out: Tensor) -> Iterator[_Part]:
    """Write the midpoints into ``out``."""
    for rows in chunks(x):
        found = _plain_forward(x[rows], y[rows], curvature, epsilon, out[rows])
        some: slice | Tensor = rows
        if found is not None:
            numbers, beyond = found
            yield _Part(rows, numbers)
            some = beyond + (rows.start or 0)
        if isinstance(some, slice) or some.numel():
            out[some], exact = _forward(x[some], y[some], curvature, epsilon)
            yield _Part(some, exact)


def _plain_forward(
    x: Tensor, y: Tensor, curvature: Tensor, epsilon: float, out: Tensor
) -> tuple[_Plain, Tensor] | None:
    """The same in float32, and the rows that are to be found in float64; none where most are, or none can be read."""
    if out.dtype == torch.float64 or not checks.costs_nothing_to_read(x):
        return None
    x, y, root = x.float(), y.float(), float(scale_of(curvature))
    if not 1 / _ORDINARY < root < _ORDINARY:
        return None
    s, gap, product = x + y, x - y, numerics.row_sum(x * y)
    x_length, y_length, s_length = _length(x), _length(y), _length(s)
    radius = torch.full_like(x_length, 1 / root)
    x_time, y_time = x_length.hypot(radius), y_length.hypot(radius)
    total, times = x_time + y_time, x_time * y_time
    along = numerics.safe_div(numerics.row_sum(gap * s), s_length.square())
    p = gap.addcmul_(s, along, value=-1)
    width = _length(p)
    across = width.square()
    acute = total.square() * (4 + across * root**2) / (2 / root**2 + 2 * (times + product.clamp(min=0)) + across)
    one = torch.where(product > 0, acute, 2 + 2 * root**2 * (times - product))
    inverse = ((1 - epsilon) ** 2 + epsilon * one).rsqrt()
    mixed = s if epsilon == 1 else torch.add(x, y, alpha=epsilon)
    length, share = s_length if epsilon == 1 else _length(mixed), torch.maximum(epsilon / x_time, 1 / y_time)
    stretch = (width + along.abs() * s_length) * length * (inverse * root).square() * total * share / 2
    most = torch.maximum(x_time, y_time)
    beyond = (~((stretch <= _STRETCH) & (most <= _WIDEST * min(1.0, 1 / root)))).squeeze(-1).nonzero().squeeze(-1)
    if 2 * len(beyond) > len(x):
        return None
    on_sum = along * one / (root * total).square()
    rate = (width.hypot(on_sum * s_length) * (total / 2)).square() / times
    torch.mul(torch.add(x_time, y_time, alpha=epsilon), inverse, out=out[:, :1])
    torch.mul(mixed, inverse, out=out[:, 1:])
    return _Plain(p.addcmul_(s, on_sum), x_time, y_time, inverse, rate), beyond


def _plain_gradients(
    g: Tensor, point: Tensor, scale: Tensor, n: _Plain, epsilon: float, grad_x: Tensor, grad_y: Tensor
) -> Tensor:
    """Write those of x and y, from that of the space part, and return that of the curvature: see :func:`_gradients`."""
    pull = numerics.row_sum(g * point) * n.inverse.square() * epsilon
    rate = pull.double() * n.rate / 2
    pull = pull * scale.square().float() * (n.x_time + n.y_time) / 2
    straight = g.mul_(n.inverse)
    torch.addcmul(straight, n.bend, -pull / n.x_time, out=grad_x)
    torch.addcmul(straight if epsilon == 1 else straight.mul_(epsilon), n.bend, pull / n.y_time, out=grad_y)
    return rate


def _rows(x: Tensor, y: Tensor, scale: Tensor) -> _Rows:
    if torch.float64 not in (x.dtype, y.dtype):
        x, y, factor = x.double(), y.double(), torch.ones_like(scale)
    else:
        x, y = x.double(), y.double()
        factor = numerics.squarable(torch.maximum(numerics.norm(x, keepdim=True), numerics.norm(y, keepdim=True)))
        x, y = x * factor, y * factor
    return _Rows(x, y, x + y, factor, factor / scale)


def _length(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return numerics.root(numerics.row_sum(x.square()))
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _total(rows: _Rows, epsilon: float) -> Tensor:
    return rows.sum if epsilon == 1 else torch.add(rows.x, rows.y, alpha=epsilon)


def _numbers(rows: _Rows, epsilon: float) -> _Numbers:
    x, y, s, _, radius = rows
    x_length, y_length, product = _length(x), _length(y), numerics.row_sum(x * y)
    x_square, y_square, acute = x_length.square(), y_length.square(), product > 0
    x_time, y_time = torch.hypot(x_length, radius), torch.hypot(y_length, radius)
    total, times = x_time + y_time, x_time * y_time
    square = torch.where(acute, x_square + y_square + 2 * product, 1.0)
    # The shortest of x - y, 2x and -2y: they differ by multiples of s, and so have the same p.
    near = x_square + y_square - 2 * product <= 4 * torch.minimum(x_square, y_square)
    shortest = torch.where(near, 1.0, torch.where(x_length < y_length, 2.0, 0.0).to(x.dtype))
    on_s = shortest * (x_square + product) + (shortest - 2) * (y_square + product)
    on_s = torch.where(near, numerics.row_sum((x - y) * s), on_s)
    along = torch.where(acute, numerics.safe_div(on_s, square), 0.0)
    on_x, on_y = torch.where(acute, shortest, y_time), torch.where(acute, shortest - 2, -x_time)
    on_x, on_y, along = kept(on_x, on_y, along)
    p = _across(rows, on_x, on_y, along)
    across, left = _length(p), numerics.row_sum(p * s)
    width = numerics.finite(across / radius)
    widest = torch.hypot(width, torch.full_like(width, 2.0))
    rest = torch.hypot(radius * math.sqrt(2), (2 * (times + product.clamp(min=0))).sqrt())
    obtuse = (2 * (radius.square() + times - product.clamp(max=0))).sqrt() / radius
    one = numerics.finite(torch.where(acute, total / torch.hypot(rest, across) * widest, obtuse))
    norm = one if epsilon == 1 else numerics.hypot(one * math.sqrt(epsilon), torch.full_like(one, 1 - epsilon))
    inverse = norm.reciprocal()
    ratio, root, share = (one * inverse).square(), inverse / radius, along + 1 - shortest
    # Where this leaves the range p is rounding.
    on_p = torch.where(acute, torch.where(root.square().isfinite(), total / 2, 0.0), 1.0) * root * root
    # Orthogonal to s once more: the metric stretches what rounding left along it by the time coordinate.
    on_sum = torch.where(acute, share * ratio / (2 * total) - on_p * numerics.safe_div(left, square), 0.0)
    straight = ratio * ((width / widest).square() + (share * radius * one / widest / total).square() * square / times)
    bent = root.square() * (x_time / y_time * y_square + y_time / x_time * x_square - 2 * product)
    rate = torch.where(acute, straight, bent)
    return _Numbers(*kept(x_time, y_time, inverse, on_x, on_y, along, on_p, on_sum, rate))


def _across(rows: _Rows, on_x: Tensor, on_y: Tensor, along: Tensor) -> Tensor:
    """The part p, or D, zero with a zero gradient in entries that are mere rounding of what was subtracted."""
    v = torch.addcmul(rows.x * on_x, rows.y, on_y)
    p, much = _with_sum(v, rows, -along), v * 16
    return torch.where(p + much == much, p - p.detach() if torch.is_grad_enabled() else 0.0, p)


def _with_sum(z: Tensor, rows: _Rows, weight: Tensor) -> Tensor:
    """Add weight * s, without a table of s, which the compiler would keep."""
    return torch.addcmul(torch.addcmul(z, rows.x, weight), rows.y, weight)


def _gradients(g: Tensor, rows: _Rows, scale: Tensor, n: _Numbers, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, y and the curvature, from that of the space part; see the head of this file."""
    weight, terms = 1.0, g * _total(rows, epsilon)
    if torch.compiler.is_compiling():  # what can be made on the way there would be kept, as a table of float64
        terms = torch.addcmul(g * rows.x, g, rows.y, value=epsilon)
    pull = numerics.row_sum(terms) * (n.inverse * epsilon)
    if torch.compiler.is_compiling():  # and so would p; powers of two round nothing
        weight = numerics.power_of_two(numerics.positive(pull.abs()))
    of_p = (n.on_x * weight, n.on_y * weight, n.along * weight, n.on_p / weight)
    on_x, on_y, along, on_p, to_x, to_y = kept(*of_p, -pull / n.x_time, pull / n.y_time)
    bend = _with_sum(_across(rows, on_x, on_y, along) * on_p, rows, n.on_sum)
    straight = g * n.inverse
    grad_x = torch.addcmul(straight, bend, to_x)
    grad_y = torch.addcmul(straight if epsilon == 1 else straight * epsilon, bend, to_y)
    return grad_x, grad_y, pull * n.rate / (2 * rows.factor * scale.square())


class _Midpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, curvature: Tensor, epsilon: float) -> Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] + 1, dtype=torch.promote_types(x.dtype, y.dtype))
        parts = list(_parts(x, y, curvature, epsilon, out))
        ctx.epsilon, ctx.parts = epsilon, [(part.rows, type(part.numbers)) for part in parts]
        ctx.save_for_backward(x, y, curvature, out, *(number for part in parts for number in part.numbers))
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, y, curvature, out, *numbers = ctx.saved_tensors
        (grad,), epsilon, start, scale = grad_outputs, ctx.epsilon, 0, scale_of(curvature)
        if _autograd.batched(grad):
            given = (x, y, curvature, epsilon)
            return _autograd.reference_gradients(midpoint_reference, given, grad, tuple(ctx.needs_input_grad))
        wide = (torch.promote_types(z.dtype, torch.float32) for z in (x, y))
        grad_x, grad_y = (torch.empty_like(z, dtype=dtype) for z, dtype in zip((x, y), wide, strict=True))
        rates = x.new_empty(x.shape[0], 1, dtype=torch.float64)
        # Kept numbers are constants; where the gradient itself is differentiated they are made again.
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        for r, kind in ctx.parts:
            stop = start + len(kind._fields)
            kept, start, plain = kind(*numbers[start:stop]), stop, kind is _Plain and not again
            plain = plain and bool(grad[r].norm() <= _LONGEST)
            dtype = torch.float32 if plain else torch.float64
            of_point, point = grad[r].to(dtype), out[r].to(dtype)
            g = torch.addcmul(of_point[:, 1:], point[:, 1:], of_point[:, :1] / point[:, :1])
            if plain:
                rates[r] = _plain_gradients(g, point[:, 1:], scale, kept, epsilon, grad_x[r], grad_y[r])
                continue
            rows = _rows(x[r], y[r], scale)
            kept = _numbers(rows, epsilon) if again or kind is _Plain else kept
            found = _gradients(g, rows, scale, kept, epsilon)
            if torch.float64 in (x.dtype, y.dtype):
                spoiled = (x[r] + y[r] + g).isnan().any(-1, keepdim=True)
                found = (numerics.where_finite(z, spoiled) for z in found)
            for table, some in zip((grad_x, grad_y, rates), found, strict=True):
                table[r] = numerics.saturated(some, table.dtype)
        on_curvature = numerics.total(rates).to(curvature.dtype) + curvature_gradient(grad, out, curvature)
        grad_x, grad_y = numerics.saturated(grad_x, x.dtype), numerics.saturated(grad_y, y.dtype)
        return grad_x, grad_y, on_curvature.reshape(curvature.shape), None
