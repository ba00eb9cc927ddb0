"""Equivariant linear maps, higher-order attention, and the models made of them, on dense tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers, models
from tests.registry.case import Case, Inputs, Make, Setting, described

__all__ = ["CASES"]


class OfTensors(nn.Module):
    """A model called with a dense tensor; tests/models is about graphs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.tensor(x)


def _tensor(order_in: int, order_out: int) -> Inputs:
    """Two tensors, of no more nodes than it takes for every class to have a choice."""

    def inputs(setting: Setting) -> tuple[Tensor, ...]:
        nodes = min(setting.nodes, order_in + order_out + 1)
        return (setting.vectors(2, *[nodes] * order_in, setting.features),)

    return inputs


CASES: list[Case] = []


def _register(kind: type[nn.Module], options: str, make: Make, inputs: Inputs, **flags: Any) -> None:
    flags = {"source": None, "target": None, "nodewise": False, "any_radius": False} | flags
    CASES.append(Case(f"{kind.__name__}[{options}]", kind, make, inputs, **flags))


# Every pair of orders in tests/layers; here the ones that differ in kind.
for order_in, order_out, options in (
    (1, 1, {}),
    (2, 2, {}),
    (2, 0, {"bias": False}),
    (1, 3, {"lightweight": True}),
    (3, 1, {"normalise": "counts"}),
    (2, 2, {"lightweight": True, "bias": False}),
    (2, 1, {"normalise": "counts"}),
):
    _register(
        layers.EquivariantLinear,
        f"{order_in} -> {order_out}, {described(options)}",
        lambda s, ends=(order_in, order_out), o=options: layers.EquivariantLinear(
            *ends, s.features, 3, **o, **s.factory
        ),
        _tensor(order_in, order_out),
    )

for order_in, order_out, options in (
    (1, 1, {}),
    (1, 2, {"value_features": 2}),
    (2, 0, {}),
    (2, 1, {"local": True}),
    (2, 2, {"query_features": 2}),
    (1, 0, {"kernel": "performer"}),
    (1, 2, {"kernel": "performer", "random_features": 3}),
    (2, 1, {"kernel": "performer", "sums": "decoupled"}),
):
    _register(
        layers.HigherOrderAttention,
        f"{order_in} -> {order_out}, {described(options)}",
        lambda s, ends=(order_in, order_out), o=options: layers.HigherOrderAttention(
            *ends, s.features, 2, **o, **s.factory
        ),
        _tensor(order_in, order_out),
    )

for order_in, order_out, options in (
    (1, 1, {}),
    (2, 1, {"dropout": 0.5, "activation": torch.tanh}),
    (1, 2, {"kernel": "performer", "local": True}),
    (2, 2, {"entrywise": True}),
):
    _register(
        layers.HigherOrderEncoderLayer,
        f"{order_in} -> {order_out}, {described(options)}",
        lambda s, ends=(order_in, order_out), o=options: layers.HigherOrderEncoderLayer(
            *ends, s.features, 2, 5, **o, **s.factory
        ),
        _tensor(order_in, order_out),
        random="dropout" in options,
    )

for kind, orders, options in (
    (models.HigherOrderTransformer, (2, 1, 0), {"heads": 2}),
    (models.HigherOrderTransformer, (1, 2), {"heads": 1, "kernel": "performer", "feedforward": 3}),
    (models.HigherOrderTransformer, (1, 2), {"heads": 1, "entrywise": True}),
    (models.InvariantGraphNetwork, (2, 2, 0), {"normalise": "counts"}),
    (models.InvariantGraphNetwork, (1, 2), {"activation": torch.tanh, "dropout": 0.2, "entrywise": True}),
):
    _register(
        kind,
        f"orders={orders}, {described(options)}",
        lambda s, kind=kind, orders=orders, o=options: OfTensors(
            kind(s.features, 6, 2, orders=orders, **o, **s.factory)
        ),
        _tensor(2 if orders[0] == 2 else 1, 2),
        random="dropout" in options,
    )
