"""Carry one bit along a chain: trained on chains of 20 nodes, tested on chains of 200 (HOT section 5, table 1).

The first node of a chain knows its class, every other node has to find it out. A message-passing network of L layers
reaches L nodes; a sum over all nodes reaches everywhere, but its size changes with the length. Second-order
attention learns to look at the one node that knows. Without the equivalence classes that reach beyond a node's own
edges (``hot-local``, ``hot-local-performer``) it falls back to the message-passing networks.

The paper's figures, micro and macro F1 in percent: 100 and 100 with both kinds of attention, about 50 and 35 without
the global classes and for GCN, GIN, GAT and the invariant graph network.

    python -m experiments.long_range_chains
    python -m experiments.long_range_chains --seeds 10 --lr 0.001 0.003
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data.graph_sets import GraphSet, chains
from experiments.engine import comparisons, plots, runs
from experiments.engine.options import option
from experiments.engine.scores import f1_scores
from experiments.models.message_passing import MessagePassing
from holonomy.models import HigherOrderTransformer, InvariantGraphNetwork

MODELS = {
    "hot": "HOT, softmax",
    "hot-performer": "HOT, kernel",
    "hot-local": "HOT, softmax, no global classes",
    "hot-local-performer": "HOT, kernel, no global classes",
    "ign": "IGN, sums",
    "ign-means": "IGN, means",
    "gcn": "GCN",
    "gin": "GIN",
    "gat": "GAT",
}


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters; the sizes of the data among them."""

    hidden: int = option("width of the model", default=32)
    layers: int = option("layers, of second order in HOT and IGN", default=2)
    lr: float = option("largest learning rate", default=0.003)
    batch: int = option("chains in a batch", default=10)
    epochs: int = option("epochs", default=8)
    chains: int = option("training chains; as many to validate and to test", default=40)
    length: int = option("nodes of a training chain", default=20)
    test_length: int = option("nodes of a test chain", default=200)


@dataclasses.dataclass(frozen=True)
class Data:
    """Chains to train, to validate (both short), and to test (long)."""

    train: GraphSet
    val: GraphSet
    test: GraphSet


def load(_: str, __: Path | None, settings: Settings, seed: int) -> Data:
    """Draw the chains of a seed."""
    count, short, long = settings.chains, settings.length, settings.test_length
    train, val = (chains(count, short, seed=3 * seed + part) for part in range(2))
    return Data(train, val, chains(count, long, seed=3 * seed + 2))


def build(model: str, settings: Settings, data: Data) -> nn.Module:
    """Make a model that gives every node a logit for each class."""
    width = data.train.x.shape[1]
    if model in {"gcn", "gin", "gat"}:
        return MessagePassing(
            model,
            width,
            settings.hidden,
            2,
            layers=2 * settings.layers,
            level="node",
            heads=settings.heads,
            dropout=settings.dropout,
        )
    orders = (*[2] * settings.layers, 1)
    if model.startswith("ign"):
        normalise = "counts" if model == "ign-means" else None
        return InvariantGraphNetwork(width, settings.hidden, 2, orders=orders, normalise=normalise)
    return HigherOrderTransformer(
        width,
        settings.hidden,
        2,
        orders=orders,
        heads=settings.heads,
        kernel="performer" if model.endswith("performer") else "softmax",
        dropout=settings.dropout,
        local="local" in model,
    )


def loss(network: nn.Module, data: Data, chosen: Tensor) -> Tensor:
    """Cross-entropy over the nodes of some chains."""
    part = data.train.take(chosen)
    return functional.cross_entropy(network(**part.inputs()), part.y)


def logits(network: nn.Module, graphs: GraphSet, size: int = 10) -> Tensor:
    """Classify all nodes of all chains."""
    return torch.cat([network(**part.inputs()) for part in graphs.batches(size)])


def validate(network: nn.Module, data: Data) -> float:
    """Return minus the cross-entropy on short chains: the F1 is soon 1 and then chooses nothing."""
    return -functional.cross_entropy(logits(network, data.val), data.val.y).item()


def test(network: nn.Module, data: Data) -> dict[str, float]:
    """Return F1 on long chains, and the micro F1 on short ones."""
    micro, macro = f1_scores(logits(network, data.test).argmax(dim=1), data.test.y, 2)
    short, _ = f1_scores(logits(network, data.val).argmax(dim=1), data.val.y, 2)
    return {"micro F1": micro, "macro F1": macro, "micro F1 at training length": short}


def draw(networks: Mapping[str, nn.Module], data: Data, run: runs.Run) -> Path:
    """Draw the share of right answers against the distance from the node that knows."""
    length = int(data.test.nodes[0])
    with mpl.rc_context(plots.STYLE):
        figure, (axes,) = plots.figure_of(11, 5.2)
        for place, (model, network) in enumerate(networks.items()):
            right = (logits(network, data.test).argmax(dim=1) == data.test.y).reshape(-1, length)
            dashes = ("-", "--", ":")[place % 3]
            axes.plot(100 * right.double().mean(dim=0), dashes, color=plots.PALETTE[place % 8], label=MODELS[model])
        axes.axvline(int(data.train.nodes[0]) - 1, color="#777777", linestyle=":", linewidth=1.5)
        axes.set(xlabel="nodes from the one that knows (dotted: training length)", ylabel="right answers (%)")
        axes.set(ylim=(-3, 103), xlim=(0, length - 1))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        axes.set_title("Chains: right answers by distance, first seed")
        return plots.save(figure, run.own("distance.png"))


QUESTION = comparisons.Question(
    module="experiments.long_range_chains",
    text=__doc__ or "",
    models=MODELS,
    datasets={"chains": "generated; the sizes are options"},
    settings=Settings,
    load=load,
    size=lambda data: len(data.train),
    build=build,
    loss=loss,
    validate=validate,
    test=test,
    score=("micro F1", "micro F1 on long chains (%)"),
    draw=draw,
)

main = functools.partial(comparisons.main, QUESTION)

if __name__ == "__main__":
    sys.exit(main())
