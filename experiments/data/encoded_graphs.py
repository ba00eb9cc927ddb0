"""Sets of graphs with what stands between the nodes of each pair, encoded once; models of one size on them.

A chromatic graph transformer reads random walks, distances and rings of all pairs of nodes. They are computed once for
a set, and cut out with the graphs of a batch. Models that read edges only are called with the same batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data.graph_sets import GraphSet, ranges
from experiments.engine import comparisons
from experiments.engine.comparisons import largest
from experiments.engine.options import option
from experiments.models.message_passing import MessagePassing
from holonomy.layers import random_walk_encoding, ring_membership, shortest_path_encoding
from holonomy.models import ChromaticGraphTransformer
from holonomy.structures import batches_by_size


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters of a comparison of models of one size."""

    steps: int = option("steps of the random walks", default=20, least=0)
    walk_features: int = option("channels of a node for the walks that return to it", default=16, least=0)
    attention_dropout: float = option("share of pairs dropped from the attention", default=0.0)
    share_edges: bool = option("one map of pairs for all layers", default=True)


@dataclasses.dataclass(frozen=True)
class EncodedSet:
    """Graphs, and rows of their pairs of nodes.

    Attributes:
        graphs: the graphs; edge features are one-hot types, or have no column.
        pairs: by name, what a model reads of pairs: n * n rows for a graph of n nodes, graph after graph.
        returns: how probable it is that a walk from a node is back there after 1, 2, .. steps, (N, steps).
    """

    graphs: GraphSet
    pairs: Mapping[str, Tensor]
    returns: Tensor

    def __len__(self) -> int:
        return len(self.graphs)

    def rows(self, chosen: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Cut out the pairs of the graphs with the given numbers."""
        places = ranges(self.graphs.nodes.square(), chosen)[0]
        return {name: self.pairs[name][places] for name in names}


def encoded(graphs: GraphSet, *, steps: int = 0, limit: int = 0, largest_ring: int = 0) -> EncodedSet:
    """Encode the pairs of all graphs: walks, distances and rings, each where its number is not 0."""
    makers: dict[str, Callable[[Tensor, int], Tensor]] = {}
    if steps:
        makers["walks"] = lambda edges, n: random_walk_encoding(edges, n, steps).flatten(0, 1)
    if limit:
        makers["distances"] = lambda edges, n: shortest_path_encoding(edges, n, limit).flatten()
    if largest_ring:
        makers["related"] = lambda edges, n: ring_membership(edges, n, largest_ring).flatten()
    each = list(zip(graphs.edge_index.split(graphs.edges.tolist(), dim=1), graphs.nodes.tolist(), strict=True))
    pairs = {name: torch.cat([make(*one) for one in each]) for name, make in makers.items()}
    returns = pairs["walks"][_loops(graphs.nodes)] if steps else graphs.x.new_zeros(len(graphs.x), 0)
    return EncodedSet(graphs, pairs, returns)


def _loops(nodes: Tensor) -> Tensor:
    """Return the places of the pairs (i, i) where the pairs of graphs of these sizes follow each other."""
    squares = nodes.square()
    place, owner = ranges(nodes, torch.arange(len(nodes)))
    start = nodes.cumsum(0) - nodes
    return (squares.cumsum(0) - squares)[owner] + (place - start[owner]) * (nodes[owner] + 1)


def read_by(network: nn.Module) -> list[str]:
    """Name the encodings that a model reads."""
    if not isinstance(network, ChromaticGraphTransformer):
        return []
    has = {"walks": network.steps, "distances": network.limit, "related": network.substructures}
    return [name for name, value in has.items() if value]


def wants_returns(network: nn.Module, graphs: EncodedSet) -> bool:
    """Tell whether a model takes the walks that return to a node as features of the node."""
    entry = network.nodes if isinstance(network, ChromaticGraphTransformer) else network.entry
    return entry.in_features > graphs.graphs.x.shape[1]


def ask(network: nn.Module, graphs: EncodedSet, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Ask a model about some graphs: its answers, and the truth."""
    device = next(network.parameters()).device
    inputs, y = arguments(network, graphs, chosen)
    return network(**{name: value.to(device) for name, value in inputs.items()}), y.to(device)


def arguments(network: nn.Module, graphs: EncodedSet, chosen: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return what a model is called with for some graphs, and the truth."""
    part = graphs.graphs.take(chosen)
    x, edge_attr = part.x, part.inputs()["edge_attr"]
    if wants_returns(network, graphs):
        x = torch.cat([x, graphs.returns[ranges(graphs.graphs.nodes, chosen)[0]]], dim=1)
    inputs = {"x": x, "edge_index": part.edge_index, "batch": part.batch}
    if isinstance(network, ChromaticGraphTransformer):
        if network.edge_types > 1 and edge_attr is not None:
            inputs["edge_attr"] = edge_attr.argmax(dim=1)
        inputs |= graphs.rows(chosen, read_by(network))
    elif edge_attr is not None:
        inputs["edge_attr"] = edge_attr
    return inputs, part.y


def answers(network: nn.Module, graphs: EncodedSet, chosen: Tensor, size: int = 100) -> tuple[Tensor, Tensor]:
    """Ask about many graphs, smallest first, so that padding costs little: answers and truth in one order."""
    by_size = chosen[graphs.graphs.nodes[chosen].argsort(stable=True)]
    found = [ask(network, graphs, some) for some in by_size.split(size)]
    return torch.cat([said for said, _ in found]).cpu(), torch.cat([y for _, y in found]).cpu()


def batches(graphs: EncodedSet, train: Tensor, size: int) -> list[Tensor]:
    """Cut the training graphs into batches of similar sizes, anew for each epoch: places in ``train``."""
    nodes = graphs.graphs.nodes[train]
    cut = batches_by_size(nodes, size)
    # A node alone has no variance: batch norm refuses it, so it joins another batch.
    alone = [some for some in cut if nodes[some].sum() == 1]
    rest = [some for some in cut if nodes[some].sum() > 1]
    return [torch.cat([rest[0], *alone]), *rest[1:]] if rest else cut


def settle(network: nn.Module, graphs: EncodedSet, train: Tensor, size: int, most: int = 32) -> None:
    """Give batch norms the statistics of the weights as they are now: the mean over batches of the training graphs.

    Running ones lag behind, by far more in some models than in others, and hold the last few batches: a channel that
    wakes in one molecule of a hundred may have had no variance there, and then such a molecule is blown up.

    Args:
        network: whose norms are settled; one without any stays as it is.
        graphs: what it reads.
        train: numbers of the training graphs.
        size: graphs in a batch at most; all are about as large, so that the last is not left with one small graph.
        most: batches at most, the first ones.
    """
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm1d)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        # No momentum: every batch counts the same.
        norm.train().momentum = None
    if norms:
        for some in train.tensor_split(-(-len(train) // size))[:most]:
            ask(network, graphs, some)
    for norm, momentum in zip(norms, usual, strict=True):
        norm.eval().momentum = momentum


def chromatic(graphs: EncodedSet, out_features: int, settings: Settings, **options: Any) -> nn.Module:
    """Make a chromatic graph transformer with walks of nodes and pairs, of the size that is asked for.

    Without walks of pairs (``steps=0``) those of nodes are features of the nodes: they stay the same.

    Args:
        graphs: what it is for.
        out_features: width of its result.
        settings: with the budget; without one the width is ``hidden``.
        options: what is different from the settings, as ``ChromaticGraphTransformer`` names it; ``heads=0`` gives
            every channel a head of its own.

    Returns:
        The model.
    """
    x, edge_attr = graphs.graphs.x, graphs.graphs.edge_attr
    heads = options.pop("heads", settings.heads)
    walks = options.get("steps", settings.steps) > 0

    def make(width: int, feedforward: int) -> nn.Module:
        return ChromaticGraphTransformer(
            x.shape[1] if walks else x.shape[1] + graphs.returns.shape[1],
            width,
            out_features,
            **{
                "edge_types": max(1, edge_attr.shape[1]),
                "steps": settings.steps,
                "walk_features": settings.walk_features if walks else 0,
                "layers": settings.layers,
                "heads": heads or width,
                "feedforward": feedforward,
                "share_edges": settings.share_edges,
                "level": "node" if graphs.graphs.per_node else "graph",
                "pooling": "sum",
                "dropout": settings.dropout,
                "attention_dropout": settings.attention_dropout,
                **options,
            },
        )

    width, feedforward = settings.hidden, 2 * settings.hidden
    if settings.budget:
        # Heads divide the width; what they leave of the budget goes between the linear maps of the layers.
        unit = heads or 1
        least = (settings.walk_features if walks else 0) // unit + 1
        width = unit * largest(lambda n: make(n * unit, 2 * n * unit), settings.budget, least)
        feedforward = largest(lambda n: make(width, n), settings.budget, 2 * width)
    return make(width, feedforward)


def message_passing(kind: Any, graphs: EncodedSet, out_features: int, settings: Settings) -> nn.Module:
    """Make a message-passing network of as many layers, of the size that is asked for; it reads edges, and no walks."""

    def make(width: int, feedforward: int | None = None) -> nn.Module:
        return MessagePassing(
            kind,
            graphs.graphs.x.shape[1],
            width,
            out_features,
            layers=settings.layers,
            edge_features=graphs.graphs.edge_attr.shape[1],
            level="node" if graphs.graphs.per_node else "graph",
            heads=settings.heads,
            feedforward=feedforward,
            dropout=settings.dropout,
        )

    if not settings.budget:
        return make(settings.hidden)
    unit = settings.heads if kind in {"gat", "gps"} else 1
    width = unit * largest(lambda n: make(n * unit), settings.budget, 1)
    return make(width, largest(lambda n: make(width, n), settings.budget, width) if kind == "gps" else None)
