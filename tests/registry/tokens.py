"""Tokenizers, the transformer on tokens, and TokenGT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers, models
from tests.registry.case import Case, Inputs, Make, Setting, described

__all__ = ["CASES"]

IDENTIFIERS = 4
EDGE_FEATURES = 2


class OneGraph(nn.Module):
    """A tokenizer or a model with the identifiers among its inputs, so that nothing about them is random."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, identifiers: Tensor) -> Tensor:
        tokenizer = getattr(self.inner, "tokenizer", self.inner)
        result = self.inner(
            x,
            edge_index,
            edge_attr if tokenizer.edge_features else None,
            identifiers=None if tokenizer.identifiers is None else identifiers,
        )
        return result if isinstance(result, Tensor) else result.values


class OneHypergraph(nn.Module):
    """The same for hyperedges."""

    def __init__(self, inner: layers.HyperedgeTokenizer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, indices: Tensor, values: Tensor, identifiers: Tensor) -> Tensor:
        return self.inner(indices, values, len(identifiers), identifiers=identifiers).values


def _raw(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.vectors(setting.nodes, setting.features),)


def _padded(setting: Setting) -> tuple[Tensor, ...]:
    return setting.vectors(2, setting.nodes, setting.features), setting.padding()


def _graph(setting: Setting) -> tuple[Tensor, ...]:
    """A ring with a chord and a self-loop."""
    loop = torch.tensor([[1], [1]], device=setting.device)
    edges = torch.cat([setting.edges(), loop], dim=1)
    identifiers = layers.laplacian_identifiers(edges, setting.nodes, IDENTIFIERS, dtype=setting.dtype)
    return *_raw(setting), edges, setting.vectors(edges.shape[1], EDGE_FEATURES), identifiers


def _hypergraph(order: int) -> Inputs:
    def inputs(setting: Setting) -> tuple[Tensor, ...]:
        indices = torch.randint(setting.nodes, (9, order), device=setting.device)
        identifiers = layers.orthogonal_identifiers(setting.nodes, IDENTIFIERS, **setting.factory)
        return indices, setting.vectors(9, setting.features), identifiers

    return inputs


CASES: list[Case] = []


def _register(kind: type[nn.Module], options: str, make: Make, inputs: Inputs, **flags: Any) -> None:
    flags = {"source": None, "target": None, "nodewise": False, "any_radius": False} | flags
    CASES.append(Case(f"{kind.__name__}[{options}]", kind, make, inputs, **flags))


for options in (
    {"kernel": "softmax"},
    {"kernel": "softmax", "head_features": 4},
    {"kernel": "performer"},
    {"kernel": "performer", "random_features": 5},
):
    for inputs in (_raw, _padded):
        _register(
            layers.TokenAttention,
            ", ".join(map(str, options.values())) + f", padded={inputs is _padded}",
            lambda s, options=options: layers.TokenAttention(s.features, 3, **options, **s.factory),
            inputs,
            nodewise=inputs is _raw,
        )
_register(
    layers.TokenAttention,
    "dropout=0.5",
    lambda s: layers.TokenAttention(s.features, 2, dropout=0.5, **s.factory),
    _raw,
    random=True,
)

for attention in ("softmax", "performer"):
    for inputs in (_raw, _padded):
        _register(
            layers.TokenEncoderLayer,
            f"{attention}, padded={inputs is _padded}",
            lambda s, a=attention: layers.TokenEncoderLayer(s.features, 2, feedforward=5, attention=a, **s.factory),
            inputs,
            nodewise=inputs is _raw,
        )
_register(
    layers.TokenEncoderLayer,
    "every dropout, padded",
    lambda s: layers.TokenEncoderLayer(
        s.features, 2, dropout=0.3, attention_dropout=0.2, stochastic_depth=0.1, **s.factory
    ),
    _padded,
    random=True,
)

for options in (
    {"identifiers": "laplacian"},
    {"identifiers": "laplacian_both", "eigenvector_dropout": 0.2, "edge_features": EDGE_FEATURES},
    {"identifiers": "orthogonal", "type_features": 3, "edge_features": EDGE_FEATURES},
    {"identifiers": "near_orthogonal", "type_features": 0},
    {"identifiers": None, "edge_features": EDGE_FEATURES},
):
    dim = None if options["identifiers"] is None else IDENTIFIERS
    _register(
        layers.GraphTokenizer,
        described(options),
        lambda s, options=options, dim=dim: OneGraph(
            layers.GraphTokenizer(s.features, 5, identifier_dim=dim, **options, **s.factory)
        ),
        _graph,
        random=str(options["identifiers"]).startswith("laplacian"),
    )

for order, identifiers in ((1, "near_orthogonal"), (2, "orthogonal"), (3, "orthogonal")):
    _register(
        layers.HyperedgeTokenizer,
        f"order={order}, {identifiers}",
        lambda s, order=order, kind=identifiers: OneHypergraph(
            layers.HyperedgeTokenizer(
                order, s.features, 5, identifiers=kind, identifier_dim=IDENTIFIERS, type_features=3, **s.factory
            )
        ),
        _hypergraph(order),
    )

for name, options in (
    ("graph, softmax", {"layers": 2, "identifiers": "orthogonal"}),
    ("node, softmax, laplacian", {"layers": 1, "level": "node", "edge_features": EDGE_FEATURES}),
    ("node, performer, basis residual", {
        "layers": 1, "level": "node", "attention": "performer", "random_features": 6, "basis_residual": True,
        "identifiers": "near_orthogonal", "edge_features": EDGE_FEATURES,
    }),
    ("graph, every dropout", {
        "layers": 1, "dropout": 0.1, "attention_dropout": 0.1, "stochastic_depth": 0.2, "eigenvector_dropout": 0.2,
        "edge_features": EDGE_FEATURES,
    }),
):  # fmt: skip
    _register(
        models.TokenGT,
        name,
        lambda s, options=options: OneGraph(
            models.TokenGT(s.features, 6, 3, heads=2, feedforward=5, identifier_dim=IDENTIFIERS, **options, **s.factory)
        ),
        _graph,
        random=options.get("identifiers", "laplacian") == "laplacian",
    )

for name, options in (
    ("graph, linear", {"identifiers": "orthogonal"}),
    ("node, softmax, mlr", {
        "level": "node", "attention": "softmax", "decoder": "mlr", "identifiers": "near_orthogonal",
        "edge_features": EDGE_FEATURES,
    }),
    ("node, every dropout", {
        "level": "node", "dropout": 0.1, "eigenvector_dropout": 0.2, "edge_features": EDGE_FEATURES,
    }),
):  # fmt: skip
    _register(
        models.HypTokenGT,
        name,
        lambda s, options=options: OneGraph(
            models.HypTokenGT(
                s.features, 12, 3, heads=2, layers=1, feedforward=5, identifier_dim=IDENTIFIERS, **options, **s.factory
            )
        ),
        _graph,
        random="identifiers" not in options,
    )
