"""What is called with graphs or hyperedges, as users hold them, and random ones that leave nothing out for long.

The cases of :mod:`tests.cases` have inputs of one shape. Here graphs have any number of nodes and edges, down to none,
and come alone, in batches and as hyperedges, for laws about what must not depend on the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holonomy import layers, models
from holonomy.structures import Hyperedges

__all__ = [
    "BATCHED",
    "MODELS",
    "OF_GRAPHS",
    "OF_HYPEREDGES",
    "WITHOUT_FEATURES",
    "Graph",
    "drawn_graph",
    "drawn_hyperedges",
    "made",
]

FEATURES, EDGE_FEATURES = 3, 2

_HOT, _IGN, _CGT = models.HigherOrderTransformer, models.InvariantGraphNetwork, models.ChromaticGraphTransformer
_PERFORMER = {"heads": 2, "kernel": "performer"}

Make = Callable[..., nn.Module]


class _OfHyperedges(nn.Module):
    """A tokenizer called as layers are."""

    def __init__(self, inner: layers.HyperedgeTokenizer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Hyperedges) -> layers.tokens.tokenizer.Tokens:
        return self.inner(x.indices, x.values, x.num_nodes, x.batch)


# Models of a graph with features at its edges, whose result is a row a graph.
MODELS: dict[str, Make] = {
    "TokenGT": lambda **how: models.TokenGT(3, 8, 2, heads=2, layers=2, edge_features=2, **how),
    "TokenGT, performer": lambda **how: models.TokenGT(3, 8, 2, heads=2, attention="performer", edge_features=2, **how),
    "HypTokenGT": lambda **how: models.HypTokenGT(3, 8, 2, heads=2, edge_features=2, **how),
    "HypTokenGT, softmax": lambda **how: models.HypTokenGT(3, 8, 2, attention="softmax", edge_features=2, **how),
    "HOT": lambda **how: _HOT(3, 8, 2, heads=2, edge_features=2, **how),
    "HOT, coupled": lambda **how: _HOT(3, 8, 2, **_PERFORMER, edge_features=2, **how),
    "HOT, decoupled": lambda **how: _HOT(3, 8, 2, **_PERFORMER, sums="decoupled", edge_features=2, **how),
    "IGN": lambda **how: _IGN(3, 8, 2, edge_features=2, **how),
    "IGN, counts": lambda **how: _IGN(3, 8, 2, normalise="counts", edge_features=2, **how),
    "CGT": lambda **how: _CGT(3, 8, 2, heads=2, edge_features=2, **how),
    "CGT, mono": lambda **how: _CGT(3, 8, 2, heads=2, mode="mono", share_edges=True, edge_features=2, **how),
}
# What has no features at edges; of graphs where no level is asked for.
WITHOUT_FEATURES: dict[str, Make] = {
    "Hypformer": lambda level="graph", **how: models.Hypformer(3, 8, 2, level=level, **how),
    "HGCN": lambda level="graph", **how: models.HGCN(3, 8, 2, level=level, **how),
    "HGCN, attention": lambda level="graph", **how: models.HGCN(
        3, 8, 2, conv="hgat", heads=2, decoder="mlr", level=level, **how
    ),
    "HGCN, Lorentzian": lambda level="graph", **how: models.HGCN(3, 8, 2, conv="lgcn", level=level, **how),
    "Hypformer, no GCN": lambda level="graph", **how: models.Hypformer(
        3, 8, 2, graph_encoder=None, decoder="mlr", level=level, **how
    ),
}
BATCHED = MODELS | WITHOUT_FEATURES
OF_GRAPHS = BATCHED | {
    "GCN": lambda **how: layers.GCN(3, 8, 2, **how),
    "Propagation": lambda **how: layers.Propagation(3, 8, 2, **how),
    "GraphTokenizer": lambda **how: layers.GraphTokenizer(3, 8, edge_features=2, **how),
    "DegreeNodeEncoder": lambda **how: layers.DegreeNodeEncoder(3, max_degree=2, **how),
    "RandomWalkNodeEncoder": lambda **how: layers.RandomWalkNodeEncoder(3, 4, **how),
    "LaplacianNodeEncoder": lambda **how: layers.LaplacianNodeEncoder(3, 4, **how),
}
OF_HYPEREDGES: dict[str, Make] = {
    "Linear 2 -> 2": lambda **how: layers.EquivariantLinear(2, 2, 8, 4, **how),
    "Linear 2 -> 1, wider": lambda **how: layers.EquivariantLinear(2, 1, 8, 99, **how),
    "Linear 2 -> 0": lambda **how: layers.EquivariantLinear(2, 0, 8, 4, normalise="counts", **how),
    "Linear 2 -> 3, no bias": lambda **how: layers.EquivariantLinear(2, 3, 8, 4, bias=False, **how),
    "Attention 2 -> 2": lambda **how: layers.HigherOrderAttention(2, 2, 8, 2, **how),
    "Attention 2 -> 1": lambda **how: layers.HigherOrderAttention(2, 1, 8, 2, **how),
    "Attention 2 -> 0": lambda **how: layers.HigherOrderAttention(2, 0, 8, 2, **how),
    "Attention, coupled": lambda **how: layers.HigherOrderAttention(2, 2, 8, 2, kernel="performer", **how),
    "Attention, decoupled": lambda **how: layers.HigherOrderAttention(2, 1, 8, **_PERFORMER, sums="decoupled", **how),
    "Encoder 2 -> 2": lambda **how: layers.HigherOrderEncoderLayer(2, 2, 8, 2, 5, **how),
    "Encoder 2 -> 1": lambda **how: layers.HigherOrderEncoderLayer(2, 1, 8, 2, 5, entrywise=True, **how),
    "Tokenizer": lambda **how: _OfHyperedges(layers.HyperedgeTokenizer(2, 8, 8, identifiers=None, **how)),
    "HOT": lambda **how: _HOT(8, 8, 2, orders=(2, 1, 2), heads=2, **how),
    "IGN": lambda **how: _IGN(8, 8, 2, orders=(2, 1, 2), **how),
}


class Graph(NamedTuple):
    """A graph in the order of the models' arguments."""

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor | None
    batch: Tensor | None

    def arguments(self, name: str) -> dict[str, Any]:
        """Those that the case of this name takes."""
        given = self._asdict()
        if name not in MODELS and name != "GraphTokenizer":
            del given["edge_attr"]
        if name in {"GCN", "Propagation"}:
            del given["batch"]
        return given


def made(name: str, seed: int = 0, **how: Any) -> nn.Module:
    """The module of a case in evaluation mode, drawn from a seed."""
    torch.manual_seed(seed)
    return (OF_GRAPHS | {f"of hyperedges: {key}": make for key, make in OF_HYPEREDGES.items()})[name](**how).eval()


def drawn_graph(seed: int, *, nodes: int = 6, batched: bool = True, dtype: torch.dtype = torch.float32) -> Graph:
    """At most so many nodes, edges from none to most pairs, self-loops now and then, in up to three graphs."""
    torch.manual_seed(seed)
    n = int(torch.randint(1, nodes + 1, ()))
    batch = torch.randint(3, (n,)).sort()[0] if batched else torch.zeros(n, dtype=torch.int64)
    there = (torch.rand(n, n) < torch.rand(())) & (batch[:, None] == batch)
    edge_index = (there | there.T).nonzero().T
    x, attr = torch.randn(n, FEATURES, dtype=dtype), torch.randn(edge_index.shape[1], EDGE_FEATURES, dtype=dtype)
    return Graph(x, edge_index, attr, batch if batched else None)


def drawn_hyperedges(seed: int, features: int = 8, dtype: torch.dtype = torch.float32) -> Hyperedges:
    """The pairs of such a graph, at loops only where it has one."""
    graph = drawn_graph(seed, dtype=dtype)
    indices = graph.edge_index.T
    return Hyperedges(indices, torch.randn(len(indices), features, dtype=dtype), len(graph.x), graph.batch)
