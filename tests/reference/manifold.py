"""The Lorentz manifold from its definitions, in as many digits as it takes.

Every function takes the SPACE parts of its points and tangent vectors as lists of ``mpf`` and the
sectional curvature ``kappa < 0`` as an ``mpf``; time is ``sqrt(|x_s|^2 - 1/kappa)`` and a tangent
vector u at x has ``u_t = x_s . u_s / x_t``. Float inputs enter exactly (`exact`), so that a value
is the true value of the function at the numbers that a float32 or float64 tensor holds. Outputs
are ambient, time first; a scalar is a list of one. Formulas as printed: Hypformer eqs. 1, 4 and 22.

The printed formulas cancel badly (arcosh near one, time against space), so the oracle buys its way
out with digits: `digits` says how many for given inputs, `working` sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mpmath import acosh, cosh, mp, mpf, sinh, sqrt

Vector = list[mpf]
Oracle = Callable[..., Vector]


def exact(values: Sequence[float]) -> Vector:
    """Return the floats as the very numbers they are."""
    return [mpf(float(value)) for value in values]


def digits(*arguments: Vector, kappa: mpf) -> int:
    """Return how many digits leave 60 good ones after every cancellation of these inputs.

    The worst is `jacobian` of a distance at a coincident pair far out: a step of 10^(-digits/3)
    moves <x, y>, a sum of terms like large^2, by (step/large)^2.
    """
    sizes = [abs(value) for argument in arguments for value in argument if value != 0]
    scale = sqrt(abs(kappa))
    large = max([mpf(1), *(size * scale for size in sizes)])
    small = min([mpf(1), *(size * scale for size in sizes)])
    return 240 + int(12 * mp.log10(large)) + int(6 * -mp.log10(small))


@contextmanager
def working(*arguments: Vector, kappa: mpf) -> Iterator[None]:
    """Work with the precision that these inputs need."""
    with mp.workdps(digits(*arguments, kappa=kappa)):
        yield


def dot(x: Vector, y: Vector) -> mpf:
    """Return the Euclidean inner product."""
    return mp.fdot(x, y)


def inner(x: Vector, y: Vector) -> mpf:
    """Return <x, y> = -x_t y_t + x_s . y_s of two ambient vectors."""
    return dot(x[1:], y[1:]) - x[0] * y[0]


def lift(space: Vector, kappa: mpf) -> Vector:
    """Return the point whose space part this is."""
    return [sqrt(dot(space, space) - 1 / kappa), *space]


def tangent(x: Vector, space: Vector) -> Vector:
    """Return the tangent vector at the ambient point x whose space part this is."""
    return [dot(x[1:], space) / x[0], *space]


def dist(x: Vector, y: Vector, kappa: mpf) -> Vector:
    """d(x, y) = arcosh(kappa <x, y>) / sqrt|kappa| (eq. 1)."""
    if x == y:
        return [mpf(0)]
    return [acosh(kappa * inner(lift(x, kappa), lift(y, kappa))) / sqrt(-kappa)]


def dist0(x: Vector, kappa: mpf) -> Vector:
    """Distance from the origin (sqrt(-1/kappa), 0)."""
    return dist(x, [mpf(0)] * len(x), kappa)


def expmap(x: Vector, u: Vector, kappa: mpf) -> Vector:
    """exp_x(u) = cosh(r) x + sinh(r)/r u, r = sqrt|kappa| |u| (eq. 22)."""
    point = lift(x, kappa)
    vector = tangent(point, u)
    length = sqrt(-kappa * inner(vector, vector))
    if length == 0:
        return point
    even, odd = cosh(length), sinh(length) / length
    return [even * p + odd * v for p, v in zip(point, vector, strict=True)]


def expmap0(u: Vector, kappa: mpf) -> Vector:
    """exp at the origin."""
    return expmap([mpf(0)] * len(u), u, kappa)


def logmap(x: Vector, y: Vector, kappa: mpf) -> Vector:
    """The inverse of exp: log_x(y) = arcosh(a)/sqrt(a^2 - 1) (y - a x), a = kappa <x, y>."""
    if x == y:
        return [mpf(0)] * (len(x) + 1)
    start, end = lift(x, kappa), lift(y, kappa)
    a = kappa * inner(start, end)
    factor = acosh(a) / sqrt(a * a - 1)
    return [factor * (e - a * s) for s, e in zip(start, end, strict=True)]


def logmap0(y: Vector, kappa: mpf) -> Vector:
    """log at the origin."""
    return logmap([mpf(0)] * len(y), y, kappa)


def transp(x: Vector, y: Vector, v: Vector, kappa: mpf) -> Vector:
    """Parallel transport of v from x to y along the geodesic.

    v - kappa <y, v> / (1 + kappa <x, y>) (x + y).
    """
    start, end = lift(x, kappa), lift(y, kappa)
    vector = tangent(start, v)
    factor = -kappa * inner(end, vector) / (1 + kappa * inner(start, end))
    return [w + factor * (s + e) for w, s, e in zip(vector, start, end, strict=True)]


def transp0(y: Vector, v: Vector, kappa: mpf) -> Vector:
    """Parallel transport from the origin to y."""
    return transp([mpf(0)] * len(y), y, v, kappa)


def transp0back(x: Vector, v: Vector, kappa: mpf) -> Vector:
    """Parallel transport to the origin."""
    return transp(x, [mpf(0)] * len(x), v, kappa)


def inner_at(x: Vector, u: Vector, v: Vector, kappa: mpf) -> Vector:
    """Inner product <u, v> of tangent vectors at x."""
    point = lift(x, kappa)
    return [inner(tangent(point, u), tangent(point, v))]


def midpoint(x: Vector, y: Vector, kappa: mpf) -> Vector:
    """Lorentzian midpoint of two points."""
    return centroid(x, y, [mpf(1), mpf(1)], kappa)


def centroid(*arguments: Vector | mpf) -> Vector:
    """Lorentzian midpoint (eq. 4): ``centroid(x_1, .., x_n, weights, kappa)``.

    s / sqrt(|kappa| |<s, s>|) with s = sum_j weights_j x_j.
    """
    *points, weights, kappa = arguments
    lifted = [lift(point, kappa) for point in points]
    total = [dot(weights, list(column)) for column in zip(*lifted, strict=True)]
    norm = sqrt(-kappa * abs(inner(total, total)))
    return [value / norm for value in total]


def logmap_frame(x: Vector, y: Vector, kappa: mpf) -> Vector:
    """The logarithm at x of y, carried to the origin."""
    return transp0back(x, logmap(x, y, kappa)[1:], kappa)


def expmap_frame(x: Vector, v: Vector, kappa: mpf) -> Vector:
    """The exponential at x of what is v at the origin."""
    return expmap(x, transp0(x, v, kappa)[1:], kappa)


def busemann(x: Vector, direction: Vector, kappa: mpf) -> Vector:
    """lim d(x, exp_o(t xi)) - t = log(sqrt|kappa| (x_t - x_s . xi)) / sqrt|kappa|."""
    along = dot(x, direction) / sqrt(dot(direction, direction))
    return [mp.log(sqrt(-kappa) * (lift(x, kappa)[0] - along)) / sqrt(-kappa)]


def ray_angle(x: Vector, y: Vector, kappa: mpf) -> Vector:
    """The angle between the ray of x and the geodesic to y: that of their directions, both carried to the origin."""
    v, size = logmap_frame(x, y, kappa)[1:], sqrt(dot(x, x))
    along = dot(x, v) / size
    return [mp.atan2(sqrt(abs(dot(v, v) - along**2)), along)]


def frechet(*arguments: Vector | mpf) -> Vector:
    """Frechet mean: ``frechet(start, x_1, .., x_n, weights, kappa)``, where sum_i w_i log_m(x_i) = 0.

    By Newton's method from a place near it, with derivatives by differences.
    """
    start, *points, weights, kappa = arguments

    def pull(mean: Vector) -> Vector:
        logs = [logmap_frame(mean, point, kappa) for point in points]
        return [dot(weights, list(column)) for column in list(zip(*logs, strict=True))[1:]]

    for _ in range(12):
        here = pull(start)
        if max(abs(value) for value in here) < mpf(10) ** (-mp.dps * 2 // 3):
            break
        slopes = jacobian(lambda mean, _: pull(mean), [start], kappa)[0]
        step = mp.lu_solve(mp.matrix(slopes).T, -mp.matrix(here))
        start = [a + b for a, b in zip(start, step, strict=True)]
    return lift(start, kappa)


def rescale(x: Vector, kappa: mpf, to: mpf | None = None) -> Vector:
    """The point with every distance scaled by sqrt(kappa/to): all coordinates by that factor."""
    factor = sqrt(kappa / (mpf(-4) if to is None else to))
    return [factor * value for value in lift(x, kappa)]


def to_poincare(x: Vector, kappa: mpf) -> Vector:
    """Stereographic projection to the ball of radius 1/sqrt|kappa|: x_s / (1 + sqrt|kappa| x_t)."""
    factor = 1 / (1 + sqrt(-kappa) * lift(x, kappa)[0])
    return [factor * value for value in x]


def from_poincare(p: Vector, kappa: mpf) -> Vector:
    """Inverse of `to_poincare`: 2 p / (1 - |kappa| |p|^2)."""
    factor = 2 / (1 + kappa * dot(p, p))
    return lift([factor * value for value in p], kappa)


def to_klein(x: Vector, kappa: mpf) -> Vector:
    """Central projection to the ball of radius 1/sqrt|kappa|: x_s / (sqrt|kappa| x_t)."""
    factor = 1 / (sqrt(-kappa) * lift(x, kappa)[0])
    return [factor * value for value in x]


def from_klein(p: Vector, kappa: mpf) -> Vector:
    """Inverse of `to_klein`: p / sqrt(1 - |kappa| |p|^2)."""
    factor = 1 / sqrt(1 + kappa * dot(p, p))
    return lift([factor * value for value in p], kappa)


def jacobian(oracle: Oracle, arguments: Sequence[Vector], kappa: mpf) -> list[list[Vector]]:
    """Derivative of the oracle in every coordinate of every argument, and last in kappa.

    Central differences with a step of a third of the digits: what is left of them is exact to far
    more digits than any float holds. ``result[a][i]`` is d output / d (coordinate i of argument a);
    ``result[-1][0]`` is d output / d kappa.
    """
    rows: list[list[Vector]] = []
    step = mpf(10) ** -(mp.dps // 3)

    def slope(at: Callable[[mpf], Vector]) -> Vector:
        return [(b - a) / (2 * step) for a, b in zip(at(-step), at(step), strict=True)]

    for index, argument in enumerate(arguments):

        def moved(h: mpf, place: int, index: int = index, argument: Vector = argument) -> Vector:
            shifted = [*argument[:place], argument[place] + h, *argument[place + 1 :]]
            return oracle(*arguments[:index], shifted, *arguments[index + 1 :], kappa)

        rows.append([slope(lambda h, p=place: moved(h, p)) for place in range(len(argument))])
    rows.append([slope(lambda h: oracle(*arguments, kappa + h))])
    return rows
