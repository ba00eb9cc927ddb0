"""Equivariant linear maps, higher-order attention, and the models made of them, on dense tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holonomy import layers, models
from tests.registry.case import Case, Inputs, Make, Options, Setting

__all__ = ["CASES"]


class OfTensors(nn.Module):
    """A model called with a dense tensor; tests/models is about graphs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner.tensor(x, mask)


def _tensors(order: int, *, masked: bool) -> Inputs:
    """Two tensors of an order, and which of their nodes are there."""

    def inputs(setting: Setting) -> tuple[Tensor, ...]:
        x = setting.vectors(2, *[setting.nodes] * order, setting.features)
        return (x, ~setting.padding()) if masked else (x,)

    return inputs


CASES: list[Case] = []


def _register(
    kind: type[nn.Module], orders: tuple[int, ...], options: Options, make: Make, *, masked: bool = False
) -> None:
    """Of no more nodes than it takes for every class to have a choice."""
    note = " -> ".join(map(str, orders)) + ", masked" * masked
    most = max(3, orders[0] + max(orders[1:]) + masked)
    CASES.append(Case(kind, options, make, _tensors(orders[0], masked=masked), note, most_nodes=most))


# Every pair of orders in tests/layers; here the ones that differ in kind.
for orders, options, masked in (
    ((1, 1), {}, False),
    ((2, 2), {}, False),
    ((2, 0), {"bias": False}, True),
    ((1, 3), {"lightweight": True}, False),
    ((3, 1), {"normalise": "counts"}, False),
    ((2, 2), {"lightweight": True, "bias": False}, True),
    ((2, 1), {"normalise": "counts"}, True),
):
    _register(
        layers.EquivariantLinear,
        orders,
        options,
        lambda s, o, ends=orders: layers.EquivariantLinear(*ends, s.features, 3, **o, **s.factory),
        masked=masked,
    )

for orders, options, masked in (
    ((1, 1), {}, False),
    ((1, 2), {"value_features": 2}, True),
    ((2, 0), {}, False),
    ((2, 1), {"local": True}, True),
    ((2, 2), {"query_features": 2}, False),
    ((1, 0), {"kernel": "performer"}, True),
    ((1, 2), {"kernel": "performer", "random_features": 3}, False),
    ((2, 1), {"kernel": "performer", "sums": "decoupled"}, True),
):
    _register(
        layers.HigherOrderAttention,
        orders,
        options,
        lambda s, o, ends=orders: layers.HigherOrderAttention(*ends, s.features, 2, **o, **s.factory),
        masked=masked,
    )

for orders, options, masked in (
    ((1, 1), {"dropout": 0.4}, True),
    ((2, 1), {"dropout": 0.5, "activation": torch.tanh}, False),
    ((1, 2), {"kernel": "performer", "local": True}, True),
    ((2, 2), {"entrywise": True}, False),
):
    _register(
        layers.HigherOrderEncoderLayer,
        orders,
        options,
        lambda s, o, ends=orders: layers.HigherOrderEncoderLayer(*ends, s.features, 2, 5, **o, **s.factory),
        masked=masked,
    )

for kind, orders, options, masked in (
    (models.HigherOrderTransformer, (2, 1, 0), {"heads": 2, "dropout": 0.2}, True),
    (models.HigherOrderTransformer, (1, 2), {"heads": 1, "kernel": "performer", "feedforward": 3}, False),
    (models.HigherOrderTransformer, (1, 2), {"heads": 1, "entrywise": True}, True),
    (models.InvariantGraphNetwork, (2, 2, 0), {"normalise": "counts"}, True),
    (models.InvariantGraphNetwork, (1, 2), {"activation": torch.tanh, "dropout": 0.2, "entrywise": True}, False),
):
    _register(
        kind,
        orders,
        options,
        lambda s, o, kind=kind, orders=orders: OfTensors(kind(s.features, 6, 2, orders=orders, **o, **s.factory)),
        masked=masked,
    )
