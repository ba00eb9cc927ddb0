"""Points, pairs and tangent vectors at exactly known places, rounded to a dtype.

Built in mpmath by the oracle's own exponential map, so that a pair meant to be 1e-6 apart at radius
30 is, and then rounded once, space part by space part. The oracle takes the rounded numbers as
exact: what is measured is the function, never the rounding of its input. A place that the dtype
cannot hold (distance 30 at kappa = -100 is exp(300)) yields nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from mpmath import mp, mpf, sqrt
from torch import Tensor

from tests.reference import manifold as oracle

RADII = (0.0, 1e-6, 1e-3, 0.1, 1.0, 3.0, 10.0, 30.0)
# In units of 1/sqrt|kappa|, up to the largest that float32 holds: beyond 44 the square overflows.
FAR = (20.0, 44.0, 60.0, 78.0, 87.0)
# Not 1: one unit outwards from far out, the derivative of the exponential map along the ray is zero.
SEPARATIONS = (0.0, 1e-6, 1e-4, 1e-2, 0.3, 1.25, 5.0, 20.0, 60.0)
KINDS = ("outward", "inward", "sideways", "random")


class Pair(NamedTuple):
    """Space parts of two points x, y and of the tangent vectors log_x(y) and another one at x."""

    label: str
    x: Tensor
    y: Tensor
    towards: Tensor
    other: Tensor


def rounded(space: oracle.Vector, dtype: torch.dtype) -> Tensor | None:
    """Round to the dtype, or return nothing where the dtype overflows."""
    if any(abs(value) > torch.finfo(dtype).max / 4 for value in space):
        return None
    return torch.tensor([float(value) for value in space], dtype=torch.float64).to(dtype)


def radii(kappa: float, dtype: torch.dtype) -> list[float]:
    """Distances from the origin to test: RADII, and FAR in curvature units."""
    scale = abs(kappa) ** 0.5
    limit = float(mp.log(torch.finfo(dtype).max))
    far = [*FAR, 200.0] if dtype == torch.float64 else FAR
    return [r for r in (*RADII, *(f / scale for f in far)) if r * scale < limit]


def rapidity(space: Tensor, kappa: float) -> float:
    """Distance from the origin in units of 1/sqrt|kappa|."""
    return float(torch.asinh(space.double().norm() * abs(kappa) ** 0.5))


def direction(dim: int, rng: random.Random, *, axis: bool) -> oracle.Vector:
    """Return a unit vector, along a coordinate axis or anywhere."""
    if axis:
        place, sign = rng.randrange(dim), rng.choice((-1, 1))
        return [mpf(sign) if i == place else mpf(0) for i in range(dim)]
    vector = [mpf(rng.gauss(0, 1)) for _ in range(dim)]
    length = sqrt(oracle.dot(vector, vector))
    return [value / length for value in vector]


def across(first: oracle.Vector, rng: random.Random, *, axis: bool) -> oracle.Vector:
    """Return a unit vector orthogonal to the given one, or along it where there is no other."""
    if len(first) == 1:
        return first
    while True:
        second = direction(len(first), rng, axis=axis)
        part = oracle.dot(first, second)
        second = [s - part * f for f, s in zip(first, second, strict=True)]
        length = sqrt(oracle.dot(second, second))
        if length > mpf("0.1"):
            return [value / length for value in second]


def place(
    kappa: float, radius: float, separation: float, kind: str, dim: int, seed: int, *, axis: bool
) -> tuple[oracle.Vector, oracle.Vector, oracle.Vector, oracle.Vector]:
    """Return x, y, log_x(y) and another tangent vector at x, unrounded, as space parts."""
    rng = random.Random(seed)
    curvature = mpf(kappa)
    radial = direction(dim, rng, axis=axis)
    sideways = across(radial, rng, axis=axis)
    x = oracle.expmap0([mpf(radius) * value for value in radial], curvature)[1:]
    # A tangent vector at x is carried from the origin, where lengths are Euclidean.
    weights = {"outward": (1, 0), "inward": (-1, 0), "sideways": (0, 1)}.get(kind)
    along, beside = weights or (mp.cos(seed), mp.sin(seed))

    def carried(a: mpf, b: mpf) -> oracle.Vector:
        at_origin = [a * r + b * s for r, s in zip(radial, sideways, strict=True)]
        return oracle.transp0(x, at_origin, curvature)[1:]

    towards = carried(mpf(separation) * along, mpf(separation) * beside)
    other = carried(mp.sin(seed + 1) * 2, mp.cos(seed + 1) * 2)
    return x, oracle.expmap(x, towards, curvature)[1:], towards, other


def pairs(kappa: float, dim: int, dtype: torch.dtype, *, thin: int = 1) -> Iterator[Pair]:
    """Yield pairs of one curvature and dimension: every ``thin``-th of the grid, and of specials."""
    stride = max(1, thin // 20)
    yield from (pair for i, pair in enumerate(specials(kappa, dim, dtype)) if i % stride == 0)
    places = [
        (radius, separation, kind, axis)
        for radius in radii(kappa, dtype)
        for separation in SEPARATIONS
        for kind in KINDS
        for axis in (True, False)
    ]
    for seed, (radius, separation, kind, axis) in enumerate(places):
        if (seed * 7 + dim) % thin:
            continue
        with mp.workdps(400):
            found = place(kappa, radius, separation, kind, dim, seed, axis=axis)
        tensors = [rounded(space, dtype) for space in found]
        if all(tensor is not None for tensor in tensors):
            label = f"r={radius:.3g} d={separation:g} {kind}{' axis' if axis else ''} dim={dim}"
            yield Pair(label, *tensors)


def specials(kappa: float, dim: int, dtype: torch.dtype) -> Iterator[Pair]:
    """Yield coincident, nearly coincident (a unit in the last place) and antipodal pairs."""
    generator = torch.Generator().manual_seed(dim)
    for radius in radii(kappa, dtype):
        for axis in (True, False):
            rng = random.Random(dim)
            with mp.workdps(400):
                step = [mpf(radius) * value for value in direction(dim, rng, axis=axis)]
                found = rounded(oracle.expmap0(step, mpf(kappa))[1:], dtype)
            if found is None:
                continue
            other = torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)
            nudged = found.clone()
            nudged[-1] = torch.nextafter(found[-1], torch.full_like(found[-1], 10.0))
            twins = {
                "coincident": found,
                "ulp": nudged,
                "ray": found * (1 + 2.0**-9),
                "antipodal": -found,
                "opposite": found * -0.375,
                "flip": found.flip(-1),
            }
            for name, y in twins.items():
                label = f"r={radius:.3g} {name}{' axis' if axis else ''} dim={dim}"
                yield Pair(label, found, y, y - found, other)
            mark = f"{' axis' if axis else ''} dim={dim}"
            for name, along in {"parallel": found * 0.25, "parallel and short": found * 2.0**-60}.items():
                yield Pair(f"r={radius:.3g} {name}{mark}", found, found * 2, along, found * -0.5)
