r"""Distance, logarithm, exponential and transport with their derivatives in closed form, in float64.

Space parts ``(..., d)`` come in as they are and ``scale`` is :math:`s = \sqrt{-\kappa}`; capital letters are unit
coordinates :math:`X = s x`. What automatic differentiation makes of a boost cancels far out, so each function states
its derivative, in quantities that do not:

* **The view** of Y from X: distance D and unit direction N, kept as a part *along* the ray of X and a part *across* it,
  in the frame transported from the origin. Then :math:`n_X = (N_\perp, N_\parallel / X_t)` is minus the derivative of D
  in the space part of X. For float32 numbers the part across is right even where X and Y are parallel.
* **Curvature.** With :math:`\tau` the arc length from the foot of the perpendicular from the origin,
  :math:`t = \tanh\tau = N_\parallel X_n / X_t`, scaling all space parts changes D at the rate
  :math:`E = t_Y - t_X = \sinh D / (\cosh\tau_X \cosh\tau_Y)`, and :math:`D - E = \int \tanh^2\tau\, d\tau
  = (D - \tanh D) + t_X t_Y \tanh D`: so the derivative in s of what is homogeneous needs no difference.

Products of three lengths overflow float64 beyond rapidity 236 (float32 ends at 88): an entry of a gradient that is not
finite there is left out, so that one such row does not spoil the sum over the others. Rows into which ``nan`` came, as
point, vector or gradient, keep it.

Where points coincide the direction is zero, which makes the gradient of the distance the subgradient zero and leaves
those of the logarithm and of transport right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd, numerics
from holonomy.manifolds.hyperboloid.views import (
    Parts,
    apart,
    both_off_origin,
    by_scale,
    chart_covector,
    closed_exponential,
    closed_form,
    covector_of,
    dot,
    foot_of,
    keeper,
    off_origin,
    part_across,
    parts_of,
    polar_view,
    product_of,
    radial_of,
    rate_of,
    ray_of,
    slack_of,
    tangent_view,
    time_gap,
    to_frame,
    transport_covector,
    transport_of,
    velocity_of,
    with_step,
)


def distance(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Geodesic distance, with zero gradients where the points coincide."""
    return _distance(x, y, scale).squeeze(-1)


def distance_gradients(x: Tensor, y: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`distance`; they can be differentiated again."""
    ray_x, ray_y = ray_of(x, scale), ray_of(y, scale)
    from_x, from_y = polar_view(x, y, scale), polar_view(y, x, scale)
    slack = slack_of(from_x.distance, foot_of(ray_x, from_x) * -foot_of(ray_y, from_y))
    kept = keeper(x, y, grad)
    return (
        kept(-grad * covector_of(ray_x, from_x)),
        kept(-grad * covector_of(ray_y, from_y)),
        -by_scale(kept(grad * slack), scale.square()),
    )


def inner(x: Tensor, u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Inner products of tangent vectors."""
    return _inner(x, u, v, scale).squeeze(-1)


def expmap0_exact(u: Tensor, scale: Tensor) -> Tensor:
    r"""The exponential map at the origin, :math:`\sinh(\ell)\, u / \ell` with :math:`\ell = s |u|`."""
    return u * numerics.sinhc(_length(u, scale))


def distance0(x: Tensor, scale: Tensor) -> Tensor:
    """Geodesic distance from the origin, with zero gradients there."""
    return _autograd.apply_function(_Distance0, numerics.norm(x), scale)


def _length(x: Tensor, scale: Tensor) -> Tensor:
    return numerics.finite(numerics.norm(x, keepdim=True) * scale)


def _distance_values(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return polar_view(x, y, scale).distance / scale


_distance = closed_form(_distance_values, distance_gradients, both_off_origin)


class _Distance0(_autograd.InputsSaved):
    """Of the lengths of space parts. No gradient is multiplied by a length, which might overflow."""

    @staticmethod
    def forward(length: Tensor, scale: Tensor) -> Tensor:
        return length * numerics.asinhc(numerics.finite(length * scale))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        length, scale = ctx.saved_tensors
        (grad,) = grad_outputs
        sinh = numerics.finite(length * scale)
        lag = numerics.minus_tanh(torch.asinh(sinh))
        kept = keeper(length, grad)
        return grad / numerics.hypot(sinh, torch.ones_like(sinh)), -by_scale(kept(grad * lag), scale.square())


class _Logarithm0(_autograd.InputsSaved):
    """No gradient is multiplied by a length, which might overflow."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x * numerics.asinhc(_length(x, scale))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        (g,) = grad_outputs
        ray = ray_of(x, scale)
        # The factor is D / r, D = arsinh(r), whose derivative by log r is (tanh(D) - D) / r.
        along, lag = numerics.dot(ray.unit, g), numerics.minus_tanh(torch.asinh(ray.length))
        shrink = ray.unit * (along * numerics.safe_div(lag, ray.length))
        kept = keeper(x, g)
        return kept(g * numerics.asinhc(ray.length) - shrink), -by_scale(kept(along * lag), scale.square())


logarithm0 = _autograd.traceable(_Logarithm0)
r"""The logarithm at the origin, :math:`\operatorname{arsinh}(r)\, x / r` with :math:`r = s |x|`."""


def _logarithm_values(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    ray, view = ray_of(x, scale), polar_view(x, y, scale)
    length = view.distance / scale
    time = length * (ray.length * view.along)
    return torch.cat([time, length * (view.across + ray.unit * (view.along * ray.time))], -1)


def _logarithm_gradients(x: Tensor, y: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    g_time, g = grad[..., :1], grad[..., 1:]
    ray_x, ray_y = ray_of(x, scale), ray_of(y, scale)
    from_x, from_y = polar_view(x, y, scale), polar_view(y, x, scale)
    far, across, along = from_x
    g_along = dot(ray_x.unit, g)
    on_point = g_time * ray_x.time + ray_x.length * g_along
    on_direction = dot(across, g) + along * (g_time * ray_x.length + ray_x.time * g_along)
    bend = numerics.cothc(far)  # D coth D
    pull = far * on_point + (bend - 1) * on_direction
    grad_x = pull * covector_of(ray_x, from_x) - bend * chart_covector(ray_x, g_time, g)
    grad_y = pull * covector_of(ray_y, from_y) + chart_covector(ray_y, g_time, g) / numerics.sinhc(far)

    foot_x, foot_y = foot_of(ray_x, from_x), -foot_of(ray_y, from_y)
    rate = rate_of(ray_x, ray_y, from_x)
    wide = across.square().sum(-1, keepdim=True)
    # Two ways to write one number, each where it does not cancel.
    radial = torch.where(
        ray_x.length > 1,
        rate * ray_x.time - far / ray_x.time,
        far * (ray_x.length / ray_x.time) * ray_x.length - slack_of(far, foot_x * foot_y) * ray_x.time,
    )
    spread = far * foot_y * ray_x.length * wide
    d_across = across * (far * foot_x * foot_y - slack_of(far, foot_x * foot_y))
    d_along = along * radial - spread
    d_time = ray_x.length * along * rate - spread * (ray_x.length / ray_x.time)
    d_scale = dot(g, d_across) + g_along * d_along + g_time * d_time
    kept = keeper(x, y, grad)
    return kept(grad_x), kept(grad_y), by_scale(kept(d_scale), scale.square())


logarithm = closed_form(_logarithm_values, _logarithm_gradients, apart)
"""The logarithm: the tangent vector at x that leads to y."""


def _exponential(x: Tensor, u: Tensor, scale: Tensor, reach: float) -> Tensor:
    ray, step = ray_of(x, scale), tangent_view(x, u, scale, reach)
    radial = numerics.finite(radial_of(ray, step, step.distance))
    return numerics.finite(torch.sinh(step.distance) * step.across + ray.unit * radial) / scale


def _exponential_gradients(
    x: Tensor, u: Tensor, scale: Tensor, z: Tensor, g: Tensor, *, reach: float
) -> tuple[Tensor, Tensor, Tensor]:
    ray, step = ray_of(x, scale), tangent_view(x, u, scale, reach)
    length, across, along = step
    z_time = ray_of(z, scale).time
    cosh, sinh = torch.cosh(length), torch.sinh(length)
    wide = torch.where(length == 0, 1.0, across.square().sum(-1, keepdim=True))
    g_along = dot(ray.unit, g)
    g_across = dot(across, g)
    on_direction = g_across + along * ray.time * g_along
    # The part of the cotangent at right angles to the geodesic, across and along the ray.
    rest = g - ray.unit * g_along - across * on_direction
    rest_along = ray.time * g_along * wide - along * g_across
    velocity = velocity_of(ray, step)
    on_velocity = cosh * g_across + velocity * g_along
    foot = foot_of(ray, step)

    def chart(factor: Tensor, direction: Tensor) -> Tensor:
        inside = (factor * rest_along + direction * along) / ray.time
        return factor * rest + direction * across + ray.unit * inside

    grad_u = chart(numerics.sinhc(length), on_velocity)
    grad_x = chart(cosh, on_direction * (z_time / ray.time) - length * foot * on_velocity)

    narrow = 1 / ray.time.square() + (ray.length / ray.time).square() * across.square().sum(-1, keepdim=True)
    tanh = torch.tanh(length)
    ahead = narrow * (numerics.minus_tanh(length) + length * foot * tanh) * (ray.time * cosh / z_time)
    aside = sinh * narrow * (sinh * ray.time / z_time)
    d_across = g_across * (ahead * cosh - aside * foot)
    d_along = g_along * (ahead * velocity + aside * ray.length * across.square().sum(-1, keepdim=True))
    kept = keeper(x, u, g)
    return kept(grad_x), kept(grad_u), by_scale(kept(d_across + d_along), scale.square())


expmap_exact = closed_exponential(_exponential, _exponential_gradients, with_step)
"""The exponential map; vectors longer than the reach, in curvature radii, are held there."""


def _transport_values(x: Tensor, y: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    across, along = transport_of(x, y, v, scale)
    ray = ray_of(y, scale)
    longer = ray.unit * numerics.finite(along * ray.time)
    return torch.cat([numerics.finite(along * ray.length), numerics.finite(across + longer)], -1)


def _transport_gradients(x: Tensor, y: Tensor, vector: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    g_time = grad[..., :1]
    ray_x, ray_y = ray_of(x, scale), ray_of(y, scale)
    from_x, from_y = polar_view(x, y, scale), polar_view(y, x, scale)
    chart = chart_covector(ray_y, g_time, grad[..., 1:])
    g = Parts(part_across(y, ray_y.unit, chart), dot(ray_y.unit, chart) * ray_y.time)
    v, w, back = parts_of(x, ray_x, vector), transport_of(x, y, vector, scale), transport_covector(x, y, chart, scale)
    half, turn = from_x.distance / 2, torch.tanh(from_x.distance / 2)
    cosh = torch.cosh(half)

    out_y, out_x = radial_of(ray_y, from_y, half) / cosh, radial_of(ray_x, from_x, half) / cosh
    on_y = turn * dot(from_y.across, g.across) + (out_y * g.along + g_time) / ray_y.time
    on_x = turn * dot(from_x.across, back.across) + out_x * back.along / ray_x.time
    with_y, with_x = turn * product_of(from_y, w), turn * product_of(from_x, v)
    grad_y = covector_of(ray_y, Parts(on_y * w.across - with_y * g.across, on_y * w.along - with_y * g.along))
    grad_x = covector_of(ray_x, Parts(with_x * back.across - on_x * v.across, with_x * back.along - on_x * v.along))

    # Curvature: frame components at x, as parts across and along the ray of x.
    foot_x, foot_y = foot_of(ray_x, from_x), -foot_of(ray_y, from_y)
    wide = from_x.across.square().sum(-1, keepdim=True)
    slope = ray_x.length / ray_x.time
    side = Parts(-from_x.across * foot_x, slope * wide)
    ratio = ray_x.time / ray_y.time
    longer = time_gap(x, y, scale, ray_x, ray_y, ray_y.time)  # X_t/Y_t - 1
    rate = rate_of(ray_x, ray_y, from_x)
    here = Parts(torch.zeros_like(x), slope)
    change = Parts(rate * from_x.across + longer * side.across, rate * from_x.along + longer * side.along)
    there = Parts(foot_y * from_x.across + ratio * side.across, foot_y * from_x.along + ratio * side.along)
    spin = product_of(from_x, v) * product_of(side, back) - product_of(side, v) * product_of(from_x, back)
    d_scale = turn * (1 + ratio) * spin + product_of(there, v) * product_of(change, back)
    d_scale = d_scale + product_of(change, v) * product_of(here, back)
    d_scale = d_scale + g_time * (w.along * ray_y.length) / ray_y.time.square()
    kept = keeper(x, y, vector, grad)
    grad_v = covector_of(ray_x, back)
    return kept(grad_x * scale), kept(grad_y * scale), kept(grad_v), by_scale(kept(d_scale), scale)


transport_exact = closed_form(_transport_values, _transport_gradients, apart)
"""Parallel transport of v along the geodesic from x to y."""


def _to_origin_values(x: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return to_frame(x, ray_of(x, scale), v)


def _to_origin_gradients(x: Tensor, v: Tensor, scale: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    ray = ray_of(x, scale)
    slope = ray.length / ray.time
    along, g_along = dot(ray.unit, v), dot(ray.unit, g)
    inward = slope * (along / ray.time) * (g_along / ray.time)  # minus the derivative of 1 / X_t, paired
    turned = along * part_across(x, ray.unit, g) + g_along * part_across(x, ray.unit, v)
    grad_x = -slope / (1 + ray.time) * turned - ray.unit * inward
    kept = keeper(x, v, g)
    return kept(scale * grad_x), kept(to_frame(x, ray, g)), -by_scale(kept(inward * ray.length), scale)


transport_to_origin = closed_form(_to_origin_values, _to_origin_gradients, off_origin)
"""Parallel transport of v along the geodesic from x to the origin."""


def _inner_values(x: Tensor, u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    ray = ray_of(x, scale)
    u_across, u_along = parts_of(x, ray, u)
    v_across, v_along = parts_of(x, ray, v)
    return numerics.dot(u_across, v_across) + numerics.finite(u_along * v_along)


def _inner_gradients(x: Tensor, u: Tensor, v: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    ray = ray_of(x, scale)
    u_across, v_across = part_across(x, ray.unit, u), part_across(x, ray.unit, v)
    # Along the ray, in the frame.
    u_along, v_along = dot(ray.unit, u) / ray.time, dot(ray.unit, v) / ray.time
    slope = ray.length / ray.time
    inward = 2 * slope * u_along * (v_along / ray.time)
    grad_x = -slope * (v_along * u_across + u_along * v_across) - ray.unit * inward
    kept = keeper(x, u, v, grad)
    return (
        kept(scale * grad * grad_x),
        kept(grad * (v_across + ray.unit * (v_along / ray.time))),
        kept(grad * (u_across + ray.unit * (u_along / ray.time))),
        -by_scale(kept(grad * (inward * ray.length)), scale),
    )


_inner = closed_form(_inner_values, _inner_gradients, off_origin)
