r"""The midpoint of points, from points to points, in chunks of rows.

It reads the space part of its input alone, and writes the gradient of points, with zeros for time. The direct formula
here loses digits far out; chunks that hold such a row are left to the reference, which takes one number to be read
back, so that this form is for the CPU.

With :math:`c = |\kappa|`, :math:`\delta = x - y`, :math:`\theta = x_t - y_t` the midpoint is
:math:`m = (x + \epsilon y)/\nu`, :math:`\nu^2 = (1+\epsilon)^2 + \epsilon q`, :math:`q = c(|\delta|^2 - \theta^2)`,
in float64, which leaves float32 digits where :math:`q \ge` 1e-8 :math:`c|\delta|^2`.
From a gradient g of its space part, with :math:`\sigma = \epsilon c\, (g \cdot m) / \nu^2`,

.. math::
    g_x = g/\nu - \sigma (\delta - \theta x / x_t), \quad
    g_y = \epsilon g/\nu + \sigma (\delta - \theta y / y_t), \quad
    g_c = -\tfrac{1}{2c} \sum \tfrac{\sigma}{c} \bigl(q - \theta^2 / (x_t y_t)\bigr) .
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, numerics
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.rows import row_chunks
from holonomy.ops.lorentz.lifted import curvature_gradient, space_gradient

__all__ = ["LiftedMidpoint"]


class _Pair(NamedTuple):
    """Rows of x and y, their times, the difference of both, and q; all float64."""

    x: Tensor
    y: Tensor
    x_time: Tensor
    y_time: Tensor
    difference: Tensor
    gap: Tensor
    chord: Tensor

    def inverse(self, epsilon: float) -> Tensor:
        """One over nu."""
        return self.chord.mul(epsilon).add_((1 + epsilon) ** 2).rsqrt_()

    def middle(self, epsilon: float) -> Tensor:
        """Space parts of the midpoints."""
        return torch.add(self.x, self.y, alpha=epsilon).mul_(self.inverse(epsilon))

    def pull_back(self, g: Tensor, c: Tensor, epsilon: float, of_x: Tensor, of_y: Tensor) -> Tensor:
        """Write the gradients of x and y, from the one of the space part of the midpoint; return that of -c."""
        inverse, dim = self.inverse(epsilon), g.shape[1]
        pull = (g * self.middle(epsilon)).sum(-1, keepdim=True).mul_(inverse.square()).mul_(epsilon)  # sigma / c
        bend = pull * c
        turned = self.difference * bend
        bend.mul_(self.gap)
        for into, rows, time, weight, sign in (
            (of_x, self.x, self.x_time, 1.0, -1), (of_y, self.y, self.y_time, epsilon, 1)
        ):  # fmt: skip
            space = (g * (inverse * weight)).add_(turned, alpha=sign).addcmul_(rows, bend / time, value=-sign)
            into[:, into.shape[1] - dim :] = space
            into[:, : into.shape[1] - dim] = 0
        lag = self.chord - self.gap.square() / (self.x_time * self.y_time)
        return (pull * lag).sum() / (2 * c)


def _pair(x: Tensor, y: Tensor, c: Tensor) -> _Pair | None:
    """None where rounding, which a far point stretches, might leave less than half of the digits."""
    most = numerics.ROW_WIDEST if x.dtype == torch.float32 else torch.finfo(x.dtype).eps ** -0.25
    x, y, radius = x.double(), y.double(), c.rsqrt()
    x_time, y_time = (torch.hypot(torch.linalg.vector_norm(z, dim=-1, keepdim=True), radius) for z in (x, y))
    difference = x - y
    gap = (difference * (x + y)).sum(-1, keepdim=True) / (x_time + y_time)
    square = torch.linalg.vector_norm(difference, dim=-1, keepdim=True).square_()
    chord = (square - gap.square()).clamp_(min=0)
    ordinary = torch.maximum(x_time.amax(), y_time.amax()) <= most * radius
    if not bool(ordinary & (chord >= numerics.PRODUCT_NEAR * square).all()):
        return None
    return _Pair(x, y, x_time, y_time, difference, gap, chord * c)


def _positive(curvature: Tensor) -> Tensor:
    """Minus the curvature, in float64 and without axes."""
    return curvature.reshape(()).neg().double()


class LiftedMidpoint(torch.autograd.Function):
    """The midpoint of x and epsilon times y (see :func:`holonomy.layers.hyperbolic.midpoint.midpoint`), lifted."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, curvature: Tensor, epsilon: float, definition: Callable[..., Tensor]) -> Tensor:
        """Midpoints."""
        out, dim, c = torch.empty_like(x), x.shape[1] - 1, _positive(curvature)
        for part in row_chunks(x, torch.float64):
            pair = _pair(x[part, 1:], y[part, -dim:], c)
            if pair is None:
                out[part] = definition(x[part], y[part], curvature, epsilon)
            else:
                out[part, 1:] = pair.middle(epsilon)
                out[part, :1] = hyperboloid.time(out[part, 1:], curvature)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep inputs and results."""
        *tensors, ctx.epsilon, ctx.definition = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate."""
        x, y, curvature, out = ctx.saved_tensors
        grad, wanted = grad_outputs[0], ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            return *_autograd.by_definition(ctx.definition, (x, y, curvature, ctx.epsilon), grad, wanted), None
        c = _positive(curvature)
        of_x, of_y, of_curvature = torch.empty_like(x), torch.empty_like(y), torch.zeros_like(curvature)
        for part in row_chunks(x, torch.float64):
            pair = _pair(x[part, 1:], y[part, 1 - x.shape[1] :], c)
            if pair is None:
                rows = (x[part], y[part], curvature, ctx.epsilon)
                of_x[part], of_y[part], more, _ = _autograd.by_definition(
                    ctx.definition, rows, grad[part], (True, True, True, False)
                )
                of_curvature += more
                continue
            g = space_gradient(grad[part], out[part])
            of_curvature += pair.pull_back(g, c, ctx.epsilon, of_x[part], of_y[part])
            of_curvature += curvature_gradient(grad[part], out[part], curvature)
        return of_x, of_y, of_curvature, None, None
