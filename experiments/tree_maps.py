"""How well does a map of few numbers a node keep the distances of a tree?

The distances of a share of the pairs of nodes are known. Of the others a fifth chooses the learning rate and the spread
of the start, and the rest measures: the mean relative error |d / hops - 1|. Where all pairs are known, the same pairs
do all three: what is asked then is how much a map of so few numbers can hold; as the tree is known, too, its radial
drawing is one of the starts. Each map has equally many numbers a node and the same search:

    hyperbolic         points of the hyperboloid, learned curvature, RiemannianAdam
    flat               points of flat space
    flat with heights  points of one dimension less, and a height of each: |x - y| + a + b
    paths              no map: the shortest way over known pairs

    python -m experiments.tree_maps
    python -m experiments.tree_maps --nodes 48 100 --dims 2 3 5 10 --seeds 5
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.data import transfers
from experiments.engine import options, runs, tables
from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.optim import RiemannianAdam

MAPS = ("hyperbolic", "flat", "flat with heights")
RATES, SPREADS = (0.03, 0.1), (0.01, 0.1)
# Of the radial drawing: the length of an edge.
EDGE = 0.5


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Distances of a tree, (n, n), and disjoint lists (2, p) of pairs: to learn from, to choose by, to measure."""

    hops: Tensor
    known: Tensor
    val: Tensor
    test: Tensor

    @classmethod
    def of(cls, hops: Tensor, seed: int, share: float = 1.0) -> Pairs:
        """Draw the lists: a share, a fifth of the others, the rest; all of them thrice where the share is 1."""
        pairs = torch.triu_indices(len(hops), len(hops), 1)
        count = pairs.shape[1]
        if share == 1:
            return cls(hops, pairs, pairs, pairs)
        pairs = pairs[:, torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
        return cls(hops, *pairs.tensor_split([int(share * count), int((0.2 + 0.8 * share) * count)], dim=1))

    @property
    def all_known(self) -> bool:
        """Whether no pair is left out."""
        return self.known.shape[1] == len(self.hops) * (len(self.hops) - 1) // 2

    def errors(self, distances: Tensor, pairs: Tensor) -> Tensor:
        """The relative errors of distances of some pairs, (p,)."""
        return (distances / self.hops[*pairs] - 1).abs()


class HyperbolicMap(nn.Module):
    """Learned points, and a curvature that learns how large the tree is."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        manifold = Lorentz(-1.0, learnable=True)
        points = manifold.expmap0(nn.functional.pad(start, (1, 0)))
        self.points = LorentzEmbedding.from_pretrained(points, manifold, freeze=False)

    def forward(self, pairs: Tensor) -> Tensor:
        """Distances of pairs (2, p)."""
        return self.points.manifold.dist(*self.points(pairs))


class FlatMap(nn.Module):
    """Learned points of flat space, in units that learn; with heights, one number of each is its height."""

    def __init__(self, start: Tensor, *, heights: bool) -> None:
        super().__init__()
        self.points = nn.Parameter(start[:, int(heights) :].clone())
        self.heights = nn.Parameter(torch.zeros(len(start))) if heights else None
        self.log_unit = nn.Parameter(torch.zeros(()))

    def forward(self, pairs: Tensor) -> Tensor:
        """Distances of pairs (2, p)."""
        found = torch.linalg.vector_norm(torch.sub(*self.points[pairs]), dim=-1)
        if self.heights is not None:
            found = found + self.heights[pairs].sum(0)
        return self.log_unit.exp() * found


def drawn(hops: Tensor, dim: int) -> Tensor:
    """The radial drawing of a tree, (n, dim): as far out as a node is deep, each subtree in a sector of its leaves."""
    depth = hops[0].tolist()
    beside = [hops[node] == 1 for node in range(len(hops))]
    children = [
        [c for c in near.nonzero().flatten().tolist() if depth[c] > d] for near, d in zip(beside, depth, strict=True)
    ]
    leaves = [0] * len(hops)
    for node in sorted(range(len(hops)), key=depth.__getitem__, reverse=True):
        leaves[node] = sum(leaves[child] for child in children[node]) or 1
    first, angle = [0.0] * len(hops), [0.0] * len(hops)
    for node in sorted(range(len(hops)), key=depth.__getitem__):
        angle[node] = 2 * math.pi * (first[node] + leaves[node] / 2) / leaves[0]
        begin = first[node]
        for child in children[node]:
            first[child], begin = begin, begin + leaves[child]
    turned = torch.tensor(angle)
    flat = EDGE * hops[0, :, None] * torch.stack([turned.cos(), turned.sin()], dim=1).to(hops)
    return nn.functional.pad(flat, (0, dim - 2))


def fit(kind: str, pairs: Pairs, start: Tensor, rate: float, steps: int) -> nn.Module:
    """Learn a map of the known pairs from a start (n, dim)."""
    space = HyperbolicMap(start) if kind == "hyperbolic" else FlatMap(start, heights=kind == "flat with heights")
    optimizer = RiemannianAdam(space.parameters(), lr=rate)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pairs.errors(space(pairs.known), pairs.known).square().mean().sqrt()
        loss.backward()
        optimizer.step()
        fall.step()
    return space


def best(kind: str, pairs: Pairs, dim: int, steps: int, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Search rates and starts by the validation pairs; return the map and its record."""
    runs.seed_everything(seed)
    random = torch.randn(len(pairs.hops), dim).to(pairs.hops)
    starts = {f"spread {std:g}": std * random for std in SPREADS}
    if pairs.all_known:
        starts["drawing"] = drawn(pairs.hops, dim) + SPREADS[0] * random
    found: list[tuple[dict[str, Any], nn.Module]] = []
    for rate, (name, start) in itertools.product(RATES, starts.items()):
        space = fit(kind, pairs, start, rate, steps)
        with torch.no_grad():
            val, test = (float(pairs.errors(space(part), part).mean()) for part in (pairs.val, pairs.test))
        found.append(({"val": val, "test": test, "rate": rate, "start": name}, space))
    number = int(np.argmin([record["val"] for record, _ in found]))
    return found[number][1], found[number][0]


def record(kind: str, pairs: Pairs, dim: int, steps: int, seed: int) -> dict[str, Any]:
    """Of the best map."""
    return best(kind, pairs, dim, steps, seed)[1]


def paths(pairs: Pairs) -> float:
    """The error of the shortest ways over known pairs."""
    ways = torch.full_like(pairs.hops, torch.inf).fill_diagonal_(0)
    ways[*pairs.known] = ways[*pairs.known.flip(0)] = pairs.hops[*pairs.known]
    for middle in range(len(ways)):
        ways = torch.minimum(ways, ways[:, middle, None] + ways[middle])
    error = float(pairs.errors(ways[*pairs.test], pairs.test).mean())
    if not math.isfinite(error):
        raise options.RefusedError("--shares must be so large that known pairs join all nodes, in every tree")
    return error


def text(content: dict[str, Any]) -> str:
    """The table."""
    lines = [f"mean relative error of distances, {content['seeds']} trees"]
    for row in content["rows"]:
        numbers = f"{row['dim']:4d} numbers a node" if row["dim"] else "     no map         "
        error = row["summary"]
        known = f"{100 * row['share']:.0f} % of the pairs known"
        measured = f"{100 * error['mean']:7.1f} ± {100 * error['std']:.1f} %"
        lines.append(f"{row['nodes']:5d} nodes, {known:24s}{numbers}  {row['map']:18s}{measured}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=[48], metavar="N", help="nodes of the tree (default 48)")
    add("--dims", type=int, nargs="+", default=[2, 3, 5], metavar="D", help="numbers a node (default 2 3 5)")
    add(
        "--shares",
        type=options.number,
        nargs="+",
        default=[1.0, 0.5],
        metavar="X",
        help="of the pairs known (default 1 0.5)",
    )
    add("--seeds", type=int, default=3, metavar="N", help="trees 0 .. N-1 (default 3)")
    add("--steps", type=int, default=400, metavar="N", help="of training (default 400)")


def drawn_pairs(arguments: argparse.Namespace) -> list[tuple[int, float, list[Pairs], list[float]]]:
    """The pairs of every tree and the errors of paths, for each number of nodes and share that is known."""
    cases = list[tuple[int, float, list[Pairs], list[float]]]()
    for nodes, share in itertools.product(arguments.nodes, arguments.shares):
        grown = [transfers.hops(transfers.grown(np.random.default_rng(seed), nodes)) for seed in range(arguments.seeds)]
        lists = [Pairs.of(hops, seed, share) for seed, hops in enumerate(grown)]
        cases.append((nodes, share, lists, [paths(pairs) for pairs in lists]))
    return cases


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    if min(arguments.dims) < 2 or min(arguments.nodes) < 8:
        raise options.RefusedError("--dims must be at least 2 and --nodes at least 8")
    if not all(0 < share <= 1 for share in arguments.shares):
        raise options.RefusedError(f"--shares must lie in (0, 1], got {arguments.shares}")
    # What cannot be done is refused before --overwrite removes anything.
    drawn_pairs(arguments)
    return {"steps": arguments.steps, "device": arguments.device}


def row(nodes: int, share: float, dim: int, kind: str, errors: list[float], **more: Any) -> dict[str, Any]:
    """One line of the table."""
    return {"nodes": nodes, "share": share, "dim": dim, "map": kind, "summary": runs.summary(errors)} | more


def compute(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """A row for the shortest ways over known pairs, and one for each map of so many numbers a node."""
    rows: list[dict[str, Any]] = []
    for nodes, share, lists, ways in drawn_pairs(arguments):
        rows.append(row(nodes, share, 0, "paths", ways))
        for dim, kind in itertools.product(arguments.dims, MAPS):
            records = [
                run.part(
                    f"{kind.replace(' ', '-')}-{nodes}-{options.word(share)}-{dim}-{seed}",
                    functools.partial(record, kind, pairs, dim, arguments.steps, seed),
                )
                for seed, pairs in enumerate(runs.moved(lists, arguments.device))
            ]
            rows.append(row(nodes, share, dim, kind, [one["test"] for one in records], seeds=records))
            if not arguments.quiet:
                print(text({"seeds": arguments.seeds, "rows": rows[-1:]}).splitlines()[1], file=sys.stderr)
    return {"seeds": arguments.seeds, "rows": rows}


SCRIPT = tables.Script(
    module="experiments.tree_maps",
    about=__doc__ or "",
    options=add_options,
    config=config,
    compute=compute,
    text=text,
    folder="runs/tree_maps",
    at_least_one=("seeds", "steps"),
)

main = functools.partial(tables.main, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
