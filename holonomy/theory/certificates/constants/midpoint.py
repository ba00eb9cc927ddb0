r"""How midpoints move: with their points (H5), with their weights (H6), and as residual connections (H7).

Everything is in unit coordinates, curvature -1, points given by their space parts. Proofs: the page *Certificates*.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Float
from holonomy.manifolds import hyperboloid


def unit_curvature() -> Tensor:
    """The curvature -1 as a tensor, for functions of the hyperboloid."""
    return torch.tensor(-1.0, dtype=torch.float64)


def midpoint_shares(
    weights: Float[Tensor, "*batch query key"], points: Float[Tensor, "*batch key dim"]
) -> tuple[Float[Tensor, "*batch query key"], Float[Tensor, "*batch query key"]]:
    r"""By how much each point moves the midpoint: H5.

    .. math:: |D_{Y_j} m| = p_j = \frac{a_j \cosh d(Y_j, m)}{\sum_k a_k \cosh d(Y_k, m)}, \qquad \sum_j p_j = 1

    So a midpoint moves no farther than its farthest point, and in the l2 metric by at most
    :math:`(\sum p_j^2)^{1/2}` of what its points do.
    """
    wide, kappa = numerics.widen(points), unit_curvature().to(points.device)
    lifted = hyperboloid.lift(wide, kappa)
    middle = hyperboloid.centroid(lifted, numerics.widen(weights), kappa)
    distance = hyperboloid.cdist(middle, lifted, kappa)
    pull = numerics.widen(weights) * distance.cosh()
    return pull / pull.sum(-1, keepdim=True), distance


def weights_bound(diameter: float, oscillation: float) -> float:
    r"""How far a midpoint moves when its weights change: H6, sharp.

    .. math:: \tanh\big(d(\mathrm{mid}(a, Y), \mathrm{mid}(a', Y))/2\big)
        \le \tanh(\mathrm{diam}(Y)/2) \tanh\big(\mathrm{osc}(\log a - \log a')/4\big)
    """
    product = math.tanh(diameter / 2) * math.tanh(oscillation / 4)
    return diameter if product == 1 else 2 * math.atanh(product)


def residual_stretch(branch: float, epsilon: float = 1.0) -> float:
    r"""The Lipschitz constant of :math:`x \mapsto \mathrm{mid}(x, \epsilon F(x))`, Hypformer eq. 20: H7.

    .. math:: \max_{p \in \{1/2,\; \epsilon/(1+\epsilon)\}} (1 - p) + p\, \mathrm{Lip}\, F

    The midpoint itself is the mean of both paths: for :math:`\epsilon = 1` the constant is
    :math:`(1 + \mathrm{Lip}\,F)/2`.
    """
    share = epsilon / (1 + epsilon)
    return max(1 + p * (branch - 1) if math.isfinite(branch) else math.inf for p in (0.5, share))


def exponential_stretch(radius: float) -> float:
    r"""The Lipschitz constant of the exponential map at the origin on :math:`|u| \le r`: :math:`\sinh(r)/r` (H11)."""
    if radius == 0:
        return 1.0
    return math.sinh(radius) / radius if radius < numerics.widest_rapidity(torch.float64) else math.inf


def concatenation_stretch(radius: float) -> float:
    r"""The Lipschitz constant of concatenation on a ball, in the l2 metric of the tuple: :math:`\cosh \rho` (H11)."""
    return math.cosh(radius) if radius < numerics.widest_rapidity(torch.float64) else math.inf
