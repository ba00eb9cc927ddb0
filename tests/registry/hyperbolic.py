"""Hyperbolic layers, learned points and Hypformer, with the Euclidean graph encoders that run beside them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers, manifolds, models
from holonomy.manifolds import Lorentz
from tests.registry.case import Case, Inputs, Make, Setting

__all__ = ["CASES"]


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


def _register(kind: type[nn.Module], options: str, make: Make, inputs: Inputs = _points, **flags: Any) -> None:
    CASES.append(Case(f"{kind.__name__}[{options}]", kind, make, inputs, **flags))


# Linear maps: with and without bias, with and without a change of curvature.
for kind, bias, target in itertools.product(
    (layers.HTC, layers.ExpMapHTC, layers.TangentLinear, layers.FullyLorentzLinear), (True, False), (0, 1)
):
    raw = kind is layers.ExpMapHTC
    _register(
        kind,
        f"bias={bias}, to={target}",
        lambda s, kind=kind, bias=bias, target=target: kind(
            s.features, 3, s.manifold(0), _to(s, target), bias=bias, **s.factory
        ),
        _raw if raw else _points,
        source=None if raw else 0,
        target=target,
    )
_register(
    layers.FullyLorentzLinear,
    "activation=tanh, scale=2",
    lambda s: layers.FullyLorentzLinear(s.features, 3, s.manifold(0), activation=torch.tanh, scale=2.0, **s.factory),
)

# Refinements.
for target in (0, 1):
    to = f"to={target}"
    _register(
        layers.HRC, to, lambda s, t=target: layers.HRC(nn.functional.silu, s.manifold(0), _to(s, t)), target=target
    )
    for function in (torch.relu, torch.tanh):
        _register(
            layers.HypActivation,
            f"{function.__name__}, {to}",
            lambda s, f=function, t=target: layers.HypActivation(f, s.manifold(0), _to(s, t)),
            target=target,
        )
    for affine in (True, False):
        _register(
            layers.HypLayerNorm,
            f"affine={affine}, {to}",
            lambda s, a=affine, t=target: layers.HypLayerNorm(
                s.features, s.manifold(0), _to(s, t), elementwise_affine=a, **s.factory
            ),
            target=target,
        )
        _register(
            layers.HypBatchNorm,
            f"affine={affine}, {to}",
            lambda s, a=affine, t=target: layers.HypBatchNorm(
                s.features, s.manifold(0), _to(s, t), affine=a, **s.factory
            ),
            target=target,
        )
    _register(
        layers.HypDropout,
        to,
        lambda s, t=target: layers.HypDropout(0.5, s.manifold(0), _to(s, t)),
        target=target,
        random=True,
    )
    _register(
        layers.HypConcat,
        to,
        lambda s, t=target: layers.HypConcat(s.manifold(0), _to(s, t)),
        lambda s: (s.points(s.nodes, s.features), s.points(s.nodes, 2)),
        target=target,
    )
_register(
    layers.HypBatchNorm,
    "track_running_stats=False, momentum=0.5",
    lambda s: layers.HypBatchNorm(s.features, s.manifold(0), momentum=0.5, track_running_stats=False, **s.factory),
)

# Midpoints.
for epsilon, target in itertools.product((1.0, 0.25), (0, 1)):
    _register(
        layers.HypResidual,
        f"epsilon={epsilon}, to={target}",
        lambda s, e=epsilon, t=target: layers.HypResidual(
            s.manifold(0), _to(s, t), manifold_branch=s.manifold(2), epsilon=e
        ),
        lambda s: (s.points(s.nodes, s.features), s.points(s.nodes, s.features, index=2)),
        target=target,
    )
for epsilon in (1.0, 0.25):
    _register(
        layers.HypPositionalEncoding,
        f"epsilon={epsilon}",
        lambda s, e=epsilon: layers.HypPositionalEncoding(s.features, s.manifold(0), epsilon=e, **s.factory),
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
        f"heads={heads}, power={power}, average={average}, to={target}, padded={inputs is _padded}",
        lambda s, h=heads, p=power, a=average, t=target: layers.HypLinearAttention(
            s.features, h, s.manifold(0), _to(s, t), manifold_hidden=s.manifold(2), power=p, average=a, **s.factory
        ),
        inputs,
        target=target,
        nodewise=inputs is _points,
    )
for similarity, (heads, target, inputs) in itertools.product(
    ("geodesic_squared", "lorentz_squared", "geodesic"), ((1, 0, _points), (2, 1, _padded))
):
    _register(
        layers.HypSoftmaxAttention,
        f"{similarity}, heads={heads}, to={target}, padded={inputs is _padded}",
        lambda s, sim=similarity, h=heads, t=target: layers.HypSoftmaxAttention(
            s.features, h, s.manifold(0), _to(s, t), manifold_hidden=s.manifold(2), similarity=sim, **s.factory
        ),
        inputs,
        target=target,
        nodewise=inputs is _points,
    )
_register(
    layers.HypSoftmaxAttention,
    "dropout=0.5",
    lambda s: layers.HypSoftmaxAttention(s.features, 2, s.manifold(0), dropout=0.5, **s.factory),
    random=True,
)

# Classifiers.
for kind in (layers.HypMLR, layers.HypPrototypes):
    _register(kind, "", lambda s, kind=kind: kind(s.features, 3, s.manifold(0), **s.factory), target=None)

# Euclidean graph encoders.
for depth, residual in ((1, False), (2, False), (3, True)):
    _register(
        layers.GCN,
        f"layers={depth}, residual={residual}",
        lambda s, n=depth, r=residual: layers.GCN(s.features, 4, 3, layers=n, residual=r, **s.factory),
        _graph,
        source=None,
        target=None,
        nodewise=False,
    )
for steps, teleport in ((1, 0.1), (4, 0.5)):
    _register(
        layers.Propagation,
        f"steps={steps}, teleport={teleport}",
        lambda s, n=steps, t=teleport: layers.Propagation(s.features, 4, 3, steps=n, teleport=t, **s.factory),
        _graph,
        source=None,
        target=None,
        nodewise=False,
    )

# Learned points.
_register(
    manifolds.LorentzPoints,
    "",
    lambda s: manifolds.LorentzPoints(s.nodes, s.features, s.manifold(1), std=s.radius, **s.factory),
    lambda _: (),
    source=None,
    target=1,
    nodewise=False,
)
_register(
    manifolds.LorentzEmbedding,
    "",
    lambda s: manifolds.LorentzEmbedding(s.nodes, s.features, s.manifold(1), **s.factory),
    lambda s: (torch.arange(s.nodes, device=s.device).flip(0)[:, None],),
    source=None,
    target=1,
    nodewise=False,
)

# Models.
for attention, target in (("linear", 0), ("softmax", 1)):
    _register(
        models.HypformerBlock,
        f"{attention}, to={target}",
        lambda s, a=attention, t=target: models.HypformerBlock(
            s.features,
            2,
            s.manifold(0),
            _to(s, t),
            manifold_attention=s.manifold(2),
            manifold_feedforward=s.manifold(1),
            feedforward=5,
            attention=a,
            **s.factory,
        ),
        target=target,
    )
_register(
    models.HypformerBlock,
    "similarity=geodesic, dropout=0.5, padded",
    lambda s: models.HypformerBlock(
        s.features, 1, s.manifold(0), attention="softmax", similarity="geodesic", dropout=0.5, norm_eps=0.1, **s.factory
    ),
    _padded,
    random=True,
    nodewise=False,
)
for name, options, graph in (
    ("default", {}, True),
    ("softmax, mlr", {"attention": "softmax", "decoder": "mlr", "layers": 1}, True),
    ("lorentz_squared, prototypes, heads=2", {
        "attention": "softmax", "similarity": "lorentz_squared", "decoder": "prototypes", "heads": 2, "layers": 1,
    }, True),
    ("no graph, power=3, gelu", {
        "graph_encoder": None, "power": 3.0, "layers": 1, "activation": nn.functional.gelu, "curvature": -0.2,
    }, False),
    ("no transformer, mlr", {"transformer": False, "decoder": "mlr"}, True),
    ("dropout", {"dropout": 0.3, "output_dropout": 0.5, "graph_weight": 0.9, "layers": 1}, True),
    ("fixed curvature", {"learnable_curvature": False, "feedforward": 3, "norm_eps": 0.1, "layers": 1}, True),
):  # fmt: skip
    _register(
        models.Hypformer,
        name,
        lambda s, options=options: models.Hypformer(s.features, 8, 3, **options, **s.factory),
        _graph if graph else _raw,
        source=None,
        target=None,
        random=name == "dropout",
        nodewise=not graph,
    )
