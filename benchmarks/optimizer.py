"""One optimizer step on 60 Euclidean tensors and 6 hyperboloid tables; one on 512 rows of a long table; an embedding's.

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
from torch.nn import functional

from benchmarks.case import Case, Contenders, Figure, Line
from holonomy.manifolds import Lorentz, LorentzEmbedding
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


def embedding(rows: int, device: torch.device) -> Contenders:
    """A training step of an embedding in 10 dimensions, 1,024 pairs against 20 others each; rows differ by turn.

    Ours with a learned curvature and sparse gradients; Geoopt's, whose curvature does not learn; flat distances with
    torch's Adam, dense as in most code and with sparse gradients.
    """
    start = 0.1 * torch.randn(rows, 10, generator=torch.Generator().manual_seed(0)).to(device)

    def steps(
        lookup: Callable[[Tensor], Tensor],
        distance: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> Callable[[], Sequence[Tensor]]:
        draw = torch.Generator().manual_seed(1)

        def step() -> Sequence[Tensor]:
            optimizer.zero_grad()
            points = lookup(torch.randint(rows, (1024 * 22,), generator=draw).to(device))
            ours, theirs = points.split([1024, 1024 * 21])
            far = distance(ours[:, None], theirs.unflatten(0, (1024, 21)))
            (far[:, 0] + torch.logsumexp(-far, 1)).mean().backward()
            optimizer.step()
            return []

        return step

    def flat(x: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x - y, dim=-1)

    learning, fixed = Lorentz(-1.0, learnable=True, device=device), geoopt.Lorentz().to(device)
    table = LorentzEmbedding.from_pretrained(learning.lift(start).detach(), learning, freeze=False, sparse=True)
    theirs = geoopt.ManifoldParameter(fixed.projx(functional.pad(start, (1, 0))), manifold=fixed)
    dense, thin = (torch.nn.Parameter(start.clone()) for _ in range(2))
    sparse: dict[str, torch.optim.Optimizer] = {
        "geoopt": geoopt.optim.SparseRiemannianAdam([theirs]),
        "flat, sparse": torch.optim.SparseAdam([thin]),
    }
    sparse["geoopt"].param_groups[0].setdefault("stabilize", None)
    return {
        "ours": steps(table, learning.dist, RiemannianAdam(table.parameters())),
        "geoopt": steps(lambda i: functional.embedding(i, theirs, sparse=True), fixed.dist, sparse["geoopt"]),
        "flat": steps(lambda i: dense[i], flat, torch.optim.Adam([dense], fused=True)),
        "flat, sparse": steps(lambda i: functional.embedding(i, thin, sparse=True), flat, sparse["flat, sparse"]),
    }


def over_short(name: str, rows: int, device: torch.device) -> float:
    """A step on a table of so many rows over one on a table of 10,000: the median of turns that the two take."""
    if device.type != "cpu":  # where there are no files, and clocks would have to wait
        return math.nan
    short, long = (touched(size, device)[name] for size in (10_000, rows))
    ratios: list[float] = []
    for _ in range(100):
        start = time.thread_time()
        long()
        middle = time.thread_time()
        short()
        ratios.append((middle - start) / (time.thread_time() - middle))
    return statistics.median(ratios)


def error_over_geoopts(rows: int, device: torch.device) -> float:
    """After 100 float32 steps on 512 rows, the largest error of a coordinate over Geoopt's; float64 is the truth."""
    if rows > 1_000_000:  # errors are those of the rows that move, whatever the length of the table
        return math.nan
    space = 0.3 * torch.randn(rows, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def moved(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> Tensor:
        manifold = geoopt.Lorentz(torch.ones((), dtype=dtype)).to(device)
        points = functional.pad(space, (1, 0)).to(device, dtype)
        parameter = geoopt.ManifoldParameter(manifold.projx(points), manifold=manifold)
        optimizer = make([parameter], lr=0.01)
        optimizer.param_groups[0].setdefault("stabilize", None)
        draw = torch.Generator().manual_seed(1)
        index = torch.randint(rows, (1, 512), generator=draw).to(device)
        for _ in range(100):
            values = functional.pad(torch.randn(512, 10, generator=draw), (1, 0)).to(device, dtype)
            parameter.grad = torch.sparse_coo_tensor(index, values, parameter.shape, check_invariants=True)
            optimizer.step()
        return parameter.detach().double()

    truth = moved(RiemannianAdam, torch.float64)
    ours, theirs = (
        float((moved(make, torch.float32) - truth).abs().max())
        for make in (RiemannianAdam, geoopt.optim.SparseRiemannianAdam)
    )
    return ours / theirs


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
            Figure("largest float32 error after 100 steps, over Geoopt's", error_over_geoopts, {1_000_000: "<= 1"}),
        ),
        small=1000,
    ),
    Case(
        name="embedding-step",
        title="a training step of an embedding in 10 dimensions: 1,024 pairs against 20 others, sparse gradients",
        unit="rows",
        sizes=(82_115, 1_000_000),
        contenders=embedding,
        lines=(
            Line("ours", "flat", {82_115: "<= 2"}, note="whose step moves all rows, named or not"),
            Line("ours", "flat, sparse"),
            Line("geoopt", "ours"),
        ),
        small=100,
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
