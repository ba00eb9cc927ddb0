"""How accurately do distances determine the curvatures of a product, and which product fits a graph?

**Intervals.** Points are generated in the hyperbolic plane (the drawing of a random tree), on the sphere (uniform), or
in the product of both, all of curvature -1 or 1; the distances of all pairs get independent normal errors. From these
alone each curvature is estimated by least squares with an interval of 95 % by its profile likelihood, see
`experiments/models/curvature_intervals.py`. How often does the interval hold the truth? Beside it: the likelihood ratio
with the quantile of chi^2, which forgets that the positions were fitted, too.

**Signatures.** A tree, a cycle and their product are drawn in products with equally many dimensions, with learned
curvatures and flat space as the control, each from the best of its starts by flat scaling.

    python -m experiments.mixed_curvature
    python -m experiments.mixed_curvature --data tree sphere --sets 600 --noises 0.02 0.05 0.1
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import geoopt
import numpy as np
import scipy.stats
import torch
from torch import Tensor

from experiments.data import transfers
from experiments.engine import options, plots, runs, tables
from experiments.models.curvature_intervals import (
    Array,
    Fit,
    Signature,
    begun,
    best_fit,
    distances,
    fitted,
    held_at,
    interval,
)
from experiments.tree_maps import drawn
from holonomy.manifolds import Lorentz, Product, ProductEmbedding, Sphere
from holonomy.optim import RiemannianAdam

KINDS = {"tree": "H", "sphere": "S", "tree x sphere": "HS"}
SIGNATURES = ("E3", "H3", "S3", "H2 E1", "H2 S1")
GRAPHS = ("tree", "cycle", "tree x cycle")
# Data sets in one part of a run, and intervals in the picture.
PART, SHOWN = 20, 60
# Stands for an interval without an end, in log |kappa|.
OPEN = 100.0


def generated(kind: str, points: int, noise: float, seed: int) -> tuple[Signature, Fit, Array]:
    """The truth, and noisy distances of it; the errors' size in means of the distances."""
    rng = np.random.default_rng(seed)
    signature = Signature(tuple((letter, 2) for letter in KINDS[kind]))
    parts: list[Array] = []
    for letter in KINDS[kind]:
        if letter == "H":
            tree = drawn(transfers.hops(transfers.grown(rng, points)), 2).double().numpy()
            parts.append(Signature((("H", 2),)).lift(tree))
        else:
            normal = rng.standard_normal((points, 3))
            parts.append(normal / np.linalg.norm(normal, axis=1, keepdims=True))
    truth = Fit(np.hstack(parts), np.zeros(len(parts)))
    exact = distances(signature, truth)[0]
    return signature, truth, exact + noise * exact.mean() * rng.standard_normal(exact.shape)


def judged(kind: str, points: int, noise: float, seed: int) -> dict[str, Any]:
    """One data set: of each factor the estimate and its interval, in log |kappa|, whose truth is 0, by both rules."""
    signature, truth, wanted = generated(kind, points, noise, seed)
    best, pairs = best_fit(signature, wanted, points), len(wanted)
    # Whether the search found the least there is: a fit that begins at the truth must not be better.
    near = fitted(signature, wanted, Fit(truth.points, truth.log_radii), signature.flat)
    out: dict[str, Any] = {"missed": near.rss < best.rss * (1 - 1e-4), "factors": []}
    for factor in range(len(KINDS[kind])):
        low, high = interval(signature, wanted, best, factor)
        held = held_at(signature, wanted, near, factor, 0.0)
        ratio = pairs * math.log(max(held.rss / best.rss, 1.0))
        found = [max(-2 * high, -OPEN), -2 * float(best.log_radii[factor]), min(-2 * low, OPEN)]
        out["factors"].append({"found": found, "naive": ratio <= float(scipy.stats.chi2.ppf(0.95, 1))})
    return out


def coverage(kind: str, noise: float, points: int, sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each factor: how often the intervals hold the truth, and on which side they miss it."""
    rows: list[dict[str, Any]] = []
    for place, letter in enumerate(KINDS[kind]):
        low, estimate, high = np.array([one["factors"][place]["found"] for one in sets]).T
        held, ends = (low <= 0) & (high >= 0), np.stack([low, estimate, high], 1)
        exact = scipy.stats.binomtest(int(held.sum()), len(sets)).proportion_ci()
        rows.append(
            {
                "data": kind,
                "factor": letter,
                "points": points,
                "noise": noise,
                "sets": len(sets),
                "held": float(held.mean()),
                "held_interval": [float(exact.low), float(exact.high)],
                "above": float((low > 0).mean()),
                "below": float((high < 0).mean()),
                "naive": float(np.mean([one["factors"][place]["naive"] for one in sets])),
                "width": float(np.median(high - low)),
                "bias": float(np.median(estimate)),
                "deviation": float(estimate.std()),
                "open": float((high - low > OPEN).mean()),
                "search_missed": float(np.mean([one["missed"] for one in sets])),
                "shown": ends[:SHOWN].tolist(),
            }
        )
    return rows


def graph(kind: str, seed: int) -> Tensor:
    """Hops of a graph of about 30 nodes; of the product of two, the root of the sum of squares."""
    rng = np.random.default_rng(seed)

    def tree(nodes: int) -> Tensor:
        return transfers.hops(transfers.grown(rng, nodes))

    def cycle(nodes: int) -> Tensor:
        apart = (torch.arange(nodes)[:, None] - torch.arange(nodes)).abs()
        return torch.minimum(apart, nodes - apart).float()

    if kind != "tree x cycle":
        return tree(30) if kind == "tree" else cycle(30 + seed)
    left, right = tree(6), cycle(6)
    return (left[:, None, :, None].square() + right[None, :, None, :].square()).sqrt().reshape(36, 36)


def space_of(signature: Signature, log_radii: Sequence[float]) -> Product:
    """The product with these radii, whose curvatures learn."""
    factors: list[tuple[Lorentz | Sphere | geoopt.Euclidean, int]] = []
    for (kind, dim), log_r in zip(signature.factors, log_radii, strict=True):
        if kind == "E":
            factors.append((geoopt.Euclidean(ndim=1), dim))
        else:
            kappa = math.exp(-2 * log_r)
            curved = Lorentz(-kappa, learnable=True) if kind == "H" else Sphere(kappa, learnable=True)
            factors.append((curved, dim + 1))
    return Product(*factors)


def distortion(kind: str, name: str, seed: int, steps: int) -> dict[str, Any]:
    """The mean relative error of distances in a map that is learned from the best start, and its curvatures."""
    hops = graph(kind, seed)
    hops = hops / hops.mean()
    pairs = torch.triu_indices(len(hops), len(hops), 1)
    wanted = hops[*pairs]
    signature = Signature(tuple((part[0], int(part[1])) for part in name.split()))
    start = begun(signature, wanted.double().numpy(), len(hops))[0]
    space = space_of(signature, start.log_radii.tolist())
    table = ProductEmbedding(len(hops), space)
    with torch.no_grad():
        table.unit.copy_(torch.from_numpy(start.points))
    optimizer = RiemannianAdam(table.parameters(), lr=0.03)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    error = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        points = table()
        error = space.dist(points[pairs[0]], points[pairs[1]]) / wanted - 1
        error.square().mean().backward()
        optimizer.step()
        fall.step()
    kappas = [f.curvature.item() for f, _ in space.factors if not isinstance(f, geoopt.Euclidean)]
    return {"error": float(error.detach().abs().mean()), "curvatures": kappas}


def draw(rows: list[dict[str, Any]], run: runs.Run) -> None:
    """Intervals of some data sets of the middle noise, one panel a factor."""
    noises = sorted({row["noise"] for row in rows})
    rows = [row for row in rows if row["noise"] == noises[len(noises) // 2]]
    with plots.mpl.rc_context(plots.STYLE):
        figure, panels = plots.figure_of(3.6 * len(rows), 5.5, len(rows))
        for panel, row in zip(panels, rows, strict=True):
            for place, (low, estimate, high) in enumerate(sorted(row["shown"], key=lambda ends: ends[1])):
                look = plots.PALETTE[0 if low <= 0 <= high else 5]
                panel.plot([max(low, -8), min(high, 8)], [place, place], color=look, linewidth=1.5)
                panel.plot([estimate], [place], ".", color=look, markersize=4)
            panel.axvline(0, color="#333333", linewidth=1)
            name = {"H": "hyperbolic", "S": "sphere"}[row["factor"]]
            panel.set(xlabel="log of found / true curvature", yticks=[])
            panel.set_title(f"{row['data']}: {name}\n{100 * row['held']:.1f} % of {row['sets']} hold", fontsize=13)
        plots.save(figure, run.own("mixed_curvature.png"))


def text(content: dict[str, Any]) -> str:
    """Both tables."""
    lines = ["intervals of 95 %: how often they hold the true curvature"]
    for row in content["coverage"]:
        ends = " to ".join(f"{100 * end:.1f}" for end in row["held_interval"])
        lines.append(
            f"{row['data']:14s} {row['factor']}  errors {100 * row['noise']:4.1f} %  {row['sets']} sets  "
            f"{100 * row['held']:5.1f} % ({ends})  above {100 * row['above']:.1f}, below {100 * row['below']:.1f}  "
            f"chi^2 {100 * row['naive']:5.1f} %  width {row['width']:.2f}"
        )
    if content["signatures"]:
        lines.append("mean relative error of distances, three dimensions")
    for row in content["signatures"]:
        error = row["summary"]
        lines.append(
            f"{row['graph']:14s} {row['signature']:6s} {100 * error['mean']:5.1f} ± {100 * error['std']:.1f} %"
        )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add("--sets", type=int, default=200, metavar="N", help="data sets of each kind and noise (default 200)")
    add("--first", type=int, default=0, metavar="N", help="seed of the first data set (default 0)")
    add("--data", nargs="+", choices=KINDS, default=list(KINDS), help="where points are generated (default all)")
    add("--points", type=int, default=16, metavar="N", help="of each data set (default 16)")
    add(
        "--noises",
        type=options.number,
        nargs="+",
        default=[0.05],
        metavar="X",
        help="errors over the mean distance (default 0.05)",
    )
    add("--seeds", type=int, default=3, metavar="N", help="graphs of each kind, 0 for no maps (default 3)")
    add("--steps", type=int, default=100, metavar="N", help="of each map (default 100)")


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    if arguments.points < 12:
        raise options.RefusedError("--points must be at least 12: fewer distances say nothing about a product")
    for name in ("first", "seeds"):
        if getattr(arguments, name) < 0:
            raise options.RefusedError(f"--{name} must be at least 0, got {getattr(arguments, name)}")
    if not all(0 < noise < 1 for noise in arguments.noises):
        raise options.RefusedError(f"--noises must lie in (0, 1), got {arguments.noises}")
    return {"points": arguments.points, "steps": arguments.steps}


def compute(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """Coverage by data, noise and factor; errors of maps by graph and signature."""
    end = arguments.first + arguments.sets

    def some(kind: str, noise: float, first: int) -> list[dict[str, Any]]:
        return [judged(kind, arguments.points, noise, seed) for seed in range(first, min(first + PART, end))]

    rows: list[dict[str, Any]] = []
    for noise, kind in itertools.product(arguments.noises, arguments.data):
        sets: list[dict[str, Any]] = []
        for first in range(arguments.first, end, PART):
            name = f"intervals-{kind.replace(' ', '-')}-{options.word(noise)}-{first}-{min(PART, end - first)}"
            sets += run.part(name, functools.partial(some, kind, noise, first))
        rows += coverage(kind, noise, arguments.points, sets)
        if not arguments.quiet:
            print(text({"coverage": rows[-len(KINDS[kind]) :], "signatures": []}), file=sys.stderr)
    maps: list[dict[str, Any]] = []
    for kind, signature in itertools.product(GRAPHS if arguments.seeds > 0 else (), SIGNATURES):
        records = [
            run.part(
                f"map-{kind.replace(' ', '-')}-{signature.replace(' ', '-')}-{seed}",
                functools.partial(distortion, kind, signature, seed, arguments.steps),
            )
            for seed in range(arguments.seeds)
        ]
        summary = runs.summary([one["error"] for one in records])
        maps.append({"graph": kind, "signature": signature, "summary": summary, "seeds": records})
    draw(rows, run)
    return {"first": arguments.first, "coverage": rows, "signatures": maps}


SCRIPT = tables.Script(
    module="experiments.mixed_curvature",
    about=__doc__ or "",
    options=add_options,
    config=config,
    compute=compute,
    text=text,
    folder="runs/mixed_curvature",
    at_least_one=("sets", "steps"),
    cpu_only=True,
)

main = functools.partial(tables.main, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
