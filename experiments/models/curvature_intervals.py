r"""Curvatures of a product from noisy distances, each with an interval by its profile likelihood.

The model: :math:`D_{ij} = d(x_i, x_j) + \epsilon_{ij}` with independent normal errors of one unknown size. Positions,
curvatures and that size are unknown. With :math:`\theta_f` the distance in units of the radius :math:`r_f`, e a unit
tangent vector at :math:`x_i`, and :math:`s_f = \sinh, \sin` or the identity,

.. math:: d^2 = \sum_f r_f^2 \theta_f^2, \qquad
    \frac{\partial d}{\partial e} = -\frac{r_f^2 \theta_f}{d\, s_f(\theta_f)} \langle e, x_j \rangle, \qquad
    \frac{\partial d}{\partial \log r_f} = \frac{r_f^2 \theta_f^2}{d}.

Least squares by Levenberg and Marquardt's method. With :math:`\mathrm{RSS}(\kappa_f)` the least sum of squares where
one curvature is held, the interval is

.. math:: \{\kappa_f : \mathrm{RSS}(\kappa_f) - \mathrm{RSS}_{min} \le F_{1,\nu}(0.95)\, \mathrm{RSS}_{min}/\nu\},

:math:`\nu` the pairs less the free parameters, which are coordinates less the dimension of the isometries, and
curvatures. It is exact in the limit of small errors, where distances are linear in the parameters. The likelihood ratio
with :math:`\chi^2_1`, for which :math:`\nu` is the number of pairs, is too short by :math:`\sqrt{\nu/N}`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np
import scipy.stats
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Steps of a fit at most, and the relative gain below which it ends.
STEPS, GAIN = 300, 1e-7
# Random turns of the axes that a search of several factors begins with.
TURNS = 30
# How far from the estimate an end is looked for, in log r, beyond which it is infinite; and how exactly.
FARTHEST, CLOSE = 4.0, 0.01


@dataclasses.dataclass
class Fit:
    """Positions of unit curvature (n, ambient), log radii (factors,), and the sum of squares."""

    points: Array
    log_radii: Array
    rss: float = math.inf


@dataclasses.dataclass(frozen=True)
class Signature:
    """Factors as letters, H, E and S, each with its dimension, such as ``(("H", 2), ("S", 2))``."""

    factors: tuple[tuple[str, int], ...]

    @functools.cached_property
    def slices(self) -> list[slice]:
        """Where the ambient coordinates of each factor are."""
        ends = np.cumsum([0, *(dim + (kind != "E") for kind, dim in self.factors)])
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]

    @functools.cached_property
    def flat(self) -> NDArray[np.bool_]:
        """Which factors have no curvature."""
        return np.array([kind == "E" for kind, _ in self.factors])

    def freedom(self, points: int) -> int:
        """Pairs less free parameters."""
        dims = [dim for _, dim in self.factors]
        isometries = sum(dim * (dim + 1) // 2 for dim in dims)
        return points * (points - 1) // 2 - (points * sum(dims) - isometries) - int((~self.flat).sum())

    def lift(self, tangent: Array) -> Array:
        """Points (n, ambient) from normal coordinates (n, dim) around the origin of each factor."""
        parts: list[Array] = []
        for (kind, _), u in zip(
            self.factors, np.split(tangent, np.cumsum([d for _, d in self.factors])[:-1], axis=1), strict=True
        ):
            length = np.linalg.norm(u, axis=1, keepdims=True)
            sine, cosine = (np.sinh, np.cosh) if kind == "H" else (np.sin, np.cos)
            along = u * sine(length) / np.maximum(length, 1e-300)
            parts.append(u if kind == "E" else np.hstack([cosine(length), along]))
        return np.hstack(parts)


def _frames(kind: str, x: Array) -> Array:
    """Orthonormal tangent vectors at points (n, ambient), (n, dim, ambient): those of the origin, transported."""
    if kind == "E":
        return np.broadcast_to(np.eye(x.shape[1]), (len(x), x.shape[1], x.shape[1]))
    axes = np.eye(x.shape[1])[1:]
    if kind == "H":  # v + <x, v> (o + x) / (1 + x_t)
        middle = x + np.eye(x.shape[1])[0]
        return axes + (x[:, 1:] / (1 + x[:, :1]))[:, :, None] * middle[:, None]
    # On the sphere by Householder's reflection of an axis of the same half, which has no singular point.
    sign = np.where(x[:, :1] < 0, -1.0, 1.0)
    middle = x + sign * np.eye(x.shape[1])[0]
    return axes - (x[:, 1:] / (1 + sign * x[:, :1]))[:, :, None] * middle[:, None]


def _angles(kind: str, x: Array, y: Array) -> tuple[Array, Array]:
    """Distances of unit curvature, and themselves over their sinh or sine."""
    apart = x - y
    if kind == "E":
        return np.linalg.norm(apart, axis=1), np.ones(len(x))
    if kind == "H":
        angle = 2 * np.arcsinh(np.sqrt(np.maximum((apart[:, 1:] ** 2).sum(1) - apart[:, 0] ** 2, 0)) / 2)
        return angle, angle / np.sinh(np.maximum(angle, 1e-9)) + (angle < 1e-9)
    angle = 2 * np.arctan2(np.linalg.norm(apart, axis=1), np.linalg.norm(x + y, axis=1))
    return angle, angle / np.maximum(np.sin(angle), 1e-9) + (angle < 1e-9)


def distances(signature: Signature, fit: Fit, *, slopes: bool = False) -> tuple[Array, Array]:
    """Of all pairs, (p,), and derivatives by tangent coordinates and log radii, (p, n dim + factors)."""
    n = len(fit.points)
    i, j = np.triu_indices(n, 1)
    squares: list[Array] = []
    parts: list[list[Array]] = []
    for (kind, _), part, log_r in zip(signature.factors, signature.slices, fit.log_radii, strict=True):
        x = fit.points[:, part]
        angle, ratio = _angles(kind, x[i], x[j])
        square = math.exp(2 * log_r)
        squares.append(square * angle**2)
        if slopes:
            frame, metric = _frames(kind, x), np.ones(x.shape[1])
            metric[0] = -1.0 if kind == "H" else 1.0
            minus = -square * ratio[:, None]
            towards = x[j] - x[i] if kind == "E" else x[j]
            back = -towards if kind == "E" else x[i]
            parts.append([minus * np.einsum("pka,pa->pk", frame[a], metric * b) for a, b in ((i, towards), (j, back))])
    found = np.sqrt(sum(squares))
    if not slopes:
        return found, found
    dim, rows = sum(d for _, d in signature.factors), np.arange(len(i))
    over = 1 / np.maximum(found, 1e-12)[:, None]
    out = np.zeros((len(i), n, dim))
    out[rows, i] = np.hstack([near for near, _ in parts]) * over
    out[rows, j] = np.hstack([far for _, far in parts]) * over
    return found, np.hstack([out.reshape(len(i), -1), np.stack(squares, 1) * over])


def _moved(signature: Signature, fit: Fit, step: Array) -> Fit:
    """Along geodesics."""
    n, factors = len(fit.points), len(signature.factors)
    steps, new, begin = step[:-factors].reshape(n, -1), fit.points.copy(), 0
    for (kind, dim), part in zip(signature.factors, signature.slices, strict=True):
        x = fit.points[:, part]
        u = np.einsum("nk,nka->na", steps[:, begin : begin + dim], _frames(kind, x))
        length = np.linalg.norm(steps[:, begin : begin + dim], axis=1, keepdims=True)
        begin += dim
        if kind == "E":
            new[:, part] = x + u
            continue
        sine, cosine = (np.sinh, np.cosh) if kind == "H" else (np.sin, np.cos)
        y = x * cosine(length) + u * sine(length) / np.maximum(length, 1e-300)
        if kind == "H":
            y[:, 0] = np.sqrt(1 + (y[:, 1:] ** 2).sum(1))
        new[:, part] = y if kind == "H" else y / np.linalg.norm(y, axis=1, keepdims=True)
    return Fit(new, fit.log_radii + step[-factors:])


def fitted(signature: Signature, wanted: Array, start: Fit, held: NDArray[np.bool_], steps: int = STEPS) -> Fit:
    """Least squares from a start; log radii that are held (factors,) stay."""
    now, damping, factors = start, 1e-3, len(signature.factors)
    now.rss = float(((distances(signature, now)[0] - wanted) ** 2).sum())
    for _ in range(steps):
        found, slopes = distances(signature, now, slopes=True)
        slopes[:, -factors:][:, held] = 0.0
        square, gradient = slopes.T @ slopes, slopes.T @ (found - wanted)
        scale = np.maximum(np.diag(square), 1e-9)
        gained = 0.0
        while damping < 1e9:
            step = -np.linalg.solve(square + np.diag(damping * scale), gradient)
            # A longer step leaves where distances are linear.
            step *= min(1.0, 1.0 / float(np.abs(step).max()))
            other = _moved(signature, now, step)
            other.rss = float(((distances(signature, other)[0] - wanted) ** 2).sum())
            if other.rss < now.rss:
                gained, now, damping = 1 - other.rss / now.rss, other, max(damping / 10, 1e-9)
                break
            damping *= 4
        if gained < GAIN:
            break
    return now


def scaled(wanted: Array, points: int, axes: int) -> Array:
    """Classical multidimensional scaling: flat coordinates (n, axes), the longest axis first."""
    squares = np.zeros((points, points))
    squares[np.triu_indices(points, 1)] = wanted**2
    squares += squares.T
    centred = squares - squares.mean(0) - squares.mean(1)[:, None] + squares.mean()
    values, vectors = np.linalg.eigh(-centred / 2)
    return (vectors * np.sqrt(np.maximum(values, 0)))[:, ::-1][:, :axes]


def starts(signature: Signature, wanted: Array, points: int) -> Iterator[Fit]:
    """The axes of flat scaling, given to the factors in each way, and turned at random."""
    sizes = [dim + (kind == "S") for kind, dim in signature.factors]
    flat = scaled(wanted, points, sum(sizes))
    rng = np.random.default_rng(0)

    def shared(left: tuple[int, ...], number: int) -> Iterator[tuple[int, ...]]:
        if number == len(sizes):
            yield ()
            return
        for chosen in itertools.combinations(left, sizes[number]):
            rest = tuple(axis for axis in left if axis not in chosen)
            yield from (chosen + more for more in shared(rest, number + 1))

    for order in shared(tuple(range(sum(sizes))), 0):
        yield _start(signature, flat[:, order], sizes)
    for _ in range(TURNS if len(sizes) > 1 else 1):
        yield _start(signature, flat @ scipy.stats.ortho_group.rvs(sum(sizes), random_state=rng), sizes)


def _start(signature: Signature, flat: Array, sizes: list[int]) -> Fit:
    """Points whose factors have consecutive axes, as normal coordinates or, on spheres, directions, and their radii."""
    points, radii = [], []
    for (kind, dim), part in zip(signature.factors, np.split(flat, np.cumsum(sizes)[:-1], axis=1), strict=True):
        length = np.linalg.norm(part, axis=1, keepdims=True)
        radius = 1.0 if kind == "E" else math.sqrt(float((length**2).mean()))
        radii.append(math.log(radius))
        lifted = Signature(((kind, dim),)).lift(part / radius) if kind == "H" else part
        points.append(part / np.maximum(length, 1e-12) if kind == "S" else lifted)
    return Fit(np.hstack(points), np.array(radii))


def replaced(signature: Signature, wanted: Array, best: Fit) -> Fit:
    """The points that fit worst, set where others are, each factor by itself, and fitted again: what helps stays."""
    n = len(best.points)
    i, j = np.triu_indices(n, 1)
    for _ in range(n):
        off, target = np.zeros((n, n)), np.zeros((n, n))
        off[i, j] = (distances(signature, best)[0] - wanted) ** 2
        target[i, j] = wanted
        off, target = off + off.T, target + target.T
        squares: list[Array] = []
        for (kind, _), part, log_r in zip(signature.factors, signature.slices, best.log_radii, strict=True):
            x = best.points[:, part]
            angles = _angles(kind, x.repeat(n, 0), np.tile(x, (n, 1)))[0].reshape(n, n)
            squares.append(math.exp(2 * log_r) * angles**2)
        before = best.rss
        for point in np.argsort(-off.sum(0))[:4]:
            kept = np.arange(n) != point
            # Squared distances of the others from each choice of places: one axis a factor, then the others.
            total = functools.reduce(lambda a, b: a[..., None, :] + b, [square[:, kept] for square in squares])
            worth = ((np.sqrt(total) - target[point, kept]) ** 2).sum(-1)
            chosen = np.unravel_index(int(worth.argmin()), worth.shape)
            points = best.points.copy()
            for place, part in zip(chosen, signature.slices, strict=True):
                points[point, part] = best.points[place, part]
            other = fitted(signature, wanted, Fit(points, best.log_radii), signature.flat)
            if other.rss < (1 - 1e-4) * best.rss:
                best = other
                break
        if best.rss == before:
            break
    return best


def begun(signature: Signature, wanted: Array, points: int) -> list[Fit]:
    """A few steps from each start, the best first."""
    found = [fitted(signature, wanted, start, signature.flat, 8) for start in starts(signature, wanted, points)]
    return sorted(found, key=lambda fit: fit.rss)


def best_fit(signature: Signature, wanted: Array, points: int) -> Fit:
    """The best of all starts: a few steps from each, to the end from the four best, single points set elsewhere."""
    ends = [fitted(signature, wanted, fit, signature.flat) for fit in begun(signature, wanted, points)[:4]]
    return min((replaced(signature, wanted, fit) for fit in ends), key=lambda fit: fit.rss)


def held_at(signature: Signature, wanted: Array, near: Fit, factor: int, log_r: float) -> Fit:
    """The best fit with one radius held, from a fit with nearly that radius."""
    held = signature.flat | (np.arange(len(signature.factors)) == factor)
    log_radii = near.log_radii.copy()
    log_radii[factor] = log_r
    return fitted(signature, wanted, Fit(near.points, log_radii), held)


def interval(signature: Signature, wanted: Array, best: Fit, factor: int, level: float = 0.95) -> tuple[float, float]:
    """Of the log radius of a factor: where the profile of the sum of squares crosses its limit, or infinite ends."""
    nu, centre = signature.freedom(len(best.points)), float(best.log_radii[factor])
    height = math.sqrt(best.rss * float(scipy.stats.f.ppf(level, 1, nu)) / nu)
    _, slopes = distances(signature, best, slopes=True)
    free = np.delete(slopes, slopes.shape[1] - len(signature.flat) + np.flatnonzero(signature.flat), axis=1)
    index = free.shape[1] - int((~signature.flat[factor:]).sum())
    # By the linear model: the inverse of the normal matrix, without its directions of isometries.
    step = height * math.sqrt(np.linalg.pinv(free.T @ free, rcond=1e-9, hermitian=True)[index, index])
    low, high = (centre + _crossing(signature, wanted, best, factor, sign * step, height) for sign in (-1, 1))
    return low, high


def _crossing(signature: Signature, wanted: Array, best: Fit, factor: int, first: float, height: float) -> float:
    """The step at which the root of the excess, which is nearly linear in it, is the height: by regula falsi."""
    now, sign, near, far = best, math.copysign(1.0, first), 0.0, math.inf
    below, above, step = -height, math.inf, min(abs(first), FARTHEST / 2)
    for _ in range(20):
        now = held_at(signature, wanted, now, factor, float(best.log_radii[factor]) + sign * step)
        over = math.sqrt(max(now.rss - best.rss, 0.0)) - height
        if abs(over) < CLOSE * height:
            break
        if over < 0:
            if step >= FARTHEST:
                return sign * math.inf
            near, below = step, over
        else:
            far, above = step, over
        if math.isinf(far):
            step = min(FARTHEST, 1.1 * step * height / max(over + height, height / 4))
        else:
            step = near - below * (far - near) / (above - below)
    return sign * step
