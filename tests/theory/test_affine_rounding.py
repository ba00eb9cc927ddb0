"""Affine forms in fifty digits: what float64 loses is in the box, and no bound that is attained is undercut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import mpmath
import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor

from holonomy.theory.affine.arithmetic import ellipsoids, entrywise, forms, lengths, products
from holonomy.theory.affine.arithmetic.forms import Form, Noise
from holonomy.theory.affine.attention.softmax import softmax_average

pytestmark = pytest.mark.usefixtures("without_shape_checks", "fifty_digits")

Numbers = list[mpf]


@pytest.fixture
def fifty_digits() -> Iterator[None]:
    with mp.workdps(50):
        yield


def exact(x: Tensor) -> Numbers:
    return [mpf(value) for value in x.tolist()]


def dot(one: Numbers, other: Numbers) -> mpf:
    return mpmath.fsum(a * b for a, b in zip(one, other, strict=False))


def outside(found: Form, problem: int, noise: Numbers, truth: Numbers) -> mpf:
    """How far the truth at given noise leaves what new groups and the box reach, along itself and each axis."""
    columns = [exact(row) for row in found.columns[problem]]
    center, box = exact(found.center[problem]), exact(found.box[problem])
    left = [t - c - dot(noise, row[: len(noise)]) for t, c, row in zip(truth, center, columns, strict=True)]
    axes = [[mpf(i == k) for k in range(len(left))] for i in range(len(left))]
    size = mpmath.norm(left)
    return max(
        abs(dot(axis, left)) - room(found, len(noise), axis, columns, box)
        for axis in [*axes, *([[each / size for each in left]] if size else [])]
    )


def room(found: Form, old: int, axis: Numbers, columns: list[Numbers], box: Numbers) -> mpf:
    total = dot([abs(a) for a in axis], box)
    for group, _ in found.parts():
        if group.start >= old:
            part = [dot(axis, [row[j] for row in columns]) for j in range(group.start, group.stop)]
            total += mpmath.norm(part) if group.ball else mpmath.fsum(map(abs, part))
    return total


def widely(generator: torch.Generator, *shape: int, decades: float = 6.0) -> Tensor:
    """Numbers of both signs and of all sizes."""
    size = decades * (2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * 10**size


WEIGHT, SHIFT = (widely(torch.Generator().manual_seed(3), *shape) for shape in ((3, 3), (3,)))
LINEAR: dict[str, tuple[Callable[[Form, Form], Form], Callable[[Numbers, Numbers], Numbers]]] = {
    "linear": (
        lambda a, _: a.linear(WEIGHT, SHIFT),
        lambda a, _: [dot(exact(row), a) + mpf(b) for row, b in zip(WEIGHT, SHIFT.tolist(), strict=True)],
    ),
    "times": (
        lambda a, _: a * SHIFT,
        lambda a, _: [t * mpf(b) for t, b in zip(a, SHIFT.tolist(), strict=True)],
    ),
    "plus": (Form.plus, lambda a, b: [s + t for s, t in zip(a, b, strict=True)]),
    "plus of three": (lambda a, b: a.plus(b, a), lambda a, b: [2 * s + t for s, t in zip(a, b, strict=True)]),
    "join": (forms.join, lambda a, b: a + b),
    "apart": (
        lambda a, _: a.apart(SHIFT.expand_as(a.center), torch.zeros_like(a.center)),
        lambda a, _: [t + mpf(b) for t, b in zip(a, SHIFT.tolist(), strict=True)],
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_operations_lose_nothing(name: str) -> None:
    """At corners of the noise and of the box, also of forms that are nothing but centre, columns or box."""
    enclose, truth = LINEAR[name]
    generator = torch.Generator().manual_seed(5)
    kept = torch.tensor([*itertools.product([0.0, 1.0], repeat=3)]).double().repeat(2, 1)
    noise = Noise.of(len(kept), 2, kept)
    noise.new(2, ball=False)
    given = [
        Form(
            noise,
            widely(generator, len(kept), 3) * center[:, None],
            widely(generator, len(kept), 3, 4) * columns[:, None, None],
            widely(generator, len(kept), 3).abs() * box[:, None],
        )
        for center, columns, box in (kept.unbind(1), kept.unbind(1))
    ]
    found = enclose(*given)
    drawn = [mpf("0.5"), mpf("-0.75"), mpf(1), mpf(-1)]  # fifty digits hold all sums of these
    for problem, signs in itertools.product(range(len(kept)), itertools.product([-1, 1], repeat=3)):
        places = [
            [
                c + dot(drawn, exact(row)) + sign * b
                for c, row, b, sign in zip(
                    exact(form.center[problem]), form.columns[problem], exact(form.box[problem]), signs, strict=True
                )
            ]
            for form in given
        ]
        assert outside(found, problem, drawn, truth(*places)) <= 0


def power(p: float) -> tuple[Callable[[Form], Form], Callable[[mpf], mpf]]:
    return lambda y: entrywise.positive_power(y, p), lambda t: max(t, mpf(0)) ** mpf(p)


def of_root(function: Callable[[mpf], mpf]) -> Callable[[mpf], mpf]:
    return lambda v: function(mpmath.sqrt(v)) / mpmath.sqrt(v) if v else mpf(1)


CONVEX: dict[str, tuple[Callable[[Form], Form], Callable[[mpf], mpf]]] = {
    "relu": power(1.0),
    "relu ** 1.5": power(1.5),
    "relu squared": power(2.0),
    "inverse": (entrywise.inverse, lambda t: 1 / t),
    "tanhc": (entrywise.tanhc_of_square, of_root(mpmath.tanh)),
    "sech": (entrywise.sech_of_square, lambda v: 1 / mpmath.cosh(mpmath.sqrt(v))),
    "asinhc": (entrywise.asinhc_of_square, of_root(mpmath.asinh)),
    "sinhc": (entrywise.sinhc_of_square, of_root(mpmath.sinh)),
    "arcosh": (entrywise.minus_squared_arcosh, lambda a: -(mpmath.acosh(1 + a) ** 2)),
    "arsinh": (entrywise.arsinh, mpmath.asinh),
}


@pytest.mark.parametrize("name", CONVEX)
def test_a_convex_function_is_held_to_the_last_digit_at_both_ends(name: str) -> None:
    """Where L1 is attained: the ends of intervals of all sizes, of no width, and from zero on."""
    enclose, function = CONVEX[name]
    generator = torch.Generator().manual_seed(6)
    center = 10 ** (4 * torch.rand(30, generator=generator, dtype=torch.float64) - 2)
    radius = center * torch.rand(30, generator=generator, dtype=torch.float64)
    radius[:10] = 0.0
    if "relu" in name or name == "arsinh":
        center, radius = center * torch.tensor([1.0, -1.0]).double().repeat(15), radius * 3
    elif name != "inverse":
        # Squares, which are known not to be negative.
        center[0] = 0.0
        radius[-5:] = 2 * center[-5:]
    noise = Noise.of(len(center), 1, center)
    found = enclose(Form(noise, center[:, None], radius[:, None, None], torch.zeros_like(center[:, None])))
    assert not noise.failed.any()
    for problem, (c, r) in enumerate(zip(exact(center), exact(radius), strict=True)):
        known = c < r and "relu" not in name and name != "arsinh"
        least, most = -c / r if known else mpf(-1), mpf(1)
        ends = [outside(found, problem, [end], [function(c + end * r)]) for end in (least, most)]
        assert max(ends) <= 0, (c, r)
        size = abs(function(c + r)) + abs(function(c + least * r))
        assert name == "arsinh" or min(ends) >= -mpf("1e-9") * size, (c, r)


def one(center: list[float], ball: list[list[float]], intervals: list[list[float]]) -> Form:
    """One problem with a first ball, and intervals."""
    columns = torch.tensor([[[*a, *b] for a, b in zip(ball, intervals, strict=True)]], dtype=torch.float64)
    noise = Noise.of(1, len(ball[0]), columns)
    if intervals[0]:
        noise.new(len(intervals[0]), ball=False)
    middle = torch.tensor([center], dtype=torch.float64)
    return Form(noise, middle, columns, torch.zeros_like(middle))


# A number whose products round.
ODD, SMALL = 0.7310585786300049, 1.0 / 3000
UP = [3 / 7, 0.9]
Family = tuple[Callable[[Form], Form], Form, Callable[[], Numbers], Callable[[Numbers], Numbers]]


def straight() -> Numbers:
    """The unit vector along UP."""
    size = mpmath.norm([mpf(u) for u in UP])
    return [mpf(u) / size for u in UP]


def times_first(y: Numbers) -> Numbers:
    return [y[0] * each for each in y[1:]]


def scaled(y: Form) -> Form:
    return products.scale(y[:1], y[1:])


def paired(y: Form) -> Form:
    half = y.center.shape[-1] // 2
    return products.inner(y[:half], y[half:])


def inner(y: Numbers) -> Numbers:
    return [dot(y[: len(y) // 2], y[len(y) // 2 :])]


def over(y: Numbers) -> Numbers:
    return [each / y[-1] for each in y[:-1]]


def norm(y: Numbers) -> Numbers:
    return [mpmath.norm(y)]


def lorentz(y: Numbers) -> Numbers:
    return [mpmath.sqrt(y[0] ** 2 - dot(y[1:], y[1:]))]


# Operation, form, noise where its bound is attained, and what it encloses; noise in many digits, on its sphere.
ATTAINED: dict[str, Family] = {
    "scale: the perturbation with itself": (
        scaled, one([0.0] * 3, [UP, [ODD, 0.0], [0.0, ODD]], [[]] * 3), straight, times_first
    ),
    "scale: the perturbation and an interval with the perturbation": (
        scaled, one([0.0] * 3, [UP, [ODD, 0.0], [0.0, ODD]], [[SMALL], [0.0], [0.0]]),
        lambda: [*straight(), mpf(1)], times_first,
    ),
    "scale: the perturbation and an interval with an interval": (
        scaled, one([0.0] * 2, [UP, [0.0, 0.0]], [[SMALL, 0.0], [0.0, ODD]]),
        lambda: [*straight(), mpf(1), mpf(-1)], times_first,
    ),
    "scale: numbers": (scaled, one([SMALL, ODD, -3 / 7], [[0.0]] * 3, [[]] * 3), lambda: [mpf(0)], times_first),
    "inner: the perturbation with itself": (
        paired, one([0.0] * 2, [[ODD], [3 / 7]], [[]] * 2), lambda: [mpf(1)], inner
    ),
    "inner: an interval with the perturbation": (
        paired, one([0.0] * 2, [[0.0], [3 / 7]], [[ODD], [0.0]]), lambda: [mpf(1), mpf(-1)], inner
    ),
    "inner: the perturbation with an interval": (
        paired, one([0.0] * 2, [[3 / 7], [0.0]], [[0.0], [ODD]]), lambda: [mpf(1), mpf(-1)], inner
    ),
    "inner: two intervals": (
        paired, one([0.0] * 2, [[0.0], [0.0]], [[3 / 7, 0.0], [0.0, ODD]]), lambda: [mpf(0), mpf(1), mpf(-1)], inner
    ),
    "inner: an interval beside the perturbation": (
        paired, one([0.0] * 4, [[3 / 7], [0.0], [ODD], [0.0]], [[0.0], [ODD], [0.0], [0.0]]),
        lambda: [mpf(1), mpf(1)], inner,
    ),
    "inner: numbers that cancel": (paired, one([1e8, ODD, ODD, -1e8], [[0.0]] * 4, [[]] * 4), lambda: [mpf(0)], inner),
    "squared length: the perturbation": (
        products.squared_length, one([0.0] * 2, [[ODD], [3 / 7]], [[]] * 2), lambda: [mpf(1)], lambda y: [dot(y, y)]
    ),
    "squared length: numbers": (
        products.squared_length, one([ODD, 3 / 7, 1e6], [[0.0]] * 3, [[]] * 3), lambda: [mpf(0)], lambda y: [dot(y, y)]
    ),
    "quotient: numbers": (
        lambda y: products.quotient(y[:2], y[2:]), one([ODD, -1e6, 3 / 7], [[0.0]] * 3, [[]] * 3),
        lambda: [mpf(0)], over,
    ),
    "length: numbers": (lengths.length, one([ODD, -3 / 7, 0.9], [[0.0]] * 3, [[]] * 3), lambda: [mpf(0)], norm),
    "Lorentz norm: numbers": (
        lambda y: lengths.lorentz_norm(y[:1], y[1:], 0.01), one([40.01, -3e1, 26.0], [[0.0]] * 3, [[]] * 3),
        lambda: [mpf(0)], lorentz,
    ),
}  # fmt: skip


# The Lorentz norm is known to be at least a number, which does not shrink.
@pytest.mark.parametrize(
    ("name", "size"), [(n, size) for n in ATTAINED for size in (1.0, 1e5, 1e-5) if size >= 1 or "Lorentz" not in n]
)
def test_a_bound_that_is_attained_is_not_undercut(name: str, size: float) -> None:
    enclose, form, noise, truth = ATTAINED[name]
    noise, fresh = noise(), Noise(list(form.noise.groups), form.noise.failed)
    form = Form(fresh, form.center * size, form.columns * size, form.box)
    given = [
        c + dot(noise, exact(row)) for c, row in zip(exact(form.center[0]), form.columns[0], strict=True)
    ]  # fmt: skip
    found, wanted = enclose(form), truth(given)
    assert not fresh.failed.any()
    scale = mpmath.norm(wanted) + mpmath.norm(given) ** 2
    assert -mpf("1e-9") * scale <= outside(found, 0, noise, wanted) <= 0


def matrices() -> Tensor:
    """Of all shapes of a spectrum: one number, many, and numbers far apart."""
    generator = torch.Generator().manual_seed(8)
    many = torch.randn(6, 3, 3, generator=generator, dtype=torch.float64)
    alone = many[:2, :, :1] @ many[:2, :1]
    return torch.cat([many, alone, many * torch.tensor([1.0, 1e-5, 1e-9], dtype=torch.float64)])


def test_lengths_are_not_undercut() -> None:
    """The spectral norm, how far a form reaches, and how far its entries do."""
    found = matrices()
    noise = Noise.of(len(found), 3, found)
    zero = torch.zeros_like(found[..., 0])
    largest, ball = forms.largest_singular_value(found), Form(noise, zero, found, zero)
    spread, reach = ball.spread(), ball.reach()
    for problem, matrix in enumerate(found.tolist()):
        truth = max(mpmath.svd_r(mpmath.matrix(matrix), compute_uv=False))
        for value in (largest[problem], reach[problem]):
            assert truth <= mpf(value.item()) <= truth * (1 + mpf("1e-9"))
        for row, value in zip(matrix, spread[problem], strict=True):
            size = mpmath.norm([mpf(each) for each in row])
            assert size <= mpf(value.item()) <= size * (1 + mpf("1e-9"))


def test_a_ball_of_a_sum_holds_it_where_it_is_attained() -> None:
    """L10 for parts that are multiples of one matrix, whose sum is that matrix times the sum of the factors."""
    found, factors = matrices(), [0.7, 0.2, 1.9]
    images = torch.stack([factor * found for factor in factors], 1)
    ball = ellipsoids.weighted(torch.ones(len(found), 3, dtype=torch.float64), images)
    for matrix, held in zip(found.tolist(), ball.tolist(), strict=True):
        whole = mpmath.matrix(matrix) * mpmath.fsum(factors)
        left = mpmath.matrix(held) * mpmath.matrix(held).T - whole * whole.T
        least, most = (f(mpmath.eigsy(left, eigvals_only=True)) for f in (min, max))
        assert 0 <= least <= most <= mpf("1e-9") * mpmath.norm(whole) ** 2


def test_a_softmax_average_of_still_points_holds_them_with_their_rounding() -> None:
    """Two nearest keys that differ little, far from the query: their logits are long, and so is what they lose."""
    generator = torch.Generator().manual_seed(9)
    root, channels = 0.9, 2
    for far in (1.0, 300.0, 1e5):
        drawn = torch.randn(3, 4, channels, generator=generator, dtype=torch.float64)
        query, keys, values = (
            torch.cat([(x.square().sum(-1, keepdim=True) + root**-2).sqrt(), x], -1)
            for x in (drawn[0, :1], drawn[1] / 9 + far, drawn[2])
        )
        noise, still = Noise.of(1, 1, query), torch.zeros(4, 3, 1, dtype=torch.float64)
        held = [ellipsoids.TokenForms(each, torch.arange(4), still, still.expand(-1, -1, 3)) for each in (keys, values)]
        found = softmax_average(forms.constant(noise, query), *held, "geodesic_squared", root, "node")
        c, flipped = mpf(root) ** 2, [-query[0, 0].item(), *query[0, 1:].tolist()]
        angles = [mpmath.acosh(-c * dot([mpf(q) for q in flipped], exact(key))) for key in keys]
        weights = [mpmath.exp(-(angle**2) / c / mpmath.sqrt(channels)) for angle in angles]
        total = [dot(weights, exact(column)) for column in values.mT]
        size = mpmath.sqrt(total[0] ** 2 - dot(total[1:], total[1:])) * mpf(root)
        assert not noise.failed.any()
        assert outside(found, 0, [mpf(0)], [each / size for each in total[1:]]) <= 0
