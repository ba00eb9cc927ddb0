r"""Sparse matrices from outside: features that are mostly zeros, as torch CSR or COO tensors.

Inside the library a sparse matrix is CSR, whose product with a dense one is five to ten times faster than
that of COO on a CPU. Nothing here is differentiable in the sparse matrix itself.

The gradient in the dense factor is a product with the transpose, and putting the entries into its order costs more than
the product. That order is found once for a matrix that comes in and kept as long as the tensor object lives: features
that are the same tensor in every epoch are sorted once. Only the order is kept, never the values, which may change; if
the indices are changed in place, it is found anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Float, Int


def is_sparse(x: Tensor) -> bool:
    """Whether a tensor is held sparsely, in any of torch's layouts."""
    return x.layout != torch.strided


def csr(
    row_pointer: Int[Tensor, " rows_plus_1"],
    columns: Int[Tensor, " entries"],
    values: Float[Tensor, " entries"],
    size: tuple[int, int],
) -> Tensor:
    """A CSR matrix of its three arrays, unchecked, without torch's notice that the layout is in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        # The device is said, for torch takes its default one and not that of the arrays.
        return torch.sparse_csr_tensor(row_pointer, columns, values, size, device=values.device, check_invariants=False)


class _Transposition:
    """How the entries of a CSR matrix are ordered in its transpose, found when it is first asked for."""

    def __init__(self) -> None:
        self.found: tuple[Tensor, Tensor, Tensor] | None = None

    def apply(self, matrix: Tensor) -> Tensor:
        """The transpose of a matrix of this pattern, in CSR."""
        height, width = matrix.shape
        if self.found is None:
            columns = matrix.col_indices()
            order = torch.argsort(columns, stable=True)
            rows = torch.arange(height, device=columns.device).repeat_interleave(matrix.crow_indices().diff())
            self.found = row_pointer(columns, width), rows[order], order
        pointer, columns, order = self.found
        return csr(pointer, columns, matrix.values().index_select(0, order), (width, height))


# Of each matrix, the state of its indices, the order of its transpose, and copies of the indices.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _indices(x: Tensor) -> tuple[Tensor, ...]:
    return (x.crow_indices(), x.col_indices()) if x.layout == torch.sparse_csr else (x._indices(),)  # noqa: SLF001


def as_csr(x: Tensor) -> Tensor:
    """The same matrix in CSR, detached."""
    if x.layout not in {torch.sparse_csr, torch.sparse_coo}:
        raise TypeError(f"sparse features must be CSR or COO, got {x.layout}.")
    matrix = x.detach()
    if x.layout == torch.sparse_coo:
        matrix = matrix.coalesce()
        rows, columns = matrix.indices()
        matrix = csr(row_pointer(rows, x.shape[0]), columns, matrix.values(), (x.shape[0], x.shape[1]))
    # Tensors made in inference mode have no count of their changes.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not x.is_inference():
        parts = _indices(x)
        state = tuple((part.data_ptr(), part._version, part.shape) for part in parts)
        known = _known.get(x)
        if known is None or known[0] != state or any(map(checks.rewritten, parts, known[2])):
            known = _known[x] = state, _Transposition(), tuple(part.clone() for part in parts)
        _known[matrix] = known
    return matrix


def multiply(
    matrix: Tensor, dense: Float[Tensor, "columns dim"], transpose: Callable[[], Tensor] | None = None
) -> Float[Tensor, "rows dim"]:
    """A CSR matrix times a dense one, in the dtype of the sparse one: autocast has no sparse bfloat16 on a CPU."""
    dense = dense.to(matrix.dtype)
    if torch.compiler.is_compiling():
        return _product(matrix, dense, torch.sparse.mm)
    return _autograd.apply_function(_Multiply, dense, matrix, transpose or partial(_transposed, matrix))


def _product(matrix: Tensor, dense: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    # On a CPU there are sparse products of float32 and float64 only.
    wide = torch.promote_types(matrix.dtype, torch.float32)
    with torch.autocast(matrix.device.type, enabled=False):
        return product(matrix.to(wide), dense.to(wide)).to(matrix.dtype)


def _written(matrix: Tensor, dense: Tensor) -> Tensor:
    """The product, written once: ``torch.sparse.mm`` first fills its result with zeros, and copies them."""
    if _autograd.batched(dense):
        return torch.sparse.mm(matrix, dense)
    result = dense.new_empty(matrix.shape[0], dense.shape[1])
    return torch.addmm(result, matrix, dense, beta=0, out=result)  # with beta = 0 what it holds is not read


def _transposed(matrix: Tensor) -> Tensor:
    kept = _known.get(matrix)
    return (kept[1] if kept else _Transposition()).apply(matrix)


class _Multiply(torch.autograd.Function):
    """A constant sparse matrix times a dense one."""

    @staticmethod
    def forward(dense: Tensor, matrix: Tensor, transpose: Callable[[], Tensor]) -> Tensor:
        del transpose
        return _product(matrix, dense, _written)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Callable[[], Tensor]], output: Tensor) -> None:
        del output
        _, ctx.matrix, ctx.transpose = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        matrix = ctx.matrix
        return multiply(ctx.transpose(), grad_outputs[0], lambda: matrix), None, None


def row_norms(x: Tensor) -> Float[Tensor, "rows 1"]:
    """Euclidean norm of each row, without overflow or underflow of the squares."""
    values = numerics.widen(x.values())
    if values.numel() == 0:
        return x.values().new_zeros(x.shape[0], 1)
    largest = values.abs().max()
    squares = numerics.safe_div(values, largest).square()
    sums = torch.segment_reduce(squares, "sum", lengths=x.crow_indices().diff(), axis=0)
    return numerics.narrow((sums.sqrt() * largest)[:, None], x.dtype)


def sparse_dropout(x: Tensor, p: float, *, training: bool) -> Tensor:
    """Dropout of the entries: as on the dense matrix, whose zeros stay zeros."""
    if not training or p == 0.0:
        return x
    values = functional.dropout(x.values(), p, training=True)
    dropped = csr(x.crow_indices(), x.col_indices(), values, (x.shape[0], x.shape[1]))
    if x in _known:
        _known[dropped] = _known[x]
    return dropped


def row_pointer(rows: Int[Tensor, " entries"], count: int) -> Int[Tensor, " rows_plus_1"]:
    """Where each row starts among entries sorted by row, and where the last one ends."""
    return functional.pad(torch.bincount(rows, minlength=count).cumsum(0), (1, 0))
