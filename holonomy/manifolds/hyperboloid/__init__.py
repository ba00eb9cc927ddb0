r"""The hyperboloid as pure functions of tensors and curvature.

A point of curvature :math:`\kappa < 0` is :math:`x = (x_t, x_s)`, time first, with
:math:`\langle x, x\rangle = -x_t^2 + |x_s|^2 = 1/\kappa` and :math:`x_t > 0` (Hypformer eq. 1).

**A point is its space part.** Every function reads ``x[..., 1:]`` only and makes time anew, so that a rounded time
coordinate can spoil nothing; likewise a tangent vector ``u`` at ``x`` is its space part, with
:math:`u_t = x_s \cdot u_s / x_t`. Gradients with respect to the time coordinate are zero and those with respect to the
space part are total derivatives.

**Unit coordinates.** Multiplying by :math:`\sqrt{-\kappa}` turns every statement into one about :math:`\kappa = -1`;
each function scales, computes there in float64, scales back and returns the caller's dtype.

**Nothing cancels.** Distance, logarithm, exponential and transport, with their derivatives in points and curvature, are
:mod:`holonomy.manifolds.hyperboloid.geodesics`; float32 points take :mod:`holonomy.manifolds.hyperboloid.rowwise` where
that is as right and far shorter. With float32 input, float64 inside, results are right to float32 rounding for points
up to rapidity :math:`\sqrt{-\kappa}\, d = 86` from the origin, where float32 ends; beyond, they saturate and stay
finite. So are gradients, but for those of :func:`expmap`, right up to 44: beyond they are finite.

**Second derivatives** of points, time coordinates and midpoints are right everywhere. Those of the other maps are
computed a hundred-millionth of a curvature radius away where a direction has none: at the origin, between equal points,
of a tangent vector of length zero. A distance has none between equal points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd, _parts, checks, numerics
from holonomy._parts import Group
from holonomy._shapes import Ambient, Float
from holonomy.manifolds.hyperboloid import frames, geodesics, means
from holonomy.manifolds.hyperboloid.midpoints import midpoint, midpoint_of_sum
from holonomy.manifolds.hyperboloid.pairwise_distances import pairwise_distance, use_products
from holonomy.manifolds.hyperboloid.rays import polar
from holonomy.manifolds.hyperboloid.rowwise import RowwiseOp, use_rowwise
from holonomy.manifolds.hyperboloid.rowwise_maps import (
    reach_of,
    rowwise_distance,
    rowwise_exponential,
    rowwise_exponential0,
    rowwise_logarithm,
    rowwise_logarithm0,
)
from holonomy.manifolds.hyperboloid.rowwise_transport import rowwise_transport


def space(x: Ambient) -> Float[Tensor, "... dim"]:
    """Space part ``(..., d)`` of ambient points or vectors ``(..., d+1)``."""
    return x[..., 1:]


def time(space: Float[Tensor, "... dim"], kappa: Float[Tensor, "..."]) -> Float[Tensor, "... 1"]:
    r"""Time coordinate :math:`\sqrt{|x_s|^2 - 1/\kappa}` of points given by their space part."""
    radius = numerics.sums_saturate(kappa.reshape(()).to(space.dtype)).neg().rsqrt()
    # Dynamo takes no autograd Function in a transformation.
    if torch.compiler.is_compiling() and _autograd.transformed():
        return _radial_time(space, radius)
    return _time(space, radius)


def lift(space: Float[Tensor, "... dim"], kappa: Float[Tensor, "..."]) -> Ambient:
    """The point of the hyperboloid above each space part: the inverse of :func:`space`."""
    return torch.cat([time(space, kappa), space], dim=-1)


# Coordinates that only a weight of 1e30 can bring out of float32's range.
_LONG = 2.0**24


def held(x: Ambient, share: float = 2.0**-12, weight: Float[Tensor, "out ambient"] | None = None) -> Ambient:
    """Points drawn back along their rays, by a constant factor, to a share of the largest number."""
    # For what is about to be multiplied with weights or gradients. It reads the time coordinate, and where it may, the
    # length of a ``weight``: terms of opposite signs that overflow would have no sum.
    time, limit = x[..., :1].detach(), torch.finfo(x.dtype).max * share
    if x.dtype == torch.float16:
        # Tokens lie at a share of its largest number. They are held where a product with the weight would leave it.
        reach = 1.0 if weight is None else torch.linalg.matrix_norm(weight.detach().float(), math.inf).clamp(min=1.0)
        limit = torch.finfo(x.dtype).max / 8 / reach
        return x * torch.where(time > limit, limit / time, 1.0).to(x.dtype)
    if checks.costs_nothing_to_read(x):
        farthest = float(time.max()) if time.numel() else 0.0
        if weight is not None and not farthest <= _LONG:  # nan, too, beside which others may be far
            reach = float(torch.linalg.matrix_norm(weight.detach().to(torch.float64), math.inf))
            limit = min(limit, torch.finfo(x.dtype).max / 8 / max(reach, 1.0))
        if farthest <= limit:
            return x
    return x * torch.where(time > limit, limit / time, 1.0)


def dist(x: Ambient, y: Ambient, kappa: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Geodesic distance :math:`\operatorname{arcosh}(\kappa\langle x, y\rangle)/\sqrt{-\kappa}` (Hypformer eq. 1)."""
    # Zero, with zero gradients (a subgradient), where the points coincide. Float64 points more than 709 curvature radii
    # apart saturate there.
    return _by_rows(rowwise_distance, kappa, x, y)


def dist0(x: Ambient, kappa: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Distance :math:`\operatorname{arsinh}(\sqrt{-\kappa}\,|x_s|)/\sqrt{-\kappa}` from the origin."""
    # Zero, with zero gradient (a subgradient), at the origin.
    return _narrow(geodesics.distance0(_wide(x), _scale(kappa)), x)


def tangent(x: Ambient, vector: Float[Tensor, "... dim"], kappa: Float[Tensor, "..."]) -> Ambient:
    r"""The tangent vector at ``x`` with the given space part: :math:`u_t = x_s \cdot u_s / x_t`."""
    return _narrow(_tangent(numerics.finite(_wide(x) * _scale(kappa)), numerics.widen(vector)), x, vector)


def expmap(x: Ambient, u: Ambient, kappa: Float[Tensor, "..."]) -> Ambient:
    r"""Exponential map (Hypformer eq. 22).

    .. math:: \exp_x(u) = \cosh(\ell)\, x + \sinh(\ell)\, u/\ell, \quad \ell = \sqrt{-\kappa}\,|u|

    No length is cut off; a point beyond what the dtype can hold saturates along its ray and stays finite. Float32
    gradients keep their digits up to rapidity 44 from the origin; beyond they are finite.
    """
    scale = _scale(kappa)
    if use_rowwise(x, u):
        return lift(rowwise_exponential(space(x), space(u), scale), kappa)
    return _point(geodesics.expmap_exact(_wide(x), _wide(u), scale, reach_of(_dtype(x, u))), scale, x, u)


def logmap(x: Ambient, y: Ambient, kappa: Float[Tensor, "..."]) -> Ambient:
    """Logarithm: the tangent vector at ``x`` whose geodesic reaches ``y`` at time one; it inverts :func:`expmap`."""
    return _by_rows(rowwise_logarithm, kappa, x, y)


def expmap0(u: Ambient, kappa: Float[Tensor, "..."]) -> Ambient:
    r"""Exponential map at the origin.

    The space part is :math:`\sinh(\ell)\,u_s/\ell` with :math:`\ell = \sqrt{-\kappa}|u_s|`.
    """
    scale = _scale(kappa)
    if use_rowwise(u):
        return lift(rowwise_exponential0(space(u), scale), kappa)
    tangent = space(u)
    # A row beyond the range is held as a whole, its gradient across the ray with it: that would be its length again.
    reach = numerics.norm(tangent.detach(), keepdim=True) * scale.detach()
    tangent = torch.where(reach > numerics.widest_rapidity(u.dtype), tangent.detach(), tangent)
    return _point(saturating(geodesics.expmap0_exact, kappa, tangent), scale, u)


def geodesic(x: Ambient, u: Ambient, t: Float[Tensor, "..."], kappa: Float[Tensor, "..."]) -> Ambient:
    """The exponential map of ``t * u``; that product may saturate."""
    longer = numerics.bounded(torch.mul, numerics.widen(t), numerics.widen(u))
    return expmap(x, _narrow(longer, t, u), kappa)


def logmap0(x: Ambient, kappa: Float[Tensor, "..."]) -> Ambient:
    """Logarithm at the origin: the inverse of :func:`expmap0`."""
    return functional.pad(_by_rows(rowwise_logarithm0, kappa, x), (1, 0))


def logmap_frame(x: Ambient, y: Ambient, kappa: Float[Tensor, "..."]) -> Float[Tensor, "... dim"]:
    """The logarithm carried to the origin: components in the frame there, which are no longer than the distance."""
    return _narrow(frames.frame_logarithm(_wide(x), _wide(y), _scale(kappa)), x, y)


def expmap_frame(x: Ambient, v: Float[Tensor, "... dim"], kappa: Float[Tensor, "..."]) -> Ambient:
    """The exponential at ``x`` of what is ``v`` at the origin: the inverse of :func:`logmap_frame`."""
    scale, reach = _scale(kappa), reach_of(_dtype(x, v))
    return _point(frames.frame_exponential(_wide(x), numerics.widen(v), scale, reach), scale, x, v)


def ray_angle(x: Ambient, y: Ambient, kappa: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""The angle :math:`\pi - \angle(o, x, y)` at ``x`` between its ray, outwards, and the geodesic to ``y``."""
    # A right angle at the origin, where there is no ray, and zero where the points coincide, with zero gradients there
    # and where all three points lie on one line (subgradients).
    return _narrow(frames.ray_angle(_wide(x), _wide(y), _scale(kappa)).squeeze(-1), x, y)


def transp(x: Ambient, y: Ambient, v: Ambient, kappa: Float[Tensor, "..."]) -> Ambient:
    r"""Parallel transport of ``v`` along the geodesic from ``x`` to ``y``.

    In closed form :math:`v + \frac{-\kappa\langle y, v\rangle}{1 + \kappa\langle x, y\rangle}(x + y)`. Its terms cancel
    when x is much farther out than the result is long; there ``v`` is carried to the origin's frame instead, turned by
    the area of the triangle (origin, x, y), and carried to ``y``. Of the two the one with the smaller terms is taken.
    """
    return _by_rows(rowwise_transport, kappa, x, y, v)


def transp0(y: Ambient, v: Ambient, kappa: Float[Tensor, "..."]) -> Ambient:
    """Parallel transport of ``v`` from the origin to ``y``."""
    return _narrow(saturating(_from_origin, kappa, space(y), space(v)), y, v)


def transp0back(x: Ambient, v: Ambient, kappa: Float[Tensor, "..."]) -> Ambient:
    """Parallel transport of ``v`` from ``x`` to the origin: the inverse of :func:`transp0`."""
    space = _narrow(geodesics.transport_to_origin(_wide(x), _wide(v), _scale(kappa)), x, v)
    return functional.pad(space, (1, 0))


def inner(x: Ambient, u: Ambient, v: Ambient, kappa: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Inner product :math:`\langle u, v\rangle` of tangent vectors, from their components in the frame at ``x``."""
    return _narrow(geodesics.inner(_wide(x), _wide(u), _wide(v), _scale(kappa)), x, u, v)


def minkowski_norm(u: Ambient) -> Float[Tensor, "..."]:
    r"""Length :math:`\sqrt{\max(0, |u_s|^2 - u_t^2)}` of ambient vectors whose point of tangency is not known."""
    return _narrow(numerics.bounded(_length, numerics.widen(u)), u)


def proju(x: Ambient, u: Ambient, kappa: Float[Tensor, "..."]) -> Ambient:
    r"""Orthogonal projection :math:`u - \kappa\langle x, u\rangle x` of ambient vectors onto the tangent space."""
    # Unlike the functions above it reads the time coordinate of ``u``, which need not be tangent.
    return egrad2rgrad(x, torch.cat([-u[..., :1], space(u)], -1), kappa)


def egrad2rgrad(x: Ambient, gradient: Ambient, kappa: Float[Tensor, "..."]) -> Ambient:
    r"""Riemannian gradient from the ambient Euclidean one.

    Its space part is :math:`g - \kappa (x_s \cdot g)\, x_s` with the total derivative :math:`g = g_s + g_t x_s / x_t`.
    """
    return _narrow(saturating(_riemannian, kappa, space(x), gradient), x, gradient)


def rescale(x: Ambient, kappa: Float[Tensor, "..."], to: Float[Tensor, "..."]) -> Ambient:
    r"""The point :math:`\sqrt{\kappa/\kappa'}\, x` of another curvature (Hypformer Prop. 4.2)."""
    # All distances scale by that factor.
    scale_to = _scale(to)
    ratio = numerics.shared(_scale(kappa) / scale_to, (*x.shape[:-1], 1))
    return _point(numerics.bounded(torch.mul, _wide(x), ratio), scale_to, x)


def cdist(
    x: Float[Tensor, "... n ambient"], y: Float[Tensor, "... m ambient"], kappa: Float[Tensor, "..."]
) -> Float[Tensor, "... n m"]:
    r"""All geodesic distances between two sets of points, without any ``(n, m, d)`` object.

    From the law of cosines in half angles, whose terms are all positive: with radii a, b and the angle :math:`\theta`
    between the rays, :math:`\sinh^2(d/2) = \sinh^2((a-b)/2) + \sinh a \sinh b \sin^2(\theta/2)`, the angle from the
    chord of the unit vectors. Large sets of float32 points go through matrix products; see
    :mod:`holonomy.manifolds.hyperboloid.pairwise_distances`. In transformations of ``torch.func`` it is :func:`dist` of
    all pairs, and slow. Gradients are zero (a subgradient) for coincident pairs.
    """
    distances = pairwise_distance(_wide(x), _wide(y), _scale(kappa), products=use_products(x, y))
    # Distances by products are in the range of float32: to hold them there would cost a pass each way.
    return distances if distances.dtype == torch.float32 == _dtype(x, y) else _narrow(distances, x, y)


def centroid(
    x: Float[Tensor, "... n ambient"], weights: Float[Tensor, "... m n"], kappa: Float[Tensor, "..."]
) -> Float[Tensor, "... m ambient"]:
    r"""Lorentzian midpoints of weighted points (Hypformer eq. 4).

    .. math:: s_i \Big/ \sqrt{-\kappa\,|\langle s_i, s_i\rangle|}, \quad s_i = \sum_j w_{ij} x_j

    The norm of the sum is its time minus the length of its space part, written as a sum of positive terms; see
    :mod:`holonomy.manifolds.hyperboloid.midpoints`. Where float32 points lie far out on nearly one ray, that of the
    heaviest, midpoints and gradients keep their digits up to rapidity 86, on other rays up to 36 and 15.
    """
    scale = _scale(kappa)
    return _point(midpoint(_wide(x), numerics.widen(weights), scale), scale, x, weights)


def centroid_of_parts(
    x: Float[Tensor, "... n ambient"], weights: Float[Tensor, "... m n"], kappa: Float[Tensor, "..."], group: Group
) -> Float[Tensor, "... m ambient"]:
    """:func:`centroid` of the points of all parts, by the sums of their weights and weighted points in float64."""
    wide, mass = lift(_wide(x), kappa), numerics.widen(weights)
    largest = numerics.positive(functional.pad(mass.detach(), (0, 1)).amax(-1, keepdim=True))
    mass = mass / largest
    sums = torch.cat([mass @ wide, mass.sum(-1, keepdim=True)], -1)
    total, mass = _parts.scaled_total(sums, largest.log(), group)[0].tensor_split([-1], -1)
    space = midpoint_of_sum(total, mass, kappa, torch.finfo(total.dtype).eps)
    return lift(numerics.narrow(space, _dtype(x, weights)), kappa)


def frechet_mean(
    x: Float[Tensor, "... n ambient"], weights: Float[Tensor, "... n"], kappa: Float[Tensor, "..."]
) -> Ambient:
    """Points with the least weighted sum of squared distances, differentiated by the implicit function theorem."""
    scale = _scale(kappa)
    return _point(means.frechet_mean(_wide(x), numerics.widen(weights), scale), scale, x, weights)


def saturating(
    function: Callable[..., Tensor], kappa: Float[Tensor, "..."], *tensors: Float[Tensor, "... _"]
) -> Float[Tensor, "..."]:
    r"""A function of vectors and :math:`\sqrt{-\kappa}`, by :func:`holonomy.numerics.bounded` where it may overflow."""
    scale, wide = _scale(kappa), [numerics.widen(x) for x in tensors]
    if _dtype(*tensors) != torch.float64:
        return function(*wide, scale)
    leading = torch.broadcast_shapes(*(x.shape[:-1] for x in wide))
    return numerics.bounded(function, *wide, numerics.shared(scale, (*leading, 1)))


class _Time(torch.autograd.Function):
    """The time coordinate with its gradient in closed form, whose derivative is right at the origin too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(space: Tensor, radius: Tensor) -> Tensor:
        if checks.costs_nothing_to_read(space):
            length = torch.linalg.vector_norm(space, dim=-1, keepdim=True)
            # Squares that underflow are nothing beside the radius; those that overflow need numerics.norm.
            if bool((length < math.inf).all()):
                return numerics.hypot(length, radius)
        return _radial_time(space, radius)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        space, radius, time = ctx.saved_tensors
        (grad,) = grad_outputs
        on_radius = numerics.total(grad * (radius / time)) if ctx.needs_input_grad[1] else None
        return space * time.reciprocal() * grad, on_radius

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        space, radius, time = ctx.saved_tensors
        along, wider = tangents
        rate = torch.zeros_like(time)
        if along is not None:
            rate = rate + (space * time.reciprocal() * along).sum(-1, keepdim=True)
        return rate if wider is None else rate + radius / time * wider


_time = _autograd.traceable(_Time)


def _radial_time(space: Tensor, radius: Tensor) -> Tensor:
    return numerics.hypot(numerics.norm(space, keepdim=True), radius)


def _by_rows(operation: RowwiseOp, kappa: Float[Tensor, "..."], *tables: Ambient) -> Tensor:
    """An operation row by row where that is as right, and by geodesics elsewhere."""
    if use_rowwise(*tables):
        return operation(*map(space, tables), _scale(kappa))
    return _narrow(operation.exact(*map(_wide, tables), _scale(kappa)), *tables)


# Functions of float64 space parts and sqrt(-kappa).


def _length(u: Tensor) -> Tensor:
    length, time = numerics.norm(space(u)), u[..., 0].abs()
    spacelike = length > time
    product = torch.where(spacelike, length - time, 1.0).sqrt() * torch.where(spacelike, length + time, 1.0).sqrt()
    return torch.where(spacelike, product, 0.0)


def _tangent(x: Tensor, vector: Tensor) -> Tensor:
    return torch.cat([numerics.dot(x / polar(x)[1], vector), vector], -1)


def _from_origin(y: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    y = numerics.finite(y * scale)
    longer = numerics.finite(y * numerics.dot(y / (1 + polar(y)[1]), v))
    return _tangent(y, numerics.finite(v + longer))


def _riemannian(x: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
    x = numerics.finite(x * scale)
    chart = numerics.finite(space(gradient) + gradient[..., :1] * (x / polar(x)[1]))
    return _tangent(x, numerics.finite(chart + numerics.finite(x * numerics.dot(x, chart))))


def _scale(kappa: Float[Tensor, "..."]) -> Tensor:
    """sqrt(-kappa) in float64, without axes: it broadcasts against single points and may stay on another device."""
    return numerics.widen(kappa.reshape(())).neg().sqrt()


def _wide(x: Ambient) -> Float[Tensor, "... dim"]:
    """The space part in float64."""
    return numerics.widen(space(x))


def _dtype(*tensors: Tensor) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _narrow(result: Tensor, *inputs: Tensor) -> Tensor:
    return numerics.narrow(result, _dtype(*inputs))


def _point(wide: Float[Tensor, "... dim"], scale: Tensor, *inputs: Tensor) -> Ambient:
    """The ambient point of curvature ``-scale**2`` with a float64 space part, in the callers' dtype."""
    dtype = _dtype(*inputs)
    # Time belongs to the space part that is handed back, so it is made after rounding.
    rounded = numerics.narrow(numerics.shrink(wide, dtype), dtype)
    return torch.cat([numerics.narrow(time(numerics.widen(rounded), -scale.square()), dtype), rounded], -1)
