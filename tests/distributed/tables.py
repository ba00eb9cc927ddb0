"""A table whose rows lie on several processes, compared with the table on one: what each process runs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.large_graph import SentBytes
from holonomy.distributed import ShardedLorentzEmbedding, sum_gradients
from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.optim import RiemannianAdam, RiemannianSGD

D = torch.float64
OPTIMIZERS = {
    "adam": lambda params: RiemannianAdam(params, lr=0.1),
    "amsgrad": lambda params: RiemannianAdam(params, lr=0.1, amsgrad=True),
    "sgd": lambda params: RiemannianSGD(params, lr=0.002, momentum=0.9, nesterov=True),
}


def error(ours: Tensor, theirs: Tensor) -> float:
    if theirs.numel() == 0:
        return 0.0 if ours.shape == theirs.shape else float("inf")
    scale = theirs.abs().amax().clamp(min=1.0)
    return ((ours - theirs).abs().amax() / scale).item()


def looked_up(rank: int, step: int) -> Tensor:
    """Rows 0 to 7, some twice, none on the last process at the last step; of the rows of process 3 none is named."""
    if (rank, step) == (1, 4):
        return torch.empty(0, 2, dtype=torch.int64)
    generator = torch.Generator().manual_seed(10 * step + rank)
    drawn = torch.randint(8, (3, 2), generator=generator)
    return torch.where(drawn % 4 == 3, 0, drawn)


def loss_of(table: LorentzEmbedding | ShardedLorentzEmbedding, index: Tensor, target: Tensor) -> Tensor:
    return (table(index) * target[index]).sum() + table.manifold.dist0(table(index)).square().sum()


def compare(optimizer: str, rank: int, world: int, rows: int) -> dict[str, float]:
    """Errors of rows and curvature after some steps, and the bytes of one."""
    torch.manual_seed(0)
    target = torch.randn(rows, 4, dtype=D)
    points = Lorentz(-0.5, dtype=D).lift(torch.randn(rows, 3, dtype=D))
    whole = LorentzEmbedding.from_pretrained(points, Lorentz(-0.5, learnable=True, dtype=D), freeze=False, sparse=True)
    shared = ShardedLorentzEmbedding.from_pretrained(points, Lorentz(-0.5, learnable=True, dtype=D), freeze=False)
    ours, theirs = (OPTIMIZERS[optimizer](table.parameters()) for table in (shared, whole))
    for step in range(5):
        ours.zero_grad()
        with SentBytes() as sent:
            loss_of(shared, looked_up(rank, step), target).backward()
        sum_gradients(shared, dist.group.WORLD)
        ours.step()
        theirs.zero_grad()
        sum(loss_of(whole, looked_up(each, step), target) for each in range(world)).backward()
        theirs.step()
    moved = (whole.unit - LorentzEmbedding.from_pretrained(points, Lorentz(-0.5, dtype=D)).unit).abs().amax().item()
    return {
        "rows": error(shared.unit, whole.unit[rank::world]),
        "curvature": error(shared.manifold.curvature, whole.manifold.curvature),
        "moved": moved,
        "bytes": sent.count,
    }


def compare_all(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Each optimizer on a short table and a long one."""
    found = {}
    for name in OPTIMIZERS:
        again = compare(name, rank, world, 5000)
        found[name] = compare(name, rank, world, 50) | {"bytes at another size": again["bytes"]}
    return found


def drawn() -> list[list[float]]:
    """The rows that this process draws, under the seed of all."""
    torch.manual_seed(0)
    return ShardedLorentzEmbedding(20, 3, Lorentz(-1.0)).unit.tolist()
