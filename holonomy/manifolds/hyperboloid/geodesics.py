r"""Distance, logarithm, exponential and transport with their derivatives in closed form, in float64.

Space parts ``(..., d)`` come in as they are and ``scale`` is :math:`s = \sqrt{-\kappa}`; capital letters are unit
coordinates :math:`X = s x`. What automatic differentiation makes of a boost cancels far out, so each function states
its derivative, in quantities that do not:

* **The view** of Y from X: distance D and unit direction N, kept as a part *along* the ray of X and a part *across* it,
  in the frame carried from the origin. Then :math:`n_X = (N_\perp, N_\parallel / X_t)` is minus the derivative of D in
  the space part of X. For float32 numbers the part across is right even where X and Y are parallel.
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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, numerics

__all__ = [
    "carry_to_origin",
    "distance",
    "distance0",
    "distance_gradients",
    "expmap0_exact",
    "expmap_exact",
    "inner",
    "logarithm",
    "logarithm0",
    "part_across",
    "transport_exact",
]


class Ray(NamedTuple):
    """A point in polar form: unit vector (zero at the origin), length and time of its unit coordinates."""

    unit: Tensor
    length: Tensor
    time: Tensor


class Gap(NamedTuple):
    """Sinh D over Y_t times the unit direction from X to Y, as parts across and along the ray of X, and both rays."""

    ray: Ray
    other: Ray
    across: Tensor
    along: Tensor


class View(NamedTuple):
    """What Y looks like from X: distance, and the unit direction as parts across and along the ray of X."""

    distance: Tensor
    across: Tensor
    along: Tensor


def distance(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Geodesic distance, with zero gradients where the points coincide."""
    x, y = torch.broadcast_tensors(x, y)
    result: Tensor = _autograd.apply_function(_Distance, x, y, scale)
    return result.squeeze(-1)


def distance_gradients(x: Tensor, y: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the gradient of :func:`distance` is; it can be differentiated again."""
    ray_x, ray_y = _ray(x, scale), _ray(y, scale)
    from_x, from_y = _view(x, y, scale), _view(y, x, scale)
    slack = _slack(from_x.distance, _foot(ray_x, from_x) * -_foot(ray_y, from_y))
    kept = _keeper(x, y, grad)
    return (
        kept(-grad * _covector(ray_x, from_x)),
        kept(-grad * _covector(ray_y, from_y)),
        -_by_scale(kept(grad * slack), scale.square()),
    )


def logarithm(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """The logarithm: what tangent vector at x leads to y."""
    x, y = torch.broadcast_tensors(x, y)
    return _autograd.apply_function(_Logarithm, x, y, scale)


def expmap_exact(x: Tensor, u: Tensor, scale: Tensor, reach: float) -> Tensor:
    """The exponential map."""
    x, u = torch.broadcast_tensors(x, u)
    return _autograd.apply_function(_Shoot, x, u, scale, reach)


def transport_exact(x: Tensor, y: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Parallel transport along the geodesic from x to y."""
    x, y, v = torch.broadcast_tensors(x, y, v)
    return _autograd.apply_function(_Carry, x, y, v, scale)


def carry_to_origin(x: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Parallel transport along the geodesic from x to the origin."""
    x, v = torch.broadcast_tensors(x, v)
    return _autograd.apply_function(_CarryToOrigin, x, v, scale)


def inner(x: Tensor, u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Inner products of tangent vectors."""
    x, u, v = torch.broadcast_tensors(x, u, v)
    products: Tensor = _autograd.apply_function(_Inner, x, u, v, scale)
    return products.squeeze(-1)


def expmap0_exact(u: Tensor, scale: Tensor) -> Tensor:
    r"""The exponential map at the origin, :math:`\sinh(\ell)\, u / \ell` with :math:`\ell = s |u|`."""
    return u * numerics.sinhc(_length(u, scale))


def distance0(x: Tensor, scale: Tensor) -> Tensor:
    """Geodesic distance from the origin, with zero gradients there."""
    return _autograd.apply_function(_Distance0, numerics.norm(x), scale)


def logarithm0(x: Tensor, scale: Tensor) -> Tensor:
    r"""The logarithm at the origin, :math:`\operatorname{arsinh}(r)\, x / r` with :math:`r = s |x|`."""
    return x * numerics.asinhc(_length(x, scale))


def _length(x: Tensor, scale: Tensor) -> Tensor:
    return numerics.finite(numerics.norm(x, keepdim=True) * scale)


class _Distance(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return _view(x, y, scale).distance / scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, scale = ctx.saved_tensors
        return distance_gradients(x, y, scale, grad_outputs[0])


class _Distance0(torch.autograd.Function):
    """Of the lengths of space parts. No gradient is multiplied by a length, which might overflow."""

    generate_vmap_rule = True

    @staticmethod
    def forward(length: Tensor, scale: Tensor) -> Tensor:
        return length * numerics.asinhc(numerics.finite(length * scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        length, scale = ctx.saved_tensors
        (grad,) = grad_outputs
        sinh = numerics.finite(length * scale)
        lag = numerics.minus_tanh(torch.asinh(sinh))
        kept = _keeper(length, grad)
        return grad / numerics.hypot(sinh, torch.ones_like(sinh)), -_by_scale(kept(grad * lag), scale.square())


class _Logarithm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        ray, view = _ray(x, scale), _view(x, y, scale)
        length = view.distance / scale
        time = length * (ray.length * view.along)
        return torch.cat([time, length * (view.across + ray.unit * (view.along * ray.time))], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, scale = ctx.saved_tensors
        g_time, g = grad_outputs[0][..., :1], grad_outputs[0][..., 1:]
        ray_x, ray_y = _ray(x, scale), _ray(y, scale)
        from_x, from_y = _view(x, y, scale), _view(y, x, scale)
        far, across, along = from_x
        g_along = _dot(ray_x.unit, g)
        on_point = g_time * ray_x.time + ray_x.length * g_along
        on_direction = _dot(across, g) + along * (g_time * ray_x.length + ray_x.time * g_along)
        bend = numerics.cothc(far)  # D coth D
        pull = far * on_point + (bend - 1) * on_direction
        grad_x = pull * _covector(ray_x, from_x) - bend * _chart(ray_x, g_time, g)
        grad_y = pull * _covector(ray_y, from_y) + _chart(ray_y, g_time, g) / numerics.sinhc(far)

        foot_x, foot_y = _foot(ray_x, from_x), -_foot(ray_y, from_y)
        rate = _rate(ray_x, ray_y, from_x)
        wide = across.square().sum(-1, keepdim=True)
        # Two ways to write one number, each where it does not cancel.
        radial = torch.where(
            ray_x.length > 1,
            rate * ray_x.time - far / ray_x.time,
            far * (ray_x.length / ray_x.time) * ray_x.length - _slack(far, foot_x * foot_y) * ray_x.time,
        )
        spread = far * foot_y * ray_x.length * wide
        d_across = across * (far * foot_x * foot_y - _slack(far, foot_x * foot_y))
        d_along = along * radial - spread
        d_time = ray_x.length * along * rate - spread * (ray_x.length / ray_x.time)
        d_scale = _dot(g, d_across) + g_along * d_along + g_time * d_time
        kept = _keeper(x, y, grad_outputs[0])
        return kept(grad_x), kept(grad_y), _by_scale(kept(d_scale), scale.square())


class _Shoot(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, u: Tensor, scale: Tensor, reach: float) -> Tensor:
        ray, step = _ray(x, scale), _step(x, u, scale, reach)
        radial = numerics.finite(_radial(ray, step, step.distance))
        return numerics.finite(torch.sinh(step.distance) * step.across + ray.unit * radial) / scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
        *tensors, ctx.reach = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, u, scale, z = ctx.saved_tensors
        (g,) = grad_outputs
        ray, step = _ray(x, scale), _step(x, u, scale, ctx.reach)
        length, across, along = step
        z_time = _ray(z, scale).time
        cosh, sinh = torch.cosh(length), torch.sinh(length)
        wide = torch.where(length == 0, 1.0, across.square().sum(-1, keepdim=True))
        g_along = _dot(ray.unit, g)
        g_across = _dot(across, g)
        on_direction = g_across + along * ray.time * g_along
        # The part of the cotangent at right angles to the geodesic, across and along the ray.
        rest = g - ray.unit * g_along - across * on_direction
        rest_along = ray.time * g_along * wide - along * g_across
        velocity = _velocity(ray, step)
        on_velocity = cosh * g_across + velocity * g_along
        foot = _foot(ray, step)

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
        kept = _keeper(x, u, g)
        return kept(grad_x), kept(grad_u), _by_scale(kept(d_across + d_along), scale.square()), None


class _Carry(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        w = _transport(x, y, v, scale)
        ray = _ray(y, scale)
        return torch.cat([(ray.length / ray.time) * numerics.dot(ray.unit, w), w], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, y, v, scale, output = ctx.saved_tensors
        g_time, w = grad_outputs[0][..., :1], output[..., 1:]
        ray_x, ray_y = _ray(x, scale), _ray(y, scale)
        from_x, from_y = _view(x, y, scale), _view(y, x, scale)
        g = _chart(ray_y, g_time, grad_outputs[0][..., 1:])
        back, held = _transport_covector(x, y, g, scale)
        half, turn = from_x.distance / 2, torch.tanh(from_x.distance / 2)
        cosh = torch.cosh(half)

        g_along, held_along = _dot(ray_y.unit, g), _dot(ray_x.unit, held)
        on_y = turn * _dot(from_y.across, g) + _radial(ray_y, from_y, half) / cosh * g_along + g_time / ray_y.time
        on_x = turn * _dot(from_x.across, back) + _radial(ray_x, from_x, half) / cosh / ray_x.time * held_along
        n_x, n_y = _covector(ray_x, from_x), _covector(ray_y, from_y)
        grad_y = on_y * _flat(ray_y, w) - turn * _dot(n_y, w) * g
        grad_x = turn * _dot(n_x, v) * back - on_x * _flat(ray_x, v)

        # Curvature: frame components at x, as parts across and along the ray of x.
        foot_x, foot_y = _foot(ray_x, from_x), -_foot(ray_y, from_y)
        wide = from_x.across.square().sum(-1, keepdim=True)
        v_along = _dot(ray_x.unit, v) / ray_x.time
        v_across = part_across(x, ray_x.unit, v)

        def frame(across: Tensor, along: Tensor) -> Tensor:
            return _dot(across, v_across) + along * v_along

        def pull(across: Tensor, along: Tensor) -> Tensor:
            return _dot(across, held) + along * held_along

        slope = ray_x.length / ray_x.time
        side = -from_x.across * foot_x, slope * wide
        ratio = ray_x.time / ray_y.time
        longer = _time_gap(x, y, scale, ray_x, ray_y, ray_y.time)  # X_t/Y_t - 1
        rate = _rate(ray_x, ray_y, from_x)
        here = torch.zeros_like(x), slope
        change = rate * from_x.across + longer * side[0], rate * from_x.along + longer * side[1]
        there = foot_y * from_x.across + ratio * side[0], foot_y * from_x.along + ratio * side[1]
        direction = from_x.across, from_x.along
        spin = frame(*direction) * pull(*side) - frame(*side) * pull(*direction)
        d_scale = turn * (1 + ratio) * spin + frame(*there) * pull(*change) + frame(*change) * pull(*here)
        d_scale = d_scale + g_time * output[..., :1] / ray_y.time.square()
        kept = _keeper(x, y, v, grad_outputs[0])
        return kept(grad_x * scale), kept(grad_y * scale), kept(back), _by_scale(kept(d_scale), scale)


class _CarryToOrigin(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return _to_frame(x, _ray(x, scale), v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, v, scale = ctx.saved_tensors
        (g,) = grad_outputs
        ray = _ray(x, scale)
        slope = ray.length / ray.time
        along, g_along = _dot(ray.unit, v), _dot(ray.unit, g)
        inward = slope * (along / ray.time) * (g_along / ray.time)  # minus the derivative of 1 / X_t, paired
        turned = along * part_across(x, ray.unit, g) + g_along * part_across(x, ray.unit, v)
        grad_x = -slope / (1 + ray.time) * turned - ray.unit * inward
        kept = _keeper(x, v, g)
        return kept(scale * grad_x), kept(_to_frame(x, ray, g)), -_by_scale(kept(inward * ray.length), scale)


class _Inner(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        ray = _ray(x, scale)
        across = numerics.dot(part_across(x, ray.unit, u), part_across(x, ray.unit, v))
        along = (numerics.dot(ray.unit, u) / ray.time) * (numerics.dot(ray.unit, v) / ray.time)
        return across + numerics.finite(along)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        x, u, v, scale = ctx.saved_tensors
        (grad,) = grad_outputs
        ray = _ray(x, scale)
        u_across, v_across = part_across(x, ray.unit, u), part_across(x, ray.unit, v)
        # Along the ray, in the frame.
        u_along, v_along = _dot(ray.unit, u) / ray.time, _dot(ray.unit, v) / ray.time
        slope = ray.length / ray.time
        inward = 2 * slope * u_along * (v_along / ray.time)
        grad_x = -slope * (v_along * u_across + u_along * v_across) - ray.unit * inward
        kept = _keeper(x, u, v, grad)
        return (
            kept(scale * grad * grad_x),
            kept(grad * (v_across + ray.unit * (v_along / ray.time))),
            kept(grad * (u_across + ray.unit * (u_along / ray.time))),
            -_by_scale(kept(grad * (inward * ray.length)), scale),
        )


def _keeper(*inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes of a gradient one without the entries that overflowed; see the head of this file."""
    # No function inside of this one: the compiler traces it, and in the suite each would be decorated while it does.
    spoiled = torch.stack([x.isnan().any(-1, keepdim=True) for x in inputs]).any(0)
    return partial(numerics.where_finite, spoiled=spoiled)


def _by_scale(rates: Tensor, power: Tensor) -> Tensor:
    """A gradient by the scale, from what the rows add to it times a power of the scale."""
    return numerics.finite(numerics.total(rates) / power)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _ray(x: Tensor, scale: Tensor) -> Ray:
    norm = numerics.norm(x, keepdim=True)
    length = numerics.finite(norm * scale)
    return Ray(numerics.safe_div(x, norm), length, numerics.hypot(length, torch.ones_like(length)))


def part_across(x: Tensor, unit: Tensor, y: Tensor) -> Tensor:
    """The part of y orthogonal to x.

    With x_j the largest coordinate of x, (y_i x_j - x_i y_j) / x_j is y up to a multiple of x, and the products of
    float32 numbers are exact in float64: parallel vectors leave nothing, as they should. For no sum to leave float64,
    x is first divided by a power of two, which is exact.
    """
    place = x.abs().argmax(-1, keepdim=True)
    pivot = x.gather(-1, place)
    empty = pivot == 0
    x = x / numerics.power_of_two(torch.where(empty, 1.0, pivot)) * numerics.ROOM
    pivot, partner = torch.where(empty, numerics.ROOM, x.gather(-1, place)), y.gather(-1, place)
    reduced = y * pivot - x * partner
    return numerics.finite((reduced - unit * _dot(unit, reduced)) / pivot)


def _gap(x: Tensor, y: Tensor, scale: Tensor) -> Gap:
    ray, other = _ray(x, scale), _ray(y, scale)
    # All divided by Y_t, so that no product of two large numbers is formed that is not itself the answer.
    y_norm, apart = numerics.norm(y, keepdim=True), numerics.finite(y - x)
    shorter = torch.minimum(scale / other.time, 1 / y_norm)  # not alike where Y saturates
    # The difference of near points is exact, and so is what it has across the ray.
    near = numerics.norm(apart, keepdim=True) < y_norm / 2
    across = part_across(x, ray.unit, torch.where(near, apart, y)) * shorter
    gap = numerics.finite(_dot(ray.unit, apart * shorter))
    along = _dot(ray.unit, y * shorter)
    width = numerics.norm(across, keepdim=True)

    forward, length = numerics.finite(along.clamp(min=0) * other.time), ray.length.clamp(min=1)
    longer = (gap * (along * other.time + ray.length) + width * (width * other.time)) / (ray.time + other.time)
    both_near = ray.time * gap - ray.length * longer
    plain = ray.time * along - ray.length
    stretch = (ray.time / length) * (forward / 2) + other.time / 2
    ahead = gap * ((0.5 + forward / length / 2) / stretch) - ray.length * width * (width * (other.time / 2 / stretch))
    far = torch.where(along > 0, ahead, plain)
    inside = torch.where(other.length <= 2, both_near, plain)
    return Gap(ray, other, across, numerics.finite(torch.where(ray.length > 1, far, inside)))


def _sinh(gap: Gap) -> Tensor:
    """The hyperbolic sine of the distance."""
    return numerics.finite(_size(gap) * gap.other.time)


def _size(gap: Gap) -> Tensor:
    return numerics.hypot(numerics.norm(gap.across, keepdim=True), gap.along)


def _view(x: Tensor, y: Tensor, scale: Tensor) -> View:
    gap = _gap(x, y, scale)
    size = _size(gap)
    return View(torch.asinh(_sinh(gap)), numerics.safe_div(gap.across, size), numerics.safe_div(gap.along, size))


def _step(x: Tensor, u: Tensor, scale: Tensor, reach: float) -> View:
    """A tangent vector at X as a view: its length, and its direction in the frame."""
    ray = _ray(x, scale)
    across = numerics.finite(part_across(x, ray.unit, u) * scale)
    along = numerics.finite(numerics.dot(ray.unit, u) / ray.time * scale)
    length = numerics.hypot(numerics.norm(across, keepdim=True), along)
    return View(length.clamp(max=reach), numerics.safe_div(across, length), numerics.safe_div(along, length))


def _radial(ray: Ray, view: View, length: Tensor) -> Tensor:
    """cosh(l) X_n + sinh(l) X_t N_along: how far out a geodesic is, along the ray it started from."""
    cosh, sinh = torch.cosh(length), torch.sinh(length)
    excess = view.across.square().sum(-1, keepdim=True) / (1 - view.along.clamp(max=0))  # 1 + N_along
    inward = torch.sinh(torch.asinh(ray.length) - length) + sinh * (ray.time * excess)
    return torch.where(view.along < 0, inward, cosh * ray.length + sinh * (ray.time * view.along))


def _velocity(ray: Ray, view: View) -> Tensor:
    """sinh(l) X_n + cosh(l) X_t N_along: the derivative of `_radial`."""
    cosh, sinh = torch.cosh(view.distance), torch.sinh(view.distance)
    excess = view.across.square().sum(-1, keepdim=True) / (1 - view.along.clamp(max=0))
    # Inward two forms of one difference, of which the one with the smaller terms is taken.
    rise, fall = cosh * (ray.time * excess), torch.cosh(torch.asinh(ray.length) - view.distance)
    out, back = sinh * ray.length, cosh * (ray.time * view.along)
    return torch.where((view.along < 0) & (rise + fall < out - back), rise - fall, out + back)


def _foot(ray: Ray, view: View) -> Tensor:
    """The hyperbolic tangent of the arc length from the foot of the perpendicular from the origin."""
    return (ray.length / ray.time) * view.along


def _covector(ray: Ray, view: View) -> Tensor:
    """Minus the derivative of the distance in the space part of X."""
    return view.across + ray.unit * (view.along / ray.time)


def _chart(ray: Ray, g_time: Tensor, g: Tensor) -> Tensor:
    """An ambient cotangent as one on the space part: g_s + g_t X / X_t."""
    return g + g_time * (ray.length / ray.time) * ray.unit


def _flat(ray: Ray, v: Tensor) -> Tensor:
    """The metric applied to the space part of a tangent vector: v - v_t X / X_t."""
    along = _dot(ray.unit, v)
    return v - ray.unit * along + ray.unit * (along / ray.time.square())


def _slack(far: Tensor, feet: Tensor) -> Tensor:
    """D - E, the integral of tanh^2 along the geodesic."""
    return numerics.minus_tanh(far) + feet * torch.tanh(far)


def _rate(ray_x: Ray, ray_y: Ray, view: View) -> Tensor:
    """E = t_Y - t_X = sinh(D) / (cosh tau_X cosh tau_Y)."""
    wide = view.across.square().sum(-1, keepdim=True)
    narrow = 1 / ray_x.time + ray_x.length * (ray_x.length / ray_x.time) * wide
    return torch.sinh(view.distance) / ray_y.time * narrow


def _time_gap(x: Tensor, y: Tensor, scale: Tensor, ray_x: Ray, ray_y: Ray, unit: Tensor) -> Tensor:
    """(X_t - Y_t) / unit, where the unit is at least the smaller of both."""
    middle = (x / 2 + y / 2) * (scale / (ray_x.time / 2 + ray_y.time / 2))
    return _dot(numerics.finite(x - y) * (scale / unit), middle)


def _transport(x: Tensor, y: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Space part of the transported vector: v + tanh(D/2) <n_X, v> (X + Y), or by the frame, whichever cancels less."""
    v = v * numerics.ROOM
    ray_x, ray_y, view = _ray(x, scale), _ray(y, scale), _view(x, y, scale)
    factor = torch.tanh(view.distance / 2) * _dot(_covector(ray_x, view), v)
    on_x, on_y = (ray.unit * numerics.finite(factor * ray.length) for ray in (ray_x, ray_y))
    direct = v + on_x + on_y
    held = _to_frame(x, ray_x, v)
    framed = _from_frame(ray_y, _turn(x, y, held, scale))
    loss = numerics.norm(v, keepdim=True) + factor.abs() * (ray_x.time / 2 + ray_y.time / 2) * 2
    kept = loss <= numerics.finite(numerics.norm(held, keepdim=True) * ray_y.time)
    return numerics.finite(torch.where(kept, direct, framed) / numerics.ROOM)


def _transport_covector(x: Tensor, y: Tensor, g: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The transpose of `_transport`: a cotangent on space parts at y as one at x, and as one on frame components there.

    The part along the ray is X_t times longer in the frame: the one may have kept its digits where the other has not.
    """
    ray_x, ray_y, view = _ray(x, scale), _ray(y, scale), _view(x, y, scale)
    normal = _covector(ray_x, view)
    factor = torch.tanh(view.distance / 2) * _dot(g, ray_x.unit * ray_x.length + ray_y.unit * ray_y.length)
    direct = g + factor * normal
    held = _from_frame(ray_y, g)
    turned = _turn(y, x, held, scale)
    loss = numerics.norm(g, keepdim=True) + factor.abs() * numerics.norm(normal, keepdim=True)
    bound = numerics.norm(held, keepdim=True)
    back = torch.where(loss <= bound, numerics.finite(direct), _to_frame(x, ray_x, turned))
    stretched = part_across(x, ray_x.unit, direct) + ray_x.unit * (_dot(ray_x.unit, direct) * ray_x.time)
    return back, torch.where(loss * ray_x.time <= bound, numerics.finite(stretched), turned)


def _to_frame(x: Tensor, ray: Ray, v: Tensor) -> Tensor:
    """Components in the frame carried from the origin: the part along the ray divided by X_t."""
    return part_across(x, ray.unit, v) + ray.unit * (numerics.dot(ray.unit, v) / ray.time)


def _from_frame(ray: Ray, held: Tensor) -> Tensor:
    """The inverse (and transpose of it): the part along the ray multiplied by X_t."""
    return held + ray.unit * numerics.finite(_dot(ray.unit, held) * (ray.length / (1 + ray.time)) * ray.length)


def _turn(x: Tensor, y: Tensor, held: Tensor, scale: Tensor) -> Tensor:
    """Components in the frame at x as components at y: a turn by the angle that transport round (o, x, y) adds up.

    The Cayley transform of a skew matrix of rank two, of the tangent of half that angle.
    """
    ray_x, ray_y = _ray(x, scale), _ray(y, scale)
    p, q = (ray.unit * (ray.length / (1 + ray.time)) for ray in (ray_x, ray_y))  # Poincare coordinates
    # q - p in two forms: divided by the larger of the times no term is larger than what they add up to.
    nearer, longer = torch.where(ray_x.time > ray_y.time, q, p), 1 + torch.maximum(ray_x.time, ray_y.time)
    gap = nearer * _time_gap(x, y, scale, ray_x, ray_y, longer) - numerics.finite(x - y) * (scale / longer)
    opening = 1 / (1 + ray_x.time) + 1 / (1 + ray_y.time) + _dot(gap, gap) / 2  # 1 - p . q

    across = gap - ray_x.unit * _dot(ray_x.unit, gap)

    def skew(v: Tensor) -> Tensor:
        return _dot(v, across) * p - _dot(v, p) * across

    # With the tangent width / opening; both may be as small as the times are large.
    width = numerics.norm(p, keepdim=True) * numerics.norm(across, keepdim=True)
    size = numerics.hypot(width, opening)
    once = skew(held) / size
    return held + 2 * (once * (opening / size) + skew(once) / size)
