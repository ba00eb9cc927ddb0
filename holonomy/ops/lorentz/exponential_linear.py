r"""A linear map of points that are given by tangent vectors at the origin: Hypformer eq. 9 without the points.

With :math:`r = \sqrt c\, |u|` and :math:`h(r) = \sinh r / r`, the point above u has the time
:math:`t = \cosh r / \sqrt c` and the space part h u, and its map is :math:`f = h\, W_s u + t\, w + b`. Where
:math:`h' = r H`, a gradient g of f gives

.. math::
    \nabla_{W_s} = (h\, g)^\top u, \quad \nabla_w = g^\top t, \quad
    \nabla_u = h\, W_s^\top g + \big(\sqrt c\, h\, (w \cdot g) + c H\, (g \cdot W_s u)\big)\, u, \qquad
    \nabla_{\sqrt c} = \frac{r^2 h - \cosh r}{c}\, (w \cdot g) + \frac{r^2 H}{\sqrt c}\, (g \cdot W_s u) .
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Float
from holonomy.manifolds.hyperboloid.rowwise import use_rowwise
from holonomy.manifolds.hyperboloid.rowwise_maps import WIDEST_RAPIDITY, exponential_factor, scaled_lengths
from holonomy.ops.csr import as_csr, is_sparse, multiply, row_norms
from holonomy.ops.lorentz.lifted import chunks, kept, scale_of

# The longest points made: in float32 an 800th of the largest number there is, as gradients are sums over them; in
# float64 those whose squares, which later layers take, still fit.
_FARTHEST = {torch.float64: 340.0}
_ROOM = 4.0
# The largest sum of a row of weights that they are multiplied with as they are.
_LONGEST_ROW = 16.0


def exponential_linear(
    u: Float[Tensor, "*batch dim_in"],
    weight: Float[Tensor, "dim_out dim_in_plus_1"],
    bias: Float[Tensor, " dim_out"] | None,
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch dim_out"]:
    """The map of the point of ``curvature`` above u, dense or sparse; of u that are too long, of one on their ray."""
    shift = weight.new_zeros(len(weight)) if bias is None else bias
    if is_sparse(u) or not (use_rowwise(u, weight, shift) and u.numel() and checks.costs_nothing_to_read(u)):
        return exponential_linear_reference(u, weight, bias, curvature)
    made: Tensor = _autograd.apply_function(_ExponentialLinear, u.reshape(-1, u.shape[-1]), weight, shift, curvature)
    return made.view(*u.shape[:-1], len(weight))


def exponential_linear_reference(u: Tensor, weight: Tensor, bias: Tensor | None, curvature: Tensor) -> Tensor:
    """The same, of the same arguments, with the gradient that autograd derives."""
    sparse = is_sparse(u)
    matrix = as_csr(u) if sparse else u
    length = row_norms(matrix) if sparse else numerics.norm(u, keepdim=True)
    time, stretch, shrink = _exponential(length, weight.detach(), curvature)
    if sparse:
        product = multiply(matrix, weight[:, 1:].t())
        stretch = stretch if shrink is None else stretch * shrink
    else:
        product = functional.linear(u if shrink is None else numerics.nan_if_infinite(u * shrink), weight[:, 1:])
    # The column of time apart: as a factor its strides slow down whatever is fused with it.
    (time, stretch), column = kept(time, stretch), weight[:, 0].contiguous()
    if bias is None:
        space = product * stretch
    else:
        column, bias = kept(column, bias)
        space = torch.addcmul(bias, product, stretch)
    rows = torch.addr(space.reshape(-1, len(weight)), time.reshape(-1), column)
    return rows.view(space.shape)


def _exponential(
    length: Float[Tensor, "*batch 1"], weight: Float[Tensor, "dim_out dim_in_plus_1"], curvature: Float[Tensor, "*one"]
) -> tuple[Float[Tensor, "*batch 1"], Float[Tensor, "*batch 1"], Float[Tensor, "*batch 1"] | None]:
    """Time coordinate of exp_o(u), and the two factors of its space part, from the length of u."""
    # The second brings u to the length that the exponential is held at; it is constant, and None where it is one.
    root = scale_of(curvature)
    rapidity, most = numerics.widen(length) * root, _farthest(root.detach(), weight, length.dtype)
    reached = torch.minimum(rapidity, most)
    time, stretch, shrink = reached.cosh() / root, numerics.sinhc(reached), None
    beyond = (rapidity > most).detach()
    if not checks.costs_nothing_to_read(beyond) or bool(beyond.any()):
        wide = torch.where(beyond, most / rapidity, 1.0).detach()
        stretch = stretch * torch.where(beyond, reached / torch.where(beyond, rapidity * wide, 1.0), 1.0)
        shrink = wide.to(length.dtype)
    return numerics.narrow(time, length.dtype), numerics.narrow(stretch, length.dtype), shrink


def _farthest(root: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The rapidity that points are held at."""
    most = _FARTHEST.get(dtype, numerics.widest_rapidity(dtype) - _ROOM)
    most = most + root.log().clamp(max=0.0)  # the radius is 1/root
    # Terms of opposite signs that overflow would have no sum.
    reach = torch.linalg.matrix_norm(weight.to(torch.float64), math.inf) / _LONGEST_ROW
    return most - reach.log().clamp(min=0.0)


class _ExponentialLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, weight: Tensor, bias: Tensor, curvature: Tensor) -> Tensor:
        root = scale_of(curvature)
        rapidity = scaled_lengths(u, root)
        ctx.plain = bool((rapidity <= _farthest(root, weight, u.dtype).clamp(max=WIDEST_RAPIDITY)).all())
        if not ctx.plain:
            ctx.save_for_backward(u, weight, bias, curvature)
            return exponential_linear_reference(u, weight, bias, curvature)
        factor, cosh = exponential_factor(rapidity), rapidity.cosh()
        product, time, stretch = torch.mm(u, weight[:, 1:].t()), (cosh / root).float(), factor.value.float()
        ctx.save_for_backward(u, weight, bias, curvature, product, time, cosh, *factor)
        return torch.addcmul(bias, product, stretch).addcmul_(time, weight[:, 0].contiguous())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        u, weight, bias, curvature, *numbers = ctx.saved_tensors
        (g,) = grad_outputs
        wanted = tuple(ctx.needs_input_grad)
        if _autograd.through_reference(g) or not ctx.plain:
            given = (u, weight, bias, curvature)
            return _autograd.reference_gradients(exponential_linear_reference, given, g, wanted)
        product, time, cosh, square, value, slope = numbers
        root, stretch, space = scale_of(curvature), value.float(), weight[:, 1:]
        on_time = torch.mv(g, weight[:, 0].contiguous())[:, None]
        on_stretch, on_space = torch.empty_like(on_time), torch.zeros_like(space)
        on_u = torch.empty_like(u) if wanted[0] else None
        for rows in chunks(g):
            some = g[rows] * product[rows]
            torch.sum(some, -1, keepdim=True, out=on_stretch[rows])
            torch.mul(g[rows], stretch[rows], out=some)
            on_space.addmm_(some.t(), u[rows])
            if on_u is not None:
                torch.mm(some, space, out=on_u[rows])
        on_weight = torch.cat([torch.mv(g.t(), time[:, 0])[:, None], on_space], 1)
        of_time, of_stretch = on_time.double(), on_stretch.double()
        if on_u is not None:
            on_u.addcmul_(u, (root * value * of_time + root.square() * slope * of_stretch).float())
        on_root = (of_time * (square * value - cosh) / root + of_stretch * square * slope).sum() / root
        return on_u, on_weight, g.sum(0), (on_root / (-2 * root)).to(curvature.dtype).reshape(curvature.shape)
