"""Chromatic attention, its encoders, and the model made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers, models
from tests.registry.case import Case, Inputs, Make, Options, Setting

__all__ = ["CASES"]

EDGE_FEATURES = 3
EDGE_TYPES, STEPS, LIMIT = 2, 3, 2


class SideBySide(nn.Module):
    """A projection of edges as one tensor."""

    def __init__(self, inner: layers.EdgeProjection) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, edges: Tensor) -> Tensor:
        return torch.cat([x for x in self.inner(edges) if x is not None], -1)


class Padded(nn.Module):
    """The model called with padded tensors, of which it is handed those that it reads."""

    def __init__(self, inner: models.ChromaticGraphTransformer) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, nodes: Tensor, categories: Tensor, mask: Tensor, walks: Tensor, distances: Tensor, related: Tensor
    ) -> Tensor:
        inner = self.inner
        return inner.padded(
            nodes,
            categories,
            mask,
            walks=walks if inner.steps else None,
            distances=distances if inner.limit else None,
            related=related if inner.substructures else None,
        )


class Reading(nn.Module):
    """An encoder of pairs that is handed what it reads, by position."""

    def __init__(self, inner: layers.PairEncoder) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, categories: Tensor, walks: Tensor, distances: Tensor, related: Tensor, attributes: Tensor
    ) -> Tensor:
        return self.inner(*read(self.inner, categories, walks, distances, related, attributes))


def read(encoder: layers.PairEncoder, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    """Those of all encodings that an encoder was made for."""
    wanted = (
        True,
        encoder.walks is not None,
        encoder.distances is not None,
        encoder.related is not None or encoder.edges.product,
        encoder.edges.attributes is not None,
    )
    return tuple(x if asked else None for x, asked in zip(inputs, wanted, strict=True))


def _encodings(setting: Setting) -> tuple[Tensor, ...]:
    """Of a ring with a chord and of the same with types: categories, walks, distances, relation, attributes."""
    n, edges = setting.nodes, setting.edges()
    types = torch.arange(edges.shape[1], device=setting.device) % EDGE_TYPES
    categories = torch.stack([layers.edge_categories(edges, n, t) for t in (0 * types, types)])
    walks = layers.random_walk_encoding(edges, n, STEPS, dtype=setting.dtype).expand(2, n, n, STEPS).clone()
    distances = layers.shortest_path_encoding(edges, n, LIMIT).expand(2, n, n).clone()
    related = layers.ring_membership(edges, n, 4).expand(2, n, n).clone()
    return categories, walks, distances, related, setting.vectors(2, n, n, EDGE_FEATURES)


def _nodes(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.vectors(2, setting.nodes, setting.features),)


def _pairs(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.vectors(2, setting.nodes, setting.nodes, EDGE_FEATURES),)


def _both(setting: Setting) -> tuple[Tensor, ...]:
    return *_nodes(setting), *_pairs(setting)


def _masked(setting: Setting) -> tuple[Tensor, ...]:
    return *_both(setting), ~setting.padding()


CASES: list[Case] = []


def _register(
    kind: type[nn.Module], options: Options, make: Make, inputs: Inputs, note: str = "", **flags: Any
) -> None:
    note += "masked" * (inputs is _masked)
    CASES.append(Case(kind, options, make, inputs, note, **flags))


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
    _register(
        layers.ChromaticAttention,
        options,
        lambda s, o: layers.ChromaticAttention(s.features, 3, **{"edge_features": EDGE_FEATURES} | o, **s.factory),
        inputs,
    )

for mode, values in (("chromatic", True), ("mono", True), ("additive", False)):
    _register(
        layers.EdgeProjection,
        {"mode": mode, "edge_values": values},
        lambda s, o: SideBySide(layers.EdgeProjection(EDGE_FEATURES, s.features, 3, **o, **s.factory)),
        _pairs,
    )

for options, chosen in (
    ({}, (0,)),
    ({"product": True}, (0, 3)),
    ({"edge_features": EDGE_FEATURES, "product": True}, (0, 3, 4)),
):
    _register(
        layers.EdgeTypeEncoder,
        options,
        lambda s, o: layers.EdgeTypeEncoder(EDGE_TYPES, s.features, **o, **s.factory),
        lambda s, chosen=chosen: tuple(_encodings(s)[index] for index in chosen),
    )
_register(
    layers.RandomWalkEncoder,
    {},
    lambda s, _: layers.RandomWalkEncoder(STEPS, s.features, **s.factory),
    lambda s: (_encodings(s)[1],),
)
_register(
    layers.ShortestPathEncoder,
    {},
    lambda s, _: layers.ShortestPathEncoder(LIMIT, s.features, **s.factory),
    lambda s: (_encodings(s)[2],),
)
for options in (
    {"edge_types": EDGE_TYPES},
    {"edge_types": EDGE_TYPES, "steps": STEPS, "substructures": "added"},
    {"edge_types": EDGE_TYPES, "limit": LIMIT, "substructures": "product"},
    {"edge_types": EDGE_TYPES, "edge_features": EDGE_FEATURES, "steps": STEPS, "limit": LIMIT},
):
    _register(
        layers.PairEncoder,
        options,
        lambda s, o: Reading(layers.PairEncoder(s.features, **o, **s.factory)),
        _encodings,
    )

for options, inputs, note in (
    ({}, _nodes, ""),
    ({"eps": 0.1}, lambda s: (*_nodes(s), ~s.padding()), "masked"),
):
    _register(
        layers.NodeBatchNorm, options, lambda s, o: layers.NodeBatchNorm(s.features, **o, **s.factory), inputs, note
    )
for options in (
    {},
    {"norm": "layer", "mode": "mono", "feedforward": 5},
    {"mode": "additive", "edge_values": False},
    {"dropout": 0.3, "attention_dropout": 0.3, "dropout_over": "nodes"},
):
    _register(
        layers.ChromaticEncoderLayer,
        options,
        lambda s, o: layers.ChromaticEncoderLayer(s.features, 3, EDGE_FEATURES, **o, **s.factory),
        _masked,
    )


def _graphs(setting: Setting) -> tuple[Tensor, ...]:
    """Two graphs, the last node of the second being padding."""
    categories, walks, distances, related, _ = _encodings(setting)
    return *_nodes(setting), categories, ~setting.padding(), walks, distances, related


for options in (
    {"edge_types": EDGE_TYPES, "steps": STEPS, "walk_features": 2, "substructures": "product"},
    {"edge_types": EDGE_TYPES, "limit": LIMIT, "share_edges": True, "level": "node", "norm": "layer"},
    {
        "edge_types": EDGE_TYPES, "steps": STEPS, "limit": LIMIT, "mode": "mono", "share_edges": True,
        "substructures": "added", "pooling": "sum",
    },
    {"edge_types": EDGE_TYPES, "mode": "additive", "edge_values": False, "pair_features": 4, "level": "node"},
    {"edge_types": EDGE_TYPES, "steps": STEPS, "dropout": 0.2, "attention_dropout": 0.3, "dropout_over": "channels"},
):  # fmt: skip
    _register(
        models.ChromaticGraphTransformer,
        options,
        lambda s, o: Padded(
            models.ChromaticGraphTransformer(s.features, 6, 3, layers=2, heads=2, feedforward=5, **o, **s.factory)
        ),
        _graphs,
    )
