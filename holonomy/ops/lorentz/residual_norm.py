r"""The layer normalisation of a Lorentzian midpoint, from points to points, without the midpoint.

The midpoint of x and :math:`w y` is :math:`z/\nu` in its space part, with :math:`z = x_s + w y_s`,
:math:`\nu^2 = c\,(T^2 - |z|^2)`, :math:`T = x_t + w y_t` and c minus the curvature. Layer normalisation undoes the
division, but for what it adds to the variance, which becomes a number of the row:

.. math::
    \mathrm{LN}_\epsilon(z/\nu) = \frac{z - \bar z}{\sqrt{\operatorname{var} z + \epsilon \nu^2}}, \qquad
    |z|^2 = d\,(\operatorname{var} z + \bar z^2) .

The difference :math:`T^2 - |z|^2` is off by rounding of :math:`|z|^2`, which times :math:`\epsilon` is nothing beside
the variance as long as :math:`\epsilon c d` is at most about one; so float32 points need no float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from holonomy import numerics
from holonomy.manifolds import hyperboloid

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["residual_norm"]


def residual_norm(
    x: Float[torch.Tensor, "*batch ambient"],
    y: Float[torch.Tensor, "*batch ambient"],
    curvature: Float[torch.Tensor, "*one"],
    gain: Float[torch.Tensor, " dim"],
    shift: Float[torch.Tensor, " dim"],
    last: Float[torch.Tensor, "*one"],
    *,
    weight: float,
    eps: float,
) -> Float[torch.Tensor, "*batch ambient"]:
    """``gain * LN(midpoint of x and weight * y) + shift``, lifted to the curvature ``last``; times are not read."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    x, y, c = x[..., 1:].to(wide), y[..., 1:].to(wide), curvature.reshape(()).neg().to(wide)
    x_time, y_time = hyperboloid.time(x, -c), hyperboloid.time(y, -c)
    # Long rows are shortened by a factor, so that squares fit; it cancels in the quotient.
    factor = numerics.squarable(torch.maximum(x_time, y_time))
    z = torch.addcmul(x * factor, y, weight * factor)
    total = x_time * factor + y_time * (weight * factor)
    mean = z.mean(-1, keepdim=True)
    centered = z - mean
    variance = centered.square().mean(-1, keepdim=True)
    square = c * (total.square() - z.shape[-1] * (variance + mean.square()))
    # nu^2 is least where the points meet; of shortened rows it is held above zero, below their rounding.
    least = torch.full_like(factor, (1 + weight) ** 2).masked_fill(factor < 1, torch.finfo(wide).eps ** 2)
    root = (variance + eps * torch.maximum(square, least)).rsqrt()
    space = torch.addcmul(shift.to(wide), centered * root, gain.to(wide))
    return hyperboloid.lift(numerics.saturating_cast(space, dtype), last)
