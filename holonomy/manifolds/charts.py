r"""The hyperboloid in two balls of radius :math:`1/\sqrt{-\kappa}`: Poincare's keeps angles, Klein's keeps lines.

Near the rim a ball coordinate has few digits left: with a spacing ``eps`` of the dtype, points farther than about
:math:`\log(1/\text{eps})/\sqrt{-\kappa}` from the origin (16 curvature radii in float32) share the last coordinate
inside the ball in Poincare's, and half that distance in Klein's. Coordinates on or beyond the rim are read as that
last one, so that results are finite; the methods of :class:`~holonomy.manifolds.Lorentz` refuse those beyond it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Ambient, Float
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.rays import polar


def to_poincare(x: Ambient, kappa: Float[Tensor, "..."]) -> Float[Tensor, "... dim"]:
    r"""Stereographic projection :math:`x_s / (1 + \sqrt{-\kappa}\, x_t)`, to Geoopt's ``PoincareBall(c=-kappa)``."""
    return numerics.narrow(hyperboloid.saturating(_poincare, kappa, hyperboloid.space(x)), x.dtype)


def from_poincare(p: Float[Tensor, "... dim"], kappa: Float[Tensor, "..."]) -> Ambient:
    r"""The inverse of :func:`to_poincare`: the space part is :math:`2p / (1 + \kappa |p|^2)`."""
    wide, room = _inside(p, kappa)
    return hyperboloid.lift(numerics.narrow(2 * wide / room, p.dtype), kappa)


def to_klein(x: Ambient, kappa: Float[Tensor, "..."]) -> Float[Tensor, "... dim"]:
    r"""Central projection :math:`x_s / (\sqrt{-\kappa}\, x_t)`."""
    return numerics.narrow(hyperboloid.saturating(_klein, kappa, hyperboloid.space(x)), x.dtype)


def from_klein(p: Float[Tensor, "... dim"], kappa: Float[Tensor, "..."]) -> Ambient:
    r"""The inverse of :func:`to_klein`: the space part is :math:`p / \sqrt{1 + \kappa |p|^2}`."""
    wide, room = _inside(p, kappa)
    return hyperboloid.lift(numerics.narrow(wide / room.sqrt(), p.dtype), kappa)


def _poincare(space: Tensor, scale: Tensor) -> Tensor:
    unit = numerics.finite(space * scale)
    return unit / (1 + polar(unit)[1]) / scale


def _klein(space: Tensor, scale: Tensor) -> Tensor:
    unit = numerics.finite(space * scale)
    return unit / polar(unit)[1] / scale


def _inside(p: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Ball coordinates in float64 and the room 1 - |p|^2/radius^2 left to the rim."""
    wide = numerics.widen(p)
    scaled = numerics.norm(wide, keepdim=True) * kappa.reshape(()).to(torch.float64).neg().sqrt()
    return wide, numerics.at_least_spacing((1 - scaled) * (1 + scaled), p.dtype)
