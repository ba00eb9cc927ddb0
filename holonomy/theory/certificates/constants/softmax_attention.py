r"""Lipschitz constants of hyperbolic softmax attention (H8), over a ball and at an input, and its rank collapse (H9).

Everything is in unit coordinates, curvature -1: logits are :math:`-s\,d^2`, :math:`-s\,d_L^2` or :math:`-s\,d` with the
s that unit distances need, and points are given by their space parts. Proofs: the page *Certificates*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holonomy import checks, numerics
from holonomy._shapes import Float
from holonomy.manifolds import hyperboloid
from holonomy.ops.softmax_attention import Similarity
from holonomy.theory.attention.sizes import times
from holonomy.theory.certificates.constants.midpoint import midpoint_shares, unit_curvature, weights_bound
from holonomy.theory.certificates.stretching import Metric


@dataclass(frozen=True)
class Extent:
    """How far apart queries, keys and values of one head can be, in unit coordinates."""

    keys: float  # diameter of the keys
    reach: float  # the largest distance of a query from a key
    values: float  # diameter of the values


def unit_scale(similarity: Similarity, channels: int, curvature: float) -> float:
    r"""The logits' factor s in unit coordinates: :math:`1/(c \sqrt d)` for squares, :math:`1/\sqrt{c\,d}` else."""
    c = -curvature
    return 1 / math.sqrt(channels) / (math.sqrt(c) if similarity == "geodesic" else c)


def _slopes(similarity: Similarity, scale: float, extent: Extent) -> tuple[float, float, float]:
    """The diameter of the logits' gradients in the query, their gradient in the key, their oscillation."""
    far = extent.reach
    if similarity == "geodesic":
        return 2 * scale, scale, scale * far
    if similarity == "geodesic_squared":
        return 2 * scale * extent.keys, 2 * scale * far, scale * far**2
    if far >= numerics.widest_rapidity(torch.float64):
        return math.inf, math.inf, math.inf
    sinh, cosh = math.sinh(far), math.cosh(far)
    return 2 * scale * min(2 * sinh, cosh * extent.keys), 2 * scale * sinh, 2 * scale * (cosh - 1)


def softmax_stretch(
    query: float,
    key: float,
    value: float,
    extent: Extent,
    *,
    scale: float,
    similarity: Similarity = "geodesic_squared",
    metric: Metric = "sup",
    tokens: int | None = None,
    masked: bool = False,
) -> float:
    r"""The Lipschitz constant of one head, over all inputs of this extent: H8.

    .. math::
        \text{sup:}\quad & L_v + \tfrac h2 g L_q + h g' L_k, \\
        \text{l2:}\quad & \sqrt C L_v + \tfrac h2 g L_q + g' \sqrt{h \tanh(D_V)\, C}\, L_k,

    :math:`h = \tanh(D_V/2)`, :math:`C = n / (1 + (n-1) e^{-D_\ell} / \cosh D_V)`, n itself where queries have masks of
    their own. With logits :math:`-s\,d` the sup constant is :math:`L_v + s h (L_q + L_k)`: it needs no radius.
    """
    towards, away, spread = _slopes(similarity, scale, extent)
    h = math.tanh(extent.values / 2)
    by_query, by_key = times(h / 2 * query, towards), times(key, away)
    if metric == "sup":
        return value + by_query + times(h, by_key)
    if tokens is None:
        raise ValueError("tokens must be given in the l2 metric: the constant grows with their number.")
    # |p|_2^2 is at most the largest row sum of the shares, one, times the largest column sum, which C bounds.
    ratio = math.exp(-min(spread, 700.0)) / math.cosh(min(extent.values, 700.0))
    columns = float(tokens) if masked else tokens / (1 + (tokens - 1) * ratio)
    return math.sqrt(columns) * value + by_query + times(math.sqrt(h * math.tanh(extent.values) * columns), by_key)


def local_softmax_stretch(
    query: Float[Tensor, "n dim"],
    key: Float[Tensor, "n dim"],
    value: Float[Tensor, "n values"],
    stretches: Sequence[Tensor],
    *,
    scale: float,
    similarity: Similarity = "geodesic_squared",
    metric: Metric = "sup",
) -> float:
    r"""A bound of the stretch of one head at an input: the local form of H8.

    .. math:: |p\, \mathrm{diag}(s_v)|_2 + \max_i |C_i|_2 s_{q,i} + |B\, \mathrm{diag}(s_k)|_2, \qquad
        C_i = \sum_j p_{ij} \tanh(d_{ij})\, u_{ij} \otimes \nabla_q \ell_{ij}, \quad
        B_{ij} = p_{ij} \tanh(d_{ij}) |\nabla_k \ell_{ij}|,

    p the shares of H5, :math:`d_{ij}, u_{ij}` distance and direction of value j from midpoint i. In the sup metric the
    norms of p and B are largest row sums.
    """
    kappa = unit_curvature().to(query.device)
    query, key, value = (hyperboloid.lift(numerics.widen(z), kappa) for z in (query, key, value))
    s_query, s_key, s_value = (numerics.widen(s) for s in stretches)
    distance = hyperboloid.cdist(query, key, kappa)
    logits, slope = _logits(distance, scale, similarity)
    weights = logits.softmax(-1)
    shares, away = midpoint_shares(weights, value[..., 1:])
    middle = hyperboloid.centroid(value, weights, kappa)
    # Unit directions in orthonormal frames: of the values seen from the midpoints, of the keys from the queries.
    outward = shares[..., None] * away.tanh()[..., None] * _directions(middle, value)
    inward = slope[..., None] * _directions(query, key)
    # |C_i| s_q, p s_v and B s_k.
    of_query = torch.linalg.matrix_norm(outward.mT @ inward, 2) * s_query
    of_value = shares * s_value
    of_key = shares * away.tanh() * slope * s_key
    if metric == "sup":
        # The three act on one row: their sum may be taken before the maximum.
        return (of_value.sum(-1) + of_query + of_key.sum(-1)).amax().item()
    norms = [torch.linalg.matrix_norm(part, 2).item() for part in (of_value, of_key)]
    return sum(norms) + of_query.amax().item()


def _logits(distance: Tensor, scale: float, similarity: Similarity) -> tuple[Tensor, Tensor]:
    """Logits and the lengths of their gradients."""
    if similarity == "geodesic":
        return -scale * distance, torch.full_like(distance, scale)
    if similarity == "geodesic_squared":
        return -scale * distance.square(), 2 * scale * distance
    return -2 * scale * (distance.cosh() - 1), 2 * scale * distance.sinh()


def _directions(x: Tensor, y: Tensor) -> Tensor:
    """Unit tangent vectors from x_i to y_j in the frame transported from the origin, ``(i, j, d)``; zero if equal."""
    return numerics.unit_vector(hyperboloid.logmap_frame(x[:, None], y[None], unit_curvature().to(x.device)))


def hyperbolic_collapse_bound(queries: float, keys: float, values: float, scale: float) -> float:
    r"""The diameter of what softmax attention with logits :math:`-s\,d^2` puts out: H9.

    .. math:: \tanh(\mathrm{diam}(out)/2) \le \tanh(\mathrm{diam}(V)/2)\,
        \tanh\big(s\, \mathrm{diam}(Q)\, \mathrm{diam}(K) / 2\big)

    from those of queries, keys and values, in unit coordinates, and the scale s. No radius, no number of tokens; its
    flat limit is Theorem RC's form ``pair`` at N = 1. One mask of keys shared by all queries is covered, masks of their
    own are not.

    >>> hyperbolic_collapse_bound(0.0, 1.0, 5.0, 1.0)  # one query
    0.0
    """
    for name, value in (("queries", queries), ("keys", keys), ("values", values), ("scale", scale)):
        checks.in_range(name, value, 0.0, math.inf)
    return weights_bound(values, 2 * times(times(scale, queries), keys))
