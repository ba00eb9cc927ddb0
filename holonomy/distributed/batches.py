"""Batches of graphs that processes share: who takes which graphs, and the mean of a loss over all of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from holonomy import checks
from holonomy._parts import all_reduced
from holonomy._shapes import Float, Int
from holonomy.structures import batches_by_size


class GraphBatchSampler(Sampler[list[int]]):
    r"""The graphs that this process takes of each batch, so that all processes get about the same number of nodes.

    Batches of all processes together are drawn by :func:`~holonomy.structures.batches_by_size`, alike on each process.
    Within a batch the largest graph that is left goes to the process with the fewest nodes so far, so that no two
    processes differ by more nodes than the largest graph of the batch has. Every graph of an epoch goes to one process,
    and every process takes one graph of each batch at least: a batch that has too few of them is joined to another.

    It is what :class:`torch.utils.data.DataLoader` takes as ``batch_sampler``, and is called as
    :class:`torch.utils.data.DistributedSampler`, which gives processes equal numbers of graphs and doubles some.
    :func:`mean_over_processes` is the loss that belongs to it.

    Args:
        sizes: number of nodes of each graph.
        batch_size: most graphs of a batch of all processes together, to which less than two for each process are added
            where batches are joined.
        padding: bound on the padding of layouts whose work is the square of the largest graph; infinity for batches
            without regard to size.
        seed: with the epoch, decides the batches; the same on every process.
        num_replicas: number of processes; that of the default group if left out.
        rank: number of this process; that in the default group if left out.

    Raises:
        TypeError: if a number is no integer.
        ValueError: if ``rank`` is none of the processes, ``batch_size`` or the graphs are fewer than the processes, or
            ``padding`` is less than 1.

    >>> sizes = [9, 1, 5, 4, 3, 2]
    >>> samplers = [GraphBatchSampler(sizes, 6, num_replicas=2, rank=rank) for rank in range(2)]
    >>> [sum(sizes[graph] for batch in sampler for graph in batch) for sampler in samplers]
    [12, 12]
    """

    def __init__(
        self,
        sizes: Sequence[int] | Int[Tensor, " graphs"],
        batch_size: int,
        *,
        padding: float = math.inf,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        world = dist.get_world_size() if num_replicas is None else checks.positive_int("num_replicas", num_replicas)
        rank = checks.nonnegative_int("rank", dist.get_rank() if rank is None else rank)
        if rank >= world:
            raise ValueError(f"rank must be less than num_replicas = {world}, got {rank}.")
        self.sizes: list[int] = (
            sizes.tolist() if isinstance(sizes, Tensor) else checks.sequence("sizes", sizes, "integers")
        )
        self.batch_size, self.padding = checks.positive_int("batch_size", batch_size), padding
        self.seed, self.epoch = checks.nonnegative_int("seed", seed), 0
        self.num_replicas, self.rank = world, rank
        for name, count in (("batch_size", batch_size), ("sizes", len(self.sizes))):
            if count < world:
                raise ValueError(f"{name} must be at least {world}, a graph for each process, got {count}.")
        self._batches()  # refuses sizes that cannot be batched

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, on every process; without it each epoch has the same batches."""
        self.epoch = checks.nonnegative_int("epoch", epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """The numbers of the graphs that this process takes of each batch of the epoch."""
        for batch in self._batches():
            yield self._shares(batch)[self.rank]

    def __len__(self) -> int:
        """Number of batches of the epoch, the same on every process."""
        return len(self._batches())

    def _batches(self) -> list[Tensor]:
        """The batches of all processes, those with too few graphs joined to the next or, at the end, to the last."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        joined: list[Tensor] = []
        for batch in batches_by_size(self.sizes, self.batch_size, padding=self.padding, generator=generator):
            if joined and len(joined[-1]) < self.num_replicas:
                joined[-1] = torch.cat([joined[-1], batch])
            else:
                joined.append(batch)
        if len(joined) > 1 and len(joined[-1]) < self.num_replicas:
            joined[-2:] = [torch.cat(joined[-2:])]
        return joined

    def _shares(self, batch: Tensor) -> list[list[int]]:
        """The graphs of each process, the largest first."""
        shares: list[list[int]] = [[] for _ in range(self.num_replicas)]
        fewest = [(0, 0, rank) for rank in range(self.num_replicas)]  # a heap of nodes, graphs and ranks
        graphs: list[int] = batch.tolist()
        for graph in sorted(graphs, key=self.sizes.__getitem__, reverse=True):
            nodes, count, rank = fewest[0]
            shares[rank].append(graph)
            heapq.heapreplace(fewest, (nodes + self.sizes[graph], count + 1, rank))
        return shares


def mean_over_processes(
    values: Float[Tensor, "..."], group: dist.ProcessGroup, *, weights: Float[Tensor, "..."] | None = None
) -> Float[Tensor, ""]:
    r"""The mean of what all processes hold, however many each of them does, :math:`\sum_i w_i v_i / \sum_i w_i`.

    A loss for each graph goes in, and every process has the mean over all graphs. Its gradient is that under
    ``DistributedDataParallel``, which takes the mean of the processes' gradients: one process's on the whole batch,
    where the mean of the processes' own means is wrong as soon as they hold different numbers of graphs. Where
    :func:`sum_gradients` stands in its place, divide the result by the number of processes.

    Args:
        values: losses of this process, of any shape; it may have none.
        group: the processes, all of which must call it.
        weights: what each value counts, the shape of ``values``; left out, each counts one.

    Returns:
        One number, the same on every process; ``nan`` where all weights are zero.

    Raises:
        TypeError: if ``group`` is not a process group, or ``values`` is not a floating-point tensor.
        ValueError: if ``weights`` has another shape than ``values``.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mean_over_processes(torch.tensor([1.0, 4.0]), dist.group.WORLD, weights=torch.tensor([2.0, 1.0]))
    tensor(2.)
    >>> dist.destroy_process_group()
    """
    checks.floating("values", values)
    if weights is None:
        weights = torch.ones_like(values)
    checks.shaped("weights", weights, values.shape, "values.shape = ")
    # In half precision neither long sums nor numbers of values have digits.
    wide = torch.promote_types(values.dtype, torch.float32)
    weights = weights.to(wide)
    total, count = all_reduced(torch.stack([(weights * values).sum(), weights.sum()]), group)
    return (total / count).to(values.dtype)
