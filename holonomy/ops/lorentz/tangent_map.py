r"""A linear map of tangent vectors at the origin, from points to points, without the vectors.

In units of the two radii, with :math:`z = \sqrt{c_1}\, |x_s|` and :math:`\ell = \sqrt{c_2}\, |u|`,

.. math::
    u = f(z)\, W x_s + b, \quad f(z) = \frac{\operatorname{arsinh} z}{z}, \qquad
    y = \Big(\frac{\cosh \ell}{\sqrt{c_2}},\; h(\ell)\, u\Big), \quad h(\ell) = \frac{\sinh \ell}{\ell} .

Both factors are numbers of a row: what is left are two passes beside the product. With :math:`f' = z F`,
:math:`h' = \ell H` and g the gradient of y,

.. math::
    \nabla_u = h\, g_s + \big(c_2 H\, g_s \cdot u + \sqrt{c_2}\, h\, g_t\big)\, u, \qquad
    \nabla_{x_s} = f\, W^\top \nabla_u + c_1 F\, (x_s \cdot W^\top \nabla_u)\, x_s .

Nothing cancels in them, so float32 rows need float64 for their numbers only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Float
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.rowwise import use_rowwise
from holonomy.manifolds.hyperboloid.rowwise_maps import WIDEST_RAPIDITY, Factor, exponential_factor, logarithm_factor
from holonomy.ops.lorentz.lifted import chunks, scale_of


def tangent_map(
    x: Float[Tensor, "*batch ambient"],
    weight: Float[Tensor, "out dim"],
    bias: Float[Tensor, " out"] | None,
    source: Float[Tensor, "*one"],
    target: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch out_plus_1"]:
    r""":math:`\exp_o(W \log_o(x) + b)`, from points of curvature ``source`` to points of curvature ``target``."""
    shift = weight.new_zeros(len(weight)) if bias is None else bias
    if not (use_rowwise(x, weight, shift) and x.numel() and checks.costs_nothing_to_read(x)):
        return tangent_map_reference(x, weight, bias, source, target)
    rows = x.reshape(-1, x.shape[-1])
    made: Tensor = _autograd.apply_function(_TangentMap, rows, weight, shift, source, target)
    return made.view(*x.shape[:-1], made.shape[-1])


def tangent_map_reference(x: Tensor, weight: Tensor, bias: Tensor | None, source: Tensor, target: Tensor) -> Tensor:
    """The reference of :func:`tangent_map`, with the same arguments."""
    return exponential(functional.linear(hyperboloid.logmap0(x, source)[..., 1:], weight, bias), target)


def exponential(tangent: Float[Tensor, "*batch dim"], kappa: Float[Tensor, "*one"]) -> Float[Tensor, "*batch ambient"]:
    """The points that tangent vectors at the origin lead to, of which a layer made the vectors."""
    # Near the end of the range the gradient, times what the layer multiplied, would not fit.
    tangent = numerics.gradient_within(tangent, torch.finfo(tangent.dtype).max ** 0.5)
    return hyperboloid.expmap0(functional.pad(tangent, (1, 0)), kappa)


class _TangentMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, source: Tensor, target: Tensor) -> Tensor:
        before, after = scale_of(source), scale_of(target)
        tangent, out = x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight) + 1)
        sizes, lengths = x.new_empty(2, len(x), 1).unbind()
        torch.linalg.vector_norm(x[:, 1:], dim=-1, keepdim=True, out=sizes)
        near = logarithm_factor(sizes.double() * before)
        factor = near.value.float()
        for rows in chunks(x):
            u = torch.mm(x[rows, 1:], weight.t(), out=tangent[rows]).mul_(factor[rows]).add_(bias)
            torch.linalg.vector_norm(u, dim=-1, keepdim=True, out=lengths[rows])
        far = exponential_factor(lengths.double() * after)
        torch.mul(tangent, far.value.float(), out=out[:, 1:])
        out[:, :1] = far.value.mul(lengths).square().add(1 / after.square()).sqrt()
        # Not where numbers of a row leave the range of float32, nor beside nan.
        ctx.plain = bool((sizes.amax() <= numerics.ROW_WIDEST) & (lengths.amax() * after <= WIDEST_RAPIDITY))
        inputs = x, weight, bias, source, target
        if not ctx.plain:
            ctx.save_for_backward(*inputs)
            return tangent_map_reference(*inputs)
        ctx.save_for_backward(*inputs, tangent, *near, *far)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, source, target, *found = ctx.saved_tensors
        grad, given = grad_outputs[0], (x, weight, bias, source, target)
        reference_gradients = partial(
            _autograd.reference_gradients, tangent_map_reference, given, grad, tuple(ctx.needs_input_grad)
        )
        if _autograd.through_reference(grad) or not ctx.plain:
            return reference_gradients()
        before, after = scale_of(source), scale_of(target)
        tangent, near, far = found[0], Factor(*found[1:4]), Factor(*found[4:])
        along, back = grad.new_empty(2, len(x), 1).unbind()
        pulled, grad_x = torch.zeros_like(weight), torch.empty_like(x)
        shifted = torch.zeros_like(bias)
        on_time = grad[:, :1].double()
        factor, stretch, slope = near.value.float(), far.value.float(), (far.slope * after.square()).float()
        of_time, pull = (on_time * far.value * after).float(), (near.slope * before.square()).float()
        grad_x[:, 0] = 0.0
        for rows in chunks(x):
            u, g, place, on_place = tangent[rows], grad[rows, 1:], x[rows, 1:], grad_x[rows, 1:]
            torch.sum(g * u, dim=-1, keepdim=True, out=along[rows])
            radial = torch.addcmul(of_time[rows], along[rows], slope[rows])
            on_u = (g * stretch[rows]).addcmul_(u, radial)
            shifted += on_u.sum(0)
            on_u.mul_(factor[rows])
            torch.mm(on_u, weight, out=on_place)
            pulled.addmm_(on_u.t(), place)
            torch.sum(on_place * place, dim=-1, keepdim=True, out=back[rows])
            back[rows] /= factor[rows]
            on_place.addcmul_(place, back[rows] * pull[rows])
        # Gradients near the end of the range, whose products with points leave it.
        if not all(bool(found.isfinite().all()) for found in (back, pulled, shifted)):
            return reference_gradients()
        on_before = (back * near.slope * near.square).sum() / before
        turned = along * far.slope * far.square
        on_after = (
            turned + on_time * (far.square * far.value - (1 + far.square * far.value.square()).sqrt()) / after
        ).sum() / after
        on_source = (on_before / (-2 * before)).to(source.dtype).reshape(source.shape)
        on_target = (on_after / (-2 * after)).to(target.dtype).reshape(target.shape)
        return grad_x, pulled, shifted, on_source, on_target
