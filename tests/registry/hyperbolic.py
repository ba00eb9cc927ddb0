"""Hyperbolic layers, learned points and Hypformer, with the Euclidean graph encoders that run beside them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers, manifolds, models
from holonomy.manifolds import Lorentz
from tests.reference.hypformer import hypformer_points
from tests.registry.case import Case, Inputs, Make, Options, Setting

__all__ = ["CASES"]


class Points(nn.Module):
    """A model asked for the points that its decoder reads."""

    def __init__(self, inner: models.Hypformer) -> None:
        super().__init__()
        self.inner = inner
        inner.decoder = nn.Identity()  # not asked

    @property
    def manifold_out(self) -> Lorentz:
        return self.inner.manifold_out

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner.embed(x, edge_index)


def _points(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.points(setting.nodes, setting.features),)


def _raw(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.vectors(setting.nodes, setting.features),)


def _graph(setting: Setting) -> tuple[Tensor, ...]:
    return (*_raw(setting), setting.edges())


def _padded(setting: Setting) -> tuple[Tensor, ...]:
    return setting.points(2, setting.nodes, setting.features), setting.padding()


def _to(setting: Setting, target: int) -> Lorentz | None:
    return None if target == 0 else setting.manifold(target)


CASES: list[Case] = []


def _register(
    kind: type[nn.Module], options: Options, make: Make, inputs: Inputs = _points, note: str = "", **flags: Any
) -> None:
    flags = {"target": "manifold_out", "any_radius": True} | flags
    CASES.append(Case(kind, options, make, inputs, note + ", padded" * (inputs is _padded), **flags))


# Linear maps: with and without bias, with and without a change of curvature.
for kind, bias, target in itertools.product(
    (layers.HTC, layers.ExpMapHTC, layers.TangentLinear, layers.FullyLorentzLinear, layers.LorentzPLFC),
    (True, False),
    (0, 1),
):
    _register(
        kind,
        {"bias": bias},
        lambda s, o, kind=kind, t=target: kind(s.features, 3, s.manifold(0), _to(s, t), **o, **s.factory),
        _raw if kind is layers.ExpMapHTC else _points,
        f"to {target}",
    )
for kind in (layers.HTC, layers.ExpMapHTC):
    _register(
        kind,
        {"init": "orthogonal"},
        lambda s, o, kind=kind: kind(s.features, 3, s.manifold(0), **o, **s.factory),
        _raw if kind is layers.ExpMapHTC else _points,
    )
_register(
    layers.FullyLorentzLinear,
    {"activation": torch.tanh, "scale": 2.0},
    lambda s, o: layers.FullyLorentzLinear(s.features, 3, s.manifold(0), **o, **s.factory),
)

# Refinements.
for target in (0, 1):
    to = f"to {target}"
    _register(layers.HRC, {}, lambda s, _, t=target: layers.HRC(nn.functional.silu, s.manifold(0), _to(s, t)), note=to)
    for function in (torch.relu, torch.tanh):
        _register(
            layers.HypActivation,
            {},
            lambda s, _, f=function, t=target: layers.HypActivation(f, s.manifold(0), _to(s, t)),
            note=f"{function.__name__}, {to}",
        )
    for affine in (True, False):
        for kind in (layers.HypLayerNorm, layers.HypRMSNorm):
            _register(
                kind,
                {"elementwise_affine": affine},
                lambda s, o, t=target, kind=kind: kind(s.features, s.manifold(0), _to(s, t), **o, **s.factory),
                note=to,
            )
        _register(
            layers.HypBatchNorm,
            {"affine": affine},
            lambda s, o, t=target: layers.HypBatchNorm(s.features, s.manifold(0), _to(s, t), **o, **s.factory),
            note=to,
        )
    _register(
        layers.HypDropout,
        {"p": 0.5},
        lambda s, o, t=target: layers.HypDropout(o["p"], s.manifold(0), _to(s, t)),
        note=to,
    )
    _register(
        layers.HypConcat,
        {},
        lambda s, _, t=target: layers.HypConcat(s.manifold(0), _to(s, t)),
        lambda s: (s.points(s.nodes, s.features), s.points(s.nodes, 2)),
        to,
    )
_register(
    layers.HypBatchNorm,
    {"track_running_stats": False, "momentum": 0.5},
    lambda s, o: layers.HypBatchNorm(s.features, s.manifold(0), **o, **s.factory),
)

# Midpoints.
for epsilon, target in itertools.product((1.0, 0.25), (0, 1)):
    _register(
        layers.HypResidual,
        {"epsilon": epsilon},
        lambda s, o, t=target: layers.HypResidual(s.manifold(0), _to(s, t), manifold_branch=s.manifold(2), **o),
        lambda s: (s.points(s.nodes, s.features), s.points(s.nodes, s.features, index=2)),
        f"to {target}",
    )
for epsilon in (1.0, 0.25):
    _register(
        layers.HypPositionalEncoding,
        {"epsilon": epsilon},
        lambda s, o: layers.HypPositionalEncoding(s.features, s.manifold(0), **o, **s.factory),
        target="manifold",
    )

# Attention: three curvatures, one graph and padded graphs.
for heads, power, average, target, inputs in (
    (1, 2.0, "space", 0, _points),
    (2, 2.0, "space", 1, _points),
    (3, 1.0, "space", 1, _padded),
    (2, 3.0, "space", 0, _padded),
    (2, 2.0, "midpoint", 1, _points),
    (1, 2.0, "midpoint", 0, _padded),
):
    _register(
        layers.HypLinearAttention,
        {"heads": heads, "power": power, "average": average},
        lambda s, o, t=target: layers.HypLinearAttention(
            s.features,
            manifold_in=s.manifold(0),
            manifold_out=_to(s, t),
            manifold_hidden=s.manifold(2),
            **o,
            **s.factory,
        ),
        inputs,
        f"to {target}",
    )
for options, target, inputs in (
    *(({"similarity": name}, 0, _points) for name in ("geodesic_squared", "lorentz_squared", "geodesic")),
    *(({"similarity": name, "heads": 2}, 1, _padded) for name in ("geodesic_squared", "lorentz_squared", "geodesic")),
    ({"heads": 2, "dropout": 0.5}, 0, _points),
    ({"similarity": "lorentz_squared", "heads": 2, "dropout": 0.3}, 1, _padded),
):
    _register(
        layers.HypSoftmaxAttention,
        options,
        lambda s, o, t=target: layers.HypSoftmaxAttention(
            s.features,
            **{"heads": 1} | o,
            manifold_in=s.manifold(0),
            manifold_out=_to(s, t),
            manifold_hidden=s.manifold(2),
            **s.factory,
        ),
        inputs,
        f"to {target}",
    )

# Classifiers.
for kind in (layers.HypMLR, layers.HypPrototypes):
    _register(kind, {}, lambda s, _, kind=kind: kind(s.features, 3, s.manifold(0), **s.factory), target=None)

# Euclidean graph encoders.
for options in (
    {"layers": 1},
    {"layers": 2},
    {"layers": 3, "residual": True},
    {"layers": 2, "dropout": 0.4},
    {"layers": 3, "residual": True, "dropout": 0.3},
):
    _register(layers.GCN, options, lambda s, o: layers.GCN(s.features, 4, 3, **o, **s.factory), _graph, target=None)
for options in ({"steps": 1, "teleport": 0.1}, {"steps": 4, "teleport": 0.5}, {"steps": 2, "dropout": 0.4}):
    _register(
        layers.Propagation,
        options,
        lambda s, o: layers.Propagation(s.features, 4, 3, **o, **s.factory),
        _graph,
        target=None,
    )

# Learned points.
_register(
    manifolds.LorentzPoints,
    {},
    lambda s, _: manifolds.LorentzPoints(s.nodes, s.features, s.manifold(1), std=s.radius, **s.factory),
    lambda _: (),
    target="manifold",
)
_register(
    manifolds.LorentzEmbedding,
    {},
    lambda s, _: manifolds.LorentzEmbedding(s.nodes, s.features, s.manifold(1), **s.factory),
    lambda s: (torch.arange(s.nodes, device=s.device).flip(0)[:, None],),
    target="manifold",
)

# Models.
for options, target, inputs in (
    ({"attention": "linear"}, 0, _points),
    ({"attention": "softmax", "norm": "rms"}, 1, _points),
    ({"attention": "linear", "heads": 1, "power": 3.0, "activation": nn.functional.gelu}, 1, _padded),
    ({"attention": "linear", "average": "midpoint", "dropout": 0.3}, 1, _padded),
    ({"attention": "softmax", "similarity": "geodesic", "heads": 1, "dropout": 0.5, "norm_eps": 0.1}, 0, _padded),
):
    _register(
        models.HypformerBlock,
        options,
        lambda s, o, t=target: models.HypformerBlock(
            s.features,
            manifold_in=s.manifold(0),
            manifold_out=_to(s, t),
            manifold_attention=s.manifold(2),
            manifold_feedforward=s.manifold(1),
            **{"heads": 2, "feedforward": 5} | o,
            **s.factory,
        ),
        inputs,
        f"to {target}",
    )
for options, inputs in (
    ({}, _graph),
    ({"attention": "softmax", "decoder": "mlr", "layers": 1}, _graph),
    (
        {
            "attention": "softmax",
            "similarity": "lorentz_squared",
            "decoder": "prototypes",
            "heads": 2,
            "layers": 1,
        },
        _graph,
    ),
    (
        {"graph_encoder": None, "power": 3.0, "layers": 1, "activation": nn.functional.gelu, "curvature": -0.2},
        _raw,
    ),
    ({"transformer": False, "decoder": "mlr"}, _graph),
    ({"dropout": 0.3, "output_dropout": 0.5, "graph_weight": 0.7, "layers": 1}, _graph),
    ({"learnable_curvature": False, "feedforward": 3, "norm": "rms", "norm_eps": 0.1, "layers": 1}, _graph),
):
    _register(
        models.Hypformer,
        options,
        lambda s, o: models.Hypformer(s.features, 8, 3, **o, **s.factory),
        inputs,
        target=None,
    )
_register(
    models.Hypformer,
    {"layers": 1, "dropout": 0.2, "output_dropout": 0.3, "average": "midpoint"},
    lambda s, o: Points(models.Hypformer(s.features, 8, 3, **o, **s.factory)),
    _graph,
    "points",
    formula=hypformer_points,
)
