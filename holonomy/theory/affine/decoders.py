r"""Decoders of affine forms of tangent vectors at the origin: linear, HypMLR, HypPrototypes.

The point :math:`\exp_o(u)` has the space part :math:`u \sinh(k|u|)/(k|u|)` (L1 in :math:`|u|^2`, L2), and its time is a
length (L3). Both hyperbolic decoders are then a function of one linear form for each class (L1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holonomy.layers import HypMLR, HypPrototypes
from holonomy.manifolds import Lorentz
from holonomy.theory.affine.arithmetic.entrywise import arsinh, minus_squared_arcosh, sinhc_of_square
from holonomy.theory.affine.arithmetic.forms import Form, constant, join, linear, plus, times
from holonomy.theory.affine.arithmetic.lengths import length
from holonomy.theory.affine.arithmetic.products import scale, squared_length
from holonomy.theory.affine.points import bias_of, root
from holonomy.theory.attention.projections import NotCoveredError, as_stated

# The farthest hyperplanes of HypMLR, in curvature radii.
_FARTHEST = 300.0


def refuse_decoder(decoder: nn.Module) -> None:
    """Refuse a decoder that is not covered."""
    for kind in (nn.Linear, HypMLR, HypPrototypes):
        if isinstance(decoder, kind):
            as_stated(decoder, kind)
            return
    raise NotCoveredError(f"decoder must be linear, HypMLR or HypPrototypes, got {type(decoder).__name__}.")


def decoded(decoder: Any, tangent: Form, manifold: Lorentz) -> Form:
    """The logits of a tangent vector."""
    if isinstance(decoder, nn.Linear):
        return linear(tangent, decoder.weight.double(), bias_of(decoder))
    point = _exponential(tangent, manifold)
    return _hyperplanes(decoder, point) if isinstance(decoder, HypMLR) else _prototypes(decoder, point)


def _exponential(tangent: Form, manifold: Lorentz) -> Form:
    k = root(manifold)
    space = scale(sinhc_of_square(times(squared_length(tangent), k * k)), tangent)
    radius = constant(space.noise, torch.ones_like(space.center[:, :1]) / k)
    return join(length(join(space, radius)), space)


def _hyperplanes(decoder: HypMLR, point: Form) -> Form:
    weight, k = decoder.weight.double(), root(decoder.manifold)
    size = weight.norm(dim=-1, keepdim=True)
    normal = weight / torch.where(size > 0, size, 1.0)
    shift = (k * decoder.offset.double()).clamp(-_FARTHEST, _FARTHEST)
    plane = torch.cat([-shift.tanh()[:, None], normal], dim=-1)
    return times(arsinh(times(linear(point, plane), k * shift.cosh())), size.squeeze(-1) / k)


def _prototypes(decoder: HypPrototypes, point: Form) -> Form:
    k = root(decoder.manifold)
    points = decoder.prototypes().double()
    rows = torch.cat([points[:, :1], -points[:, 1:]], dim=-1) * (k * k)
    # -c <x, p> - 1 is cosh of the distance, less one.
    apart = plus(linear(point, rows), constant(point.noise, -torch.ones_like(rows[:, 0]).expand(len(point.center), -1)))
    strength = decoder.log_scale.double().exp()
    return times(minus_squared_arcosh(apart), strength / (k * k))
