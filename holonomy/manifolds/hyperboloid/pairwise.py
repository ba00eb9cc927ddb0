r"""Distances of all pairs of two sets of points, with derivatives in closed form.

Space parts ``(..., n, d)`` come in float64 and ``scale`` is :math:`s = \sqrt{-\kappa}`; what is private here is in unit
coordinates :math:`X = s x`. What rounding leaves of the angle between two rays, 1e-16, is too much for points nearer
than 1e-6 of their lengths: distances of these pairs are those of :mod:`holonomy.manifolds.hyperboloid.geodesics`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.manifolds.hyperboloid import geodesics
from holonomy.manifolds.hyperboloid.rays import any_nan, chord_of, polar, rays_of, sinh_difference, weighted_gap
from holonomy.manifolds.hyperboloid.rowwise import rows_at_once


def distance_values(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    r"""Distances of all pairs from :math:`\sinh(d/2)`, without a gradient of its own."""
    half_sinh = _half_sinh(numerics.finite(x * scale), numerics.finite(y * scale))
    distances = 2 * torch.asinh(half_sinh) / scale
    for pair, a, b in _near_pairs(x, y, scale, half_sinh):
        distances[pair] = geodesics.distance(a, b, scale)
    return distances


def distance_gradients(
    x: Tensor, y: Tensor, scale: Tensor, distances: Tensor, grad: Tensor, *, of_scale: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the distances' gradient is in both sets of points and in the scale; it can be differentiated again."""
    spoiled = any_nan(x, y, grad)
    rays = rays_of(numerics.finite(x * scale)), rays_of(numerics.finite(y * scale))
    (_, x_norm, x_time, *_), (_, y_norm, y_time, *_) = rays
    rapidity = distances * scale
    # sinh(d) = 2 sinh(d/2) cosh(d/2), divided by in turn: far out sinh(d) overflows where x_t / sinh(d) is ordinary.
    cosh, sinh = torch.cosh(rapidity / 2), torch.sinh(rapidity / 2)
    near = list(_near_pairs(x, y, scale, sinh.detach()))
    all_pairs = grad
    if near:
        grad = grad.clone()
        for pair, _, _ in near:
            grad[pair] = 0.0
    of_x = numerics.finite(grad / 2 * numerics.safe_div(y_time.mT / cosh, sinh))
    of_y = numerics.finite(grad / 2 * numerics.safe_div(x_time / cosh, sinh)).mT
    grad_scale = None
    if of_scale:
        # D - E of holonomy.manifolds.hyperboloid.geodesics, here 2 (D/2 - tanh(D/2)) + (X_t - Y_t)^2 / (X_t Y_t
        # sinh(D)).
        slope = (x_norm / 2 + y_norm.mT / 2) / (x_time / 2 + y_time.mT / 2)
        rise = (x_norm - y_norm.mT) * slope
        bend = (rise / x_time / cosh) * numerics.safe_div(rise / y_time.mT, sinh) / 2
        rates = numerics.where_finite(grad * (2 * numerics.minus_tanh(rapidity / 2) + bend), spoiled)
        grad_scale = -numerics.finite(numerics.total(rates) / scale.square())
    grad_x = numerics.where_finite(weighted_gap(*rays, of_x, 1 / y_time), spoiled)
    grad_y = numerics.where_finite(weighted_gap(rays[1], rays[0], of_y, 1 / x_time), spoiled)
    for pair, a, b in near:
        *batch, i, j = pair
        of_a, of_b, of_pairs = geodesics.distance_gradients(a, b, scale, all_pairs[pair].unsqueeze(-1))
        grad_x = grad_x.index_put((*batch, i), of_a, accumulate=True)
        grad_y = grad_y.index_put((*batch, j), of_b, accumulate=True)
        grad_scale = None if grad_scale is None else grad_scale + of_pairs
    return grad_x, grad_y, grad_scale


def _near_pairs(
    x: Tensor, y: Tensor, scale: Tensor, half_sinh: Tensor
) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
    """Pairs nearer than 1e-6 of their lengths, some at once, and their points; those that coincide only far out."""
    x_length, y_length = (numerics.norm(numerics.finite(z * scale), keepdim=True) for z in (x, y))
    widest = x_length.sqrt() * y_length.sqrt().mT
    apart = (half_sinh > 0) | (widest > numerics.ROW_WIDEST)
    near = apart & (half_sinh * numerics.ROW_WIDEST < widest)
    batch, size = near.shape[:-2], rows_at_once(x, x.shape[-1])
    x, y = x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:])
    found = near.nonzero()
    for some in found.split(size) if len(found) else ():
        *which, i, j = some.unbind(1)
        yield (*which, i, j), x[(*which, i)], y[(*which, j)]


def _half_sinh(x: Tensor, y: Tensor) -> Tensor:
    """sinh(d/2) for all pairs; see :func:`cdist`."""
    (x_norm, x_time), (y_norm, y_time) = polar(x), polar(y)
    chord = chord_of(numerics.safe_div(x, x_norm), numerics.safe_div(y, y_norm))
    radial = sinh_difference(x_norm, x_time, y_norm, y_time)
    radial = radial / ((1 + torch.hypot(radial, torch.ones_like(radial))) / 2).sqrt() / 2
    return torch.hypot(radial, x_norm.sqrt() * y_norm.mT.sqrt() * (chord / 2))
