"""Which trait has a species? A hyperbolic transformer beside its flat twin, GCN, MLP and nearest neighbours.

Traits are inherited from next to a species or acquired from far away (``experiments.data.transfers``), so that a model
needs the graph and attention. Validation trees chose the settings of each model from one grid before (``--search``,
``benchmarks/results/demo_search.json``), and choose the step here. The transformer is certified: how far the features
of a species may move before its trait changes, beside the smallest attacks found.

    python -m experiments.acquired_traits
    python -m experiments.acquired_traits --search --json search.json
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data.transfers import ACQUIRED, INHERITED, SOURCE, Trees, trees
from experiments.engine import plots, runs, tables
from experiments.models.baselines import MLP, EuclideanFormer, nearest_neighbours
from holonomy.layers import GCN
from holonomy.models import Hypformer
from holonomy.optim import RiemannianAdam
from holonomy.theory import certified_radius

TITLES = {
    "hypformer": "hyperbolic transformer",
    "euclidean": "its flat twin",
    "gcn": "GCN",
    "mlp": "MLP",
    "neighbours": "nearest neighbours",
}
# One grid for all: learning rate, scale of the features, graph convolutions (hidden layers of the MLP).
GRID = tuple(itertools.product((0.003, 0.005, 0.01), (0.5, 1.0), (2, 6)))
CHOSEN: dict[str, tuple[float, float, int]] = {
    "hypformer": (0.003, 1.0, 6),
    "euclidean": (0.003, 1.0, 2),
    "gcn": (0.005, 1.0, 6),
    "mlp": (0.01, 1.0, 6),
}
HIDDEN, BATCH = 64, 16


@functools.cache
def data(split: str) -> list[Trees]:
    """Batches of trees: to learn from, to choose by, to measure."""
    first, count = {"train": (0, 16), "val": (16, 2), "test": (18, 2)}[split]
    return [trees(first + number, BATCH) for number in range(count)]


def build(model: str, layers: int) -> nn.Module:
    """Make a model; all but the MLP read the graph."""
    features, classes = data("test")[0].x.shape[1], 4
    graph: dict[str, Any] = {"layers": layers, "residual": True}
    former: dict[str, Any] = {"layers": 1, "feedforward": 2 * HIDDEN, "power": 3.0}
    match model:
        case "hypformer":
            encoder = GCN(features, HIDDEN, HIDDEN, **graph)
            return Hypformer(features, HIDDEN, classes, **former, graph_encoder=encoder, level="node")
        case "euclidean":
            encoder = GCN(features, HIDDEN, HIDDEN, **graph)
            return EuclideanFormer(features, HIDDEN, classes, **former, graph_encoder=encoder)
        case "gcn":
            return GCN(features, HIDDEN, classes, **graph)
        case _:
            return MLP(features, HIDDEN, classes, layers=layers)


def logits_of(network: nn.Module, part: Trees, scale: float) -> Tensor:
    """Scores of all species, (n, classes)."""
    former = isinstance(network, Hypformer | EuclideanFormer)
    return network(scale * part.x, part.edge_index, *((part.batch,) if former else ()))


@torch.no_grad()
def accuracies(network: nn.Module, split: str, scale: float) -> dict[str, float]:
    """Shares of right traits: of all species asked, of those that inherited it, of those that acquired it."""
    network.eval()
    right = torch.cat([logits_of(network, part, scale).argmax(-1) == part.y for part in data(split)])
    return shares(right, torch.cat([part.kind for part in data(split)]))


def shares(right: Tensor, kind: Tensor) -> dict[str, float]:
    """Means over the kinds of species."""
    of = {"all": kind != SOURCE, "inherited": kind == INHERITED, "acquired": kind == ACQUIRED}
    return {name: float(right[chosen].double().mean()) for name, chosen in of.items()}


def train(
    model: str, settings: tuple[float, float, int], seed: int, steps: int, label: str = "", *, quiet: bool = True
) -> tuple[nn.Module, dict[str, Any]]:
    """Train one model, and measure it where the validation trees like it best."""
    rate, scale, layers = settings
    runs.seed_everything(seed)
    network = build(model, layers)
    optimizer = RiemannianAdam(network.parameters(), lr=rate)
    line = runs.progress(label, steps, None if quiet else sys.stderr, unit="step")
    best, state, done = {"all": -1.0}, network.state_dict(), 0
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 20) * (1 - (step - 1) / steps)
        part = data("train")[step % len(data("train"))]
        asked = part.kind != SOURCE
        network.train()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits_of(network, part, scale)[asked], part.y[asked])
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps:
            found = accuracies(network, "val", scale)
            if found["all"] > best["all"]:
                best, state, done = found, copy.deepcopy(network.state_dict()), step
        line.set_postfix({"loss": loss.item(), "val": best["all"]}, refresh=False)
        line.update()
    line.set_postfix({"val": best["all"], "best step": done})
    line.close()
    network.load_state_dict(state)
    read = network.curvatures() if isinstance(network, Hypformer) else {}
    parameters = sum(parameter.numel() for parameter in network.parameters())
    record = {"seed": seed, "val": best, "test": accuracies(network, "test", scale), "step": done}
    return network, record | {
        "parameters": parameters,
        "curvature": {name: value.item() for name, value in read.items()},
    }


def neighbours() -> dict[str, Any]:
    """The trait of the nearest species of the training trees by features; validation chooses how many."""
    known = {name: torch.cat([getattr(part, name) for part in data("train")]) for name in ("x", "y", "kind")}
    asked = (known["kind"] != SOURCE).nonzero().flatten()

    def measured(split: str, k: int) -> dict[str, float]:
        x, y, kind = (torch.cat([getattr(part, name) for part in data(split)]) for name in ("x", "y", "kind"))
        both, labels = torch.cat([known["x"], x]), torch.cat([known["y"], y])
        places = len(known["x"]) + torch.arange(len(x))
        votes = nearest_neighbours(both, labels, asked, places, k=k, classes=4)
        return shares(votes.argmax(-1) == y, kind)

    found = {k: measured("val", k) for k in (1, 5, 25)}
    k = max(found, key=lambda k: found[k]["all"])
    return {"seed": 0, "val": found[k], "test": measured("test", k), "k": k}


def attacked(
    model: Hypformer, x: Tensor, edge_index: Tensor, nodes: Tensor, starts: int = 4, steps: int = 40
) -> Tensor:
    """The smallest changes found of a node's own features that change its class, (len(nodes),); infinite if none was.

    Newton's steps towards the nearest class (DeepFool, Moosavi-Dezfooli et al. 2016) from random starts, each way then
    bisected. Every copy of the tree has one changed node.
    """
    copies, size = len(nodes) * starts, len(x)
    batch = torch.arange(copies).repeat_interleave(size)
    edges = torch.cat([edge_index + size * copy for copy in range(copies)], dim=1)
    places = nodes.repeat_interleave(starts) + size * torch.arange(copies)
    scores = model(x, edge_index).detach()[nodes].repeat_interleave(starts, dim=0)
    target = scores.argmax(-1)
    own = nn.functional.one_hot(target, scores.shape[1]).bool()

    def gaps(change: Tensor) -> Tensor:
        moved = x.repeat(copies, 1).index_add(0, places, change)
        scores = model(moved, edges, batch)[places]
        return scores.gather(1, target[:, None])[:, 0] - scores.masked_fill(own, -torch.inf).amax(1)

    change = 0.01 * torch.randn(copies, x.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    change[::starts] = 0  # a border may be nearer than random starts are
    for _ in range(steps):
        change = change.detach().requires_grad_()
        gap = gaps(change)
        (slope,) = torch.autograd.grad(gap.sum(), change)
        step = (gap.clamp(min=0) * 1.02 + 1e-6)[:, None] * slope / slope.square().sum(1, keepdim=True).clamp(min=1e-12)
        # Where the surface is flat, Newton's step leads out of sight.
        step = step * (1 / step.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
        change = torch.where(gap[:, None] > 0, change - step, change)
    change = change.detach()
    with torch.no_grad():
        crossed = gaps(change) < 0
        low, high = torch.zeros(copies, 1, dtype=x.dtype), torch.ones(copies, 1, dtype=x.dtype)
        for _ in range(12):
            middle = (low + high) / 2
            wrong = (gaps(middle * change) < 0)[:, None]
            low, high = torch.where(wrong, low, middle), torch.where(wrong, middle, high)
    lengths = torch.where(crossed, (high * change).norm(dim=1), torch.inf)
    return lengths.reshape(len(nodes), starts).amin(1)


def certified(network: nn.Module, scale: float) -> dict[str, Any]:
    """Radii of the species of the first test tree, in units of the features as given, beside attacks on them."""
    whole = data("test")[0]
    size = int((whole.batch == 0).sum())
    model = copy.deepcopy(network).double().eval()
    if not isinstance(model, Hypformer):
        raise TypeError(f"a Hypformer is certified, got {type(network).__name__}")
    edges = whole.edge_index[:, whole.edge_index[0] < size]
    x = scale * whole.x[:size].double()
    nodes = (whole.kind[:size] != SOURCE).nonzero().flatten()
    radii, attacks = certified_radius(model, x, edges, nodes) / scale, attacked(model, x, edges, nodes) / scale
    right = model(x, edges).argmax(-1)[nodes] == whole.y[nodes]
    return {
        "nodes": nodes.tolist(),
        "radii": radii.tolist(),
        "attacks": attacks.tolist(),
        "right": right.tolist(),
        "median_radius": float(radii.median()),
        "median_attack": float(attacks.median()),
        "median_ratio": float((radii / attacks).median()),
    }


def text(content: Mapping[str, Any]) -> str:
    """The tables."""
    if "certificate" not in content:
        return "\n".join(f"{TITLES[model]:24s}{row['best']}" for model, row in content["models"].items())
    lines = ["Which trait has a species? Right answers on test trees, %, mean and deviation over seeds", ""]
    lines.append(f"{'':24s}{'all':>14s}{'inherited':>14s}{'acquired':>14s}{'parameters':>12s}")
    for model, row in content["models"].items():
        cells = "".join(
            f"{100 * row['summary'][kind]['mean']:8.1f} ± {100 * row['summary'][kind]['std']:3.1f}"
            for kind in ("all", "inherited", "acquired")
        )
        lines.append(f"{TITLES[model]:24s}{cells}{row['seeds'][0].get('parameters', 0):12d}")
    proved = content["certificate"]
    lines += ["", "How far may the features of a species move? Lengths; a gene is exchanged by 1.41", ""]
    lines.append(f"{'species':>10s}{'certified':>12s}{'attack found':>14s}")
    lines += [
        f"{node:10d}{radius:12.3f}{attack:14.3f}"
        for node, radius, attack in list(zip(*(proved[k] for k in ("nodes", "radii", "attacks")), strict=True))[:8]
    ]
    lines.append(f"{'median':>10s}{proved['median_radius']:12.3f}{proved['median_attack']:14.3f}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add("--search", action="store_true", help="try the whole grid for every model with one seed, and stop")
    add("--seeds", type=int, default=3, metavar="N", help="seeds 0 .. N-1 (default 3)")
    add("--steps", type=int, default=300, metavar="N", help="of training (default 300)")
    add("--pictures", action=argparse.BooleanOptionalAction, default=True, help="save a picture with the run")


def part_of(run: runs.Run, model: str, settings: tuple[float, float, int], seed: int, arguments: Any) -> dict[str, Any]:
    """Train a model, or read what a run that was stopped left of it."""
    key = f"{model}-{'-'.join(map(str, settings))}-{seed}"

    def compute() -> dict[str, Any]:
        label = f"{TITLES[model]:22s} seed {seed}"
        network, record = train(model, settings, seed, arguments.steps, label, quiet=arguments.quiet)
        run.write_state(f"part-{key}.model.pt", network.state_dict())
        return record

    return run.part(key, compute) | {"state": f"part-{key}.model.pt", "settings": list(settings)}


def of_validation(record: Mapping[str, Any]) -> float:
    """What chooses among settings."""
    return record["val"]["all"]


def searched(run: runs.Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every point of the grid with the first seed, and the point that validation prefers, by model."""
    found: dict[str, Any] = {}
    for model in CHOSEN:
        rows = [part_of(run, model, one, 0, arguments) for one in GRID]
        best = max(rows, key=of_validation)
        found[model] = {"best": best["settings"], "rows": rows}
    return {"models": found}


def compared(run: runs.Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, compare, certify and draw."""
    rows: dict[str, Any] = {}
    for model, settings in CHOSEN.items():
        records = [part_of(run, model, settings, seed, arguments) for seed in range(arguments.seeds)]
        rows[model] = {"settings": list(settings), "seeds": records}
    rows["neighbours"] = {"seeds": [run.part("neighbours", neighbours)]}
    for row in rows.values():
        kinds = row["seeds"][0]["test"]
        row["summary"] = {kind: runs.summary([one["test"][kind] for one in row["seeds"]]) for kind in kinds}
    settings = CHOSEN["hypformer"]

    def certificate() -> dict[str, Any]:
        network = build("hypformer", settings[2])
        network.load_state_dict(runs.read_state(run.path(rows["hypformer"]["seeds"][0]["state"])))
        return certified(network, settings[1])

    content = {"models": rows, "certificate": run.part("certificate", certificate)}
    if arguments.pictures:
        acquired = {TITLES[model]: row["summary"]["acquired"] for model, row in rows.items()}
        plots.comparison(
            {name: (one["mean"], one["std"]) for name, one in acquired.items()},
            run.own("table.png"),
            title="Traits acquired from far away",
            label="right answers on test trees (%)",
            caption=f"mean and standard deviation of {arguments.seeds} seeds",
        )
    return content


def answer(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """The search, or the comparison with what it chose."""
    found = searched(run, arguments) if arguments.search else compared(run, arguments)
    return {"grid": [list(one) for one in GRID]} | found


SCRIPT = tables.Script(
    module="experiments.acquired_traits",
    about=__doc__ or "",
    options=add_options,
    config=lambda arguments: {"search": arguments.search, "steps": arguments.steps},
    compute=answer,
    text=text,
    folder="runs/acquired_traits",
    at_least_one=("seeds", "steps"),
    cpu_only=True,
)

main = functools.partial(tables.main, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
