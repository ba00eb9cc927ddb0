"""One optimizer step on 60 Euclidean tensors and 6 hyperboloid tables, as ratios within one process.

Geoopt's RiemannianAdam, ours, and torch's fused Adam (which knows no manifold: the floor) take their
steps in turn, so that whatever else the machine does meets all three. Time is the thread's own.

    python -m benchmarks.optim_step [--rows 10000 100] [--rounds 25] [--time-gradient] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import geoopt
import torch

from benchmarks.rounds import Ratio, interleaved, report
from holonomy.optim import RiemannianAdam

# ours / fused at most.
TARGETS = {10_000: 4.5, 100: 2.0}


def parameters(rows: int, *, time_gradient: bool) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    manifold = geoopt.Lorentz()
    weights = [torch.nn.Parameter(torch.randn(64, 64, generator=draw)) for _ in range(60)]
    points = [manifold.projx(0.3 * torch.randn(rows, 65, generator=draw)) for _ in range(6)]
    tables = [geoopt.ManifoldParameter(x, manifold=manifold) for x in points]
    for p in (*weights, *tables):
        p.grad = torch.randn(p.shape, generator=draw)
    if not time_gradient:
        # As from functions that read points by their space part.
        for p in tables:
            p.grad[:, 0] = 0
    return [*weights, *tables]


def contenders(rows: int, *, time_gradient: bool) -> dict[str, Callable[[], None]]:
    def steps(make: Callable[..., torch.optim.Optimizer], **options: bool) -> Callable[[], None]:
        return make(parameters(rows, time_gradient=time_gradient), **options).step

    return {
        "geoopt": steps(geoopt.optim.RiemannianAdam),
        "ours": steps(RiemannianAdam),
        "fused": steps(torch.optim.Adam, fused=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--time-gradient", action="store_true", help="gradients with a time part, as Geoopt's")
    parser.add_argument("--json", help="also write the ratios there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rows in options.rows:
        taken = interleaved(contenders(rows, time_gradient=options.time_gradient), options.rounds)
        limit = f"<= {TARGETS[rows]:g}" if rows in TARGETS else ""
        ratios = [Ratio("geoopt", "ours", ">= 8"), Ratio("ours", "fused", limit)]
        report({"rows a table": rows, "time gradient": options.time_gradient}, taken, ratios, options.json)


if __name__ == "__main__":
    main()
