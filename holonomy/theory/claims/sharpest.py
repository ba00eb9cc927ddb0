r"""Inputs that bring hyperbolic layers nearest to their certificates: where each term of H2' to H13 is all there is.

On a line, or where one of queries, keys and values moves a thousand times faster than the others, a bound that is a sum
is its largest term, and that one is attained; what is not names the largest ratio that is known. Curvature is -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy.layers import (
    HRC,
    HTC,
    HypActivation,
    HypConcat,
    HypDropout,
    HypLayerNorm,
    HypMLR,
    HypPositionalEncoding,
    HypSoftmaxAttention,
)
from holonomy.manifolds import Lorentz
from holonomy.ops.softmax_attention import Similarity
from holonomy.theory.attention.lipschitz import lipschitz_bound
from holonomy.theory.certificates.certificate import certify
from holonomy.theory.certificates.constants.affine import ball_stretch
from holonomy.theory.certificates.constants.linear_attention import (
    Cone,
    Features,
    linear_stretch_in_cone,
    linear_stretch_with_eps,
    local_linear,
)
from holonomy.theory.certificates.stretching import METRICS, Ends, Metric, stretch
from holonomy.theory.claims.verdict import Draws, Trial, filled

Rows = Sequence[Sequence[float]]


def unit_hyperboloid(draws: Draws) -> Lorentz:
    """That of curvature -1."""
    return Lorentz(-1.0, **draws.factory_kwargs)


def _points(manifold: Lorentz, rows: Rows) -> Tensor:
    """Points by their space parts."""
    return manifold.lift(manifold.curvature.new_tensor(rows))


def _on_a_line(manifold: Lorentz, *rapidities: float) -> Tensor:
    return _points(manifold, [[math.sinh(t)] for t in rapidities])


def _htc(manifold: Lorentz, weight: Rows, bias: float = 0.0) -> HTC:
    made = HTC(len(weight[0]) - 1, len(weight), manifold, dtype=manifold.dtype, device=manifold.curvature.device)
    return filled(made, weight=weight, bias=bias)


def about_points(draws: Draws) -> Iterator[Trial]:
    """H2': the fastest ways up without a bias, from below 1 and from above, and with one."""
    unit = unit_hyperboloid(draws)
    families = (
        ("from below 1", [[100.0, 0.0]], 0.0, (0.1, 0.5)),
        ("from above 1", [[0.0, 1000.0]], 0.0, (0.5, 0.01)),
        ("with a bias", [[-3.0, 1.0]], 3.0, (0.0, -0.1)),
    )
    for note, weight, bias, (start, end) in families:
        here, there = stretch(_htc(unit, weight, bias), _on_a_line(unit, start, end)).tolist()
        bound = ball_stretch(here, bias, abs(end - start))
        yield Trial(there, bound, at={"distance": abs(end - start)}, note=note)


def refinements(draws: Draws) -> Iterator[Trial]:
    """H1 on a ball, with a bias and without: the worst of many points of a line."""
    unit = unit_hyperboloid(draws)
    line = torch.linspace(-1, 1, 2001, **draws.factory_kwargs).sinh()[:, None]
    for bias in (0.0, 1.0):
        layer = HRC(filled(nn.Linear(1, 1, **draws.factory_kwargs), weight=2.0, bias=bias), unit)
        yield Trial(stretch(layer, unit.lift(line)).amax().item(), lipschitz_bound(layer, 1.0), at={"radius": 1.0})


def classifiers(draws: Draws) -> Iterator[Trial]:
    """H13: on a line a signed distance has its slope everywhere."""
    unit = unit_hyperboloid(draws)
    layer = filled(HypMLR(1, 1, unit, **draws.factory_kwargs), weight=2.0, offset=0.0)
    measured = stretch(layer, _on_a_line(unit, 0.5), ends=Ends(unit, None)).item()
    yield Trial(measured, lipschitz_bound(layer, 1.0), at={"radius": 1.0})


# Of sixteen entries those where the gap is largest, those far out, and the share of H3's bound that they reach.
_ENTRIES: tuple[tuple[Callable[[Tensor], Tensor], list[float], float], ...] = (
    (functional.gelu, [1.4084] * 15 + [41.0], 0.9817),
    (functional.silu, [2.381] * 15 + [60.0], 0.974),
    (functional.elu, [-11.39] * 15 + [60.0], 0.9422),
    (functional.softplus, [0.0383] * 15 + [56.0], 0.9369),
    (torch.tanh, [-0.46768] * 13 + [14.609, 14.609, 12.615], 0.82284),
)


def activations(draws: Draws) -> Iterator[Trial]:
    """H3: entries that an ascent found; tanh at the origin, where a small ball's bound is its slope."""
    unit = unit_hyperboloid(draws)
    for function, entries, known in _ENTRIES:
        layer = HypActivation(function, unit)
        measured = stretch(layer, _points(unit, [entries])).item()
        bound = lipschitz_bound(layer, features=16)
        yield Trial(measured, bound, at={"features": 16.0}, known=known, note=getattr(function, "__name__", ""))
    layer = HypActivation(torch.tanh, unit)
    near = stretch(layer, _points(unit, [[0.0] * 16])).item()
    yield Trial(near, lipschitz_bound(layer, 1 / 1000, features=16), at={"features": 16.0})


def dropouts(draws: Draws) -> Iterator[Trial]:
    """H1: what is kept is stretched by 1/(1 - p), what is not by 0."""
    unit = unit_hyperboloid(draws)
    kept = HRC(lambda space: 2 * space, unit)
    bound = lipschitz_bound(HypDropout(0.5, unit).train(), 1.0)
    yield Trial(stretch(kept, _points(unit, [[0.0, 0.0]])).item(), bound)


def layer_norms(draws: Draws) -> Iterator[Trial]:
    """H4: at zero variance, with a scale of 3."""
    unit = unit_hyperboloid(draws)
    layer = HypLayerNorm(2, unit, eps=0.1, **draws.factory_kwargs)
    layer = filled(layer, function__norm__weight=3.0, function__norm__bias=0.0)
    measured = stretch(layer, _points(unit, [[0.0, 0.0]])).item()
    yield Trial(measured, lipschitz_bound(layer, 1.0), at={"eps": 0.1})


def residuals(draws: Draws) -> Iterator[Trial]:
    """H7: at the origin, where the branch has the share of its weight, and where it comes from afar and has half."""
    unit = unit_hyperboloid(draws)
    far = 100.0
    families = (
        (3.0, [[0.0, 3.0]], 0.0, 1.0),
        (1 / 3, [[-far, math.hypot(far, 3.0)]], math.atanh(far / math.hypot(far, 3.0)), 0.98097),
    )
    for epsilon, weight, rapidity, known in families:
        layer = HypPositionalEncoding(1, unit, epsilon=epsilon, **draws.factory_kwargs)
        layer.position = _htc(unit, weight)
        measured = stretch(layer, _on_a_line(unit, rapidity)).item()
        bound = lipschitz_bound(layer, max(rapidity, 1.0))
        yield Trial(measured, bound, at={"epsilon": epsilon}, known=known)


class Pair(nn.Module):
    """Two tokens concatenated to one point."""

    def __init__(self, manifold: Lorentz) -> None:
        super().__init__()
        self.manifold = manifold
        self.concat = HypConcat(manifold)

    def forward(self, x: Tensor) -> Tensor:
        """Points ``(..., 2, d + 1)`` to ``(..., 1, 2 d + 1)``."""
        return self.concat(x[..., :1, :], x[..., 1:, :])


def concatenations(draws: Draws) -> Iterator[Trial]:
    """H11: two points on the sphere of the ball, in the same place."""
    unit = unit_hyperboloid(draws)
    pair = Pair(unit)
    measured = stretch(pair, _on_a_line(unit, 1.0, 1.0)[None], joint=True, metric="l2").item()
    yield Trial(measured, lipschitz_bound(pair.concat, 1.0), at={"radius": 1.0})


def _attention(draws: Draws, similarity: Similarity, query: Rows, key: Rows, value: Rows, at: float = 0.0) -> nn.Module:
    """One head of two channels, the query moved by ``at`` along the first."""
    unit = unit_hyperboloid(draws)
    layer = HypSoftmaxAttention(2, 1, unit, similarity=similarity, **draws.factory_kwargs).eval()
    filled(layer, query__weight=query, key__weight=key, value__weight=value)
    return filled(layer, query__bias=[at, 0.0], key__bias=0.0, value__bias=0.0)


def _reads(channel: int, factor: float) -> Rows:
    """The weight of HTC that multiplies one channel and puts it into the first."""
    return [[0.0, factor, 0.0] if channel == 0 else [0.0, 0.0, factor], [0.0] * 3]


_STILL: Rows = [[0.0] * 3, [0.0] * 3]


class _Speed(NamedTuple):
    """By how much queries, or keys, move where they are all that matters, and how far the keys then are."""

    queries: float = 1000.0
    keys: float = 1000.0
    apart: float = 1.0


def _regimes(draws: Draws, similarity: Similarity, speed: _Speed) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Two tokens: values alone; queries that move fast between two keys; keys that move fast."""
    near, far = (_points(unit_hyperboloid(draws), [[x, 0.0], [-x, 0.0]]) for x in (0.0, 0.5))
    values = [[0.0, 2.0, 0.0], [0.0, 0.0, 2.0]]
    yield "values", _attention(draws, similarity, _STILL, _STILL, values), near
    yield "queries", _attention(draws, similarity, _reads(1, speed.queries), _reads(0, 1.0), _reads(0, 0.1)), far
    yield "keys", _attention(draws, similarity, _STILL, _reads(1, speed.keys), _reads(0, 0.1), speed.apart), far


def softmax_at(draws: Draws, similarity: Similarity) -> Iterator[Trial]:
    """H8 at an input: each of its three terms alone."""
    for note, layer, x in _regimes(draws, similarity, _Speed()):
        for metric in METRICS:
            found = certify(layer, x=x, metric=metric)
            yield Trial(found.measured, found.constant, at={"tokens": 2.0}, note=f"{note}, {metric}")


# Over a ball a bound on squares takes the largest distance everywhere: less speed comes nearer to it.
_OVER_BALLS: dict[Similarity, tuple[_Speed, dict[tuple[str, Metric], float]]] = {
    "geodesic": (_Speed(), {("keys", "l2"): 0.50052}),
    "geodesic_squared": (_Speed(1000.0, 3.0, 3.0), {("keys", "sup"): 0.5348, ("keys", "l2"): 0.28013}),
    "lorentz_squared": (
        _Speed(3.0, 3.0, 3.0),
        {("queries", "sup"): 0.2619, ("queries", "l2"): 0.16668, ("keys", "sup"): 0.28524, ("keys", "l2"): 0.14489},
    ),
}


def softmax(draws: Draws, similarity: Similarity) -> Iterator[Trial]:
    """H8 over a ball: the same three, measured at inputs on its sphere."""
    speed, shares = _OVER_BALLS[similarity]
    for note, layer, x in _regimes(draws, similarity, speed):
        radius = 1 / 1000 if note == "values" else math.asinh(0.5)
        for metric in METRICS:
            measured = stretch(layer, x[None], joint=True, metric=metric).item()
            bound = lipschitz_bound(layer, radius, tokens=2, metric=metric)
            known = shares.get((note, metric), 1.0)
            yield Trial(measured, bound, at={"radius": radius}, known=known, note=f"{note}, {metric}")


def stretch_of_averages(parts: Tensor, eps: float, metric: Metric = "l2") -> Tensor:
    """The stretch of averages of values by weights q.k over their sum and eps, ``(b, 3, tokens, d) -> (b,)``."""

    def average(joined: Tensor) -> Tensor:
        query, key, value = joined.unflatten(-2, (3, -1)).unbind(-3)
        meets = query @ key.mT
        return meets @ value / (meets.sum(-1, keepdim=True) + eps)

    return stretch(average, parts.flatten(1, 2), ends=Ends(None, None), joint=True, metric=metric)


def average_bound(parts: Sequence[Tensor], eps: float, *, cone: bool) -> float:
    """H10 of such an average at the lengths of its queries, keys and values, and at the cone that they keep to."""
    lengths = [part.norm(dim=-1) for part in parts]
    radii = (lengths[0].amax().item(), lengths[1].amax().item(), lengths[2].amax().item())
    features, tokens = Features((1.0, 1.0, 1.0), radii, 0.0), len(lengths[0])
    if not cone:
        return linear_stretch_with_eps(features, eps, tokens, "l2")
    opening = (parts[0] @ parts[1].mT / (lengths[0][:, None] * lengths[1])).amin().item()
    here = Cone(opening, lengths[0].amin().item(), lengths[1].amin().item())
    return linear_stretch_in_cone(features, here, tokens, "l2")


def _families(draws: Draws) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Features of two tokens: values that say nothing, and queries or keys that say all."""
    one, apart = torch.ones(2, 2, **draws.factory_kwargs), torch.eye(2, **draws.factory_kwargs)
    large, small, tiny = 1000 * one, one / 1000, one / 10**6
    first, none = torch.tensor([[1000.0], [1 / 1000]]).to(one) * one, 0 * one
    return {
        "values by one key": (large, first, none),
        "values by all keys": (large, large, none),
        "keys": (one, small, 10_000 * apart),
        "queries": (small, apart, 10_000 * apart),
        "queries from zero": (tiny, large, large),
        "keys from zero": (large, tiny, large),
    }


# The families of each bound of H10, and the share of it that they reach.
_WITH_EPS = {"values by one key": 1.0, "queries from zero": 0.70149, "keys from zero": 0.70149}
_IN_A_CONE = {"values by one key": 1.0, "values by all keys": 1.0, "queries": 0.35306, "keys": 0.49951}


def averages(draws: Draws, *, cone: bool) -> Iterator[Trial]:
    """H10 where the denominator has an eps of 1, or where queries and keys keep to a cone."""
    families = _families(draws)
    for note, known in (_IN_A_CONE if cone else _WITH_EPS).items():
        parts, eps = families[note], 0.0 if cone else 1.0
        measured = stretch_of_averages(torch.stack(parts)[None], eps).item()
        bound = average_bound(parts, eps, cone=cone)
        yield Trial(measured, bound, at={"tokens": 2.0}, known=known, note=note)


def linear_at(draws: Draws) -> Iterator[Trial]:
    """H10 at an input: the average alone, by each of its three terms."""
    for note, (q, k, v) in _families(draws).items():
        if note in {"values by all keys", "queries", "keys"}:
            for metric in METRICS:
                one = torch.ones_like(q[None, :, 0])
                bound = local_linear((q[None], k[None], v[None]), (one, one, one), metric)
                measured = stretch_of_averages(torch.stack([q, k, v])[None], 0.0, metric).item()
                yield Trial(measured, bound, at={"tokens": 2.0}, note=f"{note}, {metric}")


def _line(draws: Draws) -> nn.Sequential:
    """Three maps of a line and attention to values among them, each with its greatest stretch at the origin."""
    unit = unit_hyperboloid(draws)
    attention = HypSoftmaxAttention(1, 1, unit, similarity="geodesic", **draws.factory_kwargs)
    for htc, factor in ((attention.query, 0.0), (attention.key, 0.0), (attention.value, 2.0)):
        filled(htc, weight=[[0.0, factor]], bias=0.0)
    return nn.Sequential(_htc(unit, [[0.0, 3.0]]), attention, _htc(unit, [[0.0, 1.5]])).eval()


def compositions(draws: Draws) -> Iterator[Trial]:
    """H12 over a ball."""
    found = certify(_line(draws), 1 / 1000, tokens=2, starts=2, steps=5, generator=draws.generator)
    yield Trial(found.measured, found.constant, at={"layers": 3.0})


def compositions_at(draws: Draws) -> Iterator[Trial]:
    """H12 at an input."""
    for metric in METRICS:
        found = certify(_line(draws), x=_on_a_line(unit_hyperboloid(draws), 0.0, 0.0), metric=metric)
        yield Trial(found.measured, found.constant, at={"layers": 3.0})


def compositions_about(draws: Draws) -> Iterator[Trial]:
    """H12 about an input."""
    model, x = _line(draws), _on_a_line(unit_hyperboloid(draws), 0.0, 0.0)
    bound = certify(model, 1 / 1000, x=x, starts=0).constant
    yield Trial(certify(model, x=x).measured, bound, at={"radius": 1 / 1000})
