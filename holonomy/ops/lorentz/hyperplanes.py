r"""Signed distances of many float32 points to a few hyperplanes, in float64 in chunks that stay in the cache.

Near a hyperplane far out two numbers of size :math:`\cosh(s)\, x_t` cancel: float32 products would leave no digits.
What costs is not the product in float64 but the copies of all points in it, so that only chunks are copied, forward
and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd, numerics
from holonomy._shapes import Float
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.rowwise import row_chunks, use_rowwise


def hyperplane_distances(
    space: Float[Tensor, "*batch dim"],
    plane: Float[Tensor, "classes ambient"],
    gain: Float[Tensor, " classes"],
    curvature: Float[Tensor, " 1"],
) -> Float[Tensor, "*batch classes"]:
    r""":math:`\operatorname{arsinh}(g_k\, p_k \cdot x)` for the points x with these space parts."""
    if not use_rowwise(space):
        return hyperplane_distances_reference(space, plane, gain, curvature)
    rows = space.reshape(-1, space.shape[-1])
    found: Tensor = _autograd.apply_function(_Distances, rows, plane, gain, curvature)
    return found.view(*space.shape[:-1], plane.shape[0])


def hyperplane_distances_reference(space: Tensor, plane: Tensor, gain: Tensor, curvature: Tensor) -> Tensor:
    """The reference of :func:`hyperplane_distances`, with the same arguments."""
    points = hyperboloid.lift(numerics.widen(space), curvature)
    # Each of the two products of float64 may leave the range; an infinite one would make nan of a gradient of zero.
    return numerics.asinh(numerics.finite(gain * numerics.finite(functional.linear(points, plane))))


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, space: Tensor, plane: Tensor, gain: Tensor, curvature: Tensor) -> Tensor:
        products = plane.new_empty(space.shape[0], plane.shape[0])
        distances, times = torch.empty_like(products), plane.new_empty(space.shape[0], 1)
        radius = curvature.neg().rsqrt()
        for rows in row_chunks(space):
            wide = space[rows].double()
            times[rows] = time = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), radius)
            torch.addmm(time * plane[:, 0], wide, plane[:, 1:].t(), out=products[rows])
            distances[rows] = (products[rows] * gain).asinh()
        ctx.save_for_backward(space, plane, gain, curvature, products, times)
        return distances

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, products, times = ctx.saved_tensors
        space, plane, gain, curvature = inputs
        if _autograd.through_reference(grad_outputs[0]):
            given = tuple(inputs), grad_outputs[0], tuple(ctx.needs_input_grad)
            return _autograd.reference_gradients(hyperplane_distances_reference, *given)
        slope = grad_outputs[0] / torch.hypot(products * gain, torch.ones_like(products))
        on_gain = (slope * products).sum(0)
        slope = slope * gain
        pull = (slope @ plane[:, :1]) / times  # the gradient of times, over them
        on_space, on_plane = torch.empty_like(space), torch.empty_like(plane)
        on_plane[:, :1] = slope.t() @ times
        on_plane[:, 1:] = 0.0
        for rows in row_chunks(space):
            wide = space[rows].double()
            on_plane[:, 1:].addmm_(slope[rows].t(), wide)
            on_space[rows] = numerics.saturated(wide.mul_(pull[rows]).addmm_(slope[rows], plane[:, 1:]), space.dtype)
        on_curvature = pull.sum() / (2 * curvature.square())
        return on_space, on_plane, on_gain, on_curvature
