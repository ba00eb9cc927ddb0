"""Simplicial attention, its routers, and the transformer made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers, models
from tests.registry.case import Case, Inputs, Make, Options, Setting

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


def _masked(setting: Setting) -> tuple[Tensor, ...]:
    """Pairs that must not attend, beside padding; every token may attend to itself."""
    x, padding = _padded(setting)
    pairs = torch.rand(2, setting.nodes, setting.nodes, device=setting.device) < 0.3
    return x, pairs & ~torch.eye(setting.nodes, dtype=torch.bool, device=setting.device), padding


def _repeated(setting: Setting) -> tuple[Tensor, ...]:
    x = setting.vectors(2, setting.nodes, setting.features)
    return x[:, [max(0, node - 2) // 2 for node in range(setting.nodes)]], setting.padding()


def _points(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.points(setting.nodes, setting.features),)


def _padded_points(setting: Setting) -> tuple[Tensor, ...]:
    return setting.points(2, setting.nodes, setting.features), setting.padding()


CASES: list[Case] = []


def _register(
    kind: type[nn.Module], options: Options, make: Make, inputs: Inputs, note: str = "", **flags: Any
) -> None:
    note += ", padded" * (inputs in {_padded, _padded_points})
    CASES.append(Case(kind, options, make, inputs, note.removeprefix(", "), **flags))


for options, inputs in (
    *(
        (options, _raw)
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
        )
    ),
    ({"heads": 1, "order": 3, "form": "determinant"}, _padded),
    ({"heads": 1, "order": 2, "lower_orders": True, "form": "determinant"}, _padded),
):
    _register(
        layers.SimplicialAttention,
        options,
        lambda s, o: layers.SimplicialAttention(s.features, **{"heads": 2} | o, **s.factory),
        inputs,
    )

for options, inputs, distinct in (
    *(
        (options, inputs, False)
        for options in ({"order": 2, "causal": True}, {"order": 3, "form": "determinant"})
        for inputs in (_raw, _padded)
    ),
    ({}, _repeated, True),
    ({"causal": True}, _repeated, True),
):
    _register(
        layers.PathRouter,
        options,
        lambda s, o, distinct=distinct: OnPaths(
            layers.SimplicialAttention(
                s.features, 1, **{name: value for name, value in o.items() if name != "causal"}, **s.factory
            ),
            layers.PathRouter(s.features, 1, 2, causal="causal" in o, distinct=distinct, **s.factory),
        ),
        inputs,
        "distinct" * distinct,
        routed=True,
    )

for inputs in (_raw, _padded):
    _register(
        layers.ExpertChoice,
        {"capacity": 2},
        lambda s, o: layers.ExpertChoice(
            s.features, inner=layers.SimplicialAttention(s.features, 2, **s.factory), **o, **s.factory
        ),
        inputs,
    )

for options, inputs in (
    ({"order": 2}, _padded),
    ({"order": 2, "capacity": 3}, _padded),
    ({"order": 1, "rope": True, "causal": True}, _padded),
    ({"dropout": 0.3}, _raw),
):
    _register(
        layers.SimplicialEncoderLayer,
        options,
        lambda s, o: layers.SimplicialEncoderLayer(s.features, 2, feedforward=5, **o, **s.factory),
        inputs,
    )

for options, inputs in (
    ({"orders": (1, 2), "causal": True, "rope": True}, _raw),
    ({"orders": (1, 2), "steps": 2}, _raw),
    ({"orders": (1, 2), "steps": 2, "distinct": True}, _raw),
    ({"orders": (2,), "capacity": 2, "form": "determinant"}, _raw),
    ({"orders": (1, 2), "dropout": 0.2}, _masked),
):
    _register(
        models.SimplicialTransformer,
        options,
        lambda s, o: models.SimplicialTransformer(s.features, 2, feedforward=5, **o, **s.factory),
        inputs,
        "masked" * (inputs is _masked),
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
            options,
            lambda s, o: layers.HypSimplicialAttention(
                s.features, 2, s.manifold(0), s.manifold(2), manifold_hidden=s.manifold(1), **o, **s.factory
            ),
            inputs,
            target="manifold_out",
        )
