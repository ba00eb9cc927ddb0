r"""Enclosures of linear attention when one token moves: L7.

Token a moves, token i asks. Everything of a token is held times the scale :math:`\nu` of its point, which is harmless:
a query matters up to a factor, and :math:`\phi` has degree one. Of the others only the sums :math:`M = \sum_j k_j
v_j^\top` and :math:`S = \sum_j k_j` count, j over all tokens but a:

.. math:: \bar v_i = A + \omega\,(v_a - A), \qquad A = \frac{M^\top q}{S \cdot q}, \qquad
    \omega = \frac{q \cdot k_a}{S \cdot q + q \cdot k_a} .

By L5 :math:`A = A_0 + (M - S A_0^\top)^\top q / (S \cdot q)`, linear in q up to one division, and q is
:math:`\mathrm{ReLU}(e)^p` by L1, without its norm. :math:`\omega` is a quotient too.

With ``average="midpoint"`` values are ambient points, and their mean is divided by its Lorentz norm (L4, L5).

The layer jumps only where :math:`S \cdot q + q \cdot k_a = 0`. A positive lower bound of :math:`S \cdot q`, which L5
needs, proves that it does not in the ball. Where no key of the crowd shares a positive entry with the query in all of
the ball, the average is :math:`v_a` if :math:`q \cdot k_a` stays positive, and zero if that vanishes too. Else the
problem has failed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holonomy._shapes import Float
from holonomy.layers import HypLinearAttention
from holonomy.ops.linear_attention.reference import power_features
from holonomy.theory.affine.arithmetic.entrywise import positive_power
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, constant, join, select
from holonomy.theory.affine.arithmetic.lengths import length, lorentz_norm
from holonomy.theory.affine.arithmetic.products import at_least, inner, quotient, scale
from holonomy.theory.affine.arithmetic.squares import bounds
from holonomy.theory.affine.attention.features import features, split, values_of
from holonomy.theory.affine.points import Scaled, affine_of, bias_of, root, transformed
from holonomy.theory.attention.projections import as_stated


@dataclass(frozen=True)
class Crowd:
    """What the tokens that stay give to all: sums over them, a head and a problem each."""

    products: Float[Tensor, "problem head key value"]
    keys: Float[Tensor, "problem head key"]


def crowd_of(layer: HypLinearAttention, points: Float[Tensor, "tokens ambient"], moving: Tensor) -> Crowd:
    """The sums over all tokens but the moving one, for each problem."""
    maps = (affine_of(part) for part in (layer.key, layer.value))
    key, value = (
        power_features((points @ weight.T + bias).unflatten(-1, (layer.heads, -1)), layer.power)
        for weight, bias in maps
    )
    value = value / layer.log_scale.double().exp()
    if layer.average == "midpoint":
        value = layer.manifold_hidden.lift(value)
    # Nothing is subtracted: beside a token far out the others are below the rounding of a sum of all.
    chosen, place = moving.unique(return_inverse=True)
    still, others = key.index_fill(0, chosen, 0.0), 1 - torch.eye(len(chosen), dtype=key.dtype)
    own = torch.einsum("phk,phv->phkv", key[chosen], value[chosen])
    products = torch.einsum("nhk,nhv->hkv", still, value) + torch.tensordot(others, own, 1)[place]
    return Crowd(products, still.sum(0) + torch.tensordot(others, key[chosen], 1)[place])


def attended(layer: HypLinearAttention, query: Scaled, moving: Scaled, crowd: Crowd) -> Form:
    """The space part of the layer's result for the query, on its output manifold, times the query's scale.

    Here query and moving token are one point, or the query's point does not move.
    """
    as_stated(layer, HypLinearAttention)
    asks, keys = split(transformed(layer.query, query), layer.heads), split(transformed(layer.key, moving), layer.heads)
    values = values_of(layer, moving)
    own = values if query is moving else values_of(layer, query)
    averages = [
        _average(layer, (query, moving), forms, crowd, head)
        for head, forms in enumerate(zip(asks, keys, values, strict=True))
    ]
    residual = layer.residual
    as_stated(residual, nn.Linear)
    weight = torch.cat([residual.weight.double(), bias_of(residual)[:, None]], dim=1)
    ratio = root(layer.manifold_hidden) / root(layer.manifold_out)
    return (join(*averages) + join(*own, query.scale).linear(weight)) * ratio


def _average(
    layer: HypLinearAttention, points: tuple[Scaled, Scaled], forms: tuple[Form, Form, Form], crowd: Crowd, head: int
) -> Form:
    """The average of one head, times the query's scale."""
    (query, moving), (asks, keys, value) = points, forms
    products, sums = crowd.products[:, head], crowd.keys[:, head]
    q, k = positive_power(asks, layer.power), features(keys, layer.power)
    noise, k_root = q.noise, root(layer.manifold_hidden)
    if layer.average == "midpoint":
        value = join(length(join(value, moving.scale * (1 / k_root))), value)
    # Where no key of the crowd meets the query in the whole ball, any weight serves until the end.
    alone = (live(asks) & (sums > 0)).sum(-1) == 0
    silent = alone & ((live(asks) & live(keys)).sum(-1) == 0)
    weight = q.linear(sums[:, None])
    weight = select(alone, constant(noise, torch.ones_like(weight.center)), weight)
    overlap = inner(q, k)
    noise.fail(alone & ~silent & (bounds(overlap)[0] <= 0).squeeze(-1))
    # Queries and keys have no negative entries.
    lower = torch.relu(asks.center - asks.spread()).pow(layer.power)
    low = torch.maximum(bounds(weight)[0], (sums * lower).sum(-1, keepdim=True) * (1 - ROUNDING * (2 + sums.shape[-1])))
    least = moving.floor * low
    share = quotient(overlap, scale(moving.scale, weight) + overlap, at_least(weight, least))
    # A value is a multiple of its point's scale, the result one of the query's.
    if query is not moving:
        value = scale(query.scale, quotient(value, moving.scale, moving.floor))
    others = scale(query.scale, quotient(q.linear(products.mT), weight, low))
    change = value - others
    average = select(alone, value, others + scale(share, change))
    if layer.average == "midpoint":
        # The mean of points has a Lorentz norm of 1/k at least, and a time as large.
        norm = lorentz_norm(average[:1], average[1:], query.floor / k_root)
        average = scale(query.scale, quotient(average[1:], norm * k_root, query.floor))
    return select(silent, constant(noise, torch.zeros_like(average.center)), average)


def live(form: Form) -> Tensor:
    """The entries that may be positive, also where that is nan."""
    return ~(form.center + form.spread() <= 0)
