r"""Sizes of the parts of a layer, from which the bounds are made: differentiable, in the layer's dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holonomy._shapes import Float
from holonomy.theory.attention.projections import Projections


def spectral(matrices: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    """Largest singular values; infinite of a matrix that has left the dtype, of which torch finds none."""
    inside = matrices.isfinite().all(-1).all(-1)
    norms = torch.linalg.matrix_norm(torch.where(inside[..., None, None], matrices, 0.0), ord=2)
    return torch.where(inside, norms, math.inf)


def or_infinite(bound: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """A bound, infinite where sizes have left the dtype and it is no number."""
    return bound.nan_to_num(math.inf, math.inf)


def reach(
    weight: Float[Tensor, "slots heads d channels"],
    bias: Float[Tensor, "slots heads channels"] | None,
    radius: float | Tensor,
) -> tuple[Float[Tensor, "slots heads"], Float[Tensor, "slots heads"]]:
    """Spectral norms, and how long a token of the ball can be after each projection: ``|W| R + |b|``."""
    norm = spectral(weight)
    return norm, norm * radius + (0 if bias is None else bias.norm(dim=-1))


def others(factors: Float[Tensor, "slots heads *each"]) -> Float[Tensor, "slots heads *each"]:
    """For each slot the product over all others, zeros allowed."""
    return torch.stack([torch.cat([factors[:m], factors[m + 1 :]]).prod(0) for m in range(factors.shape[0])])


def through_heads(layer: Projections, heads: Float[Tensor, " heads"]) -> Float[Tensor, ""]:
    r"""From a bound for each head to the layer's, without skip connection.

    With the rows :math:`W_{O,h}` of a head, :math:`\min(|W_O| (\sum_h b_h^2)^{1/2}, \sum_h |W_{O,h}| b_h)`.
    """
    whole = heads.norm()
    if layer.out is None:
        return whole
    each = spectral(layer.out.unflatten(0, (heads.shape[0], -1)))
    return torch.minimum(spectral(layer.out) * whole, (each * heads).sum())


def times(a: float, b: float) -> float:
    """A product in which zero times infinity is zero: what does not move has no stretch."""
    return 0.0 if 0.0 in {a, b} else a * b


def diameter(points: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    r"""Largest distance of two rows, :math:`\max_{ij} |x_i - x_j|_2`."""
    # Differences, not the product of matrices, which cancels: what collapses lies in the last digits.
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.amax((-2, -1))
