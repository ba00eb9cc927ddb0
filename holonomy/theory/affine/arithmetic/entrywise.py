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
from holonomy._shapes import Float
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, Kink, constant, select
from holonomy.theory.affine.arithmetic.squares import bounds, products, rest_of, with_squares

# Below this root of v a difference is taken from its series.
_SERIES = 0.5
# Cells of an interval, or of each side of a kink, in which a function is between chord and tangent.
_CELLS = 8
# Outer node of Chebyshev's polynomial of degree three.
_NODE = math.sqrt(0.75)

Scalar = Callable[[Tensor], Tensor]


def convex(
    form: Form,
    function: Scalar,
    slope: Scalar,
    touch: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    low: Tensor | float = -torch.inf,
    kink: float | None = None,
    noted: bool = False,
) -> Form:
    """L1 for every entry; where there are squares L16.3, if that is better.

    ``touch`` takes the secant's slope, l and u, and gives a point where ``slope`` is about the secant's. Values below
    ``low`` are known not to occur. At a ``kink`` the slope jumps; those of ReLUs are ``noted``.
    """
    shift, rest = rest_of(form)
    center, gradient = form.center + shift, form.gradient
    reached = gradient.norm(dim=-1) * (1 + ROUNDING)
    known = torch.as_tensor(low, dtype=center.dtype)
    lower, upper = (torch.maximum(center + sign * (reached + rest), known) for sign in (-1, 1))
    secant, middle, half = chord(lower, upper, function, slope, touch)
    line = (secant, torch.zeros_like(secant), middle, half)
    squares = bool(form.noise.squares) and bool(gradient.shape[-1])
    if squares:
        bent = parabola(_cells(lower, upper, kink), center, (reached, rest), function, slope)
        line = tuple(torch.where(bent[-1] < half, a, b) for a, b in zip(bent, line, strict=True))
    factor, bend, middle, half = line
    if noted and gradient.shape[-1]:
        form.noise.kinks.append(Kink(form, form.noise.size, factor, bend, middle, half, center, rest))
    found = form * factor
    if squares:
        found = with_squares(found, products(gradient, gradient) * bend[..., None], bend * reached.square())
    return found.apart(middle, half)


def parabola(
    ends: Float[Tensor, "*entry end"],
    center: Float[Tensor, "*entry"],
    parts: tuple[Float[Tensor, "*entry"], Float[Tensor, "*entry"]],
    function: Scalar,
    slope: Scalar,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L16.3 for numbers within ends of cells: s, q, m and h, so that f(y) is within h of s y + q x^2 + m.

    ``parts`` are the reaches of x and of w.
    """
    values, lower, upper = function(ends), ends[..., 0], ends[..., -1]
    z, half = (lower + upper) / 2, (upper - lower) / 2
    safe = torch.where(half > 0, half, 1.0)
    bend = ((values[..., 0] + values[..., -1] - 2 * function(z)) / (2 * safe.square())).clamp(min=0)
    # What is left of f is nearly cubic: the line through it at these nodes is the best.
    node = _NODE * safe
    off = (z + node - center).square() - (z - node - center).square()
    factor = (function(z + node) - function(z - node) - bend * off) / (2 * node)
    bend, factor = torch.where(half > 0, bend, 0.0), torch.where(half > 0, factor, slope(z))
    a, b, fa, fb = ends[..., :-1], ends[..., 1:], values[..., :-1], values[..., 1:]
    s, q, c = factor[..., None], bend[..., None], center[..., None]

    def less(value: Tensor, t: Tensor) -> Tensor:
        return value - s * t - q * (t - c).square()

    width = b - a
    rise = (fb - fa) / torch.where(width > 0, width, 1.0)
    vertex = torch.where(q > 0, c + (rise - s) / torch.where(q > 0, 2 * q, 1.0), a)
    vertex = torch.maximum(torch.minimum(vertex, b), a)
    above = torch.maximum(torch.maximum(less(fa, a), less(fb, b)), less(fa + rise * (vertex - a), vertex)).amax(-1)
    mid = (a + b) / 2
    at, tangent = function(mid), slope(mid)
    below = torch.minimum(less(at + tangent * (a - mid), a), less(at + tangent * (b - mid), b)).amin(-1)
    size = values.abs().amax(-1) + factor.abs() * torch.maximum(lower.abs(), upper.abs())
    size = size + bend * torch.maximum((lower - center).abs(), (upper - center).abs()).square()
    reached, rest = parts
    across, square = 2 * bend * reached * rest, bend * rest.square() / 2
    radius = (above - below) / 2 + (across + square) * (1 + ROUNDING) + 2 * ROUNDING * size
    return factor, bend, (above + below) / 2 + square, radius


def _cells(lower: Tensor, upper: Tensor, kink: float | None) -> Float[Tensor, "*entry end"]:
    """Ends of cells: as many below a kink as above it."""
    if kink is not None:
        turn = torch.maximum(torch.minimum(lower.new_tensor(kink), upper), lower)
        return torch.cat([_cells(lower, turn, None), _cells(turn, upper, None)[..., 1:]], -1)
    share = torch.linspace(0, 1, _CELLS + 1, dtype=lower.dtype)[1:-1]
    inside = torch.minimum(lower[..., None] + (upper - lower)[..., None] * share, upper[..., None])
    return torch.cat([lower[..., None], torch.maximum(inside, lower[..., None]), upper[..., None]], -1)


def chord(
    lower: Tensor, upper: Tensor, function: Scalar, slope: Scalar, touch: Callable[[Tensor, Tensor, Tensor], Tensor]
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

    def touch(secant: Tensor, *_: Tensor) -> Tensor:
        if power == 1:
            return torch.zeros_like(secant)
        return torch.where(secant > 0, secant / power, 1.0).pow(1 / (power - 1))

    return convex(form, lambda t: torch.relu(t).pow(power), slope, touch, kink=0.0, noted=power == 1)


def relu_lines(center: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""L1 for :math:`\mathrm{ReLU}(z)`, z within a radius of its centre: s, half of the interval, and which may switch.

    The interval lies above zero. A radius of nan is that of a unit that may switch, so that nan is seen in the result.
    """
    lower, upper = center - radius, center + radius
    switching = ~(lower >= 0) & ~(upper <= 0)
    slope = torch.where(switching, upper / torch.where(switching, upper - lower, 1.0), (upper > 0).to(upper.dtype))
    slope = slope.clamp(0, 1)
    half = torch.where(switching, torch.maximum(-slope * lower, (1 - slope) * upper) / 2, 0.0)
    return slope, half, switching


def inverse(form: Form, low: Tensor | float = -torch.inf) -> Form:
    """1/t, of entries known to be at least ``low``; where that leaves no positive bound, the problem has failed."""
    least = bounds(form)[0]
    steep = 1 - (least / torch.where(form.center > 0, form.center, 1.0)).amin(-1).detach()
    form.noise.steepest = torch.maximum(steep, form.noise.steepest)
    known = torch.maximum(least, torch.as_tensor(low, dtype=form.center.dtype))
    bad = (known <= 0).any(-1)
    form.noise.fail(bad)
    # Of what has failed the numbers are arbitrary, but finite.
    one = constant(form.noise, torch.ones_like(form.center))
    form, known = select(bad, one, form), torch.where(bad[:, None], 1.0, known)
    return convex(
        form, torch.reciprocal, lambda t: -1 / t.square(), lambda _, lower, upper: (lower * upper).sqrt(), low=known
    )


def tanhc_of_square(form: Form) -> Form:
    r""":math:`\tanh(\sqrt v)/\sqrt v` for v at least 0: convex, as :math:`8 \sum_n 1/((2n-1)^2 \pi^2 + 4 v)`."""

    def slope(v: Tensor) -> Tensor:
        root = numerics.root(v)
        wide = root > _SERIES
        x = torch.where(wide, root, 1.0)
        far = (x / x.cosh().square() - x.tanh()) / (2 * x**3)
        # (sinh y - y) / y^3 with y = 2x, where it is a difference of nearly equal numbers.
        square = 4 * torch.where(wide, 0.0, v)
        series = sum((square**k / float(math.factorial(2 * k + 3)) for k in range(10)), torch.zeros_like(v))
        return torch.where(wide, far, -2 * series / root.clamp(max=_SERIES).cosh().square())

    return convex(form, _tanhc, slope, half_way, low=0.0)


def sech_of_square(form: Form) -> Form:
    r""":math:`1/\cosh(\sqrt v)`, for v at least 0."""
    # Convex in v, as cosh x is the product of all 1 + 4 x^2 / ((2n-1)^2 pi^2): a product of positive, decreasing,
    # convex functions 1/(1 + a v) is convex.
    return convex(form, _sech, lambda v: -_tanhc(v) * _sech(v) / 2, half_way, low=0.0)


def asinhc_of_square(form: Form) -> Form:
    r"""The arsinh of :math:`\sqrt v` over it, for v at least 0: convex, as :math:`\int_0^1 (1 + v s^2)^{-1/2} ds`."""

    def slope(v: Tensor) -> Tensor:
        angle = numerics.root(v).asinh()
        some = angle > 0
        safe = torch.where(some, angle, 1.0)
        return torch.where(some, -numerics.minus_tanh(safe) / (2 * safe.sinh() ** 3), -1 / 6)

    return convex(form, lambda v: numerics.asinhc(numerics.root(v)), slope, half_way, low=0.0)


def sinhc_of_square(form: Form) -> Form:
    r""":math:`\sinh(\sqrt v)/\sqrt v`, for v at least 0: convex, as its power series has positive coefficients."""
    root = numerics.root
    return convex(
        form, lambda v: numerics.sinhc(root(v)), lambda v: numerics.sinhc_slope(root(v)) / 2, half_way, low=0.0
    )


def minus_squared_arcosh(form: Form) -> Form:
    r""":math:`-\operatorname{arcosh}(1 + a)^2`, for a at least 0."""
    # Convex, as its slope -2 t / sinh t increases with t = arcosh(1 + a).
    return convex(form, lambda a: -angle(a).square(), lambda a: -2 / numerics.sinhc(angle(a)), half_way, low=0.0)


def angle(a: Tensor) -> Tensor:
    """The inverse hyperbolic cosine of ``1 + a``."""
    return 2 * numerics.root(a / 2).asinh()


def arsinh(form: Form) -> Form:
    """The inverse hyperbolic sine: within half the range of its slope of a linear map about the centre."""
    radius = form.spread()
    lower, upper = form.center - radius, form.center + radius
    nearest = torch.where((lower < 0) & (upper > 0), 0.0, torch.minimum(lower.abs(), upper.abs()))
    most = (1 + nearest.square()).rsqrt()
    least = (1 + torch.maximum(lower.abs(), upper.abs()).square()).rsqrt()
    slope = (most + least) / 2
    middle = form.center.asinh() - slope * form.center
    half = (most - least) / 2 * radius + ROUNDING * (form.center.abs() + radius)
    return (form * slope).apart(middle, half)


def _tanhc(v: Tensor) -> Tensor:
    root = numerics.root(v)
    return torch.where(root > 0, root.tanh() / torch.where(root > 0, root, 1.0), 1.0)


def _sech(v: Tensor) -> Tensor:
    return 1 / numerics.root(v).cosh()


def half_way(secant: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Where a tangent is taken: half way."""
    del secant
    return (lower + upper) / 2
