r"""Sums of outer products by segment, and their way back: what linear attention over scattered rows consists of.

With slots :math:`s_r` of rows r,

.. math:: T_{s} = \sum_{r : s_r = s} a_r b_r^\top, \qquad o_r = a_r^\top T_{s_r}.

Each is the other's gradient. Neither the outer products nor the gathered tables of all rows exist at once: rows are
taken in chunks, forwards and backwards, so that memory is that of rows and table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holonomy import numerics

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["contract", "outer_sum"]

# Entries of the chunk's outer products: a few MiB, so that they are written and read in cache.
_CHUNK = 2**18
_CHUNK_CUDA = 2**26


def outer_sum(
    a: Float[Tensor, "rows heads dim_a"], b: Float[Tensor, "rows heads dim_b"], slots: Int[Tensor, " rows"], size: int
) -> Float[Tensor, "size heads dim_a dim_b"]:
    r"""Sum the outer products :math:`a_r b_r^\top` of the rows of each slot.

    Args:
        a: ``(rows, heads, dim_a)``.
        b: ``(rows, heads, dim_b)``, in the dtype of ``a``.
        slots: ``(rows,)``, 0 .. size - 1.
        size: number of slots.

    Returns:
        ``(size, heads, dim_a, dim_b)``, zero where a slot has no row.

    >>> outer_sum(torch.ones(3, 1, 1), torch.ones(3, 1, 2), torch.tensor([0, 1, 1]), 2).squeeze()
    tensor([[1., 1.],
            [2., 2.]])
    """
    if size == 1:
        return torch.einsum("rha,rhb->hab", a, b)[None]
    return numerics.apply_function(_OuterSum, a, b, slots, size)


def contract(
    a: Float[Tensor, "rows heads dim_a"], table: Float[Tensor, "size heads dim_a dim_b"], slots: Int[Tensor, " rows"]
) -> Float[Tensor, "rows heads dim_b"]:
    r"""Multiply each row with the matrix in its slot, :math:`a_r^\top T_{s_r}`.

    Args:
        a: ``(rows, heads, dim_a)``.
        table: ``(size, heads, dim_a, dim_b)``, in the dtype of ``a``.
        slots: ``(rows,)``, 0 .. size - 1.

    Returns:
        ``(rows, heads, dim_b)``.

    >>> contract(torch.ones(2, 1, 1), torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1), torch.tensor([1, 0])).flatten()
    tensor([2., 1.])
    """
    if table.shape[0] == 1:
        return torch.einsum("rha,hab->rhb", a, table[0])
    return numerics.apply_function(_Contract, a, table, slots)


def _chunks(rows: int, entries: int, device: torch.device) -> Iterator[slice]:
    step = max(1, (_CHUNK_CUDA if device.type == "cuda" else _CHUNK) // max(entries, 1))
    for start in range(0, rows, step):
        yield slice(start, start + step)


class _OuterSum(torch.autograd.Function):
    """Segment sums of outer products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, slots: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(a, b, slots)
        heads, dim_a, dim_b = a.shape[1], a.shape[2], b.shape[2]
        table = a.new_zeros(size, heads, dim_a, dim_b)
        for rows in _chunks(a.shape[0], heads * dim_a * dim_b, a.device):
            table.index_add_(0, slots[rows], a[rows, :, :, None] * b[rows, :, None, :])
        return table

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b, slots = ctx.saved_tensors
        grad = grad_outputs[0]
        return contract(b, grad.transpose(-1, -2), slots), contract(a, grad, slots), None, None


class _Contract(torch.autograd.Function):
    """Rows times the matrices of their slots."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, table: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(a, table, slots)
        heads, dim_a, dim_b = table.shape[1:]
        result = a.new_empty(a.shape[0], heads, dim_b)
        for rows in _chunks(a.shape[0], heads * dim_a * dim_b, a.device):
            gathered = table.index_select(0, slots[rows])
            # A sum of products: batched products of a vector and so small a matrix take four times as long.
            torch.sum(gathered.mul_(a[rows, :, :, None]), 2, out=result[rows])
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        a, table, slots = ctx.saved_tensors
        grad = grad_outputs[0]
        return contract(grad, table.transpose(-1, -2), slots), outer_sum(a, grad, slots, table.shape[0]), None
