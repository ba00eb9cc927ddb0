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
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, numerics
from holonomy.manifolds import hyperboloid
from holonomy.ops.lorentz.lifted import curvature_gradient, space_gradient

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["midpoint", "midpoint_reference"]

_ROWS = 1024


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
    middle = _middle(x, y, _pair(x, y, _scale(curvature), epsilon), epsilon)
    return hyperboloid.lift(numerics.narrow(middle, torch.promote_types(x.dtype, y.dtype)), curvature)


class _Pair(NamedTuple):
    """Numbers of each row ``(n, 1)`` in float64, of the vectors that :func:`_squarable` makes."""

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


def _pair(x: Tensor, y: Tensor, scale: Tensor, epsilon: float) -> _Pair:
    x, y, factor = _squarable(x, y)
    radius, s = factor / scale, x + y
    x_length, y_length, length = (torch.linalg.vector_norm(z, dim=-1, keepdim=True) for z in (x, y, s))
    x_time, y_time = torch.hypot(x_length, radius), torch.hypot(y_length, radius)
    product = (x * y).sum(-1, keepdim=True)
    near = (x_length - y_length).square() + 2 * (x_length * y_length - product)  # |x - y|^2
    near = near <= 4 * torch.minimum(x_length, y_length).square()
    shortest = torch.where(near, 1.0, torch.where(x_length < y_length, 2.0, 0.0))
    v = _shortest(x, y, shortest)
    along = numerics.safe_div((v * s).sum(-1, keepdim=True), length.square())
    across = torch.linalg.vector_norm(_across(v, s, along), dim=-1, keepdim=True)
    rest = torch.hypot(radius * math.sqrt(2), (2 * (x_time * y_time + product.clamp(min=0))).sqrt())
    width = numerics.finite(across / radius)
    acute = (x_time + y_time) / torch.hypot(rest, across) * torch.hypot(width, torch.full_like(width, 2.0))
    obtuse = numerics.finite((2 * (x_time * y_time - product.clamp(max=0))).sqrt() / radius)
    one = torch.where(product > 0, acute, torch.hypot(obtuse, torch.full_like(obtuse, math.sqrt(2))))
    norm = numerics.hypot(one * math.sqrt(epsilon), torch.full_like(one, 1 - epsilon))
    return _Pair(x_time, y_time, shortest, along, width, length, one, norm)


def _squarable(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both in float64, and multiplied by the third for their squares to fit, as those of float32 numbers do."""
    if torch.float64 not in (x.dtype, y.dtype):
        return x.double(), y.double(), x.new_ones((), dtype=torch.float64)
    x, y = x.double(), y.double()
    factor = numerics.squarable(torch.maximum(numerics.norm(x, keepdim=True), numerics.norm(y, keepdim=True)))
    return x * factor, y * factor, factor


def _shortest(x: Tensor, y: Tensor, shortest: Tensor) -> Tensor:
    return torch.addcmul(x * shortest, y, shortest - 2)


def _across(v: Tensor, s: Tensor, along: Tensor) -> Tensor:
    """p, with zero, and its gradient, in place of entries that are rounding of v."""
    p, much = torch.addcmul(v, s, along, value=-1), v * 16
    return torch.where(p + much == much, p - p.detach() if torch.is_grad_enabled() else 0.0, p)


def _middle(x: Tensor, y: Tensor, pair: _Pair, epsilon: float) -> Tensor:
    """Space parts, in float64."""
    x, y, factor = _squarable(x, y)
    return torch.add(x, y, alpha=epsilon) * (factor * pair.norm).reciprocal()


def _gradients(
    g: Tensor, x: Tensor, y: Tensor, scale: Tensor, pair: _Pair, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, y and the curvature, from that of the space part; see the head of this file."""
    spoiled = (x + y + g).isnan().any(-1, keepdim=True) if torch.float64 in (x.dtype, y.dtype) else None
    middle = _middle(x, y, pair, epsilon)
    x, y, factor = _squarable(x, y)
    total, radius, inverse = pair.x_time + pair.y_time, factor / scale, pair.norm.reciprocal()
    share, ratio = pair.along + 1 - pair.shortest, (pair.one * inverse).square()  # k, (nu_1 / nu)^2
    pull = (g * middle).sum(-1, keepdim=True) * (epsilon / 2)
    on_across = (pull * inverse * scale) * (inverse / radius)
    on_sum = pull * factor * share * ratio / total.square()
    s = x + y
    p = _across(_shortest(x, y, pair.shortest), s, pair.along)
    # Orthogonal to s once more: the metric stretches what is left by the time coordinate.
    p = torch.addcmul(p, s, numerics.safe_div((p * s).sum(-1, keepdim=True), pair.length.square()), value=-1)
    # The gradients of x and y through 1/nu are this, times -S/X and S/Y.
    bend = torch.addcmul(p * on_across, s, on_sum)
    grad_x = torch.addcmul(g * inverse, bend, -total / pair.x_time)
    grad_y = torch.addcmul(g * (epsilon * inverse), bend, total / pair.y_time)
    widest = torch.hypot(pair.across, torch.full_like(pair.across, 2.0))
    radial = (share * (pair.length / total) * (pair.one / widest) * radius).square() / (pair.x_time * pair.y_time)
    rate = pull * ratio / scale.square() * ((pair.across / widest).square() + radial)
    if spoiled is not None:
        grad_x, grad_y, rate = (numerics.where_finite(z, spoiled) for z in (grad_x, grad_y, rate))
    return grad_x, grad_y, rate


def _chunks(x: Tensor) -> list[slice]:
    """Rows that are computed at once: of more, float64 tables would be allocated afresh."""
    size = _ROWS if _autograd.supports_custom_backward(x) else max(len(x), 1)
    return [slice(start, start + size) for start in range(0, max(len(x), 1), size)]


def _joined(parts: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    return [each[0] if len(each) == 1 else torch.cat(each) for each in zip(*parts, strict=True)]


class _Midpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, curvature: Tensor, epsilon: float) -> Tensor:
        scale, dtype, parts = _scale(curvature), torch.promote_types(x.dtype, y.dtype), []
        for rows in _chunks(x):
            pair = _pair(x[rows], y[rows], scale, epsilon)
            middle = numerics.saturated(_middle(x[rows], y[rows], pair, epsilon), dtype)
            parts.append((hyperboloid.lift(middle, curvature), *pair))
        out, *numbers = _joined(parts)
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
        for rows in _chunks(x):
            kept = _Pair(*(each[rows] for each in numbers))
            pair = _pair(x[rows], y[rows], scale, epsilon) if again else kept
            g = space_gradient(grad[rows].double(), out[rows].double())
            *gradients, rate = _gradients(g, x[rows], y[rows], scale, pair, epsilon)
            narrow = (numerics.saturated(z, like.dtype) for z, like in zip(gradients, (x, y), strict=True))
            found.append((*narrow, rate))
        grad_x, grad_y, rates = _joined(found)
        on_curvature = numerics.total(rates).to(curvature.dtype) + curvature_gradient(grad, out, curvature)
        return grad_x, grad_y, on_curvature.reshape(curvature.shape), None
