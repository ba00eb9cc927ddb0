"""Does training with certificates help? What they prove beside attacks and randomized smoothing, over seeds.

The Hypformer of ``experiments.node_classification`` is trained by cross-entropy alone, or with a hinge on the
differentiable certificate of some training nodes a step. For test nodes, by radius: the share that is certified right
for every change of the node's own features; the share that stays right under the smallest changes that an attack found;
the share that randomized smoothing certifies (Cohen et al., ICML 2019, theorem 1), of another classifier, the majority
of the model's answers under noise, with probability 0.999 for each node.

    python -m experiments.certified_training
    python -m experiments.certified_training --dataset cora --data ../shared/data
    python -m examples.certified_nodes       # the training loop, to read
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any, cast

import torch
from scipy import stats
from torch.nn.functional import cross_entropy

from experiments import node_classification
from experiments.data import datasets
from experiments.data.datasets import NodeData
from experiments.engine import options, plots, runs, tables
from experiments.engine.attacks import Logits, own_logits, smallest_attack
from holonomy import Hypformer
from holonomy.theory import certified_accuracy, margin_bounds
from holonomy.theory.affine.enclosure import Enclosure

WAYS = ("cross-entropy", "certificates too")
SHARES, SIGMAS, ALPHA = [0.01, 0.03, 0.1, 0.2], [0.25, 0.5], 0.001
# Nodes whose certificates are trained, every so many steps, as they take most of the time; the margin asked of them.
SOME, EVERY, MARGIN = 20, 3, 0.5
# Steps of each attack.
STEPS = 60


def train(data: NodeData, settings: node_classification.Settings, radius: float, seed: int, stream: Any) -> Hypformer:
    """A model; with a radius above zero, one that is trained to be certified within it.

    It is that of the best validation score; with certificates, once they are asked for within the whole radius.
    """
    runs.seed_everything(seed)
    model = cast("Hypformer", node_classification.build("hypformer", settings, data))
    optimizer = node_classification.optimizer_for(model, settings)

    def share(epoch: int) -> float:
        # The ball grows from a third of the epochs on: a bound on one that is far too large teaches a constant.
        return min(1.0, max(0.0, 2 * epoch / settings.epochs - 0.6)) if radius else 1.0

    def step(epoch: int) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model.train()(data.x, data.edge_index)[data.train], data.y[data.train])
        if radius and share(epoch) and epoch % EVERY == 0:
            some = data.train[torch.randperm(len(data.train))[:SOME]]
            bounds = margin_bounds(model.eval(), data.x, data.edge_index, some, share(epoch) * radius, data.y[some])
            loss = loss + torch.relu(MARGIN - bounds.amin(-1)).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(epoch: int) -> runs.Record:
        logits = model.eval()(data.x, data.edge_index)
        return {"val": data.score(logits, data.val) + share(epoch) - 1}

    runs.train(model, optimizer, step, evaluate, epochs=settings.epochs, stream=stream)
    return model.eval()


@torch.no_grad()
def smoothed(logits: Logits, dim: int, label: int, sigma: float, draws: int) -> float:
    """The radius of randomized smoothing of one node; below zero where it is wrong or unsure."""
    answers = logits(sigma * torch.randn(draws, dim, dtype=torch.float64)).argmax(-1)
    # A quarter of the draws names the class of the majority, the others bound its share, exactly binomially.
    named = int(answers[: draws // 4].bincount().argmax())
    asked = draws - draws // 4
    ayes = int((answers[draws // 4 :] == named).sum())
    share = float(stats.beta.ppf(ALPHA, ayes, asked - ayes + 1)) if ayes else 0.0
    return sigma * float(stats.norm.ppf(share)) if share > 0.5 and named == label else -1.0


def measured(way: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one model; shares of test nodes by radius."""
    data, settings = asked(arguments, seed)
    norm = data.x.to_dense().norm(dim=-1).mean().item()
    stream = None if arguments.quiet else sys.stderr
    model = train(data, settings, 0.0 if way == WAYS[0] else arguments.train_share * norm, seed, stream)
    order = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(seed))
    test, radii = data.test[order[: arguments.measured]], norm * torch.tensor(SHARES)
    enclosure = Enclosure(model, data.x, data.edge_index)
    right = enclosure.logits.argmax(-1) == data.y
    curves = {"certified": certified_accuracy(model, data.x, data.edge_index, test, data.y[test], radii).float()}
    reached: dict[str, list[float]] = {"attacked": [], **{f"smoothed {sigma:g}": [] for sigma in SIGMAS}}
    for node in test.tolist():
        logits, dim, label = own_logits(enclosure, node), data.num_features, int(data.y[node])
        generator = torch.Generator().manual_seed(node)
        attack = smallest_attack(logits, dim, label, STEPS, generator).norm().item() if right[node] else 0.0
        reached["attacked"].append(attack)
        for sigma in SIGMAS:
            reached[f"smoothed {sigma:g}"].append(smoothed(logits, dim, label, sigma, arguments.draws))
    curves |= {name: (torch.tensor(found) > radii[:, None]).float().mean(1) for name, found in reached.items()}
    clean = {
        "clean": right[test].float().mean().item(),
        "clean of all test nodes": right[data.test].float().mean().item(),
    }
    return {"norm": norm} | clean | {name: row.tolist() for name, row in curves.items()}


def asked(arguments: argparse.Namespace, seed: int) -> tuple[NodeData, node_classification.Settings]:
    """The graph of a seed and the hyper-parameters."""
    given = {"epochs": arguments.epochs} if arguments.epochs else {}
    settings = node_classification.settings_for(arguments.dataset, "hypformer", given)
    data = datasets.load(arguments.dataset, arguments.data, seed=seed)
    return datasets.prepared(data, settings.features, settings.scale), settings


def text(content: dict[str, Any]) -> str:
    """The table."""
    lines = [f"{'radius / norm of features':34s}" + "".join(f"{share:>8g}" for share in [0, *SHARES])]
    for way, row in content["ways"].items():
        lines.append(f"trained by {way}")
        for name, means in row["means"].items():
            lines.append(f"  {name:32s}" + "".join(f"{mean:8.3f}" for mean in [row["clean"], *means]))
    return "\n".join(lines)


def draw(ways: dict[str, Any], run: runs.Run, title: str) -> None:
    """Shares by radius, one panel for each way to train."""
    figure, panels = plots.figure_of(4.2, 3.2, len(ways))
    for axes, (way, row) in zip(panels, ways.items(), strict=True):
        for name, means in row["means"].items():
            axes.plot([0, *SHARES], [row["clean"], *means], marker="o", markersize=3, label=name)
        axes.set(title=f"{title}, {way}", xlabel="radius / mean norm of features", ylim=(0, 1))
    panels[0].set_ylabel("share of test nodes")
    panels[0].legend(fontsize="small")
    plots.save(figure, run.own("curves.png"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add("--dataset", choices=["tree", "cora"], default="tree", help="which graph (default tree, generated)")
    add("--data", type=Path, metavar="FOLDER", help="folder of the npz files")
    add("--seeds", type=int, default=3, metavar="N", help="splits and models 0 .. N-1 (default 3)")
    add("--epochs", type=int, metavar="N", help="of training (default that of experiments.node_classification)")
    add(
        "--train-share",
        type=options.number,
        default=0.1,
        metavar="X",
        help="radius that is trained, over the norm (default 0.1)",
    )
    add("--measured", type=int, default=100, metavar="N", help="random test nodes that are measured (default 100)")
    add("--draws", type=int, default=320, metavar="N", help="of noise for each node, a multiple of 4 (default 320)")


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    if arguments.draws % 4:
        raise options.RefusedError(f"--draws must be a multiple of 4, got {arguments.draws}")
    if not arguments.train_share > 0:
        raise options.RefusedError(f"--train-share must be above 0, got {arguments.train_share}")
    # What cannot be read is refused before --overwrite removes anything.
    asked(arguments, 0)
    return {name: getattr(arguments, name) for name in ("dataset", "epochs", "train_share", "measured", "draws")}


def compute(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """Means over seeds for both ways to train."""
    found: dict[str, Any] = {}
    pairs = [(seed, way) for seed in range(arguments.seeds) for way in WAYS]
    parts = {
        (seed, way): run.part(f"{way.replace(' ', '-')}-{seed}", lambda s=seed, w=way: measured(w, s, arguments))
        for seed, way in pairs
    }
    for way in WAYS:
        seeds = [parts[seed, way] for seed in range(arguments.seeds)]
        names = [name for name in seeds[0] if isinstance(seeds[0][name], list)]
        means = {name: torch.tensor([one[name] for one in seeds]).mean(0).tolist() for name in names}
        clean = runs.summary([one["clean"] for one in seeds])["mean"]
        found[way] = {"clean": clean, "means": means, "seeds": seeds}
    draw(found, run, arguments.dataset)
    return {"shares": SHARES, "settings": config(arguments), "ways": found}


SCRIPT = tables.Script(
    module="experiments.certified_training",
    about=__doc__ or "",
    options=add_options,
    config=config,
    compute=compute,
    text=text,
    folder="runs/certified_training-{dataset}",
    at_least_one=("seeds", "epochs", "measured", "draws"),
    cpu_only=True,
)

main = functools.partial(tables.main, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
