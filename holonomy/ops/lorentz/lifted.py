r"""Maps that end on the hyperboloid, some rows at a time: time is made while its row is in the cache.

Each has its plain definition in :mod:`holonomy.manifolds.hyperboloid`, or beside it. With
:math:`t^2 = |s|^2 - 1/\kappa` a gradient :math:`(g_t, g_s)` of the point is :math:`g_s + g_t\, s / t` of its space part
and :math:`\sum g_t / (2 \kappa^2 t)` of the curvature. Second derivatives are those of the definition, at its price.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd, numerics
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.rows import portions

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "curvature_gradient",
    "lifted",
    "lifted_linear",
    "pays",
    "space_gradient",
    "time_of",
]

# Below, whole tensors stay in the cache, and the loop over parts does not pay.
_FEWEST_ROWS = 2048


def pays(x: Float[Tensor, "*batch dim"], rows: int) -> bool:
    """The rule by which a form in parts is chosen: 2048 rows, and :func:`holonomy._autograd.by_hand`.

    Args:
        x: what comes in.
        rows: how many there are to be taken apart.

    Returns:
        Whether it is.

    >>> pays(torch.ones(3000, 2), 3000), pays(torch.ones(30, 2), 30)
    (True, False)
    """
    return _autograd.by_hand(x) and rows >= _FEWEST_ROWS and x.numel() > 0


def time_of(space: Float[Tensor, "rows dim"], curvature: Float[Tensor, "*one"]) -> Float[Tensor, "rows 1"]:
    """The numbers of :func:`holonomy.manifolds.hyperboloid.time` at a fifth of its price, without gradients.

    Args:
        space: space parts ``(rows, d)``.
        curvature: one negative number.

    Returns:
        Times ``(rows, 1)``.

    >>> time_of(torch.tensor([[3e30, 0.0]]), torch.tensor([-1.0])).item() == torch.tensor(3e30).item()
    True
    """
    length = torch.linalg.vector_norm(space, dim=-1, keepdim=True)
    radius = curvature.reshape(()).neg().rsqrt().to(space.dtype)
    if space.device.type == "cpu" and bool(length.amax() < math.inf):
        return torch.hypot(length, radius)
    # Rows whose squares overflow are measured scaled down; rows whose squares underflow have the time of the origin.
    shrink = torch.finfo(space.dtype).max ** -0.75
    far = torch.linalg.vector_norm(space * shrink, dim=-1, keepdim=True) / shrink
    return numerics.hypot(torch.where(length.isfinite(), length, far), radius)


def space_gradient(
    grad: Float[Tensor, "rows ambient"], point: Float[Tensor, "rows ambient"]
) -> Float[Tensor, "rows dim"]:
    """The gradient of the space part alone, from that of time and space.

    Args:
        grad: gradients ``(rows, d + 1)`` of points.
        point: the points.

    Returns:
        ``(rows, d)``.

    >>> space_gradient(torch.tensor([[5.0, 1.0, 1.0]]), torch.tensor([[5.0, 3.0, 4.0]]))
    tensor([[4., 5.]])
    """
    return torch.addcmul(grad[:, 1:], point[:, 1:] / point[:, :1], grad[:, :1])


def curvature_gradient(
    grad: Float[Tensor, "rows ambient"], point: Float[Tensor, "rows ambient"], curvature: Float[Tensor, "*one"]
) -> Float[Tensor, "*one"]:
    """The gradient of the curvature through the time coordinates.

    Args:
        grad: gradients ``(rows, d + 1)`` of points.
        point: the points.
        curvature: theirs, one negative number.

    Returns:
        As the curvature.

    >>> curvature_gradient(torch.ones(1, 2), torch.tensor([[2.0, 0.0]]), torch.tensor([-0.25])).item()
    4.0
    """
    return (grad[:, 0] / point[:, 0]).sum() / (2 * curvature.square())


def lifted(space: Float[Tensor, "*batch dim"], curvature: Float[Tensor, "*one"]) -> Float[Tensor, "*batch ambient"]:
    """The point above each space part: :func:`holonomy.manifolds.hyperboloid.lift`, in parts where rows are many.

    Args:
        space: space parts ``(*batch, d)``.
        curvature: one negative number.

    Returns:
        Points ``(*batch, d + 1)``.

    >>> lifted(torch.tensor([0.0, 0.0]), torch.tensor([-4.0])).tolist()
    [0.5, 0.0, 0.0]
    """
    if not pays(space, space.numel() // space.shape[-1]):
        return hyperboloid.lift(space, curvature)
    return _autograd.apply_function(_Lifted, space, curvature)


def lifted_linear(
    x: Float[Tensor, "*batch inputs"],
    weight: Float[Tensor, "dim inputs"],
    bias: Float[Tensor, " dim"] | None,
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch ambient"]:
    """The points whose space parts are linear in the input (Hypformer eq. 9).

    Args:
        x: ``(*batch, inputs)``.
        weight: ``(d, inputs)``.
        bias: ``(d,)``, or None.
        curvature: one negative number.

    Returns:
        Points ``(*batch, d + 1)``.

    >>> lifted_linear(torch.tensor([2.0]), torch.tensor([[1.5], [2.0]]), None, torch.tensor([-0.0625]))[1:]
    tensor([3., 4.])
    """
    if not pays(x, x.numel() // max(x.shape[-1], 1)):
        return _plain_linear(x, weight, bias, curvature)
    return _autograd.apply_function(_LiftedLinear, x, weight, bias, curvature)


def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, curvature: Tensor) -> Tensor:
    return hyperboloid.lift(functional.linear(x, weight, bias), curvature)


class _Lifted(torch.autograd.Function):
    @staticmethod
    def forward(space: Tensor, curvature: Tensor) -> Tensor:
        rows = space.reshape(-1, space.shape[-1])
        out = rows.new_empty(rows.shape[0], rows.shape[1] + 1)
        for part in portions(rows):
            out[part, 1:] = rows[part]
            out[part, :1] = time_of(rows[part], curvature)
        return out.view(*space.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        space, curvature, output = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _autograd.by_definition(hyperboloid.lift, (space, curvature), grad_outputs[0], ctx.needs_input_grad)
        point, grad = (x.reshape(-1, output.shape[-1]) for x in (output, grad_outputs[0]))
        found = point.new_empty(point.shape[0], point.shape[1] - 1)
        for part in portions(point):
            found[part] = space_gradient(grad[part], point[part])
        return found.view(space.shape), curvature_gradient(grad, point, curvature)


class _LiftedLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, curvature: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(rows.shape[0], weight.shape[0] + 1)
        for part in portions(rows):
            space = out[part, 1:]
            if bias is None:
                torch.mm(rows[part], weight.t(), out=space)
            else:
                torch.addmm(bias, rows[part], weight.t(), out=space)
            out[part, :1] = time_of(space, curvature)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, curvature, output = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _autograd.by_definition(
                _plain_linear, (x, weight, bias, curvature), grad_outputs[0], ctx.needs_input_grad
            )
        point, grad = (t.reshape(-1, output.shape[-1]) for t in (output, grad_outputs[0]))
        rows = x.reshape(-1, x.shape[-1])
        of_x = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        of_weight, of_bias = torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
        for part in portions(rows):
            of_space = space_gradient(grad[part], point[part])
            of_weight.addmm_(of_space.t(), rows[part])
            if of_bias is not None:
                of_bias += of_space.sum(0)
            if of_x is not None:
                torch.mm(of_space, weight, out=of_x[part])
        of_x = None if of_x is None else of_x.view(x.shape)
        return of_x, of_weight, of_bias, curvature_gradient(grad, point, curvature)
