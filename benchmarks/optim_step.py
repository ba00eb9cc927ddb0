"""One optimizer step on 60 Euclidean tensors and 6 hyperboloid tables, as ratios within one process.

Geoopt's RiemannianAdam, ours, and torch's fused Adam (which knows no manifold: the floor) take their
steps in turn, so that whatever else the machine does meets all three. Time is the thread's own.

    python -m benchmarks.optim_step [--rows 10000 100] [--rounds 25] [--time-gradient]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import geoopt
import torch

from holonomy.optim import RiemannianAdam

TARGETS = {10_000: "geoopt/ours >= 8, ours/fused <= 4.5", 100: "geoopt/ours >= 8, ours/fused <= 2"}


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


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:6.2f}  [{low:.2f}, {high:.2f}]"


def measure(rows: int, rounds: int, *, time_gradient: bool) -> None:
    def steps(make: Callable[..., torch.optim.Optimizer], **options: bool) -> Callable[[], None]:
        return make(parameters(rows, time_gradient=time_gradient), **options).step

    contenders = {
        "geoopt": steps(geoopt.optim.RiemannianAdam),
        "ours": steps(RiemannianAdam),
        "fused": steps(torch.optim.Adam, fused=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 3):
        for name, step in contenders.items():
            start = time.thread_time()
            step()
            if turn >= 3:
                taken[name].append(time.thread_time() - start)
    print(f"{rows} rows a table ({TARGETS.get(rows, 'no target')}), medians and quartiles of {rounds} rounds")
    for above, below in (("geoopt", "ours"), ("ours", "fused")):
        ratios = [a / b for a, b in zip(taken[above], taken[below], strict=True)]
        print(f"  {above + '/' + below:12}  {quartiles(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--time-gradient", action="store_true", help="gradients with a time part, as Geoopt's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rows in options.rows:
        measure(rows, options.rounds, time_gradient=options.time_gradient)


if __name__ == "__main__":
    main()
