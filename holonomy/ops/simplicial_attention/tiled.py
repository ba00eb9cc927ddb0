r"""Simplicial attention tile by tile, with a running softmax, recomputed in the backward pass.

In the notation of :mod:`~holonomy.ops.simplicial_attention.reference`, with :math:`G_q` the gradient of :math:`o_q`,
:math:`\gamma_q` that of the log mass :math:`m_q` and :math:`A_{qht} = e^{\ell_{qht} - m_q}`, the backward pass is

.. math::

    \partial \ell_{qht} &= A_{qht} \bigl( G_q \cdot (u_h * w_t) - c_q \bigr), \qquad
        c_q = G_q \cdot o_q - \gamma_q &\quad (4) \\
    \partial u_h &= \textstyle\sum_q G_q * \sum_t A_{qht} w_t &\quad (5) \\
    \partial w_t &= \textstyle\sum_{qh} A_{qht} \, G_q * u_h &\quad (6) \\
    \partial t_t &= \textstyle\sum_{qh} \partial \ell_{qht} \, f_{qh} &\quad (7) \\
    \partial f_{qh} &= \textstyle\sum_t \partial \ell_{qht} \, t_t &\quad (8) \\
    \partial l^r_q &= \textstyle\sum_h \partial f_{qh} * r^r_h, \qquad
        \partial r^r_h = \sum_q \partial f_{qh} * l^r_q &\quad (9)

A comes from the largest logit p and the sum S of each row, :math:`A = e^{\ell - p} / S`: beside a large logit m has no
room for :math:`\log S`. Where a tile holds all logits of its queries, :math:`c_q + \gamma_q` is the mean of
:math:`G_q \cdot (u_h * w_t)`, which leaves nothing of (4) where one simplex has all weight.
In the Triton kernels (:mod:`~holonomy.ops.simplicial_attention.triton`) it is always that of (4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy.ops.simplicial_attention.reference import Factors, rows_times
from holonomy.ops.simplicial_attention.simplexes import Simplexes, Tile, allowed, tiles


def tiled_attention(f: Factors, simplexes: Simplexes, tile: int) -> tuple[Tensor, Tensor]:
    """Equations 2 and 3 without storing a tile. Asking for a second derivative raises an error."""
    mixed, mass, _, _ = _autograd.apply_function(_Tiled, *f, simplexes, tile)
    return mixed, mass


class _Tiled(torch.autograd.Function):
    """See :func:`tiled_attention`."""

    @staticmethod
    def forward(
        left: Tensor, right: Tensor, other: Tensor, value: Tensor, other_value: Tensor, simplexes: Simplexes, tile: int
    ) -> tuple[Tensor, ...]:
        f = Factors(left, right, other, value, other_value)
        mixed = left.new_empty(*left.shape[1:3], value.shape[-1])
        mass, largest, sums = (left.new_empty(left.shape[1:3]) for _ in range(3))
        for block in tiles(simplexes, tile):
            where = block[0].batch, block[0].queries
            peak = torch.full_like(mass[where], -torch.inf)
            total, average = torch.zeros_like(peak), torch.zeros_like(mixed[where])
            for chunk in block:
                _, logits = _logits(f, simplexes, chunk)
                highest = torch.maximum(peak, logits.amax((-2, -1)))
                # While all logits so far are -inf, their maximum is replaced by zero: -inf minus itself is nan.
                base = highest.masked_fill(highest.isneginf(), 0.0)
                weights = logits.sub_(base[..., None, None]).exp_()
                # Sums so far are rescaled to the new maximum.
                kept = (peak - base).exp()
                total = total * kept + weights.sum((-2, -1))
                inner = rows_times(weights, f.other_value[chunk.batch, chunk.others])
                average = average * kept[..., None] + (inner * f.value[chunk.batch, None, chunk.first_keys]).sum(2)
                peak = highest
            # Equation 2; -inf for a query without a simplex, whose result is zero.
            mass[where] = peak + total.log()
            sums[where] = total = total.masked_fill(total == 0, 1.0)
            largest[where] = peak.masked_fill(peak.isneginf(), 0.0)
            mixed[where] = average / total[..., None]
        return mixed, mass, largest, sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.simplexes, ctx.tile = inputs
        mixed, _, largest, sums = output
        ctx.mark_non_differentiable(largest, sums)
        ctx.save_for_backward(*tensors, mixed, largest, sums)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        given = *ctx.saved_tensors, *grad_outputs[:2]
        grads = _autograd.apply_function(_TiledGradient, *given, ctx.simplexes, ctx.tile)
        return *grads, None, None


def refuse_second_derivative(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
    """The gradient of a gradient by tiles."""
    del ctx, grad_outputs
    raise RuntimeError("Simplicial attention in tiles has no second derivative: give a tile that holds all logits.")


class _TiledGradient(torch.autograd.Function):
    """The gradient of :class:`_Tiled`, apart from it, so that its own derivative raises an error."""

    backward = staticmethod(refuse_second_derivative)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del ctx, inputs, output

    @staticmethod
    def forward(
        left: Tensor,
        right: Tensor,
        other: Tensor,
        value: Tensor,
        other_value: Tensor,
        mixed: Tensor,
        largest: Tensor,
        sums: Tensor,
        grad: Tensor,
        grad_mass: Tensor,
        simplexes: Simplexes,
        tile: int,
    ) -> tuple[Tensor, ...]:
        f = Factors(left, right, other, value, other_value)
        grad_left, grad_right, grad_other = torch.zeros_like(left), torch.zeros_like(right), torch.zeros_like(other)
        grad_value, grad_other_value = torch.zeros_like(value), torch.zeros_like(other_value)
        # Divided by S, so that weights need not be.
        grad, grad_mass = grad / sums[..., None], grad_mass / sums
        # c_q of equation 4.
        average = (mixed * grad).sum(-1) - grad_mass
        for chunk, alone in ((chunk, len(block) == 1) for block in tiles(simplexes, tile) for chunk in block):
            batch, queries, columns = chunk.batch, chunk.queries, chunk.first_keys
            rows, others = (batch, queries), (batch, chunk.others)
            # f_qh, equation 1, and S A.
            features, logits = _logits(f, simplexes, chunk)
            weights = logits.sub_(largest[*rows, None, None]).exp_()
            grad_others = grad[*rows, None] * value[batch, None, columns]  # G_q * u_h
            # Equations 5 and 6.
            grad_value[batch, columns] += (rows_times(weights, other_value[others]) * grad[*rows, None]).sum(1)
            grad_other_value[others] += weights.flatten(1, 2).mT @ grad_others.flatten(1, 2)
            # Equation 4, then 7.
            grad_logits = rows_times(grad_others, other_value[others].mT)
            if alone:
                average[rows] = (grad_logits * weights).sum((-2, -1)) / sums[rows] - grad_mass[rows]
            grad_logits = grad_logits.sub_(average[*rows, None, None]).mul_(weights)
            grad_other[others] += grad_logits.flatten(1, 2).mT @ features.flatten(1, 2)
            # Equations 8 and 9.
            grad_features = rows_times(grad_logits, other[others])
            for term in range(left.shape[0]):
                grad_left[term, batch, queries] += (grad_features * right[term, batch, None, columns]).sum(2)
                grad_right[term, batch, columns] += (grad_features * left[term, batch, queries, None]).sum(1)
        return grad_left, grad_right, grad_other, grad_value, grad_other_value


def _logits(f: Factors, simplexes: Simplexes, chunk: Tile) -> tuple[Tensor, Tensor]:
    """The features f_qh, and the logits ``(batch, queries, first_keys, others)`` of a tile."""
    left, right = f.left[:, chunk.batch, chunk.queries, None], f.right[:, chunk.batch, None, chunk.first_keys]
    features = left[0] * right[0]
    for term in range(1, left.shape[0]):
        features = features + left[term] * right[term]
    logits = rows_times(features, f.other[chunk.batch, chunk.others].mT)
    there = allowed(simplexes, chunk)
    return features, logits if there is None else logits.masked_fill_(~there, -torch.inf)
