r"""Certificates of whole models by composition: H12.

A model's constant is at most the product of its layers' constants, each on the region that the layers before it leave:
a ball about the origin (a priori), the tokens of one input, or balls about them. The rows say layer by layer where the
constant is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Float
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import Hypformer, HypformerBlock
from holonomy.theory.attention.lipschitz import Theorem, lipschitz_bound
from holonomy.theory.attention.projections import NotCoveredError, as_stated
from holonomy.theory.certificates.composition import Row, Tape
from holonomy.theory.certificates.regions import Region, Setting, Step, refuse_training, root, units_of, widened
from holonomy.theory.certificates.stretching import METRICS, Ends, Metric, ends_of, measure_stretch, ordinary, stretch

Scope = Literal["a priori", "at the input", "about the input"]


@dataclass(frozen=True)
class Certificate:
    """A model's Lipschitz constant, layer by layer.

    >>> Certificate(2.0, 1.0, (), "a priori", "sup").slack
    2.0
    """

    constant: float  #: the certified value, the product of the rows whose ``branch`` is false
    measured: float  #: a lower bound by ascent, or the stretch at the input; nan where it was not asked for
    rows: tuple[Row, ...]  #: the layers in the order of the computation
    scope: Scope  #: for which inputs it holds
    metric: Metric  #: of configurations of tokens

    @property
    def slack(self) -> float:
        """Certified over measured."""
        return self.constant / self.measured

    def __str__(self) -> str:
        """A table with one line a layer."""
        lines = [f"{'layer':36}{'constant':>12}{'radius in':>12}{'radius out':>12}  theorem"]
        lines += [
            f"{'  ' * row.branch + row.name:36}{row.constant:12.4g}{row.radius_in:12.4g}{row.radius_out:12.4g}  "
            f"{row.theorem}"
            for row in self.rows
        ]
        lines.append(f"{self.scope}, {self.metric}: certified {self.constant:.4g}, measured {self.measured:.4g}")
        return "\n".join(lines)


@singledispatch
def _compose(layer: Any, tape: Tape, prefix: str) -> None:
    tape.take(prefix + type(layer).__name__, layer)


@_compose.register
def _(layer: nn.Sequential, tape: Tape, prefix: str) -> None:
    as_stated(layer, nn.Sequential)
    for index, inner in enumerate(layer):
        _compose(inner, tape, f"{prefix}{index}.")


@_compose.register
def _(layer: HypformerBlock, tape: Tape, prefix: str) -> None:
    as_stated(layer, HypformerBlock)
    if layer.cross_attention is not None:
        raise NotCoveredError(f"model must attend among its tokens: no theorem covers {prefix}cross_attention.")
    if not isinstance(layer.feedforward, nn.Sequential):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotCoveredError(f"{prefix}feedforward must be layers in order, got {type(layer.feedforward).__name__}.")
    as_stated(layer.feedforward, nn.Sequential)
    tape.take(prefix + "position", layer.position)

    def attention(branch: Tape) -> None:
        branch.take(prefix + "attention", layer.attention)
        branch.take(prefix + "drop", layer.drop)

    def feedforward(branch: Tape) -> None:
        for index, inner in enumerate(layer.feedforward):
            branch.take(f"{prefix}feedforward.{index}", inner)

    tape.residual(prefix + "residual of attention", layer.residual, attention)
    tape.take(prefix + "norm_attention", layer.norm_attention)
    tape.residual(
        prefix + "residual of feedforward",
        layer.residual,
        feedforward,
        lambda x: layer.residual(x, layer.feedforward(x)),
    )
    tape.take(prefix + "norm_feedforward", layer.norm_feedforward)


@_compose.register
def _(layer: Hypformer, tape: Tape, prefix: str) -> None:
    as_stated(layer, Hypformer)
    if layer.graph_encoder is not None or layer.encoder is None:
        raise NotCoveredError(
            f"model must be a Hypformer with graph_encoder=None: no theorem covers {prefix}graph_encoder, "
            f"a {type(layer.graph_encoder).__name__}."
        )
    as_stated(layer.encoder, HypformerEncoder)
    if layer.level == "graph":
        raise NotCoveredError(f"model must have a row for each node: no theorem covers the centroid of {prefix}nodes.")
    tape.take(prefix + "embedding", layer.encoder.embedding)
    tape.take(prefix + "refine", layer.encoder.refine)
    for index, block in enumerate(layer.encoder.blocks):
        _compose(block, tape, f"{prefix}block{index}.")
    tape.take(prefix + "drop", layer.encoder.drop)
    manifold = layer.manifold_out
    if not layer.decodes_points:
        as_stated(layer.decoder, nn.Linear)
        linear = cast("nn.Linear", layer.decoder)
        constant = torch.linalg.matrix_norm(linear.weight.detach().double(), 2).item() / root(manifold)

        def decode(x: Tensor) -> Tensor:
            return linear(manifold.space(manifold.logmap0(x)))

        ends = Ends(manifold, None)
        prior = step = Step(constant, Region(math.inf), "H11")
        if tape.local and tape.region.points is not None:
            at = stretch(decode, tape.region.points, ends=ends).amax().item() / root(manifold)
            step = replace(prior, constant=at)
        tape.write(prefix + "logarithm, decoder", step, (root(manifold), 1.0), decode, ends, prior)
    else:
        tape.take(prefix + "decoder", layer.decoder)


@torch.inference_mode(mode=False)  # in which autograd keeps nothing
def certify(
    model: nn.Module,
    radius: float = 0.0,
    *,
    x: Float[Tensor, "tokens dim"] | None = None,
    tokens: int | None = None,
    features: int | None = None,
    metric: Metric = "sup",
    starts: int = 8,
    steps: int = 30,
    generator: torch.Generator | None = None,
) -> Certificate:
    r"""Bound the Lipschitz constant of a Hypformer, or of any hyperbolic layer, by composition: H12.

    * Without ``x``: for all inputs whose tokens lie within ``radius`` of the origin.
    * With ``x`` and ``radius = 0``: the stretch at that input, from exact stretches of its tokens.
    * With ``x`` and a radius: for all inputs whose tokens are within it of those of ``x``.

    Every row about an input is at most the row of the ball about the origin that holds it.

    The graph encoder of a Hypformer is not covered, nor is linear attention about an input; linear attention a priori
    has no constant, and its row is infinite. Pooling (``batch``) is left out: the certificate is one of node outputs.
    Everything is computed in float64, from a copy of a model that is not: the certificate is one of the function that
    the weights define. What is computed at an input is multiplied by :math:`1 + 8 \epsilon e^{\rho}`, more than
    rounding can have taken from it; functions of one's own that are no modules must take float64.
    What keeps constants small: ``attention="softmax"`` with ``similarity="geodesic"``, a larger ``norm_eps``.

    Args:
        model: a Hypformer, a block, a layer, or an ``nn.Sequential`` of layers.
        radius: of the ball, in the distance where the model starts.
        x: one input, ``(n, in_features)`` of a Hypformer, points ``(n, d + 1)`` of a layer.
        tokens: n, where there is no ``x``; needed by the l2 metric, and by the measurement.
        features: d of the input, where neither ``x`` nor a layer tells, as an activation alone.
        metric: ``"sup"`` or ``"l2"``.
        starts: of the ascent that measures; 0 leaves the measurement out.
        steps: of each.
        generator: draws the starts.

    Returns:
        The certificate, with one row a layer.

    Raises:
        TypeError: if the radius is a tensor.
        NotCoveredError: if a layer is covered by no theorem, or an input is given and a layer drops entries or
            normalises tokens together.
        ValueError: if the radius is negative, or zero without ``x``, if ``x`` has another shape, or if layers of a
            sequence lie in different curvatures where they meet.

    >>> model = Hypformer(3, 4, 2, layers=1, attention="softmax", similarity="geodesic", graph_encoder=None)
    >>> certificate = certify(model, 1.0, starts=0)
    >>> [row.theorem for row in certificate.rows[:3]]
    ['H11, H1', 'H3', 'H7, H1']
    """
    checks.one_of("metric", metric, METRICS)
    if features is not None:
        checks.positive_int("features", features)
    checks.nonnegative_int("starts", starts)
    checks.nonnegative_int("steps", steps)
    checks.generator(generator)
    if tokens is not None:
        checks.positive_int("tokens", tokens)
    if x is not None:
        checks.floating("x", x)
        checks.finite("x", x)
        if x.ndim != 2 or x.shape[0] == 0:
            raise ValueError(f"x must have shape (tokens, dim), with one token at least, got {tuple(x.shape)}.")
    if isinstance(radius, Tensor):
        raise TypeError(f"radius must be a number, got a tensor of shape {tuple(radius.shape)}: an input goes to x=.")
    if checks.in_range("radius", radius, 0.0, math.inf) == 0 and x is None:
        raise ValueError(f"radius must be positive where no input is given, got {radius}.")
    model = widened(model)
    ends, (begin, end) = ends_of_model(model), _units(model)
    features = features_of(model) if features is None else features
    if x is None:
        scope: Scope = "a priori"
        region = Region(radius * begin, features)
    else:
        refuse_training(model, "model")
        scope = "at the input" if radius == 0 else "about the input"
        wide: Tensor = ordinary(x).detach().double()
        # A point's time, made again, is that of its space part in float64 too.
        x = wide if ends.source is None else ends.source.lift(ends.source.space(wide))
        lengths = x.norm(dim=-1) if ends.source is None else ends.source.dist0(x)
        dim = x.shape[-1] - (ends.source is not None)
        region = Region((lengths.amax().item() + radius) * begin, dim, x, radius * begin)
    tape = Tape(region, Setting(metric, tokens if x is None else x.shape[0]))
    _compose(model, tape, "")
    tape.close()
    measured = math.nan
    if starts and x is not None:
        measured = stretch(model, x, ends=ends, joint=True, metric=metric).item()
    elif starts and features is not None:
        measured = measure_stretch(
            # A Hypformer takes one graph at a time.
            one_by_one(model) if isinstance(model, Hypformer) else model,
            radius,
            features,
            tokens=tokens or 1,
            ends=ends,
            metric=metric,
            starts=starts,
            steps=steps,
            generator=generator,
            like=next(model.parameters(), None),
        )
    return Certificate(tape.constant * begin / end, measured, tuple(tape.rows), scope, metric)


def one_by_one(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of one configuration of tokens, as one of several."""
    return lambda x: torch.stack([function(one) for one in x])


def ends_of_model(model: object) -> Ends:
    """The manifolds on which a model's input and output lie, None for flat space."""
    if isinstance(model, Hypformer):
        return Ends(None, None)
    if isinstance(model, nn.Sequential) and len(model):
        return Ends(ends_of_model(model[0]).source, ends_of_model(model[-1]).target)
    try:
        return ends_of(model)
    except TypeError as error:
        raise NotCoveredError(f"model must be made of hyperbolic layers, got {type(model).__name__}.") from error


def known_ends(model: object) -> Ends | None:
    """The same; None of a model that names no manifolds."""
    try:
        return ends_of_model(model)
    except NotCoveredError:
        return None


def _units(model: nn.Module) -> tuple[float, float]:
    if isinstance(model, nn.Sequential):
        return _units(model[0])[0], _units(model[-1])[1]
    if isinstance(model, Hypformer):
        return (1.0 if model.encoder is None else units_of(model.encoder.embedding)[0]), 1.0
    return units_of(model)


def features_of(model: nn.Module) -> int | None:
    """The number of input features, from the first layer that has one."""
    for module in model.modules():
        for name in ("in_features", "num_features", "normalized_shape"):
            size = getattr(module, name, None)
            if size is not None:
                return size[-1] if isinstance(size, tuple) else size
    return None


def _of_model(
    model: nn.Module,
    radius: float = math.inf,
    *,
    tokens: int | None = None,
    metric: Metric = "sup",
    features: int | None = None,
) -> float:
    """A model's constant alone."""
    return certify(model, radius, tokens=tokens, metric=metric, features=features, starts=0).constant


def _of_sequence(
    model: nn.Sequential,
    radius: float = math.inf,
    *,
    tokens: int | None = None,
    metric: Metric | None = None,
    features: int | None = None,
    mask: Tensor | None = None,
    theorem: Theorem = "L+",
) -> float:
    """Attention layers by L+, hyperbolic ones by H12."""
    as_stated(model, nn.Sequential)
    layers = [*model]
    if layers and not any(known_ends(layer) for layer in layers):
        if metric == "sup":
            raise NotCoveredError("metric must be l2 for attention between Euclidean tokens: L+ is on Frobenius norms.")
        return lipschitz_bound(layers, radius, tokens=tokens, mask=mask, theorem=theorem)
    if mask is not None or theorem != "L+":
        raise NotCoveredError("mask and theorem must be left out for hyperbolic layers: H12 is what holds for them.")
    return _of_model(model, radius, tokens=tokens, metric=metric or "sup", features=features)


lipschitz_bound.register(nn.Sequential, _of_sequence)
for kind in (HypformerBlock, Hypformer):
    lipschitz_bound.register(kind, _of_model)
