"""Decoders of pairs again, from their papers, as loops over pairs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from holonomy import layers
from tests.reference.hyperbolic import Vector, curvature, dot, length, plus, point, rowwise, squared_distance, times


def fermi_dirac(module: layers.FermiDiracDecoder, x: Tensor, y: Tensor) -> Tensor:
    """Logits of 1 / (exp((d^2 - r) / t) + 1)."""
    kappa, (radius,) = curvature(module.manifold), module.radius.unbind()
    temperature = module.log_temperature.exp().reshape(())

    def logit(a: Vector, b: Vector) -> Vector:
        square = squared_distance(point(a[1:], kappa), point(b[1:], kappa), kappa)
        return [-torch.log(torch.exp((square - radius) / temperature) + 1 - 1)]

    return rowwise(logit, x, y).squeeze(-1)


def cones(module: layers.EntailmentCones, parent: Tensor, child: Tensor) -> Tensor:
    """Ganea et al. 2018, eqs. 22, 23, 28 and 33, on the unit Poincare ball."""
    kappa = curvature(module.manifold)
    root = (-kappa).sqrt()

    def ball(p: Vector) -> Vector:
        space = times(root, p[1:])
        return times(1 / (1 + (1 + dot(space, space)).sqrt()), space)

    def energy(a: Vector, b: Vector) -> Vector:
        x, y = ball(a), ball(b)
        xx, yy, xy = dot(x, x), dot(y, y), dot(x, y)
        sine = module.constant * (1 - xx) / xx.sqrt()
        aperture = torch.asin(sine) if sine < 1 else torch.full_like(sine, math.pi / 2)
        gap = length(plus(x, times(-1, y)))
        cosine = (xy * (1 + xx) - xx * (1 + yy)) / (xx.sqrt() * gap * (1 + xx * yy - 2 * xy).sqrt())
        return [torch.relu(torch.acos(cosine) - aperture)]

    return rowwise(energy, parent, child).squeeze(-1)


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.EntailmentCones: cones,
    layers.FermiDiracDecoder: fermi_dirac,
}
