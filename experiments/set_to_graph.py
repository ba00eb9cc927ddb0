"""Predict the Delaunay triangulation of a set of points, or which tracks share a vertex (HOT section 5, table 3).

The input is a set of points of the unit square, the output a yes or no for each pair of them: orders 1 -> .. -> 1 ->
2. Whether two points are joined depends on all others, so that scoring each pair by its own two points (``siamese``)
cannot do it. For every model a pair counts as joined from that threshold on which has the best F1 on the validation
sets.

``jets`` are sets of tracks, of which those from one vertex are joined: the files are those of Zenodo's record 4044628,
and ``jets-generated`` are drawn in the same form. Tracks that are joined directly or through others count as of one
vertex; F1 and Rand indices (RI; ARI, adjusted) are means over the jets of a bottom (b), charm (c) or light quark. The
paper's for bottom jets: 0.667, 0.746 and 0.520 with softmax attention, 0.646, 0.736 and 0.491 for S2G.

The paper's figures of triangulations, F1 with 50 points and with 20 to 80, after 50,000 training sets: 0.974 and 0.971
with softmax attention, 0.959 and 0.952 with kernel attention, 0.926 and 0.799 for the invariant graph network (S2G).
The defaults here are small; the full setting is the last command, and wants a GPU's worth of time.

    python -m experiments.set_to_graph
    python -m experiments.set_to_graph --dataset delaunay-20-80 --seeds 3
    python -m experiments.set_to_graph --dataset jets-generated
    python -m experiments.set_to_graph --dataset jets --data FOLDER --train 100000 --tests 10000
    python -m experiments.set_to_graph --train 50000 --tests 5000 --epochs 100 --hidden 256 --layers 5 --lr 0.001 0.006
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import scipy.sparse.csgraph
import scipy.spatial
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from sklearn import metrics
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import jets
from experiments.data.datasets import both_directions
from experiments.engine import comparisons, plots, runs
from experiments.engine.options import RefusedError, option
from experiments.engine.scores import best_f1, detection
from experiments.models.message_passing import MessagePassing, mlp
from holonomy.models import HigherOrderTransformer, InvariantGraphNetwork

MODELS = {
    "hot": "HOT 1→1→2, softmax",
    "hot-performer": "HOT 1→1→2, kernel",
    "ign": "IGN 1→1→2 (S2G)",
    "gnn5": "GIN on 5 nearest neighbours",
    "siamese": "pair by pair",
}


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters; the sizes of the data among them."""

    layers: int = option("layers; the last one goes from points to pairs", default=3)
    batch: int = option("sets in a batch", default=8)
    epochs: int = option("epochs", default=20)
    train: int = option("training sets; of jets 0 takes all", default=500, least=0)
    tests: int = option("sets to validate with, and as many to test", default=100)
    random_features: int = option("random features a head of kernel attention has", default=64)
    sums: Literal["coupled", "decoupled"] = option(
        "kernel attention: exact classes, or HOT eq. 21", default="decoupled"
    )


@dataclasses.dataclass(frozen=True)
class PointSets:
    """Sets of points, padded to one size, and their triangulations.

    Attributes:
        points: (sets, n, d), zero where there is no point; d is 2 but for tracks.
        mask: (sets, n), true where there is a point.
        joined: (sets, n, n), true where two points are neighbours, or tracks of one vertex.
        flavour: (sets,), the quark of a jet; of points, none.
    """

    points: Tensor
    mask: Tensor
    joined: Tensor
    flavour: Tensor | None = None

    def __len__(self) -> int:
        return len(self.points)

    def take(self, chosen: Tensor) -> PointSets:
        """Cut out the sets with the given numbers, no wider than the largest of them."""
        width = int(self.mask[chosen].sum(dim=1).max())
        mask, joined = self.mask[chosen, :width], self.joined[chosen, :width, :width]
        return PointSets(
            self.points[chosen, :width], mask, joined, None if self.flavour is None else self.flavour[chosen]
        )

    def pairs(self) -> Tensor:
        """Tell which pairs (sets, n, n) are asked for: two different points, each pair once."""
        both = self.mask[:, :, None] & self.mask[:, None, :]
        return both & torch.ones_like(both).triu(1)


@dataclasses.dataclass(frozen=True)
class Data:
    """Point sets to train, validate and test."""

    train: PointSets
    val: PointSets
    test: PointSets


def triangulated(count: int, fewest: int, most: int, *, seed: int) -> PointSets:
    """Draw sets of ``fewest`` to ``most`` points of the unit square, and triangulate each."""
    rng = np.random.default_rng(seed)
    points = np.zeros((count, most, 2), dtype=np.float32)
    mask, joined = np.zeros((count, most), dtype=bool), np.zeros((count, most, most), dtype=bool)
    for number in range(count):
        size = int(rng.integers(fewest, most + 1))
        drawn = rng.random((size, 2)).astype(np.float32)
        a, b, c = scipy.spatial.Delaunay(drawn).simplices.T
        for start, end in ((a, b), (b, c), (c, a)):
            joined[number, start, end] = joined[number, end, start] = True
        points[number, :size], mask[number, :size] = drawn, True
    return PointSets(*(torch.from_numpy(part) for part in (points, mask, joined)))


@functools.lru_cache(maxsize=1)
def _drawn(fewest: int, most: int, train: int, tests: int) -> Data:
    # The same data for every seed, as the paper has one data set.
    return Data(*(triangulated(n, fewest, most, seed=seed) for seed, n in enumerate((train, tests, tests))))


@functools.lru_cache(maxsize=1)
def _jets(folder: Path | None, train: int, tests: int) -> Data:
    sizes = {"train": train, "val": tests, "test": tests}
    whole = {
        part: jets.padded(
            jets.generated(most, seed=seed) if folder is None else jets.read(folder, part, None if most == 0 else most)
        )
        for seed, (part, most) in enumerate(sizes.items())
    }
    if not (whole["test"].flavour == 5).any():
        raise RefusedError(f"--tests must be so many that a jet of a bottom quark is among them, got {tests}")
    return Data(**{part: PointSets(*jets.scaled(one, like=whole["train"])) for part, one in whole.items()})


def load(dataset: str, folder: Path | None, settings: Settings, _: int) -> Data:
    """Draw the point sets, or read the jets."""
    if dataset != "jets" and not settings.train:
        raise RefusedError(f"--train must be at least 1 for {dataset}, got 0")
    if dataset.startswith("jets"):
        if dataset == "jets" and folder is None:
            raise FileNotFoundError(f"jets are read from {jets.FILES['train']}: say where it lies with --data FOLDER")
        return _jets(folder if dataset == "jets" else None, settings.train, settings.tests)
    fewest, most = {"delaunay-50": (50, 50), "delaunay-20-80": (20, 80), "delaunay-30": (30, 30)}[dataset]
    return _drawn(fewest, most, settings.train, settings.tests)


class PairLogits(nn.Module):
    """A model of order 1 -> 2, its two directions averaged: (sets, n, 2) -> (sets, n, n)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:
        logits = self.model.tensor(points, mask)[..., 0]
        return (logits + logits.transpose(1, 2)) / 2


class PairScorer(nn.Module):
    """An encoder of points, then an MLP on what is the same for (i, j) and (j, i): sum and squared difference."""

    def __init__(self, hidden: int, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = mlp(2 * hidden, hidden, hidden, 1)

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:
        h = self.encoder(points, mask)
        first, second = h[:, :, None], h[:, None, :]
        return self.head(torch.cat([first + second, (first - second).square()], dim=-1))[..., 0]


class Alone(nn.Module):
    """Encode each point by itself."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.net = mlp(features, hidden, hidden, hidden)

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        return self.net(points)


class Neighbours(nn.Module):
    """Encode each point by message passing over its 5 nearest neighbours; an edge knows its vector."""

    def __init__(self, features: int, hidden: int, layers: int, neighbours: int = 5) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.net = MessagePassing("gin", features, hidden, hidden, layers=layers, edge_features=features, level="node")

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:
        sets, n, features = points.shape
        distance = torch.cdist(points, points)
        absent = ~(mask[:, :, None] & mask[:, None, :]) | torch.eye(n, dtype=torch.bool, device=mask.device)
        near = distance.masked_fill(absent, torch.inf).topk(min(self.neighbours, n - 1), largest=False)
        number = torch.arange(sets * n, device=mask.device).reshape(sets, n)
        start = number[:, :, None].expand(-1, -1, near.indices.shape[2])
        end = torch.gather(number[:, None].expand(-1, n, -1), 2, near.indices)
        once = torch.stack([start, end])[:, near.values.isfinite()]
        edges = both_directions(once).unique(dim=1)
        flat = points.reshape(-1, features)
        # Only points that are there: batch norm must not see the padding.
        kept = mask.reshape(-1)
        place = kept.cumsum(0) - 1
        h = self.net(flat[kept], place[edges], flat[edges[1]] - flat[edges[0]])
        return h.new_zeros(sets * n, h.shape[1]).masked_scatter(kept[:, None], h).reshape(sets, n, -1)


def build(model: str, settings: Settings, data: Data) -> nn.Module:
    """Make a model (points, mask) -> logits (sets, n, n)."""
    features, hidden = data.train.points.shape[2], settings.hidden
    if model == "siamese":
        return PairScorer(hidden, Alone(features, hidden))
    if model == "gnn5":
        return PairScorer(hidden, Neighbours(features, hidden, settings.layers))
    orders = (*[1] * settings.layers, 2)
    if model == "ign":
        return PairLogits(InvariantGraphNetwork(features, hidden, 1, orders=orders, normalise="counts"))
    linear = model.endswith("performer")
    return PairLogits(
        HigherOrderTransformer(
            features,
            hidden,
            1,
            orders=orders,
            heads=settings.heads,
            kernel="performer" if linear else "softmax",
            random_features=settings.random_features if linear else None,
            sums=settings.sums if linear else "coupled",
            dropout=settings.dropout,
        )
    )


def loss(network: nn.Module, data: Data, chosen: Tensor) -> Tensor:
    """Cross-entropy over the pairs of some sets."""
    part = data.train.take(chosen)
    pairs = part.pairs()
    logits = network(part.points, part.mask)[pairs]
    return functional.binary_cross_entropy_with_logits(logits, part.joined[pairs].float())


def logits(network: nn.Module, sets: PointSets, size: int = 20) -> list[Tensor]:
    """Return the logits of the asked pairs of each set, a tensor (pairs,) a set."""
    found: list[Tensor] = []
    for chosen in torch.arange(len(sets)).split(size):
        part = sets.take(chosen)
        scored = network(part.points, part.mask)
        found += [one[asked] for one, asked in zip(scored, part.pairs(), strict=True)]
    return found


def truths(sets: PointSets) -> list[Tensor]:
    """Return what is true of the asked pairs of each set."""
    return [joined[asked] for joined, asked in zip(sets.joined, sets.pairs(), strict=True)]


def threshold(network: nn.Module, data: Data) -> tuple[float, float]:
    """Return the best F1 over all pairs of the validation sets, and the threshold that reaches it."""
    return best_f1(torch.cat(logits(network, data.val)), torch.cat(truths(data.val)))


def validate(network: nn.Module, data: Data) -> float:
    """Return the F1 of the validation sets."""
    return threshold(network, data)[0]


def test(network: nn.Module, data: Data) -> dict[str, float]:
    """Return the means over the test sets of accuracy, precision, recall and F1, as the paper's metric is."""
    level = threshold(network, data)[1]
    if data.test.flavour is not None:
        return of_jets(network, data.test, data.test.flavour, level)
    found = [
        detection(one >= level, truth) for one, truth in zip(logits(network, data.test), truths(data.test), strict=True)
    ]
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def of_jets(network: nn.Module, sets: PointSets, quarks: Tensor, level: float) -> dict[str, float]:
    """Return the paper's three scores of the tracks' vertices, means over the jets of each quark."""
    found: dict[str, list[float]] = {}
    for one, truth, mask, quark in zip(logits(network, sets), sets.joined, sets.mask, quarks, strict=True):
        size = int(mask.sum())
        said = torch.zeros(size, size)
        said[torch.ones_like(said).triu(1) > 0] = (one >= level).float().cpu()
        scores = partition_scores(clusters(said), clusters(truth[:size, :size].float().cpu()))
        for name, value in scores.items():
            found.setdefault(f"{name} {jets.FLAVOURS[int(quark)]}", []).append(value)
    return {name: float(np.mean(found[name])) for name in sorted(found)}


def clusters(joined: Tensor) -> np.ndarray[Any, Any]:
    """Number the parts (n,) of a graph (n, n) that hang together."""
    return scipy.sparse.csgraph.connected_components(joined.numpy(), directed=False)[1]


def partition_scores(said: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> dict[str, float]:
    """Compare two partitions: F1 of the pairs that share a part, Rand index and adjusted Rand index."""
    pairs = np.triu_indices(len(truth), 1)
    together = [torch.from_numpy((part[:, None] == part[None, :])[pairs]) for part in (said, truth)]
    return {
        "F1": detection(*together)["f1"],
        "RI": metrics.rand_score(truth, said),
        "ARI": metrics.adjusted_rand_score(truth, said),
    }


def draw(networks: Mapping[str, nn.Module], data: Data, run: runs.Run) -> Path | None:
    """Draw the triangulations of the first test sets: the true one, then each model's; of jets nothing."""
    if data.test.flavour is not None:
        return None
    rows = min(2, len(data.test))
    shown = data.test.take(torch.arange(rows))
    wanted = {"true": shown.joined & shown.pairs()}
    for model, network in networks.items():
        level = threshold(network, data)[1]
        wanted[MODELS[model]] = (network(shown.points, shown.mask) >= level) & shown.pairs()
    with mpl.rc_context(plots.STYLE):
        figure = Figure(figsize=(4 * len(wanted), 4.3 * rows), layout="constrained")
        axes = np.atleast_2d(figure.subplots(rows, len(wanted)))
        for row in range(rows):
            points = shown.points[row]
            for panel, (name, joined) in zip(axes[row], wanted.items(), strict=True):
                truth = wanted["true"][row]
                said = joined[row]
                for edges, colour, width in (
                    (said & truth, "#333333", 1.2),
                    (said & ~truth, plots.PALETTE[5], 1.8),
                    (truth & ~said, plots.PALETTE[4], 1.8),
                ):
                    lines = points[edges.nonzero()].numpy()
                    panel.add_collection(LineCollection(list(lines), colors=colour, linewidths=width))
                panel.scatter(*points[shown.mask[row]].T, s=14, color="#333333", zorder=3)
                panel.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
                panel.set_axis_off()
                if row == 0:
                    panel.set_title(name)
        figure.supxlabel("grey: right; red: too many; light blue: missing", fontsize=14)
        return plots.save(figure, run.own("triangulations.png"))


QUESTION = comparisons.Question(
    module="experiments.set_to_graph",
    text=__doc__ or "",
    models=MODELS,
    datasets={
        "delaunay-50": "generated, 50 points",
        "delaunay-20-80": "generated, 20 to 80 points",
        "delaunay-30": "generated, 30 points: a third of the time",
        "jets-generated": "tracks of generated jets, joined where they have one vertex",
        "jets": "tracks of the published jets",
    },
    settings=Settings,
    load=load,
    size=lambda data: len(data.train),
    build=build,
    loss=loss,
    validate=validate,
    test=test,
    score=("f1", "F1 of the edges, test sets (%)"),
    scores=dict.fromkeys(("jets-generated", "jets"), ("F1 b", "F1 of the pairs of one vertex, bottom jets (%)")),
    draw=draw,
)

main = functools.partial(comparisons.main, QUESTION)

if __name__ == "__main__":
    sys.exit(main())
