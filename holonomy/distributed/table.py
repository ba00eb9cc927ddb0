"""A table of learned points whose rows lie on several processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from holonomy import checks
from holonomy._autograd import apply_function
from holonomy._parts import check_processes
from holonomy._shapes import Float, Int
from holonomy.manifolds import Lorentz, LorentzEmbedding, LorentzPoints


class ShardedLorentzEmbedding(LorentzPoints):
    r"""A :class:`~holonomy.manifolds.LorentzEmbedding` whose row r lies on process r mod W, of W processes.

    Every process looks up rows of the whole table, and all do so at once: the indices of a batch, each once, go to the
    processes that hold their rows, and the rows come back; in the backward pass gradients go the other way. The
    gradient of ``unit`` is sparse, and this library's optimizers step the rows that any process named, as they do for
    one process; memory and work of a process are those of its rows. The bytes of a step grow with the batch, not with
    the table.

    The objective is the sum of what the processes compute, see :func:`sum_gradients`, which adds up the gradients of a
    learned curvature and leaves the rows alone. ``DistributedDataParallel`` must not synchronise them either.

    A ``state_dict`` holds the rows of its process, and loads there only: each process saves its own.

    Args:
        num_embeddings: number of rows of the whole table, at least one a process.
        embedding_dim: dimension of the space.
        manifold: the space, whose curvature may be learnable; the same on every process.
        group: the processes; all of them if left out.
        std: spread of the initial points, which differ between processes under one seed.
        generator: source of randomness; torch's seeded state if left out.
        device: where the rows live.
        dtype: their dtype.

    Attributes:
        unit: the rows of this process, on the hyperboloid of curvature -1; row i is row :math:`p + i W` of the table on
            process p.
        num_embeddings: number of rows of the whole table.

    Raises:
        TypeError: if a size is not an integer, or ``group`` is not a process group.
        ValueError: if a size is not positive, or there are more processes than rows.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> table = ShardedLorentzEmbedding(10, 3, Lorentz(-1.0))
    >>> table(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 4])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        manifold: Lorentz,
        *,
        group: dist.ProcessGroup | None = None,
        std: float = 0.1,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = check_processes(dist.group.WORLD if group is None else group)
        rank, world = group.rank(), group.size()
        if checks.positive_int("num_embeddings", num_embeddings) < world:
            raise ValueError(f"num_embeddings must be at least {world}, one a process, got {num_embeddings}.")
        # One seed on all processes would draw the same rows on all.
        seed = int(
            torch.randint(2**62, (), generator=generator, device=None if generator is None else generator.device)
        )
        super().__init__(
            len(range(rank, num_embeddings, world)),
            checks.positive_int("embedding_dim", embedding_dim),
            manifold,
            std=std,
            generator=torch.Generator("cpu" if device is None else device).manual_seed(seed + rank),
            device=device,
            dtype=dtype,
        )
        self.num_embeddings, self.group = num_embeddings, group

    @classmethod
    def from_pretrained(
        cls,
        points: Float[Tensor, "num ambient"],
        manifold: Lorentz,
        *,
        group: dist.ProcessGroup | None = None,
        freeze: bool = True,
    ) -> ShardedLorentzEmbedding:
        """A table of given points, of which each process copies its rows; in their dtype and on their device.

        Args:
            points: points ``(num, dim + 1)`` of the manifold, the same on every process; memory-mapped, say.
            manifold: the space, whose curvature may be learnable.
            group: the processes; all of them if left out.
            freeze: leave the points where they are; they move with the curvature all the same.

        Returns:
            The table.
        """
        checks.matrix("points", points, "num", "dim + 1")
        like: dict[str, Any] = {"device": points.device, "dtype": points.dtype}
        table = cls(points.shape[0], points.shape[1] - 1, manifold, group=group, std=0.0, **like)
        own = points[table.group.rank() :: table.group.size()]
        table.unit = LorentzEmbedding.from_pretrained(own, manifold, freeze=freeze).unit
        return table

    def forward(self, index: Int[Tensor, "..."]) -> Float[Tensor, "... ambient"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The points with these indices, wherever they lie, shaped as ``index`` with ``embedding_dim + 1`` coordinates.

        Every process must call it, with whatever indices into the whole table. Anything but integers is a TypeError,
        and an index that names no row a ValueError.
        """
        checks.codes("index", index, self.num_embeddings, "num_embeddings")
        world = self.group.size()
        most = -(-self.num_embeddings // world)
        # Ordered by the process that holds them.
        asked, place = (index.long() % world * most + index.long() // world).unique(return_inverse=True)
        sent = (asked // most).bincount(minlength=world)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        here, there = received.tolist(), sent.tolist()
        wanted = asked.new_empty(sum(here))
        dist.all_to_all_single(wanted, asked % most, here, there, group=self.group)
        rows = functional.embedding(wanted, self.unit, sparse=True)
        return self.read(functional.embedding(place, apply_function(_Exchange, rows, here, there, self.group)))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 - torch's
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Beside the version that torch keeps there: the names of a state stay what they are.
        getattr(destination, "_metadata", {}).setdefault(prefix[:-1], {})["shard"] = self._shard()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        saved = local_metadata.get("shard", self._shard())
        if saved != self._shard():
            args[-1].append(f"{prefix}unit must hold the rows of {self._shard()}, got those of {saved}.")

    def _shard(self) -> str:
        return f"process {self.group.rank()} of {self.group.size()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLorentzEmbedding:
        # The processes are no part of the table.
        memo[id(self.group)] = self.group
        copied = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return f"{self.num_embeddings}, {self.unit.shape[1] - 1}, rows here={self.unit.shape[0]}"


class _Exchange(torch.autograd.Function):
    """Send rows to the processes that asked for them, so many to each, and receive so many from each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], back: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.how = back, to, group
        found = rows.new_empty(sum(back), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), back, to, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return apply_function(_Exchange, grad_outputs[0], *ctx.how), None, None, None
