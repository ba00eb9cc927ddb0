r"""Rows that lie on several processes, or come in chunks: exact results with sums over parts.

A layer that mixes rows does so by a few sums over all of them. Where rows lie on several processes, it takes ``group=``
(a ``torch.distributed.ProcessGroup``), and each sum is one differentiable all-reduce whose bytes do not grow with the
rows. ``group=`` goes wherever ``x`` goes: it says that x holds some of the rows, those of this process.

Where rows come in chunks, :func:`stream` and :func:`stream_backward` take the same sums over chunks: a process is a
part of the rows in space, a chunk one in time, and a process may have chunks.

For batches of graphs, each of which lies on one process, :class:`GraphBatchSampler` shares them out, and
:func:`mean_over_processes` is their loss under ``DistributedDataParallel``.

One rule for losses of rows: **the objective is the sum of what the processes compute**. Each divides the sum over its
own rows by the number of rows of all, calls ``backward()``, and :func:`sum_gradients` adds up the gradients of the
weights.
"""

# Its functions have the group of all processes as a default, taken when it is imported: DistributedDataParallel imports
# it, and a group that exists by then is never destroyed. A thread of gloo that is alive when the interpreter ends may
# abort the process: "terminate called without an active exception".
import torch.distributed.nn.functional as _functional  # noqa: F401  # pyright: ignore[reportUnusedImport]

from holonomy.distributed.batches import GraphBatchSampler, mean_over_processes
from holonomy.distributed.gradients import sum_gradients
from holonomy.distributed.propagation import propagate_rows
from holonomy.distributed.streaming import stream, stream_backward
from holonomy.distributed.table import ShardedLorentzEmbedding

__all__ = [
    "GraphBatchSampler",
    "ShardedLorentzEmbedding",
    "mean_over_processes",
    "propagate_rows",
    "stream",
    "stream_backward",
    "sum_gradients",
]
