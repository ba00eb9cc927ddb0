"""Is every cat a mammal? Hypernymy by the protocol of Ganea et al. 2018, with the controls that it needs.

The root is left out, as in the paper. The transitive reduction (the basic pairs) is always learned, and 0, 10, 25 or
50 % of the other pairs of the closure; 5 % of those choose, 45 % measure (the paper: 5 %). Beside each true pair stand
ten that are none: its child with five other parents, its parent with five other children. A pair is called true where
its energy is below a threshold; F1, and the threshold that the validation pairs like best. Every model has equally many
numbers a node, the same steps, and the same search of two learning rates; the validation pairs choose the step, too:

    cones           hyperbolic entailment cones on the hyperboloid, K = 0.1, margin 0.01
    flat-cones      the paper's Euclidean cones, the same K and margin
    order           order embeddings (Vendrov et al. 2016), margin 1
    fixed           hyperbolic distance d, learned by a softmax over negatives (Nickel and Kiela 2017), and the score
                    (1 + alpha (|a| - |b|)) d of points of the Poincare ball; alpha of nine values, by validation
    euclidean       the same of flat points
    fixed-bias      hyperbolic distance + h_b - h_a, a height of each node in place of a coordinate: where this is below
                    zero, a ball about a lies in one about b; learned as a logistic regression
    euclidean-bias  the same of flat distance
    dot             the same, with minus the dot product
    edges           no map: b can be reached from a along the known pairs

Cones start where the paper's do, at the Poincare embedding of the same pairs (``fixed``), times 0.7 in the ball; flat
cones at the same coordinates. In training, too, half of the negatives are other children and half other parents. As
few numbers can hold and fill in.

    python -m experiments.hypernymy
    python -m experiments.hypernymy --dataset mammals --data ../shared/data --dims 2 5 10 --seeds 3
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import hierarchy
from experiments.engine import options, runs, scores, tables
from experiments.hierarchy import Hierarchy
from holonomy.layers import EntailmentCones
from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.optim import RiemannianAdam

MODELS = ("cones", "flat-cones", "order", "fixed", "euclidean", "fixed-bias", "euclidean-bias", "dot", "edges")
TITLES = {
    "cones": "hyperbolic cones",
    "flat-cones": "flat cones",
    "order": "order embeddings",
    "fixed": "hyperbolic distance, the paper's score",
    "euclidean": "flat distance, the same score",
    "fixed-bias": "hyperbolic distance and heights",
    "euclidean-bias": "flat distance and heights",
    "dot": "dot product and heights",
    "edges": "along the known edges",
}
SHARES = (0.0, 0.1, 0.25, 0.5)
# For each kind two rates that did well on the generated tree and, on the mammals, at seed 0 with 25 % of the pairs.
RATES = {
    "cones": (0.003, 0.01),
    "flat-cones": (0.003, 0.01),
    "fixed": (0.03, 0.1),
    "euclidean": (0.03, 0.1),
    **dict.fromkeys(("order", "fixed-bias", "euclidean-bias", "dot"), (0.1, 0.3)),
}
STEPS = 200
ALPHAS = (1000.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.0)
CONSTANT, NEAREST, BATCH, EACH, MEASURED = 0.1, 0.7, 256, 5, 10
MARGINS = {"cones": 0.01, "flat-cones": 0.01, "order": 1.0}


@dataclasses.dataclass(frozen=True)
class Task:
    """What is known, and pairs (2, p), child first, with whether they are true (p,): to choose by, and to measure."""

    known: Hierarchy
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def without_roots(whole: Hierarchy) -> Hierarchy:
    """The hierarchy without the nodes that have no parent."""
    kept = torch.zeros(whole.num_nodes, dtype=torch.bool)
    kept[whole.closure[0]] = True
    number = kept.cumsum(0) - 1
    names = list(itertools.compress(whole.names, kept.tolist()))
    return Hierarchy(whole.name, number[whole.direct[:, kept[whole.direct[1]]]], names)


def basic(whole: Hierarchy) -> Tensor:
    """Which pairs of the closure are in the transitive reduction, (p,): nothing lies between child and parent."""
    child, parent = whole.closure
    between = whole.ancestors[child]
    led = whole.related(between.clamp(min=0), parent[:, None]) & (between >= 0) & (between != parent[:, None])
    return ~led.any(1)


def corrupted(pairs: Tensor, whole: Hierarchy, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Other children, then other parents of pairs (2, p): (2, 10, p), and where they are no pairs, (10, p)."""
    out = pairs[:, None].repeat(1, 2 * EACH, 1)
    taken = torch.ones(out.shape[1:], dtype=torch.bool)
    for _ in range(20):
        drawn = torch.randint(whole.num_nodes, taken.shape, generator=generator)
        out[0, :EACH] = torch.where(taken, drawn, out[0])[:EACH]
        out[1, EACH:] = torch.where(taken, drawn, out[1])[EACH:]
        taken = whole.related(out[0], out[1])
        if not taken.any():
            break
    return out, ~taken


def split(whole: Hierarchy, share: float, seed: int) -> Task:
    """The basic pairs and a share of the others to learn from; of the half that is never learned a tenth chooses."""
    generator = torch.Generator().manual_seed(seed)
    far = (~basic(whole)).nonzero().flatten()
    far = far[torch.randperm(len(far), generator=generator)]
    test, val, more = far.tensor_split([int(0.45 * len(far)), int(0.5 * len(far))])
    if len(val) == 0:
        raise options.RefusedError(f"--nodes must leave 20 pairs that are not basic, got {len(far)}")
    learned = torch.ones(whole.closure.shape[1], dtype=torch.bool)
    learned[torch.cat([test, val, more[round(share * len(far)) :]])] = False

    def asked(rows: Tensor) -> tuple[Tensor, Tensor]:
        others, none = corrupted(whole.closure[:, rows], whole, generator)
        pairs = torch.cat([whole.closure[:, rows], others[:, none]], dim=1)
        return pairs, torch.arange(pairs.shape[1]) < len(rows)

    return Task(whole.restricted(learned), asked(val), asked(test))


class Cones(nn.Module):
    """Hyperbolic entailment cones of learned points."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        manifold = Lorentz(-1.0)
        self.points = LorentzEmbedding.from_pretrained(manifold.from_poincare(start), manifold, freeze=False)
        self.cones = EntailmentCones(manifold, constant=CONSTANT)

    def forward(self, child: Tensor, parent: Tensor) -> Tensor:
        """How far outside of its parent's cone each child is."""
        return self.cones(self.points(parent), self.points(child))


class FlatCones(nn.Module):
    """Euclidean entailment cones (Ganea et al. 2018, section 3): half apertures arcsin(K / |x|)."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.points = nn.Parameter(start.clone())

    def forward(self, child: Tensor, parent: Tensor) -> Tensor:
        """How far outside of its parent's cone each child is."""
        apex = self.points[parent]
        ray, step = functional.normalize(apex, dim=-1), functional.normalize(self.points[child] - apex, dim=-1)
        angle = 2 * torch.atan2((ray - step).norm(dim=-1), (ray + step).norm(dim=-1))
        sine = CONSTANT / apex.norm(dim=-1)
        # Within K of the origin a cone is half of space, as it is for hyperbolic ones.
        return torch.relu(angle - torch.where(sine < 1, torch.asin(sine.clamp(max=0.999999)), math.pi / 2))


class Order(nn.Module):
    """Order embeddings: a child is at least its parent in every coordinate."""

    def __init__(self, n: int, dim: int) -> None:
        super().__init__()
        self.points = nn.Parameter(0.1 * torch.randn(n, dim))

    def forward(self, child: Tensor, parent: Tensor) -> Tensor:
        """The squared length of what is missing."""
        return torch.relu(self.points[parent] - self.points[child]).square().sum(-1)


class Distances(nn.Module):
    """The distances of ``experiments.hierarchy``; with heights, these are differences."""

    def __init__(self, model: str, n: int, dim: int) -> None:
        super().__init__()
        self.space, _ = hierarchy.build(model, n, hierarchy.Settings(dim=dim))
        self.offset = nn.Parameter(torch.ones(())) if isinstance(self.space, hierarchy.Biased) else None

    def forward(self, child: Tensor, parent: Tensor) -> Tensor:
        """Distances; with heights, logits that a pair is none."""
        found = self.space.listed(child.flatten(), parent.reshape(-1, 1)).view(child.shape)
        return found if self.offset is None else found - self.space.bias[child, 0] - self.offset

    def norms(self) -> Tensor:
        """Of the points, hyperbolic ones in the Poincare ball, (n,)."""
        return self.coordinates().norm(dim=-1)

    def coordinates(self) -> Tensor:
        """Points (n, d); hyperbolic ones of the Poincare ball."""
        points = self.space.points
        return points.manifold.to_poincare(points()) if isinstance(points, LorentzEmbedding) else points


def network(model: str, n: int, dim: int, start: Tensor | None) -> nn.Module:
    """An energy of pairs, (child, parent) -> energies of their shape."""
    if start is not None:
        return (Cones if model == "cones" else FlatCones)(NEAREST * start)
    return Order(n, dim) if model == "order" else Distances(model, n, dim)


def loss(model: str, true: Tensor, none: Tensor, real: Tensor) -> Tensor:
    """Of energies of true pairs (p,) and of pairs beside them (10, p), where these are none."""
    if model in MARGINS:
        return (true + (torch.relu(MARGINS[model] - none) * real).sum(0)).mean()
    if model in {"fixed", "euclidean"}:
        others = (-none).masked_fill(~real, torch.finfo(none.dtype).min).logsumexp(0)
        return functional.softplus(others + true).mean()
    return (functional.softplus(true) + (functional.softplus(-none) * real).sum(0)).mean()


@torch.no_grad()
def measured(net: nn.Module, task: Task) -> dict[str, float]:
    """F1 of the test pairs at the threshold, and at the alpha if there is one, that the validation pairs like best."""
    weight = net.norms() if isinstance(net, Distances) and net.offset is None else None
    falls = [-net(*pairs).double() for pairs, _ in (task.val, task.test)]
    rises = [0.0 if weight is None else weight[pairs[1]] - weight[pairs[0]] for pairs, _ in (task.val, task.test)]
    found = list[tuple[float, float, float]]()
    for alpha in ALPHAS if weight is not None else (0.0,):
        val, test = (fall * (1 + alpha * rise) for fall, rise in zip(falls, rises, strict=True))
        f1, threshold = scores.best_f1(val, task.val[1])
        found.append((f1, scores.detection(test >= threshold, task.test[1])["f1"], alpha))
    return dict(zip(("val", "test", "alpha"), max(found, key=lambda one: one[0]), strict=True))


def train(
    model: str, task: Task, dim: int, rate: float, steps: int, seed: int, start: Tensor | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Train one model; return it as it was where the validation pairs liked it best, and what was measured then."""
    runs.seed_everything(seed)
    net = network(model, task.known.num_nodes, dim, start)
    optimizer = RiemannianAdam(net.parameters(), lr=rate)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best: dict[str, Any] = {"val": -1.0}
    curve = list[float]()
    for step in range(1, steps + 1):
        pairs = task.known.closure[:, torch.randint(task.known.closure.shape[1], (BATCH,))]
        others, none = corrupted(pairs, task.known)
        energies = net(*torch.cat([pairs[:, None], others], dim=1))
        optimizer.zero_grad()
        loss(model, energies[0], energies[1:], none).backward()
        optimizer.step()
        fall.step()
        if step * MEASURED % steps < MEASURED:
            found = measured(net, task)
            curve.append(found["val"])
            if found["val"] > best["val"]:
                best = found | {"step": step, "state": copy.deepcopy(net.state_dict())}
    net.load_state_dict(best.pop("state"))
    return net, best | {"curve": curve, "rate": rate, "parameters": sum(p.numel() for p in net.parameters())}


def edges(task: Task) -> float:
    """F1 of the answer that follows the known pairs: nothing is trained, and no threshold is chosen."""
    (child, parent), true = task.test
    reached = hierarchy.KnownEdges(task.known).listed(child.flatten(), parent.reshape(-1, 1)).isfinite()
    return scores.detection(reached.view_as(true), true)["f1"]


@dataclasses.dataclass(frozen=True)
class Search:
    """The parts of a run at one share and in so many numbers a node."""

    whole: Hierarchy
    run: runs.Run
    share: float
    dim: int
    steps: int

    def part(self, model: str, seed: int, rate: float) -> dict[str, Any]:
        """What one training left; of ``fixed`` the coordinates are kept, for the cones."""
        key = f"{model}-{options.word(self.share)}-{self.dim}-{seed}-{rate:g}"

        def compute() -> dict[str, Any]:
            start = self.start(seed) if model.endswith("cones") else None
            task = split(self.whole, self.share, seed)
            net, record = train(model, task, self.dim, rate, self.steps, seed, start)
            if isinstance(net, Distances) and model == "fixed":
                self.run.write_state(f"{key}.pt", net.coordinates().detach())
            return record

        return self.run.part(key, compute)

    def rate(self, model: str) -> float:
        """The learning rate that the validation pairs of seed 0 like best."""
        return max(RATES[model], key=lambda rate: self.part(model, 0, rate)["val"])

    def start(self, seed: int) -> Tensor:
        """Where cones start: the Poincare embedding of a seed."""
        rate = self.rate("fixed")
        self.part("fixed", seed, rate)
        state = self.run.read_state(f"fixed-{options.word(self.share)}-{self.dim}-{seed}-{rate:g}.pt")
        assert isinstance(state, Tensor)
        return state

    def row(self, model: str, seeds: int) -> dict[str, Any]:
        """One line of the table."""
        rate = self.rate(model)
        records = [self.part(model, seed, rate) for seed in range(seeds)]
        return row(model, self.share, self.dim, [one["test"] for one in records], rate=rate, seeds=records)


def row(model: str, share: float, dim: int, f1: Sequence[float], **more: Any) -> dict[str, Any]:
    """One line of the table."""
    return {"model": model, "share": share, "dim": dim, "summary": runs.summary(f1)} | more


def text(content: Mapping[str, Any]) -> str:
    """The table: a line for each model and size, a column for each share."""
    shares = list(dict.fromkeys(one["share"] for one in content["rows"]))
    cells = {(one["model"], one["dim"], one["share"]): one["summary"] for one in content["rows"]}
    lines = [
        f"{content['dataset']}: {content['nodes']} nodes, {content['pairs']} pairs, {content['basic']} basic; F1, %",
        f"{'':42s}{'numbers':>8s}" + "".join(f"{100 * share:11.0f} %" for share in shares),
    ]
    for model, dim in dict.fromkeys((one["model"], one["dim"]) for one in content["rows"]):
        found = [cells[model, dim, share] for share in shares]
        shown = "".join(f"{100 * one['mean']:7.1f} ± {100 * one['std']:3.1f}" for one in found)
        lines.append(f"{TITLES[model]:42s}{dim or '':>8}{shown}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add("--dataset", choices=hierarchy.DATASETS, default="tree", help="what is embedded (default tree, generated)")
    add("--data", type=Path, metavar="FOLDER", help="folder of the npz files")
    add("--nodes", type=int, default=300, metavar="N", help="size of the generated tree (default 300)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    add(
        "--shares",
        type=options.number,
        nargs="+",
        default=list(SHARES),
        metavar="X",
        help="of the other pairs known, up to 0.5",
    )
    add("--dims", type=int, nargs="+", default=[2, 5, 10], metavar="D", help="numbers a node (default 2 5 10)")
    add("--seeds", type=int, default=3, metavar="N", help="seeds 0 .. N-1 (default 3)")
    add("--steps", type=int, default=STEPS, metavar="N", help=f"of training (default {STEPS})")


def asked(arguments: argparse.Namespace) -> Hierarchy:
    """The hierarchy that the command line names."""
    return without_roots(hierarchy.load(arguments.dataset, arguments.data, nodes=arguments.nodes))


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    if min(arguments.dims) < 2:
        raise options.RefusedError(f"--dims must be at least 2: a height takes one, got {min(arguments.dims)}")
    if not all(0 <= share <= 0.5 for share in arguments.shares):
        raise options.RefusedError(f"--shares must lie in [0, 0.5], got {arguments.shares}")
    # What cannot be done is refused before --overwrite removes anything.
    split(asked(arguments), 0.0, 0)
    return {"dataset": arguments.dataset, "nodes": arguments.nodes, "steps": arguments.steps}


def compute(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """A row for each model at each share, in so many numbers a node."""
    whole = asked(arguments)
    content = {"dataset": arguments.dataset, "nodes": whole.num_nodes, "pairs": whole.closure.shape[1]}
    content |= {"basic": int(basic(whole).sum()), "rates": RATES, "rows": (rows := list[dict[str, Any]]())}
    for model, dim, share in itertools.product(arguments.models, arguments.dims, arguments.shares):
        if model != "edges":
            rows.append(Search(whole, run, share, dim, arguments.steps).row(model, arguments.seeds))
        elif dim == arguments.dims[0]:
            rows.append(row(model, share, 0, [edges(split(whole, share, seed)) for seed in range(arguments.seeds)]))
        if not arguments.quiet:
            print(f"{100 * share:.0f} %: {text(content | {'rows': rows[-1:]}).splitlines()[2]}", file=sys.stderr)
    return content


SCRIPT = tables.Script(
    module="experiments.hypernymy",
    about=__doc__ or "",
    options=add_options,
    config=config,
    compute=compute,
    text=text,
    folder="runs/hypernymy-{dataset}",
    at_least_one=("seeds", "steps"),
    cpu_only=True,
)

main = functools.partial(tables.main, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
