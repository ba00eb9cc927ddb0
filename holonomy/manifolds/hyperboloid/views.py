r"""Distance and direction from one point to another, in quantities that do not cancel: what geodesics are made of.

Space parts ``(..., d)`` are float64 and ``scale`` is :math:`s = \sqrt{-\kappa}`; capital letters are unit coordinates
:math:`X = s x`. Directions have a part *along* the ray of X and a part *across* it, in the frame transported from
the origin; :mod:`holonomy.manifolds.hyperboloid.geodesics` says how derivatives are made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, numerics

# Of a radius: the root of the rounding of float64.
_BESIDE = 2.0**-27


class Ray(NamedTuple):
    """A point in polar form: unit vector (zero at the origin), length and time of its unit coordinates."""

    unit: Tensor
    length: Tensor
    time: Tensor


class Parts(NamedTuple):
    """A vector in the frame transported from the origin to a point: its part across the ray and its length along it."""

    across: Tensor
    along: Tensor


class PolarView(NamedTuple):
    """Y as seen from X: its distance, and the unit direction to it as parts across and along the ray of X."""

    distance: Tensor
    across: Tensor
    along: Tensor


def keeper(*inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that sets the entries of a gradient that overflowed to zero; see the head of this file."""
    # No function inside of this one: the compiler traces it, and in the suite each would be decorated while it does.
    spoiled = torch.stack([x.isnan().any(-1, keepdim=True) for x in inputs]).any(0)
    return partial(numerics.where_finite, spoiled=spoiled)


def by_scale(rates: Tensor, power: Tensor) -> Tensor:
    """A gradient by the scale, from what the rows add to it times a power of the scale."""
    return numerics.finite(numerics.total(rates) / power)


def differentiable(
    gradients: Callable[..., tuple[Tensor, ...]],
    inputs: tuple[Tensor, ...],
    grad: Tensor,
    beside: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Gradients ``gradients(*inputs, grad)``, which are right when they are differentiated again."""
    # Rows without a direction get the derivatives at ``beside`` the inputs, a hundred-millionth of a radius away.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradients(*inputs, grad)
    moved = beside(*inputs)
    moving = gradients(*moved, grad)
    exact, near = (gradients(*(x.detach() for x in tensors), grad) for tensors in (inputs, moved))
    return tuple(x + (y - z) for x, y, z in zip(moving, exact, near, strict=True))


def closed_form(
    values: Callable[..., Tensor],
    gradients: Callable[..., tuple[Tensor, ...]],
    beside: Callable[..., tuple[Tensor, ...]],
) -> Callable[..., Tensor]:
    """A function of rows, which broadcast, and the scale, that :func:`differentiable` gives its gradients."""

    class ClosedForm(_autograd.InputsSaved):
        forward = staticmethod(values)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
            return differentiable(gradients, ctx.saved_tensors, grad_outputs[0], beside)

    function = _autograd.traceable(ClosedForm)

    def call(*inputs: Tensor) -> Tensor:
        *rows, scale = inputs
        return function(*torch.broadcast_tensors(*rows), scale)

    return call


def closed_exponential(
    values: Callable[..., Tensor],
    gradients: Callable[..., tuple[Tensor, ...]],
    beside: Callable[..., tuple[Tensor, ...]],
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """The same of points, vectors, the scale and the reach of vectors; its gradients read the result, too."""

    class Exponential(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(values)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
            *tensors, ctx.reach = inputs
            ctx.save_for_backward(*tensors, output)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
            there = partial(_with_result, values=values, beside=beside, reach=ctx.reach)
            of_reach = partial(gradients, reach=ctx.reach)
            return *differentiable(of_reach, ctx.saved_tensors, grad_outputs[0], there), None

    function = _autograd.traceable(Exponential)

    def call(x: Tensor, u: Tensor, scale: Tensor, reach: float) -> Tensor:
        return function(*torch.broadcast_tensors(x, u), scale, reach)

    return call


def _with_result(
    x: Tensor, u: Tensor, scale: Tensor, z: Tensor, *, values: Any, beside: Any, reach: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, u, scale = beside(x, u, scale)
    return x, u, scale, moved_to(z, values(x.detach(), u.detach(), scale.detach(), reach))


def moved_to(x: Tensor, value: Tensor) -> Tensor:
    """Another value with the derivatives of x, for a result that belongs to inputs that were moved."""
    return x + (value - x).detach()


def off_origin(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Points, none at the origin. The scale comes last, here and below."""
    return _moved(x, torch.zeros_like(x), torch.zeros_like(x), others[-1]), *others


def both_off_origin(x: Tensor, y: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Two sets of points, none at the origin."""
    return off_origin(x, others[-1])[0], *off_origin(y, *others)


def apart(x: Tensor, y: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Pairs of points, none at the origin and none equal."""
    x, y = off_origin(x, others[-1])[0], off_origin(y, others[-1])[0]
    return x, _moved(y, x, x, others[-1]), *others


def off_ray(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of points apart, of which none lie on one ray from the origin."""
    x, y, scale = apart(x, y, scale)
    unit, length = ray_of(x.detach(), scale).unit, numerics.norm(y, keepdim=True)
    near = numerics.norm(part_across(x, unit, y), keepdim=True) <= _BESIDE * length
    side = torch.zeros_like(x).scatter(-1, x.abs().argmin(-1, keepdim=True), 1.0)
    side = side - unit * dot(unit, side)
    return x, y + torch.where(near, 2 * _BESIDE * length * side, 0.0).detach(), scale


def with_step(x: Tensor, u: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Points off the origin and tangent vectors, none of which is zero."""
    return off_origin(x, scale)[0], _moved(u, torch.zeros_like(u), x, scale), scale


def _moved(x: Tensor, place: Tensor, along: Tensor, scale: Tensor) -> Tensor:
    """Rows no farther from a place than a step, moved by two; ``along`` makes it longer far out."""
    first = along[..., :1]
    first = torch.copysign(torch.ones_like(first), first) / scale
    step = _BESIDE * (along + torch.cat([first, torch.zeros_like(along[..., 1:])], -1))
    near = numerics.norm(x - place, keepdim=True) <= numerics.norm(step, keepdim=True)
    return x + torch.where(near, 2 * step, 0.0).detach()


def dot(x: Tensor, y: Tensor) -> Tensor:
    """The Euclidean product of the last axes, which is kept."""
    return (x * y).sum(-1, keepdim=True)


def ray_of(x: Tensor, scale: Tensor) -> Ray:
    """The polar form of points."""
    norm = numerics.norm(x, keepdim=True)
    length = numerics.finite(norm * scale)
    return Ray(numerics.safe_div(x, norm), length, numerics.hypot(length, torch.ones_like(length)))


def part_across(x: Tensor, unit: Tensor, y: Tensor) -> Tensor:
    """The part of y orthogonal to x."""
    # With x_j the largest coordinate of x, (y_i x_j - x_i y_j) / x_j is y up to a multiple of x, and the products of
    # float32 numbers are exact in float64: parallel vectors leave nothing, as they should. For no sum to leave float64,
    # x is first divided by a power of two, which is exact.
    place = x.abs().argmax(-1, keepdim=True)
    pivot = x.gather(-1, place)
    empty = pivot == 0
    x = x / numerics.power_of_two(torch.where(empty, 1.0, pivot)) * numerics.ROOM
    pivot, partner = torch.where(empty, numerics.ROOM, x.gather(-1, place)), y.gather(-1, place)
    reduced = y * pivot - x * partner
    return numerics.finite((reduced - unit * dot(unit, reduced)) / pivot)


def _gap_of(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Parts, Tensor]:
    """Sinh D over Y_t times the unit direction from X to Y, in the frame at X, and Y_t."""
    ray, other = ray_of(x, scale), ray_of(y, scale)
    # All divided by Y_t, so that no product of two large numbers is formed that is not itself the answer.
    y_norm, apart = numerics.norm(y, keepdim=True), numerics.finite(y - x)
    shorter = torch.minimum(scale / other.time, 1 / y_norm)  # not alike where Y saturates
    # The difference of near points is exact, and so is what it has across the ray.
    near = numerics.norm(apart, keepdim=True) < y_norm / 2
    across = part_across(x, ray.unit, torch.where(near, apart, y)) * shorter
    gap = numerics.finite(dot(ray.unit, apart * shorter))
    along = dot(ray.unit, y * shorter)
    width = numerics.norm(across, keepdim=True)

    forward, length = numerics.finite(along.clamp(min=0) * other.time), ray.length.clamp(min=1)
    longer = (gap * (along * other.time + ray.length) + width * (width * other.time)) / (ray.time + other.time)
    both_near = ray.time * gap - ray.length * longer
    plain = ray.time * along - ray.length
    stretch = (ray.time / length) * (forward / 2) + other.time / 2
    ahead = gap * ((0.5 + forward / length / 2) / stretch) - ray.length * width * (width * (other.time / 2 / stretch))
    far = torch.where(along > 0, ahead, plain)
    inside = torch.where(other.length <= 2, both_near, plain)
    return Parts(across, numerics.finite(torch.where(ray.length > 1, far, inside))), other.time


def polar_view(x: Tensor, y: Tensor, scale: Tensor) -> PolarView:
    """Y as seen from X."""
    gap, time = _gap_of(x, y, scale)
    size = numerics.hypot(numerics.norm(gap.across, keepdim=True), gap.along)
    distance = torch.asinh(numerics.finite(size * time))
    return PolarView(distance, numerics.safe_div(gap.across, size), numerics.safe_div(gap.along, size))


def tangent_view(x: Tensor, u: Tensor, scale: Tensor, reach: float) -> PolarView:
    """A tangent vector at X as a view: its length, and its direction in the frame."""
    ray = ray_of(x, scale)
    across, along = (numerics.finite(part * scale) for part in parts_of(x, ray, u))
    length = numerics.hypot(numerics.norm(across, keepdim=True), along)
    return PolarView(length.clamp(max=reach), numerics.safe_div(across, length), numerics.safe_div(along, length))


def one_plus_along(view: PolarView) -> Tensor:
    """1 + N_along, which inwards would cancel."""
    return view.across.square().sum(-1, keepdim=True) / (1 - view.along.clamp(max=0))


def radial_of(ray: Ray, view: PolarView, length: Tensor) -> Tensor:
    """cosh(l) X_n + sinh(l) X_t N_along: how far out a geodesic is, along the ray it started from."""
    cosh, sinh = torch.cosh(length), torch.sinh(length)
    inward = torch.sinh(torch.asinh(ray.length) - length) + sinh * (ray.time * one_plus_along(view))
    return torch.where(view.along < 0, inward, cosh * ray.length + sinh * (ray.time * view.along))


def velocity_of(ray: Ray, view: PolarView) -> Tensor:
    """sinh(l) X_n + cosh(l) X_t N_along: the derivative of `radial_of`."""
    cosh, sinh = torch.cosh(view.distance), torch.sinh(view.distance)
    # Inward two forms of one difference, of which the one with the smaller terms is taken.
    rise, fall = cosh * (ray.time * one_plus_along(view)), torch.cosh(torch.asinh(ray.length) - view.distance)
    out, back = sinh * ray.length, cosh * (ray.time * view.along)
    return torch.where((view.along < 0) & (rise + fall < out - back), rise - fall, out + back)


def foot_of(ray: Ray, view: PolarView) -> Tensor:
    """The hyperbolic tangent of the arc length from the foot of the perpendicular from the origin."""
    return (ray.length / ray.time) * view.along


def covector_of(ray: Ray, parts: PolarView | Parts) -> Tensor:
    """Parts of a cotangent vector as one on the space part; of a view, minus the derivative of the distance."""
    return parts.across + ray.unit * (parts.along / ray.time)


def chart_covector(ray: Ray, g_time: Tensor, g: Tensor) -> Tensor:
    """An ambient cotangent as one on the space part: g_s + g_t X / X_t."""
    return g + g_time * (ray.length / ray.time) * ray.unit


def slack_of(far: Tensor, feet: Tensor) -> Tensor:
    """D - E, the integral of tanh^2 along the geodesic."""
    return numerics.minus_tanh(far) + feet * torch.tanh(far)


def rate_of(ray_x: Ray, ray_y: Ray, view: PolarView) -> Tensor:
    """E = t_Y - t_X = sinh(D) / (cosh tau_X cosh tau_Y)."""
    wide = view.across.square().sum(-1, keepdim=True)
    narrow = 1 / ray_x.time + ray_x.length * (ray_x.length / ray_x.time) * wide
    return torch.sinh(view.distance) / ray_y.time * narrow


def time_gap(x: Tensor, y: Tensor, scale: Tensor, ray_x: Ray, ray_y: Ray, unit: Tensor) -> Tensor:
    """(X_t - Y_t) / unit, where the unit is at least the smaller of both."""
    middle = (x / 2 + y / 2) * (scale / (ray_x.time / 2 + ray_y.time / 2))
    return dot(numerics.finite(x - y) * (scale / unit), middle)


def transport_of(x: Tensor, y: Tensor, v: Tensor, scale: Tensor) -> Parts:
    """Parts at y of the transported vector, rotated in the frame, or along the ray by its formula where better."""
    v = v * numerics.ROOM
    ray_x, ray_y, view = ray_of(x, scale), ray_of(y, scale), polar_view(x, y, scale)
    held = parts_of(x, ray_x, v)
    factor = torch.tanh(view.distance / 2) * product_of(view, held)
    on_x, on_y = (ray.unit * numerics.finite(factor * ray.length) for ray in (ray_x, ray_y))
    turned, terms = _rotate_frame(x, y, held, scale)
    loss = numerics.norm(v, keepdim=True) + factor.abs() * (ray_x.time / 2 + ray_y.time / 2) * 2
    kept = loss <= numerics.finite(terms.along * ray_y.time)
    along = torch.where(kept, dot(ray_y.unit, v + on_x + on_y) / ray_y.time, turned.along)
    return Parts(*(numerics.finite(part / numerics.ROOM) for part in (turned.across, along)))


def transport_covector(x: Tensor, y: Tensor, g: Tensor, scale: Tensor) -> Parts:
    """The transpose of `transport_of`: parts at x of a cotangent at y; across the ray by the formula if better."""
    ray_x, ray_y, view = ray_of(x, scale), ray_of(y, scale), polar_view(x, y, scale)
    normal = covector_of(ray_x, view)
    factor = torch.tanh(view.distance / 2) * dot(g, ray_x.unit * ray_x.length + ray_y.unit * ray_y.length)
    held = Parts(part_across(y, ray_y.unit, g), dot(ray_y.unit, g) * ray_y.time)
    turned, terms = _rotate_frame(y, x, held, scale)
    loss = numerics.norm(g, keepdim=True) + factor.abs() * numerics.norm(normal, keepdim=True)
    direct = part_across(x, ray_x.unit, numerics.finite(g + factor * normal))
    return Parts(torch.where(loss <= terms.across, direct, turned.across), turned.along)


def parts_of(x: Tensor, ray: Ray, v: Tensor) -> Parts:
    """A tangent vector, given by its space part, in the frame."""
    return Parts(part_across(x, ray.unit, v), numerics.dot(ray.unit, v) / ray.time)


def product_of(u: PolarView | Parts, v: Parts) -> Tensor:
    """The inner product of two vectors by their parts; a view stands for its direction."""
    return dot(u.across, v.across) + u.along * v.along


def to_frame(x: Tensor, ray: Ray, v: Tensor) -> Tensor:
    """A tangent vector, given by its space part, in the frame."""
    across, along = parts_of(x, ray, v)
    return across + ray.unit * along


def from_frame(ray: Ray, held: Tensor) -> Tensor:
    """The inverse (and transpose of it): the part along the ray multiplied by X_t."""
    return held + ray.unit * numerics.finite(dot(ray.unit, held) * (ray.length / (1 + ray.time)) * ray.length)


def _rotate_frame(x: Tensor, y: Tensor, held: Parts, scale: Tensor) -> tuple[Parts, Parts]:
    """Components in the frame at x as components at y: a turn by the angle that transport round (o, x, y) adds up."""
    # The Cayley transform of a skew matrix of rank two, of the tangent of half that angle, |p x q| / (1 - p.q) of
    # Poincare coordinates. Then the parts are taken about the ray of y. Second, what each is a sum of, in size.
    ray_x, ray_y = ray_of(x, scale), ray_of(y, scale)
    beside_x, beside_y = _beside(x, ray_x, y), _beside(y, ray_y, x)  # the unit vectors of y across x, of x across y
    p, q = (ray.length / (1 + ray.time) for ray in (ray_x, ray_y))
    cos = dot(ray_x.unit, ray_y.unit)
    bend = torch.where(cos > 0, beside_x.square().sum(-1, keepdim=True) / (1 + cos.clamp(min=0)), 1 - cos)  # 1 - cos
    short_p, short_q = ((1 + 1 / (ray.time + ray.length)) / (1 + ray.time) for ray in (ray_x, ray_y))  # 1 - |p|
    opening = short_p + p * short_q + p * q * bend
    tilt = beside_x * (p * q)
    # The tangent is |tilt| / opening; both may be as small as the times are large.
    size = numerics.hypot(numerics.norm(tilt, keepdim=True), opening)
    tilt = tilt / size

    def skew(v: Parts) -> Parts:
        return Parts(tilt * -v.along, dot(v.across, tilt))

    once = skew(held)
    twice = skew(once)
    turned, along = (v + 2 * (a * (opening / size) + b) for v, a, b in zip(held, once, twice, strict=True))
    about = turned - ray_y.unit * dot(ray_y.unit, turned)
    share, width, length = numerics.norm(tilt, keepdim=True), numerics.norm(held.across, keepdim=True), held.along.abs()
    return Parts(about + along * beside_y, dot(beside_x, turned) + along * cos), Parts(
        width + length * (2 * share + numerics.norm(beside_y, keepdim=True)),
        length + width * (2 * share + numerics.norm(beside_x, keepdim=True)),
    )


def _beside(x: Tensor, ray: Ray, y: Tensor) -> Tensor:
    """The part of the unit vector of y that lies across x; the difference of near points is exact."""
    norm, apart = numerics.norm(y, keepdim=True), numerics.finite(y - x)
    near = numerics.norm(apart, keepdim=True) < norm / 2
    return numerics.safe_div(part_across(x, ray.unit, torch.where(near, apart, y)), norm)
