r"""Distances of float32 points, row by row, as little arithmetic as keeps them right.

In units of the radius, with d = x - y and z of :func:`holonomy.manifolds.hyperboloid.rowwise.between`, the gradient in
x is :math:`\big((y_t / x_t)\, d - ((x_t - y_t) / x_t)\, y\big) / \sinh D`. In float64 it and z are right to float32
rounding where :math:`z \ge` 1e-8 :math:`|d|^2`. Rows beyond, points far out on nearly one ray, go to
:mod:`holonomy.manifolds.hyperboloid.geodesics`, which is right everywhere at ten times the price.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.manifolds.hyperboloid import geodesics
from holonomy.manifolds.hyperboloid.rowwise import Between, RowwiseOp, between, row_chunks

# Gradients of points farther out, in radii, lie below the normal numbers of float32.
_WIDEST = 1e34


def _numbers(scale: Tensor, x: Tensor, y: Tensor) -> tuple[Between, Tensor]:
    numbers, lost = between(scale, x, y)
    return numbers, lost | ~(torch.maximum(numbers.x_time, numbers.y_time) <= _WIDEST)


def _values(numbers: Between, scale: Tensor, *_: Tensor) -> Tensor:
    return (torch.log1p(numbers.z + numbers.sinh) / scale).squeeze(-1).float()


def _gradients(numbers: Between, grad: Tensor, scale: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


rowwise_distance = RowwiseOp(_numbers, _values, _gradients, geodesics.distance)
