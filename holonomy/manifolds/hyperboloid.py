r"""The hyperboloid as pure functions of tensors and curvature.

A point of curvature :math:`\kappa < 0` is :math:`x = (x_t, x_s)`, time first, with
:math:`\langle x, x\rangle = -x_t^2 + |x_s|^2 = 1/\kappa` and :math:`x_t > 0` (Hypformer eq. 1).

**A point is its space part.** Every function reads ``x[..., 1:]`` only and makes time anew, so that a rounded time
coordinate can spoil nothing; likewise a tangent vector ``u`` at ``x`` is its space part, with
:math:`u_t = x_s \cdot u_s / x_t`. Gradients with respect to the time coordinate are zero and those with respect to the
space part are total derivatives.

**Unit coordinates.** Multiplying by :math:`\sqrt{-\kappa}` turns every statement into one about :math:`\kappa = -1`;
each function scales, computes there in float64, scales back and returns the caller's dtype.

**One primitive.** :func:`translate` moves ``x`` to the origin by a Lorentz boost and returns where ``y`` lands, by
formulas whose terms do not cancel: distances, logarithms, exponentials and transports are read off there. With float32
input, float64 inside, the results are right to float32 rounding for points up to rapidity
:math:`\sqrt{-\kappa}\, d = 86` from the origin, where float32 ends; beyond, results saturate and stay finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holonomy import numerics

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "cdist",
    "centroid",
    "dist",
    "dist0",
    "egrad2rgrad",
    "expmap",
    "expmap0",
    "inner",
    "lift",
    "logmap",
    "logmap0",
    "minkowski_norm",
    "proju",
    "rescale",
    "space",
    "tangent",
    "time",
    "translate",
    "transp",
    "transp0",
    "transp0back",
]


def space(x: Float[Tensor, "... ambient"]) -> Float[Tensor, "... dim"]:
    """Space part ``(..., d)`` of ambient points or vectors ``(..., d+1)``.

    Args:
        x: ambient tensors, time first.

    Returns:
        A view of ``x`` without its time coordinate.

    >>> space(torch.tensor([3.0, 1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    return x[..., 1:]


def time(space: Float[Tensor, "... dim"], kappa: Float[Tensor, "..."]) -> Float[Tensor, "... 1"]:
    r"""Time coordinate :math:`\sqrt{|x_s|^2 - 1/\kappa}` of points given by their space part.

    Args:
        space: space parts ``(..., d)``.
        kappa: curvature, one negative number.

    Returns:
        Times ``(..., 1)`` in the dtype of ``space``.

    >>> time(torch.tensor([3.0, 0.0]), torch.tensor([-0.0625])).item()
    5.0
    """
    radius = _scalar(kappa, space.dtype).neg().rsqrt()
    return numerics.hypot(numerics.norm(space, keepdim=True), radius)


def lift(space: Float[Tensor, "... dim"], kappa: Float[Tensor, "..."]) -> Float[Tensor, "... ambient"]:
    """The point of the hyperboloid above each space part: the inverse of :func:`space`.

    Args:
        space: space parts ``(..., d)``.
        kappa: curvature, one negative number.

    Returns:
        Ambient points ``(..., d+1)``.

    >>> lift(torch.tensor([0.0, 0.0]), torch.tensor([-4.0])).tolist()
    [0.5, 0.0, 0.0]
    """
    return torch.cat([time(space, kappa), space], dim=-1)


def translate(x: Float[Tensor, "... dim"], y: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
    r"""Where ``y`` lands when the boost along ``x`` takes ``x`` to the origin (unit coordinates, space parts, float64).

    With :math:`a = \operatorname{arsinh}|x|`, :math:`y = y_\parallel \hat x + y_\perp` the result is
    :math:`(\cosh a\, y_\parallel - \sinh a\, y_t)\,\hat x + y_\perp`, so that its norm is the hyperbolic sine of the
    distance. ``translate(-x, w)`` is the inverse. Three ways to write it, each where it loses no digits:

    * both near the origin: every term is proportional to ``y - x``;
    * ``x`` near, ``y`` not: as it stands, with :math:`(\cosh a - 1)\hat x \hat x^T = x x^T/(1 + x_t)`;
    * ``x`` away from it: the radial part as the quotient
      :math:`(y_\parallel^2 - x^2 - x^2 |y_\perp|^2)/(x_t y_\parallel + |x| y_t)` when :math:`y_\parallel > 0`, with
      :math:`y_\parallel - |x|` and :math:`y_\perp` taken from ``y - x`` or from ``y``, whichever is shorter.

    Args:
        x: space parts ``(..., d)``.
        y: space parts ``(..., d)``.

    Returns:
        Space parts ``(..., d)``; zero, with the right gradient, where ``x`` and ``y`` coincide.

    >>> one = torch.ones(2, dtype=torch.float64)
    >>> translate(one, one).tolist()
    [0.0, 0.0]
    """
    radial, across, direction = _seen_from(x, y)
    return across + direction * radial


def _seen_from(x: Float[Tensor, "... dim"], y: Float[Tensor, "... dim"]) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`translate` in two parts, ``radial (..., 1) * direction + across``: far out their sum loses digits.

    ``direction`` is the unit vector of x where x is away from the origin; elsewhere it and ``radial`` are zero.
    """
    x, y = torch.broadcast_tensors(x, y)
    x_norm, y_norm = numerics.norm(x, keepdim=True), numerics.norm(y, keepdim=True)
    far = x_norm > 1
    inside, inside_norm = torch.where(far, 0.0, x), torch.where(far, 0.0, x_norm)
    near = _translate_near(inside, y, inside_norm, y_norm)
    direction = _direction(x, x_norm, far)
    radial, across = _translate_far(direction, y, torch.where(far, x_norm, 1.0), y_norm)
    return (
        torch.where(far, radial, 0.0),
        torch.where(far, across, near),
        torch.where(far, direction, 0.0),
    )


def _direction(x: Tensor, x_norm: Tensor, far: Tensor) -> Tensor:
    # Where x is near the origin: some constant of length one, which is never used.
    return torch.where(far, x, x.shape[-1] ** -0.5) / torch.where(far, x_norm, 1.0)


def _translate_near(x: Tensor, y: Tensor, x_norm: Tensor, y_norm: Tensor) -> Tensor:
    x_time, y_time = _time(x_norm), _time(y_norm)
    both = y_norm <= 2
    close, close_time = torch.where(both, y, x), torch.where(both, y_time, x_time)
    gap = x - close
    longer = (gap * ((x + close) / (x_time + close_time))).sum(-1, keepdim=True)  # x_time - close_time
    shift = (gap * close).sum(-1, keepdim=True) - (close_time - 1) * longer
    by_difference = x * (shift / (1 + x_time)) - gap
    plain = y + x * ((x * y).sum(-1, keepdim=True) / (1 + x_time) - y_time)
    return torch.where(both, by_difference, plain)


def _translate_far(direction: Tensor, y: Tensor, x_norm: Tensor, y_norm: Tensor) -> tuple[Tensor, Tensor]:
    x_time, y_time = _time(x_norm), _time(y_norm)
    gap = y - direction * x_norm
    close = numerics.norm(gap, keepdim=True) <= y_norm
    shorter = torch.where(close, gap, y)
    along = (direction * shorter).sum(-1, keepdim=True)
    across = shorter - direction * along
    radial = torch.where(close, x_norm + along, along)
    radial_gap = torch.where(close, along, along - x_norm)
    width = numerics.norm(across, keepdim=True)

    # Divided by |x| y_time throughout: no product of two large numbers is formed that is not itself the answer.
    ahead = radial > 0
    forward = torch.where(ahead, radial, 0.0)
    numerator = (radial_gap / y_time) * (1 + forward / x_norm) - x_norm * width * (width / y_time)
    denominator = (x_time / x_norm) * (forward / y_time) + 1
    behind = x_time * torch.where(ahead, 0.0, radial) - x_norm * y_time
    return torch.where(ahead, numerics.finite(numerator) / denominator, numerics.finite(behind)), across


def dist(
    x: Float[Tensor, "... ambient"], y: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    r"""Geodesic distance :math:`\operatorname{arcosh}(\kappa\langle x, y\rangle)/\sqrt{-\kappa}` (Hypformer eq. 1).

    Zero, with zero gradients (a subgradient), where the points coincide. Float64 points more than 709 curvature radii
    apart saturate there.

    Args:
        x: points ``(..., d+1)``.
        y: points ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Distances ``(...)``.

    >>> kappa = torch.tensor([-1.0])
    >>> round(
    ...     dist(lift(torch.tensor([0.0]), kappa), lift(torch.tensor([1.1752012]), kappa), kappa).item(),
    ...     5,
    ... )
    1.0
    """
    scale, xs, ys = _unit(kappa, x, y)
    return _narrow(torch.asinh(numerics.norm(translate(xs, ys))) / scale, x, y)


def dist0(x: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Distance :math:`\operatorname{arsinh}(\sqrt{-\kappa}\,|x_s|)/\sqrt{-\kappa}` from the origin.

    Zero, with zero gradient (a subgradient), at the origin.

    Args:
        x: points ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Distances ``(...)``.

    >>> dist0(torch.tensor([1.0, 0.0]), torch.tensor([-1.0])).item()
    0.0
    """
    scale, xs = _unit(kappa, x)
    return _narrow(torch.asinh(numerics.norm(xs)) / scale, x)


def tangent(
    x: Float[Tensor, "... ambient"], vector: Float[Tensor, "... dim"], kappa: Float[Tensor, "..."]
) -> Float[Tensor, "... ambient"]:
    r"""The tangent vector at ``x`` with the given space part: :math:`u_t = x_s \cdot u_s / x_t`.

    Args:
        x: points ``(..., d+1)``.
        vector: space parts ``(..., d)`` of tangent vectors.
        kappa: curvature, one negative number.

    Returns:
        Ambient tangent vectors ``(..., d+1)``.

    >>> tangent(torch.tensor([1.0, 0.0]), torch.tensor([2.0]), torch.tensor([-1.0])).tolist()
    [0.0, 2.0]
    """
    scale, xs = _unit(kappa, x)
    del scale
    wide = numerics.widen(vector)
    return _narrow(_tangent(xs, wide), x, vector)


def expmap(
    x: Float[Tensor, "... ambient"], u: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."]
) -> Float[Tensor, "... ambient"]:
    r"""Exponential map (Hypformer eq. 22).

    .. math:: \exp_x(u) = \cosh(\ell)\, x + \sinh(\ell)\, u/\ell, \quad \ell = \sqrt{-\kappa}\,|u|

    No length is cut off; a point beyond what the dtype can hold saturates along its ray and stays finite.

    Args:
        x: points ``(..., d+1)``.
        u: tangent vectors at ``x``, ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Float[Tensor, "... ambient"] ``(..., d+1)``.

    >>> kappa = torch.tensor([-1.0])
    >>> x = lift(torch.tensor([0.3, -0.2]), kappa)
    >>> bool(torch.allclose(expmap(x, torch.zeros(3), kappa), x))
    True
    """
    scale, xs, us = _unit(kappa, x, u)
    radial, across, direction = _to_frame(xs, us)
    step = across + direction * radial
    there = step * numerics.sinhc(numerics.norm(step, keepdim=True))
    return _point(translate(-xs, there), scale, x, u)


def logmap(
    x: Float[Tensor, "... ambient"], y: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."]
) -> Float[Tensor, "... ambient"]:
    """Logarithm: the tangent vector at ``x`` whose geodesic reaches ``y`` at time one; the inverse of :func:`expmap`.

    Args:
        x: points ``(..., d+1)``.
        y: points ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Tangent vectors at ``x``, ``(..., d+1)``; zero where the points coincide.

    >>> kappa = torch.tensor([-1.0])
    >>> logmap(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), kappa).tolist()
    [0.0, 0.0]
    """
    scale, xs, ys = _unit(kappa, x, y)
    radial, across, direction = _seen_from(xs, ys)
    stretch = numerics.asinhc(numerics.norm(across + direction * radial, keepdim=True))
    vector = _from_frame(xs, across * stretch) + direction * (radial * stretch * _time(_length(xs)))
    return _narrow(_tangent(xs, vector) / scale, x, y)


def expmap0(u: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."]) -> Float[Tensor, "... ambient"]:
    r"""Exponential map at the origin.

    The space part is :math:`\sinh(\ell)\,u_s/\ell` with :math:`\ell = \sqrt{-\kappa}|u_s|`.

    Args:
        u: tangent vectors at the origin, ``(..., d+1)``; their time coordinate is zero and is not read.
        kappa: curvature, one negative number.

    Returns:
        Float[Tensor, "... ambient"] ``(..., d+1)``; saturated, and finite, where the dtype cannot hold them.

    >>> expmap0(torch.tensor([0.0, 0.0]), torch.tensor([-1.0])).tolist()
    [1.0, 0.0]
    """
    scale, us = _unit(kappa, u)
    return _point(us * numerics.sinhc(numerics.norm(us, keepdim=True)), scale, u)


def logmap0(x: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."]) -> Float[Tensor, "... ambient"]:
    """Logarithm at the origin: the inverse of :func:`expmap0`.

    Args:
        x: points ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Tangent vectors at the origin, ``(..., d+1)``, time zero.

    >>> logmap0(torch.tensor([1.0, 0.0]), torch.tensor([-1.0])).tolist()
    [0.0, 0.0]
    """
    scale, xs = _unit(kappa, x)
    frame = xs * numerics.asinhc(numerics.norm(xs, keepdim=True)) / scale
    return _narrow(torch.cat([torch.zeros_like(frame[..., :1]), frame], -1), x)


def transp(
    x: Float[Tensor, "... ambient"],
    y: Float[Tensor, "... ambient"],
    v: Float[Tensor, "... ambient"],
    kappa: Float[Tensor, "..."],
) -> Float[Tensor, "... ambient"]:
    r"""Parallel transport of ``v`` along the geodesic from ``x`` to ``y``.

    In closed form :math:`v + \frac{-\kappa\langle y, v\rangle}{1 + \kappa\langle x, y\rangle}(x + y)`. Its terms cancel
    when x is much farther out than the result is long; there ``v`` is carried to the origin's frame instead, turned by
    the area of the triangle (origin, x, y), and carried to ``y``. Of the two the one with the smaller terms is taken.

    Args:
        x: points ``(..., d+1)``.
        y: points ``(..., d+1)``.
        v: tangent vectors at ``x``, ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Tangent vectors at ``y``, ``(..., d+1)``.

    >>> kappa = torch.tensor([-1.0])
    >>> x = lift(torch.tensor([0.3, -0.2]), kappa)
    >>> v = tangent(x, torch.tensor([1.0, 2.0]), kappa)
    >>> bool(torch.allclose(transp(x, x, v, kappa), v))
    True
    """
    _, xs, ys = _unit(kappa, x, y)
    vs = numerics.widen(space(v))
    v_radial, v_across, _ = _to_frame(xs, vs)
    y_radial, y_across, direction = _seen_from(xs, ys)
    sinh = numerics.norm(y_across + direction * y_radial, keepdim=True)
    pull = ((v_across * y_across).sum(-1, keepdim=True) + v_radial * y_radial) / (1 + _time(sinh))
    frame = v_across + direction * v_radial
    closed, turned = vs + pull * (xs + ys), _from_frame(ys, _rotate(xs, ys, frame))
    closed_size = numerics.norm(vs, keepdim=True) + pull.abs() * (_length(xs) + _length(ys))
    turned_size = numerics.norm(frame, keepdim=True) * (1 + _time(_length(ys)))
    return _narrow(_tangent(ys, torch.where(closed_size <= turned_size, closed, turned)), x, y, v)


def transp0(
    y: Float[Tensor, "... ambient"], v: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."]
) -> Float[Tensor, "... ambient"]:
    """Parallel transport of ``v`` from the origin to ``y``.

    Args:
        y: points ``(..., d+1)``.
        v: tangent vectors at the origin, ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Tangent vectors at ``y``, ``(..., d+1)``.

    >>> transp0(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 3.0]), torch.tensor([-1.0])).tolist()
    [0.0, 3.0]
    """
    _, ys = _unit(kappa, y)
    return _narrow(_tangent(ys, _from_frame(ys, numerics.widen(space(v)))), y, v)


def transp0back(
    x: Float[Tensor, "... ambient"], v: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."]
) -> Float[Tensor, "... ambient"]:
    """Parallel transport of ``v`` from ``x`` to the origin: the inverse of :func:`transp0`.

    Args:
        x: points ``(..., d+1)``.
        v: tangent vectors at ``x``, ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Tangent vectors at the origin, ``(..., d+1)``.

    >>> transp0back(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 3.0]), torch.tensor([-1.0])).tolist()
    [0.0, 3.0]
    """
    _, xs = _unit(kappa, x)
    radial, across, direction = _to_frame(xs, numerics.widen(space(v)))
    frame = across + direction * radial
    return _narrow(torch.cat([torch.zeros_like(frame[..., :1]), frame], -1), x, v)


def inner(
    x: Float[Tensor, "... ambient"],
    u: Float[Tensor, "... ambient"],
    v: Float[Tensor, "... ambient"],
    kappa: Float[Tensor, "..."],
) -> Float[Tensor, "..."]:
    r"""Inner product :math:`\langle u, v\rangle` of tangent vectors, from their components in the frame at ``x``.

    Args:
        x: points ``(..., d+1)``.
        u: tangent vectors at ``x``, ``(..., d+1)``.
        v: tangent vectors at ``x``, ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Inner products ``(...)``.

    >>> inner(
    ...     torch.tensor([1.0, 0.0]),
    ...     torch.tensor([0.0, 2.0]),
    ...     torch.tensor([0.0, 3.0]),
    ...     torch.tensor([-1.0]),
    ... ).item()
    6.0
    """
    _, xs = _unit(kappa, x)
    u_radial, u_across, _ = _to_frame(xs, numerics.widen(space(u)))
    v_radial, v_across, _ = _to_frame(xs, numerics.widen(space(v)))
    return _narrow((u_across * v_across).sum(-1) + (u_radial * v_radial).squeeze(-1), x, u, v)


def minkowski_norm(u: Float[Tensor, "... ambient"]) -> Float[Tensor, "..."]:
    r"""Length :math:`\sqrt{\max(0, |u_s|^2 - u_t^2)}` of ambient vectors whose point of tangency is not known.

    Args:
        u: ambient vectors ``(..., d+1)``.

    Returns:
        Lengths ``(...)``, with zero gradient where they are zero.

    >>> minkowski_norm(torch.tensor([3.0, 5.0])).item()
    4.0
    """
    wide = numerics.widen(u)
    length, time = numerics.norm(space(wide)), wide[..., 0].abs()
    spacelike = length > time
    product = torch.where(spacelike, length - time, 1.0).sqrt() * torch.where(spacelike, length + time, 1.0).sqrt()
    return _narrow(torch.where(spacelike, product, 0.0), u)


def proju(
    x: Float[Tensor, "... ambient"], u: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."]
) -> Float[Tensor, "... ambient"]:
    r"""Orthogonal projection :math:`u - \kappa\langle x, u\rangle x` of ambient vectors onto the tangent space.

    Unlike the functions above it reads the time coordinate of ``u``, which need not be tangent.

    Args:
        x: points ``(..., d+1)``.
        u: ambient vectors ``(..., d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Tangent vectors at ``x``, ``(..., d+1)``.

    >>> proju(torch.tensor([1.0, 0.0]), torch.tensor([5.0, 3.0]), torch.tensor([-1.0])).tolist()
    [0.0, 3.0]
    """
    return egrad2rgrad(x, torch.cat([-u[..., :1], space(u)], -1), kappa)


def egrad2rgrad(
    x: Float[Tensor, "... ambient"],
    gradient: Float[Tensor, "... ambient"],
    kappa: Float[Tensor, "..."],
) -> Float[Tensor, "... ambient"]:
    r"""Riemannian gradient from the ambient Euclidean one.

    Its space part is :math:`g - \kappa (x_s \cdot g)\, x_s` with the total derivative :math:`g = g_s + g_t x_s / x_t`.

    Args:
        x: points ``(..., d+1)``.
        gradient: Euclidean gradients ``(..., d+1)``; it is not changed.
        kappa: curvature, one negative number.

    Returns:
        Tangent vectors at ``x``, ``(..., d+1)``.

    >>> egrad2rgrad(torch.tensor([1.0, 0.0]), torch.tensor([5.0, 3.0]), torch.tensor([-1.0])).tolist()
    [0.0, 3.0]
    """
    _, xs = _unit(kappa, x)
    wide = numerics.widen(gradient)
    x_time = _time(_length(xs))
    chart = space(wide) + wide[..., :1] * (xs / x_time)
    vector = chart + xs * (xs * chart).sum(-1, keepdim=True)
    return _narrow(_tangent(xs, vector), x, gradient)


def rescale(
    x: Float[Tensor, "... ambient"], kappa: Float[Tensor, "..."], to: Float[Tensor, "..."]
) -> Float[Tensor, "... ambient"]:
    r"""The point :math:`\sqrt{\kappa/\kappa'}\, x` of another curvature (Hypformer Prop. 4.2).

    All distances scale by that factor.

    Args:
        x: points ``(..., d+1)`` of curvature ``kappa``.
        kappa: their curvature.
        to: the curvature wanted.

    Returns:
        Float[Tensor, "... ambient"] ``(..., d+1)`` of curvature ``to``.

    >>> rescale(torch.tensor([1.0, 0.0]), torch.tensor([-1.0]), torch.tensor([-4.0])).tolist()
    [0.5, 0.0]
    """
    _, xs = _unit(kappa, x)
    return _point(xs, _scalar(to, torch.float64).neg().sqrt(), x)


def cdist(
    x: Float[Tensor, "... n ambient"],
    y: Float[Tensor, "... m ambient"],
    kappa: Float[Tensor, "..."],
) -> Float[Tensor, "... n m"]:
    r"""All geodesic distances between two sets of points, without any ``(n, m, d)`` object.

    From the law of cosines in half angles, whose terms are all positive: with radii a, b and the angle :math:`\theta`
    between the rays, :math:`\sinh^2(d/2) = \sinh^2((a-b)/2) + \sinh a \sinh b \sin^2(\theta/2)`, the angle from the
    chord of the unit vectors. Gradients are zero (a subgradient) for coincident pairs.

    Args:
        x: points ``(..., n, d+1)``.
        y: points ``(..., m, d+1)``.
        kappa: curvature, one negative number.

    Returns:
        Distances ``(..., n, m)``.

    >>> kappa = torch.tensor([-1.0])
    >>> cdist(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]), kappa).tolist()
    [[0.0, 0.0]]
    """
    scale, xs, ys = _unit(kappa, x, y)
    rapidity: Tensor = numerics.apply_function(_PairwiseRapidity, xs, ys)
    return _narrow(rapidity / scale, x, y)


def centroid(
    x: Float[Tensor, "... n ambient"],
    weights: Float[Tensor, "... m n"],
    kappa: Float[Tensor, "..."],
) -> Float[Tensor, "... m ambient"]:
    r"""Lorentzian midpoints of weighted points (Hypformer eq. 4).

    .. math:: s_i \Big/ \sqrt{-\kappa\,|\langle s_i, s_i\rangle|}, \quad s_i = \sum_j w_{ij} x_j

    The norm of the sum is its time minus the length of its space part, written as a sum of positive terms.

    Args:
        x: points ``(..., n, d+1)``.
        weights: nonnegative weights ``(..., m, n)``; a row of zeros gives the origin, with zero gradients.
        kappa: curvature, one negative number.

    Returns:
        Float[Tensor, "... ambient"] ``(..., m, d+1)``.

    >>> x = lift(torch.tensor([[1.0], [-1.0]]), torch.tensor([-1.0]))
    >>> centroid(x, torch.ones(1, 2), torch.tensor([-1.0])).tolist()
    [[1.0, 0.0]]
    """
    scale, xs = _unit(kappa, x)
    middle: Tensor = numerics.apply_function(_Centroid, xs, numerics.widen(weights))
    return _point(middle, scale, x, weights)


class _PairwiseRapidity(torch.autograd.Function):
    """Distances in unit coordinates between space parts ``(..., n, d)`` and ``(..., m, d)``, float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        half_sinh = _half_sinh(x, y)
        ctx.save_for_backward(x, y, half_sinh)
        return 2 * torch.asinh(half_sinh)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, y, half_sinh = ctx.saved_tensors
        weights = numerics.safe_div(grad_outputs[0], 2 * half_sinh * torch.hypot(half_sinh, torch.ones_like(half_sinh)))
        return _weighted_gap(x, y, weights), _weighted_gap(y, x, weights.mT)


class _Centroid(torch.autograd.Function):
    """Midpoints in unit coordinates, float64: space parts ``(..., n, d)``, weights ``(..., m, n)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        x_norm, x_time = _polar(x)
        total = weights @ x
        total_norm = numerics.norm(total, keepdim=True)
        chord = _chord(numerics.unit_vector(total, total_norm), numerics.unit_vector(x, x_norm))
        # time - |space| of the sum: each point contributes t - |x| cos(angle), a sum of two positive terms.
        short = (weights * ((1 / (x_time + x_norm)).mT + x_norm.mT * chord.square() / 2)).sum(-1, keepdim=True)
        length = short.sqrt() * (weights @ x_time + total_norm).sqrt()
        middle = numerics.safe_div(total, length)
        ctx.save_for_backward(x, weights, middle, length)
        return middle

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weights, middle, length = ctx.saved_tensors
        cotangent = numerics.safe_div(grad_outputs[0], length)
        radial = (cotangent * middle).sum(-1, keepdim=True)
        grad_x = weights.mT @ cotangent - _weighted_gap(x, middle, (weights * radial).mT)
        cosh = 1 + 2 * _half_sinh(middle, x).square()
        return grad_x, cotangent @ x.mT - radial * cosh


def _half_sinh(x: Tensor, y: Tensor) -> Tensor:
    """sinh(d/2) for all pairs; see :func:`cdist`."""
    (x_norm, x_time), (y_norm, y_time) = _polar(x), _polar(y)
    chord = _chord(numerics.unit_vector(x, x_norm), numerics.unit_vector(y, y_norm))
    radial = _sinh_difference(x_norm, x_time, y_norm, y_time)
    radial = radial / (2 * (1 + torch.hypot(radial, torch.ones_like(radial)))).sqrt()
    return torch.hypot(radial, x_norm.sqrt() * y_norm.mT.sqrt() * chord / 2)


def _sinh_difference(x_norm: Tensor, x_time: Tensor, y_norm: Tensor, y_time: Tensor) -> Tensor:
    """sinh(a - b) = (|x|^2 - |y|^2) / (|x| y_t + |y| x_t) for all pairs, zero where both radii are."""
    x_slope, y_slope = x_norm / x_time, (y_norm / y_time).mT
    return numerics.safe_div(
        (x_norm - y_norm.mT) * (x_norm / x_time / y_time.mT + (y_norm / y_time).mT / x_time),
        x_slope + y_slope,
    )


def _weighted_gap(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    r"""``sum_j w_ij (y_t_j / x_t_i x_i - y_j)``: the gradient of ``sum_j w_ij cosh d(x_i, y_j)`` in x.

    Away from the origin the radial component is summed by itself, from ``sinh(a - b) + cosh(a) |y| (1 - cos)``, and the
    rest projected off the ray, since their difference is too small to survive the subtraction.
    """
    (x_norm, x_time), (y_norm, y_time) = _polar(x), _polar(y)
    pull = weights @ y
    plain = (weights @ y_time) / x_time * x - pull
    direction = numerics.unit_vector(x, x_norm)
    chord = _chord(direction, numerics.unit_vector(y, y_norm))
    radial = _sinh_difference(x_norm, x_time, y_norm, y_time) / x_time + y_norm.mT * chord.square() / 2
    polar = direction * (weights * radial).sum(-1, keepdim=True) - (
        pull - direction * (direction * pull).sum(-1, keepdim=True)
    )
    return torch.where(x_norm > 1, polar, plain)


def _length(x: Tensor) -> Tensor:
    return numerics.norm(x, keepdim=True)


def _time(length: Tensor) -> Tensor:
    """Time coordinate, in unit coordinates, of a point whose space part has this length."""
    return numerics.hypot(length, torch.ones_like(length))


def _polar(x: Tensor) -> tuple[Tensor, Tensor]:
    length = _length(x)
    return length, _time(length)


def _chord(x: Tensor, y: Tensor) -> Tensor:
    # By differences: the product form loses every chord below 1e-8.
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _to_frame(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Components of a tangent vector in the frame carried from the origin, split as in :func:`_seen_from`."""
    x_norm = _length(x)
    x_time = _time(x_norm)
    far = x_norm > 1
    inside = torch.where(far, 0.0, x)
    smooth = u - inside / x_time * (inside / (1 + x_time) * u).sum(-1, keepdim=True)
    direction = _direction(x, x_norm, far)
    along = (direction * u).sum(-1, keepdim=True)
    across = torch.where(far, u - direction * along, smooth)
    return torch.where(far, along / x_time, 0.0), across, torch.where(far, direction, 0.0)


def _from_frame(x: Float[Tensor, "... dim"], frame: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
    """Inverse of :func:`_to_frame`; a sum without cancellation."""
    x_time = _time(_length(x))
    return frame + x * (x / (1 + x_time) * frame).sum(-1, keepdim=True)


def _rotate(
    x: Float[Tensor, "... dim"], y: Float[Tensor, "... dim"], frame: Float[Tensor, "... dim"]
) -> Float[Tensor, "... dim"]:
    """Turn components in the frame at x into those in the frame at y, for transport along the geodesic x -> y."""
    x_time = _time(_length(x))
    y_time = _time(_length(y))
    p, q = x / (1 + x_time), y / (1 + y_time)  # Poincare coordinates
    gap = x - y
    longer = (gap * ((x + y) / (x_time + y_time))).sum(-1, keepdim=True)  # x_time - y_time
    gap = torch.where(_length(gap) <= _length(y), (p * longer - gap) / (1 + y_time), q - p)
    opening = 1 / (1 + x_time) + 1 / (1 + y_time) + gap.square().sum(-1, keepdim=True) / 2  # 1 - p . q

    def skew(v: Tensor) -> Tensor:
        return ((v * gap).sum(-1, keepdim=True) * p - (v * p).sum(-1, keepdim=True) * gap) / opening

    once = skew(frame)
    p_norm = numerics.norm(p, keepdim=True)
    direction = numerics.unit_vector(p, p_norm)
    across = gap - direction * (direction * gap).sum(-1, keepdim=True)
    tangent_half = p_norm * numerics.norm(across, keepdim=True) / opening
    return frame + (once + skew(once)) * (2 / (1 + tangent_half.square()))


def _tangent(x: Float[Tensor, "... dim"], vector: Float[Tensor, "... dim"]) -> Float[Tensor, "... ambient"]:
    x_time = _time(_length(x))
    return torch.cat([(x / x_time * vector).sum(-1, keepdim=True), vector], -1)


def _scalar(kappa: Float[Tensor, "..."], dtype: torch.dtype) -> Tensor:
    # Without axes, so that it broadcasts against single points and may stay on another device.
    return kappa.reshape(()).to(dtype)


def _unit(kappa: Float[Tensor, "..."], *tensors: Float[Tensor, "... ambient"]) -> tuple[Tensor, ...]:
    """sqrt(-kappa) and the space parts in unit coordinates, all float64."""
    scale = _scalar(kappa, torch.float64).neg().sqrt()
    return scale, *(numerics.finite(numerics.widen(space(x)) * scale) for x in tensors)


def _dtype(*tensors: Tensor) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _narrow(result: Tensor, *inputs: Tensor) -> Tensor:
    return numerics.narrow(result, _dtype(*inputs))


def _point(unit_space: Float[Tensor, "... dim"], scale: Tensor, *inputs: Tensor) -> Float[Tensor, "... ambient"]:
    """The ambient point of curvature ``-scale**2`` above unit coordinates, in the callers' dtype."""
    dtype = _dtype(*inputs)
    wide = numerics.shrink(unit_space / scale, dtype)
    # Time belongs to the space part that is handed back, so it is made after rounding.
    rounded = numerics.narrow(wide, dtype)
    return torch.cat([numerics.narrow(time(numerics.widen(rounded), -scale.square()), dtype), rounded], -1)
