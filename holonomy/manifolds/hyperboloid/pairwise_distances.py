"""Distances of all pairs: which form computes them.

* Large sets of float32 points: :mod:`holonomy.manifolds.hyperboloid.pairwise_matmul`.
* Other sets: :mod:`holonomy.manifolds.hyperboloid.pairwise`.
* In transformations of ``torch.func``, under which no pair can be chosen by its numbers, pair by pair:
  :mod:`holonomy.manifolds.hyperboloid.geodesics`.

``torch.compile`` calls the first two without tracing them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy.manifolds.hyperboloid import geodesics, views
from holonomy.manifolds.hyperboloid.pairwise import distance_gradients, distance_values
from holonomy.manifolds.hyperboloid.pairwise_matmul import Chunk, product_gradients, product_values
from holonomy.manifolds.hyperboloid.rowwise import rows_at_once

# Below so many pairs the bookkeeping of products costs more than differences do.
FEWEST_PAIRS = 2**15

_Gradients = tuple[Tensor | None, ...]


def use_products(x: Tensor, y: Tensor) -> bool:
    """The rule: large sets of points, none of float64."""
    pairs = x.shape[-2] * y.shape[-2]
    # A symbol of torch.export is not compared: the program would take sets of one side of the rule only.
    large = not isinstance(pairs, torch.SymInt) and pairs >= FEWEST_PAIRS
    return large and torch.float64 not in {x.dtype, y.dtype}


def pairwise_distance(x: Tensor, y: Tensor, scale: Tensor, *, products: bool) -> Tensor:
    """Of space parts ``(..., n, d)`` and ``(..., m, d)``, see :func:`holonomy.manifolds.hyperboloid.cdist`."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = (z.expand(*batch, *z.shape[-2:]) for z in (x, y))
    if torch.compiler.is_compiling():
        return _compiled(x, y, scale, products)
    if _autograd.transformed() or x.is_meta:
        chunks = x.unsqueeze(-2).split(rows_at_once(x, y.shape[-2] * y.shape[-1]), -3)
        return torch.cat([geodesics.distance(rows, y.unsqueeze(-3), scale) for rows in chunks], -2)
    return _autograd.apply_function(_Distances, x, y, scale, products)


class _Distances(torch.autograd.Function):
    """By differences or by products; the second derivative goes through differences."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, products: bool) -> Tensor:  # noqa: FBT001
        distances, ctx.chunks = _values(x, y, scale) if products else (distance_values(x, y, scale), None)
        # Inputs and output only: what else was saved would be a constant to whoever differentiates twice.
        ctx.save_for_backward(x, y, scale, distances)
        return distances

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> _Gradients:
        x, y, scale, distances = ctx.saved_tensors
        grad, of_scale = grad_outputs[0], ctx.needs_input_grad[2]
        if torch.is_grad_enabled():
            apart = distances if ctx.chunks is None else pairwise_distance(x, y, scale, products=False)
            return *_differentiable(x, y, scale, apart, grad.double()), None
        if ctx.chunks is None:
            return *distance_gradients(x, y, scale, distances, grad, of_scale=of_scale), None
        return *_gradients(x, y, scale, distances, grad, ctx.chunks, of_scale=of_scale), None


def _differentiable(x: Tensor, y: Tensor, scale: Tensor, distances: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    gradients: Any = functools.partial(distance_gradients, of_scale=True)
    return views.differentiable(gradients, (x, y, scale, distances), grad, _off_origin)


def _off_origin(x: Tensor, y: Tensor, scale: Tensor, distances: Tensor) -> tuple[Tensor, ...]:
    x, y, scale = views.both_off_origin(x, y, scale)
    return x, y, scale, views.moved_to(distances, distance_values(x.detach(), y.detach(), scale.detach()))


def _sets(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def _values(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, list[list[Chunk] | None]]:
    """Distances by products, set by set, and how they were found."""
    distances = x.new_empty((*x.shape[:-1], y.shape[-2]), dtype=torch.float32)
    found = zip(_sets(x), _sets(y), _sets(distances), strict=True)
    return distances, [product_values(a, b, scale, out) for a, b, out in found]


def _gradients(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    distances: Tensor,
    grad: Tensor,
    chunks: list[list[Chunk] | None],
    *,
    of_scale: bool,
) -> _Gradients:
    on_x, on_y = (torch.empty_like(z, memory_format=torch.contiguous_format) for z in (x, y))
    on_scale = torch.zeros_like(scale) if of_scale else None
    sets = zip(*map(_sets, (x, y, distances, grad)), chunks, _sets(on_x), _sets(on_y), strict=True)
    for a, b, c, g, found, on_a, on_b in sets:
        of_a, of_b, more = product_gradients(a, b, scale, c, g, found, of_scale=of_scale)
        on_a.copy_(of_a)
        on_b.copy_(of_b)
        on_scale = None if on_scale is None or more is None else on_scale + more
    return on_x, on_y, on_scale


# Registered with torch, so that torch.compile calls them without tracing.


@torch.library.custom_op(
    "holonomy::pairwise_distance", mutates_args=(), schema="(Tensor x, Tensor y, Tensor scale, bool products) -> Tensor"
)
def _compiled(x: Tensor, y: Tensor, scale: Tensor, products: bool) -> Tensor:  # noqa: FBT001
    return _values(x, y, scale)[0] if products else distance_values(x, y, scale)


@_compiled.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, products: bool) -> Tensor:  # noqa: FBT001
    del scale
    return x.new_empty((*x.shape[:-1], y.shape[-2]), dtype=torch.float32 if products else x.dtype)


@torch.library.custom_op(
    "holonomy::pairwise_distance_gradients",
    mutates_args=(),
    schema="(Tensor x, Tensor y, Tensor scale, Tensor distances, Tensor grad) -> (Tensor, Tensor, Tensor)",
)
def _compiled_gradients(x: Tensor, y: Tensor, scale: Tensor, distances: Tensor, grad: Tensor) -> _Gradients:
    if distances.dtype == x.dtype:
        return distance_gradients(x, y, scale, distances, grad, of_scale=True)
    return _gradients(x, y, scale, distances, grad, _values(x, y, scale)[1], of_scale=True)


@_compiled_gradients.register_fake
def _(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], output)


def _pull(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_compiled_gradients(*ctx.saved_tensors, grad), None


_compiled.register_autograd(_pull, setup_context=_save)
