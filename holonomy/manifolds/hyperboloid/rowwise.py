r"""Float32 points as tables, row by row: in which chunks, and with which gradients.

:mod:`holonomy.manifolds.hyperboloid.geodesics` is right everywhere, at the price of some sixty passes over the points.
Where a formula cancels by no more than half of float64's digits a few products of rows are enough: that is most rows of
most tables, and the others go to geodesics. :mod:`~holonomy.manifolds.hyperboloid.rowwise_maps` and
:mod:`~holonomy.manifolds.hyperboloid.rowwise_transport` are such formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, numerics

# What is computed at once: a quarter of a MiB for each thread. A GPU wants more.
_BYTES_OF_A_THREAD, _BYTES_OF_A_GPU = 2**18, 2**26


def use_rowwise(*tables: Tensor) -> bool:
    """The rule: float32, and :func:`holonomy._autograd.supports_custom_backward`."""
    return tables[0].dtype == torch.float32 and _autograd.supports_custom_backward(*tables)


class RowwiseOp(NamedTuple):
    """A function of the rows of one or two tables and the curvature, as few products, with its gradients."""

    # Of the scale and the tables, what values and gradients share, and the rows (n, 1) that are left to the reference.
    numbers: Callable[..., tuple[Any, Tensor]]
    # Of the numbers, the scale and the tables, the results, float32; those of rows that are left may be anything.
    values: Callable[..., Tensor]
    # Of the numbers, the gradient by the results, the scale and the tables, what each row adds to the gradient by the
    # scale, (n, 1) in float64, then the gradients by the tables.
    gradients: Callable[..., tuple[Tensor, ...]]
    exact: Callable[..., Tensor]  # of the tables in float64 and the scale, the same by geodesics

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Of tables, which broadcast, and the scale; the second derivative is that of the reference."""
        *tables, scale = inputs
        shape = torch.broadcast_shapes(*(x.shape for x in tables))
        tables = [x if x.shape == shape else numerics.sums_saturate(x).expand(shape) for x in tables]
        *leading, dim = shape
        flat = (x.reshape(math.prod(leading), dim) for x in tables)
        result: Tensor = _autograd.apply_function(_Rowwise, self, scale, *flat)
        return result.reshape((*leading, *result.shape[1:]))

    def reference(self, scale: Tensor, *tables: Tensor) -> Tensor:
        """Of the scale and the tables, the same by geodesics."""
        return numerics.narrow(self.exact(*map(numerics.widen, tables), scale), tables[0].dtype)


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: RowwiseOp, scale: Tensor, *tables: Tensor) -> Tensor:
        ctx.save_for_backward(scale, *tables)
        numbers, beyond = operation.numbers(scale, *tables)
        ctx.operation, ctx.numbers, ctx.far = operation, numbers, beyond.squeeze(-1).nonzero().squeeze(-1)
        result = operation.values(numbers, scale, *tables)
        numerics.finite_(result)
        if ctx.far.numel():
            result[ctx.far] = operation.reference(scale, *(x[ctx.far] for x in tables))
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale, *tables = ctx.saved_tensors
        grad, operation, far = grad_outputs[0], ctx.operation, ctx.far
        if _autograd.through_reference(grad):
            wanted = tuple(ctx.needs_input_grad[1:])
            return None, *_autograd.reference_gradients(operation.reference, (scale, *tables), grad, wanted)
        rates, *gradients = operation.gradients(ctx.numbers, grad, scale, *tables)
        for found in (rates, *gradients):
            numerics.finite_(found)
        rates[far] = 0.0
        on_scale = numerics.total(rates)
        if far.numel():
            rows = (scale, *(x[far] for x in tables))
            more, *exact = _autograd.reference_gradients(operation.reference, rows, grad[far], (True,) * len(rows))
            on_scale = on_scale + more
            for gradient, of_rows in zip(gradients, exact, strict=True):
                gradient[far] = of_rows
        return None, None if on_scale is None else numerics.finite(on_scale), *gradients


def rows_at_once(x: Tensor, width: int, dtype: torch.dtype | None = None) -> int:
    """How many rows are computed at once: of 64 channels 1024 float32 ones for each thread of a CPU."""
    on_cpu = x.device.type == "cpu"
    size = _BYTES_OF_A_THREAD * torch.get_num_threads() if on_cpu else _BYTES_OF_A_GPU
    return max(256, size // (max(width, 1) * (dtype or x.dtype).itemsize))


def row_chunks(x: Tensor) -> Iterator[slice]:
    """Rows of a table in chunks that stay in the cache in float64."""
    size = rows_at_once(x, x.shape[1], torch.float64)
    for start in range(0, x.shape[0], size):
        yield slice(start, start + size)


class Between(NamedTuple):
    r"""Of two points in each row ``(n, 1)``, float64 and in units of the radius."""

    x_time: Tensor  # time coordinate of x
    y_time: Tensor  # that of y
    rise: Tensor  # the first minus the second
    z: Tensor  # cosh D - 1 of their distance D
    sinh: Tensor  # sinh D
    rate: Tensor  # what z gains as all space parts grow, by the logarithm of their scale


def between(scale: Tensor, x: Tensor, y: Tensor) -> tuple[Between, Tensor]:
    r"""Times and :math:`\cosh D - 1` of the rows.

    With d = x - y and the difference of the times from that of the squares,

    .. math::
        z = \cosh D - 1 = \tfrac12 \big(|d|^2 - (x_t - y_t)^2\big), \qquad x_t - y_t = \frac{d \cdot (x + y)}{x_t + y_t}
    """
    products = x.new_empty((4, x.shape[0], 1), dtype=torch.float64)
    ones = products.new_ones(x.shape[1], 1)
    for rows in row_chunks(x):
        a, b = x[rows].double(), y[rows].double()
        gap, total = a - b, a + b
        # A matrix product is the fastest sum over short rows.
        for product, u, v in zip(products, (a, b, total, gap), (a, b, gap, gap), strict=True):
            torch.mm(u.mul_(v), ones, out=product[rows])
        del a, b, total  # the next chunk is written to this memory, which is in the cache
    x_square, y_square, product, gap_square = (products * scale.square()).unbind()
    x_time, y_time = (x_square + 1).sqrt_(), (y_square + 1).sqrt_()
    rise = product / (x_time + y_time)
    z = (gap_square - rise.square()) / 2
    kept = z >= numerics.PRODUCT_NEAR * gap_square
    z = z.clamp(min=0)
    rate = 2 * z - rise.square() / (x_time * y_time)
    return Between(x_time, y_time, rise, z, (z * (z + 2)).sqrt(), rate), ~kept
