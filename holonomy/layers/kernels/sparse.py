r"""Sparse matrices from outside: features that are mostly zeros, as torch CSR or COO tensors.

Inside the library a sparse matrix is CSR, whose product with a dense one is five to ten times faster than
that of COO on a CPU. Nothing here is differentiable in the sparse matrix itself.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import numerics

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["as_csr", "csr", "is_sparse", "multiply", "row_norms", "row_pointer", "sparse_dropout"]


def is_sparse(x: Tensor) -> bool:
    """Whether a tensor is held sparsely, in any of torch's layouts.

    Args:
        x: any tensor.

    Returns:
        ``True`` if it is not strided.

    >>> is_sparse(torch.eye(2).to_sparse())
    True
    """
    return x.layout != torch.strided


def csr(
    row_pointer: Int[Tensor, " rows_plus_1"],
    columns: Int[Tensor, " entries"],
    values: Float[Tensor, " entries"],
    size: tuple[int, int],
) -> Tensor:
    """A CSR matrix of its three arrays, unchecked, without torch's notice that the layout is in beta.

    Args:
        row_pointer: where each row starts, and the end.
        columns: the column of each entry.
        values: the entries.
        size: rows and columns.

    Returns:
        The matrix.

    >>> csr(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.ones(2), (2, 2)).to_dense()
    tensor([[0., 1.],
            [1., 0.]])
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(row_pointer, columns, values, size, check_invariants=False)


def as_csr(x: Tensor) -> Tensor:
    """The same matrix in CSR.

    Args:
        x: a sparse matrix, COO or CSR.

    Returns:
        The matrix in CSR, duplicates of a COO matrix added up.

    Raises:
        TypeError: if its layout is another one.

    >>> as_csr(torch.eye(2).to_sparse()).layout
    torch.sparse_csr
    """
    if x.layout == torch.sparse_csr:
        return x
    if x.layout != torch.sparse_coo:
        raise TypeError(f"sparse features must be CSR or COO, got {x.layout}.")
    x = x.coalesce()
    rows, columns = x.indices()
    return csr(row_pointer(rows, x.shape[0]), columns, x.values(), (x.shape[0], x.shape[1]))


def multiply(matrix: Tensor, dense: Float[Tensor, "columns dim"]) -> Float[Tensor, "rows dim"]:
    """A CSR matrix times a dense one, in the dtype of the sparse one: autocast has no sparse bfloat16 on a CPU.

    Args:
        matrix: CSR ``(rows, columns)``.
        dense: ``(columns, d)``, in which the product is differentiable.

    Returns:
        The product ``(rows, d)``.

    >>> multiply(as_csr(torch.eye(2).to_sparse()), torch.ones(2, 1)).tolist()
    [[1.0], [1.0]]
    """
    with torch.autocast(matrix.device.type, enabled=False):
        return torch.sparse.mm(matrix, dense.to(matrix.dtype))


def row_norms(x: Tensor) -> Float[Tensor, "rows 1"]:
    """Euclidean norm of each row, without overflow or underflow of the squares.

    Args:
        x: a CSR matrix ``(rows, columns)``.

    Returns:
        Norms ``(rows, 1)`` in its dtype.

    >>> row_norms(as_csr(torch.tensor([[3.0, 4.0], [0.0, 0.0]]).to_sparse())).tolist()
    [[5.0], [0.0]]
    """
    values = numerics.widen(x.values())
    if values.numel() == 0:
        return x.values().new_zeros(x.shape[0], 1)
    largest = values.abs().max()
    squares = numerics.safe_div(values, largest).square()
    sums = torch.segment_reduce(squares, "sum", lengths=x.crow_indices().diff(), axis=0)
    return numerics.narrow((sums.sqrt() * largest)[:, None], x.dtype)


def sparse_dropout(x: Tensor, p: float, *, training: bool) -> Tensor:
    """Dropout of the entries: as on the dense matrix, whose zeros stay zeros.

    Args:
        x: a CSR matrix.
        p: the probability that an entry is dropped.
        training: whether to drop at all.

    Returns:
        A CSR matrix of the same pattern.

    >>> sparse_dropout(as_csr(torch.eye(2).to_sparse()), 1.0, training=True).to_dense().sum().item()
    0.0
    """
    if not training or p == 0.0:
        return x
    values = functional.dropout(x.values(), p, training=True)
    return csr(x.crow_indices(), x.col_indices(), values, (x.shape[0], x.shape[1]))


def row_pointer(rows: Int[Tensor, " entries"], count: int) -> Int[Tensor, " rows_plus_1"]:
    """Where each row starts among entries sorted by row, and where the last one ends.

    Args:
        rows: the row of each entry, ascending.
        count: the number of rows.

    Returns:
        Positions ``(count + 1,)``.

    >>> row_pointer(torch.tensor([0, 2, 2]), 3).tolist()
    [0, 1, 1, 3]
    """
    return functional.pad(torch.bincount(rows, minlength=count).cumsum(0), (1, 0))
