r"""Parallel transport of float32 vectors, row by row, as little arithmetic as keeps it right.

In units of the radius, v as it is, with z of :func:`holonomy.manifolds.hyperboloid.rowwise.between` and :math:`v_t = x
\cdot v / x_t`,

.. math:: w = v + c\, (x + y), \qquad c = \frac{p}{2 + z}, \quad p = y \cdot v - y_t v_t,

time coordinates included. What cancels, and how far float64 bears it, is as in
:mod:`holonomy.manifolds.hyperboloid.rowwise_maps`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.manifolds.hyperboloid import geodesics
from holonomy.manifolds.hyperboloid.rowwise import Between, RowwiseOp, between, row_chunks


class _Numbers(NamedTuple):
    """Of each row ``(n, 1)``: what lies between the points, time of the vector, p and c."""

    pair: Between
    time: Tensor
    p: Tensor
    c: Tensor


def _numbers(scale: Tensor, x: Tensor, y: Tensor, v: Tensor) -> tuple[_Numbers, Tensor]:
    pair, _ = between(scale, x, y)
    products = x.new_empty((2, x.shape[0], 1), dtype=torch.float64)
    for rows in row_chunks(x):
        vector = v[rows].double()
        products[0, rows] = (x[rows] * vector).sum(-1, keepdim=True)
        products[1, rows] = vector.mul_(y[rows]).sum(-1, keepdim=True)
    on_x, on_y = products.mul_(scale).unbind()
    time = on_x / pair.x_time
    p = on_y - pair.y_time * time
    # On one ray the gradient in x vanishes, and what is left of it is rounding: a twentieth of what maps may stretch.
    stretch = 20 * (1 + pair.z) * torch.maximum(pair.x_time, pair.y_time)
    return _Numbers(pair, time, p, p / (2 + pair.z)), ~(stretch <= numerics.ROW_STEEPEST)


def _values(numbers: _Numbers, scale: Tensor, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    pair, time, _, c = numbers
    result = x.new_empty(x.shape[0], x.shape[1] + 1)
    result[:, :1] = time + c * (pair.x_time + pair.y_time)
    longer = c * scale
    for rows in row_chunks(x):
        both = x[rows].double().add_(y[rows])
        result[rows, 1:] = both.mul_(longer[rows]).add_(v[rows])
    return result


def _gradients(numbers: _Numbers, grad: Tensor, scale: Tensor, x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    (x_time, y_time, rise, z, _, rate), time, p, c = numbers
    g_time = grad[:, :1].double()
    on_x, on_y, on_v, on_p = (torch.empty_like(like) for like in (x, y, v, p))
    for rows in row_chunks(x):
        a, b, u, g = x[rows].double(), y[rows].double(), v[rows].double(), grad[rows, 1:].double()
        t, x_t, y_t, c_row = g_time[rows], x_time[rows], y_time[rows], c[rows]
        along = (g * (a + b)).sum(-1, keepdim=True) * scale + t * (x_t + y_t)
        on_p[rows] = pull = along / (2 + z[rows])
        of_time = (t - pull * y_t) / x_t
        apart = -c_row * pull * scale
        gap, by_gap = b - a, apart * scale
        # Each gradient is g, v, the gap and the points themselves, weighted by the row.
        on_v[rows] = g + (a * (of_time * scale)).addcmul_(b, pull * scale)
        g.mul_(c_row * scale)
        first = torch.addcmul(g, u, of_time * scale)
        first.addcmul_(a, (c_row * t - of_time * time[rows]) * scale.square() / x_t)
        on_x[rows] = first.addcmul_(gap, -by_gap * y_t / x_t).addcmul_(b, -by_gap * rise[rows] / x_t)
        second = g.addcmul_(u, pull * scale)
        second.addcmul_(b, (c_row * t - pull * time[rows]) * scale.square() / y_t)
        on_y[rows] = second.addcmul_(gap, by_gap * x_t / y_t).addcmul_(a, by_gap * rise[rows] / y_t)
    rates = on_p * (2 * p - c * rate) - c * g_time * (1 / x_time + 1 / y_time)
    rates = rates + (g_time + on_p * rise * (x_time + y_time) / y_time) * time / x_time.square()
    return rates / scale, on_x, on_y, on_v


rowwise_transport = RowwiseOp(_numbers, _values, _gradients, geodesics.transport_exact)
