r"""Sums of outer products by segment, and products with them: the two halves of linear attention over scattered rows.

With slots :math:`s_r` of rows r,

.. math::

    T_s &= \textstyle\sum_{r : s_r = s} a_r b_r^\top &\quad (1) \\
    o_r &= a_r^\top T_{s_r} &\quad (2)

Equation 2 is the gradient of equation 1 and the other way round:

.. math::

    \partial a_r &= \partial T_{s_r}\, b_r, \qquad
        \partial b_r = \partial T_{s_r}^\top a_r \quad \text{for 1,} &\quad (3) \\
    \partial a_r &= T_{s_r}\, \partial o_r, \qquad
        \partial T_s = \textstyle\sum_{r : s_r = s} a_r\, \partial o_r^\top \quad \text{for 2} &\quad (4)

The outer products and the gathered tables of all rows are never stored: rows are processed in chunks, forwards and
backwards, and memory is that of rows and table. Where a segment has few rows, no table is needed: :func:`block_sum`
multiplies queries with keys, in blocks of a few segments. Transformations of ``torch.func`` take the references, with
whatever they store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd
from holonomy._shapes import Bool, Float, Int

# Entries of the outer products of a chunk: a few MiB, which stay in the cache.
_CHUNK = 2**18
_CHUNK_CUDA = 2**26
# Entries of the queries of a chunk of blocks: with the results they fit in the cache of a core.
_BLOCKS = 2**16
_BLOCKS_CUDA = 2**24


def outer_sum(
    a: Float[Tensor, "rows heads dim_a"], b: Float[Tensor, "rows heads dim_b"], slots: Int[Tensor, " rows"], size: int
) -> Float[Tensor, "size heads dim_a dim_b"]:
    r"""Sum the outer products :math:`a_r b_r^\top` of the rows of each slot."""
    if size == 1:
        return torch.einsum("rha,rhb->hab", a, b)[None]
    if _autograd.transformed():
        return a.new_zeros(size, *a.shape[1:], b.shape[2]).index_add(0, slots, a[..., None] * b[:, :, None])
    return _autograd.apply_function(_OuterSum, a, b, slots, size)


def contract(
    a: Float[Tensor, "rows heads dim_a"], table: Float[Tensor, "size heads dim_a dim_b"], slots: Int[Tensor, " rows"]
) -> Float[Tensor, "rows heads dim_b"]:
    r"""Multiply each row with the matrix in its slot, :math:`a_r^\top T_{s_r}`."""
    if table.shape[0] == 1:
        return torch.einsum("rha,hab->rhb", a, table[0])
    if _autograd.transformed():
        return torch.einsum("rha,rhab->rhb", a, table.index_select(0, slots))
    return _autograd.apply_function(_Contract, a, table, slots)


def block_sum(
    query: Float[Tensor, "queries heads features"],
    key: Float[Tensor, "keys heads features"],
    value: Float[Tensor, "keys heads values"],
    query_rows: Int[Tensor, "blocks width"],
    key_rows: Int[Tensor, "blocks width"],
    mask: Bool[Tensor, "blocks width width"],
    dtype: torch.dtype,
) -> Float[Tensor, "queries heads values"]:
    r"""Sum :math:`(q_j \cdot k_i)\, v_i` over the keys i in the block of the query j, where the mask allows it."""
    if _autograd.transformed():
        return _block_sum_reference(query, key, value, query_rows, key_rows, mask, dtype)
    return _autograd.apply_function(_BlockSum, query, key, value, query_rows, key_rows, mask, dtype)


def _chunks(rows: int, entries: int, device: torch.device) -> Iterator[slice]:
    step = max(1, (_CHUNK_CUDA if device.type == "cuda" else _CHUNK) // max(entries, 1))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _chunks_of_blocks(query: Tensor, rows: Tensor) -> Iterator[slice]:
    most = _BLOCKS_CUDA if query.device.type == "cuda" else _BLOCKS
    step = max(1, most // max(query[:1].numel() * rows.shape[1], 1))
    for start in range(0, rows.shape[0], step):
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
        # Equation 3, itself two products of rows with their slots' matrices.
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
            # Multiply and sum: a batched product of a vector and a small matrix takes four times as long.
            torch.sum(gathered.mul_(a[rows, :, :, None]), 2, out=result[rows])
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        a, table, slots = ctx.saved_tensors
        grad = grad_outputs[0]
        # Equation 4: equations 2 and 1 of the gradient.
        return contract(grad, table.transpose(-1, -2), slots), outer_sum(a, grad, slots, table.shape[0]), None


class _BlockSum(torch.autograd.Function):
    """Products of queries and keys, a few blocks at a time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, query_rows, key_rows, mask, ctx.dtype = inputs
        ctx.save_for_backward(*inputs[:-1])
        result = query.new_zeros(query.shape[0], *value.shape[1:], dtype=ctx.dtype)
        for here in _chunks_of_blocks(query, query_rows):
            mixed = _mixed(query, key, value, query_rows[here], key_rows[here], mask[here], ctx.dtype)
            _add_blocks(result, query_rows[here], mixed)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, query_rows, key_rows, mask = tensors = ctx.saved_tensors
        dtype, grad = ctx.dtype, grad_outputs[0]
        if _autograd.through_reference(grad):
            # A gradient to be differentiated again is that of the reference, with all blocks stored.
            given = (*tensors, dtype)
            return _autograd.reference_gradients(_block_sum_reference, given, grad, tuple(ctx.needs_input_grad))
        grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
        for here in _chunks_of_blocks(query, query_rows):
            of_query, of_key = query_rows[here], key_rows[here]
            q, k, v = _blocks(query, of_query, dtype), _blocks(key, of_key, dtype), _blocks(value, of_key, dtype)
            grad_out = _blocks(grad, of_query, dtype)
            # O = (M * Q K^T) V by block, with the mask M. W = M * Q K^T has the gradient M * (dO V^T).
            weights = (q @ k.mT).mul_(mask[here, None])
            grad_weights = (grad_out @ v.mT).mul_(mask[here, None])
            # dQ = dW K, dK = dW^T Q, dV = W^T dO.
            _add_blocks(grads[0], of_query, grad_weights @ k)
            _add_blocks(grads[1], of_key, grad_weights.mT @ q)
            _add_blocks(grads[2], of_key, weights.mT @ grad_out)
        return *grads, None, None, None, None


def _block_sum_reference(
    query: Tensor, key: Tensor, value: Tensor, query_rows: Tensor, key_rows: Tensor, mask: Tensor, dtype: torch.dtype
) -> Tensor:
    """The reference of :func:`block_sum`."""
    blocks = _mixed(query, key, value, query_rows, key_rows, mask, dtype)[..., : value.shape[-1]]
    result = query.new_zeros(query.shape[0], *value.shape[1:], dtype=dtype)
    return result.index_add(0, query_rows.flatten(), blocks.transpose(1, 2).flatten(0, 1))


def _mixed(
    query: Tensor, key: Tensor, value: Tensor, query_rows: Tensor, key_rows: Tensor, mask: Tensor, dtype: torch.dtype
) -> Tensor:
    q, k, v = _blocks(query, query_rows, dtype), _blocks(key, key_rows, dtype), _blocks(value, key_rows, dtype)
    return (q @ k.mT * mask[:, None]) @ v


def _blocks(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``(blocks, heads, width, dim)``; float32 is padded with zeros to a multiple of 8, which makes products faster."""
    taken = x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:]).transpose(1, 2)
    if dtype == torch.float32 and x.shape[-1] % 8:
        return functional.pad(taken.to(dtype), (0, -x.shape[-1] % 8))
    return taken.to(dtype, memory_format=torch.contiguous_format)


def _add_blocks(result: Tensor, rows: Tensor, blocks: Tensor) -> None:
    more = blocks[..., : result.shape[-1]].transpose(1, 2).to(result.dtype)
    result.index_add_(0, rows.flatten(), more.flatten(0, 1))
