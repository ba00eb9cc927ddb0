"""One optimizer step on 60 Euclidean tensors and 6 hyperboloid tables; one on 512 rows of a long table.

Geoopt's RiemannianAdam, ours, and torch's fused Adam, which knows no manifold: the floor. Without a time part in the
gradients, as functions leave them that read points by their space part, or with one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from mmap import MADV_RANDOM, mmap
from tempfile import TemporaryFile

import geoopt
import torch
from torch import Tensor

from benchmarks.case import Case, Contenders, Figure, Line
from holonomy.optim import RiemannianAdam

__all__ = ["CASES"]


def parameters(rows: int, device: torch.device, *, time_gradient: bool) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    manifold = geoopt.Lorentz().to(device)
    weights = [torch.nn.Parameter(torch.randn(64, 64, generator=draw).to(device)) for _ in range(60)]
    points = [manifold.projx(0.3 * torch.randn(rows, 65, generator=draw).to(device)) for _ in range(6)]
    tables = [geoopt.ManifoldParameter(x, manifold=manifold) for x in points]
    for p in (*weights, *tables):
        p.grad = torch.randn(p.shape, generator=draw).to(device)
    if not time_gradient:
        for p in tables:
            p.grad[:, 0] = 0
    return [*weights, *tables]


def contenders(rows: int, device: torch.device, *, time_gradient: bool) -> Contenders:
    def steps(make: Callable[..., torch.optim.Optimizer], **options: bool) -> Callable[[], Sequence[Tensor]]:
        optimizer = make(parameters(rows, device, time_gradient=time_gradient), **options)

        def step() -> Sequence[Tensor]:
            optimizer.step()
            return []

        return step

    return {
        "geoopt": steps(geoopt.optim.RiemannianAdam),
        "ours": steps(RiemannianAdam),
        "fused": steps(torch.optim.Adam, fused=True),
    }


def mapped(rows: int, width: int) -> Tensor:
    """A table of zeros in a file without a name, mapped to memory; no pages are read ahead."""
    with TemporaryFile() as file:
        file.truncate(4 * rows * width)
        memory = mmap(file.fileno(), 0)
    memory.madvise(MADV_RANDOM)
    return torch.frombuffer(memory, dtype=torch.float32).view(rows, width)


def touched(rows: int, device: torch.device) -> Contenders:
    """Steps on 512 rows of a table of 10 dimensions: Geoopt's sparse optimizer, ours, and ours on a table in files."""
    draw = torch.Generator().manual_seed(0)
    manifold = geoopt.Lorentz().to(device)
    table = manifold.projx(0.3 * torch.randn(rows, 11, generator=draw).to(device))
    index = torch.randint(rows, (1, 512), generator=draw).to(device)
    values = torch.randn(512, 11, generator=draw).to(device)
    values[:, 0] = 0

    def steps(make: Callable[..., torch.optim.Optimizer], *, files: bool = False) -> Callable[[], Sequence[Tensor]]:
        points = mapped(rows, 11).copy_(table) if files else table.clone()
        parameter = geoopt.ManifoldParameter(points, manifold=manifold)
        parameter.grad = torch.sparse_coo_tensor(index, values, table.shape, check_invariants=True)
        optimizer = make([parameter])
        if files:
            second = mapped(rows, 1).expand(rows, 11)
            optimizer.state[parameter] = {"step": 0, "exp_avg": mapped(rows, 11), "exp_avg_sq": second}
        # Which Geoopt's sparse optimizer reads and does not set.
        optimizer.param_groups[0].setdefault("stabilize", None)

        def step() -> Sequence[Tensor]:
            optimizer.step()
            return []

        return step

    found = {"geoopt": steps(geoopt.optim.SparseRiemannianAdam), "ours": steps(RiemannianAdam)}
    return found | ({"files": steps(RiemannianAdam, files=True)} if device.type == "cpu" else {})


def over_short(name: str, rows: int, device: torch.device) -> float:
    """A step on a table of so many rows over one on a table of 10,000: the median of turns that the two take."""
    if device.type != "cpu":  # where there are no files, and clocks would have to wait
        return math.nan
    short, long = (touched(size, device)[name] for size in (10_000, rows))
    ratios: list[float] = []
    for _ in range(100):
        start = time.perf_counter()
        long()
        middle = time.perf_counter()
        short()
        ratios.append((middle - start) / (time.perf_counter() - middle))
    return statistics.median(ratios)


CASES = (
    Case(
        name="optimizer-sparse",
        title="RiemannianAdam, 512 touched rows of a table of 10 dimensions",
        unit="rows",
        sizes=(10_000, 100_000, 1_000_000, 10_000_000),
        contenders=touched,
        lines=(
            Line("ours", "geoopt", {1_000_000: "<= 1.1"}),
            Line("files", "ours", note="the table and its moments in files mapped to memory, in the page cache"),
            *(
                Figure(f"{name}, time over that at 10,000 rows", partial(over_short, name), {10_000_000: "<= 1.2"})
                for name in ("ours", "files")
            ),
        ),
        small=1000,
    ),
    *(
        Case(
            name=f"optimizer{'-time' if time_gradient else ''}",
            title=f"RiemannianAdam, 60 weights of 64 x 64 and 6 tables of 64 dimensions, {about} time gradient",
            unit="rows",
            sizes=(100, 10_000),
            contenders=partial(contenders, time_gradient=time_gradient),
            lines=(
                Line("geoopt", "ours", {10_000: ">= 8"}),
                Line("ours", "fused", {100: "<= 2", 10_000: "<= 4.5"}),
            ),
        )
        for time_gradient, about in ((False, "without"), (True, "with"))
    ),
)
