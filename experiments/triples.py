"""Do two other tokens and this one add up to zero? A task on triples, for attention to pairs of keys.

Match-3 (Sanford, Hsu and Telgarsky 2023): each token is a residue modulo m, and its label says whether there are two
tokens, not necessarily others, whose residues add up with its own to 0 modulo m. A 2-simplicial layer looks at all
pairs of keys at once; ordinary layers of the same number, width and parameters have to do with one key at a time. Two
controls that pairs can answer: ``sorting`` (how many tokens are smaller than mine) and ``parity`` (is the number of odd
tokens odd). The gain of triples must vanish there.

``paths`` is simplicial path sparse attention: of all pairs of keys it sees the k x k along the paths of the k best
steps that the layer before suggests. Equal tokens have equal scores, so that the best steps are often to copies of a
few tokens; ``distinct`` leaves out steps to copies. With ``--blanks`` some tokens carry no residue: they have no label
and take no part in the question.

    python -m experiments.triples
    python -m experiments.triples --tokens 12 --pool 8 --modulus 37 --sequences 32000 --epochs 16
    python -m experiments.triples --tokens 24 --blanks 12 --pool 8 --modulus 37 --sequences 32000 --epochs 16
    python -m experiments.triples --dataset sorting
    python -m experiments.triples --dataset parity
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.engine import comparisons, plots, runs
from experiments.engine.options import RefusedError, option
from holonomy.models import SimplicialTransformer

MODELS = {
    "simplicial": "2-simplicial",
    "paths": "2-simplicial, path sparse",
    "distinct": "2-simplicial, path sparse, distinct steps",
    "pairwise": "pairwise, equal parameters",
}
# The label of blanks, which the loss leaves out.
NO_LABEL = -100


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters; the sizes of the data among them."""

    hidden: int = option("width of the model", default=64)
    layers: int = option("layers; the last one is the simplicial one", default=2)
    lr: float = option("largest learning rate", default=0.003)
    weight_decay: float = option("weight decay of AdamW", default=0.01)
    batch: int = option("sequences in a batch", default=128)
    epochs: int = option("epochs", default=12)
    steps: int = option("k, the steps from a token of path sparse attention", default=8)
    tokens: int = option("tokens of a sequence", default=12)
    modulus: int = option("m, the number of residues", default=29)
    blanks: int = option(
        "tokens of a sequence that carry no residue and have no label, at random places", default=0, least=0
    )
    pool: int = option("different residues that a sequence is drawn from", default=6)
    sequences: int = option("training sequences", default=16000)
    tests: int = option("sequences to validate, and as many to test", default=1000)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Residues ``(sequences, tokens)`` and a label for each token; a blank is the modulus, and its label NO_LABEL."""

    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Data:
    """Sequences to train, to validate and to test, of so many kinds of tokens."""

    train: Sequences
    val: Sequences
    test: Sequences
    kinds: int
    classes: int


def match3(x: Tensor, modulus: int) -> Tensor:
    """Return 1 where two tokens of the sequence complete a token's residue to 0."""
    pairs = (x[:, :, None] + x[:, None, :]).flatten(1) % modulus
    wanted = -x % modulus
    return (wanted[:, :, None] == pairs[:, None, :]).any(-1).long()


def sorting(x: Tensor, _: int) -> Tensor:
    """Return how many tokens of the sequence are smaller than a token."""
    return (x[:, None, :] < x[:, :, None]).sum(-1)


def parity(x: Tensor, _: int) -> Tensor:
    """Return for every token whether the number of odd tokens is odd."""
    return (x % 2).sum(-1, keepdim=True).expand_as(x) % 2


def among_blanks(part: Sequences, blanks: int, modulus: int, generator: torch.Generator) -> Sequences:
    """Put blanks at random places, in each sequence anew."""
    count, tokens = part.x.shape
    places = torch.rand(count, tokens + blanks, generator=generator).argsort(dim=1)[:, :tokens]
    x, y = (part.x.new_full((count, tokens + blanks), fill) for fill in (modulus, NO_LABEL))
    return Sequences(x.scatter(1, places, part.x), y.scatter(1, places, part.y))


TASKS = {"match3": match3, "sorting": sorting, "parity": parity}


def load(dataset: str, _: Path | None, settings: Settings, seed: int) -> Data:
    """Draw the sequences of a seed."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(count: int) -> Sequences:
        # Of few different residues there are few sums, and both labels are common however long the sequence is.
        pools = torch.rand(count, settings.modulus, generator=generator).argsort(dim=1)[:, : settings.pool]
        x = pools.gather(1, torch.randint(settings.pool, (count, full), generator=generator))
        part = Sequences(x, TASKS[dataset](x, settings.modulus))
        return among_blanks(part, settings.blanks, settings.modulus, generator) if settings.blanks else part

    full = settings.tokens - settings.blanks
    if not 0 <= settings.blanks < settings.tokens:
        raise RefusedError(f"--blanks must lie in 0 .. {settings.tokens - 1}, below the tokens, got {settings.blanks}")
    if not 0 < settings.pool <= settings.modulus:
        raise RefusedError(f"--pool must lie in 1 .. {settings.modulus}, the residues, got {settings.pool}")
    classes = settings.tokens if dataset == "sorting" else 2
    parts = (drawn(count) for count in (settings.sequences, settings.tests, settings.tests))
    return Data(*parts, settings.modulus + (settings.blanks > 0), classes)


class Classifier(nn.Module):
    """An embedding of the residues, a transformer, and a linear map at every token. No positions: these are sets."""

    def __init__(self, kinds: int, classes: int, encoder: SimplicialTransformer, width: int) -> None:
        """Put the parts together."""
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.encoder = encoder
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(sequences, tokens, classes)`` of residues ``(sequences, tokens)``."""
        return self.head(self.encoder(self.embedding(x)))


def build(model: str, settings: Settings, data: Data) -> nn.Module:
    """Make a model; what a simplicial layer has in projections, the pairwise one has in its MLPs."""
    width, layers = settings.hidden, settings.layers
    feedforward = 2 * width
    if model == "pairwise":
        # One key and one value more are 2 d^2 parameters, and so are d / layers more hidden units in each MLP.
        feedforward += width // layers
    encoder = SimplicialTransformer(
        width,
        settings.heads,
        orders=[1] * layers if model == "pairwise" else [*[1] * (layers - 1), 2],
        feedforward=feedforward,
        steps=settings.steps if model in ("paths", "distinct") else None,
        distinct=model == "distinct",
        dropout=settings.dropout,
    )
    return Classifier(data.kinds, data.classes, encoder, width)


def loss(network: nn.Module, data: Data, chosen: Tensor) -> Tensor:
    """Cross-entropy over the tokens of some sequences that have a label."""
    logits, labels = network(data.train.x[chosen]).flatten(0, 1), data.train.y[chosen].flatten()
    return functional.cross_entropy(logits, labels, ignore_index=NO_LABEL)


def accuracy(network: nn.Module, part: Sequences) -> float:
    """Return the share of tokens with the right label, of those that have one."""
    said = torch.cat([network(x).argmax(-1) for x in part.x.split(250)])
    return (said == part.y)[part.y != NO_LABEL].double().mean().item()


def validate(network: nn.Module, data: Data) -> float:
    """Return the share of tokens with the right label."""
    return accuracy(network, data.val)


def test(network: nn.Module, data: Data) -> dict[str, float]:
    """Return the share of right labels, beside that of the commonest one."""
    labels = data.test.y[data.test.y != NO_LABEL]
    commonest = labels.bincount().max().item() / len(labels)
    return {"accuracy": accuracy(network, data.test), "commonest label": commonest}


def seconds(network: nn.Module, x: Tensor, rounds: int = 3) -> float:
    """Return the least time of a training step's forward and backward pass."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        network(x).sum().backward()
        found.append(time.perf_counter() - start)
    return min(found)


def draw(networks: Mapping[str, nn.Module], data: Data, run: runs.Run) -> Path:
    """Draw the time of a step against the number of tokens, in multiples of the pairwise model's at the first."""
    lengths = [16, 32, 64, 128]
    times: dict[str, list[float]] = {}
    with torch.enable_grad():
        for model, network in networks.items():
            times[model] = [seconds(network, torch.randint(data.kinds, (2, n))) for n in lengths]
    unit = times.get("pairwise", next(iter(times.values())))[0]
    with mpl.rc_context(plots.STYLE):
        figure, (axes,) = plots.figure_of(9, 5)
        for place, (model, found) in enumerate(times.items()):
            axes.loglog(lengths, [t / unit for t in found], "o-", color=plots.PALETTE[place % 8], label=MODELS[model])
        axes.set(xlabel="tokens n", ylabel="time of a step, pairwise at n = 16 is 1")
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.minorticks_off()
        axes.legend(loc="upper left", frameon=False)
        axes.set_title("A training step of 2 sequences")
        return plots.save(figure, run.own("time.png"))


QUESTION = comparisons.Question(
    module="experiments.triples",
    text=__doc__ or "",
    models=MODELS,
    datasets={
        "match3": "does a pair complete my residue to 0?",
        "sorting": "how many tokens are smaller than mine?",
        "parity": "is the number of odd tokens odd?",
    },
    settings=Settings,
    load=load,
    size=lambda data: len(data.train.x),
    build=build,
    loss=loss,
    validate=validate,
    test=test,
    score=("accuracy", "right labels (%)"),
    defaults={"sorting": {"epochs": 6}, "parity": {"epochs": 6, "tokens": 6, "modulus": 2, "pool": 2}},
    draw=draw,
)

main = functools.partial(comparisons.main, QUESTION)

if __name__ == "__main__":
    sys.exit(main())
