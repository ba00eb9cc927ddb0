r"""Two HTCs with ReLU between them, from points to points, some rows at a time (Hypformer eqs. 9, 13, section 4.6).

.. math:: h = \mathrm{ReLU}(x W_1^\top + b_1), \qquad t = \sqrt{|h|^2 - 1/\kappa}, \qquad
    s = t\, w^\top + h W_2^\top + b_2

and s is lifted. The hidden points are never put together: h and t are kept apart, and the row of the second weight that
belongs to time, w, is a product of rank one. h is kept for the way back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd
from holonomy._autograd import apply_function
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.rows import portions
from holonomy.ops.lorentz.lifted import curvature_gradient, pays, space_gradient, time_of

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["lifted_feedforward"]


def lifted_feedforward(
    x: Float[Tensor, "*batch ambient"],
    first: Float[Tensor, "hidden ambient"],
    first_bias: Float[Tensor, " hidden"],
    second: Float[Tensor, "dim hidden_plus_1"],
    second_bias: Float[Tensor, " dim"],
    curvature_hidden: Float[Tensor, "*one"],
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch ambient_out"]:
    """HTC, ReLU of the space part, HTC.

    In parts, by the rule of :func:`~holonomy.ops.lorentz.lifted.pays`; else one after the other.

    Args:
        x: points ``(*batch, d + 1)``.
        first: ``(hidden, d + 1)``, with its change of curvature.
        first_bias: ``(hidden,)``.
        second: ``(d', hidden + 1)``, with its change of curvature.
        second_bias: ``(d',)``.
        curvature_hidden: of the hidden points, one negative number.
        curvature: of the result.

    Returns:
        Points ``(*batch, d' + 1)``.

    >>> x, one = torch.tensor([[1.25, 0.75]]), torch.tensor([-1.0])
    >>> first, second = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    >>> lifted_feedforward(x, first, torch.zeros(1), second, torch.zeros(1), one, one)[:, 1:]
    tensor([[1.2500]])
    """
    inputs = (x, first, first_bias, second, second_bias, curvature_hidden, curvature)
    if not pays(x, x.numel() // x.shape[-1]):
        return _plain_feedforward(*inputs)
    return apply_function(_LiftedFeedForward, x.reshape(-1, x.shape[-1]), *inputs[1:])[0].view(*x.shape[:-1], -1)


def _plain_feedforward(
    x: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor, hidden: Tensor, last: Tensor
) -> Tensor:
    middle = hyperboloid.lift(torch.relu(functional.linear(x, first, first_bias)), hidden)
    return hyperboloid.lift(functional.linear(middle, second, second_bias), last)


class _LiftedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor, hidden: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        middle, time = x.new_empty(x.shape[0], first.shape[0]), x.new_empty(x.shape[0], 1)
        out = x.new_empty(x.shape[0], second.shape[0] + 1)
        of_time, of_space = second[:, 0], second[:, 1:].t()
        for part in portions(middle):
            h = torch.addmm(first_bias, x[part], first.t(), out=middle[part]).clamp_(min=0)
            time[part] = time_of(h, hidden)
            space = torch.addmm(second_bias, h, of_space, out=out[part, 1:]).addcmul_(time[part], of_time)
            out[part, :1] = time_of(space, last)
        return out, middle, time

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, middle, time = ctx.saved_tensors
        x, first, _, second, _, hidden, last = inputs
        grad = grad_outputs[0]
        if torch.is_grad_enabled():
            return _autograd.by_definition(_plain_feedforward, tuple(inputs), grad, ctx.needs_input_grad)
        of_x = torch.empty_like(x)
        of_first, of_first_bias, of_second, of_second_bias, of_hidden = (torch.zeros_like(t) for t in inputs[1:6])
        to_time, to_space = second[:, :1], second[:, 1:]
        for part in portions(middle):
            h, g = middle[part], space_gradient(grad[part], out[part])
            of_second[:, 1:].addmm_(g.t(), h)
            of_second[:, :1].addmm_(g.t(), time[part])
            of_second_bias += g.sum(0)
            slope = (g @ to_time).div_(time[part])
            of_hidden += slope.sum()
            # Through the root, which is zero where ReLU is, and through ReLU.
            of_h = torch.ops.aten.threshold_backward(g @ to_space, h, 0).addcmul_(h, slope)
            of_first.addmm_(of_h.t(), x[part])
            of_first_bias += of_h.sum(0)
            torch.mm(of_h, first, out=of_x[part])
        of_hidden /= 2 * hidden.square()
        of_last = curvature_gradient(grad, out, last)
        return of_x, of_first, of_first_bias, of_second, of_second_bias, of_hidden, of_last
