r"""Distances of many float32 points, row by row, as little arithmetic as keeps them right.

In units of the radius, with d = x - y and the difference of the times from that of the squares,

.. math::
    \cosh D - 1 = z = \tfrac12 \big(|d|^2 - (x_t - y_t)^2\big), \qquad x_t - y_t = \frac{d \cdot (x + y)}{x_t + y_t},

and the gradient in x is :math:`\big((y_t / x_t)\, d - ((x_t - y_t) / x_t)\, y\big) / \sinh D`. In float64 both are
right to float32 rounding where :math:`z \ge` 1e-8 :math:`|d|^2` and times are below 1e6 radii. Rows beyond, points far
out on nearly one ray, go to :mod:`holonomy.manifolds.geodesics`, which is right everywhere at ten times the price.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.manifolds import geodesics

__all__ = ["row_distance", "takes_rows"]

# Below, the bookkeeping costs more than the formulas of geodesics do.
FEWEST_ROWS = 256
# Entries taken at once: 256 KiB of float64.
_CHUNK = 2**15


def takes_rows(x: Tensor, y: Tensor) -> bool:
    """The rule: two tables of the same shape, float32, many rows, and :func:`holonomy.numerics.by_hand`.

    Args:
        x: points ``(n, d + 1)``.
        y: points ``(n, d + 1)``.

    Returns:
        Whether :func:`row_distance` is for them.

    >>> takes_rows(torch.ones(300, 3), torch.ones(300, 3)), takes_rows(torch.ones(300, 3), torch.ones(3))
    (True, False)
    """
    tables = x.ndim == 2 and x.shape == y.shape and x.shape[0] >= FEWEST_ROWS
    return tables and x.dtype == torch.float32 and numerics.by_hand(x, y)


def row_distance(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Geodesic distances of the rows; a second derivative is that of :func:`holonomy.manifolds.geodesics.distance`.

    Args:
        x: space parts ``(n, d)``, float32.
        y: space parts ``(n, d)``, float32.
        scale: the square root of minus the curvature, without axes, float64.

    Returns:
        Distances ``(n,)``, float32.

    >>> x = torch.tensor([[1.0, 0.0]])
    >>> row_distance(x, -x, torch.ones(()).double()).item() / 2 == x[0, 0].asinh().item()
    True
    """
    distances: Tensor = numerics.apply_function(_RowDistance, x, y, scale)
    return distances


class _Numbers(NamedTuple):
    """Of each row ``(n, 1)``, in float64 and units of the radius: both times, x_t - y_t and z; and the rows beyond."""

    x_time: Tensor
    y_time: Tensor
    rise: Tensor
    z: Tensor
    beyond: Tensor

    def sinh(self) -> Tensor:
        return (self.z * (self.z + 2)).sqrt()


class _RowDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, scale)
        ctx.numbers = numbers = _numbers(x, y, scale)
        distances = (torch.log1p(numbers.z + numbers.sinh()) / scale).squeeze(-1)
        far = numbers.beyond
        if far.numel():
            distances[far] = _by_geodesics(x[far], y[far], scale)
        return distances.float()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, y, scale = ctx.saved_tensors
        grad, of_scale = grad_outputs[0].double(), ctx.needs_input_grad[2]
        if torch.is_grad_enabled():
            return numerics.by_definition(_by_geodesics, (x, y, scale), grad, ctx.needs_input_grad)
        x_time, y_time, rise, _, far = numbers = ctx.numbers
        weights = numerics.safe_div(grad[:, None], numbers.sinh())
        weights[far] = 0
        on_x, on_y = torch.empty_like(x), torch.empty_like(y)
        of_x, of_y = weights * scale / x_time, weights * scale / y_time  # points come in lengths, not in radii
        first, second, to_y, to_x = of_x * y_time, -of_y * x_time, -of_x * rise, of_y * rise
        for rows in _parts(x):
            a, b = x[rows].double(), y[rows].double()
            gap = a - b
            on_x[rows] = torch.addcmul(b.mul_(to_y[rows]), gap, first[rows])
            on_y[rows] = torch.addcmul(a.mul_(to_x[rows]), gap, second[rows])
        on_scale = (weights * _lag(numbers)).sum() / scale.square() if of_scale else None
        if far.numel():
            rows = (x[far], y[far], scale)
            on_x[far], on_y[far], more = numerics.by_definition(_by_geodesics, rows, grad[far], (True,) * 3)
            on_scale = None if on_scale is None else on_scale + more
        return on_x, on_y, on_scale


def _numbers(x: Tensor, y: Tensor, scale: Tensor) -> _Numbers:
    squares = x.new_empty((4, x.shape[0], 1), dtype=torch.float64)
    for rows in _parts(x):
        a, b = x[rows].double(), y[rows].double()
        gap = a - b
        squares[0, rows] = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
        squares[1, rows] = torch.linalg.vector_norm(b, dim=-1, keepdim=True)
        squares[2, rows] = torch.linalg.vector_norm(gap, dim=-1, keepdim=True)
        squares[3, rows] = gap.mul_(a.add_(b)).sum(-1, keepdim=True)
    x_length, y_length, gap, product = (*squares[:3].mul_(scale).unbind(), squares[3] * scale.square())
    x_time, y_time = (numerics.hypot(length, torch.ones_like(length)) for length in (x_length, y_length))
    rise = product / (x_time + y_time)
    z = (gap.square() - rise.square()) / 2
    right = (z >= numerics.PRODUCT_NEAR * gap.square()) & (torch.maximum(x_time, y_time) <= numerics.ROW_WIDEST)
    beyond = (~right.squeeze(-1)).nonzero().squeeze(-1)
    return _Numbers(x_time, y_time, rise, z.clamp(min=0), beyond)


def _lag(numbers: _Numbers) -> Tensor:
    """sinh(D) times E - D of :mod:`holonomy.manifolds.geodesics`: what a distance loses as all points move out."""
    x_time, y_time, rise, z, _ = numbers
    sinh = numbers.sinh()
    half = torch.log1p(z + sinh) / 2
    return -2 * numerics.minus_tanh(half) * sinh - rise.square() / (x_time * y_time)


def _by_geodesics(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return geodesics.distance(x.double(), y.double(), scale)


def _parts(x: Tensor) -> list[slice]:
    step = max(1, _CHUNK // max(x.shape[1], 1))
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]
