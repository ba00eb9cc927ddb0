"""Tokenizers, the transformer on tokens, and TokenGT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers, models
from holonomy.manifolds import Lorentz
from tests.reference.hypformer import hyp_tokengt_points
from tests.registry.case import Case, Inputs, Make, Options, Setting

__all__ = ["CASES"]

IDENTIFIERS = 4
EDGE_FEATURES = 2


class OneGraph(nn.Module):
    """A tokenizer or a model with the identifiers among its inputs, so that nothing about them is random."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def manifold_out(self) -> Lorentz:
        return self.inner.manifold_out

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, identifiers: Tensor) -> Tensor:
        tokenizer = getattr(self.inner, "tokenizer", self.inner)
        result = self.inner(
            x,
            edge_index,
            edge_attr=edge_attr if tokenizer.edge_features else None,
            identifiers=None if tokenizer.identifiers is None else identifiers,
        )
        return result if isinstance(result, Tensor) else result.values


class Points(nn.Module):
    """HypTokenGT asked for the points that its decoder reads."""

    def __init__(self, inner: models.HypTokenGT) -> None:
        super().__init__()
        self.inner = inner
        inner.decoder = nn.Identity()  # not asked

    @property
    def tokenizer(self) -> nn.Module:
        return self.inner.tokenizer

    @property
    def manifold_out(self) -> Lorentz:
        return self.inner.manifold_out

    def forward(self, x: Tensor, edge_index: Tensor, **given: Tensor | None) -> Tensor:
        return self.inner.embed(x, edge_index, **given)


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


def _hyp_tokengt(s: Setting, options: Options) -> models.HypTokenGT:
    sizes = {"heads": 2, "layers": 1, "feedforward": 5, "identifier_dim": IDENTIFIERS}
    return models.HypTokenGT(s.features, 12, 3, **sizes, **options, **s.factory)


CASES: list[Case] = []


def _register(kind: type[nn.Module], options: Options, make: Make, inputs: Inputs, **flags: Any) -> None:
    CASES.append(Case(kind, options, make, inputs, **flags))


for options in (
    {"kernel": "softmax"},
    {"kernel": "softmax", "head_features": 4},
    {"kernel": "performer"},
    {"kernel": "performer", "random_features": 5},
    {"dropout": 0.5},
):
    for inputs in (_raw, _padded):
        _register(
            layers.TokenAttention,
            options,
            lambda s, o: layers.TokenAttention(s.features, 3, **o, **s.factory),
            inputs,
            note="padded" * (inputs is _padded),
        )

for options, inputs in (
    ({"attention": "softmax"}, _padded),
    ({"attention": "performer"}, _raw),
    ({"attention": "performer"}, _padded),
    ({"dropout": 0.3, "attention_dropout": 0.2, "stochastic_depth": 0.1}, _padded),
    ({"dropout": 0.3}, _raw),
):
    _register(
        layers.TokenEncoderLayer,
        options,
        lambda s, o: layers.TokenEncoderLayer(s.features, 2, feedforward=5, **o, **s.factory),
        inputs,
        note="padded" * (inputs is _padded),
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
        options,
        lambda s, o, dim=dim: OneGraph(layers.GraphTokenizer(s.features, 5, identifier_dim=dim, **o, **s.factory)),
        _graph,
        random=str(options["identifiers"]).startswith("laplacian"),
        first_node=1,
    )

for order, identifiers in ((1, "near_orthogonal"), (2, "orthogonal"), (3, "orthogonal")):
    _register(
        layers.HyperedgeTokenizer,
        {"order": order, "identifiers": identifiers},
        lambda s, o: OneHypergraph(
            layers.HyperedgeTokenizer(
                in_features=s.features, features=5, identifier_dim=IDENTIFIERS, type_features=3, **o, **s.factory
            )
        ),
        _hypergraph(order),
    )

for options in (
    {"layers": 2, "identifiers": "orthogonal"},
    {"layers": 1, "level": "node", "edge_features": EDGE_FEATURES},
    {
        "layers": 1, "level": "node", "attention": "performer", "random_features": 6, "basis_residual": True,
        "identifiers": "near_orthogonal", "edge_features": EDGE_FEATURES,
    },
    {
        "layers": 2, "dropout": 0.1, "attention_dropout": 0.1, "stochastic_depth": 0.2, "eigenvector_dropout": 0.2,
        "edge_features": EDGE_FEATURES,
    },
):  # fmt: skip
    _register(
        models.TokenGT,
        options,
        lambda s, o: OneGraph(
            models.TokenGT(s.features, 6, 3, heads=2, feedforward=5, identifier_dim=IDENTIFIERS, **o, **s.factory)
        ),
        _graph,
        random="identifiers" not in options,
    )

for options in (
    {"identifiers": "orthogonal"},
    {
        "level": "node", "attention": "softmax", "decoder": "mlr", "identifiers": "near_orthogonal",
        "edge_features": EDGE_FEATURES,
    },
    {
        "level": "node", "dropout": 0.1, "eigenvector_dropout": 0.2, "edge_features": EDGE_FEATURES,
        "activation": torch.tanh,
    },
):  # fmt: skip
    _register(
        models.HypTokenGT,
        options,
        lambda s, o: OneGraph(_hyp_tokengt(s, o)),
        _graph,
        random="identifiers" not in options,
    )
_register(
    models.HypTokenGT,
    {"identifiers": "orthogonal", "level": "node", "dropout": 0.2},
    lambda s, o: OneGraph(Points(_hyp_tokengt(s, o))),
    _graph,
    note="points",
    target="manifold_out",
    formula=hyp_tokengt_points,
)
