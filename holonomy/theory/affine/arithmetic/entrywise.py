r"""Convex functions of the entries of an affine form: L1.

**L1.** Let f be convex on [l, u], s any number and :math:`g(t) = f(t) - s t`. On [l, u], g is at most
:math:`\max(g(l), g(u))`, and at least :math:`g(z) + \min_{t \in \{l, u\}} (f'(z) - s)(t - z)` for every z in [l, u],
with :math:`f'(z)` a subgradient. So :math:`f(y) \in s\,y` plus an interval.

*Proof.* A convex g is largest at an end, and lies above its tangent at z, which is least at an end. QED

With s the secant's slope and z where :math:`f'(z) = s` nothing is lost: g then takes both values. A z that is only
nearly there costs tightness, never soundness.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, apart, constant, select, spread, times

# Below this root of v a difference is taken from its series.
_SERIES = 0.5

Scalar = Callable[[Tensor], Tensor]


def convex(
    form: Form,
    function: Scalar,
    slope: Scalar,
    touch: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    low: Tensor | float = -torch.inf,
) -> Form:
    """L1 for every entry.

    ``touch`` takes the secant's slope, l and u, and gives a point where ``slope`` is about the secant's. Values below
    ``low`` are known not to occur.
    """
    radius = spread(form)
    known = torch.as_tensor(low, dtype=radius.dtype)
    lower, upper = torch.maximum(form.center - radius, known), torch.maximum(form.center + radius, known)
    secant, middle, half = chord(lower, upper, function, slope, touch)
    return apart(times(form, secant), middle, half)


def chord(
    lower: Tensor,
    upper: Tensor,
    function: Scalar,
    slope: Scalar,
    touch: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """L1 for numbers in [lower, upper]: slope s, middle m and h, so that f(t) is within h of s t + m."""
    below, above = function(lower), function(upper)
    wide = upper - lower
    least, most = slope(lower), slope(upper)
    secant = torch.where(wide > 0, (above - below) / torch.where(wide > 0, wide, 1.0), least)
    secant = torch.maximum(torch.minimum(secant, most), least)
    point = torch.maximum(torch.minimum(touch(secant, lower, upper), upper), lower)
    at, excess = function(point), slope(point) - secant
    bottom = at - secant * point + torch.minimum(excess * (lower - point), excess * (upper - point))
    top = torch.maximum(below - secant * lower, above - secant * upper)
    size = torch.maximum(below.abs(), above.abs()) + secant.abs() * torch.maximum(lower.abs(), upper.abs())
    return secant, (top + bottom) / 2, ((top - bottom) / 2).clamp(min=0) + ROUNDING * size


def positive_power(form: Form, power: float) -> Form:
    r""":math:`\mathrm{ReLU}(t)^p`, convex for p at least 1; ReLU itself for p = 1."""

    def slope(t: Tensor) -> Tensor:
        live = t > 0
        return live.to(t.dtype) if power == 1 else power * torch.where(live, t, 1.0).pow(power - 1) * live

    def touch(secant: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        del upper
        if power == 1:
            return torch.zeros_like(lower)
        return torch.where(secant > 0, secant / power, 1.0).pow(1 / (power - 1))

    return convex(form, lambda t: torch.relu(t).pow(power), slope, touch)


def inverse(form: Form, low: Tensor | float = -torch.inf) -> Form:
    """1/t, of entries known to be at least ``low``; where that leaves no positive bound, the problem has failed."""
    known = torch.as_tensor(low, dtype=form.center.dtype)
    bad = (torch.maximum(form.center - spread(form), known) <= 0).any(-1)
    form.noise.fail(bad)
    # Of what has failed the numbers are arbitrary, but finite.
    one = constant(form.noise, torch.ones_like(form.center))
    form = select(bad, one, form)

    def touch(secant: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        del secant
        return (lower * upper).sqrt()

    known = torch.where(bad[:, None], 1.0, known)
    return convex(form, torch.reciprocal, lambda t: -1 / t.square(), touch, low=known)


def tanhc_of_square(form: Form) -> Form:
    r""":math:`\tanh(\sqrt v)/\sqrt v`, for v at least 0.

    Convex in v, as :math:`\tanh(x)/x = 8 \sum_n 1/((2n-1)^2 \pi^2 + 4 x^2)`.
    """

    def slope(v: Tensor) -> Tensor:
        root = numerics.root(v)
        wide = root > _SERIES
        x = torch.where(wide, root, 1.0)
        far = (x / x.cosh().square() - x.tanh()) / (2 * x**3)
        # (sinh y - y) / y^3 with y = 2x, where it is a difference of nearly equal numbers.
        square = 4 * torch.where(wide, 0.0, v)
        series = sum((square**k / float(math.factorial(2 * k + 3)) for k in range(10)), torch.zeros_like(v))
        return torch.where(wide, far, -2 * series / root.clamp(max=_SERIES).cosh().square())

    return convex(form, _tanhc, slope, _middle, low=0.0)


def sech_of_square(form: Form) -> Form:
    r""":math:`1/\cosh(\sqrt v)`, for v at least 0.

    Convex in v, as :math:`\cosh x = \prod_n (1 + 4 x^2/((2n-1)^2 \pi^2))`: a product of positive, decreasing, convex
    functions :math:`1/(1 + a v)` is convex.
    """
    return convex(form, _sech, lambda v: -_tanhc(v) * _sech(v) / 2, _middle, low=0.0)


def asinhc_of_square(form: Form) -> Form:
    r""":math:`\operatorname{arsinh}(\sqrt v)/\sqrt v`, for v at least 0.

    Convex in v, as it is :math:`\int_0^1 (1 + v s^2)^{-1/2} ds`.
    """

    def slope(v: Tensor) -> Tensor:
        angle = numerics.root(v).asinh()
        some = angle > 0
        safe = torch.where(some, angle, 1.0)
        return torch.where(some, -numerics.minus_tanh(safe) / (2 * safe.sinh() ** 3), -1 / 6)

    return convex(form, lambda v: numerics.asinhc(numerics.root(v)), slope, _middle, low=0.0)


def sinhc_of_square(form: Form) -> Form:
    r""":math:`\sinh(\sqrt v)/\sqrt v`, for v at least 0: convex, as its power series has positive coefficients."""

    def value(v: Tensor) -> Tensor:
        return numerics.sinhc(numerics.root(v))

    def slope(v: Tensor) -> Tensor:
        return numerics.sinhc_slope(numerics.root(v)) / 2

    return convex(form, value, slope, _middle, low=0.0)


def minus_squared_arcosh(form: Form) -> Form:
    r""":math:`-\operatorname{arcosh}(1 + a)^2`, for a at least 0.

    Convex, as its slope :math:`-2 \theta/\sinh \theta` increases with :math:`\theta = \operatorname{arcosh}(1 + a)`.
    """

    def angle(a: Tensor) -> Tensor:
        return 2 * numerics.root(a / 2).asinh()

    return convex(form, lambda a: -angle(a).square(), lambda a: -2 / numerics.sinhc(angle(a)), _middle, low=0.0)


def arsinh(form: Form) -> Form:
    """The inverse hyperbolic sine: within half the range of its slope of a linear map about the centre."""
    radius = spread(form)
    lower, upper = form.center - radius, form.center + radius
    nearest = torch.where((lower < 0) & (upper > 0), 0.0, torch.minimum(lower.abs(), upper.abs()))
    most = (1 + nearest.square()).rsqrt()
    least = (1 + torch.maximum(lower.abs(), upper.abs()).square()).rsqrt()
    slope = (most + least) / 2
    middle = form.center.asinh() - slope * form.center
    half = (most - least) / 2 * radius + ROUNDING * (form.center.abs() + radius)
    return apart(times(form, slope), middle, half)


def _tanhc(v: Tensor) -> Tensor:
    root = numerics.root(v)
    return torch.where(root > 0, root.tanh() / torch.where(root > 0, root, 1.0), 1.0)


def _sech(v: Tensor) -> Tensor:
    return 1 / numerics.root(v).cosh()


def _middle(secant: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    del secant
    return (lower + upper) / 2
