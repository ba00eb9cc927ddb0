"""Classes that are the leaves of a tree: do prototypes placed by the tree make mistakes that are less far off?

A random tree of labels; every node draws an offset, a class's mean is the sum of those on its way from the root, and a
fixed random network hides it in 32 features. An MLP answers in few numbers, and its decoder in classes:

    hyperbolic  minus the scaled squared distance to prototypes on the hyperboloid (``HypPrototypes``), frozen: the
                leaves of a map of the label tree, a ``LorentzEmbedding`` whose distances are those of the tree
    flat        the same with a map of flat points, placed in the same way
    linear      a linear map of as many numbers, learned: no tree
    one-hot     a linear map of the hidden layer: the usual classifier, without the bottleneck

All are trained by cross-entropy, with the same steps and the same three learning rates; validation accuracy chooses
rate (seed 0) and step. Measured are the accuracy, the distance in the tree between the true class and a wrong answer,
and its mean over all answers, right ones being 0. The last column is the control that needs no geometry: the same
probabilities, answered by the class of least expected distance instead of the likeliest. Every seed is another tree.

    python -m experiments.label_trees
    python -m experiments.label_trees --nodes 100 --dims 2 3 5 8 --seeds 5
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import tree_maps
from experiments.data import transfers
from experiments.engine import options, runs, tables
from experiments.models.message_passing import mlp
from holonomy.layers import HypPrototypes
from holonomy.manifolds import LorentzEmbedding
from holonomy.optim import RiemannianAdam

MODELS = ("hyperbolic", "flat", "linear", "one-hot")
RATES = (0.003, 0.01, 0.03)
FEATURES, HIDDEN, SPREAD = 32, 64, 1.0
EXAMPLES = {"train": 20, "val": 10, "test": 40}
SCORES = ("accuracy", "mistakes", "distance", "least")


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A tree of labels, (nodes, nodes) distances; its leaves, the classes; and examples (n, features) with classes."""

    hops: Tensor
    leaves: Tensor
    parts: dict[str, tuple[Tensor, Tensor]]

    @property
    def between(self) -> Tensor:
        """Distances of the classes, (classes, classes)."""
        return self.hops[self.leaves][:, self.leaves]


def labelled(nodes: int, seed: int) -> Labelled:
    """Draw a tree and examples of its leaves."""
    rng = np.random.default_rng(seed)
    parent = transfers.grown(rng, nodes)
    means = rng.standard_normal((nodes, FEATURES // 2))
    for node in range(1, nodes):
        means[node] += means[parent[node]]
    leaves = np.setdiff1d(np.arange(nodes), parent)
    hide = rng.standard_normal((FEATURES // 2, FEATURES)) / 2

    def drawn(each: int) -> tuple[Tensor, Tensor]:
        kinds = np.arange(len(leaves)).repeat(each)
        places = means[leaves[kinds]] + SPREAD * rng.standard_normal((len(kinds), FEATURES // 2))
        return torch.from_numpy(np.tanh(places @ hide)).float(), torch.from_numpy(kinds)

    parts = {name: drawn(each) for name, each in EXAMPLES.items()}
    return Labelled(transfers.hops(parent), torch.from_numpy(leaves), parts)


class Flat(nn.Module):
    """Logits by squared distance to frozen points of flat space."""

    def __init__(self, prototypes: Tensor) -> None:
        super().__init__()
        self.register_buffer("prototypes", prototypes)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Points (n, d) to logits (n, classes)."""
        return -self.log_scale.exp() * (x[:, None] - self.get_buffer("prototypes")).square().sum(-1)


class Hyperbolic(nn.Module):
    """``HypPrototypes`` with frozen prototypes, of vectors at the origin."""

    def __init__(self, points: LorentzEmbedding, leaves: Tensor) -> None:
        super().__init__()
        placed = points(leaves).detach()
        points.manifold.requires_grad_(requires_grad=False)
        self.head = HypPrototypes(points.embedding_dim, len(leaves), points.manifold)
        self.head.prototypes = LorentzEmbedding.from_pretrained(placed, points.manifold)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors (n, d) to logits (n, classes)."""
        return self.head(self.head.manifold.expmap0(functional.pad(x, (1, 0))))


def placed(kind: str, data: Labelled, dim: int, steps: int) -> tuple[nn.Module, float]:
    """A map of the whole label tree from its radial drawing, and the mean relative error of its distances."""
    pairs = tree_maps.Pairs.of(data.hops, 0)
    start = tree_maps.drawn(data.hops, dim) + 0.01 * torch.randn(len(data.hops), dim)
    space = tree_maps.fit(kind, pairs, start, 0.1, steps)
    with torch.no_grad():
        return space, float(pairs.errors(space(pairs.test), pairs.test).mean())


def network(model: str, data: Labelled, dim: int, steps: int) -> tuple[nn.Module, float | None]:
    """An encoder and a decoder, and the error of the prototypes where there are some."""
    if model == "one-hot":
        return mlp(FEATURES, HIDDEN, HIDDEN, len(data.leaves)), None
    encoder = mlp(FEATURES, HIDDEN, HIDDEN, dim)
    if model == "linear":
        return nn.Sequential(encoder, nn.Linear(dim, len(data.leaves))), None
    space, error = placed(model, data, dim, steps)
    if isinstance(space, tree_maps.HyperbolicMap):
        return nn.Sequential(encoder, Hyperbolic(space.points, data.leaves)), error
    assert isinstance(space, tree_maps.FlatMap)
    return nn.Sequential(encoder, Flat((space.points * space.log_unit.exp()).detach()[data.leaves])), error


@torch.no_grad()
def measured(logits: Tensor, truth: Tensor, between: Tensor) -> dict[str, float]:
    """Accuracy, and distances in the tree: of wrong answers, of all, and of all answers of least expected distance."""
    answers = logits.argmax(1)
    far = between[truth, answers]
    least = between[truth, (logits.softmax(1) @ between).argmin(1)]
    wrong = far[far > 0]
    mistakes = float(wrong.mean()) if len(wrong) else 0.0
    found = float((far == 0).float().mean()), mistakes, float(far.mean()), float(least.mean())
    return dict(zip(SCORES, found, strict=True))


def train(model: str, data: Labelled, dim: int, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """Train one model, and measure it at the step that the validation examples like best."""
    runs.seed_everything(seed)
    net, error = network(model, data, dim, steps)
    optimizer = RiemannianAdam([p for p in net.parameters() if p.requires_grad], lr=rate)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best: dict[str, Any] = {"val": -1.0}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        x, y = data.parts["train"]
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        fall.step()
        if step % 10 == 0 or step == steps:
            with torch.no_grad():
                val, test = ((net(data.parts[name][0]), data.parts[name][1]) for name in ("val", "test"))
            found = measured(*val, data.between)["accuracy"]
            if found > best["val"]:
                best = {"val": found, "step": step} | measured(*test, data.between)
    return best | {"rate": rate, "placement": error, "parameters": sum(p.numel() for p in net.parameters())}


def row(model: str, dim: int, data: Sequence[Labelled], run: runs.Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Search the rate with seed 0, then run all seeds."""

    def part(seed: int, rate: float) -> dict[str, Any]:
        compute = functools.partial(train, model, data[seed], dim, rate, arguments.steps, seed)
        return run.part(f"{model}-{dim}-{seed}-{rate:g}", compute)

    rate = max(RATES, key=lambda rate: part(0, rate)["val"])
    records = [part(seed, rate) for seed in range(arguments.seeds)]
    summary = {name: runs.summary([record[name] for record in records]) for name in SCORES}
    return {"model": model, "dim": dim, "rate": rate, "summary": summary, "seeds": records}


def text(content: Mapping[str, Any]) -> str:
    """The table."""
    lines = [f"{content['classes']} classes of {content['nodes']} labels; distances in edges, {content['seeds']} trees"]
    lines.append(
        f"{'':12s}{'numbers':>8s}{'accuracy, %':>16s}{'of mistakes':>16s}{'of all':>16s}{'least expected':>16s}"
    )
    for one in content["rows"]:
        right, *far = one["summary"].values()
        shown = f"{100 * right['mean']:10.1f} ± {100 * right['std']:3.1f}"
        shown += "".join(f"{distance['mean']:9.2f} ± {distance['std']:4.2f}" for distance in far)
        lines.append(f"{one['model']:12s}{one['dim'] or '':>8}{shown}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add("--nodes", type=int, default=60, metavar="N", help="labels, classes and what is above them (default 60)")
    add("--dims", type=int, nargs="+", default=[2, 3, 5, 8], metavar="D", help="numbers an example (default 2 3 5 8)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    add("--seeds", type=int, default=3, metavar="N", help="trees 0 .. N-1 (default 3)")
    add("--steps", type=int, default=200, metavar="N", help="of training, and of placing prototypes (default 200)")


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    if min(arguments.dims) < 2 or arguments.nodes < 8:
        raise options.RefusedError("--dims must be at least 2 and --nodes at least 8")
    return {"nodes": arguments.nodes, "steps": arguments.steps}


def compute(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """A row for each model in so many numbers an example."""
    data = [labelled(arguments.nodes, seed) for seed in range(arguments.seeds)]
    content: dict[str, Any] = {"nodes": arguments.nodes, "seeds": arguments.seeds, "rates": RATES, "rows": []}
    content["classes"] = " to ".join(str(f([len(one.leaves) for one in data])) for f in (min, max))
    for model in arguments.models:
        for dim in arguments.dims if model != "one-hot" else [0]:
            content["rows"].append(row(model, dim, data, run, arguments))
            if not arguments.quiet:
                print(text(content).splitlines()[-1], file=sys.stderr)
    return content


SCRIPT = tables.Script(
    module="experiments.label_trees",
    about=__doc__ or "",
    options=add_options,
    config=config,
    compute=compute,
    text=text,
    folder="runs/label_trees",
    at_least_one=("seeds", "steps"),
    cpu_only=True,
)

main = functools.partial(tables.main, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
