"""Claims on linear maps far out: steps that they need, what charts stretch, and which maps have a constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from holonomy.layers import HTC, LorentzPLFC, TangentLinear
from holonomy.manifolds import Lorentz
from holonomy.theory.attention.lipschitz import lipschitz_bound
from holonomy.theory.certificates.far_out import (
    axis_steps,
    hyperplane_stretch,
    least_chart_stretch,
    transformation_steps,
)
from holonomy.theory.certificates.regions import root
from holonomy.theory.certificates.stretching import Ends, stretch
from holonomy.theory.claims.sharpest import unit_hyperboloid
from holonomy.theory.claims.statements.hyperbolic import draw_manifold, draw_radius, over_ball
from holonomy.theory.claims.verdict import Claims, Draws, Trial, filled, forked

_OURS = "LINEAR MAPS, "

CLAIMS = Claims()  #: claims on the steps that linear maps need far out, and on their constants

_WIDE = 4
# Steps are whole numbers, and the last one may pass the mark.
_WHOLE = 3.0


def _direction(draws: Draws) -> Tensor:
    return nn.functional.normalize(draws.normal(_WIDE), dim=-1)


def _at(manifold: Lorentz, direction: Tensor, rapidity: float) -> Tensor:
    return manifold.lift(direction * math.sinh(rapidity))


def _steps(layer: HTC | LorentzPLFC, x: Tensor, target: Tensor, near: float, rate: float, most: int) -> int:
    """Steps of gradient descent until the output is so near to the target, or the most."""
    manifold, parameters = layer.manifold_out, [p for p in layer.parameters() if p.requires_grad]
    for step in range(most):
        distance = manifold.dist(layer(x), target)
        if distance.item() <= near:
            return step
        for parameter, slope in zip(parameters, torch.autograd.grad(distance, parameters), strict=True):
            parameter.data.sub_(slope, alpha=rate)
    return most


@CLAIMS.add("linear_maps.steps", _OURS + "1", axis="rapidity", rounds=3)
def _transformation_law(draws: Draws, _: int) -> Iterable[Trial]:
    """Gradient descent takes HTC to rapidity R in (sinh 2R + 2R) / (4 eta (|X|^2 + 1)) steps, to three."""
    # HTC over a unit of a ray, to half a unit before the target, at rates that do not throw it off the ray.
    manifold, ray, end = unit_hyperboloid(draws), _direction(draws), draws.uniform(2.5, 3.3)
    x = _at(manifold, _direction(draws), draws.uniform(0.5, 2.0))
    square = x.square().sum().item()
    rate = draws.uniform(0.15, 0.3) / (square + 1)
    layer = filled(HTC(_WIDE, _WIDE, manifold, **draws.factory_kwargs), weight=0, bias=ray * math.sinh(end - 1))
    found = _steps(layer, x, _at(manifold, ray, end + 0.5), 0.5, rate, 1000)
    said = transformation_steps(end - 1, end, rate, square)
    yield Trial(abs(found - said), _WHOLE, at={"rapidity": end})


@CLAIMS.add("linear_maps.steps_on_an_axis", _OURS + "2", axis="rapidity", rounds=3)
def _axis_law(draws: Draws, _: int) -> Iterable[Trial]:
    """A hyperplane layer reaches rapidity R on an axis in steps that grow as log R, to three."""
    # A target on an axis, from rapidity rho, which the layer starts at, to half a unit before it.
    manifold, rapidity, end = unit_hyperboloid(draws), draws.uniform(0.5, 1.5), draws.uniform(3.0, 7.0)
    x = _at(manifold, _direction(draws), rapidity)
    rate = axis_steps(rapidity, end, 1.0, rapidity) / draws.uniform(100.0, 200.0)
    axis = torch.eye(_WIDE, **draws.factory_kwargs)[0]
    # One hyperplane at right angles to the input, the others where they give zero.
    layer = LorentzPLFC(_WIDE, _WIDE, manifold, bias=False, **draws.factory_kwargs)
    layer = filled(layer, hyperplanes__weight=torch.outer(axis, nn.functional.normalize(x[1:], dim=-1)))
    found = _steps(layer, x, _at(manifold, axis, end + 0.5), 0.5, rate, 1000)
    yield Trial(abs(found - axis_steps(rapidity, end, rate, rapidity)), _WHOLE, at={"rapidity": end})


@CLAIMS.add("linear_maps.steps_anywhere", "arXiv 2601.21529", "lower", expected=False, axis="rapidity", rounds=4)
def _any_direction(draws: Draws, index: int) -> Iterable[Trial]:
    """Hyperplane layers reach rapidity R in O(R) steps."""
    # Targets in random directions, the farthest first, at a rate of 0.05; allowed are twenty times those on an axis.
    manifold, end = unit_hyperboloid(draws), 5.0 - index % 4
    x = _at(manifold, _direction(draws), 1.0)
    with forked(draws.integer(0, 10**6)):
        layer = LorentzPLFC(_WIDE, _WIDE, manifold, **draws.factory_kwargs)
    linear = 5 * end / 0.05
    found = _steps(layer, x, _at(manifold, _direction(draws), end), 0.5, 0.05, math.ceil(1.5 * linear))
    note = f"not there after {found} steps at rapidity {end:g}, where a target on an axis takes 30"
    yield Trial(float(found), linear, at={"rapidity": end}, note=note if found > linear else "")


def _exponential_chart(v: Tensor) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    return v * (length.sinh() / length)


@CLAIMS.add("linear_maps.no_escape", _OURS + "3", axis="radius", rounds=12)
def _no_escape(draws: Draws, index: int) -> Iterable[Trial]:
    """Where the sphere of radius r goes around the ball of rapidity a, a chart stretches by sinh(a) / r."""
    # The largest stretch of three charts on spheres; the first two have no other, so the bound is attained.
    manifold = unit_hyperboloid(draws)
    charts: tuple[Callable[[Tensor], Tensor], ...] = (lambda v: v, _exponential_chart, torch.sinh)
    chart, radius, dim = charts[index % 3], draw_radius(draws, 6.0), draws.integer(2, 4)
    v = draws.normal(256, dim)
    v = torch.cat([v, torch.ones_like(v[:1])])
    v = radius * nn.functional.normalize(v, dim=-1)
    points = manifold.lift(chart(v))
    found = stretch(lambda z: manifold.lift(chart(z)), v, ends=Ends(None, manifold)).amax().item()
    least = least_chart_stretch(manifold.dist0(points).amin().item(), radius)
    yield Trial(least, found, at={"radius": radius})


@CLAIMS.add("linear_maps.not_lipschitz", _OURS + "4", axis="radius", rounds=6)
def _not_lipschitz(draws: Draws, _: int) -> Iterable[Trial]:
    """Two orthogonal hyperplanes of length s stretch their bisector by s cosh(sa) / cosh(a), without end."""
    manifold = unit_hyperboloid(draws)
    size, radius = draws.uniform(1.2, 2.0), draw_radius(draws)
    layer = LorentzPLFC(2, 2, manifold, bias=False, **draws.factory_kwargs)
    layer = filled(layer, hyperplanes__weight=size * torch.eye(2, dtype=torch.float64))
    x = _at(manifold, draws.normal(2).fill_(0.5**0.5), radius)
    found, said = stretch(layer, x[None]).item(), hyperplane_stretch(size, radius)
    yield Trial(found, said, at={"radius": radius})
    yield Trial(said, found, at={"radius": radius})


def _tangent_map(draws: Draws, weight: Tensor, bias: Tensor | None, ends: tuple[Lorentz, Lorentz]) -> TangentLinear:
    layer = TangentLinear(weight.shape[1], weight.shape[0], *ends, bias=bias is not None, **draws.factory_kwargs)
    return filled(layer, linear__weight=weight, linear__bias=bias)


def _sharpest_tangent_maps(draws: Draws) -> Iterable[Trial]:
    """Rotations times a number, at the rim across the ray and at the origin; shifts at the origin and far out."""
    manifold = unit_hyperboloid(draws)
    eye = torch.eye(2, **draws.factory_kwargs)
    for size, radius in ((0.8, 2.0), (1.0, 1.0), (1.6, 2.0)):
        layer = _tangent_map(draws, size * eye, None, (manifold, manifold))
        x = manifold.expmap0(nn.functional.pad(radius * eye[:1], (1, 0)))
        yield Trial(stretch(layer, x).item(), lipschitz_bound(layer, radius))
    for shift, radius, known in ((0.5, 0.01, 1.0), (3.0, 0.5, 0.96), (0.3, 2.0, 0.877)):
        layer = _tangent_map(draws, eye, shift * eye[1], (manifold, manifold))
        angle = torch.linspace(0, 2 * math.pi, 256, **draws.factory_kwargs)
        ring = torch.stack([torch.zeros_like(angle), angle.cos(), angle.sin()], dim=-1)
        found = max(
            stretch(layer, manifold.expmap0(radius * part * ring)).amax().item() for part in (0.25, 0.5, 0.75, 1.0)
        )
        yield Trial(found, lipschitz_bound(layer, radius), known=known)


@CLAIMS.add(
    "linear_maps.tangent", "CERTIFICATES, H14", "lower", axis="radius", sharpest=_sharpest_tangent_maps, rounds=8
)
def _tangent_maps(draws: Draws, index: int) -> Iterable[Trial]:
    """The constant of TangentLinear on balls; without bias it is attained."""
    # By ascent and by random points, with and without a bias; the image stays where distances keep their digits.
    ends = draw_manifold(draws), draw_manifold(draws)
    sizes, radius = (draws.integer(1, 4), draws.integer(1, 4)), draw_radius(draws, 3.0)
    weight = draws.normal(sizes[1], sizes[0])
    bias = draws.normal(sizes[1]) * draws.logarithmic(0.1, 1.0) if index % 2 else None
    # In unit coordinates between 0.2 and 2.
    norm = torch.linalg.matrix_norm(weight.double(), 2).item() * root(ends[1]) / root(ends[0])
    layer = _tangent_map(draws, weight * (draws.logarithmic(0.2, 2.0) / norm), bias, ends)
    yield from over_ball(draws, layer, radius, sizes[0])
