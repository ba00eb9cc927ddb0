"""Simplicial attention, its routers, and the transformer made of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from holonomy import layers, models
from tests.registry.case import Case, Inputs, Make, Setting, described

__all__ = ["CASES"]


class OnPaths(nn.Module):
    """A router with an attention whose own projections choose its paths, so that one tensor comes out."""

    def __init__(self, attention: layers.SimplicialAttention, router: layers.PathRouter) -> None:
        super().__init__()
        self.attention, self.router = attention, router

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x if padding is None else x.masked_fill(padding[..., None], 0.0)
        keys, values = self.attention.projected(x)
        steps, scores = self.router(x, keys[0], keys[1], padding)
        return self.attention.along_paths(keys, values, steps, scores)


def _raw(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.vectors(setting.nodes, setting.features),)


def _padded(setting: Setting) -> tuple[Tensor, ...]:
    return setting.vectors(2, setting.nodes, setting.features), setting.padding()


def _repeated(setting: Setting) -> tuple[Tensor, ...]:
    x = setting.vectors(2, setting.nodes, setting.features)
    return x[:, [max(0, node - 2) // 2 for node in range(setting.nodes)]], setting.padding()


def _points(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.points(setting.nodes, setting.features),)


def _padded_points(setting: Setting) -> tuple[Tensor, ...]:
    return setting.points(2, setting.nodes, setting.features), setting.padding()


CASES: list[Case] = []


def _register(kind: type[nn.Module], options: str, make: Make, inputs: Inputs, **flags: Any) -> None:
    flags = {"source": None, "target": None, "nodewise": False, "any_radius": False} | flags
    CASES.append(Case(f"{kind.__name__}[{options}]", kind, make, inputs, **flags))


for options in (
    {"order": 1},
    {"order": 1, "rope": True},
    {"order": 1, "form": "determinant"},
    {"order": 2},
    {"order": 2, "causal": True},
    {"order": 2, "window": 2},
    {"order": 2, "window": (3, 2), "causal": True, "lower_orders": True},
    {"order": 2, "form": "determinant"},
    {"order": 2, "form": "determinant", "rope": True, "causal": True},
    {"order": 2, "lower_orders": True, "causal": True},
    {"order": 3},
    {"order": 3, "causal": True},
):
    _register(
        layers.SimplicialAttention,
        described(options),
        lambda s, options=options: layers.SimplicialAttention(s.features, 2, **options, **s.factory),
        _raw,
        nodewise=not any(options.get(name) for name in ("causal", "window", "rope")),
    )
for options in ({"order": 3, "form": "determinant"}, {"order": 2, "lower_orders": True, "form": "determinant"}):
    _register(
        layers.SimplicialAttention,
        f"one head, padded, {described(options)}",
        lambda s, options=options: layers.SimplicialAttention(s.features, 1, **options, **s.factory),
        _padded,
    )

for options, causal in (({"order": 2}, True), ({"order": 3, "form": "determinant"}, False)):
    for inputs in (_raw, _padded):
        _register(
            layers.PathRouter,
            f"{described(options)}, causal={causal}, padded={inputs is _padded}",
            lambda s, options=options, causal=causal: OnPaths(
                layers.SimplicialAttention(s.features, 1, **options, **s.factory),
                layers.PathRouter(s.features, 1, 2, causal=causal, **s.factory),
            ),
            inputs,
            true_gradient=False,
            nodewise=inputs is _raw and not causal,
        )

for causal in (False, True):
    _register(
        layers.PathRouter,
        f"distinct, causal={causal}",
        lambda s, causal=causal: OnPaths(
            layers.SimplicialAttention(s.features, 1, **s.factory),
            layers.PathRouter(s.features, 1, 2, causal=causal, distinct=True, **s.factory),
        ),
        _repeated,
        true_gradient=False,
    )

for inputs in (_raw, _padded):
    _register(
        layers.ExpertChoice,
        f"capacity=2, padded={inputs is _padded}",
        lambda s: layers.ExpertChoice(
            s.features, 2, layers.SimplicialAttention(s.features, 2, **s.factory), **s.factory
        ),
        inputs,
        nodewise=inputs is _raw,
    )

for options in ({"order": 2}, {"order": 2, "capacity": 3}, {"order": 1, "rope": True, "causal": True}):
    _register(
        layers.SimplicialEncoderLayer,
        f"padded, {described(options)}",
        lambda s, options=options: layers.SimplicialEncoderLayer(s.features, 2, feedforward=5, **options, **s.factory),
        _padded,
    )
_register(
    layers.SimplicialEncoderLayer,
    "dropout=0.3",
    lambda s: layers.SimplicialEncoderLayer(s.features, 2, feedforward=5, dropout=0.3, **s.factory),
    _raw,
    random=True,
)

for options in (
    {"orders": (1, 2), "causal": True, "rope": True},
    {"orders": (1, 2), "steps": 2},
    {"orders": (1, 2), "steps": 2, "distinct": True},
    {"orders": (2,), "capacity": 2, "form": "determinant"},
):
    _register(
        models.SimplicialTransformer,
        described(options),
        lambda s, options=options: models.SimplicialTransformer(s.features, 2, feedforward=5, **options, **s.factory),
        _raw,
        true_gradient="steps" not in options,
        nodewise=not options.get("causal"),
    )

for options in (
    {"order": 1},
    {"order": 2},
    {"order": 2, "causal": True, "lower_orders": True},
    {"order": 2, "form": "determinant"},
):
    for inputs in (_points, _padded_points):
        _register(
            layers.HypSimplicialAttention,
            f"{described(options)}, padded={inputs is _padded_points}",
            lambda s, options=options: layers.HypSimplicialAttention(
                s.features, 2, s.manifold(0), s.manifold(2), manifold_hidden=s.manifold(1), **options, **s.factory
            ),
            inputs,
            source=0,
            target=2,
            nodewise=inputs is _points and not options.get("causal"),
        )
