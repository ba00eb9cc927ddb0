r"""Simplicial attention of heads and tails: with all logits stored, or tile by tile.

The plain form of every N and both forms of the logit, and what the kernels in Triton
(:mod:`~holonomy.ops.simplicial_attention.triton`) compute as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy.ops.simplicial_attention.logits import Form, head_terms, tail_features
from holonomy.ops.simplicial_attention.simplexes import Simplexes, Tile, allowed, tiles

__all__ = ["Factors", "factors_of", "stored_attention", "tiled_attention"]


class Factors(NamedTuple):
    """What logits and values are made of, heads and tails apart, the batch in one axis.

    The logits are ``(left[:, :, :, None] * right[:, :, None]).sum(0) @ tail.mT``, the values of a head and a tail
    ``value * tail_value``.

    Attributes:
        left: ``(terms, batch, queries, features)``, the scale included.
        right: ``(terms, batch, heads, features)``.
        tail: ``(batch, tails, features)``.
        value: ``(batch, heads, channels)``.
        tail_value: ``(batch, tails, channels)``.
    """

    left: Tensor
    right: Tensor
    tail: Tensor
    value: Tensor
    tail_value: Tensor


def factors_of(
    keys: Sequence[Tensor], values: Sequence[Tensor], simplexes: Simplexes, *, form: Form, scale: float
) -> Factors:
    """Cut keys and values into heads and tails."""
    order, batch = simplexes.order, simplexes.batch
    keys = [key.expand(*batch, -1, -1).flatten(0, -3) if batch else key[None] for key in keys]
    values = [value.expand(*batch, -1, -1).flatten(0, -3) if batch else value[None] for value in values]
    terms = head_terms(keys[0] * scale, keys[1], order=order, form=form)
    if order == 1:
        # A query's one head is a dummy, and the keys are its tails.
        left = torch.cat([term for term, _ in terms], -1)
        tail = torch.cat([term for _, term in terms], -1)
        return Factors(
            left[None], torch.ones_like(left[None, :, :1]), tail, torch.ones_like(values[0][:, :1]), values[0]
        )
    tail = tail_features(_crossed(keys[2:]), order=order, form=form).flatten(1, -2)
    tail_value = reduce(torch.mul, _crossed(values[1:])).flatten(1, -2)
    if simplexes.order_of_tails is not None:
        tail, tail_value = tail[:, simplexes.order_of_tails], tail_value[:, simplexes.order_of_tails]
    left, right = (torch.stack(sides) for sides in zip(*terms, strict=True))
    return Factors(left, right, tail, values[0], tail_value)


def _crossed(factors: Sequence[Tensor]) -> list[Tensor]:
    """Each ``(batch, n_m, d)`` on an axis of its own, so that they broadcast to the list of all tuples."""
    batch, channels = factors[0].shape[0], factors[0].shape[-1]
    several = len(factors)
    return [
        factor.reshape(batch, *(factor.shape[1] if axis == own else 1 for axis in range(several)), channels)
        for own, factor in enumerate(factors)
    ]


def stored_attention(f: Factors, there: Tensor | None = None, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention with all logits at once, for autograd to keep."""
    heads = (f.left[:, :, :, None] * f.right[:, :, None]).sum(0)
    shape = (*heads.shape[:-1], f.tail.shape[1])
    logits = _times(heads, f.tail.mT)
    if bias is not None:
        # Taken out by a mask, too: the gradient of a row of nothing but -inf is nan.
        logits, listed = logits + bias, ~bias.isneginf()
        there = listed if there is None else there & listed
    if there is not None:
        logits = logits.masked_fill(~there, -torch.inf)
    logits = logits.flatten(2)
    mass = logits.logsumexp(-1)
    if there is None:
        weights = logits.softmax(-1)
    else:  # of a row of -inf there is no softmax
        weights = (logits - mass.masked_fill(mass.isneginf(), 0.0)[..., None]).exp()
    inner = _times(weights.reshape(shape), f.tail_value)
    return (inner * f.value[:, None]).sum(2), mass


def tiled_attention(f: Factors, simplexes: Simplexes, tile: int) -> tuple[Tensor, Tensor]:
    """The same tile by tile, none of them kept: a running softmax, and the logits made again on the way back.

    It has no second derivative and says so.
    """
    return _autograd.apply_function(_Tiled, *f, simplexes, tile)


class _Tiled(torch.autograd.Function):
    """See :func:`tiled_attention`."""

    @staticmethod
    def forward(
        left: Tensor, right: Tensor, tail: Tensor, value: Tensor, tail_value: Tensor, simplexes: Simplexes, tile: int
    ) -> tuple[Tensor, Tensor]:
        f = Factors(left, right, tail, value, tail_value)
        mixed = left.new_empty(*left.shape[1:3], value.shape[-1])
        mass = left.new_empty(left.shape[1:3])
        for block in tiles(simplexes, tile):
            where = block[0].batch, block[0].queries
            peak = torch.full_like(mass[where], -torch.inf)
            total, average = torch.zeros_like(peak), torch.zeros_like(mixed[where])
            for part in block:
                _, logits = _logits(f, simplexes, part)
                highest = torch.maximum(peak, logits.amax((-2, -1)))
                # Where nothing is allowed so far every logit is -inf, and any finite number serves.
                base = highest.masked_fill(highest.isneginf(), 0.0)
                weights = logits.sub_(base[..., None, None]).exp_()
                kept = (peak - base).exp()
                total = total * kept + weights.sum((-2, -1))
                inner = _times(weights, f.tail_value[part.batch, part.tails])
                average = average * kept[..., None] + (inner * f.value[part.batch, None, part.heads]).sum(2)
                peak = highest
            mixed[where] = average / total.masked_fill(total == 0, 1.0)[..., None]
            mass[where] = peak + total.log()
        return mixed, mass

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.simplexes, ctx.tile = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads = _autograd.apply_function(_TiledGradient, *ctx.saved_tensors, *grad_outputs, ctx.simplexes, ctx.tile)
        return *grads, None, None


class _TiledGradient(torch.autograd.Function):
    """The gradient of :class:`_Tiled`, an operation of its own so that asking for its derivative is refused."""

    @staticmethod
    def forward(
        left: Tensor,
        right: Tensor,
        tail: Tensor,
        value: Tensor,
        tail_value: Tensor,
        mixed: Tensor,
        mass: Tensor,
        grad: Tensor,
        grad_mass: Tensor,
        simplexes: Simplexes,
        tile: int,
    ) -> tuple[Tensor, ...]:
        f = Factors(left, right, tail, value, tail_value)
        g_left, g_right, g_tail = torch.zeros_like(left), torch.zeros_like(right), torch.zeros_like(tail)
        g_value, g_tail_value = torch.zeros_like(value), torch.zeros_like(tail_value)
        base = mass.masked_fill(mass.isneginf(), 0.0)
        # The softmax's own derivative takes from each logit's slope the average slope of its row.
        average = (mixed * grad).sum(-1) - grad_mass
        for part in (part for block in tiles(simplexes, tile) for part in block):
            batch, queries, columns = part.batch, part.queries, part.heads
            tails = batch, part.tails
            heads, logits = _logits(f, simplexes, part)
            weights = logits.sub_(base[batch, queries, None, None]).exp_()
            pulled = grad[batch, queries, None] * value[batch, None, columns]
            g_value[batch, columns] += (_times(weights, tail_value[tails]) * grad[batch, queries, None]).sum(1)
            g_tail_value[tails] += weights.flatten(1, 2).mT @ pulled.flatten(1, 2)
            slopes = _times(pulled, tail_value[tails].mT).sub_(average[batch, queries, None, None]).mul_(weights)
            g_tail[tails] += slopes.flatten(1, 2).mT @ heads.flatten(1, 2)
            pulled = _times(slopes, tail[tails])
            for term in range(left.shape[0]):
                g_left[term, batch, queries] += (pulled * right[term, batch, None, columns]).sum(2)
                g_right[term, batch, columns] += (pulled * left[term, batch, queries, None]).sum(1)
        return g_left, g_right, g_tail, g_value, g_tail_value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        del ctx, grad_outputs
        raise RuntimeError("Simplicial attention in tiles has no second derivative: give a tile that holds all logits.")


def _logits(f: Factors, simplexes: Simplexes, part: Tile) -> tuple[Tensor, Tensor]:
    """Features of queries and heads, and the logits ``(batch, queries, heads, tails)`` of a tile."""
    left, right = f.left[:, part.batch, part.queries, None], f.right[:, part.batch, None, part.heads]
    heads = left[0] * right[0]
    for term in range(1, left.shape[0]):
        heads = heads + left[term] * right[term]
    logits = _times(heads, f.tail[part.batch, part.tails].mT)
    there = allowed(simplexes, part)
    return heads, logits if there is None else logits.masked_fill_(~there, -torch.inf)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """``(batch, queries, heads, x) @ (batch, x, y)``."""
    return (rows.flatten(1, 2) @ matrix).unflatten(1, rows.shape[1:3])
