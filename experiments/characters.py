"""A hyperbolic language model beside its flat twin, in float32 and under bfloat16 autocast, over ten thousand steps.

Texts and models are those of ``examples.characters``: nested brackets of two kinds, whose entropy is known, and two
transformers of equal widths, depth and heads. Each model and precision searches the same learning rates. A loss that
is not finite ends a run with an error, so that a table is a table of runs without one. The picture has the loss
against steps, and against seconds: the time of a step is measured in turns, in one process.

    python -m experiments.characters --lr 0.001 0.003 0.01
    python -m experiments.characters --epochs 1 --models flat hyperbolic
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.characters import Flat, Hyperbolic, drawn
from experiments.engine import comparisons, plots, runs
from experiments.engine.options import option
from holonomy.optim import RiemannianAdam

MODELS = {
    "hyperbolic": "hyperbolic",
    "flat": "flat",
    "hyperbolic-bfloat16": "hyperbolic, bfloat16 autocast",
    "flat-bfloat16": "flat, bfloat16 autocast",
}
KINDS = {"hyperbolic": Hyperbolic, "flat": Flat}


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters; the sizes of the data among them. 500 steps are an epoch."""

    hidden: int = option("width of the model", default=32)
    layers: int = option("blocks", default=2)
    lr: float = option("largest learning rate", default=0.003)
    weight_decay: float = option("weight decay", default=0.0)
    batch: int = option("texts of a step", default=16)
    length: int = option("characters of a text", default=32, least=2)
    texts: int = option("to train on", default=8000)
    tests: int = option("texts to validate, and as many to test", default=1000)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts ``(texts, length)`` to train, to validate and to test; bits of chance in a character of the last."""

    train: Tensor
    val: Tensor
    test: Tensor
    chance: float


class Reader(nn.Module):
    """A model in one precision: texts to the cross-entropy of each of their characters but the first, in nats."""

    def __init__(self, model: nn.Module, *, bfloat16: bool) -> None:
        super().__init__()
        self.model, self.bfloat16 = model, bfloat16

    def forward(self, texts: Tensor) -> Tensor:
        """The loss ``(texts, length - 1)``."""
        with torch.autocast(texts.device.type, torch.bfloat16, enabled=self.bfloat16):
            said = self.model(texts[:, :-1])
        return functional.cross_entropy(said.float().transpose(1, 2), texts[:, 1:], reduction="none")


def load(_: str, folder: Path | None, settings: Settings, seed: int) -> Texts:
    """Draw the texts of a seed."""
    del folder  # they are generated
    generator = torch.Generator().manual_seed(seed)
    train, val = (drawn(count, settings.length, generator)[0] for count in (settings.texts, settings.tests))
    return Texts(train, val, *drawn(settings.tests, settings.length, generator))


def build(model: str, settings: Settings, _: Texts) -> Reader:
    """Make a model."""
    kind, _, precision = model.partition("-")
    sizes = (settings.hidden, settings.length, settings.layers, settings.heads, settings.dropout)
    return Reader(KINDS[kind](*sizes), bfloat16=bool(precision))


def bits(network: nn.Module, texts: Tensor) -> float:
    """Bits that the model needs for a character, given those before."""
    return torch.cat([network(part) for part in texts.split(250)]).mean().item() / math.log(2)


def test(network: nn.Module, data: Texts) -> dict[str, float]:
    """Bits for a character, and how many of them are no chance."""
    found = bits(network, data.test)
    return {"bits": found, "above the entropy": found - data.chance}


def seconds_of_steps(networks: Mapping[str, nn.Module], texts: Tensor, rounds: int) -> dict[str, float]:
    """The median time of forward and backward pass of each model, which take turns."""
    found: dict[str, list[float]] = {model: [] for model in networks}
    for _ in range(rounds):
        for model, network in networks.items():
            start = time.perf_counter()
            network(texts).mean().backward()
            found[model].append(time.perf_counter() - start)
    return {model: statistics.median(each) for model, each in found.items()}


def draw(networks: Mapping[str, nn.Module], data: Texts, run: runs.Run) -> Path:
    """Draw the loss on validation texts against steps, and against the seconds that they take."""
    rows = runs.read_json(run.path("table.json"))["models"]
    with torch.enable_grad():
        times = seconds_of_steps(networks, data.train[:16], 20)
    with mpl.rc_context(plots.STYLE):
        figure, (left, right) = plots.figure_of(10, 4, 2)
        for place, (model, row) in enumerate(rows.items()):
            settings, history = row["settings"], row["history"][0]["val"]
            steps = [(epoch + 1) * -(-settings["texts"] // settings["batch"]) for epoch in range(len(history))]
            found = [-val for val in history]
            look = {"color": plots.PALETTE[place % 8], "label": MODELS[model]}
            left.plot(steps, found, "o-", markersize=3, **look)
            right.semilogx([step * times[model] for step in steps], found, "o-", markersize=3, **look)
        left.set(xlabel="steps", ylabel="validation, bits for a character")
        right.set(xlabel="seconds, forward and backward")
        left.legend(frameon=False)
        return plots.save(figure, run.own("loss.png"))


QUESTION = comparisons.Question(
    module="experiments.characters",
    text=__doc__ or "",
    models=MODELS,
    datasets={"brackets": "nested brackets of two kinds, of known entropy"},
    settings=Settings,
    load=load,
    size=lambda data: len(data.train),
    build=build,
    loss=lambda network, data, chosen: network(data.train[chosen]).mean(),
    validate=lambda network, data: -bits(network, data.val),
    test=test,
    score=("bits", "bits for a character"),
    percent=False,
    draw=draw,
    optimizer=RiemannianAdam,
)

main = functools.partial(comparisons.main, QUESTION)

if __name__ == "__main__":
    sys.exit(main())
