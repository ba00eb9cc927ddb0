r"""A linear map of points that are given by their space parts: Hypformer eq. 9 without the point that goes in.

With t the time coordinate above x, the space part of the result is :math:`f = W_s x + w t + b`. A gradient g of it is
:math:`W_s^\top g + (w \cdot g)\, x / t` of x, since :math:`\nabla t = x / t`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd
from holonomy._shapes import Float
from holonomy.manifolds import hyperboloid
from holonomy.ops.lorentz.lifted import curvature_gradient, space_gradient, use_custom_backward


def lifted_linear(
    x: Float[Tensor, "*batch dim_in"],
    weight: Float[Tensor, "dim_out ambient_in"],
    bias: Float[Tensor, " dim_out"],
    curvature: Float[Tensor, "*one"],
    last: Float[Tensor, "*one"],
    *,
    relu: bool = False,
) -> Float[Tensor, "*batch ambient_out"]:
    """The point of curvature ``last`` above the map of the point of ``curvature`` above x."""
    # With ``relu`` x is its positive part, which may be taken in place: the caller does not read x again.
    # The compiler takes no tensor twice.
    last = last.view_as(last) if last is curvature else last
    tensors = (x, weight, bias, curvature, last)
    if not use_custom_backward(x.shape[:-1].numel(), *tensors):
        return lifted_linear_reference(*tensors, relu)
    out = _autograd.apply_function(_LiftedLinear, x.reshape(-1, x.shape[-1]), *tensors[1:], relu)
    return out.view(*x.shape[:-1], -1)


def lifted_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    curvature: Tensor,
    last: Tensor,
    relu: bool = False,  # noqa: FBT001, FBT002 - apply takes no keywords
) -> Tensor:
    """The same, of the same arguments, with the gradient that autograd derives."""
    x = x.relu() if relu else x
    # The product with the time is of rank one.
    of_time = functional.linear(hyperboloid.time(x, curvature).flatten(0, -2), weight[:, :1], bias)
    space = torch.addmm(of_time, x.flatten(0, -2), weight[:, 1:].t())
    return hyperboloid.lift(space.view(*x.shape[:-1], len(weight)), last)


class _LiftedLinear(torch.autograd.Function):
    """The same with its gradient in closed form, which makes no table of the points that go in."""

    # Of x only the positive part is kept: its own positive part is itself, and its gradient is zero where it is zero.

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weight, bias, curvature, last, ctx.relu = inputs
        if ctx.relu:
            x = x.relu() if torch.compiler.is_compiling() else x.relu_()
        time = hyperboloid.time(x, curvature)
        space = torch.addmm(bias, x, weight[:, 1:].t()).addcmul_(time, weight[:, 0].contiguous())
        out = hyperboloid.lift(space, last)
        ctx.save_for_backward(x, weight, bias, curvature, last, time, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, time, out = ctx.saved_tensors
        x, weight, _, curvature, last = inputs
        grad = grad_outputs[0]
        if _autograd.through_reference(grad) and not torch.compiler.is_compiling():
            arguments = (*inputs, ctx.relu)
            return _autograd.reference_gradients(lifted_linear_reference, arguments, grad, tuple(ctx.needs_input_grad))
        g = space_gradient(grad, out)
        on_time = torch.mv(g, weight[:, 0].contiguous())[:, None] / time
        grad_x = torch.mm(g, weight[:, 1:]).addcmul_(x, on_time)
        if ctx.relu:
            grad_x = torch.ops.aten.threshold_backward.grad_input(grad_x, x, 0, grad_input=grad_x)
        grad_weight = torch.cat([torch.mv(g.t(), time[:, 0])[:, None], torch.mm(g.t(), x)], 1)
        on_curvature = (on_time.sum() / (2 * curvature.square())).reshape(curvature.shape)
        on_last = curvature_gradient(grad, out, last).reshape(last.shape)
        return grad_x, grad_weight, g.sum(0), on_curvature, on_last, None
