r"""The least value of a quadratic function of the perturbation: L14.

**L14.** For symmetric H with eigenvalues :math:`\lambda_i`, every g and every :math:`\mu \ge 0` above all
:math:`-\lambda_i`, with :math:`\gamma` the coordinates of g in the eigenvectors,

.. math:: \min_{|d| \le 1} g \cdot d + d^\top H d \ge -\mu - \sum_i \frac{\gamma_i^2}{4 (\mu + \lambda_i)} ,

with equality at the largest value of the right.

*Proof.* For :math:`|d| \le 1` the left is at least :math:`-\mu + g \cdot d + d^\top (\mu + H) d`, which is least at
:math:`d = -(\mu + H)^{-1} g / 2`. Equality is the duality of the trust-region problem (Conn, Gould and Toint,
*Trust-region methods*, 2000, section 7.2). QED

The eigenvectors that are computed are orthonormal and make H diagonal up to rounding of the size of H and g, which is
taken off. Every :math:`\mu` gives a bound: the search for the best costs tightness, never soundness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holonomy._shapes import Bool, Float
from holonomy.theory.affine.arithmetic.forms import ROUNDING, eigenvalues

# The search for the multiplier: parts that what encloses it is cut into, and how often. The bound is then off by the
# square of what the multiplier is off.
_PARTS, _ROUNDS = 32, 4
# Relative to all sizes: the multiplier stays so far above where the sum has its poles.
_APART = 2.0**-40


@dataclass(frozen=True)
class Quadratic:
    r"""Functions :math:`c + g \cdot d + d^\top H d` on the unit ball; each, less a loss, is below some number."""

    center: Float[Tensor, "*batch"]
    gradient: Float[Tensor, "*batch first"]
    matrix: Float[Tensor, "*batch first first"]
    loss: Float[Tensor, "*batch"]

    @classmethod
    def linear(cls, center: Tensor, gradient: Tensor, loss: Tensor) -> Quadratic:
        """One without a quadratic part."""
        return cls(center, gradient, gradient.new_zeros(*gradient.shape, gradient.shape[-1]), loss)

    def plus(self, other: Quadratic) -> Quadratic:
        """The sum of two."""
        return Quadratic(
            self.center + other.center,
            self.gradient + other.gradient,
            self.matrix + other.matrix,
            (self.loss + other.loss + ROUNDING * (self.size + other.size)) * (1 + ROUNDING),
        )

    def times(self, factor: float) -> Quadratic:
        """A multiple by a number that is not negative."""
        loss = (self.loss + ROUNDING * self.size) * (factor * (1 + ROUNDING))
        return Quadratic(self.center * factor, self.gradient * factor, self.matrix * factor, loss)

    def __getitem__(self, index: int | Tensor | tuple[int | Tensor, Tensor]) -> Quadratic:
        """Some of them."""
        return Quadratic(self.center[index], self.gradient[index], self.matrix[index], self.loss[index])

    def where(self, better: Bool[Tensor, "*batch"], other: Quadratic) -> Quadratic:
        """Another where it is better."""
        pairs = zip(vars(other).values(), vars(self).values(), strict=True)
        return Quadratic(
            *(torch.where(better.view(*better.shape, *[1] * (a.ndim - better.ndim)), a, b) for a, b in pairs)
        )

    def least(self) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch first"]]:
        """A bound of the least value, and a perturbation that is about where it is."""
        value, where = least(self.gradient, self.matrix)
        loss = self.loss + ROUNDING * (self.center.abs() + value.abs())
        return self.center + value - loss * (1 + ROUNDING), where

    @property
    def size(self) -> Float[Tensor, "*batch"]:
        """A bound of the function's size."""
        return self.center.abs() + self.gradient.norm(dim=-1) + self.matrix.norm(dim=(-2, -1))


def between(matrix: Float[Tensor, "*batch first first"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    r"""Middle and half of an interval that holds :math:`d^\top H d` on the unit ball (L16.1)."""
    values = eigenvalues(matrix)
    slack = ROUNDING * matrix.norm(dim=(-2, -1))
    low, high = (values[..., 0] - slack).clamp(max=0), (values[..., -1] + slack).clamp(min=0)
    return (low + high) / 2, (high - low) / 2


def least(
    gradient: Float[Tensor, "*batch first"], matrix: Float[Tensor, "*batch first first"]
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch first"]]:
    r"""L14: at most the least of :math:`g \cdot d + d^\top H d`, and a d of about that value; nan if not finite."""
    finite = torch.isfinite(matrix).all(-1).all(-1) & torch.isfinite(gradient).all(-1)
    values, vectors = torch.linalg.eigh(torch.where(finite[..., None, None], matrix, 0.0))
    turned = (torch.where(finite[..., None], gradient, 0.0)[..., None, :] @ vectors).squeeze(-2)
    size = turned.norm(dim=-1)
    scale = size + values.abs().amax(-1)
    # Between a multiplier at which the point may be too long, and one at which it is not.
    low = (-values[..., 0]).clamp(min=0) + scale * _APART
    high = low + size / 2
    share = torch.linspace(0, 1, _PARTS + 1, dtype=low.dtype)
    for _ in range(_ROUNDS):
        middle = low[..., None] + (high - low)[..., None] * share
        long = (turned[..., None, :] / (middle[..., None] + values[..., None, :])).square().sum(-1) > 4
        last = long[..., 1:-1].sum(-1, keepdim=True)
        low, high = (middle.gather(-1, last + after).squeeze(-1) for after in (0, 1))
    gap = high[..., None] + values
    point = torch.where(gap > 0, -turned / (2 * torch.where(gap > 0, gap, 1.0)), 0.0)
    value = -high + (turned * point).sum(-1) / 2
    loss = ROUNDING * (matrix.shape[-1] * matrix.norm(dim=(-2, -1)) + size + high + value.abs())
    # What is left of the length goes where the curvature is least.
    left = (1 - point.square().sum(-1)).clamp(min=0) * (values[..., 0] < 0)
    longer = (point[..., :1].square() + left[..., None]).sqrt()
    first = torch.where(point[..., :1] < 0, -longer, longer)
    point = (vectors @ torch.cat([first, point[..., 1:]], -1)[..., None]).squeeze(-1)
    return torch.where(finite, value - loss, torch.nan), point
