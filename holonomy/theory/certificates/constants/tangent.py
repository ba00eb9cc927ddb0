r"""Lipschitz constants of linear maps of the tangent space at the origin: H14.

Everything is in unit coordinates: points :math:`\exp_o(u)`, with the metric

.. math:: |du|^2_u = |du_\parallel|^2 + S(|u|)^2\, |du_\perp|^2, \qquad S(r) = \frac{\sinh r}{r}

of the parts along u and across it. Proofs: the page *Certificates*.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from holonomy._shapes import Float
from holonomy.theory.certificates.constants.midpoint import exponential_stretch

# Parts of the ball's radius on which a shift is bounded by numbers.
_SHELLS = 256
# The largest number whose sinh is a float.
_LARGEST = 700.0


def tangent_stretch(weight: Float[Tensor, "out dim"], shift: float = 0.0, radius: float = math.inf) -> float:
    r"""The Lipschitz constant of :math:`\exp_o(u) \mapsto \exp_o(W u + b)` on the ball: H14.

    .. math:: \mathrm{Lip}_{B_\rho} \le \begin{cases}
            |W| & |W| \le 1 \text{ or } W \text{ is a row or a column} \\
            \sinh(|W| \rho) / \sinh \rho & \text{else}
        \end{cases}

    without bias, exactly where the two largest singular values are equal; with one of length ``shift``, that times
    :func:`shift_stretch` on the ball of radius :math:`|W| \rho`, or :math:`|W| S(|W| \rho + |b|)` where that is less.
    """
    norm = torch.linalg.matrix_norm(weight.detach().double(), 2).item()
    if norm == 0:
        return 0.0
    turning = norm if norm <= 1 or min(weight.shape) == 1 else _growth(norm, radius)
    if shift == 0 or len(weight) == 1:
        return turning
    far = norm * radius
    return min(turning * shift_stretch(shift, far), norm * exponential_stretch(far + shift))


def shift_stretch(shift: float, radius: float) -> float:
    r"""A bound of the Lipschitz constant of :math:`\exp_o(u) \mapsto \exp_o(u + b)` on the ball: H14.

    With :math:`\theta` the angle between u and :math:`u' = u + b`, :math:`\sin\theta \le |b| / \max(|u|, |u'|)`, the
    stretch at u is at most :math:`S(|u'|)`, and at most the norm of

    .. math:: \begin{pmatrix} 1 & \sin\theta / S(|u|) \\ S(|u'|) \sin\theta & S(|u'|) / S(|u|) \end{pmatrix} ,

    whose entries are bounded on each of 256 shells of the ball.
    """
    if math.isinf(radius) or radius + shift > _LARGEST:
        return math.inf
    edges = [radius * place / _SHELLS for place in range(_SHELLS + 1)]
    return max(_on_shell(shift, *ends) for ends in pairwise(edges))


def _on_shell(shift: float, low: float, high: float) -> float:
    """The bound where |u| lies between two numbers."""
    far = exponential_stretch(high + shift)
    turn = min(1.0, shift / low) if low else 1.0
    # S(r) min(1, |b| / max(low, r)) grows up to the larger of |b| and low; beyond, its logarithm is convex.
    ends = max(low, shift), high + shift
    lifted = max(exponential_stretch(r) * min(1.0, shift / r) for r in ends)
    grown = far / exponential_stretch(high)
    matrix = torch.tensor([[1.0, turn / exponential_stretch(low)], [lifted, grown]], dtype=torch.float64)
    return min(far, torch.linalg.matrix_norm(matrix, 2).item())


def _growth(norm: float, radius: float) -> float:
    """The ratio of sinh at the norm times the radius and at the radius, for norms above one."""
    if radius == 0:
        return norm
    above = norm * radius
    return math.sinh(above) / math.sinh(radius) if above <= _LARGEST else math.inf
