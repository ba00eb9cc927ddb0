r"""Lipschitz constants, in the hyperbolic metric, of functions of the space part: activations (H3), LayerNorm (H4).

Everything is in unit coordinates :math:`y = \sqrt c\, x`. A function that is not homogeneous changes with them:
:math:`f` becomes :math:`\sqrt c f(y / \sqrt c)`, whose slope is the same and whose :math:`z f' - e f` is
:math:`\sqrt c` times as large. Proofs: the page *Certificates*.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import numerics
from holonomy._shapes import Float
from holonomy.theory.attention.projections import NotCoveredError
from holonomy.theory.certificates.constants.affine import affine_stretch, linear_stretch

_SCAN = 1 / 1000
_SCANNED = 40.0
_SOFTPLUS_THRESHOLD = 20


class Entrywise(NamedTuple):
    r"""What H3 needs to know of a function of the line."""

    slope: float  # sup |f'|
    # Pairs of e and sup |z f'(z) - e f(z)| over z; (1, 0) for homogeneous ones.
    gaps: tuple[tuple[float, float], ...]
    offset: float = 0.0  # the least for which the next line holds
    growth: float = 1.0  # |f(z)| <= growth |z| + offset


def entrywise(function: object) -> Entrywise | None:
    """Look an activation up."""
    homogeneous = ((1.0, 0.0),)
    if isinstance(function, nn.LeakyReLU):
        slope = max(1.0, abs(function.negative_slope))
        return Entrywise(slope, homogeneous, growth=slope)
    if isinstance(function, nn.ReLU | nn.Identity) or function in (torch.relu, functional.relu, functional.leaky_relu):
        return Entrywise(1.0, homogeneous)
    if (isinstance(function, nn.GELU) and function.approximate == "none") or function is functional.gelu:
        # GELU is z Phi(z). Its slope Phi + z phi and its gap z^2 phi are both largest at z = sqrt(2).
        density = math.exp(-1) / math.sqrt(2 * math.pi)
        return Entrywise((1 + math.erf(1)) / 2 + math.sqrt(2) * density, ((1.0, 2 * density),))
    if isinstance(function, nn.SiLU) or function is functional.silu:
        return Entrywise(_supremum(_silu_slope), ((1.0, _supremum(_silu_gap)),))
    if (isinstance(function, nn.ELU) and function.alpha == 1) or function is functional.elu:
        return Entrywise(1.0, ((1.0, 1.0),))
    # Above its threshold torch's softplus is the identity, a jump; at the default threshold the jump is negligible.
    usual = isinstance(function, nn.Softplus) and function.beta == 1 and function.threshold >= _SOFTPLUS_THRESHOLD
    if usual or function is functional.softplus:
        return Entrywise(1.0, ((1.0, math.log(2)),), offset=math.log(2))
    if isinstance(function, nn.Tanh) or function in (torch.tanh, functional.tanh):
        return Entrywise(1.0, _tanh_gaps())
    return None


def entrywise_stretch(facts: Entrywise, features: int, root: float, radius: float = math.inf) -> float:
    r"""A bound of the Lipschitz constant of an entrywise function between hyperboloids: H3.

    .. math:: \min\Big( \min_e \Big| \begin{pmatrix} L & 0 \\ \delta_e & e \end{pmatrix} \Big|_2, \; L \cosh\rho \Big),
        \qquad \delta_e = \sqrt{c\, d}\, \sup_z |z \varphi' - e \varphi|

    For a homogeneous function it is :func:`~holonomy.theory.certificates.constants.affine.affine_stretch` of its slope.
    """
    slope = facts.slope
    if facts.gaps == ((1.0, 0.0),):
        return linear_stretch(slope, radius)
    scale = root * math.sqrt(features)
    bound = min(_norm(slope, scale * gap, e) for e, gap in facts.gaps)
    return min(bound, slope * math.cosh(min(radius, 300.0)))


def layer_norm_stretch(
    features: int,
    eps: float,
    weight: Float[Tensor, " dim"] | None,
    bias: Float[Tensor, " dim"] | None,
    root: float,
    variance: float = 0.0,
) -> float:
    r"""A bound of the Lipschitz constant of LayerNorm between hyperboloids: H4.

    .. math:: \frac{\mathrm{Lip}(\gamma, \sqrt c\, \beta)}{\sqrt{\mathrm{var}_{\min} + \epsilon}}

    with the constant of the affine map by H1 on the ball that normalised points fill, of radius
    :math:`\operatorname{arsinh}\sqrt{c\,d}`. Without an affine map and at zero variance it is exactly
    :math:`1/\sqrt\epsilon`.
    """
    if eps > 1:
        raise NotCoveredError(f"eps must be at most 1 for the bound of LayerNorm, got {eps}.")
    if features == 1:
        return 0.0
    affine = 1.0
    if weight is not None:
        shift = None if bias is None else root * bias
        # Normalised rows have length at most sqrt(d).
        affine = affine_stretch(torch.diag(weight), shift, math.asinh(root * math.sqrt(features)))
    return math.inf if variance + eps == 0 else affine / math.sqrt(variance + eps)


def least_variance(space: Float[Tensor, "... dim"], root: float, spread: float) -> float:
    r"""The least variance of a row over balls about points: :math:`\sinh^2(\operatorname{arsinh}|Px| - r) / (c\, d)`.

    The map to the centred point Px is 1-Lipschitz, and so is the distance to the origin.
    """
    centred = numerics.widen(space) - numerics.widen(space).mean(-1, keepdim=True)
    least = math.asinh(root * centred.norm(dim=-1).amin().item()) - spread
    return 0.0 if least <= 0 else math.sinh(least) ** 2 / (root**2 * space.shape[-1])


def _norm(slope: float, gap: float, e: float) -> float:
    return torch.linalg.matrix_norm(torch.tensor([[slope, 0.0], [gap, e]], dtype=torch.float64), 2).item()


def _supremum(function: Callable[[Tensor], Tensor]) -> float:
    """The largest value on the line of a function with a second derivative below 4 that settles within +-40."""
    # Between grid points a maximum exceeds its neighbour by less than the square of the spacing over two.
    z = torch.arange(-_SCANNED, _SCANNED + _SCAN, _SCAN, dtype=torch.float64)
    return function(z).abs().amax().item() + _SCAN**2 / 2


def _silu_slope(z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(z)
    return sigmoid * (1 + z * (1 - sigmoid))


def _silu_gap(z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(z)
    return z.square() * sigmoid * (1 - sigmoid)


@lru_cache(maxsize=1)
def _tanh_gaps() -> tuple[tuple[float, float], ...]:
    # H3 holds for every e: the bound takes the least of a grid in [0, 1].
    def gap(e: float) -> float:
        return _supremum(lambda z: z / z.cosh().square() - e * z.tanh())

    return tuple((i / 100, gap(i / 100)) for i in range(101))
