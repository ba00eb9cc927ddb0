r"""The Lorentzian midpoint of two points, right at every radius: its value and its gradients without cancellation.

With c minus the curvature, times X and Y, :math:`S = X + Y` and :math:`s = x + y` of space parts, the midpoint of x and
:math:`\epsilon y` is :math:`m = (x + \epsilon y)/\nu`, :math:`\nu^2 = (1 - \epsilon)^2 + \epsilon \nu_1^2`, where
:math:`\nu_1^2 = c(S^2 - |s|^2)` is a difference of large squares. Let p be the part of x - y across s and k s the rest.
As x - y, 2x and -2y differ by multiples of s, p is the part of the shortest of them, and

.. math::
    \nu_1^2 = \frac{S^2 (4 + c |p|^2)}{2/c + 2XY + 2 x \cdot y + |p|^2} \ \ (x \cdot y \ge 0), \qquad
    \nu_1^2 = 2 + 2c\,(XY - x \cdot y) \ \ (x \cdot y \le 0) .

All terms are positive, and so they are in the derivatives

.. math::
    \nabla_x \nu_1^2 = \frac{c S}{X} p + \frac{k \nu_1^2}{S X} s, \qquad
    -\nabla_y \nu_1^2 = \frac{c S}{Y} p + \frac{k \nu_1^2}{S Y} s, \qquad
    c\, \frac{\partial \nu_1^2}{\partial c}
        = \frac{\nu_1^2}{4 + c |p|^2} \Bigl(c |p|^2 + \frac{k^2 |s|^2 \nu_1^2}{c X Y S^2}\Bigr) .

Float32 points up to rapidity 3.5 are computed in float32, others in float64: rounding, which gradients stretch by the
square of the time coordinate, stays below 1e-5.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, checks, numerics
from holonomy.manifolds import hyperboloid
from holonomy.ops.lorentz.lifted import chunks, curvature_gradient, joined

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["midpoint", "midpoint_reference"]

# Rapidity 3.5: of points farther out float32 gradients lose digits.
_NEAR = 16.0


def midpoint(
    x: Float[Tensor, "rows dim"], y: Float[Tensor, "rows dim"], curvature: Float[Tensor, "*one"], epsilon: float
) -> Float[Tensor, "rows ambient"]:
    """The midpoint of the points above x and of epsilon times those above y."""
    if _autograd.transformed():
        return midpoint_reference(x, y, curvature, epsilon)
    return _autograd.apply_function(_Midpoint, x, y, curvature, epsilon)


def midpoint_reference(
    x: Float[Tensor, "rows dim"], y: Float[Tensor, "rows dim"], curvature: Float[Tensor, "*one"], epsilon: float
) -> Float[Tensor, "rows ambient"]:
    """The same with the gradient that autograd derives."""
    return _forward(x, y, curvature, epsilon)[0]


class _Rows(NamedTuple):
    """Space parts in the dtype to compute in, multiplied by numbers of their rows for their squares to fit."""

    x: Tensor
    y: Tensor
    sum: Tensor
    factor: Tensor  # (n, 1), or one number
    radius: Tensor  # of curvature, multiplied as they are


class _Pair(NamedTuple):
    """Numbers of each of these rows ``(n, 1)``."""

    x_time: Tensor
    y_time: Tensor
    shortest: Tensor  # p is the part of ``shortest * x + (shortest - 2) * y`` across s
    along: Tensor  # the rest of that is ``along * s``
    across: Tensor  # sqrt(c) |p|
    length: Tensor  # |s|
    one: Tensor  # nu_1
    norm: Tensor  # nu


def _scale(curvature: Tensor) -> Tensor:
    return curvature.reshape(()).neg().double().sqrt()


def _forward(x: Tensor, y: Tensor, curvature: Tensor, epsilon: float) -> tuple[Tensor, _Pair]:
    scale, dtype = _scale(curvature), torch.promote_types(x.dtype, y.dtype)
    rows = _rows(x, y, scale, near=_near(scale, *(_length(z.detach()) for z in (x, y))))
    pair = _pair(rows, epsilon)
    middle = _total(rows, epsilon) * (rows.factor * pair.norm).reciprocal()
    # What float32 holds of near points needs no saturation.
    narrow = middle if middle.dtype == dtype == torch.float32 else numerics.narrow(middle, dtype)
    return hyperboloid.lift(narrow, curvature), pair


def _near(scale: Tensor, *lengths: Tensor) -> bool:
    """Whether float32 rows as long as these have float32 digits; lengths that can not be read are any."""
    if scale.dtype != lengths[0].dtype and checks.costs_nothing_to_read(lengths[0]):
        return all(bool((length * scale <= _NEAR).all()) for length in lengths)
    return False


def _rows(x: Tensor, y: Tensor, scale: Tensor, *, near: bool) -> _Rows:
    if torch.float64 not in (x.dtype, y.dtype):
        wide = torch.float32 if near else torch.float64
        x, y, factor = x.to(wide), y.to(wide), torch.ones_like(scale)
    else:
        x, y = x.double(), y.double()
        factor = numerics.squarable(torch.maximum(numerics.norm(x, keepdim=True), numerics.norm(y, keepdim=True)))
        x, y = x * factor, y * factor
    return _Rows(x, y, x + y, factor, factor / scale)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _pair(rows: _Rows, epsilon: float) -> _Pair:
    x, y, s, _, radius = rows
    x_length, y_length, length = (_length(z) for z in (x, y, s))
    x_time, y_time = torch.hypot(x_length, radius), torch.hypot(y_length, radius)
    product = (x * y).sum(-1, keepdim=True)
    shortest = _choice(x_length, y_length, product)
    v = _shortest(rows, shortest)
    along = numerics.safe_div((v * s).sum(-1, keepdim=True), length.square())
    across = _length(_across(v, s, along))
    rest = torch.hypot(radius * math.sqrt(2), (2 * (x_time * y_time + product.clamp(min=0))).sqrt())
    width = numerics.finite(across / radius)
    acute = (x_time + y_time) / torch.hypot(rest, across) * torch.hypot(width, torch.full_like(width, 2.0))
    obtuse = numerics.finite((2 * (x_time * y_time - product.clamp(max=0))).sqrt() / radius)
    one = torch.where(product > 0, acute, torch.hypot(obtuse, torch.full_like(obtuse, math.sqrt(2))))
    norm = numerics.finite(one)
    if epsilon != 1:
        norm = numerics.hypot(one * math.sqrt(epsilon), torch.full_like(one, 1 - epsilon))
    return _Pair(x_time, y_time, shortest, along, width, length, one, norm)


def _choice(x_length: Tensor, y_length: Tensor, product: Tensor) -> Tensor:
    """The number of the shortest vector; near points are short enough."""
    if product.dtype == torch.float32:
        return torch.ones_like(product)
    square = (x_length - y_length).square() + 2 * (x_length * y_length - product)  # |x - y|^2
    farther = torch.where(x_length < y_length, 2.0, 0.0).to(product.dtype)
    return torch.where(square <= 4 * torch.minimum(x_length, y_length).square(), 1.0, farther)


def _shortest(rows: _Rows, shortest: Tensor) -> Tensor:
    if rows.x.dtype == torch.float32:
        return rows.x - rows.y
    return torch.addcmul(rows.x * shortest, rows.y, shortest - 2)


def _across(v: Tensor, s: Tensor, along: Tensor) -> Tensor:
    """p, with zero, and its gradient, in place of entries that are rounding of v, which may be long in float64."""
    p = torch.addcmul(v, s, along, value=-1)
    if p.dtype == torch.float32:
        return p
    much = v * 16
    return torch.where(p + much == much, p - p.detach() if torch.is_grad_enabled() else 0.0, p)


def _total(rows: _Rows, epsilon: float) -> Tensor:
    return rows.sum if epsilon == 1 else torch.add(rows.x, rows.y, alpha=epsilon)


def _gradients(g: Tensor, rows: _Rows, scale: Tensor, pair: _Pair, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, y and the curvature, from that of the space part; see the head of this file."""
    s, factor, radius = rows.sum, rows.factor, rows.radius
    total, inverse = pair.x_time + pair.y_time, pair.norm.reciprocal()
    share, ratio = pair.along + 1 - pair.shortest, (pair.one * inverse).square()  # k, (nu_1 / nu)^2
    pull = (g * _total(rows, epsilon)).sum(-1, keepdim=True) * (epsilon / 2) * (inverse / factor)
    on_across = pull * inverse * scale
    on_sum = pull * factor * share * ratio / total.square()
    p = _across(_shortest(rows, pair.shortest), s, pair.along)
    if p.dtype == torch.float32:
        on_across = on_across * (inverse / radius)
    else:  # of the largest points the product of both numbers would leave the range
        p = p * (inverse / radius)
    # Orthogonal to s once more: the metric stretches what rounding left along it by the time coordinate.
    left = numerics.safe_div((p * s).sum(-1, keepdim=True), pair.length.square())
    # The gradients of x and y through 1/nu are this, times -S/X and S/Y.
    bend = torch.addcmul(p * on_across, s, on_sum - on_across * left)
    straight = g * inverse
    grad_x = torch.addcmul(straight, bend, -total / pair.x_time)
    grad_y = torch.addcmul(straight if epsilon == 1 else straight * epsilon, bend, total / pair.y_time)
    widest = torch.hypot(pair.across, torch.full_like(pair.across, 2.0))
    radial = (share * (pair.length / total) * (pair.one / widest) * radius).square() / (pair.x_time * pair.y_time)
    rate = pull * ratio / scale.square() * ((pair.across / widest).square() + radial)
    return grad_x, grad_y, rate


class _Midpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, curvature: Tensor, epsilon: float) -> Tensor:
        parts = ((out, *pair) for out, pair in (_forward(x[r], y[r], curvature, epsilon) for r in chunks(x)))
        out, *numbers = joined(parts)
        ctx.epsilon = epsilon
        ctx.save_for_backward(x, y, curvature, out, *numbers)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, y, curvature, out, *numbers = ctx.saved_tensors
        (grad,), epsilon = grad_outputs, ctx.epsilon
        scale, found = _scale(curvature), []
        # Kept numbers are constants; where the gradient itself is differentiated they are made again.
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        for r in chunks(x):
            kept = _Pair(*(each[r] for each in numbers))
            rows = _rows(x[r], y[r], scale, near=_near(scale, kept.x_time, kept.y_time))
            of_point, point = grad[r].to(rows.x.dtype), out[r].to(rows.x.dtype)
            g = torch.addcmul(of_point[:, 1:], point[:, 1:], of_point[:, :1] / point[:, :1])
            *gradients, rate = _gradients(g, rows, scale, _pair(rows, epsilon) if again else kept, epsilon)
            if torch.float64 in (x.dtype, y.dtype):
                spoiled = (x[r] + y[r] + g).isnan().any(-1, keepdim=True)
                *gradients, rate = (numerics.where_finite(z, spoiled) for z in (*gradients, rate))
            narrow = (numerics.saturated(z, like.dtype) for z, like in zip(gradients, (x, y), strict=True))
            found.append((*narrow, rate))
        grad_x, grad_y, rates = joined(found)
        on_curvature = numerics.total(rates).to(curvature.dtype) + curvature_gradient(grad, out, curvature)
        return grad_x, grad_y, on_curvature.reshape(curvature.shape), None
