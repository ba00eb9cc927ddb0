"""Chromatic attention, its encoders, and the model made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers
from tests.registry.case import Case, Inputs, Make, Setting

__all__ = ["CASES"]

EDGE_FEATURES = 3


class SideBySide(nn.Module):
    """A projection of edges as one tensor."""

    def __init__(self, inner: layers.EdgeProjection) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, edges: Tensor) -> Tensor:
        return torch.cat([x for x in self.inner(edges) if x is not None], -1)


def _nodes(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.vectors(2, setting.nodes, setting.features),)


def _pairs(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.vectors(2, setting.nodes, setting.nodes, EDGE_FEATURES),)


def _both(setting: Setting) -> tuple[Tensor, ...]:
    return *_nodes(setting), *_pairs(setting)


def _masked(setting: Setting) -> tuple[Tensor, ...]:
    return *_both(setting), ~setting.padding()


CASES: list[Case] = []


def _register(kind: type[nn.Module], options: str, make: Make, inputs: Inputs, **flags: Any) -> None:
    flags = {"source": None, "target": None, "nodewise": False, "any_radius": False} | flags
    CASES.append(Case(f"{kind.__name__}[{options}]", kind, make, inputs, **flags))


for options, inputs in (
    ({}, _both),
    ({}, _masked),
    ({"edge_values": False}, _masked),
    ({"mode": "mono"}, _masked),
    ({"mode": "mono", "edge_values": False}, _both),
    ({"mode": "additive"}, _masked),
    ({"mode": "additive", "edge_values": False, "activation": torch.tanh}, _both),
    ({"edge_features": 0}, _nodes),
    *(({"dropout": 0.5, "dropout_over": over}, _masked) for over in ("edges", "nodes", "channels")),
):
    given = {"edge_features": EDGE_FEATURES} | options
    _register(
        layers.ChromaticAttention,
        ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
        + f" on{inputs.__name__}",
        lambda s, given=given: layers.ChromaticAttention(s.features, 3, **given, **s.factory),
        inputs,
        random="dropout" in options,
    )

for mode, values in (("chromatic", True), ("mono", True), ("additive", False)):
    _register(
        layers.EdgeProjection,
        f"{mode}, edge_values={values}",
        lambda s, m=mode, v=values: SideBySide(
            layers.EdgeProjection(EDGE_FEATURES, s.features, 3, mode=m, edge_values=v, **s.factory)
        ),
        _pairs,
    )
