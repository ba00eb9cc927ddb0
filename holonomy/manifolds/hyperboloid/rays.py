"""Points in polar form, and sums over all pairs of two sets of them, in unit coordinates and float64.

Every quantity is a sum of positive terms, or of differences of the numbers that came in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, numerics


class Rays(NamedTuple):
    """Points in unit coordinates: lengths, times, unit vectors as ``axis + offset``, where small angles keep digits."""

    points: Tensor
    length: Tensor
    time: Tensor
    offset: Tensor
    axis: Tensor

    def unit(self) -> Tensor:
        """The unit vectors."""
        return self.axis + self.offset


def rays_of(x: Tensor) -> Rays:
    """Points anywhere: without an axis."""
    length, time = polar(x)
    return Rays(x, length, time, numerics.safe_div(x, length), torch.zeros_like(x[..., :1, :]))


def polar(x: Tensor) -> tuple[Tensor, Tensor]:
    """Length of the space part, and time, in unit coordinates."""
    length = numerics.norm(x, keepdim=True)
    return length, time_of(length)


def time_of(length: Tensor) -> Tensor:
    """Time coordinate, in unit coordinates, of a point whose space part has this length."""
    return numerics.hypot(length, torch.ones_like(length))


def chord_of(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean distances of all pairs."""
    if _autograd.forward_mode():  # in which torch's function has no second derivative
        return numerics.norm(x.unsqueeze(-2) - y.unsqueeze(-3))
    # By differences: the product form loses every chord below 1e-8.
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def sinh_difference(x_norm: Tensor, x_time: Tensor, y_norm: Tensor, y_time: Tensor) -> Tensor:
    """sinh(a - b) = (|x|^2 - |y|^2) / (|x| y_t + |y| x_t) for all pairs, zero where both radii are."""
    x_slope, y_slope = x_norm / x_time, (y_norm / y_time).mT
    return numerics.safe_div((x_norm - y_norm.mT) * (x_slope / y_time.mT + y_slope / x_time), x_slope + y_slope)


def weighted_gap(x: Rays, y: Rays, weights: Tensor, share: Tensor) -> Tensor:
    """``sum_j u_ij (y_t_j x_i / x_t_i - y_j)``, the gradient of ``sum_j u_ij cosh d(x_i, y_j)`` in x."""
    # Weights are u times y_t, and ``share`` is 1 / y_t; or they are u, and it is one, where the product might overflow.
    # Away from the origin the radial component is summed by itself, from ``sinh(a - b) + cosh(a) |y| (1 - cos)``, and
    # the rest projected off the ray, since their difference is too small to survive the subtraction.
    klein, direction, times = y.points * share, x.unit(), (y.time * share).mT
    plain = (weights * times).sum(-1, keepdim=True) * (x.points / x.time) - weights @ klein
    chord = chord_of(x.offset, y.offset)
    held = y.length.clamp(min=1)
    far = sinh_difference(x.length, x.time, held, time_of(held)) / x.time * share.mT
    far = far + (held * share).mT * chord.square() / 2
    radial = torch.where(y.length.mT <= 1, x.length / x.time * times - direction @ klein.mT, far)
    lengths = (y.length * share).mT
    # At least one, also of no points.
    unit = numerics.power_of_two(torch.nn.functional.pad(lengths.detach(), (0, 1), value=1.0).amax(-1, keepdim=True))
    shares = weights * (lengths / unit)
    across = (shares @ y.offset - shares.sum(-1, keepdim=True) * x.offset) * unit
    for _ in range(2):  # once leaves a rounding of pull along the ray, where the metric stretches it by the time of x
        across = across - direction * (direction * across).sum(-1, keepdim=True)
    split = direction * (weights * radial).sum(-1, keepdim=True) - across
    return torch.where(x.length > 1, split, plain)


def any_nan(*inputs: Tensor) -> Tensor:
    """Whether ``nan`` came in, which is to be seen in gradients."""
    return torch.stack([x.isnan().any() for x in inputs]).any()
