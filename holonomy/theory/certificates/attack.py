"""A search for the two inputs that a map moves apart the most.

Pairs climb the ratio of their distances after and before the map, many at once. A pair is a point x and a tangent
vector v at it, in the frame transported from the origin: steps are in the metric, as long far out as near the origin.
Pairs start where constants tend to be attained: tokens on the rim and inside, alike, one against the others or
independent; differences along few channels or all, of one token or all, short and long. The best of them climb again,
with their differences and with ten and a hundred times shorter ones. What rounding can have added to a ratio is
subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Float
from holonomy.manifolds import Lorentz
from holonomy.theory.certificates.regions import root, rounding
from holonomy.theory.certificates.stretching import Ends, Metric, differential, top, unit_time

Function = Callable[[Tensor], Tensor]

# How many units of the last digit one evaluation and one distance may be off.
_DIGITS = 64
# The shortest lengths and differences to start from, as shares of the ball's radius.
_SHORTEST = 0.01
_SHRINK = (1.0, 0.1, 0.01)
# Of the climb of a pair.
_STEPS = 8


class Attack(NamedTuple):
    """The pair of inputs that a search found a map to move apart the most."""

    ratio: float  # of the distances after and before, less what rounding can have added; at an input the stretch itself
    x: Tensor  # one input, (tokens, dim)
    y: Tensor  # the other; at an input a point next to it, in the direction of the largest stretch

    def refutes(self, bound: float) -> bool:
        """Whether the pair is moved apart by more than a bound allows, beyond float32 digits, and by 1e-10 at least."""
        return self.ratio > bound * (1 + numerics.CHECK_TOLERANCE) + numerics.CHECK_TOLERANCE**2


class _Space:
    """Euclidean space (``None``) or a hyperboloid; vectors at a point are in the frame transported from the origin."""

    def __init__(self, manifold: Lorentz | None) -> None:
        self.manifold = manifold
        self.unit = 1.0 if manifold is None else root(manifold)

    def move(self, x: Tensor, v: Tensor) -> Tensor:
        """The exponential map at the origin, moved to x by a boost."""
        if self.manifold is None:
            return x + v
        length = _length(v * self.unit)
        space = _boost(x[..., 1:] * self.unit, v * self.unit * (length.sinh() / length))
        return torch.cat([unit_time(space), space], -1) / self.unit

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """The vector that moves x to y; far out to fewer digits than a distance has, which a search does not need."""
        if self.manifold is None:
            return y - x
        sinh = _boost(-x[..., 1:] * self.unit, y[..., 1:] * self.unit)
        length = _length(sinh)
        return sinh * (length.asinh() / length) / self.unit

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return numerics.norm(y - x) if self.manifold is None else self.manifold.dist(x, y)

    def shaken(self, x: Tensor, signs: Tensor) -> Tensor:
        """The point with its last digits changed."""
        factor = 1 + 4 * torch.finfo(x.dtype).eps * signs
        return x * factor if self.manifold is None else self.manifold.lift(self.manifold.space(x) * factor)

    def noise(self, x: Tensor) -> Tensor:
        """How far rounding can move each token: the last digit of the largest coordinate, and more."""
        # Hyperbolic layers subtract the time coordinate from one of space (HypMLR), or from the length of space parts
        # (midpoints): of two numbers of size e^r there remains e^-r, of which the last digit is e^2r times as large. In
        # floating point such a map is a step function, with steps wider than a few digits of x, and a search finds the
        # two sides of a step.
        digits = _DIGITS * torch.finfo(x.dtype).eps
        return digits * (
            x.norm(dim=-1) if self.manifold is None else self.manifold.time(x).squeeze(-1) ** 2 * self.unit
        )


def _length(v: Tensor) -> Tensor:
    """Positive, with slope zero at zero."""
    return numerics.positive(v.square().sum(-1, keepdim=True)).sqrt()


def _boost(x: Tensor, y: Tensor) -> Tensor:
    """Space parts y moved by the boost that takes the origin to x, at curvature -1."""
    return y + x * (unit_time(y) + (x * y).sum(-1, keepdim=True) / (1 + unit_time(x)))


@dataclass(frozen=True)
class Scope:
    """Inputs among which a pair is searched: tokens within a radius of those of a centre."""

    ends: Ends  # between which spaces the map leads
    metric: Metric  # of configurations of tokens
    centre: Float[Tensor, "tokens dim"]  # (tokens, dim), in float64
    radius: float  # of the balls about its tokens, in the distance where the map starts


def attack_at(function: Function, scope: Scope) -> Attack:
    """The stretch of a map at an input, the scope's centre, with a point next to it in the direction of the largest."""
    x, (source, target) = scope.centre, scope.ends
    size, _, direction = top(differential(function, x, scope.ends, joint=True), scope.metric)
    with torch.no_grad():
        rapidities = [
            manifold.dist0(z).amax().item() * root(manifold)
            for manifold, z in ((source, x), (target, function(x)))
            if manifold is not None
        ]
        near = _Space(source).move(x, direction * numerics.CHECK_TOLERANCE)
    # Where the differential is not finite there is no stretch to show.
    ratio = size.item() / rounding(max(rapidities, default=0.0)) if size.isfinite() else 0.0
    return Attack(ratio, x, near)


def attack(function: Function, scope: Scope, generator: torch.Generator, *, starts: int) -> Attack:
    """Search for the pair of inputs that a map moves apart the most."""
    hunt = _Hunt(function, scope)
    first = hunt.climb(*hunt.starts(generator, starts))
    again = first.best(max(1, starts // 16))
    v = torch.cat([hunt.source.between(again.x, again.y) * share for share in _SHRINK])
    second = hunt.climb(again.x.repeat(len(_SHRINK), 1, 1), v)
    pairs = _Pairs(*(torch.cat(parts) for parts in zip(first, second, strict=True))).best(starts)
    ratio = hunt.sure(pairs, generator)
    winner = int(ratio.argmax())
    return Attack(ratio[winner].item(), pairs.x[winner], pairs.y[winner])


class _Pairs(NamedTuple):
    """Pairs of configurations with the ratios of their distances."""

    ratio: Tensor
    x: Tensor
    y: Tensor

    def best(self, count: int) -> _Pairs:
        chosen = self.ratio.argsort(descending=True)[:count]
        return _Pairs(*(part[chosen] for part in self))


class _Hunt:
    """A map and where it is searched."""

    def __init__(self, function: Function, scope: Scope) -> None:
        self.function = function
        self.centre, self.radius = scope.centre, scope.radius
        self.source, self.target = _Space(scope.ends.source), _Space(scope.ends.target)
        self.metric: Metric = scope.metric

    def size(self, distances: Tensor) -> Tensor:
        """Of a configuration, by those of its tokens."""
        return distances.amax(-1) if self.metric == "sup" else numerics.norm(distances)

    def keep(self, x: Tensor) -> Tensor:
        """Points put back into the balls along their rays from the centres."""
        centre = self.centre.expand_as(x)
        return self.source.move(centre, numerics.within(self.source.between(centre, x), self.radius))

    def starts(self, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Points on the rim and inside, with differences of all lengths."""
        tokens, features = self.centre.shape[0], self.centre.shape[1] - (self.source.manifold is not None)

        def share(*shape: int) -> Tensor:
            return _SHORTEST ** torch.rand(*shape, generator=generator, dtype=torch.float64)

        u, v = (_patterns(generator, count, tokens, features) for _ in range(2))
        size = torch.where(torch.arange(count) % 2 == 0, 1.0, share(count))[:, None, None]
        inside = torch.where(torch.arange(count) % 4 < 2, 1.0, torch.rand(count, generator=generator))[:, None, None]
        x = self.keep(
            self.source.move(self.centre.expand(count, -1, -1), (self.radius * size * inside * u).to(self.centre))
        )
        return x, (2 * self.radius * size * share(count, 1, 1) * v).to(self.centre)

    def compare(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Distances before and after, and their ratio less the rounding of both."""
        images = self.function(torch.cat([x, y]))
        fx, fy = images.chunk(2)
        before, after = self.size(self.source.dist(x, y)), self.size(self.target.dist(fx, fy))
        with torch.no_grad():
            wide = before + self.size(self.source.noise(x) + self.source.noise(y))
            short = after - self.size(self.target.noise(fx) + self.target.noise(fy))
            ratio = torch.where(before > 0, short / wide, 0.0).nan_to_num(0.0, 0.0, 0.0)
        return before, after, ratio

    def climb(self, x: Tensor, v: Tensor) -> _Pairs:
        """The best pairs on the way of each start."""
        y = self.keep(self.source.move(x, v))
        best = _Pairs(torch.full_like(x[:, 0, 0], -math.inf), x, y)
        for step in range(_STEPS + 1):
            shift, v = torch.zeros_like(v, requires_grad=True), self.source.between(x, y).detach().requires_grad_()
            here = self.source.move(x, shift)
            before, after, ratio = self.compare(here, self.source.move(here, v))
            wins = (ratio > best.ratio)[:, None, None]
            best = _Pairs(ratio.maximum(best.ratio), torch.where(wins, x, best.x), torch.where(wins, y, best.y))
            slopes = torch.autograd.grad((after.log() - before.log()).sum(), (shift, v), allow_unused=True)
            with torch.no_grad():
                far = self.source.between(self.centre.expand_as(x), x).norm(dim=-1).amax(-1)
                far = far.clamp(min=_SHORTEST * self.radius)[:, None, None]
                x = self.keep(self.source.move(x, far * 3.0 ** (-1 - 5 * step / _STEPS) * _along(slopes[0], shift)))
                length = v.flatten(1).norm(dim=1)[:, None, None]
                v = v + length * 3.0 ** (-0.5 - 5 * step / _STEPS) * _along(slopes[1], v)
                y = self.keep(self.source.move(x, v))
        return best

    def sure(self, pairs: _Pairs, generator: torch.Generator) -> Tensor:
        """The ratios less what a change of the last digits of both inputs does to their images."""
        with torch.no_grad():
            before, _, ratio = self.compare(pairs.x, pairs.y)
            for z in (pairs.x, pairs.y):
                space = z if self.source.manifold is None else self.source.manifold.space(z)
                signs = torch.randint(0, 2, space.shape, generator=generator).to(space) * 2 - 1
                moved = self.target.dist(self.function(z), self.function(self.source.shaken(z, signs)))
                ratio = ratio - 2 * self.size(moved) / numerics.positive(before)
        return ratio.nan_to_num(0.0, 0.0, 0.0)


def _along(slope: Tensor | None, like: Tensor) -> Tensor:
    """The unit vector of a gradient, pair by pair; none where the map has no derivative."""
    slope = torch.zeros_like(like) if slope is None else slope.nan_to_num(0.0, 0.0, 0.0)
    return slope / numerics.positive(slope.flatten(1).norm(dim=1))[:, None, None]


def _patterns(generator: torch.Generator, count: int, tokens: int, features: int) -> Tensor:
    """Directions of all tokens, ``(count, tokens, features)``, unit vectors or zero; half have one or two channels."""
    drawn = torch.randn(count, tokens, features, generator=generator, dtype=torch.float64)
    order = torch.rand(count, 1, features, generator=generator).argsort(-1)
    few = torch.randint(1, 3, (count, 1, 1), generator=generator)
    dense = torch.rand(count, 1, 1, generator=generator) < 1 / 2
    drawn = torch.where(dense | (order < few), drawn, 0.0)
    kind = torch.randint(0, 4, (count, 1, 1), generator=generator)
    first = torch.arange(tokens)[:, None] == 0
    alike = drawn[:, :1].expand_as(drawn)
    others = torch.where(kind == 1, alike, torch.where(kind == 2, -alike, 0.0))
    drawn = torch.where((kind == 0) | first, drawn, others)
    return numerics.unit_vector(drawn)
