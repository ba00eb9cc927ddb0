"""The functions of holonomy.numerics against mpmath, with gradients: at zero, at the series' switch, at the ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor

from holonomy import numerics

mp.dps = 250


def sinh_over(x: mpf) -> mpf:
    return mpmath.sinh(x) / x if x else mpf(1)


def sinh_slope(x: mpf) -> mpf:
    return (mpmath.cosh(x) - mpmath.sinh(x) / x) / x**2 if x else mpf(1) / 3


# Each function beside its definition.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[mpf], mpf]]] = {
    "sinhc": (numerics.sinhc, sinh_over),
    "sinhc_slope": (numerics.sinhc_slope, sinh_slope),
    "asinhc": (numerics.asinhc, lambda x: mpmath.asinh(x) / x if x else mpf(1)),
    "cothc": (numerics.cothc, lambda x: x * mpmath.coth(x) if x else mpf(1)),
    "minus_tanh": (numerics.minus_tanh, lambda x: x - mpmath.tanh(x)),
}
ARGUMENTS = [
    0.0,
    1e-30,
    1e-9,
    1e-4,
    0.01,
    0.0199,
    0.02,
    0.0201,
    0.05,
    0.0999,
    0.1,
    0.1001,
    0.1999,
    0.2,
    0.2001,
    0.7,
    3.0,
]
ARGUMENTS += [20.0, 80.0]
AT_THE_END = {torch.float32: [86.0], torch.float64: [600.0, 700.0]}
WITHOUT_GRADIENT = ("sinhc_slope",)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_mpmath(name: str, dtype: torch.dtype) -> None:
    (ours, definition), tiny = FUNCTIONS[name], torch.finfo(dtype).tiny
    # What is left of a difference where its series ends: 3 eps / x^2.
    lost = {"sinhc_slope": 40, "minus_tanh": 8}.get(name, 1)
    tolerance = 16 * torch.finfo(dtype).eps * lost
    far = AT_THE_END[dtype] if name not in ("asinhc", "cothc", "minus_tanh") else [1e30, torch.finfo(dtype).max / 4]
    x = torch.tensor(ARGUMENTS + far, dtype=dtype, requires_grad=True)
    value = ours(x)
    for place, exact in zip(value.tolist(), x.tolist(), strict=True):
        truth = definition(mpf(exact))
        assert abs(place - truth) <= tolerance * abs(truth) + tiny, f"{name}({exact})"
    if name in WITHOUT_GRADIENT:
        return
    (slope,) = torch.autograd.grad(value.sum(), x)
    for place, exact in zip(slope.tolist(), x.tolist(), strict=True):
        truth = mpmath.diff(definition, mpf(exact)) if 1e-8 < exact < 1e29 else limit_of_slope(name, mpf(exact))
        # A derivative of order x is a difference of numbers of order 1: they lose eps / x^2 behind the series.
        loss = 3 * torch.finfo(dtype).eps * abs(definition(mpf(exact))) / max(exact, 1.0)
        assert abs(place - truth) <= 400 * tolerance * abs(truth) + 10 * loss * (exact > 0) + tiny, (
            f"slope of {name} at {exact}"
        )


def limit_of_slope(name: str, x: mpf) -> mpf:
    """Return the slope near zero, to first order, or far out."""
    if x > 1:
        return {"asinhc": (1 - mpmath.asinh(x)) / x**2, "cothc": mpf(1), "minus_tanh": mpf(1)}[name]
    return {"sinhc": x / 3, "asinhc": -x / 3, "cothc": 2 * x / 3, "minus_tanh": x**2}[name]


def test_asinh_keeps_all_digits(dtype: torch.dtype) -> None:
    """At both signs of every size; and those of its gradient, also where the square leaves the range."""
    limits = torch.finfo(dtype)
    sizes = [limits.tiny, 1e-30, 1e-9, 1e-4, 0.02, 0.3, 1.0, 3.0, 80.0, 1e9, 1.001e9, 1e18, limits.max / 8, limits.max]
    x = torch.tensor(sizes + [-size for size in sizes] + [0.0, -0.0], dtype=dtype, requires_grad=True)
    value = numerics.asinh(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    for place, turn, exact in zip(value.tolist(), slope.tolist(), x.tolist(), strict=True):
        assert abs(place - mpmath.asinh(mpf(exact))) <= 3 * limits.eps * abs(place)
        true = 1 / mpmath.sqrt(1 + mpf(exact) ** 2)
        assert abs(turn - true) <= 4 * limits.eps * true + limits.smallest_normal
    assert torch.equal(value.signbit(), x.signbit())
    assert numerics.asinh(torch.tensor([torch.nan, torch.inf], dtype=dtype)).tolist()[1] == math.inf
    torch.autograd.gradgradcheck(numerics.asinh, torch.linspace(-2, 2, 5, dtype=torch.float64).requires_grad_())


def test_lengths(dtype: torch.dtype) -> None:
    """No square overflows or underflows; the gradient is the unit vector, and zero at zero."""
    limits = torch.finfo(dtype)
    for size in (1.0, limits.max / 16, limits.tiny * 16, 1e-30, 1e30):
        x = torch.tensor([3.0, -4.0], dtype=dtype).mul(size).requires_grad_()
        length = numerics.norm(x)
        assert length.item() == pytest.approx(5 * size, rel=4 * limits.eps)
        (slope,) = torch.autograd.grad(length, x)
        assert slope.tolist() == pytest.approx([0.6, -0.8], rel=8 * limits.eps)
        assert numerics.hypot(*x.detach()).item() == pytest.approx(5 * size, rel=4 * limits.eps)
        assert numerics.unit_vector(x.detach()).tolist() == pytest.approx([0.6, -0.8], rel=8 * limits.eps)
    zero = torch.zeros(2, dtype=dtype, requires_grad=True)
    assert torch.autograd.grad(numerics.norm(zero), zero)[0].tolist() == [0.0, 0.0]
    too_long = torch.full((3,), limits.max, dtype=dtype)
    assert numerics.norm(too_long).item() == limits.max
    assert numerics.hypot(too_long, too_long).tolist() == [limits.max] * 3
    assert numerics.norm(torch.zeros(2, 0, dtype=dtype)).tolist() == [0.0, 0.0]


def test_division(dtype: torch.dtype) -> None:
    a = torch.tensor([3.0, 3.0, 0.0], dtype=dtype, requires_grad=True)
    b = torch.tensor([2.0, 0.0, 0.0], dtype=dtype, requires_grad=True)
    quotient = numerics.safe_div(a, b)
    assert quotient.tolist() == [1.5, 0.0, 0.0]
    on_a, on_b = torch.autograd.grad(quotient.sum(), [a, b])
    assert on_a.tolist() == [0.5, 0.0, 0.0]
    assert on_b.tolist() == [-0.75, 0.0, 0.0]


def test_casts_saturate_both_ways() -> None:
    wide = torch.tensor([1e300, -1e300, 0.1, 1e-300], dtype=torch.float64, requires_grad=True)
    most = torch.finfo(torch.float32).max
    for cast in (numerics.saturated, numerics.saturating_cast, numerics.narrow):
        assert cast(wide, torch.float32).tolist() == [most, -most, pytest.approx(0.1), 0.0]
    single = torch.ones(1, requires_grad=True)
    (slope,) = torch.autograd.grad(numerics.widen(single) * 1e300, single)
    assert slope.item() == most
    endless = torch.tensor([float("inf"), -float("inf"), 2.0])
    assert numerics.finite(endless).tolist() == [most, -most, 2.0]


@pytest.mark.parametrize("dim", [1, 16, 1000])
def test_rows_of_the_largest_numbers_are_shrunk_to_a_quarter_of_one(dtype: torch.dtype, dim: int) -> None:
    """Their length, which the dtype does not hold, was taken to be its largest number: of 1000 all were 32 times it."""
    most = torch.finfo(dtype).max
    held = numerics.shrink(torch.full((1, dim), most, dtype=dtype), dtype)
    assert math.hypot(*held[0].tolist()) == pytest.approx(most / 4, rel=1e-6)


def test_ends_of_the_range(dtype: torch.dtype) -> None:
    limits, reach = torch.finfo(dtype), numerics.widest_rapidity(dtype)
    assert torch.tensor(reach, dtype=dtype).sinh().isfinite()
    assert mpmath.log(limits.max) - reach == pytest.approx(2.0, abs=1e-9)
    beyond = torch.tensor([2 * reach], dtype=dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(numerics.sinhc(beyond).sum(), beyond)
    assert numerics.sinhc(beyond).isfinite()
    assert slope.item() == 0
    far = torch.tensor([[3.0, -4.0]], dtype=dtype) * (limits.max / 5)
    held = numerics.shrink(far, dtype)
    assert (held / (limits.max / 4)).tolist()[0] == pytest.approx([0.6, -0.8], rel=8 * limits.eps)
    near = torch.tensor([[3.0, -4.0]], dtype=dtype)
    assert torch.equal(numerics.shrink(near, dtype), near)
    assert numerics.within(near, 1.0).tolist()[0] == pytest.approx([0.6, -0.8], rel=8 * limits.eps)
    assert torch.equal(numerics.within(near, 6.0), near)
    assert numerics.positive(torch.tensor([0.0, 2.0], dtype=dtype)).tolist() == [limits.tiny, 2.0]


def test_room_to_the_rim_is_a_quarter_of_the_spacing(dtype: torch.dtype) -> None:
    """What a number of the dtype next below one leaves is kept; less, which rounding made, becomes a quarter of eps."""
    spacing = torch.finfo(dtype).eps
    room = torch.tensor([0.0, -1.0, spacing / 8, spacing / 2, 0.5], dtype=torch.float64)
    assert numerics.at_least_spacing(room, dtype).tolist() == [spacing / 4] * 3 + [spacing / 2, 0.5]


def test_what_is_ordinary(dtype: torch.dtype) -> None:
    """Each limit by itself, on both of its sides, of one row of two; ``nan`` is never ordinary."""
    limits, one = torch.finfo(dtype), torch.ones(2, 1, dtype=dtype)
    for place, limit in enumerate((limits.eps**-0.5, 1.0, limits.max**0.5)):
        for factor, expected in ((0.999, True), (1.001, False), (4.0, False), (float("nan"), False)):
            numbers = [one, one, one]
            numbers[place] = torch.stack([one[0], one[0] * (limit * factor)])
            assert numerics.is_ordinary(*numbers, dtype).flatten().tolist() == [True, expected], (place, factor)


def test_a_gradient_that_is_differentiated_again_takes_no_path_between_the_inputs() -> None:
    """Where one was computed from the other, that path was counted twice."""
    x = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
    for again in (False, True):
        y = x.sin()
        (grad,) = torch.autograd.grad(numerics.bounded(torch.mul, x, y).sum(), x, create_graph=again)
        torch.testing.assert_close(grad.detach(), (x.sin() + x * x.cos()).detach())
