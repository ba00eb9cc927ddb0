"""How far apart are new species in a phylogeny? An encoder from DNA to points, trained on the distances of known ones.

Trees and sequences are generated: Yule trees, the model of Jukes and Cantor with gamma rates (``data/phylogeny.py``).
An encoder sees one sequence of each species, and learns from the distances between known species. Of the others, half
choose the learning rate of every model, half measure:

    error      mean |d / true - 1| of distances from a new species to all others
    nearest    how often the known species said to be nearest is one of the nearest
    placement  how often least squares attaches the new species to its own branch of the tree of the known ones

An MLP, a Hypformer over all species, or its twin in flat space, gives coordinates; what they mean differs:

    hyperbolic         a tangent vector at the origin of a hyperboloid whose curvature is learned
    flat               a point of flat space
    flat with heights  a point of one dimension less, and a height: |x - y| + a + b

If two numbers a species are asked for, ``map.png`` shows the points of the first tree with the new species as stars.
Hyperbolic points stand at their distance from the origin, in their direction: the Poincare disk would crowd all at its
rim.

Without a network stand the distance of Jukes and Cantor with the true shape of the gamma distribution, and that formula
with shape and scale fitted to the known distances.

With ``--genes`` a species has several genes, and with ``--transfers`` they are passed between species, so that the
distances of single genes mislead. Every gene of every species is then a token, with its letters in columns of its own.
The body gives each token coordinates and a logit; those of the species are the mean over its tokens, weighted by the
softmax of their logits. Transformers attend from all tokens to all. The formulas read all genes as one sequence; beside
them stands the median over the genes of their distances, which a few transferred genes do not change.

    python -m experiments.phylogeny
    python -m experiments.phylogeny --trees 2 --dims 2 3 --steps 100
    python -m experiments.phylogeny --bodies hypformer euclidean --hypformer-dims 3
    python -m experiments.phylogeny --species 64 --sites 100 --genes 6 --transfers 0.4
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

from experiments.data.phylogeny import LETTERS, Branches, Phylogeny, differing, jukes_cantor, phylogeny
from experiments.engine import options, plots, runs, tables
from experiments.models.baselines import MLP, EuclideanFormer
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer
from holonomy.optim import RiemannianAdam

METRICS = ("hyperbolic", "flat", "flat with heights")
MEASURES = ("error", "nearest", "placement")
TITLES = {"mlp": "MLP", "hypformer": "Hypformer", "euclidean": "Hypformer's flat twin"}
RATES = (0.002, 0.006)
# The gamma distribution's shape; the MLP's width; the share of letters that training hides.
SHAPE, WIDTH, HIDE = 0.5, 64, 0.3
# The mean distance of known species, in the units of the coordinates.
UNIT = 8.0


@dataclasses.dataclass(frozen=True)
class Task:
    """A tree, its species as (known, to choose by, to measure), and what the encoder sees and is told."""

    tree: Phylogeny
    parts: tuple[np.ndarray, np.ndarray, np.ndarray]
    x: Tensor
    distances: Tensor
    branches: Branches

    @classmethod
    def of(cls, seed: int, species: int, sites: int, genes: int = 1, transfers: float = 0.0) -> Task:
        """Draw a tree; a sixth of the species chooses, a sixth measures."""
        tree = phylogeny(seed, species=species, sites=sites, genes=genes, transfers=transfers, shape=SHAPE)
        known, val, test = np.split(np.arange(species), [species - 2 * (species // 6), species - species // 6])
        letters = nn.functional.one_hot(torch.from_numpy(tree.sequences), LETTERS).float().flatten(2)
        distances = torch.from_numpy(tree.distances).float()
        scale = UNIT / distances[: len(known), : len(known)].sum() * (len(known) * (len(known) - 1))
        return cls(tree, (known, val, test), letters, distances * scale, Branches.of(tree, known))

    def in_substitutions(self, lengths: Tensor) -> np.ndarray:
        """Lengths in the units of ``distances``, in expected substitutions a site."""
        return lengths.cpu().double().numpy() * float(self.tree.distances[0, 1] / self.distances[0, 1].double())

    def measured(self, distances: np.ndarray, new: np.ndarray) -> dict[str, float]:
        """Judge distances (n, n) of all species, in any unit that the known ones have, by those of the new."""
        known, truth = self.parts[0], self.tree.distances
        others = np.concatenate([known, new])
        away = others != new[:, None]
        ratio = distances[np.ix_(new, others)][away] / truth[np.ix_(new, others)][away]
        near = distances[np.ix_(new, known)]
        closest = np.take_along_axis(truth[np.ix_(new, known)], near.argmin(1)[:, None], 1)[:, 0]
        placed = self.branches.best(np.maximum(near, 1e-3 * near.max())) == self.branches.holding(self.tree, known, new)
        return {
            "error": float(np.abs(ratio - 1).mean()),
            "nearest": float(np.isclose(closest, truth[np.ix_(new, known)].min(1)).mean()),
            "placement": float(placed.mean()),
        }


class Places(nn.Module):
    """Species as points: a body that gives coordinates, and a metric."""

    def __init__(self, body: str, metric: str, features: int, dim: int, genes: int = 1) -> None:
        super().__init__()
        self.metric, self.genes, self.hide = metric, genes, nn.Dropout(HIDE)
        sizes = (features * genes, WIDTH if body == "mlp" else WIDTH // 2, dim + (genes > 1))
        if body == "mlp":
            self.body: nn.Module = MLP(*sizes)
        else:
            kind = Hypformer if body == "hypformer" else EuclideanFormer
            self.body = kind(*sizes, layers=1, heads=4, graph_encoder=None)
        self.manifold = Lorentz(-1.0, learnable=metric == "hyperbolic")
        self.log_unit = nn.Parameter(torch.zeros(()), requires_grad=metric != "hyperbolic")

    def forward(self, x: Tensor) -> Tensor:
        """Distances (n, n) of species with these letters (n, genes, features)."""
        found = self.coordinates(x)
        i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
        if self.metric == "hyperbolic":
            points = self.manifold.expmap0(nn.functional.pad(found, (1, 0)))
            between = self.manifold.dist(points[i], points[j])
        else:
            heights = int(self.metric == "flat with heights")
            between = torch.linalg.vector_norm(found[i, heights:] - found[j, heights:], dim=-1)
            if heights:
                raised = nn.functional.softplus(found[:, 0])
                between = between + raised[i] + raised[j]
            between = between * self.log_unit.exp()
        upper = between.new_zeros(len(x), len(x)).index_put((i, j), between)
        return upper + upper.T

    def coordinates(self, x: Tensor) -> Tensor:
        """What the body says of each species, (n, dim): the mean of its genes, by the weights that it gives them."""
        found = self.body(self.tokens(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        return found[:, 0] if self.genes == 1 else (found[..., 1:] * found[..., :1].softmax(1)).sum(1)

    def tokens(self, x: Tensor) -> Tensor:
        """Letters in the columns of their gene, zeros in the others; as long as all genes together, (n, genes, -1)."""
        columns = torch.eye(self.genes, device=x.device) * self.genes**0.5
        return torch.einsum("ngf,gh->nghf", self.hide(x), columns).flatten(2)


def trained(task: Task, body: str, metric: str, dim: int, rate: float, steps: int, seed: int) -> Places:
    """Train on the known species."""
    runs.seed_everything(seed)
    known = torch.from_numpy(task.parts[0])
    _, genes, features = task.x.shape
    model = Places(body, metric, features, dim, genes).to(task.x.device)
    optimizer = RiemannianAdam([p for p in model.parameters() if p.requires_grad], lr=rate)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    i, j = torch.triu_indices(len(known), len(known), 1)
    truth = task.distances[i, j]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(task.x[known])[i, j] / truth - 1).square().mean()
        loss.backward()
        optimizer.step()
        fall.step()
    return model.eval()


def fit(task: Task, body: str, metric: str, dim: int, rate: float, steps: int, seed: int) -> np.ndarray:
    """Train on the known species; distances of all, in substitutions a site."""
    model = trained(task, body, metric, dim, rate, steps, seed)
    with torch.no_grad():
        return task.in_substitutions(model(task.x))


def map_points(task: Task, body: str, metric: str, rate: float, steps: int, seed: int) -> list[list[float]]:
    """Train on the known species; where all lie on a map (n, 2), hyperbolic ones by the logarithm at the origin."""
    model = trained(task, body, metric, 2, rate, steps, seed)
    with torch.no_grad():
        return task.in_substitutions(model.coordinates(task.x) * model.log_unit.exp()).tolist()


def best(task: Task, body: str, metric: str, dim: int, steps: int, seed: int) -> dict[str, Any]:
    """Search the rates by the species to choose by; what the others say of the best."""
    _, val, test = task.parts
    found: list[dict[str, Any]] = []
    for rate in RATES:
        distances = fit(task, body, metric, dim, rate, steps, seed)
        chosen = task.measured(distances, val)["error"]
        found.append({"val": chosen, "rate": rate, **task.measured(distances, test)})
    return min(found, key=lambda record: record["val"])


def without_network(task: Task, sequences: Sequence[np.ndarray] | np.ndarray, *, fitted: bool) -> dict[str, Any]:
    """Jukes and Cantor's distance, with the true shape, or with shape and scale fitted to the known species.

    It is the median over some sequences of each species, (n, ...) each.
    """
    shares = np.stack([differing(letters.reshape(len(letters), -1)) for letters in sequences])
    known, _, test = task.parts
    if not fitted:
        return task.measured(np.median(jukes_cantor(shares, SHAPE), 0), test)
    i, j = np.triu_indices(len(known), 1)
    truth = task.tree.distances[i, j]

    def curve(numbers: np.ndarray, shares: np.ndarray) -> np.ndarray:
        return np.exp(numbers[1]) * np.median(jukes_cantor(shares, float(np.exp(numbers[0]))), 0)

    def off(numbers: np.ndarray) -> np.ndarray:
        return curve(numbers, shares[:, i, j]) / truth - 1

    found = optimize.least_squares(off, [0.0, 0.0])
    return task.measured(curve(found.x, shares), test)


def text(rows: Sequence[dict[str, Any]], trees: int) -> str:
    """The table."""
    lines = [f"new species, {trees} trees: relative error, nearest species and branch right, %"]
    for row in rows:
        name = f"{row['body']}, {row['metric']}" if row["dim"] else row["metric"]
        numbers = f"{row['dim']:3d} numbers" if row["dim"] else " no network"
        values = "  ".join(f"{100 * row[m]['mean']:5.1f} ± {100 * row[m]['std']:4.1f}" for m in MEASURES)
        lines.append(f"{numbers}  {name:29s}{values}")
    return "\n".join(lines)


def picture(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """The error over the number of coordinates, a line for each metric."""
    with plots.mpl.rc_context(plots.STYLE):
        figure, (axes,) = plots.figure_of(12, 5.5)
        for body, dashes in (("mlp", "-"), ("hypformer", "--"), ("euclidean", ":")):
            for metric, colour in zip(METRICS, plots.PALETTE, strict=False):
                chosen = [row for row in rows if row["body"] == body and row["metric"] == metric]
                dims, mean, std = ([f(row) for row in chosen] for f in (_dim, _mean, _std))
                label = f"{TITLES[body]}, {metric}"
                if chosen:
                    axes.errorbar(dims, mean, std, label=label, color=colour, linestyle=dashes, capsize=4, marker="o")
        for row, dashes in zip((row for row in rows if not row["dim"]), ("-.", ":", "--"), strict=False):
            axes.axhline(_mean(row), color="#777777", linestyle=dashes, label=row["metric"])
        axes.set(xscale="log", xlabel="numbers a species", ylabel="error of distances, %", ylim=(0, None))
        axes.set_xticks(sorted({row["dim"] for row in rows if row["dim"]}), minor=False)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        return plots.save(figure, path)


def chart(task: Task, places: dict[str, np.ndarray], path: Path) -> Path:
    """Maps of one tree, a panel for each metric: known species as dots, new ones as stars, coloured by clade.

    A line leads from each star to the known species that is nearest in truth.
    """
    known, _, new = task.parts
    clades = task.tree.clades(7)
    nearest = known[task.tree.distances[np.ix_(new, known)].argmin(1)]
    with plots.mpl.rc_context(plots.STYLE):
        figure, panels = plots.figure_of(6.5 * len(places), 6.5, len(places))
        for axes, (metric, at) in zip(panels, places.items(), strict=True):
            for star, dot in zip(at[new], at[nearest], strict=True):
                axes.plot(*np.stack([star, dot], 1), color="#888888", linewidth=1.0, zorder=1)
            for species, look in ((known, {"marker": "o", "s": 45}), (new, {"marker": "*", "s": 260})):
                colours = [plots.PALETTE[clade] for clade in clades[species]]
                axes.scatter(*at[species].T, c=colours, edgecolors="white", linewidths=0.8, zorder=2, **look)
            axes.set(aspect="equal", xlabel="substitutions a site")
            axes.set_title("hyperbolic: radius is the distance from the origin" if metric == "hyperbolic" else metric)
        return plots.save(figure, path)


def _dim(row: dict[str, Any]) -> float:
    return row["dim"]


def _mean(row: dict[str, Any]) -> float:
    return 100 * row["error"]["mean"]


def _std(row: dict[str, Any]) -> float:
    return 100 * row["error"]["std"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add("--trees", type=int, default=10, metavar="N", help="trees 0 .. N-1 (default 10)")
    add("--species", type=int, default=96, metavar="N", help="of each tree (default 96)")
    add("--sites", type=int, default=600, metavar="N", help="letters of a gene (default 600)")
    add("--genes", type=int, default=1, metavar="N", help="of each species (default 1)")
    add("--transfers", type=options.number, default=0.0, metavar="T", help="a gene between root and leaf (default 0)")
    add("--dims", type=int, nargs="+", default=[2, 3, 5, 8, 16, 32], metavar="D", help="(default 2 3 5 8 16 32)")
    add("--bodies", nargs="+", choices=list(TITLES), default=["mlp", "hypformer"], help="(default mlp hypformer)")
    add("--metrics", nargs="+", choices=METRICS, default=list(METRICS), help="of points (default all)")
    add("--hypformer-dims", type=int, nargs="*", default=[2, 3, 5], metavar="D", help="(default 2 3 5; slower)")
    add("--steps", type=int, default=600, metavar="N", help="of training (default 600)")


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    if min(arguments.dims + arguments.hypformer_dims) < 2 or arguments.species < 12:
        raise options.RefusedError("--dims must be at least 2 and --species at least 12")
    if not 0 <= arguments.transfers < math.inf:
        raise options.RefusedError(f"--transfers must be finite and at least 0, got {arguments.transfers:g}")
    return {name: getattr(arguments, name) for name in ("species", "sites", "genes", "transfers", "steps")}


def compute(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """A row for each body, metric and dimension, and a picture of all."""
    tasks = [
        runs.moved(
            Task.of(seed, arguments.species, arguments.sites, arguments.genes, arguments.transfers), arguments.device
        )
        for seed in range(arguments.trees)
    ]
    asked = [
        (body, metric, dim)
        for body in arguments.bodies
        for dim in (arguments.dims if body == "mlp" else arguments.hypformer_dims)
        for metric in arguments.metrics
    ]
    rows: list[dict[str, Any]] = []

    def add(body: str, metric: str, dim: int, records: Sequence[dict[str, Any]]) -> None:
        summaries = {m: runs.summary([record[m] for record in records]) for m in MEASURES}
        rows.append({"body": body, "metric": metric, "dim": dim, **summaries, "trees": list(records)})
        if not arguments.quiet:
            print(text(rows[-1:], arguments.trees).splitlines()[1], file=sys.stderr, flush=True)

    for fitted, name in ((False, "Jukes-Cantor, true rates"), (True, "Jukes-Cantor, fitted")):
        add("none", name, 0, [without_network(task, [task.tree.sequences], fitted=fitted) for task in tasks])
    if arguments.genes > 1:
        each = [without_network(task, task.tree.sequences.swapaxes(0, 1), fitted=True) for task in tasks]
        add("none", "Jukes-Cantor, median of genes", 0, each)
    for body, metric, dim in asked:
        records = [
            run.part(
                f"{body}-{metric.replace(' ', '-')}-{dim}-{seed}",
                functools.partial(best, task, body, metric, dim, arguments.steps, seed),
            )
            for seed, task in enumerate(tasks)
        ]
        add(body, metric, dim, records)
    picture(rows, run.own("error.png"))
    drawn = [row for row in rows if row["dim"] == 2 and row["metric"] in {"hyperbolic", "flat"}][-2:]
    places: dict[str, np.ndarray] = {}
    for row in drawn:
        chosen = (row["body"], row["metric"], row["trees"][0]["rate"], arguments.steps, 0)
        name = "map-{}-{}-{:g}".format(*chosen)
        places[row["metric"]] = np.array(run.part(name, functools.partial(map_points, tasks[0], *chosen)))
    if places:
        chart(tasks[0], places, run.own("map.png"))
    return {"trees": arguments.trees, "rows": rows}


SCRIPT = tables.Script(
    module="experiments.phylogeny",
    about=__doc__ or "",
    options=add_options,
    config=config,
    compute=compute,
    text=lambda content: text(content["rows"], content["trees"]),
    folder="runs/phylogeny",
    at_least_one=("trees", "sites", "genes", "steps"),
)

main = functools.partial(tables.main, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
