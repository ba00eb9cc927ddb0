r"""Linear attention as pure functions: the feature map of Hypformer eq. 19 and the average of eq. 16.

Axes: ``(*batch, nodes, channels)``, heads among the batch axes. Everything is Euclidean: the time
coordinates of queries, keys and values play no part in linear attention. A mask is boolean, ``True``
where a key is to be ignored.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd, _parts, checks, numerics
from holonomy._parts import Group
from holonomy._shapes import Bool, Float

Average = Literal["space", "midpoint"]
AVERAGES: tuple[Average, ...] = get_args(Average)

SHARE = 2.0**-12
"""Of the largest number: what gradients may be for sums over channels to stay in the range."""


def power_features(
    x: Float[Tensor, "*batch channels"], power: float, *, unit: bool = False
) -> Float[Tensor, "*batch channels"]:
    r"""The feature map :math:`\phi(x) = |e| / |e^p| \; e^p`, :math:`e = \mathrm{ReLU}(x)`, eq. 19 at t = 1."""
    # phi(x/t) = phi(x)/t. At rows with no positive entry value and gradient are zero.
    if torch.compiler.is_compiling():  # which fuses the plain operations itself
        return _power_features(x, power, unit=unit)
    return _autograd.apply_function(_PowerFeatures, x, power, unit)


def _power_features(x: Tensor, power: float, *, unit: bool) -> Tensor:
    positive = torch.relu(x)
    # Constant for autograd: a common factor changes no direction, and the largest entry has kinks. With it scaled to
    # one no power overflows, and both norms are at least one in live rows.
    largest = numerics.positive(positive.detach().amax(-1, keepdim=True))
    scaled = positive * largest.reciprocal()
    powered = scaled.pow(power)
    length = torch.ones_like(largest) if unit else numerics.finite(largest * _length(scaled))
    return powered * numerics.safe_div(length, _length(powered))


def _length(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # where the gradient of a norm divides every entry by it
        return numerics.root(x.square().sum(-1, keepdim=True))
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


class _PowerFeatures(torch.autograd.Function):
    """The same with its gradient in closed form, from x and the result alone."""

    # With u = phi/|e|, or phi itself if ``unit``: p (g - (g.u) u) phi / e, and (g.u) e/|e| for the length.

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, power: float, unit: bool) -> Tensor:  # noqa: FBT001 - apply takes no keywords
        return _power_features(x, power, unit=unit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, bool], output: Tensor) -> None:
        x, ctx.power, ctx.unit = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        # From a product of heads it comes heads first, and arithmetic on two layouts is slow.
        tensors, dtype = (*ctx.saved_tensors, grad_outputs[0].contiguous()), grad_outputs[0].dtype
        wide = torch.promote_types(dtype, torch.float32)  # the smallest float16, over the share, is a quarter
        x, features, grad = (z.to(wide) for z in tensors)
        positive, limits = torch.relu(x), torch.finfo(wide)
        # Zero at entries that are not positive, by arithmetic: torch.where with a number is ten times slower.
        slope = features / positive.clamp(min=limits.tiny / SHARE)
        if torch.is_grad_enabled():  # of that quotient the second derivative overflows at zeros
            slope = numerics.safe_div(features, positive)
        if ctx.unit:
            radial = (grad * features).sum(-1, keepdim=True)
            inside = torch.addcmul(grad, radial, features, value=-1) * slope * ctx.power
            return numerics.saturated(inside.clamp(-SHARE * limits.max, SHARE * limits.max), dtype), None, None
        length = numerics.norm(positive, keepdim=True)
        inverse = numerics.finite(numerics.safe_div(torch.ones_like(length), length))
        direction = features * inverse
        radial = (grad * direction).sum(-1, keepdim=True)
        across = torch.addcmul(grad, radial, direction, value=-1)
        found = torch.addcmul(radial * (positive * inverse), across, slope, value=ctx.power)
        return numerics.saturated(found, dtype), None, None


def linear_attention(
    query: Float[Tensor, "*batch query channels"],
    key: Float[Tensor, "*batch key channels"],
    value: Float[Tensor, "*batch key values"],
    mask: Bool[Tensor, "*#batch key"] | None = None,
    group: Group | None = None,
    *,
    unit: bool = False,
) -> Float[Tensor, "*batch query values"]:
    r""":math:`Z = Q (K^\top V) / (Q (K^\top 1))` for nonnegative features, Hypformer eq. 16."""
    # A row whose weights are all zero is zero, and so is its gradient; as zero counts what is less than 1e-19 in
    # float32 (the root of the smallest number) of the largest query entry times the largest key entry, over the number
    # of key entries. With a group the keys and values are a part of all; ``unit`` says that queries are of length one,
    # or zero.
    if mask is not None:
        key = key.masked_fill(mask[..., None], 0.0)
        value = value.masked_fill(mask[..., None], 0.0)
    if key.shape[-2] == 0:
        if group is None:
            return numerics.zeros_of((*query.shape[:-1], value.shape[-1]), value, query, key)
        key, value = (functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    if value.dtype in (torch.bfloat16, torch.float16):  # in which neither a long sum nor its gradient has digits
        with torch.autocast(_autograd.autocast_device(value), enabled=False):
            return linear_attention(query.float(), key.float(), value.float(), None, group).to(value.dtype)
    # A common factor of the keys cancels; with this one no sum over them exceeds the largest value.
    largest = numerics.positive(key.detach().abs().amax((-2, -1), keepdim=True))
    key = held(key) * (1 / (key.shape[-2] * key.shape[-1]) / largest)
    # So does one of each query, by a power of two, which rounds nothing.
    query = held(query)
    if not unit:
        query = query / numerics.power_of_two(numerics.positive(query.detach().amax(-1, keepdim=True)))
    if torch.compiler.is_compiling() and group is None:  # where a column of ones would be a copy of the values
        weight = (query * key.sum(-2, keepdim=True)).sum(-1, keepdim=True)
        return quotient(product(query, product(key.transpose(-2, -1), value)), weight)
    sums = product(key.transpose(-2, -1), functional.pad(value, (0, 1), value=1.0))
    if group is not None:
        sums = _parts.scaled_total(sums, largest.log() + math.log(key.shape[-2]), group)[0]
    return quotient(*product(query, sums).tensor_split([-1], -1))


def held(features: Float[Tensor, "*batch rows channels"]) -> Float[Tensor, "*batch rows channels"]:
    """Features, whose gradient saturates: it is the longer, the shorter they are."""
    return numerics.gradient_within(features, torch.finfo(features.dtype).max * SHARE)


def product(
    weight: Float[Tensor, "*batch rows keys"], value: Float[Tensor, "*batch keys columns"]
) -> Float[Tensor, "*batch rows columns"]:
    """``weight @ value``; the gradient by the weights saturates where terms of its sums would not fit."""
    if weight.requires_grad and _states_gradient(weight, value):
        return _autograd.apply_function(_Product, weight, value)
    return weight @ value


def _states_gradient(weight: Tensor, value: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return weight.dtype == value.dtype and not torch.is_autocast_enabled(weight.device.type)
    return _autograd.supports_custom_backward(weight, value)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(weight, value)
        return weight @ value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weight, value = ctx.saved_tensors
        grad = grad_outputs[0]
        # In the order in memory of the weight: what follows would walk through keys that are transposed.
        of_weight = (value @ grad.mT).mT if weight.stride(-2) < weight.stride(-1) else grad @ value.mT
        of_value = weight.mT @ grad if ctx.needs_input_grad[1] else None
        # They nearly always fit, and on a CPU it is faster to look: their squares have a sum then.
        fits = checks.costs_nothing_to_read(of_weight) and torch.linalg.vector_norm(of_weight.detach()).isfinite()
        if torch.compiler.is_compiling() or bool(fits):
            return of_weight, of_value
        limit = torch.finfo(value.dtype).max / (4 * value.shape[-1])
        limit = limit / value.detach().abs().amax(-2, keepdim=True).clamp(min=1.0)
        return grad.clamp(-limit, limit) @ value.mT, of_value


def quotient(
    total: Float[Tensor, "*batch query values"], weight: Float[Tensor, "*batch query 1"]
) -> Float[Tensor, "*batch query values"]:
    """Averages from sums of values and of weights; zero, with zero gradient, without a weight."""
    limits = torch.finfo(total.dtype)
    weight = numerics.gradient_within(weight, limits.max / 4)
    # The gradient has the square of the inverse, which must not overflow.
    weight = torch.where(weight > math.sqrt(limits.tiny), weight, 0)
    return total * numerics.safe_div(torch.ones_like(weight), weight)
