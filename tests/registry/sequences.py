"""Attention among tokens in order, to the tokens of a memory, and with masks of pairs."""

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
from tests.registry.products import points_of, product_of

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


class Decoder(Called):
    """Among its own tokens in order, then to a memory, of which some is padding."""

    def arguments(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> tuple[Any, Any]:
        return (x,), {"memory": memory, "memory_key_padding_mask": memory_mask, "is_causal": True}

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        positional, named = self.arguments(x, memory, memory_mask)
        return self.inner(*positional, **named)


class Remembering(Called):
    """The same beside a memory of its own, so that it is called, and goes step by step, on tokens alone."""

    def __init__(self, inner: nn.Module, memory: Tensor) -> None:
        super().__init__(inner)
        self.register_buffer("memory", memory)

    def arguments(
        self, x: Tensor, key_padding_mask: Tensor | None = None, *, is_causal: bool = False
    ) -> tuple[Any, Any]:
        return (x, key_padding_mask), {"is_causal": is_causal, **self.beside(x)}

    def beside(self, x: Tensor) -> dict[str, Tensor]:
        """The memory, whose last token is padding."""
        memory = self.memory.expand(*x.shape[:-2], *self.memory.shape[-2:])
        places = torch.arange(memory.shape[-2], device=x.device)
        return {"memory": memory, "memory_key_padding_mask": (places == 2).expand(memory.shape[:-1])}

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
        positional, named = self.arguments(x, key_padding_mask, is_causal=is_causal)
        return self.inner(*positional, **named)

    def step(self, x: Tensor, state: Any = None, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.inner.step(x, state, key_padding_mask, **({} if state is not None else self.beside(x)))


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


def _remembered(setting: Setting) -> tuple[Tensor, ...]:
    """The same on another manifold."""
    x, _, mask = _memory(setting)
    return x, setting.points(2, 3, setting.features, index=2), mask


def _raw_remembered(setting: Setting) -> tuple[Tensor, ...]:
    """Features, and a memory of the decoder's width."""
    return setting.vectors(2, setting.nodes, setting.features), setting.points(2, 3, 6, index=2), _memory(setting)[2]


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


def _layer(kind: type[nn.Module], target: int, outer: type[Called]) -> Callable[[Setting, Options], nn.Module]:
    def make(s: Setting, options: Options) -> nn.Module:
        to = None if target == 0 else s.manifold(target)
        manifolds = {"manifold_in": s.manifold(0), "manifold_out": to}
        if kind is models.HypformerBlock:
            manifolds |= {"manifold_attention": s.manifold(2), "manifold_feedforward": s.manifold(1)}
            if outer is Decoder:
                manifolds["manifold_memory"] = s.manifold(2)
            return kind(s.features, **{"heads": 2, "feedforward": 5} | options, **manifolds, **s.factory)
        return kind(s.features, **{"heads": 2} | options, **manifolds, manifold_hidden=s.manifold(2), **s.factory)

    return make


CASES: list[Case] = []
_NOTES: dict[type[nn.Module] | None, str] = {
    InOrder: "in order",
    ToMemory: "to a memory",
    Masked: "masked",
    Decoder: "decoder",
    Remembering: "beside a memory",
}


def _register(
    kind: type[nn.Module], outer: type[Called], options: Options, target: int, inputs: Inputs, **flags: bool
) -> None:
    make = _layer(kind, target, outer)
    note = _NOTES[outer]
    note += {_points: "", _padded: ", padded", _memory: "", _remembered: "", _hidden: "", _added: ", added"}[
        inputs
    ] + f", to {target}"
    CASES.append(
        Case(
            kind,
            options,
            lambda s, o: outer(make(s, o)),
            inputs,
            note,
            target="manifold_out",
            in_order=outer in (InOrder, Decoder),
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
    ({"heads": 1, "rope": True}, InOrder, _padded),
    ({"similarity": "lorentz_squared", "rope": True}, InOrder, _points),
    ({"heads": 1}, Masked, _hidden),
    ({"similarity": "lorentz_squared"}, Masked, _hidden),
):
    _register(layers.HypSoftmaxAttention, outer, options, 1, inputs)
for options, outer, inputs in (
    ({"attention": "linear"}, InOrder, _padded),
    ({"attention": "linear", "average": "midpoint"}, InOrder, _points),
    ({"attention": "softmax"}, InOrder, _padded),
    ({"attention": "softmax", "rope": True}, InOrder, _padded),
    ({"attention": "linear", "norm": "rms", "dropout": 0.3}, Decoder, _remembered),
    ({"attention": "softmax", "rope": True}, Decoder, _remembered),
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

for options, outer, inputs in (
    ({"layers": 2}, None, _raw),
    ({"layers": 1, "heads": 2, "max_tokens": 9}, None, _raw),
    ({"layers": 1, "attention": "softmax", "heads": 2, "max_tokens": 9}, None, _raw),
    ({"layers": 1, "attention": "softmax", "heads": 2, "rope": True, "norm": "rms"}, None, _raw),
    ({"layers": 1, "power": 3.0, "norm_eps": 0.1, "max_tokens": 9, "dropout": 0.3}, None, _raw_padded),
    ({"layers": 1, "max_tokens": 9, "activation": nn.functional.gelu, "curvature": -0.3}, InOrder, _raw_padded),
    ({"layers": 2, "average": "midpoint"}, InOrder, _raw),
    ({"layers": 1, "attention": "softmax", "similarity": "geodesic", "max_tokens": 9}, InOrder, _raw_padded),
    ({"layers": 1, "heads": 2, "max_tokens": 9}, Remembering, _raw),
    ({"layers": 1, "attention": "softmax", "rope": True}, Remembering, _raw),
    ({"layers": 2, "max_tokens": 9}, Decoder, _raw_remembered),
):

    def make(s: Setting, o: Options, outer: type[Called] | None = outer) -> nn.Module:
        reads = {"manifold_memory": s.manifold(2)} if outer in (Decoder, Remembering) else {}
        model = models.HypTransformer(s.features, 6, **{"feedforward": 5} | o, **reads, **s.factory)
        if outer is Remembering:
            return Remembering(model, s.points(3, 6, index=2))
        return model if outer is None else outer(model)

    CASES.append(
        Case(
            models.HypTransformer,
            options,
            make,
            inputs,
            ", ".join([note for of, note in _NOTES.items() if of is outer] + ["padded"] * (inputs is _raw_padded)),
            target="manifold_out",
            any_radius=True,
            in_order=outer in (InOrder, Decoder) or "max_tokens" in options,
            formula=None if outer is None else called,
        )
    )


def _raw_hidden(setting: Setting) -> tuple[Tensor, ...]:
    return _raw_padded(setting)[0], _hidden(setting)[1]


def _raw_added(setting: Setting) -> tuple[Tensor, ...]:
    return _raw_padded(setting)[0], *_added(setting)[1:]


def _raw_memory(setting: Setting) -> tuple[Tensor, ...]:
    return _raw_padded(setting)[0], setting.vectors(2, 3, setting.features), _memory(setting)[2]


_FLAT = {
    layers.SimplicialAttention: lambda s, o: layers.SimplicialAttention(s.features, 2, **o, **s.factory),
    layers.SimplicialEncoderLayer: lambda s, o: layers.SimplicialEncoderLayer(
        s.features, 2, feedforward=5, **o, **s.factory
    ),
    layers.TokenAttention: lambda s, o: layers.TokenAttention(s.features, 3, **o, **s.factory),
    layers.TokenEncoderLayer: lambda s, o: layers.TokenEncoderLayer(s.features, 2, feedforward=5, **o, **s.factory),
}
for kind, options, outer, inputs in (
    (layers.SimplicialAttention, {"order": 1, "rope": True}, InOrder, _raw),
    (layers.SimplicialAttention, {"order": 2, "lower_orders": True}, InOrder, _raw_padded),
    (layers.SimplicialAttention, {"order": 2, "form": "determinant", "window": 3}, InOrder, _raw),
    (layers.SimplicialAttention, {"order": 1}, Masked, _raw_hidden),
    (layers.SimplicialAttention, {"order": 2}, Masked, _raw_hidden),
    (layers.SimplicialAttention, {"order": 1}, ToMemory, _raw_memory),
    (layers.SimplicialAttention, {"order": 2, "lower_orders": True}, ToMemory, _raw_memory),
    (layers.SimplicialEncoderLayer, {"order": 2}, InOrder, _raw_padded),
    (layers.SimplicialEncoderLayer, {"order": 1, "dropout": 0.3}, ToMemory, _raw_memory),
    (layers.SimplicialEncoderLayer, {"order": 2}, Masked, _raw_hidden),
    (layers.TokenAttention, {"kernel": "softmax"}, InOrder, _raw),
    (layers.TokenAttention, {"dropout": 0.4}, InOrder, _raw_padded),
    (layers.TokenAttention, {"kernel": "performer"}, InOrder, _raw_padded),
    (layers.TokenAttention, {"kernel": "softmax"}, ToMemory, _raw_memory),
    (layers.TokenAttention, {"kernel": "performer"}, ToMemory, _raw_memory),
    (layers.TokenAttention, {"head_features": 4}, Masked, _raw_hidden),
    (layers.TokenAttention, {"kernel": "softmax"}, Masked, _raw_added),
    (layers.TokenEncoderLayer, {"attention": "performer", "dropout": 0.3}, InOrder, _raw_padded),
    (layers.TokenEncoderLayer, {"attention": "softmax"}, ToMemory, _raw_memory),
    (layers.TokenEncoderLayer, {"attention": "softmax"}, Masked, _raw_added),
):
    note = _NOTES[outer] + ", padded" * (inputs is _raw_padded) + ", added" * (inputs is _raw_added)
    CASES.append(
        Case(
            kind,
            options,
            lambda s, o, outer=outer, kind=kind: outer(_FLAT[kind](s, o)),
            inputs,
            note,
            in_order=outer is InOrder,
            formula=called,
        )
    )


def _of_product(setting: Setting, outer: type[Called]) -> tuple[Tensor, ...]:
    x, memory = (points_of(product_of(setting, "HSE"), setting, 2, n) for n in (setting.nodes, 3))
    rest = {InOrder: (setting.padding(),), ToMemory: (memory, _memory(setting)[2]), Masked: _hidden(setting)[1:]}
    return x, *rest[outer]


CASES += [
    Case(
        layers.ProductAttention,
        {"heads": 2},
        lambda s, o, outer=outer: outer(layers.ProductAttention(product_of(s, "HSE"), **o, **s.factory)),
        lambda s, outer=outer: _of_product(s, outer),
        _NOTES[outer],
        in_order=outer is InOrder,
        formula=called,
    )
    for outer in (InOrder, ToMemory, Masked)
]
