r"""Distance, exponential and logarithm of float32 points, row by row, as little arithmetic as keeps them right.

In units of the radius, with :math:`w = x \cdot u / x_t^2`, so that :math:`\ell^2 = |u|^2 - w\, x \cdot u`, and z of
:func:`holonomy.manifolds.hyperboloid.rowwise.between`,

.. math::
    \exp_x(u) = \cosh(\ell)\, x + \frac{\sinh \ell}{\ell}\, u, \qquad
    \log_x(y) = \frac{D}{\sinh D} \big((y - x) - z x\big),

space parts both. Their terms are at most :math:`x_t \cosh \ell` or :math:`\max(x_t, y_t) \cosh D` times what they
add up to, and gradients lose no more than the square of it: up to 1e4 float64 leaves the digits of float32. Rows
beyond go to :mod:`holonomy.manifolds.hyperboloid.geodesics`. At the origin nothing cancels.

With d = x - y the gradient of the distance in x is :math:`\big(y_t\, d - (x_t - y_t)\, y\big) / (x_t \sinh D)`. It and
z are right to float32 rounding where :math:`z \ge` 1e-8 :math:`|d|^2`: but for points far out on nearly one ray.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.manifolds.hyperboloid import geodesics
from holonomy.manifolds.hyperboloid.rowwise import Between, RowwiseOp, between, row_chunks

# Gradients of points farther out, in radii, lie below the normal numbers of float32.
_WIDEST = 1e34
# Rapidities whose sinh can be squared.
WIDEST_RAPIDITY = numerics.widest_rapidity(torch.float32) / 2


def reach_of(dtype: torch.dtype) -> float:
    """Twice the widest rapidity: it leads from any point through the origin to any other."""
    return min(4 * numerics.widest_rapidity(dtype), numerics.widest_rapidity(torch.float64))


def _dist_numbers(scale: Tensor, x: Tensor, y: Tensor) -> tuple[Between, Tensor]:
    numbers, lost = between(scale, x, y)
    return numbers, lost | ~(torch.maximum(numbers.x_time, numbers.y_time) <= _WIDEST)


def _dist_values(numbers: Between, scale: Tensor, *_: Tensor) -> Tensor:
    return (torch.log1p(numbers.z + numbers.sinh) / scale).squeeze(-1).float()


def _dist_gradients(
    numbers: Between, grad: Tensor, scale: Tensor, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x_time, y_time, rise, z, sinh, _ = numbers
    weights = numerics.safe_div(grad.double()[:, None], sinh)
    on_x, on_y = torch.empty_like(x), torch.empty_like(y)
    of_x, of_y = weights * scale / x_time, weights * scale / y_time  # points come in lengths, not in radii
    first, second, to_y, to_x = of_x * y_time, -of_y * x_time, -of_x * rise, of_y * rise
    for rows in row_chunks(x):
        a, b = x[rows].double(), y[rows].double()
        gap = a - b
        on_x[rows] = b.mul_(to_y[rows]).addcmul_(gap, first[rows])
        on_y[rows] = a.mul_(to_x[rows]).addcmul_(gap, second[rows])
        del a, b, gap
    # sinh(D) times E - D of geodesics: what a distance loses as all points move out.
    half = torch.log1p(z + sinh) / 2
    lag = -2 * numerics.minus_tanh(half) * sinh - rise.square() / (x_time * y_time)
    return weights * lag / scale.square(), on_x, on_y


class _Step(NamedTuple):
    """Of each row ``(n, 1)``: w, its length, cosh, sinh over length and the slope of that, in units of the radius."""

    w: Tensor
    length: Tensor
    cosh: Tensor
    sinhc: Tensor
    slope: Tensor


def _exp_numbers(scale: Tensor, x: Tensor, u: Tensor) -> tuple[_Step, Tensor]:
    squares = x.new_empty((3, x.shape[0], 1), dtype=torch.float64)
    for rows in row_chunks(x):
        a, b = x[rows].double(), u[rows].double()
        squares[0, rows] = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
        squares[1, rows] = torch.linalg.vector_norm(b, dim=-1, keepdim=True)
        squares[2, rows] = a.mul_(b).sum(-1, keepdim=True)
    x_length, u_length, product = (*squares[:2].mul_(scale).unbind(), squares[2] * scale.square())
    x_time = numerics.hypot(x_length, torch.ones_like(x_length))
    w = product / x_time.square()
    length = (u_length.square() - w * product).clamp(min=0).sqrt()
    step = _Step(w, length, torch.cosh(length), numerics.sinhc(length), numerics.sinhc_slope(length))
    return step, ~(torch.maximum(step.cosh, u_length) * x_time <= numerics.ROW_STEEPEST)


def _exp_values(numbers: _Step, _: Tensor, x: Tensor, u: Tensor) -> Tensor:
    result = torch.empty_like(x)
    for rows in row_chunks(x):
        along = x[rows] * numbers.cosh[rows]  # float64 from here on
        result[rows] = torch.addcmul(along, u[rows].double(), numbers.sinhc[rows])
    return result


def _exp_gradients(numbers: _Step, grad: Tensor, scale: Tensor, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    w, length, cosh, sinhc, slope = numbers
    on_x, on_u, on_square = torch.empty_like(x), torch.empty_like(u), torch.empty_like(w)
    for rows in row_chunks(x):
        a, b, g = x[rows].double(), u[rows].double(), grad[rows].double()
        by_cosh, by_sinhc = ((g * z).sum(-1, keepdim=True) for z in (a, b))
        # What the square of the length does, and u without its part along x: the square's own gradient.
        on_square[rows] = on_length = (by_cosh * sinhc[rows] + by_sinhc * slope[rows]) * scale.square()
        aside = b.sub_(a.mul_(w[rows])).mul_(on_length)
        on_u[rows] = torch.addcmul(aside, g, sinhc[rows])
        on_x[rows] = g.mul_(cosh[rows]).sub_(aside.mul_(w[rows]))
    return on_square * (length.square() - w.square()) / (scale * scale.square()), on_x, on_u


def _exp_exact(x: Tensor, u: Tensor, scale: Tensor) -> Tensor:
    return numerics.shrink(geodesics.expmap_exact(x, u, scale, reach_of(torch.float32)), torch.float32)


def _log_numbers(scale: Tensor, x: Tensor, y: Tensor) -> tuple[Between, Tensor]:
    numbers, lost = between(scale, x, y)
    widest = torch.maximum(numbers.x_time, numbers.y_time)
    return numbers, lost | ~((1 + numbers.z) * widest <= numerics.ROW_STEEPEST)


def _log_values(numbers: Between, scale: Tensor, x: Tensor, y: Tensor) -> Tensor:
    x_time, _, rise, z, _, _ = numbers
    shorter = _shorter(numbers)
    result = x.new_empty(x.shape[0], x.shape[1] + 1)
    result[:, :1] = shorter * (0.0 - rise - z * x_time) / scale
    along = 1 + z
    for rows in row_chunks(x):
        result[rows, 1:] = torch.addcmul(y[rows].double(), x[rows].double(), -along[rows]).mul_(shorter[rows])
    return result


def _log_gradients(
    numbers: Between, grad: Tensor, scale: Tensor, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x_time, y_time, rise, z, sinh, rate = numbers
    shorter, time = _shorter(numbers), grad[:, :1].double() / scale
    slope = -shorter.pow(3) * numerics.sinhc_slope(torch.log1p(z + sinh))
    on_x, on_y, on_z = torch.empty_like(x), torch.empty_like(y), torch.empty_like(z)
    square = scale.square()
    for rows in row_chunks(x):
        a, b, g = x[rows].double(), y[rows].double(), grad[rows, 1:].double()
        gap = b - a
        on_point = (g * a).sum(-1, keepdim=True) + time[rows] * x_time[rows]
        ahead = (g * gap).sum(-1, keepdim=True) - time[rows] * rise[rows]  # along y - x, times included
        f, along = shorter[rows], 1 + z[rows]
        on_z[rows] = pull = slope[rows] * (ahead - z[rows] * on_point) - f * on_point
        pull = pull * square
        of_time = f * time[rows] * square
        # Each gradient is g, the gap and the points themselves, weighted by the row.
        g.mul_(f)
        first, second = gap * (pull * (y_time / x_time)[rows]), gap.mul_(pull * (x_time / y_time)[rows])
        torch.addcmul(first, g, along, out=first)
        first.addcmul_(b, pull * (rise / x_time)[rows]).addcmul_(a, along * of_time / x_time[rows])
        on_x[rows] = first.neg_()
        second.add_(g).addcmul_(a, pull * (rise / y_time)[rows])
        on_y[rows] = second.addcmul_(b, of_time / y_time[rows])
    by_time = shorter * time * (z * y_time - rise) / (x_time * y_time)
    return (on_z * rate + by_time) / scale, on_x, on_y


def _shorter(numbers: Between) -> Tensor:
    """D / sinh D."""
    return 1 / numerics.sinhc(torch.log1p(numbers.z + numbers.sinh))


class Factor(NamedTuple):
    """Of each row ``(n, 1)``: squared length in units of the radius, what multiplies it, twice the slope of that."""

    square: Tensor
    value: Tensor
    slope: Tensor


def _radial_values(numbers: Factor, _: Tensor, x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    for rows in row_chunks(x):
        result[rows] = x[rows] * numbers.value[rows]
    return result


def _radial_gradients(numbers: Factor, grad: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    on_x, along = torch.empty_like(x), torch.empty_like(numbers.square)
    pull = numbers.slope * scale.square()
    for rows in row_chunks(x):
        a, g = x[rows].double(), grad[rows].double()
        along[rows] = (g * a).sum(-1, keepdim=True)
        on_x[rows] = a.mul_(pull[rows] * along[rows]).addcmul_(g, numbers.value[rows])
    return along * numbers.slope * numbers.square / scale, on_x


def exponential_factor(length: Tensor) -> Factor:
    """What the exponential at the origin multiplies vectors of these lengths with."""
    held = numerics.above_noise(length)
    value = held.sinh() / held
    return Factor(length.square(), value, (held.cosh() - value) / held.square())


def logarithm_factor(length: Tensor) -> Factor:
    """What the logarithm at the origin multiplies points with whose space parts have these lengths."""
    held = numerics.above_noise(length)
    square = held.square()
    time = (1 + square).sqrt()
    value = torch.log1p(held + square / (1 + time)) / held
    return Factor(length.square(), value, (1 / time - value) / square)


def _exp0_numbers(scale: Tensor, u: Tensor) -> tuple[Factor, Tensor]:
    length = scaled_lengths(u, scale)
    return exponential_factor(length), ~(length <= WIDEST_RAPIDITY)


def _exp0_exact(u: Tensor, scale: Tensor) -> Tensor:
    return numerics.shrink(geodesics.expmap0_exact(u, scale), torch.float32)


def _log0_numbers(scale: Tensor, x: Tensor) -> tuple[Factor, Tensor]:
    length = scaled_lengths(x, scale)
    return logarithm_factor(length), ~(length <= numerics.ROW_WIDEST)


def scaled_lengths(x: Tensor, scale: Tensor) -> Tensor:
    """The length of each row, (n, 1) in float64, in units of the radius."""
    length = x.new_empty((x.shape[0], 1), dtype=torch.float64)
    for rows in row_chunks(x):
        length[rows] = torch.linalg.vector_norm(x[rows].double(), dim=-1, keepdim=True)
    return length.mul_(scale)


rowwise_distance = RowwiseOp(_dist_numbers, _dist_values, _dist_gradients, geodesics.distance)
rowwise_exponential = RowwiseOp(_exp_numbers, _exp_values, _exp_gradients, _exp_exact)
rowwise_logarithm = RowwiseOp(_log_numbers, _log_values, _log_gradients, geodesics.logarithm)
# Rows multiplied by a function of their length.
rowwise_exponential0 = RowwiseOp(_exp0_numbers, _radial_values, _radial_gradients, _exp0_exact)
rowwise_logarithm0 = RowwiseOp(_log0_numbers, _radial_values, _radial_gradients, geodesics.logarithm0)
