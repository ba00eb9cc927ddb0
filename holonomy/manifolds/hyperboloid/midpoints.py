r"""Midpoints of weighted points, with derivatives in closed form.

Space parts ``(..., n, d)`` come in float64 and ``scale`` is :math:`s = \sqrt{-\kappa}`; what is private here is in unit
coordinates :math:`X = s x`. The length of a sum of points is its time minus the length of its space part, to which each
point adds :math:`x_t - |x| \cos\theta = 1/(x_t + |x|) + |x|\,(2 \sin(\theta/2))^2 / 2`, the angle from the chord of
unit vectors. Of points far out on nearly one ray rounding of unit vectors would leave no angle, so these are held as
one *axis*, the ray of the heaviest point, and offsets from it, made of the points' parts across the axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd, numerics
from holonomy._shapes import Float
from holonomy.manifolds.hyperboloid.rays import Rays, any_nan, chord_of, polar, sinh_difference, time_of, weighted_gap
from holonomy.manifolds.hyperboloid.views import part_across


class _Centroid(_autograd.InputsSaved):
    """Midpoints, float64: space parts ``(..., n, d)``, weights ``(..., m, n)``."""

    @staticmethod
    def forward(x: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
        return _middle(numerics.finite(x * scale), _rescaled(weights)[0])[1].points / scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        # Made again from the inputs, so that it can be differentiated once more.
        x, weights, scale = ctx.saved_tensors
        (grad,) = grad_outputs
        spoiled = any_nan(x, weights, grad)
        weights, unit = _rescaled(weights)
        x, middle, length = _middle(numerics.finite(x * scale), weights)
        shares = numerics.safe_div(weights, length)
        radial = (grad * middle.points).sum(-1, keepdim=True)
        grad_x = shares.mT @ grad - weighted_gap(x, middle, (shares * radial).mT, torch.ones_like(middle.time))
        grad_weights = numerics.safe_div(grad @ x.points.mT - radial * _cosh(middle, x), length) / scale / unit
        grad_scale = None
        if ctx.needs_input_grad[2]:
            # All points moved along their rays, the midpoint lags by their variance in the Klein ball.
            lag = (shares * _klein_gap(middle, x) * x.time.mT).sum(-1, keepdim=True)
            rates = numerics.where_finite(radial * middle.time * lag, spoiled)
            grad_scale = -numerics.finite(numerics.total(rates) / scale.square())
        return numerics.where_finite(grad_x, spoiled), numerics.where_finite(grad_weights, spoiled), grad_scale


midpoint = _autograd.traceable(_Centroid)
"""Lorentzian midpoints; see :func:`holonomy.manifolds.hyperboloid.centroid`."""


# What a second derivative goes through has two forms: one smooth at the origin, where a point has no direction, and one
# for both points beyond rapidity 0.9, where the first would cancel. Norms are held in the form that is not taken.


def _near(x_norm: Tensor, y_norm: Tensor) -> Tensor:
    """Pairs of which one is near the origin."""
    return (x_norm <= 1) | (y_norm.mT <= 1)


def _cosh(x: Rays, y: Rays) -> Tensor:
    """cosh(d) = x_t y_t - x . y for all pairs."""
    chord = chord_of(x.offset, y.offset)
    a, b = x.length.clamp(min=1), y.length.clamp(min=1)
    radial = sinh_difference(a, time_of(a), b, time_of(b))
    far = time_of(radial) + (a * chord) * (b.mT * chord) / 2
    return torch.where(_near(x.length, y.length), x.time * y.time.mT - x.points @ y.points.mT, far)


def _klein_gap(x: Rays, y: Rays) -> Tensor:
    """``|p - q|^2`` for all pairs, p and q their points of the Klein ball."""
    chord = chord_of(x.offset, y.offset)
    a, b = x.length.clamp(min=1), y.length.clamp(min=1)
    radial = sinh_difference(a, time_of(a), b, time_of(b)) / x.time / y.time.mT
    far = radial.square() + (a / x.time * chord) * (b / y.time).mT * chord
    plain = chord_of(x.points / x.time, y.points / y.time).square()
    return torch.where(_near(x.length, y.length), plain, far)


def _rescaled(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights over a factor, so that no sum of them overflows float64, and the factor; midpoints do not change."""
    if weights.shape[-1] == 0:
        return weights, weights.new_ones(())
    largest = weights.amax(-1, keepdim=True)
    unit = numerics.power_of_two(torch.where(largest > 0, largest, 1.0)) / numerics.ROOM
    return weights / unit, unit


def _offset(across: Tensor, along: Tensor, length: Tensor, axis: Tensor) -> Tensor:
    """The unit vector of what lies across and along an axis, less the axis; zero vectors have unit vector zero."""
    across, cos = numerics.safe_div(across, length), numerics.safe_div(along, length)
    square = across.square().sum(-1, keepdim=True)
    behind = torch.where(cos < 0, 2 - square / (1 - cos.clamp(max=0)), square / (1 + cos.clamp(min=0)))  # 1 - cos
    return across - axis * torch.where(length == 0, 1.0, behind)


def _heaviest(x: Tensor, mass: Tensor) -> Tensor:
    """The point whose ray is the axis: a midpoint is far out only if the heaviest points are nearly on one ray."""
    if x.shape[-2] == 0:
        return x.new_zeros((*x.shape[:-2], 1, x.shape[-1]))
    # Weights may have more axes than points.
    x = x.detach().expand(*torch.broadcast_shapes(x.shape[:-2], mass.shape[:-2]), *x.shape[-2:])
    first = mass.detach().argmax(-2, keepdim=True)
    return x.gather(-2, first.expand(*x.shape[:-2], 1, x.shape[-1]))  # not take_along_dim, which reads symbols


def _middle(x: Tensor, weights: Tensor) -> tuple[Rays, Rays, Tensor]:
    """Points and midpoints in unit coordinates, and the Lorentzian lengths of the weighted sums."""
    length, time = polar(x)
    ahead = _heaviest(x, weights.sum(-2).unsqueeze(-1) * length)
    axis = numerics.unit_vector(ahead)
    across = part_across(*torch.broadcast_tensors(ahead, axis, x))
    along = numerics.dot(x, axis)
    rays = Rays(x, length, time, _offset(across, along, length, axis), axis)

    total, total_time = weights @ x, weights @ time
    total_length = numerics.norm(total, keepdim=True)
    offset = _offset(weights @ across, weights @ along, total_length, axis)
    slow = numerics.safe_div(total, total_time).square().sum(-1, keepdim=True)
    near = slow <= 1 / 2
    chord = chord_of(offset, rays.offset)
    # time - |space| of the sum: each point contributes t - |x| cos(angle), a sum of two positive terms.
    rim = weights * (1 / (time + length)).mT + (weights * length.mT) * (chord.square() / 2)
    short = torch.where(length.mT <= 1, weights * (time.mT - (axis + offset) @ x.mT), rim).sum(-1, keepdim=True)
    far = torch.where(near, 1.0, short).sqrt() * torch.where(near, 1.0, total_time + total_length).sqrt()
    norm = torch.where(near, total_time * (1 - torch.where(near, slow, 0.0)).sqrt(), far)
    middle = numerics.safe_div(total, norm)
    return rays, Rays(middle, *polar(middle), offset, axis), norm


def midpoint_of_sum(
    total: Float[Tensor, "*batch ambient"],
    mass: Float[Tensor, "*#batch 1"],
    curvature: Float[Tensor, "*one"],
    spacing: float,
) -> Float[Tensor, "*batch dim"]:
    """Scale a weighted sum of points to the hyperboloid, the quotient of Hypformer eq. 4."""
    time, space = total[..., :1], total[..., 1:]
    length = numerics.norm(space, keepdim=True)
    empty = mass <= 0  # nan is neither, and stays
    high = torch.where(empty, 1.0, time + length)
    scale = curvature.reshape(()).to(total.dtype).neg().sqrt()
    radius = mass / scale
    low = torch.where(empty, 1.0, time - length)
    # -<s, s> = t^2 - |s|^2 = low * high >= mass^2 / |kappa| on the hyperboloid, with equality where all points
    # coincide. Where low is within rounding of zero, the bound replaces it: exact for coincident points at any radius.
    rounded = (low <= 4 * spacing * high) | (low * (high / 2) < radius * (radius / 2))
    norm = torch.where(rounded, 1.0, low).sqrt() * high.sqrt()
    norm = torch.where(rounded, torch.where(empty, 1.0, radius), norm)
    return torch.where(empty, 0.0, space / (norm * scale))
