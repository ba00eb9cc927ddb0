"""Predict a property of molecules: graph transformers beside message passing.

``zinc`` is the penalised logP of 12000 molecules; ``qm9`` the HOMO-LUMO gap in meV of small ones, a small sibling of
PCQM4Mv2, where the papers measured. There, MAE in eV (TokenGT table 2): TokenGT with Laplacian identifiers 0.0910,
with Performer attention 0.0935, with random ones 0.0962, GIN 0.1195, GAT 0.1302, GCN 0.1379, and a transformer without
identifiers 0.2340. In HOT's table 2 the second-order transformer stands ahead of GIN and GCN too. The loss is the mean
absolute error of the standardised property. ``--train`` takes the first training molecules only, for a machine without
a GPU; with ``--budget`` every model has so many parameters. A TokenGT's attention distances by layer and head
(figure 3) are drawn, and stand in the JSON file.

    python -m experiments.graph_regression
    python -m experiments.graph_regression --dataset zinc --data ../shared/data --train 0 --tests 0 --epochs 200
    python -m experiments.graph_regression --dataset qm9 --data ../shared/data --train 10000 --budget 250000
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import scipy.sparse
import scipy.sparse.csgraph
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import graph_sets
from experiments.data.graph_sets import Batch, GraphSet, Parts
from experiments.engine import comparisons, plots, runs
from experiments.engine.comparisons import largest
from experiments.engine.options import option
from experiments.models.message_passing import MessagePassing
from holonomy.models import HigherOrderTransformer, InvariantGraphNetwork, TokenGT

MODELS = {
    "tokengt": "TokenGT (Laplacian)",
    "tokengt-orf": "TokenGT (random)",
    "tokengt-performer": "TokenGT (Laplacian) + Performer",
    "transformer": "Transformer, no identifiers",
    "hot": "HOT 2→2→0",
    "ign": "IGN 2→2→0",
    "gin": "GIN",
    "gcn": "GCN",
    "gat": "GAT",
    "mlp": "MLP, no bonds",
}
PASSING = ("gin", "gcn", "gat", "mlp")
# What a token knows of its nodes and its type, and how tokens attend: the rows of TokenGT's table 2.
READS: dict[str, dict[str, Any]] = {
    "tokengt": {"identifiers": "laplacian"},
    "tokengt-orf": {"identifiers": "orthogonal"},
    "tokengt-performer": {"identifiers": "laplacian", "attention": "performer"},
    "transformer": {"identifiers": None, "type_features": 0},
}


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters; how much of the data among them."""

    layers: int = option("layers", default=3)
    epochs: int = option("epochs", default=20)
    identifier: int = option("width of TokenGT's node identifiers", default=16)
    train: int = option("training molecules, the first ones; 0 takes all", default=1000, least=0)
    tests: int = option("molecules to validate with, and as many to test; 0 takes all", default=500, least=0)


@functools.lru_cache(maxsize=1)
def _load(dataset: str, folder: Path | None, train: int, tests: int, identifier: int) -> Parts:
    graphs, (parts,) = graph_sets.read_molecules(dataset, folder, train, tests)
    return Parts.cut(graphs, parts, identifier)


def load(dataset: str, folder: Path | None, settings: Settings, _: int) -> Parts:
    """Read or draw the molecules; the same for every seed."""
    return _load(dataset, folder, settings.train, settings.tests, settings.identifier)


def build(model: str, settings: Settings, data: Parts) -> nn.Module:
    """Make a model that gives every molecule a number, of the size that is asked for."""
    if not settings.budget:
        return made(model, settings, data, settings.hidden, 2 * settings.hidden)
    # Heads divide the width; what they leave of the budget goes between the linear maps of the layers.
    heads = settings.heads if model not in {"gin", "gcn", "mlp", "ign"} else 1
    least = 2  # a norm of layers leaves nothing of one feature
    width = heads * largest(lambda n: made(model, settings, data, n * heads, n * heads), settings.budget, least)
    if model in PASSING or model == "ign":
        return made(model, settings, data, width, width)
    return made(
        model, settings, data, width, largest(lambda n: made(model, settings, data, width, n), settings.budget, width)
    )


def made(model: str, settings: Settings, data: Parts, width: int, feedforward: int) -> nn.Module:
    """Make a model of a width; ``feedforward`` is that of transformers between the linear maps of a layer."""
    nodes, edges = data.train.x.shape[1], data.train.edge_attr.shape[1]
    sizes, dropout = (nodes, width, 1), settings.dropout
    if model in PASSING:
        return MessagePassing(
            model, *sizes, layers=settings.layers, edge_features=edges, heads=settings.heads, dropout=dropout
        )
    orders = (*[2] * settings.layers, 0)
    match model:
        case "hot":
            return HigherOrderTransformer(
                *sizes, orders=orders, heads=settings.heads, feedforward=feedforward, edge_features=edges,
                dropout=dropout,
            )  # fmt: skip
        case "ign":
            return InvariantGraphNetwork(*sizes, orders=orders, edge_features=edges, normalise="counts")
        case _:
            known = dict(READS[model], identifier_dim=settings.identifier if READS[model]["identifiers"] else None)
            return TokenGT(
                *sizes,
                edge_features=edges,
                layers=settings.layers,
                heads=settings.heads,
                feedforward=feedforward,
                dropout=dropout,
                **known,
            )


def tokens_of(network: TokenGT, part: Batch) -> dict[str, Tensor | None]:
    """What a model of tokens is called with: features and edge features whose squares are about one, identifiers.

    Its maps are drawn for such features. As they are, rows with a one among 28 entries, they are a fifth of the node
    identifiers beside them, and it hardly sees them. Other models have a norm behind their first map.
    """

    def scaled(x: Tensor) -> Tensor:
        # The same factor in every batch, for all rows have as many ones.
        return x * x.square().mean().rsqrt() if x.numel() else x

    whole = part._replace(x=scaled(part.x), edge_attr=scaled(part.edge_attr))
    given = part.identifiers if network.tokenizer.identifiers == "laplacian" else None
    return whole.inputs() | {"identifiers": given}


def answer(network: nn.Module, part: Batch) -> Tensor:
    """Ask a model about some molecules; only TokenGT with Laplacian identifiers gets to see them."""
    return network(**(tokens_of(network, part) if isinstance(network, TokenGT) else part.inputs()))


def loss(network: nn.Module, data: Parts, chosen: Tensor) -> Tensor:
    """Mean absolute error of the standardised property."""
    part = data.train.take(chosen)
    return functional.l1_loss(answer(network, part), part.y)


def predictions(network: nn.Module, graphs: GraphSet, size: int = 100) -> Tensor:
    """Predict the standardised property of all molecules."""
    return torch.cat([answer(network, part) for part in graphs.batches(size)])


def error(network: nn.Module, data: Parts, graphs: GraphSet) -> float:
    """Return the mean absolute error in the property's unit."""
    return data.deviation * functional.l1_loss(predictions(network, graphs), graphs.y).item()


def validate(network: nn.Module, data: Parts) -> float:
    """Return minus the error on the validation molecules."""
    return -error(network, data, data.val)


def test(network: nn.Module, data: Parts) -> dict[str, float]:
    """Return the error on the test molecules."""
    return {"MAE": error(network, data, data.test)}


def token_distances(pairs: Tensor, edge_index: Tensor, nodes: int) -> Tensor:
    """Return how far the tokens (t, 2) of one graph are apart in hops, (t, t).

    A token stands at its two nodes, a node token at one node twice; the distance of two tokens is the mean over both
    nodes of the one and both of the other.
    """
    ends = tuple(edge_index.cpu().numpy())
    links = scipy.sparse.coo_array((torch.ones(edge_index.shape[1]), ends), shape=(nodes, nodes))
    hops = torch.from_numpy(scipy.sparse.csgraph.shortest_path(links.tocsr(), unweighted=True)).to(pairs.device).float()
    return hops[pairs[:, None, :, None], pairs[None, :, None, :]].mean(dim=(2, 3))


def attention_distances(model: TokenGT, graphs: GraphSet) -> Tensor:
    """Return the mean distance in hops that each head attends over, (layers, heads): TokenGT figure 3.

    For each token the distances of the others are averaged with its attention as weights, then over tokens and
    graphs; the ``[graph]`` token stands nowhere and is left out.
    """
    total = torch.zeros(len(model.layers), 0)
    for number in range(len(graphs)):
        part = graphs.take(torch.tensor([number]))
        tokens, maps = model.attention_maps(**tokens_of(model, part))
        distance = token_distances(tokens.indices, part.edge_index, len(part.x))
        weight = torch.stack([one[0][:, tokens.slots][:, :, tokens.slots] for one in maps])
        weight = weight / weight.sum(dim=-1, keepdim=True)
        mean = (weight * distance).sum(dim=-1).mean(dim=-1)
        total = mean if number == 0 else total + mean
    return total / len(graphs)


def details(network: nn.Module, data: Parts) -> dict[str, Any]:
    """Return how far each head of a TokenGT looks, over 50 test molecules; of other models nothing."""
    if not isinstance(network, TokenGT):
        return {}
    distances = attention_distances(network, first(data.test))
    return {"attention distance in hops, layers x heads": distances.tolist()}


def first(graphs: GraphSet, count: int = 50) -> GraphSet:
    """Return the first graphs."""
    return graphs.subset(torch.arange(min(count, len(graphs))))


def draw(networks: Mapping[str, nn.Module], data: Parts, run: runs.Run) -> list[Path]:
    """Draw predictions against the truth, a panel for each model, and how far TokenGT's heads look."""
    truth = data.mean + data.deviation * data.test.y[:, 0]
    said = {
        MODELS[model]: data.mean + data.deviation * predictions(network, data.test)[:, 0]
        for model, network in networks.items()
    }
    made = [plots.predictions(said, truth, run.own("predictions.png"))]
    readers = {MODELS[model]: network for model, network in networks.items() if isinstance(network, TokenGT)}
    return made + ([_draw_distances(readers, data.test, run)] if readers else [])


def _draw_distances(models: Mapping[str, TokenGT], graphs: GraphSet, run: runs.Run) -> Path:
    some = first(graphs)
    with mpl.rc_context(plots.STYLE):
        figure, panels = plots.figure_of(5 * len(models), 4.6, panels=len(models))
        for panel, (title, model) in zip(panels, models.items(), strict=True):
            for depth, heads in enumerate(attention_distances(model, some), start=1):
                panel.scatter([depth] * len(heads), heads, s=70, color=plots.PALETTE[0], alpha=0.8)
            panel.set(xlabel="layer", ylim=(0, None), title=title, xticks=range(1, len(model.layers) + 1))
        panels[0].set_ylabel("mean attention distance (hops)")
        figure.supxlabel("a dot is a head; 50 test molecules", fontsize=12, color="#444444")
        return plots.save(figure, run.own("attention_distance.png"))


QUESTION = comparisons.Question(
    module="experiments.graph_regression",
    text=__doc__ or "",
    models=MODELS,
    datasets={
        "generated": "random molecules, bonds and rings counted",
        "zinc": "penalised logP, 10000 / 1000 / 1000",
        "qm9": "HOMO-LUMO gap in meV, 110000 / 10000 / 10831",
    },
    settings=Settings,
    load=load,
    size=lambda data: len(data.train),
    build=build,
    loss=loss,
    validate=validate,
    test=test,
    score=("MAE", "mean absolute error, test molecules"),
    percent=False,
    draw=draw,
    details=details,
    sized=True,
)

main = functools.partial(comparisons.main, QUESTION)

if __name__ == "__main__":
    sys.exit(main())
