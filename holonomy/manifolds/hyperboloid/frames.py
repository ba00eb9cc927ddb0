r"""Logarithm and exponential with tangent vectors as components in the frame transported from the origin.

A tangent vector far out has ambient coordinates :math:`X_t` times longer along the ray of its point than across it, and
float32 keeps the longer part only. Its components in the frame that parallel transport carries from the origin along
the ray are as long as the vector itself. Here :math:`v = P_{x \to o}\, \log_x(y)` and its inverse
:math:`y = \exp_x(P_{o \to x}\, v)`, with derivatives; arguments are as in
:mod:`holonomy.manifolds.hyperboloid.geodesics`.

**Moving y** by frame components w moves :math:`v` by :math:`w_\parallel + w_\perp D/\sinh D`, parts along and across
the geodesic (a Jacobi field that vanishes at x), w transported to x. **Moving x** by w moves it by
:math:`-w_\parallel - w_\perp D \coth D`, and the frame turns: with u the ray of x and :math:`w_u` the part of w across
it, :math:`-\tanh(r/2)\,\big(\langle u, v\rangle\, w_u - \langle w_u, v\rangle\, u\big)`, r the rapidity of x.
**Curvature**: with :math:`t = \tanh\tau` as in geodesics, all points moved along their rays move :math:`s v` by
:math:`-(D - E)\, N - D\, t_Y \tanh r\, (u - \langle u, N\rangle N)`, and end points of the exponential by
:math:`(D - E)\, N + \sinh D\; t_Y \tanh r\, (u - \langle u, N\rangle N)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd, numerics
from holonomy.manifolds.hyperboloid.views import (
    PolarView,
    Ray,
    both_off_origin,
    by_scale,
    closed_exponential,
    closed_form,
    dot,
    keeper,
    off_ray,
    one_plus_along,
    part_across,
    polar_view,
    radial_of,
    ray_of,
    slack_of,
    to_frame,
    velocity_of,
)


def ray_angle(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """The angle at x between its ray, outwards, and the geodesic to y; a right one at the origin, zero at y."""
    x, y = torch.broadcast_tensors(x, y)
    return _ray_angle(x, y, scale)


def frame_view(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Distances in curvature radii, and the unit directions from x to y in frame components."""
    x, y = torch.broadcast_tensors(x, y)
    view = polar_view(x, y, scale)
    return view.distance, _direction(ray_of(x, scale), view)


def frame_logarithm_gradients(x: Tensor, y: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`frame_logarithm`; they can be differentiated again."""
    ray, view = ray_of(x, scale), polar_view(x, y, scale)
    slack, end = _slack_and_end(ray, view)
    along, across = dot(ray.unit, grad), dot(view.across, grad)
    bent = _wide(view) * along - view.along * across
    rate = -slack * (view.along * along + across) - bent * end * (ray.length / ray.time) * view.distance
    kept = keeper(x, y, grad)
    on_x, on_y = _on_start(x, ray, view, grad), _on_end(x, y, scale, view, grad)
    return kept(on_x), kept(on_y), by_scale(kept(rate), scale.square())


def _logarithm_values(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    distance, direction = frame_view(x, y, scale)
    return direction * (distance / scale)


frame_logarithm = closed_form(_logarithm_values, frame_logarithm_gradients, off_ray)
"""Frame components of the tangent vectors at x that lead to y."""


def _exponential(x: Tensor, v: Tensor, scale: Tensor, reach: float) -> Tensor:
    ray = ray_of(x, scale)
    step = _step(ray, v, scale, reach)
    radial = numerics.finite(radial_of(ray, step, step.distance))
    return numerics.finite(torch.sinh(step.distance) * step.across + ray.unit * radial) / scale


def _exponential_gradients(
    x: Tensor, v: Tensor, scale: Tensor, z: Tensor, g: Tensor, *, reach: float
) -> tuple[Tensor, Tensor, Tensor]:
    ray, step = ray_of(x, scale), _step(ray_of(x, scale), v, scale, reach)
    length, across, along = step
    half, cosh, sinh = ray.length / (1 + ray.time), torch.cosh(length), torch.sinh(length)
    g_along, g_across = dot(ray.unit, g), part_across(x, ray.unit, g)
    beside, wide = dot(across, g), _wide(step)
    # z = sinh(D) v/|v| + u (cosh(D) X_n + sinh(D) N_along (X_t - 1)), u the unit vector along x.
    stiffness = torch.where(along < 0, _inward(ray, step, sinh, torch.exp(-length)), cosh + half * along * sinh)
    on_x = g_across * stiffness + across * (half * sinh * g_along)
    on_x = on_x + ray.unit * (ray_of(z, scale).time / ray.time * g_along)
    # A Jacobi field that vanishes at x: the geodesic's velocity, and sinh(D)/D of what is at right angles to it.
    on_velocity = cosh * beside + velocity_of(ray, step) * g_along
    bent = wide * ray.time * g_along - along * beside
    stretch = numerics.sinhc(length)
    on_v = across * on_velocity + stretch * (g_across - across * (beside + along * ray.time * g_along))
    on_v = on_v + ray.unit * (along * on_velocity + stretch * bent)
    slack, end = _slack_and_end(ray, step)
    rate = on_velocity * slack + bent * end * (ray.length / ray.time) * sinh
    kept = keeper(x, v, g)
    return kept(on_x), kept(on_v), by_scale(kept(rate), scale.square())


frame_exponential = closed_exponential(_exponential, _exponential_gradients, both_off_origin)
"""Where the tangent vectors at x with frame components v lead; lengths beyond the reach are held there."""


class _RayAngle(_autograd.InputsSaved):
    r"""The angle :math:`\theta`, with :math:`N = u \cos\theta + a \sin\theta` and :math:`e = -\partial_\theta N`.

    Moving x by w adds :math:`\coth D\, \langle e, w\rangle - \coth r\, \langle a, w\rangle`, the turns of N and of the
    ray; moving y adds :math:`-\langle e, w\rangle / \sinh D`, w transported to x.
    """

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        view = polar_view(x, y, scale)
        return torch.atan2(_length(view), view.along)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, scale = ctx.saved_tensors
        (g,) = grad_outputs
        ray, view = ray_of(x, scale), polar_view(x, y, scale)
        side = numerics.safe_div(view.across, _length(view))
        rate = g * _length(view) * _slack_and_end(ray, view)[1] * (ray.length / ray.time)
        kept = keeper(x, y, g)
        on_x, on_y = _angle_on_start(ray, view, side), _angle_on_end(x, y, scale, view, side)
        return kept(g * scale * on_x), kept(g * scale * on_y), by_scale(kept(rate), scale)


_ray_angle = _autograd.traceable(_RayAngle)


def _angle_on_start(ray: Ray, view: PolarView, side: Tensor) -> Tensor:
    """The derivative of the angle by x, as a cotangent on the space part of x."""
    steep = torch.tanh(view.distance)
    bend = numerics.safe_div(torch.ones_like(steep), steep)
    # coth r + N_along coth D, of which inwards nothing but the parts beyond one is left.
    over_r = numerics.safe_div(1 / (ray.time + ray.length), ray.length)
    over_d = 2 * torch.sigmoid(-2 * view.distance) * bend
    turn = torch.where(view.along < 0, over_r - over_d + one_plus_along(view) * bend, 1 + over_r + view.along * bend)
    outwards = ray.unit * (bend * _length(view) / ray.time)
    return torch.where(ray.length > 0, numerics.finite(outwards - side * numerics.finite(turn)), 0.0)


def _angle_on_end(x: Tensor, y: Tensor, scale: Tensor, view: PolarView, side: Tensor) -> Tensor:
    """The derivative of the angle by y, as a cotangent on the space part of y."""
    ray_x, ray_y, back = ray_of(x, scale), ray_of(y, scale), polar_view(y, x, scale)
    turned = to_frame(y, ray_y, _transported(ray_x, view, side * view.along - ray_x.unit * _length(view)))
    split = _side_at_end(ray_x, ray_y, side) * -back.along - ray_y.unit * (_length(back) / ray_y.time)
    far = (ray_x.length > 1) & (ray_y.length > 1)
    slope = numerics.finite(numerics.safe_div(torch.ones_like(view.distance), torch.sinh(view.distance)))
    return torch.where(ray_x.length > 0, torch.where(far, split, turned), 0.0) * slope


def _length(view: PolarView) -> Tensor:
    """The sine of the angle to the ray."""
    return numerics.norm(view.across, keepdim=True)


def _side_at_end(ray_x: Ray, ray_y: Ray, side: Tensor) -> Tensor:
    """The unit vector across the ray of y, in the plane of both rays: rotated as one ray is to the other."""
    return side * dot(ray_x.unit, ray_y.unit) - ray_x.unit * dot(side, ray_y.unit)


def _on_start(x: Tensor, ray: Ray, view: PolarView, grad: Tensor) -> Tensor:
    r"""The derivative of the logarithm by x, transposed: a cotangent on the space part of x.

    Far out :math:`D \coth D` and :math:`D \tanh(r/2)\, N_\parallel` cancel: their sum is one of positive terms.
    """
    far, half, bend = view.distance, ray.length / (1 + ray.time), numerics.cothc(view.distance)
    along, across = dot(ray.unit, grad), part_across(x, ray.unit, grad)
    beside, wide = dot(view.across, across), _wide(view)
    towards = beside + view.along * along
    inward = _inward(ray, view, far, 2 * torch.sigmoid(-2 * far) * bend)  # from D coth D - D
    stiffness = torch.where(view.along < 0, inward, bend + half * far * view.along)
    on_across = view.across * ((bend - 1) * towards + half * far * along) - across * stiffness
    on_along = -view.along * towards - bend * (along * wide - view.along * beside)
    return on_across + ray.unit * (on_along / ray.time)


def _on_end(x: Tensor, y: Tensor, scale: Tensor, view: PolarView, grad: Tensor) -> Tensor:
    """The derivative of the logarithm by y, transposed: a cotangent on the space part of y."""
    ray_x, ray_y, back = ray_of(x, scale), ray_of(y, scale), polar_view(y, x, scale)
    direction, stretch = _direction(ray_x, view), numerics.sinhc(view.distance)
    towards = direction * dot(direction, grad)
    turned = to_frame(y, ray_y, _transported(ray_x, view, towards + (grad - towards) / stretch))
    # Of y far out the direction there is read from y: turning would leave a rounding across its ray, which is exp(r)
    # times as long at the origin. In the plane of both rays a turn takes u and side to y's.
    width, width_y = _length(view), _length(back)
    side = numerics.safe_div(view.across, width)
    side_y = _side_at_end(ray_x, ray_y, side)
    radial, beside = dot(ray_x.unit, grad), part_across(x, ray_x.unit, grad)
    sideways = dot(side, beside)
    forwards = width * sideways + view.along * radial
    bent = (width * radial - view.along * sideways) / stretch
    rest = (beside - side * sideways) / stretch
    on_across = -back.across * forwards + side_y * (back.along * bent) + rest
    split = on_across + ray_y.unit * ((width_y * bent - back.along * forwards) / ray_y.time)
    far = (ray_y.length > 1) & (view.distance > 0)
    return torch.where(far, split, turned)


def _wide(view: PolarView) -> Tensor:
    """The squared sine of the angle to the ray; one where there is no direction."""
    return torch.where(view.distance == 0, 1.0, view.across.square().sum(-1, keepdim=True))


def _inward(ray: Ray, view: PolarView, factor: Tensor, rest: Tensor) -> Tensor:
    """``rest + factor (1 + tanh(r/2) N_along)`` for directions towards the origin, as a sum of positive terms."""
    room = (1 + 1 / (ray.time + ray.length)) / (1 + ray.time)  # 1 - tanh(r/2)
    return rest + factor * (room + ray.length / (1 + ray.time) * one_plus_along(view))


def _step(ray: Ray, v: Tensor, scale: Tensor, reach: float) -> PolarView:
    """Frame components as a view: distance, and direction as parts across and along the ray."""
    along = dot(ray.unit, v)
    across = v - ray.unit * along
    length = numerics.norm(v, keepdim=True)
    distance = numerics.finite(length * scale).clamp(max=reach)
    return PolarView(distance, numerics.safe_div(across, length), numerics.safe_div(along, length))


def _direction(ray: Ray, view: PolarView) -> Tensor:
    return view.across + ray.unit * view.along


def _transported(ray: Ray, view: PolarView, held: Tensor) -> Tensor:
    r"""Components in the frame at x as those at the end of the geodesic.

    A turn in the plane of ray and geodesic by the area A of the triangle (origin, x, end), the Cayley transform of
    :math:`\tan(A/2) = h\, |N_\perp| / (1 + h N_\parallel)` with :math:`h = \tanh(r/2) \tanh(D/2)`.
    """
    near = ray.length / (1 + ray.time)
    half = near * torch.tanh(view.distance / 2)
    # Inwards it is (1 - h) + h (1 + N_along), each a sum or product of what does not cancel.
    room = (1 + 1 / (ray.time + ray.length)) / (1 + ray.time) + near * 2 * torch.sigmoid(-view.distance)
    opening = torch.where(view.along < 0, room + half * one_plus_along(view), 1 + half * view.along)
    size = numerics.hypot(half * _length(view), opening)
    once = half * _skewed(ray, view, held) / size
    return held + 2 * (once * (opening / size) + half * _skewed(ray, view, once) / size)


def _skewed(ray: Ray, view: PolarView, v: Tensor) -> Tensor:
    """The rotation from the direction across the ray to the ray, times the sine between direction and ray."""
    return ray.unit * dot(view.across, v) - view.across * dot(ray.unit, v)


def _slack_and_end(ray: Ray, view: PolarView) -> tuple[Tensor, Tensor]:
    """D - E, and the hyperbolic tangent of the arc length from the foot of the perpendicular to the end."""
    aside = numerics.finite(ray.length * _length(view))
    # sinh of the arc length at the start is X_n N_along / cosh p, p the length of the perpendicular.
    start = torch.asinh(ray.length * view.along / numerics.hypot(aside, torch.ones_like(aside)))
    end = torch.tanh(start + view.distance)
    return slack_of(view.distance, torch.tanh(start) * end), end
