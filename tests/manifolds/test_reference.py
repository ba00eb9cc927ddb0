"""The oracle judged by what it has to satisfy, and its differences by derivatives done by hand."""

from __future__ import annotations

import random

import pytest
from mpmath import cosh, mp, mpf, sinh, sqrt

from tests.manifolds.geometry import place
from tests.reference import manifold as oracle

KAPPAS = (-0.01, -1.0, -100.0)
PLACES = (
    (0.0, 1.0, "random"),
    (1e-6, 1e-6, "outward"),
    (3.0, 1e-4, "sideways"),
    (8.0, 20.0, "inward"),
)


def close(left: oracle.Vector, right: oracle.Vector) -> bool:
    """Compare to 60 digits, norm-wise."""
    gap = [a - b for a, b in zip(left, right, strict=True)]
    return oracle.dot(gap, gap) <= mpf(10) ** -120 * (oracle.dot(right, right) + mpf(10) ** -60)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize(("radius", "separation", "kind"), PLACES)
def test_definitions_agree(kappa: float, radius: float, separation: float, kind: str) -> None:
    """Exp inverts log, distance is the length of log, transport is an isometry carrying log."""
    with mp.workdps(400):
        kappa_ = mpf(kappa)
        x, y, u, v = place(kappa, radius, separation, kind, 3, 5, axis=False)
        assert close(oracle.logmap(x, y, kappa_)[1:], u)
        assert close(oracle.expmap(x, u, kappa_)[1:], y)
        assert close(oracle.dist0(x, kappa_), [mpf(radius)])
        assert close(oracle.dist(x, y, kappa_), [mpf(separation)])
        start = oracle.lift(x, kappa_)
        carried = oracle.transp(x, y, v, kappa_)
        end = oracle.lift(y, kappa_)
        assert abs(oracle.inner(carried, end)) < mpf(10) ** -100
        lengths = [oracle.inner(w, w) for w in (carried, oracle.tangent(start, v))]
        assert close(lengths[:1], lengths[1:])
        # The velocity of a geodesic is parallel along it.
        back = [-value for value in oracle.logmap(y, x, kappa_)]
        assert close(oracle.transp(x, y, u, kappa_), back)
        assert close(oracle.transp(y, x, carried[1:], kappa_)[1:], v)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_charts_and_midpoint(kappa: float) -> None:
    """Charts invert, the midpoint of two points is half-way, rescaling scales distances."""
    with mp.workdps(300):
        kappa_ = mpf(kappa)
        x, y, u, _ = place(kappa, 2.0, 1.5, "random", 3, 1, axis=False)
        for there, back in (
            (oracle.to_poincare, oracle.from_poincare),
            (oracle.to_klein, oracle.from_klein),
        ):
            assert close(back(there(x, kappa_), kappa_)[1:], x)
        middle = oracle.centroid(x, y, [mpf(1), mpf(1)], kappa_)[1:]
        assert close(middle, oracle.expmap(x, [value / 2 for value in u], kappa_)[1:])
        moved = [oracle.rescale(p, kappa_)[1:] for p in (x, y)]
        assert close(oracle.dist(*moved, mpf(-4)), [mpf(1.5) * sqrt(kappa_ / -4)])


def dist_by_hand(x: oracle.Vector, y: oracle.Vector, kappa: mpf) -> list[list[oracle.Vector]]:
    """The total derivative of arcosh(a)/sqrt(-kappa), a = kappa <x, y>, by the chain rule."""
    start, end = oracle.lift(x, kappa), oracle.lift(y, kappa)
    a = kappa * oracle.inner(start, end)
    outer = 1 / (sqrt(-kappa) * sqrt(a * a - 1))
    dx = [[outer * kappa * (q - end[0] * p / start[0])] for p, q in zip(x, y, strict=True)]
    dy = [[outer * kappa * (p - start[0] * q / end[0])] for p, q in zip(x, y, strict=True)]
    times = end[0] / (2 * kappa**2 * start[0]) + start[0] / (2 * kappa**2 * end[0])
    dkappa = outer * (a / kappa - kappa * times) - oracle.dist(x, y, kappa)[0] / (2 * kappa)
    return [dx, dy, [[dkappa]]]


def expmap0_by_hand(u: oracle.Vector, kappa: mpf) -> list[list[oracle.Vector]]:
    """The derivative of (cosh(r)/sqrt|kappa|, sinh(r)/r u), r = sqrt|kappa| |u|."""
    length = sqrt(-kappa * oracle.dot(u, u))
    odd = sinh(length) / length
    bend = -kappa * (cosh(length) - odd) / length**2
    du = [
        [sqrt(-kappa) * odd * p, *(bend * p * q + (odd if i == j else 0) for j, q in enumerate(u))]
        for i, p in enumerate(u)
    ]
    time = (length * sinh(length) - cosh(length)) / (2 * kappa * sqrt(-kappa))
    dkappa = [time, *((cosh(length) - odd) / (2 * kappa) * q for q in u)]
    return [du, [dkappa]]


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize(("radius", "separation", "kind"), PLACES)
def test_differences_are_derivatives(kappa: float, radius: float, separation: float, kind: str) -> None:
    """Central differences equal derivatives by hand to 60 digits, far out and nearly coincident."""
    with mp.workdps(400):
        kappa_ = mpf(kappa)
        x, y, _, v = place(kappa, radius, separation, kind, 3, 5, axis=False)
        for function, arguments, supports_custom_backward in (
            (oracle.dist, [x, y], dist_by_hand(x, y, kappa_)),
            (oracle.expmap0, [v], expmap0_by_hand(v, kappa_)),
        ):
            differences = oracle.jacobian(function, arguments, kappa_)
            for ours, hand in zip(differences, supports_custom_backward, strict=True):
                for left, right in zip(ours, hand, strict=True):
                    assert close(left, right)


def test_precision_is_enough() -> None:
    """Twice the digits change nothing, where the printed formulas cancel most."""
    rng = random.Random(0)
    for size in (1e-30, 1e-6, 1.0, 1e13, 1e38):
        x = oracle.exact([rng.gauss(0, 1) * size for _ in range(3)])
        y = [value * (1 + mpf(2) ** -20) for value in x]
        kappa = mpf(-1)
        with oracle.working(x, y, kappa=kappa):
            once = oracle.jacobian(oracle.dist, [x, y], kappa), oracle.dist(x, y, kappa)
            more = 2 * mp.dps
        with mp.workdps(more):
            twice = oracle.jacobian(oracle.dist, [x, y], kappa), oracle.dist(x, y, kappa)
            assert close(once[1], twice[1])
            for left, right in zip(once[0], twice[0], strict=True):
                assert all(close(a, b) for a, b in zip(left, right, strict=True))
