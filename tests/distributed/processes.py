"""Modules on rows that processes share, compared with the same modules on all rows: what one process runs.

Each process draws the same module and the same rows, computes all by itself, and then its own rows with the others.
The objective is a sum over rows with random weights, so that each row has a gradient of its own.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.large_graph import SentBytes, gathered
from holonomy.distributed import stream, stream_backward, sum_gradients
from holonomy.layers import HypBatchNorm, HypLinearAttention, TokenAttention
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer, HypformerBlock
from tests.distributed import tables, trajectories
from tests.distributed.tables import error
from tests.registry.case import shaken

D = torch.float64
DIM = 6
# Shares of the rows; the last of four processes has none, and two of eight.
SHARES = {1: [1.0], 2: [0.6, 0.4], 4: [0.5, 0.2, 0.3, 0.0], 8: [0.2, 0.1, 0.0, 0.3, 0.1, 0.2, 0.1, 0.0]}
WORLDS = (2, 4, 8)


def manifold(curvature: float) -> Lorentz:
    return Lorentz(curvature, learnable=True, dtype=D)


class Midpoint(nn.Module):
    def __init__(self, *, several: bool) -> None:
        super().__init__()
        self.manifold, self.map = manifold(-0.7), nn.Linear(DIM + 1, 2 if several else 1, dtype=D)
        self.several = several

    def forward(self, x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        weights = self.map(x).exp()
        found = self.manifold.centroid(x, weights.mT if self.several else weights[:, 0], group=group)
        return found.reshape(-1, DIM + 1)


class Sharded(NamedTuple):
    """A module, whether its rows are points, and whether every process has the whole result."""

    make: Callable[[], nn.Module]
    points: bool = True
    pooled: bool = False
    masked: bool = False


def hypformer(**options: object) -> nn.Module:
    return Hypformer(DIM, 4, 3, heads=2, graph_encoder=None, dtype=D, **options)


CASES = {
    "attention": Sharded(lambda: HypLinearAttention(DIM, 2, manifold(-1.0), manifold(-0.4), dtype=D)),
    "attention, power 3": Sharded(lambda: HypLinearAttention(DIM, 3, manifold(-1.0), power=3.0, dtype=D)),
    "attention, midpoint": Sharded(
        lambda: HypLinearAttention(DIM, 2, manifold(-1.0), manifold_hidden=manifold(-2.0), average="midpoint", dtype=D)
    ),
    "attention, padding": Sharded(lambda: HypLinearAttention(DIM, 2, manifold(-1.0), dtype=D), masked=True),
    "performer": Sharded(lambda: TokenAttention(DIM, 2, kernel="performer", dtype=D), points=False),
    "performer, padding": Sharded(lambda: TokenAttention(DIM, 2, kernel="performer", dtype=D), False, False, True),
    "batch norm": Sharded(lambda: HypBatchNorm(DIM, manifold(-1.0), manifold(-0.4), dtype=D)),
    "batch norm, eval": Sharded(lambda: HypBatchNorm(DIM, manifold(-1.0), dtype=D).eval()),
    "batch norm, plain": Sharded(
        lambda: HypBatchNorm(DIM, manifold(-1.0), affine=False, track_running_stats=False, dtype=D)
    ),
    "midpoint": Sharded(lambda: Midpoint(several=False), pooled=True),
    "midpoints": Sharded(lambda: Midpoint(several=True), pooled=True),
    "block": Sharded(lambda: HypformerBlock(DIM, 2, manifold(-1.0), manifold(-0.3), dtype=D)),
    "Hypformer": Sharded(hypformer, points=False),
    "Hypformer, midpoint, prototypes": Sharded(
        lambda: hypformer(average="midpoint", decoder="prototypes"), points=False
    ),
    "Hypformer, graph": Sharded(lambda: hypformer(level="graph"), points=False, pooled=True),
}


def inputs_of(case: Sharded, rows: int) -> tuple[Tensor, ...]:
    x = torch.randn(rows, DIM, dtype=D)
    x = Lorentz(-1.0, dtype=D).lift(x).detach() if case.points else x
    return (x, torch.rand(rows) < 0.3) if case.masked else (x,)


def own(rows: int, rank: int, world: int) -> slice:
    ends = [0, *(round(rows * end) for end in itertools.accumulate(SHARES[world]))]
    return slice(ends[rank], rows if rank == world - 1 else ends[rank + 1])


def backward(module: nn.Module, inputs: tuple[Tensor, ...], weights: Tensor, share: float, **group: object) -> Tensor:
    out = module(*inputs, **group)
    (share * (out * weights).sum()).backward()
    return out


def stream_of(module: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    """The gradients of a stream of rows that processes share, and its results."""
    chunks = list(zip(x.split(3), weights.split(3), strict=True)) or [(x, weights)]
    stream_backward(lambda c, group: (module(c[0], group=group) * c[1]).sum(), chunks, group=dist.group.WORLD)
    return torch.cat(list(stream(lambda c, group: module(c[0], group=group), chunks, group=dist.group.WORLD)))


def compare(
    case: Sharded, rank: int, world: int, rows: int = 23, *, streamed: bool = False, means: bool = False
) -> dict[str, float]:
    """The largest relative errors of this process, and the bytes that it sent."""
    torch.manual_seed(0)
    module = shaken(case.make())
    shared = copy.deepcopy(module)
    x, *mask = inputs_of(case, rows)
    x.requires_grad_()
    with torch.no_grad():
        weights = torch.randn_like(copy.deepcopy(module)(x, *mask))
    whole = backward(module, (x, *mask), weights, 1.0)
    part = own(rows, rank, world)
    mine = x[part].detach().requires_grad_()
    kept = weights if case.pooled else weights[part]
    share = 1 / world if case.pooled else 1.0
    if means:  # of gradients, which torch takes itself
        shared, share = nn.parallel.DistributedDataParallel(shared), world
    with SentBytes() as sent:
        if streamed:
            out, mine.grad = stream_of(shared, mine.detach(), kept), x.grad[part]  # rows of a stream have no gradient
        else:
            out = backward(shared, (mine, *(m[part] for m in mask)), kept, share, group=dist.group.WORLD)
    if means:
        shared = shared.module
    else:
        sum_gradients(shared, dist.group.WORLD)
    pairs = {
        "output": (out, whole if case.pooled else whole[part]),
        "input": (mine.grad / (world if means else 1), x.grad[part]),
    }
    named = dict(module.named_parameters())
    for name, parameter in shared.named_parameters():
        if parameter.requires_grad:
            assert named[name].grad is not None, name
            pairs[name] = parameter.grad, named[name].grad
    pairs |= {name: (b.double(), dict(module.named_buffers())[name].double()) for name, b in shared.named_buffers()}
    return {name: error(*pair) for name, pair in pairs.items()} | {"bytes": sent.count}


def run(rank: int, worlds: tuple[int, ...], folder: str) -> None:
    """What each process does, in worlds of several sizes; the errors of all of them are written as JSON."""
    torch.set_num_threads(1)
    for world in worlds:
        if rank < world:
            found = run_in(world, rank, Path(folder))
            (Path(folder) / f"{world}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def run_in(world: int, rank: int, folder: Path) -> dict[str, object]:
    """The errors of one process in a world of a size."""
    store = dist.FileStore(str(folder / f"store {world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found: dict[str, object] = {"modules": {}, "streams": {}}
    means = "Hypformer, DistributedDataParallel"
    for name, case in [*CASES.items(), (means, CASES["Hypformer"])]:
        again = compare(case, rank, world, 230, means=name == means)["bytes"]
        found["modules"][name] = compare(case, rank, world, means=name == means) | {"bytes at another size": again}
    for name in ("attention", "Hypformer"):
        found["streams"][name] = compare(CASES[name], rank, world, streamed=True)
    found["tables"], found["drawn"] = tables.compare_all(rank, world), tables.drawn()
    found["gathered"] = gathered(torch.full((rank, 2), rank), dist.group.WORLD).tolist()
    found["batches"] = trajectories.compare_all(rank, world, folder)
    dist.barrier()
    dist.destroy_process_group()
    return found
