"""Hyperbolic attention among tokens in order, to the tokens of a memory, and with masks of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers, models
from holonomy.manifolds import Lorentz
from tests.reference.sequences import called
from tests.registry.case import Case, Inputs, Options, Setting

__all__ = ["CASES"]


class Called(nn.Module):
    """A layer that is called with more than the tensors of a case."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def manifold_out(self) -> Lorentz:
        return self.inner.manifold_out


class InOrder(Called):
    """No token attends to later ones."""

    def arguments(self, x: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Any, Any]:
        return (x, key_padding_mask), {"is_causal": True}

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        positional, named = self.arguments(x, key_padding_mask)
        return self.inner(*positional, **named)


class ToMemory(Called):
    """Cross attention."""

    def arguments(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> tuple[Any, Any]:
        return (x, memory_mask), {"memory": memory}

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        positional, named = self.arguments(x, memory, memory_mask)
        return self.inner(*positional, **named)


class Masked(Called):
    """Some pairs do not attend; every token may attend to itself."""

    def arguments(self, x: Tensor, attn_mask: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Any, Any]:
        return (x, key_padding_mask), {"attn_mask": attn_mask}

    def forward(self, x: Tensor, attn_mask: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        positional, named = self.arguments(x, attn_mask, key_padding_mask)
        return self.inner(*positional, **named)


def _points(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.points(2, setting.nodes, setting.features),)


def _padded(setting: Setting) -> tuple[Tensor, ...]:
    return *_points(setting), setting.padding()


def _memory(setting: Setting) -> tuple[Tensor, ...]:
    """Three tokens, of which the last is padding in the second of two memories."""
    mask = torch.zeros(2, 3, dtype=torch.bool, device=setting.device)
    mask[1, -1] = True
    return *_points(setting), setting.points(2, 3, setting.features), mask


def _hidden(setting: Setting) -> tuple[Tensor, ...]:
    pairs = torch.rand(setting.nodes, setting.nodes, device=setting.device) < 0.3
    return *_points(setting), pairs & ~torch.eye(setting.nodes, dtype=torch.bool, device=setting.device)


def _added(setting: Setting) -> tuple[Tensor, ...]:
    x, hidden = _hidden(setting)
    added = torch.randn(2, 1, setting.nodes, setting.nodes, **setting.factory).masked_fill(hidden, -math.inf)
    return x, added, setting.padding()


def _raw(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.vectors(setting.nodes, setting.features),)


def _raw_padded(setting: Setting) -> tuple[Tensor, ...]:
    return setting.vectors(2, setting.nodes, setting.features), setting.padding()


def _layer(kind: type[nn.Module], target: int) -> Callable[[Setting, Options], nn.Module]:
    def make(s: Setting, options: Options) -> nn.Module:
        to = None if target == 0 else s.manifold(target)
        manifolds = {"manifold_in": s.manifold(0), "manifold_out": to}
        if kind is models.HypformerBlock:
            manifolds |= {"manifold_attention": s.manifold(2), "manifold_feedforward": s.manifold(1)}
            return kind(s.features, **{"heads": 2, "feedforward": 5} | options, **manifolds, **s.factory)
        return kind(s.features, **{"heads": 2} | options, **manifolds, manifold_hidden=s.manifold(2), **s.factory)

    return make


CASES: list[Case] = []


def _register(
    kind: type[nn.Module], outer: type[Called], options: Options, target: int, inputs: Inputs, **flags: bool
) -> None:
    make = _layer(kind, target)
    note = {InOrder: "in order", ToMemory: "to a memory", Masked: "masked"}[outer]
    note += {_points: "", _padded: ", padded", _memory: "", _hidden: "", _added: ", added"}[inputs] + f", to {target}"
    CASES.append(
        Case(
            kind,
            options,
            lambda s, o: outer(make(s, o)),
            inputs,
            note,
            target="manifold_out",
            in_order=outer is InOrder,
            formula=called,
            **{"any_radius": True} | flags,
        )
    )


for options, target, inputs in (
    ({"heads": 1, "power": 2.0}, 1, _points),
    ({"heads": 3, "power": 1.0}, 0, _padded),
    ({"power": 3.0}, 1, _padded),
    ({"average": "midpoint"}, 1, _padded),
):
    _register(layers.HypLinearAttention, InOrder, options, target, inputs)
for average, target in (("space", 1), ("midpoint", 0)):
    _register(layers.HypLinearAttention, ToMemory, {"average": average}, target, _memory)
for similarity, target in (("geodesic_squared", 1), ("lorentz_squared", 0), ("geodesic", 1)):
    for outer, inputs in ((InOrder, _points), (InOrder, _padded), (ToMemory, _memory), (Masked, _added)):
        _register(layers.HypSoftmaxAttention, outer, {"similarity": similarity}, target, inputs)
for options, outer, inputs in (
    ({"similarity": "lorentz_squared", "dropout": 0.4}, InOrder, _padded),
    ({"heads": 1}, Masked, _hidden),
    ({"similarity": "lorentz_squared"}, Masked, _hidden),
):
    _register(layers.HypSoftmaxAttention, outer, options, 1, inputs)
for options, outer, inputs in (
    ({"attention": "linear"}, InOrder, _padded),
    ({"attention": "linear", "average": "midpoint"}, InOrder, _points),
    ({"attention": "softmax"}, InOrder, _padded),
    ({"attention": "linear"}, ToMemory, _memory),
    ({"attention": "softmax", "similarity": "geodesic"}, ToMemory, _memory),
    ({"attention": "softmax", "similarity": "geodesic"}, Masked, _hidden),
):
    _register(models.HypformerBlock, outer, options, 1, inputs)
for options, outer, inputs in (
    ({"order": 1}, InOrder, _points),
    ({"order": 2}, InOrder, _padded),
    ({"order": 2, "lower_orders": True}, InOrder, _points),
    ({"order": 2, "form": "determinant"}, ToMemory, _memory),
    ({"order": 2, "form": "determinant"}, Masked, _hidden),
    ({"order": 1}, Masked, _hidden),
):
    _register(layers.HypSimplicialAttention, outer, options, 1, inputs, any_radius=False)

for options, in_order, inputs in (
    ({"layers": 2}, False, _raw),
    ({"layers": 1, "heads": 2, "max_tokens": 9}, False, _raw),
    ({"layers": 1, "attention": "softmax", "heads": 2, "max_tokens": 9}, False, _raw),
    ({"layers": 1, "power": 3.0, "norm_eps": 0.1, "max_tokens": 9, "dropout": 0.3}, False, _raw_padded),
    ({"layers": 1, "max_tokens": 9, "activation": nn.functional.gelu, "curvature": -0.3}, True, _raw_padded),
    ({"layers": 2, "average": "midpoint"}, True, _raw),
    ({"layers": 1, "attention": "softmax", "similarity": "geodesic", "max_tokens": 9}, True, _raw_padded),
):

    def make(s: Setting, o: Options, in_order: bool = in_order) -> nn.Module:
        model = models.HypTransformer(s.features, 6, **{"feedforward": 5} | o, **s.factory)
        return InOrder(model) if in_order else model

    CASES.append(
        Case(
            models.HypTransformer,
            options,
            make,
            inputs,
            ", ".join(["in order"] * in_order + ["padded"] * (inputs is _raw_padded)),
            target="manifold_out",
            any_radius=True,
            in_order=in_order or "max_tokens" in options,
            formula=called if in_order else None,
        )
    )


def _raw_hidden(setting: Setting) -> tuple[Tensor, ...]:
    return _raw_padded(setting)[0], _hidden(setting)[1]


for options, outer, inputs in (
    ({"order": 1, "rope": True}, InOrder, _raw),
    ({"order": 2, "lower_orders": True}, InOrder, _raw_padded),
    ({"order": 2, "form": "determinant", "window": 3}, InOrder, _raw),
    ({"order": 1}, Masked, _raw_hidden),
    ({"order": 2}, Masked, _raw_hidden),
):
    CASES.append(
        Case(
            layers.SimplicialAttention,
            options,
            lambda s, o, outer=outer: outer(layers.SimplicialAttention(s.features, 2, **o, **s.factory)),
            inputs,
            {InOrder: "in order", Masked: "masked"}[outer] + ", padded" * (inputs is _raw_padded),
            in_order=outer is InOrder,
            formula=called,
        )
    )
