r"""All pairs of two sets of points: distances, and midpoints of weighted points, with derivatives in closed form.

Space parts ``(..., n, d)`` come in float64 and ``scale`` is :math:`s = \sqrt{-\kappa}`; what is private here is in unit
coordinates :math:`X = s x`. Every quantity is a sum of positive terms, or of differences of the numbers that came in.
What rounding leaves of the angle between two rays, 1e-16, is too much for points nearer than 1e-6 of their times:
distances of these pairs are those of :mod:`holonomy.manifolds.hyperboloid.geodesics`, except under ``torch.compile``
and ``torch.func``, which cannot choose pairs. :mod:`holonomy.manifolds.hyperboloid.pair_products` takes matrix products
where float32 allows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd, numerics
from holonomy.manifolds.hyperboloid import geodesics
from holonomy.manifolds.hyperboloid.rows import rows_at_once

__all__ = ["distance_gradients", "distance_values", "midpoint", "pairwise_distance", "polar"]


def pairwise_distance(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Distances of all pairs; see :func:`holonomy.manifolds.hyperboloid.cdist`."""
    function = _TracedPairwiseDistance if torch.compiler.is_compiling() else _PairwiseDistance
    distances: Tensor = _autograd.apply_function(function, x, y, scale)
    return distances


def midpoint(x: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    """Lorentzian midpoints; see :func:`holonomy.manifolds.hyperboloid.centroid`."""
    function = _TracedCentroid if torch.compiler.is_compiling() else _Centroid
    middle: Tensor = _autograd.apply_function(function, x, weights, scale)
    return middle


def distance_values(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    r"""Distances of all pairs from :math:`\sinh(d/2)`, without a gradient of its own."""
    half_sinh = _half_sinh(numerics.finite(x * scale), numerics.finite(y * scale))
    distances = 2 * torch.asinh(half_sinh) / scale
    if _reads_numbers(x):
        for pair, a, b in _near_pairs(x, y, scale, half_sinh):
            distances[pair] = geodesics.distance(a, b, scale)
    return distances


def distance_gradients(
    x: Tensor, y: Tensor, scale: Tensor, distances: Tensor, grad: Tensor, *, of_scale: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the distances' gradient is in both sets of points and in the scale; it can be differentiated again."""
    points, spoiled = (x, y), _any_nan(x, y, grad)
    x, y = numerics.finite(x * scale), numerics.finite(y * scale)
    (x_norm, x_time), (y_norm, y_time) = polar(x), polar(y)
    rapidity = distances * scale
    # sinh(d) = 2 sinh(d/2) cosh(d/2), divided by in turn: far out sinh(d) overflows where x_t / sinh(d) is ordinary.
    cosh, sinh = torch.cosh(rapidity / 2), torch.sinh(rapidity / 2)
    near = list(_near_pairs(*points, scale, sinh.detach())) if _reads_numbers(x) else []
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
    grad_x, grad_y = (numerics.where_finite(_weighted_gap(*of), spoiled) for of in ((x, y, of_x), (y, x, of_y)))
    for pair, a, b in near:
        *batch, i, j = pair
        of_a, of_b, of_pairs = geodesics.distance_gradients(a, b, scale, all_pairs[pair].unsqueeze(-1))
        grad_x = grad_x.index_put((*batch, i), of_a, accumulate=True)
        grad_y = grad_y.index_put((*batch, j), of_b, accumulate=True)
        grad_scale = None if grad_scale is None else grad_scale + of_pairs
    return grad_x, grad_y, grad_scale


def _any_nan(*inputs: Tensor) -> Tensor:
    """Whether ``nan`` came in, which is to be seen in gradients."""
    return torch.stack([x.isnan().any() for x in inputs]).any()


def _reads_numbers(x: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or _autograd.transformed() or x.is_meta)


def _near_pairs(
    x: Tensor, y: Tensor, scale: Tensor, half_sinh: Tensor
) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
    """Indices of pairs nearer than 1e-6 of their times, some at once, and their points; none that coincide."""
    x_time, y_time = polar(numerics.finite(x * scale))[1], polar(numerics.finite(y * scale))[1]
    widest = x_time.sqrt() * y_time.sqrt().mT
    near = (half_sinh > 0) & (half_sinh * numerics.ROW_WIDEST < widest)
    batch, size = near.shape[:-2], rows_at_once(x, x.shape[-1])
    x, y = x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:])
    found = near.nonzero()
    for some in found.split(size) if len(found) else ():
        *which, i, j = some.unbind(1)
        yield (*which, i, j), x[(*which, i)], y[(*which, j)]


class _PairwiseDistance(torch.autograd.Function):
    """Distances between space parts ``(..., n, d)`` and ``(..., m, d)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return distance_values(x, y, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        # Inputs and output only: what else was saved would be a constant to whoever differentiates twice.
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, y, scale, distances = ctx.saved_tensors
        return distance_gradients(x, y, scale, distances, grad_outputs[0], of_scale=ctx.needs_input_grad[2])


class _TracedPairwiseDistance(torch.autograd.Function):
    """The same in the form that dynamo traces into whatever decorates what it calls; not for ``torch.func``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        distances = distance_values(x, y, scale)
        ctx.save_for_backward(x, y, scale, distances)
        return distances

    backward = staticmethod(_PairwiseDistance.backward)


class _Centroid(torch.autograd.Function):
    """Midpoints, float64: space parts ``(..., n, d)``, weights ``(..., m, n)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
        return _middle(numerics.finite(x * scale), _moderate(weights)[0])[0] / scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        # Made again from the inputs, so that it can be differentiated once more.
        x, weights, scale = ctx.saved_tensors
        spoiled = _any_nan(x, weights, grad_outputs[0])
        x, (weights, unit) = numerics.finite(x * scale), _moderate(weights)
        middle, length = _middle(x, weights)
        cotangent = numerics.safe_div(grad_outputs[0], length)
        radial = (cotangent * middle).sum(-1, keepdim=True)
        grad_x = weights.mT @ cotangent - _weighted_gap(x, middle, (weights * radial * polar(middle)[1]).mT)
        grad_weights = (cotangent @ x.mT - radial * _cosh(middle, x)) / scale / unit
        grad_scale = None
        if ctx.needs_input_grad[2]:
            # All points moved along their rays, the midpoint lags by their variance in the Klein ball.
            lag = (weights * _klein_gap(middle, x) * polar(x)[1].mT).sum(-1, keepdim=True)
            rates = numerics.where_finite(radial * polar(middle)[1] * lag, spoiled)
            grad_scale = -numerics.finite(numerics.total(rates) / scale.square())
        return numerics.where_finite(grad_x, spoiled), numerics.where_finite(grad_weights, spoiled), grad_scale


class _TracedCentroid(torch.autograd.Function):
    """As :class:`_TracedPairwiseDistance`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, scale)
        return _middle(numerics.finite(x * scale), _moderate(weights)[0])[0] / scale

    backward = staticmethod(_Centroid.backward)


# What a second derivative goes through has two forms: one smooth at the origin, where a point has no direction, and one
# for both points beyond rapidity 0.9, where the first would cancel. Norms are held in the form that is not taken.


def _near(x_norm: Tensor, y_norm: Tensor) -> Tensor:
    """Pairs of which one is near the origin."""
    return (x_norm <= 1) | (y_norm.mT <= 1)


def _cosh(x: Tensor, y: Tensor) -> Tensor:
    """cosh(d) = x_t y_t - x . y for all pairs."""
    (x_norm, x_time), (y_norm, y_time) = polar(x), polar(y)
    chord = _chord(numerics.unit_vector(x, x_norm), numerics.unit_vector(y, y_norm))
    a, b = x_norm.clamp(min=1), y_norm.clamp(min=1)
    radial = _sinh_difference(a, _time(a), b, _time(b))
    far = _time(radial) + (a * chord) * (b.mT * chord) / 2
    return torch.where(_near(x_norm, y_norm), x_time * y_time.mT - x @ y.mT, far)


def _klein_gap(x: Tensor, y: Tensor) -> Tensor:
    """``|p - q|^2`` for all pairs, p and q their points of the Klein ball."""
    (x_norm, x_time), (y_norm, y_time) = polar(x), polar(y)
    chord = _chord(numerics.unit_vector(x, x_norm), numerics.unit_vector(y, y_norm))
    a, b = x_norm.clamp(min=1), y_norm.clamp(min=1)
    radial = _sinh_difference(a, _time(a), b, _time(b)) / x_time / y_time.mT
    far = radial.square() + (a / x_time * chord) * (b / y_time).mT * chord
    return torch.where(_near(x_norm, y_norm), _chord(x / x_time, y / y_time).square(), far)


def _moderate(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of which no sum leaves float64, and what they are to be multiplied by: midpoints do not know it."""
    if weights.shape[-1] == 0:
        return weights, weights.new_ones(())
    largest = weights.amax(-1, keepdim=True)
    unit = numerics.power_of_two(torch.where(largest > 0, largest, 1.0)) / numerics.ROOM
    return weights / unit, unit


def _middle(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Midpoints in unit coordinates and the Lorentzian lengths of the weighted sums."""
    x_norm, x_time = polar(x)
    total, time = weights @ x, weights @ x_time
    slow = numerics.safe_div(total, time).square().sum(-1, keepdim=True)
    near = slow <= 1 / 2
    total_norm = numerics.norm(total, keepdim=True)
    unit = numerics.unit_vector(total, total_norm)
    chord = _chord(unit, numerics.unit_vector(x, x_norm))
    # time - |space| of the sum: each point contributes t - |x| cos(angle), a sum of two positive terms.
    rim = weights * (1 / (x_time + x_norm)).mT + (weights * x_norm.mT) * (chord.square() / 2)
    short = torch.where(x_norm.mT <= 1, weights * (x_time.mT - unit @ x.mT), rim).sum(-1, keepdim=True)
    far = torch.where(near, 1.0, short).sqrt() * torch.where(near, 1.0, time + total_norm).sqrt()
    length = torch.where(near, time * (1 - torch.where(near, slow, 0.0)).sqrt(), far)
    return numerics.safe_div(total, length), length


def _half_sinh(x: Tensor, y: Tensor) -> Tensor:
    """sinh(d/2) for all pairs; see :func:`cdist`."""
    (x_norm, x_time), (y_norm, y_time) = polar(x), polar(y)
    chord = _chord(numerics.unit_vector(x, x_norm), numerics.unit_vector(y, y_norm))
    radial = _sinh_difference(x_norm, x_time, y_norm, y_time)
    radial = radial / ((1 + torch.hypot(radial, torch.ones_like(radial))) / 2).sqrt() / 2
    return torch.hypot(radial, x_norm.sqrt() * y_norm.mT.sqrt() * (chord / 2))


def _sinh_difference(x_norm: Tensor, x_time: Tensor, y_norm: Tensor, y_time: Tensor) -> Tensor:
    """sinh(a - b) = (|x|^2 - |y|^2) / (|x| y_t + |y| x_t) for all pairs, zero where both radii are."""
    x_slope, y_slope = x_norm / x_time, (y_norm / y_time).mT
    return numerics.safe_div(
        (x_norm - y_norm.mT) * (x_norm / x_time / y_time.mT + (y_norm / y_time).mT / x_time),
        x_slope + y_slope,
    )


def _weighted_gap(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """``sum_j w_ij (x_i / x_t_i - y_j / y_t_j)``: for w = u y_t the gradient of ``sum_j u_ij cosh d(x_i, y_j)`` in x.

    Away from the origin the radial component is summed by itself, from ``sinh(a - b) + cosh(a) |y| (1 - cos)``, and the
    rest projected off the ray, since their difference is too small to survive the subtraction.
    """
    (x_norm, x_time), (y_norm, y_time) = polar(x), polar(y)
    klein = y / y_time
    pull = weights @ klein
    plain = weights.sum(-1, keepdim=True) * (x / x_time) - pull
    direction = numerics.unit_vector(x, x_norm)
    chord = _chord(direction, numerics.unit_vector(y, y_norm))
    held = y_norm.clamp(min=1)
    far = _sinh_difference(x_norm, x_time, held, _time(held)) / x_time / y_time.mT
    far = far + (held / y_time).mT * chord.square() / 2
    radial = torch.where(y_norm.mT <= 1, x_norm / x_time - direction @ klein.mT, far)
    across = pull
    for _ in range(2):  # once leaves a rounding of pull along the ray, where the metric stretches it by the time of x
        across = across - direction * (direction * across).sum(-1, keepdim=True)
    split = direction * (weights * radial).sum(-1, keepdim=True) - across
    return torch.where(x_norm > 1, split, plain)


def _time(length: Tensor) -> Tensor:
    """Time coordinate, in unit coordinates, of a point whose space part has this length."""
    return numerics.hypot(length, torch.ones_like(length))


def polar(x: Tensor) -> tuple[Tensor, Tensor]:
    """Length of the space part, and time, in unit coordinates."""
    length = numerics.norm(x, keepdim=True)
    return length, _time(length)


def _chord(x: Tensor, y: Tensor) -> Tensor:
    if _autograd.forward_mode():  # in which torch's function has no second derivative
        return numerics.norm(x.unsqueeze(-2) - y.unsqueeze(-3))
    # By differences: the product form loses every chord below 1e-8.
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
