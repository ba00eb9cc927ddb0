"""Classify the nodes of one large graph by the tokens of a pure transformer (TokenGT appendix A.4).

Nodes and edges are tokens; a node's identifier is its row of the lowest and highest Laplacian eigenvectors. Kernel
attention (Performer) is linear in the number of tokens. ``SEB`` is the sparse equivariant basis: after each layer a
node token adds the sum of its edge tokens, which low-rank identifiers of a large graph cannot pick out.

The paper's figures on chameleon, 6 classes that are not to be had here: TokenGT (Lap) + Performer + SEB 0.653, GAT
0.632, GCN 0.593. Here the classes are the quintiles of the monthly visits, on Geom-GCN's splits: compare the order,
not the numbers.

    python -m experiments.node_tokens
    python -m experiments.node_tokens --dataset chameleon --data ../shared/data --seeds 3
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import datasets
from experiments.data.datasets import NodeData
from experiments.engine import comparisons
from experiments.engine.options import option
from experiments.models.message_passing import MessagePassing
from holonomy.layers import laplacian_identifiers
from holonomy.models import TokenGT

MODELS = {
    "tokengt-seb": "TokenGT + Performer + SEB",
    "tokengt": "TokenGT + Performer",
    "gcn": "GCN",
    "gat": "GAT",
    "mlp": "MLP",
}


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters."""

    layers: int = option("layers", default=2)
    heads: int = option("attention heads", default=2)
    dropout: float = option("dropout", default=0.5)
    epochs: int = option("epochs; one step each", default=100)
    identifier: int = option("width of the node identifiers", default=64)
    features: Literal["raw", "row", "standard"] = option(
        "raw, rows to sum 1, or measured columns standardised", default="raw"
    )
    scale: float = option("factor on the features", default=1.0)


@dataclasses.dataclass(frozen=True)
class Data:
    """A graph with dense features, and the identifiers (n, p) of its nodes."""

    graph: NodeData
    identifiers: Tensor


@functools.lru_cache(maxsize=1)
def _identifiers(dataset: str, folder: Path | None, dim: int) -> Tensor:
    # One graph for all seeds, and eigenvectors that take longer than an epoch.
    graph = datasets.load(dataset, folder)
    return laplacian_identifiers(graph.edge_index, graph.num_nodes, dim, which="both", dtype=torch.float32)


def load(dataset: str, folder: Path | None, settings: Settings, seed: int) -> Data:
    """Read or draw the graph; the split is the seed's."""
    graph = datasets.prepared(datasets.load(dataset, folder, seed=seed), settings.features, settings.scale)
    graph = dataclasses.replace(graph, x=graph.x if graph.x.layout == torch.strided else graph.x.to_dense())
    return Data(graph, _identifiers(dataset, folder, settings.identifier))


def build(model: str, settings: Settings, data: Data) -> nn.Module:
    """Make a model that gives every node a logit for each class."""
    sizes = (data.graph.num_features, settings.hidden, data.graph.num_classes)
    if model in {"gcn", "gat", "mlp"}:
        return MessagePassing(
            model, *sizes, layers=settings.layers, level="node", heads=settings.heads, dropout=settings.dropout
        )
    return TokenGT(
        *sizes,
        layers=settings.layers,
        heads=settings.heads,
        feedforward=2 * settings.hidden,
        identifiers="laplacian_both",
        identifier_dim=settings.identifier,
        attention="performer",
        level="node",
        basis_residual=model.endswith("seb"),
        dropout=settings.dropout,
    )


def logits(network: nn.Module, data: Data) -> Tensor:
    """Classify all nodes; only TokenGT gets to see the identifiers."""
    graph = data.graph
    if isinstance(network, TokenGT):
        return network(graph.x, graph.edge_index, identifiers=data.identifiers)
    return network(graph.x, graph.edge_index)


def loss(network: nn.Module, data: Data, _: Tensor) -> Tensor:
    """Cross-entropy of the training nodes; the whole graph is one example."""
    graph = data.graph
    return functional.cross_entropy(logits(network, data)[graph.train], graph.y[graph.train])


def validate(network: nn.Module, data: Data) -> float:
    """Return the score of the validation nodes."""
    return data.graph.score(logits(network, data), data.graph.val)


def test(network: nn.Module, data: Data) -> dict[str, float]:
    """Return the score of the test nodes: accuracy, or F1 on the tree."""
    return {"test": data.graph.score(logits(network, data), data.graph.test)}


QUESTION = comparisons.Question(
    module="experiments.node_tokens",
    text=__doc__ or "",
    models=MODELS,
    datasets={
        "tree": "generated, an epidemic on 1200 nodes, F1",
        "chameleon": "2277 pages, quintiles of visits, accuracy",
    },
    settings=Settings,
    load=load,
    size=lambda _: 1,
    build=build,
    loss=loss,
    validate=validate,
    test=test,
    score=("test", "score of the test nodes (%)"),
    # Rows of sum 1 over 3132 columns: without the factor the first linear map leaves nothing of them in a token.
    defaults={"chameleon": {"features": "row", "scale": 200.0}},
)

main = functools.partial(comparisons.main, QUESTION)

if __name__ == "__main__":
    sys.exit(main())
