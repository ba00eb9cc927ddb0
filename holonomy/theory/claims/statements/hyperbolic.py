r"""Claims on the constants of hyperbolic layers that take each point by itself, and of midpoints: H1 to H7, H11, H13.

Measured values are stretches found by ascent over a ball, or distances of images: lower bounds of the constants. Points
stay where float64, or float32, keeps the digits of a distance: space parts up to 75, or up to 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy.layers import HRC, HTC, HypActivation, HypDropout, HypLayerNorm, HypMLR, HypPositionalEncoding
from holonomy.manifolds import Lorentz
from holonomy.theory.attention.lipschitz import lipschitz_bound
from holonomy.theory.certificates.constants.affine import affine_stretch, ball_stretch
from holonomy.theory.certificates.constants.midpoint import exponential_stretch, weights_bound
from holonomy.theory.certificates.regions import root
from holonomy.theory.certificates.stretching import Ends, Metric, ends_of, measure_stretch, stretch
from holonomy.theory.claims import sharpest
from holonomy.theory.claims.verdict import Claims, Draws, Trial, filled, rounding

_OURS = "CERTIFICATES, "

_Affine = TypeVar("_Affine", HTC, nn.Linear)

CLAIMS = Claims()  #: claims on layers that take each point by itself, and on midpoints


def draw_manifold(draws: Draws) -> Lorentz:
    """Draw a hyperboloid, of curvature between -4 and -1/4."""
    return Lorentz(-draws.logarithmic(0.25, 4.0), **draws.factory_kwargs)


def draw_radius(draws: Draws, largest: float = 5.0) -> float:
    """Draw the radius of a ball, in unit coordinates: in float32 at most 2, where squares keep their digits."""
    return draws.logarithmic(0.05, min(largest, 2.0) if draws.dtype == torch.float32 else largest)


def draw_points(draws: Draws, manifold: Lorentz, radius: float, *shape: int) -> Tensor:
    """Draw points of a ball, half of them on its sphere."""
    u = draws.normal(*shape)
    length = torch.rand(*shape[:-1], 1, generator=draws.generator, dtype=torch.float64).to(u)
    length = radius / root(manifold) * (2 * length).clamp(max=1)
    return manifold.expmap0(functional.pad(length * u / u.norm(dim=-1, keepdim=True), (1, 0)))


def worst(
    draws: Draws, layer: nn.Module, radius: float, features: int, *, tokens: int | None = None, metric: Metric = "sup"
) -> float:
    """Let a few points climb, in the layer's own distances: the largest stretch found."""
    starts, steps = 4, 24 if tokens is None else 10
    how: dict[str, Any] = {"tokens": tokens, "metric": metric, "generator": draws.generator}
    return measure_stretch(layer, radius, features, starts=starts, steps=steps, **how)


def over_ball(
    draws: Draws,
    layer: nn.Module,
    radius: float,
    features: int,
    bound: float | None = None,
    *,
    tokens: int | None = None,
    metric: Metric = "sup",
    at: Mapping[str, float] | None = None,
) -> Iterator[Trial]:
    """Compare a constant, a layer's own on the ball if left out, with what an ascent finds and with random points."""
    source = cast("Lorentz", ends_of(layer).source)
    ball, at = radius / root(source), {"radius": radius} if at is None else at
    if bound is None:
        bound = lipschitz_bound(layer, ball, tokens=tokens, metric=metric, features=features)
    yield Trial(worst(draws, layer, ball, features, tokens=tokens, metric=metric), bound, at=at)
    # Points cost little beside the ascents of the same layer.
    times = 1 if draws.budget <= 1 else 4
    shape = (128 * times, features) if tokens is None else (48 * times, tokens, features)
    x = draw_points(draws, source, radius, *shape)
    for value in stretch(layer, x, joint=tokens is not None, metric=metric).tolist():
        yield Trial(value, bound, at=at)


def _drawn(draws: Draws, layer: _Affine) -> _Affine:
    """The layer with normal weights, and a bias if it has one, each of a size of its own."""
    for parameter in layer.parameters(recurse=False):  # the weight comes first
        parameter.data.copy_(draws.normal(*parameter.shape) * draws.logarithmic(0.1, 2.0))
    return layer


def draw_transformation(draws: Draws, sizes: tuple[int, int], source: Lorentz, target: Lorentz, *, bias: bool) -> HTC:
    """HTC with normal weights, its time column included."""
    return _drawn(draws, HTC(*sizes, source, target, bias=bias, **draws.factory_kwargs))


def _sizes(draws: Draws) -> tuple[int, int]:
    return draws.integer(1, 4), draws.integer(1, 4)


@CLAIMS.add("hyperbolic.refinement", _OURS + "H1", "lower", sharpest=sharpest.refinements, rounds=16)
def _refinements(draws: Draws, index: int) -> Iterable[Trial]:
    """The constant of HRC with an affine map."""
    # HRC of affine maps on balls: by ascent, and everywhere where the proof says that the supremum is attained.
    source, target = draw_manifold(draws), draw_manifold(draws)
    sizes, radius = _sizes(draws), draw_radius(draws)
    linear = _drawn(draws, nn.Linear(*sizes, bias=index % 3 > 0, **draws.factory_kwargs))
    layer = HRC(linear, source, target)
    if index % 2:
        yield _at_the_maximum(layer, linear, source)
    else:
        yield from over_ball(draws, layer, radius, sizes[0])


def _at_the_maximum(layer: HRC, linear: nn.Linear, source: Lorentz) -> Trial:
    """The stretch where a = f.w is the top eigenvector's: the global constant itself, if the point is within reach."""
    unit = root(source)
    weight, bias = linear.weight.detach().double(), cast("Tensor | None", linear.bias)
    bias = torch.zeros_like(weight[:, 0]) if bias is None else bias.detach().double() * unit
    matrix = torch.cat([torch.cat([weight, bias[:, None]], 1), torch.eye(weight.shape[1] + 1).to(weight)[-1:]], 0)
    top = torch.linalg.svd(matrix).U[:, 0]
    w, a = top[:-1], -top[-1]
    pulled = weight.mT @ w
    x = pulled * ((-a - bias @ w) / pulled.square().sum()) if pulled.norm() > 0 else pulled
    near = x.norm().item() < (75 if linear.weight.dtype == torch.float64 else 4)
    if not near:
        return Trial(0.0, lipschitz_bound(layer), assumption_met=False)
    point = source.lift((x / unit).to(linear.weight.dtype))
    return Trial(stretch(layer, point).item(), lipschitz_bound(layer))


@CLAIMS.add("hyperbolic.transformation", _OURS + "H2", "lower", rounds=10)
def _transformations(draws: Draws, index: int) -> Iterable[Trial]:
    """The constant of HTC, on balls and all of space."""
    source, target = draw_manifold(draws), draw_manifold(draws)
    sizes, radius = _sizes(draws), draw_radius(draws)
    layer = draw_transformation(draws, sizes, source, target, bias=index % 2 > 0)
    found = list(over_ball(draws, layer, radius, sizes[0]))
    yield from found
    # Never above the constant of all of space, either.
    yield Trial(found[0].measured, lipschitz_bound(layer), at={"radius": radius})


@CLAIMS.add("hyperbolic.about", _OURS + "H2'", "lower", axis="distance", sharpest=sharpest.about_points, rounds=20)
def _about_points(draws: Draws, index: int) -> Iterable[Trial]:
    """The stretch of HTC about a point."""
    source, target = draw_manifold(draws), draw_manifold(draws)
    sizes = _sizes(draws)
    layer = draw_transformation(draws, sizes, source, target, bias=index % 2 > 0)
    x = draw_points(draws, source, draw_radius(draws, 3.0), 64, sizes[0])
    step = source.proju(x, draws.normal(*x.shape))
    # As far as the stretch at the other point keeps its digits, too.
    length = draws.logarithmic(0.01, 0.5 if draws.dtype == torch.float32 else 2.0) / root(source)
    y = source.expmap(x, length * step / source.inner(x, step).sqrt()[..., None])
    apart = (source.dist(x, y) * root(source)).tolist()
    unit = root(target) / root(source)
    here, there = (stretch(layer, z) * unit for z in (x, y))
    shift = 0.0 if index % 2 == 0 else cast("Tensor", layer.bias).detach().norm().item() * root(source)
    for a, b, r in zip(here.tolist(), there.tolist(), apart, strict=True):
        yield Trial(b, ball_stretch(a, shift, r), at={"distance": r})


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    functional.leaky_relu,
    torch.tanh,
    functional.gelu,
    functional.silu,
    functional.elu,
    functional.softplus,
)


@CLAIMS.add("hyperbolic.activation", _OURS + "H3", "lower", axis="features", sharpest=sharpest.activations, rounds=14)
def _activations(draws: Draws, index: int) -> Iterable[Trial]:
    """The constants of activations."""
    source, target = draw_manifold(draws), draw_manifold(draws)
    features, radius = draws.integer(1, 8), draw_radius(draws)
    layer = HypActivation(ACTIVATIONS[index % len(ACTIVATIONS)], source, target)
    yield from over_ball(draws, layer, radius, features, at={"features": float(features)})


@CLAIMS.add("hyperbolic.dropout", _OURS + "H1", "lower", sharpest=sharpest.dropouts, rounds=6)
def _projections(draws: Draws, index: int) -> Iterable[Trial]:
    """Projections have 1, dropout in training 1/(1-p)."""
    source = draw_manifold(draws)
    features, radius, bound = draws.integer(2, 6), draw_radius(draws), None
    if index % 2:
        rate = draws.uniform(0.1, 0.8)
        kept = torch.rand(features, generator=draws.generator) >= rate
        kept[0] = True  # a constant map would say nothing
        keep = kept.to(draws.device, draws.dtype) / (1 - rate)
        bound = lipschitz_bound(HypDropout(rate, source).train(), radius / root(source))
        layer: nn.Module = HRC(lambda s: s * keep, source)
    else:
        layer = HypDropout(0.5, source).eval()
    yield from over_ball(draws, layer, radius, features, bound)


@CLAIMS.add("hyperbolic.layer_norm", _OURS + "H4", "lower", axis="eps", sharpest=sharpest.layer_norms, rounds=8)
def _layer_norms(draws: Draws, index: int) -> Iterable[Trial]:
    """The constant of LayerNorm."""
    source, target = draw_manifold(draws), draw_manifold(draws)
    features, radius = draws.integer(2, 6), draw_radius(draws)
    affine = index % 2 > 0
    eps = draws.logarithmic(1 / 1000 if draws.dtype == torch.float64 else 1 / 100, 1.0)
    layer = HypLayerNorm(features, source, target, eps=eps, elementwise_affine=affine, **draws.factory_kwargs)
    if affine:
        filled(layer, function__norm__weight=draws.normal(features), function__norm__bias=draws.normal(features))
    yield from over_ball(draws, layer, radius, features, at={"eps": eps})


@CLAIMS.add("hyperbolic.midpoint", _OURS + "H5", rounds=20)
def _midpoints(draws: Draws, _: int) -> Iterable[Trial]:
    """A midpoint moves no farther than its farthest point."""
    manifold, count, features = draw_manifold(draws), draws.integer(2, 6), draws.integer(1, 4)
    radius = draw_radius(draws, 3.0)
    x = draw_points(draws, manifold, radius, 32, count, features)
    step = draws.normal(*x.shape) * draws.logarithmic(0.01, 1.0)
    y = manifold.expmap(x, manifold.proju(x, step))
    weights = draws.normal(32, 1, count).exp()
    moved = manifold.dist(manifold.centroid(x, weights), manifold.centroid(y, weights)).flatten()
    for value, bound in zip(moved.tolist(), manifold.dist(x, y).amax(-1).tolist(), strict=True):
        yield Trial(value, bound, floor=_floor(draws, radius))


@CLAIMS.add("hyperbolic.weights", _OURS + "H6", rounds=30)
def _weights(draws: Draws, index: int) -> Iterable[Trial]:
    """How far a midpoint moves with its weights."""
    # Random points and weights, and the two points at which the bound is attained.
    radius, count = draw_radius(draws, 3.0), draws.integer(2, 6)
    manifold = sharpest.unit_hyperboloid(draws)
    if index % 3:
        x = draw_points(draws, manifold, radius, 32, count, draws.integer(1, 4))
        first, second = draws.normal(2, 32, count) * draws.logarithmic(0.1, 3.0)
    else:
        ends = torch.tensor([[math.sinh(radius)], [-math.sinh(radius)]])
        x = manifold.lift(ends.to(draws.dtype).to(draws.device))[None]
        first = torch.tensor([[1.0, -1.0]]).to(x) * draws.logarithmic(0.1, 2.0)
        second = -first
    a, b = (manifold.centroid(x, w.exp()[:, None]).squeeze(-2) for w in (first, second))
    change = first - second
    spread = (change.amax(-1) - change.amin(-1)).tolist()
    diameters = manifold.cdist(x, x).amax((-2, -1)).tolist()
    for moved, wide, osc in zip(manifold.dist(a, b).tolist(), diameters, spread, strict=True):
        yield Trial(moved, weights_bound(wide, osc), floor=_floor(draws, radius))


def _floor(draws: Draws, radius: float) -> float:
    return rounding(draws.dtype) * math.cosh(radius)


@CLAIMS.add("hyperbolic.residual", _OURS + "H7", "lower", axis="epsilon", sharpest=sharpest.residuals, rounds=6)
def _positions(draws: Draws, _: int) -> Iterable[Trial]:
    """The constant of a residual connection."""
    manifold, features, radius = draw_manifold(draws), draws.integer(1, 4), draw_radius(draws, 3.0)
    epsilon = draws.logarithmic(0.2, 5.0)
    layer = HypPositionalEncoding(features, manifold, epsilon=epsilon, **draws.factory_kwargs)
    layer.position = draw_transformation(draws, (features, features), manifold, manifold, bias=True)
    yield from over_ball(draws, layer, radius, features, at={"epsilon": epsilon})


@CLAIMS.add("hyperbolic.ends", _OURS + "H11", "lower", axis="radius", sharpest=sharpest.concatenations, rounds=12)
def _ends(draws: Draws, index: int) -> Iterable[Trial]:
    """Exponential map, concatenation, cut."""
    manifold, features, radius = draw_manifold(draws), draws.integer(2, 4), draw_radius(draws, 3.0)
    if index % 3 == 0:
        u = draws.normal(64, features)
        u = radius / root(manifold) * u / u.norm(dim=-1, keepdim=True)
        found = stretch(lambda v: manifold.expmap0(functional.pad(v, (1, 0))), u, ends=Ends(None, manifold))
        for value in found.tolist():
            yield Trial(value, exponential_stretch(radius), at={"radius": radius})
    elif index % 3 == 1:
        pair = sharpest.Pair(manifold)
        bound = lipschitz_bound(pair.concat, radius / root(manifold))
        yield from over_ball(draws, pair, radius, features, bound, tokens=2, metric="l2")
    else:
        x = draw_points(draws, manifold, radius, 64, 2 * features)

        def halves(z: Tensor) -> Tensor:
            return manifold.lift(manifold.space(z.squeeze(-2)).unflatten(-1, (2, -1)))

        for value in stretch(halves, x[:, None], ends=Ends(manifold, manifold), joint=True).tolist():
            yield Trial(value, math.sqrt(2), at={"radius": radius})


@CLAIMS.add("hyperbolic.classifier", _OURS + "H13", "lower", axis="radius", sharpest=sharpest.classifiers, rounds=6)
def _classifiers(draws: Draws, _: int) -> Iterable[Trial]:
    """The constant of HypMLR is |Z|_F."""
    manifold, features, radius = draw_manifold(draws), draws.integer(1, 4), draw_radius(draws)
    layer = HypMLR(features, draws.integer(1, 4), manifold, **draws.factory_kwargs)
    layer = filled(layer, weight=draws.normal(*layer.weight.shape), offset=draws.normal(*layer.offset.shape))
    yield from over_ball(draws, layer, radius, features)


@CLAIMS.add("hyperbolic.bias", _OURS + "H1", rounds=20)
def _bias(draws: Draws, _: int) -> Iterable[Trial]:
    """A shift by b has the constant e^arsinh(|b|/2)."""
    b = draws.normal(draws.integer(1, 4)) * draws.logarithmic(0.1, 3.0)
    value = affine_stretch(torch.eye(len(b)).to(b), b)
    printed = math.exp(math.asinh(b.norm().item() / 2))
    yield Trial(value, printed)
    yield Trial(printed, value)
