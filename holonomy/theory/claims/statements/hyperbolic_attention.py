r"""Claims on hyperbolic attention and on whole models: H8, H9, H10 and H12."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from holonomy.layers import HTC, HypLayerNorm, HypLinearAttention, HypSoftmaxAttention
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer
from holonomy.ops.softmax_attention import SIMILARITIES, Similarity, hyperbolic_softmax_attention
from holonomy.theory.attention.lipschitz import lipschitz_bound
from holonomy.theory.certificates.certificate import certify
from holonomy.theory.certificates.constants.softmax_attention import hyperbolic_collapse_bound, unit_scale
from holonomy.theory.certificates.regions import root
from holonomy.theory.certificates.stretching import METRICS, Metric
from holonomy.theory.claims import sharpest as sharpest_inputs
from holonomy.theory.claims.pictures import Picture
from holonomy.theory.claims.statements.hyperbolic import draw_manifold, draw_points, draw_radius, over_ball, worst
from holonomy.theory.claims.verdict import Claims, Draws, Trial, filled, forked, rounding

_OURS = "CERTIFICATES, "

CLAIMS = Claims()  #: claims on attention and on whole models


def _softmax(draws: Draws, similarity: Similarity) -> HypSoftmaxAttention:
    source, target, hidden = draw_manifold(draws), draw_manifold(draws), draw_manifold(draws)
    heads = draws.integer(1, 2)
    layer = HypSoftmaxAttention(
        2 * heads, heads, source, target, manifold_hidden=hidden, similarity=similarity, **draws.factory_kwargs
    )
    # Where all three stretch alike in every direction the bounds are nearly attained.
    alike = draws.integer(0, 1) == 1
    for htc in (layer.query, layer.key, layer.value):
        weight = draws.normal(*htc.weight.shape) * draws.logarithmic(0.3, 3.0)
        if alike:
            weight[:, 1:] = torch.linalg.qr(weight[:, 1:].double()).Q * draws.logarithmic(0.1, 10.0)
            weight[:, 0] = 0
        filled(htc, weight=weight, bias=draws.normal(htc.out_features) * (0.0 if alike else 0.3))
    return layer


def _over_balls(draws: Draws, index: int, similarity: Similarity) -> Iterable[Trial]:
    layer = _softmax(draws, similarity)
    radius, tokens, metric = draw_radius(draws, 1.5), draws.integer(2, 5), METRICS[index % 2]
    yield from over_ball(draws, layer, radius, layer.query.in_features, tokens=tokens, metric=metric)


_KAPPAS = (-0.05, -0.2, -0.7, -2.0, -8.0)


@CLAIMS.add("hyperbolic.curvature", _OURS + "H2, H4, H8", "lower", axis="-kappa")
def _curvatures(draws: Draws) -> Iterable[Trial]:
    """Certificates of fixed layers over the curvature."""
    # Three layers of fixed parameters on the ball of radius 1 in their own distances, from nearly flat to curved.
    features = 3
    weights = [draws.normal(features, features + 1) for _ in range(3)]
    bias, scale = draws.normal(features), draws.normal(features)
    for kappa in _KAPPAS:
        manifold = Lorentz(kappa, **draws.factory_kwargs)
        transformation = HTC(features, features, manifold, **draws.factory_kwargs)
        norm = HypLayerNorm(features, manifold, eps=0.1, **draws.factory_kwargs)
        attention = HypSoftmaxAttention(features, 1, manifold, similarity="geodesic", **draws.factory_kwargs)
        filled(transformation, weight=weights[0], bias=bias)
        filled(norm, function__norm__weight=scale, function__norm__bias=bias)
        filled(attention, **dict(zip(("query__weight", "key__weight", "value__weight"), weights, strict=True)))
        for panel, layer in enumerate((transformation, norm, attention)):
            tokens = 4 if layer is attention else None
            bound = lipschitz_bound(layer, 1.0)
            measured = worst(draws, layer, 1.0, features, tokens=tokens)
            yield Trial(measured, bound, at={"-kappa": -kappa, "panel": float(panel)})


def _draw_curvatures(axes: Sequence[Any], trials: Mapping[str, Sequence[Trial]]) -> None:
    for panel, (plot, title) in enumerate(zip(axes, ("HTC", "LayerNorm", "attention, geodesic"), strict=True)):
        shown = [t for t in trials["hyperbolic.curvature"] if t.at["panel"] == panel]
        kappa = [t.at["-kappa"] for t in shown]
        plot.plot(kappa, [t.bound for t in shown], "s--", label="certificate")
        plot.plot(kappa, [t.measured for t in shown], "o-", label="measured")
        plot.set(xscale="log", yscale="log", xlabel=r"$-\kappa$", title=title)
    axes[0].set_ylabel("Lipschitz constant")
    axes[0].legend(fontsize="small")


PICTURES: tuple[Picture, ...] = (
    Picture(
        "Constants over the curvature",
        "Layers of fixed parameters on the ball of radius 1 in their own distances: certificates H2, H4 and H8, and "
        "the best of an ascent.",
        ("hyperbolic.curvature",),
        _draw_curvatures,
        3,
    ),
)
"""The picture of constants over the curvature."""


def _at_inputs(draws: Draws, index: int, similarity: Similarity) -> Iterable[Trial]:
    layer = _softmax(draws, similarity)
    x = draw_points(draws, layer.manifold_in, draw_radius(draws, 1.5), draws.integer(2, 6), layer.query.in_features)
    yield _local(layer, x, METRICS[index % 2])


def _local(layer: HypSoftmaxAttention | HypLinearAttention, x: Tensor, metric: Metric) -> Trial:
    found = certify(layer, x=x, metric=metric)
    return Trial(found.measured, found.constant, at={"tokens": float(x.shape[0])})


for similarity in SIMILARITIES:
    for name, given, trials, sharpest, rounds in (
        ("softmax", "constant of softmax attention over a ball", _over_balls, sharpest_inputs.softmax, 4),
        ("softmax_at", "stretch of softmax attention at an input", _at_inputs, sharpest_inputs.softmax_at, 10),
    ):
        CLAIMS.add(
            f"hyperbolic.{name}_{similarity}",
            _OURS + "H8",
            "lower",
            statement=f"The {given}, logits by {similarity.replace('_', ' ')}",
            sharpest=partial(sharpest, similarity=similarity),
            rounds=rounds,
            similarity=similarity,
        )(trials)


@CLAIMS.add("hyperbolic.collapse", _OURS + "H9", rounds=24)
def _collapse(draws: Draws, index: int) -> Iterable[Trial]:
    """Rank collapse of softmax attention."""
    # Random points, and the family on one geodesic for which the bound is attained.
    manifold, channels = draw_manifold(draws), draws.integer(1, 4)
    radius = draw_radius(draws, 2.0)
    if index % 4:
        queries, keys, far = draws.integer(2, 6), draws.integer(2, 6), draw_radius(draws, 2.0)
        query = manifold.space(draw_points(draws, manifold, radius, 32, queries, channels))
        key = manifold.space(draw_points(draws, manifold, radius, 32, keys, channels))
        value = manifold.space(draw_points(draws, manifold, far, 32, keys, channels))
    else:
        ends = torch.tensor([[[1.0], [-1.0]]], **draws.factory_kwargs) / root(manifold)
        query, key, value = (math.sinh(draws.uniform(0.1, 1.0)) * ends for _ in range(3))
        channels = 1
    out = hyperbolic_softmax_attention(query, key, value, curvature=manifold.curvature)
    sizes = [_diameters(manifold, z) for z in (out, query, key, value)]
    scale = unit_scale("geodesic_squared", channels, manifold.curvature.item())
    floor = rounding(draws.dtype) * math.cosh(2 * radius + 2)
    for measured, wide, narrow, spread in zip(*sizes, strict=True):
        yield Trial(measured, hyperbolic_collapse_bound(wide, narrow, spread, scale), floor=floor)


def _diameters(manifold: Lorentz, space: Tensor) -> list[float]:
    points = manifold.lift(space)
    return (manifold.cdist(points, points).amax((-2, -1)) * root(manifold)).tolist()


@CLAIMS.add("hyperbolic.linear_at", _OURS + "H10", "lower", sharpest=sharpest_inputs.linear_at, rounds=20)
def _linear_at_inputs(draws: Draws, index: int) -> Iterable[Trial]:
    """The stretch of linear attention at an input."""
    # Biases keep features positive: every query meets a key, and values are not all zero.
    source, target, hidden = draw_manifold(draws), draw_manifold(draws), draw_manifold(draws)
    heads = draws.integer(1, 2)
    power = draws.uniform(1.0, 3.0)
    with forked(draws.integer(0, 10**6)):
        layer = HypLinearAttention(
            2 * heads, heads, source, target, manifold_hidden=hidden, power=power, dtype=torch.float64
        )
    layer = layer.to(draws.device, draws.dtype)
    for htc in (layer.query, layer.key, layer.value):
        filled(htc, bias=cast("Tensor", htc.bias) + 1)
    x = draw_points(draws, source, draw_radius(draws, 1.0), draws.integer(2, 6), 2 * heads)
    yield _local(layer, x, METRICS[index % 2])


def _averages(draws: Draws, _: int, *, cone: bool) -> Iterable[Trial]:
    """The Euclidean average alone, queries, keys and values independent: its stretch at random features."""
    tokens, channels = draws.integer(2, 6), draws.integer(1, 3)
    q, k, v = ((draws.normal(32, tokens, channels) * draws.logarithmic(0.1, 2.0)).abs() for _ in range(3))
    if cone:
        q, k, eps = q + 0.2, k + 0.2, 0.0
    else:
        eps = draws.logarithmic(0.01, 1.0)
        if draws.integer(0, 1):  # where N over eps is real: equal keys, queries near zero
            q, k, v = q / 1000, k[:, :1].expand(-1, tokens, -1), v[:, :1].expand(-1, tokens, -1)

    measured = sharpest_inputs.stretch_of_averages(torch.stack([q, k, v], 1), eps)
    for value, *parts in zip(measured.tolist(), q, k, v, strict=True):
        bound = sharpest_inputs.average_bound(parts, eps, cone=cone)
        yield Trial(value, bound, at={"tokens": float(tokens)})


for name, given, cone in (("cone", "queries and keys keep to a cone", True), ("eps", "denominator has an eps", False)):
    CLAIMS.add(
        f"hyperbolic.linear_{name}",
        _OURS + "H10",
        "lower",
        statement=f"The constant of an average whose {given}",
        axis="tokens",
        sharpest=partial(sharpest_inputs.averages, cone=cone),
        cone=cone,
        rounds=10,
    )(_averages)


def _model(draws: Draws, index: int) -> Hypformer:
    with forked(draws.integer(0, 10**6)):
        model = Hypformer(
            3,
            4,
            2,
            layers=1 + index % 2,
            heads=1,
            feedforward=6,
            attention="softmax",
            similarity=SIMILARITIES[index % 3],
            norm_eps=draws.logarithmic(0.01, 1.0),
            curvature=-draws.logarithmic(0.5, 2.0),
            graph_encoder=None,
            decoder="mlr" if index % 4 == 3 else "linear",
            dtype=torch.float64,
        )
    return model.to(draws.device, draws.dtype).eval()


@CLAIMS.add("hyperbolic.model", _OURS + "H12", "lower", axis="layers", sharpest=sharpest_inputs.compositions, rounds=3)
def _models(draws: Draws, index: int) -> Iterable[Trial]:
    """Certificates of a Hypformer, and of layers in sequence, over a ball."""
    model = _model(draws, index)
    found = certify(model, 1.0, tokens=3, starts=2, steps=5, generator=draws.generator)
    yield Trial(found.measured, found.constant, at={"layers": float(1 + index % 2)})


@CLAIMS.add("hyperbolic.model_at", _OURS + "H12", "lower", sharpest=sharpest_inputs.compositions_at, rounds=8)
def _models_at(draws: Draws, index: int) -> Iterable[Trial]:
    """Certificates of a Hypformer, and of layers in sequence, at an input."""
    x = draws.normal(4, 3) * draws.uniform(0.1, 1.0)
    found = certify(_model(draws, index), x=x, metric=METRICS[index % 2])
    yield Trial(found.measured, found.constant, at={"layers": float(1 + index % 2)})


@CLAIMS.add("hyperbolic.model_about", _OURS + "H12", "lower", sharpest=sharpest_inputs.compositions_about, rounds=8)
def _models_about(draws: Draws, index: int) -> Iterable[Trial]:
    """Certificates of a Hypformer, and of layers in sequence, about an input."""
    # Certified about an input, measured at another within the radius.
    model, x = _model(draws, index), draws.normal(4, 3) * 0.5
    radius = draws.logarithmic(0.01, 0.3)
    step = draws.normal(4, 3)
    y = x + radius * step / step.norm(dim=-1, keepdim=True)
    bound = certify(model, radius, x=x, starts=0).constant
    yield Trial(certify(model, x=y).measured, bound, at={"radius": radius})
