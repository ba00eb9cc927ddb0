"""How many steps does a linear map need to reach a point far from the origin, and where do networks of them start?

A point at rapidity 1 is to be sent to a target at rapidity R, by gradient descent on the distance; a problem is solved
where that is below a half. Maps are 8 -> 8, with their own initial weights, targets in random directions or on an axis:

    htc                 HTC, with a bias
    hyperplanes         LorentzPLFC: |z| outside the inverse hyperbolic sine
    hyperplanes inside  the same with |z| inside it, which is HTC without bias in other parameters
    tangent             TangentLinear, with a bias

The median is over all problems, unsolved ones the longest. Beside it: the steps at other rates; the rapidity behind
four layers of width 64 at first, from 3; and the singular values of charts at rapidity 6, in eight dimensions.

    python -m experiments.linear_maps
    python -m experiments.linear_maps --problems 20 --rapidities 2 3 4 5 6
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor, nn

from experiments.engine import options, plots, runs, tables
from experiments.engine.options import RefusedError
from holonomy.layers import HTC, LorentzPLFC, TangentLinear
from holonomy.manifolds import Lorentz
from holonomy.theory import stretch
from holonomy.theory.certificates.far_out import transformation_steps

NEAR, WIDTH = 0.5, 8
RATES = {"sgd": 0.05, "adam": 0.01}
OTHER_RATES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)
SPACE = Lorentz(-1.0)


class InsideHyperplanes(nn.Module):
    """A layer of hyperplanes whose coordinates are ``cosh(a) <z, x> - sinh(a) |z| x_t``: linear in the point."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(dim, dim)))
        self.offset = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map."""
        time = self.offset.sinh() * self.weight.norm(dim=-1) * x[..., :1]
        return SPACE.lift(self.offset.cosh() * (x[..., 1:] @ self.weight.T) - time)


MAPS: dict[str, Callable[[int], nn.Module]] = {
    "htc": lambda dim: HTC(dim, dim, SPACE),
    "hyperplanes": lambda dim: LorentzPLFC(dim, dim, SPACE, bias=False),
    "hyperplanes inside": InsideHyperplanes,
    "tangent": lambda dim: TangentLinear(dim, dim, SPACE),
}
# Each map with its kind of target.
ROWS = (("htc", "anywhere"), ("hyperplanes", "axis"), *((name, "anywhere") for name in list(MAPS)[1:]))


def small(dim: int) -> nn.Module:
    """Hyperplanes as Geoopt draws them."""
    layer = LorentzPLFC(dim, dim, SPACE)
    nn.init.normal_(layer.hyperplanes.weight, std=0.02)
    return layer


# What four layers begin with.
STARTS: dict[str, Callable[[int], nn.Module]] = {
    "htc": MAPS["htc"],
    "htc, orthogonal": lambda dim: HTC(dim, dim, SPACE, init="orthogonal"),
    "hyperplanes": lambda dim: LorentzPLFC(dim, dim, SPACE),
    "hyperplanes, deviation 0.02": small,
    "tangent": MAPS["tangent"],
}


def point(direction: Tensor, rapidity: float) -> Tensor:
    """The point on a ray."""
    return SPACE.lift(nn.functional.normalize(direction, dim=-1) * math.sinh(rapidity))


def problem(name: str, target: str, rapidity: float, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A map, the point that it is given, and where that is to go."""
    runs.seed_everything(seed)
    x, aim = point(torch.randn(WIDTH), 1.0), torch.randn(WIDTH)
    return MAPS[name](WIDTH), x, point(torch.eye(WIDTH)[0] if target == "axis" else aim, rapidity)


def apart(x: Tensor, y: Tensor) -> Tensor:
    """The distance of two points in float64, in few operations: for two points, they are what a step costs."""
    first, second = x[1:].double(), y[1:].double()
    rise = (1 + first.square().sum()).sqrt() - (1 + second.square().sum()).sqrt()
    return 2 * (((first - second).square().sum() - rise.square()).sqrt() / 2).asinh()


def steps(name: str, target: str, rapidity: float, seed: int, *, optimizer: str, rate: float, most: int) -> int:
    """Steps until the image is near the target, or the most plus one."""
    layer, x, goal = problem(name, target, rapidity, seed)
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    descent = kind([p for p in layer.parameters() if p.requires_grad], lr=rate)
    for step in range(most + 1):
        distance = apart(layer(x), goal)
        if distance.item() < NEAR:
            return step
        descent.zero_grad()
        distance.backward()
        descent.step()
    return most + 1


def predicted(rapidity: float, problems: int) -> float:
    """What the law says of HTC, median over the problems: from where the map starts, along the ray."""
    found = []
    for seed in range(problems):
        layer, x, _ = problem("htc", "anywhere", rapidity, seed)
        start = SPACE.dist0(layer(x)).item()
        square = x.square().sum().item()
        found.append(transformation_steps(min(start, rapidity - NEAR), rapidity - NEAR, RATES["sgd"], square))
    return statistics.median(found)


def radii(name: str, depth: int, seed: int, width: int = 64) -> list[float]:
    """Mean rapidity behind each of some layers at first, of points at 3."""
    runs.seed_everything(seed)
    x, found = point(torch.randn(64, width), 3.0), []
    with torch.no_grad():
        for _ in range(depth):
            x = STARTS[name](width)(x)
            found.append(SPACE.dist0(x).mean().item())
    return found


def charts(rapidity: float, seed: int, dim: int = WIDTH) -> dict[str, list[float]]:
    """The least and the largest singular value of charts where they reach a rapidity."""
    runs.seed_everything(seed)
    anywhere = nn.functional.normalize(torch.randn(dim, dtype=torch.float64), dim=-1) * math.sinh(rapidity)
    axis = torch.eye(dim, dtype=torch.float64)[0] * math.sinh(rapidity)

    def exponential(v: Tensor) -> Tensor:
        length = v.norm(dim=-1, keepdim=True)
        return v * (length.sinh() / length)

    def values(chart: Callable[[Tensor], Tensor], v: Tensor) -> list[float]:
        jacobian = torch.func.jacrev(chart)(v)
        s = chart(v).detach()
        metric = torch.eye(dim, dtype=torch.float64) - torch.outer(s, s) / (1 + s @ s)
        found = torch.linalg.eigvalsh(jacobian.T @ metric @ jacobian).clamp(min=0).sqrt()
        return [found[0].item(), found[-1].item()]

    log = anywhere * (rapidity / math.sinh(rapidity))
    return {
        "hyperboloid (htc)": values(lambda v: v, anywhere),
        "exponential (tangent)": values(exponential, log),
        "hyperplanes, axis": values(torch.sinh, axis.asinh()),
        "hyperplanes, anywhere": values(torch.sinh, anywhere.asinh()),
    }


def growth(rapidity: float, size: float = 1.5) -> float:
    """The largest stretch that 512 points have, where two orthogonal hyperplanes have z of this length."""
    manifold = Lorentz(-1.0, dtype=torch.float64)
    layer = LorentzPLFC(2, 2, manifold, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.hyperplanes.weight.copy_(size * torch.eye(2, dtype=torch.float64))
    angle = torch.linspace(0, 2 * math.pi, 513, dtype=torch.float64)
    rim = math.sinh(rapidity) * torch.stack([angle.cos(), angle.sin()], dim=-1)
    return stretch(layer, manifold.lift(rim)).amax().item()


def summary(counts: Sequence[int], most: int) -> dict[str, Any]:
    """The median, and how many arrived."""
    return {"steps": list(counts), "median": statistics.median_high(counts), "arrived": sum(c <= most for c in counts)}


def text(content: dict[str, Any]) -> str:
    """The tables."""
    reach = content["rapidities"]
    lines = [f"median steps of {content['problems']} problems (solved, where not all)", f"{'':44s}" + _row(reach)]
    for row in content["rows"]:
        cells = [_cell(cell, content) for cell in row["cells"]]
        lines.append(f"{row['map']:20s}{row['target']:10s}{row['optimizer']:5s}{row['rate']:<9g}" + _row(cells))
    lines.append(f"{'htc, the law':44s}" + _row([round(x) for x in content["predicted"]]))
    lines += ["", f"sgd at rapidity {content['rates_at']:g}, by rate", f"{'':44s}" + _row(OTHER_RATES)]
    lines += [f"{row['map']:44s}" + _row(_cell(cell, content) for cell in row["cells"]) for row in content["rates"]]
    lines += ["", "rapidity behind layers of width 64, from 3"]
    lines += [f"{name:44s}" + _row(f"{x:.2f}" for x in found) for name, found in content["radii"].items()]
    lines += ["", "least and largest singular value of charts at rapidity 6, 8 dimensions"]
    lines += [f"{name:44s}" + _row(f"{x:.3g}" for x in found) for name, found in content["charts"].items()]
    lines += ["", "largest stretch of hyperplanes, |z| = 1.5, at rapidity " + ", ".join(content["growth"])]
    return "\n".join([*lines, f"{'':44s}" + _row(f"{x:.3g}" for x in content["growth"].values())])


def _row(cells: Any) -> str:
    return "".join(f"{cell!s:>12}" for cell in cells)


def _cell(cell: dict[str, Any], content: dict[str, Any]) -> str:
    solved = f" ({cell['arrived']})" if cell["arrived"] < content["problems"] else ""
    median = f"{cell['median']:g}" if cell["median"] <= content["most"] else "-"
    return median + solved


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add(
        "--rapidities",
        type=options.number,
        nargs="+",
        default=[2, 3, 4, 5, 6],
        metavar="R",
        help="of targets (2 3 4 5 6)",
    )
    add("--problems", type=int, default=10, metavar="N", help="points and targets (default 10)")
    add("--most", type=int, default=2000, metavar="N", help="steps of a problem (default 2000)")
    add(
        "--rates-at",
        type=options.number,
        default=3,
        metavar="R",
        help="rapidity at which rates are compared (default 3)",
    )


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    if not all(NEAR < r <= 12 for r in (*arguments.rapidities, arguments.rates_at)):
        raise RefusedError(f"--rapidities and --rates-at must lie in ({NEAR}, 12]")
    return {"most": arguments.most}


def compute(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """Every table."""

    def cell(name: str, target: str, rapidity: float, optimizer: str, rate: float) -> dict[str, Any]:
        one = functools.partial(steps, name, target, rapidity, optimizer=optimizer, rate=rate, most=arguments.most)
        key = f"{name.replace(' ', '-')}-{target}-{optimizer}-{rate:g}-{options.word(rapidity)}-{arguments.problems}"
        counts = run.part(key, lambda: [one(seed=seed) for seed in range(arguments.problems)])
        if not arguments.quiet:
            print(key, statistics.median(counts), file=sys.stderr)
        return summary(counts, arguments.most)

    rows = [
        {"map": name, "target": target, "optimizer": optimizer, "rate": rate}
        | {"cells": [cell(name, target, r, optimizer, rate) for r in arguments.rapidities]}
        for optimizer, rate in RATES.items()
        for name, target in ROWS
        if optimizer == "sgd" or target == "anywhere"
    ]
    rates = [
        {"map": name, "cells": [cell(name, "anywhere", arguments.rates_at, "sgd", rate) for rate in OTHER_RATES]}
        for name in ("htc", "tangent")
    ]
    content = {name: getattr(arguments, name) for name in ("rapidities", "problems", "most", "rates_at")}
    content |= {"rows": rows, "rates": rates}
    content["predicted"] = [predicted(r, arguments.problems) for r in arguments.rapidities]
    content["radii"] = {name: radii(name, 4, 0) for name in STARTS}
    content["charts"], content["growth"] = charts(6.0, 0), {f"{r:g}": growth(r) for r in (1.0, 3.0, 5.0, 7.0)}
    draw(content, run)
    return content


def draw(content: dict[str, Any], run: runs.Run) -> None:
    """Steps over the rapidity of the target; problems that are not solved have the most steps."""
    with mpl.rc_context(plots.STYLE):
        figure, panels = plots.figure_of(11, 4.6, 2)
        for panel, optimizer in zip(panels, RATES, strict=True):
            for place, row in enumerate(r for r in content["rows"] if r["optimizer"] == optimizer):
                label = row["map"] + (", axis" if row["target"] == "axis" else "")
                look = plots.PALETTE[list(ROWS).index((row["map"], row["target"]))]
                medians = [min(cell["median"], content["most"]) for cell in row["cells"]]
                panel.semilogy(content["rapidities"], medians, color=look, marker=plots.MARKERS[place], label=label)
            if optimizer == "sgd":
                panel.semilogy(content["rapidities"], content["predicted"], "k:", label="law of htc")
            panel.set(xlabel="rapidity of the target", title=f"{optimizer.upper()}, rate {RATES[optimizer]:g}")
        panels[0].set_ylabel("steps, median")
        panels[0].legend(frameon=False, fontsize=10)
        plots.save(figure, run.own("linear_maps.png"))


SCRIPT = tables.Script(
    module="experiments.linear_maps",
    about=__doc__ or "",
    options=add_options,
    config=config,
    compute=compute,
    text=text,
    folder="runs/linear_maps",
    at_least_one=("problems", "most"),
    cpu_only=True,
)

main = functools.partial(tables.main, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
