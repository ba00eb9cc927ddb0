r"""Enclosures of linear attention when one token moves: L7.

Token a moves, token i asks. Everything of a token is held times the scale :math:`\nu` of its point, which is harmless:
a query matters up to a factor, and :math:`\phi` has degree one. Of the others only the sums :math:`M = \sum_j k_j
v_j^\top` and :math:`S = \sum_j k_j` count, j over all tokens but a:

.. math:: \bar v_i = A + \omega\,(v_a - A), \qquad A = \frac{M^\top q}{S \cdot q}, \qquad
    \omega = \frac{q \cdot k_a}{S \cdot q + q \cdot k_a} .

By L5 :math:`A = A_0 + (M - S A_0^\top)^\top q / (S \cdot q)`, linear in q up to one division, and q is
:math:`\mathrm{ReLU}(e)^p` by L1, without its norm. :math:`\omega` is a quotient too.

The layer jumps only where :math:`S \cdot q + q \cdot k_a = 0`. A positive lower bound of :math:`S \cdot q`, which L5
needs, proves that it does not in the ball. Where no key of the crowd shares a positive entry with the query in all of
the ball, the average is :math:`v_a` if :math:`q \cdot k_a` stays positive, and zero if that vanishes too. Else the
problem has failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holonomy.layers import HTC, HypLinearAttention
from holonomy.ops.linear_attention.reference import power_features
from holonomy.theory.affine.entrywise import positive_power
from holonomy.theory.affine.features import features
from holonomy.theory.affine.forms import Form, constant, join, linear, plus, select, spread, times
from holonomy.theory.affine.points import Scaled, affine_of, bias_of, root, transformed
from holonomy.theory.affine.products import inner, quotient, scale
from holonomy.theory.attention.projections import NotCoveredError, as_stated

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["Crowd", "attended", "crowd_of"]


@dataclass(frozen=True)
class Crowd:
    """What the tokens that stay give to all: sums over them, a head and a problem each."""

    products: Float[Tensor, "problem head key value"]
    keys: Float[Tensor, "problem head key"]
    tokens: int


def crowd_of(layer: HypLinearAttention, points: Float[Tensor, "tokens ambient"], moving: Tensor) -> Crowd:
    """The sums over all tokens but the moving one, for each problem."""
    key, value = (
        power_features(_affine(part, points).unflatten(-1, (layer.heads, -1)), layer.power)
        for part in (layer.key, layer.value)
    )
    value = value / layer.log_scale.detach().double().exp()
    products = torch.einsum("nhk,nhv->hkv", key, value)
    keys = key.sum(0)
    own = torch.einsum("phk,phv->phkv", key[moving], value[moving])
    return Crowd(products - own, keys - key[moving], len(points))


def attended(layer: HypLinearAttention, query: Scaled, moving: Scaled, crowd: Crowd) -> Form:
    """The space part of the layer's result for the query, on its output manifold, times the query's scale.

    Here query and moving token are one point, or the query's point does not move.
    """
    as_stated(layer, HypLinearAttention)
    if layer.average != "space":
        raise NotCoveredError(f"attention must average space parts, got average={layer.average!r}.")
    power, heads = layer.power, layer.heads
    asks, keys = transformed(layer.query, query), transformed(layer.key, moving)
    shrink = (-layer.log_scale.detach().double()).exp().item()
    size = asks.center.shape[-1] // heads
    parts = [slice(size * head, size * (head + 1)) for head in range(heads)]
    values = [features(times(form, shrink), power) for form in _split(transformed(layer.value, moving), parts)]
    own = (
        values
        if query is moving
        else [features(times(form, shrink), power) for form in _split(transformed(layer.value, query), parts)]
    )
    averages = []
    for head, part in enumerate(parts):
        if crowd.tokens == 1:
            averages.append(values[head])
            continue
        q, k = positive_power(asks[part], power), features(keys[part], power)
        sums = crowd.keys[:, head]
        weight = linear(q, sums[:, None])
        # Where no key of the crowd meets the query in the whole ball, any weight serves until the end.
        alone = (live(asks[part]) & (sums > 0)).sum(-1) == 0
        silent = alone & ((live(asks[part]) & live(keys[part])).sum(-1) == 0)
        zero = constant(q.noise, torch.zeros_like(q.center))
        weight = select(alone, constant(q.noise, torch.ones_like(weight.center)), weight)
        others = quotient(linear(q, crowd.products[:, head].mT), weight)
        overlap = inner(q, k)
        share = quotient(overlap, plus(scale(moving.scale, weight), overlap))
        # Both are multiples of their points' scales, the result one of the query's.
        others = scale(query.scale, others)
        if query is moving:
            change = plus(values[head], times(others, -1.0))
        else:
            change = plus(scale(query.scale, quotient(values[head], moving.scale, moving.floor)), times(others, -1.0))
        itself = plus(others, change)
        q.noise.fail(alone & ~silent & (overlap.center - spread(overlap) <= 0).squeeze(-1))
        average = select(alone, itself, plus(others, scale(share, change)))
        averages.append(select(silent, zero, average))
    residual = layer.residual
    as_stated(residual, nn.Linear)
    weight = residual.weight.detach().double()
    kept = linear(join(*own, query.scale), torch.cat([weight, bias_of(residual)[:, None]], dim=1))
    ratio = root(layer.manifold_hidden) / root(layer.manifold_out)
    return times(plus(join(*averages), kept), ratio)


def _affine(layer: HTC, points: Tensor) -> Tensor:
    weight, bias = affine_of(layer)
    return points @ weight.T + bias


def live(form: Form) -> Tensor:
    """The entries that may be positive."""
    return form.center + spread(form) > 0


def _split(form: Form, parts: list[slice]) -> list[Form]:
    return [form[part] for part in parts]
