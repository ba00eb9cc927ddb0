r"""The layer or RMS normalisation of a Lorentzian midpoint, from points to points, without the midpoint.

The midpoint of x and :math:`w y` is :math:`z/\nu` in its space part, with :math:`z = x_s + w y_s`,
:math:`\nu^2 = c\,(T^2 - |z|^2)`, :math:`T = x_t + w y_t` and c minus the curvature. Layer normalisation undoes the
division, but for what it adds to the variance, which becomes a number of the row:

.. math::
    \mathrm{LN}_\epsilon(z/\nu) = \frac{z - \bar z}{\sqrt{\operatorname{var} z + \epsilon \nu^2}}, \qquad
    |z|^2 = d\,(\operatorname{var} z + \bar z^2) .

The difference :math:`T^2 - |z|^2` is off by rounding of :math:`|z|^2`, which times :math:`\epsilon` is nothing beside
the variance as long as :math:`\epsilon c d` is at most about one; so float32 points need no float64.

With g the gradient of the result's space part, :math:`r = (\operatorname{var} z + \epsilon \nu^2)^{-1/2}`,
:math:`\hat z = r (z - \bar z)` and :math:`a = \sum_j g_j \gamma_j \hat z_j`, those of z, T and :math:`\nu^2` are

.. math::
    \nabla_{\nu^2} = -\tfrac{\epsilon}{2} r^2 a, \qquad \nabla_T = 2 c\, T\, \nabla_{\nu^2}, \qquad
    \nabla_z = r \Bigl(\gamma g - \tfrac{1}{d} \sum_j \gamma_j g_j - \tfrac{a}{d} \hat z\Bigr) - 2 c \nabla_{\nu^2} z .

RMS normalisation subtracts no mean: :math:`\bar z` and the mean of :math:`\gamma g` are zero in these formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Float
from holonomy.manifolds import hyperboloid
from holonomy.ops.lorentz.lifted import chunks, curvature_gradient, use_chunked


def residual_norm(
    x: Float[Tensor, "*batch ambient"],
    y: Float[Tensor, "*batch ambient"],
    curvature: Float[Tensor, "*one"],
    gain: Float[Tensor, " dim"],
    shift: Float[Tensor, " dim"],
    last: Float[Tensor, "*one"],
    *,
    weight: float,
    eps: float,
    centered: bool,
) -> Float[Tensor, "*batch ambient"]:
    """``gain * LN(midpoint of x and weight * y) + shift``, lifted to the curvature ``last``; RMS where not centered."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    x, y, least = _squarable(x.to(wide), y.to(wide), weight)
    tensors = (x, y, least, curvature.to(wide), gain.to(wide), shift.to(wide), last)
    if use_chunked(x, x.shape[:-1].numel()) and _autograd.supports_custom_backward(*tensors) and dtype == wide:
        rows = (z.reshape(-1, z.shape[-1]) for z in tensors[:3])
        return _autograd.apply_function(_ResidualNorm, *rows, *tensors[3:], weight, eps, centered).view(x.shape)
    return residual_norm_reference(*tensors, weight, eps, centered).to(dtype)


def _squarable(x: Tensor, y: Tensor, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Both multiplied by numbers of their rows, which cancel, for squares to fit; and the least nu^2, ``(..., 1)``."""
    longest = torch.maximum(x[..., :1], y[..., :1]).detach()
    # Where the points meet; of shortened rows it is a number above zero, below their rounding.
    least = torch.full_like(longest, (1 + weight) ** 2)
    if checks.costs_nothing_to_read(longest) and not bool((longest > numerics.LONG).any()):
        return x, y, least
    factor = numerics.squarable(longest)
    return x * factor, y * factor, least.masked_fill(factor < 1, torch.finfo(x.dtype).eps ** 2)


def residual_norm_reference(
    x: Float[Tensor, "*batch ambient"],
    y: Float[Tensor, "*batch ambient"],
    least: Float[Tensor, "*batch 1"],
    curvature: Float[Tensor, "*one"],
    gain: Float[Tensor, " dim"],
    shift: Float[Tensor, " dim"],
    last: Float[Tensor, "*one"],
    weight: float,
    eps: float,
    centered: bool,  # noqa: FBT001 - apply takes no keywords
) -> Float[Tensor, "*batch ambient"]:
    """The same of points whose squares fit, with the gradient that autograd derives."""
    z = torch.add(x[..., 1:], y[..., 1:], alpha=weight)
    time = torch.add(x[..., :1], y[..., :1], alpha=weight)
    mean = z.mean(-1, keepdim=True) if centered else torch.zeros_like(time)
    z = z - mean
    row = _normalised(mean, z.square().mean(-1, keepdim=True), time, least, -curvature.reshape(()), z.shape[-1], eps)
    return hyperboloid.lift(torch.addcmul(shift, z * row.root, gain), last)


class _Row(NamedTuple):
    """Numbers ``(..., 1)`` of each row of z."""

    mean: Tensor
    time: Tensor  # T
    square: Tensor  # nu^2 as the difference of squares
    root: Tensor  # one over the deviation


def _normalised(mean: Tensor, variance: Tensor, time: Tensor, least: Tensor, c: Tensor, dim: int, eps: float) -> _Row:
    square = c * torch.sub(time * time, torch.addcmul(variance, mean, mean), alpha=dim)
    return _Row(mean, time, square, torch.add(variance, torch.maximum(square, least), alpha=eps).rsqrt())


class _ResidualNorm(torch.autograd.Function):
    """The same some rows at a time, with its gradient in closed form: see the head of this file."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, weight, eps, centered = inputs
        x, y, least, curvature, gain, shift, last = tensors
        normal, mean, length = x.new_empty(len(x), len(gain)), torch.zeros_like(least), torch.empty_like(least)
        for rows in chunks(x):
            z = torch.add(x[rows, 1:], y[rows, 1:], alpha=weight, out=normal[rows])
            if centered:
                z.sub_(torch.mean(z, -1, keepdim=True, out=mean[rows]))
            torch.linalg.vector_norm(z, dim=-1, keepdim=True, out=length[rows])
        time = torch.add(x[:, :1], y[:, :1], alpha=weight)
        row = _normalised(mean, length.square() / len(gain), time, least, -curvature.reshape(()), len(gain), eps)
        out = torch.empty_like(x)
        for rows in chunks(x):
            space = out[rows, 1:]
            torch.addcmul(shift, normal[rows].mul_(row.root[rows]), gain, out=space)
            out[rows, :1] = hyperboloid.time(space, last)
        ctx.weight, ctx.eps, ctx.centered = weight, eps, centered
        ctx.save_for_backward(*tensors, out, normal, *row)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, out, normal, row = saved[:7], saved[7], saved[8], _Row(*saved[9:])
        _, _, least, curvature, gain, _, last = inputs
        (grad,), weight, eps = grad_outputs, ctx.weight, ctx.eps
        if _autograd.through_reference(grad):
            given = (*inputs, weight, eps, ctx.centered)
            return _autograd.reference_gradients(residual_norm_reference, given, grad, tuple(ctx.needs_input_grad))
        c, share = -curvature.reshape(()), 1 / len(gain)
        # The gradients by nu^2, T and z - but for its first terms - are a times these numbers.
        on_square = row.root.square().masked_fill_(row.square <= least, 0.0).mul_(-eps / 2)
        pull = on_square * (2 * c)
        along, level = torch.add(pull / row.root, row.root, alpha=share), pull * row.mean
        # Results are not as long as to lose this quotient.
        on_time = grad[:, :1] / out[:, :1]
        grad_x, grad_gain, grad_shift = torch.empty_like(out), torch.zeros_like(gain), torch.zeros_like(gain)
        a, mean = torch.empty_like(level), torch.zeros_like(level)
        for rows in chunks(out):
            z = normal[rows]
            g = torch.addcmul(grad[rows, 1:], out[rows, 1:], on_time[rows])
            product = g * z
            grad_gain.add_(product.sum(0))
            grad_shift.add_(g.sum(0))
            torch.mv(product, gain, out=a[rows, 0])
            if ctx.centered:
                torch.mv(g, gain, out=mean[rows, 0])
            # One column an operation: with two of them torch's loops are four times slower.
            g.mul_(gain).mul_(row.root[rows]).addcmul_(z, a[rows] * along[rows], value=-1)
            of_mean = (mean[rows] * row.root[rows]).mul_(share).addcmul_(a[rows], level[rows])
            torch.sub(g, of_mean, out=grad_x[rows, 1:])
        grad_x[:, :1] = a * (pull * row.time)
        on_curvature = -((a * on_square * row.square).sum() / c).reshape(curvature.shape)
        on_last = curvature_gradient(grad, out, last).reshape(last.shape)
        grad_y = grad_x if weight == 1 else grad_x * weight
        return grad_x, grad_y, None, on_curvature, grad_gain, grad_shift, on_last, None, None, None
