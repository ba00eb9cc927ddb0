r"""Hyperbolic softmax attention as pure functions: Hypformer eqs. 3-5.

Axes: ``(*batch, nodes, channels)`` SPACE parts of points on :math:`L^{d,\kappa}`, heads among the
batch axes; the time coordinates are made here, where they are used. A mask is boolean, ``True``
where a key is to be ignored.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Bool, Float
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.midpoints import midpoint_of_sum
from holonomy.ops.dot_product import dot_product_attention
from holonomy.ops.masks import masked_softmax, pair_masks

Similarity = Literal["geodesic_squared", "lorentz_squared", "geodesic"]
r"""What the logits are, before the division by :math:`\sqrt{d}`: minus the squared geodesic
distance (eq. 5 as printed), minus the squared Lorentzian distance
:math:`\langle q-k, q-k\rangle` (the released code), minus the geodesic distance."""

SIMILARITIES: tuple[Similarity, ...] = ("geodesic_squared", "lorentz_squared", "geodesic")


def hyperbolic_softmax_attention(
    query: Float[Tensor, "*batch query channels"],
    key: Float[Tensor, "*batch key channels"],
    value: Float[Tensor, "*batch key values"],
    mask: Bool[Tensor, "*#batch key"] | None = None,
    *,
    curvature: Float[Tensor, "*one"],
    similarity: Similarity = "geodesic_squared",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch query values"]:
    r"""Midpoints of the values with weights :math:`\mathrm{softmax}_j(\ell_{ij})`, Hypformer eqs. 3-5.

    ====================== =============================================================
    ``similarity``         logits :math:`\ell_{ij}`, d the number of channels
    ====================== =============================================================
    ``"geodesic_squared"`` :math:`-d(q_i, k_j)^2 / \sqrt d`, eq. 5 as printed
    ``"lorentz_squared"``  :math:`-\langle q_i - k_j, q_i - k_j\rangle / \sqrt d`
    ``"geodesic"``         :math:`-d(q_i, k_j) / \sqrt d`, Lipschitz without a bound on the radius
    ====================== =============================================================

    The squared Lorentzian distance is :math:`2/\kappa - 2\langle q, k\rangle`, whose constant softmax does not
    see: it runs as scaled dot-product attention with queries :math:`(-q_t, q_s)`. Its logits are differences of
    numbers of size :math:`q_t k_t`, and midpoints of sums of numbers of size :math:`|\kappa| v_t^2`: results are off by
    :math:`10\,\epsilon t^2`, t the largest of the three times (in float32 at :math:`\kappa = -1` by 1e-3 at rapidity 4,
    by 5e-2 at 6). Points with :math:`|x_s| > \epsilon^{-1/2}` (2896 in float32, rapidity 8.7), of which rounding leaves
    no digit, are compared as if they lay at that radius. The two other similarities have no such limit: take one of
    them, or float64, for points beyond rapidity 4.
    A query whose keys are all masked gets the origin. ``attn_mask`` is that of :func:`~holonomy.ops.masks.split_mask`;
    with ``is_causal`` queries are the last of the keys, and attend to none after themselves.
    """
    if mask is not None:
        key = key.masked_fill(mask[..., None], 0.0)
        value = value.masked_fill(mask[..., None], 0.0)
    queries, keys = query.shape[-2], key.shape[-2]
    # What torch's kernel skips by itself needs no mask.
    fused = is_causal and queries == keys and mask is None and attn_mask is None and dropout == 0.0
    fused = fused and similarity == "lorentz_squared"
    hidden, bias = pair_masks(query, keys, mask, attn_mask, is_causal=is_causal and not fused)
    if dropout > 0.0:
        # The midpoint does not depend on a common factor of the weights, so a dropped weight is a hidden key.
        weights = query.new_empty(*query.shape[:-1], keys, dtype=torch.float32)
        dropped = torch.rand_like(weights) < dropout
        hidden = dropped if hidden is None else dropped | hidden
    if similarity != "lorentz_squared":
        weights = masked_softmax(_geodesic_logits(query, key, curvature, similarity), hidden, bias)
        return weighted_midpoint(value, weights, curvature=curvature)
    # -<q - k, q - k> = 2 <q, k> + a constant that softmax ignores.
    # Gradients of weights are as long as values are.
    values = hyperboloid.held(hyperboloid.lift(value, curvature), numerics.ROOM)
    reflected, point = _dot_product_form(query, key, curvature)
    allowed = None if hidden is None else ~hidden
    scale = 2 / math.sqrt(query.shape[-1])
    total = dot_product_attention(reflected, point, values, allowed, bias=bias, is_causal=fused, scale=scale)
    total = numerics.widen(total)
    mass = torch.full_like(total[..., :1], 1.0 if keys else 0.0)
    if hidden is not None:
        mass = mass.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    middle = midpoint_of_sum(total, mass, curvature, torch.finfo(value.dtype).eps)
    return numerics.narrow(middle, value.dtype)


def hyperbolic_softmax_weights(
    query: Float[Tensor, "*batch query channels"],
    key: Float[Tensor, "*batch key channels"],
    mask: Bool[Tensor, "*#batch key"] | None = None,
    *,
    curvature: Float[Tensor, "*one"],
    similarity: Similarity = "geodesic_squared",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "*batch query key"]:
    """The weights of :func:`hyperbolic_softmax_attention`; zero where a query has no key."""
    if mask is not None:
        key = key.masked_fill(mask[..., None], 0.0)
    hidden, bias = pair_masks(query, key.shape[-2], mask, attn_mask, is_causal=is_causal)
    if similarity == "lorentz_squared":
        reflected, point = _dot_product_form(query, key, curvature)
        logits = reflected @ point.transpose(-2, -1) * (2 / math.sqrt(query.shape[-1]))
    else:
        logits = _geodesic_logits(query, key, curvature, similarity)
    return masked_softmax(logits, hidden, bias)


def _geodesic_logits(query: Tensor, key: Tensor, curvature: Tensor, similarity: Similarity) -> Tensor:
    """The logits of :func:`hyperbolic_softmax_attention` that are geodesic distances."""
    scale = 1 / math.sqrt(query.shape[-1])
    distance = hyperboloid.cdist(hyperboloid.lift(query, curvature), hyperboloid.lift(key, curvature), curvature)
    return -scale * (distance if similarity == "geodesic" else distance.square())


def weighted_midpoint(
    value: Float[Tensor, "*batch key values"],
    weights: Float[Tensor, "*batch query key"],
    *,
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch query values"]:
    r"""The Lorentzian midpoint, Hypformer eq. 4.

    .. math:: s_i / \sqrt{|\kappa|\,|\langle s_i, s_i\rangle|}, \qquad s_i = \sum_j a_{ij} v_j

    Right to 1e-6 for values up to rapidity 11, and for coincident ones at any radius; ``hyperboloid.centroid`` loses no
    digit anywhere, at the price of all angles between results and values.
    """
    wide = numerics.widen(weights)
    total = wide @ hyperboloid.lift(numerics.widen(value), curvature)
    middle = midpoint_of_sum(total, wide.sum(-1, keepdim=True), curvature, torch.finfo(wide.dtype).eps)
    return numerics.narrow(middle, value.dtype)


def _dot_product_form(query: Tensor, key: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
    """``(-q_t, q_s)`` and ``(k_t, k_s)``, whose Euclidean product is the Lorentzian one of q and k."""
    limit = torch.finfo(query.dtype).eps ** -0.5
    query, key = numerics.within(query, limit), numerics.within(key, limit)
    reflected = torch.cat([-hyperboloid.time(query, curvature), query], -1)
    return reflected, hyperboloid.lift(key, curvature)
