"""Predict hyperedges of three nodes, each of another type: who, where, what (HOT section 5, table 4).

Training triples are edges of a graph among all nodes: two nodes are neighbours as often as they occur in one triple.
The features of a node are its row of the row-normalised adjacency; orders 1 -> .. -> 3, evaluated at candidate
triples only. Each positive comes with 5 negatives: one to three of its places are filled anew with nodes of the same
type, so that the triple is not known; training negatives are drawn anew in every epoch, those of validation and test
once. A tenth of the training rows is held out, from the features too, and chooses the epoch. They are drawn as the test
rows were: every node still occurs in what stays, and a triple whose repetition stays is known. In as many epochs the
model then learns from all training rows, and is measured.

The paper's figures, AUC / AUPR: gps 0.952 / 0.804, movielens 0.923 / 0.771 (0.792 the best of its table), drug 0.964
/ 0.901. Two thirds of the test triples of drug also stand in its training set: ``unseen`` counts the others alone.

    python -m experiments.hyperedge_prediction
    python -m experiments.hyperedge_prediction --dataset gps --data ../shared/data --seeds 3
    python -m experiments.hyperedge_prediction --dataset movielens --data ../shared/data --batch 2048 --epochs 20
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data.datasets import read_npz, row_normalise, sparse_rows
from experiments.engine import comparisons
from experiments.engine.options import RefusedError, option
from experiments.engine.scores import average_precision, roc_auc
from experiments.models.message_passing import mlp
from holonomy.models import HigherOrderTransformer, InvariantGraphNetwork

MODELS = {
    "hot": "HOT to triples, kernel",
    "ign": "IGN to triples (S2G+)",
    "mlp": "MLP",
}
NEGATIVES = 5
Array = TypeVar("Array", np.ndarray, Tensor)


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters."""

    layers: int = option("layers; the last one goes from nodes to triples", default=1)
    dropout: float = option("dropout of the nodes' embeddings", default=0.1)
    batch: int = option("positives in a batch", default=256)
    epochs: int = option("epochs", default=30)
    head: int = option("hidden layers of the MLP on what a triple has become", default=1, least=0)
    sums: Literal["coupled", "decoupled"] = option(
        "kernel attention: exact classes, or HOT eq. 21", default="decoupled"
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """Triples of global node numbers.

    Attributes:
        types: number of nodes of each of the three types; type t starts where the ones before it end.
        features: (n, n) sparse, rows of sum 1.
        train: positives (m, 3) to learn from, each once.
        known: their keys, sorted: what a negative must not be, while training.
        val: positives and negatives that choose the epoch, (5 + 1) m rows, positives first.
        val_truth: which are positive.
        test: the same, to measure.
        test_truth: which are positive.
        unseen: which of the test rows count when only triples that are not in the training set do; the rows of
            a positive's negatives go with it.
    """

    types: tuple[int, int, int]
    features: Tensor
    train: Tensor
    known: np.ndarray
    val: Tensor
    val_truth: Tensor
    test: Tensor
    test_truth: Tensor
    unseen: Tensor


def keys(triples: Array, nodes: int) -> Array:
    """Number each triple of nodes, of 64 bits."""
    a, b, c = triples.T
    return (a * nodes + b) * nodes + c


def triples_of(numbers: Tensor, nodes: int) -> Tensor:
    """Return the triples (m, 3) with these numbers."""
    return torch.stack([numbers // nodes**2, numbers // nodes % nodes, numbers % nodes], dim=1)


def among(numbers: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Tell which numbers are among the sorted known ones; ``np.isin`` would sort those again for every batch."""
    place = np.searchsorted(known, numbers)
    return (place < len(known)) & (known[np.minimum(place, len(known) - 1)] == numbers)


def corrupted(
    positives: np.ndarray, types: Sequence[int], known: np.ndarray, rng: np.random.Generator, *, times: int = NEGATIVES
) -> np.ndarray:
    """Return ``times`` negatives for each positive, in its order, none of them among the known.

    Which of the three places change is drawn among the seven choices that change at least one.

    Args:
        positives: triples (m, 3) of global node numbers.
        types: number of nodes of each type.
        known: sorted keys of triples that are not allowed.
        rng: random numbers.
        times: negatives for each positive.

    Returns:
        Triples (times * m, 3): the negatives of the first positive, then those of the second.

    Raises:
        RefusedError: if every triple is known.
    """
    sizes = np.asarray(types)
    start, nodes = np.cumsum(sizes) - sizes, int(sizes.sum())
    out = np.repeat(positives, times, axis=0)
    wrong = np.arange(len(out))
    if len(known) and 1 + np.count_nonzero(np.diff(known)) >= sizes.prod():
        raise RefusedError(f"all of the {sizes.prod()} triples of these nodes are known: no negative can be drawn")
    source = out.copy()
    while len(wrong):
        change = (rng.integers(1, 8, len(wrong))[:, None] >> np.arange(3)) & 1
        drawn = start + (rng.random((len(wrong), 3)) * sizes).astype(np.int64)
        out[wrong] = np.where(change == 1, drawn, source[wrong])
        wrong = wrong[among(keys(out[wrong], nodes), known)]
    return out


def held_out(rows: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Choose rows at random such that every node still occurs in the others.

    Args:
        rows: triples (m, 3) of global node numbers; repetitions are rows of their own.
        share: of the rows that are wanted, at least one row; fewer are chosen where no other can go.
        rng: random numbers.

    Returns:
        Which rows, (m,), boolean.

    Raises:
        ValueError: if no row can go.
    """
    left = np.bincount(rows.ravel())
    wanted, chosen = max(1, int(share * len(rows))), np.zeros(len(rows), dtype=bool)
    for row in rng.permutation(len(rows)):
        triple = rows[row]
        if (left[triple] > 1).all():
            left[triple] -= 1
            chosen[row] = True
            wanted -= 1
            if not wanted:
                break
    if not chosen.any():
        raise RefusedError("no training triple can be held out: each has a node that occurs in no other")
    return chosen


def prepare(train: np.ndarray, test: np.ndarray, types: Sequence[int], *, seed: int) -> Data:
    """Hold a tenth of the training rows out, make the features, and draw the negatives.

    Args:
        train: training triples (m, 3), numbered within their types; repetitions count once, but as often as they
            occur in what is held out.
        test: test triples, the same way; repetitions count as often as they occur.
        types: number of nodes of each type.
        seed: of the held-out triples and of the negatives; the test negatives are the same for every seed.

    Returns:
        The data.
    """
    sizes = np.asarray(types)
    start, nodes = np.cumsum(sizes) - sizes, int(sizes.sum())
    train, test = train.astype(np.int64) + start, test.astype(np.int64) + start
    rng = np.random.default_rng(seed)
    chosen = held_out(train, 0.1, rng)
    # Rows, as the test was held out: where a repetition of a triple stays behind, the model has seen it there too.
    held = train[chosen]
    seen, every = np.sort(keys(train, nodes)), np.sort(keys(np.concatenate([train, test]), nodes))
    val_negatives = corrupted(held, types, seen, rng)
    test_negatives = corrupted(test, types, every, np.random.default_rng(0))
    new = ~np.isin(keys(test, nodes), seen)
    return Data(
        (int(sizes[0]), int(sizes[1]), int(sizes[2])),
        *_learned(train[~chosen], nodes),
        *_rows(held, val_negatives),
        *_rows(test, test_negatives),
        torch.from_numpy(np.concatenate([new, np.repeat(new, NEGATIVES)])),
    )


def whole(data: Data) -> Data:
    """Put what was held out back among the training triples, and into the features."""
    triples = torch.cat([data.train, data.val[data.val_truth]]).numpy()
    features, train, known = _learned(triples, sum(data.types))
    return dataclasses.replace(data, features=features, train=train, known=known)


def _learned(triples: np.ndarray, nodes: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Features, the triples each once, and their keys."""
    once = np.unique(triples, axis=0)
    return adjacency(once, nodes), torch.from_numpy(once), keys(once, nodes)


def _rows(positives: np.ndarray, negatives: np.ndarray) -> tuple[Tensor, Tensor]:
    truth = torch.arange(len(positives) + len(negatives)) < len(positives)
    return torch.from_numpy(np.concatenate([positives, negatives])), truth


def adjacency(triples: np.ndarray, nodes: int) -> Tensor:
    """Return the row-normalised number of triples that two nodes share, sparse (n, n)."""
    pairs = np.concatenate([triples[:, pair] for pair in ([0, 1], [0, 2], [1, 2])])
    pairs = np.concatenate([pairs, pairs[:, ::-1]])
    counted = scipy.sparse.coo_array((np.ones(len(pairs), np.float32), tuple(pairs.T)), shape=(nodes, nodes)).tocsr()
    counted.sum_duplicates()
    parts = (counted.indptr.astype(np.int64), counted.indices.astype(np.int64), counted.data)
    return row_normalise(sparse_rows(*(torch.from_numpy(part) for part in parts), (nodes, nodes)))


def generated(seed: int = 0) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int]]:
    """Draw triples of users, places and acts: each has one of 4 tastes, and 9 triples of 10 agree in it."""
    rng = np.random.default_rng(seed)
    types = (40, 30, 12)
    taste = [rng.permutation(np.arange(size) % 4) for size in types]
    agree = rng.random(1500) < 0.9
    common = rng.integers(0, 4, 1500)
    columns = []
    for kind, size in zip(taste, types, strict=True):
        drawn = rng.integers(0, size, 1500)
        for group in range(4):
            chosen = agree & (common == group)
            drawn[chosen] = rng.choice(np.flatnonzero(kind == group), chosen.sum())
        columns.append(drawn)
    triples = np.unique(np.stack(columns, axis=1), axis=0)
    triples = triples[rng.permutation(len(triples))]
    cut = len(triples) * 4 // 5
    return triples[:cut], triples[cut:], types


@functools.lru_cache(maxsize=2)
def _load(dataset: str, folder: Path | None, seed: int) -> Data:
    if dataset == "tastes":
        train, test, types = generated()
    elif folder is None:
        raise FileNotFoundError(f"{dataset} is read from hot_{dataset}.npz: say where it lies with --data FOLDER")
    else:
        raw = read_npz(folder / f"hot_{dataset}.npz", {"train": "i2", "test": "i2", "nums_type": "i1"})
        train, test, types = raw["train"], raw["test"], raw["nums_type"].tolist()
        if sum(types) >= 2**21:  # whose cube, the number of triples, int64 does not hold
            raise RefusedError(f"hot_{dataset}.npz: nums_type must sum up to less than {2**21}, got {sum(types)}")
        for name in ("train", "test"):
            if raw[name].shape[1] != 3 or len(types) != 3 or ((raw[name] < 0) | (raw[name] >= raw["nums_type"])).any():
                raise RefusedError(f"hot_{dataset}.npz: {name} must hold triples of numbers from 0 on, below nums_type")
    return prepare(train, test, types, seed=seed)


def load(dataset: str, folder: Path | None, _: Settings, seed: int) -> Data:
    """Read or draw the triples; the held-out part and its negatives depend on the seed, the test rows do not."""
    return _load(dataset, folder, seed)


class Embedded(nn.Module):
    """Embed the sparse features of every node, then score triples by the nodes' embeddings."""

    def __init__(self, nodes: int, hidden: int, scorer: nn.Module, dropout: float) -> None:
        super().__init__()
        # Rows of an adjacency sum up to 1: entries of size 1 give embeddings of about that size.
        self.weight = nn.Parameter(torch.randn(nodes, hidden))
        self.norm = nn.LayerNorm(hidden)
        self.scorer, self.dropout = scorer, dropout

    def forward(self, features: Tensor, triples: Tensor) -> Tensor:
        h = self.norm(features @ self.weight)
        return self.scorer(functional.dropout(h, self.dropout, self.training), triples)


class AtTriples(nn.Module):
    """A model of order 1 -> 3, evaluated at some triples only, and an MLP on each, as in set-to-graph models."""

    def __init__(self, model: nn.Module, hidden: int, layers: int) -> None:
        super().__init__()
        self.model = model
        self.head = mlp(hidden, *[2 * hidden] * layers, 1)

    def forward(self, h: Tensor, triples: Tensor) -> Tensor:
        # The model lists index tuples once; a test triple may occur several times. Numbers sort faster than rows.
        number, place = keys(triples, len(h)).unique(return_inverse=True)
        return self.head(self.model(h, to=triples_of(number, len(h))).values)[place, 0]


class Concatenated(nn.Module):
    """An MLP on the three embeddings, as deep as layers and head of the others."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.net = mlp(3 * hidden, *[2 * hidden] * layers, 1)

    def forward(self, h: Tensor, triples: Tensor) -> Tensor:
        return self.net(h[triples].flatten(1))[:, 0]


def build(model: str, settings: Settings, data: Data) -> nn.Module:
    """Make a model (features, triples) -> logits."""
    nodes, hidden = sum(data.types), settings.hidden
    orders = (*[1] * settings.layers, 3)
    if model == "mlp":
        scorer = Concatenated(hidden, settings.layers + settings.head)
    else:
        if model == "ign":
            network = InvariantGraphNetwork(hidden, hidden, hidden, orders=orders, normalise="counts", entrywise=True)
        else:
            network = HigherOrderTransformer(
                hidden,
                hidden,
                hidden,
                orders=orders,
                heads=settings.heads,
                kernel="performer",
                sums=settings.sums,
                # Triples of different nodes in one order: no other entry has the same nodes.
                entrywise=True,
            )
        scorer = AtTriples(network, hidden, settings.head)
    return Embedded(nodes, hidden, scorer, settings.dropout)


def loss(network: nn.Module, data: Data, chosen: Tensor) -> Tensor:
    """Cross-entropy over some positives and fresh negatives."""
    positives = data.train[chosen]
    # Torch's random numbers seed numpy's: the checkpoint holds them, so that a resumed run draws the same.
    rng = np.random.default_rng(int(torch.randint(2**31, ())))
    drawn = corrupted(positives.cpu().numpy(), data.types, data.known, rng)
    triples, truth = (part.to(positives.device) for part in _rows(positives.cpu().numpy(), drawn))
    truth = truth.float()
    logits = network(data.features, triples)
    return functional.binary_cross_entropy_with_logits(logits, truth)


def logits(network: nn.Module, data: Data, triples: Tensor, size: int = 16384) -> Tensor:
    """Score many triples."""
    return torch.cat([network(data.features, part) for part in triples.split(size)])


def validate(network: nn.Module, data: Data) -> float:
    """Return the area under the ROC curve on the held-out triples."""
    return roc_auc(logits(network, data, data.val), data.val_truth)


def test(network: nn.Module, data: Data) -> dict[str, float]:
    """Return AUC and AUPR of the test triples, and of those that are not in the training set where some are."""
    score, truth, new = logits(network, data, data.test), data.test_truth, data.unseen
    out = {"AUC": roc_auc(score, truth), "AUPR": average_precision(score, truth)}
    if not bool(new.all()):
        out |= {
            "AUC unseen": roc_auc(score[new], truth[new]),
            "AUPR unseen": average_precision(score[new], truth[new]),
        }
    return out


QUESTION = comparisons.Question(
    module="experiments.hyperedge_prediction",
    text=__doc__ or "",
    models=MODELS,
    datasets={
        "tastes": "generated, 82 nodes",
        "gps": "user, location, activity; 1154 training triples",
        "movielens": "user, movie, tag; 38365 training triples",
        "drug": "user, drug, reaction; 61713 distinct training triples; 67 % of the test rows are training triples",
    },
    settings=Settings,
    load=load,
    size=lambda data: len(data.train),
    build=build,
    loss=loss,
    validate=validate,
    test=test,
    score=("AUC", "area under the ROC curve, test triples (%)"),
    whole=whole,
    defaults={
        "movielens": {"batch": 2048, "epochs": 10},
        "drug": {"batch": 2048, "epochs": 10},
    },
)

main = functools.partial(comparisons.main, QUESTION)

if __name__ == "__main__":
    sys.exit(main())
