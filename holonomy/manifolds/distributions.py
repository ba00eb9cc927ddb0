r"""The wrapped normal distribution of Nagano et al. (2019), as a ``torch.distributions.Distribution``.

A normal vector of the tangent space at the origin is transported to the mean and mapped by the exponential there,

.. math:: z = \exp_\mu(P_{o \to \mu}\, v), \qquad v \sim N(0, \operatorname{diag} \sigma^2) .

With :math:`r = \sqrt{-\kappa}\,|v|` the exponential stretches the d - 1 directions across v by :math:`\sinh(r)/r` and
nothing else, so that the density with respect to the Riemannian volume is

.. math:: \log p(z) = \log N(v; 0, \operatorname{diag} \sigma^2) - (d - 1) \log\frac{\sinh r}{r} .
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.constraints import Constraint

from holonomy import checks, numerics
from holonomy._shapes import Ambient, Bool, Float
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.lorentz import Lorentz, require_lorentz


class WrappedNormal(Distribution):
    r"""The wrapped normal distribution on hyperbolic space (Nagano et al. 2019, *A Wrapped Normal Distribution*).

    Densities are with respect to the Riemannian volume. The batch is that of ``loc`` and ``scale`` together, events are
    points ``(d + 1,)``. Samples and densities are differentiable in ``loc``, ``scale``, the value and the curvature.
    Both and their gradients are accurate in float32 up to rapidity 86; samples beyond are moved to that distance.

    Args:
        loc: points :math:`\mu`, ``(..., d + 1)`` of ``manifold``.
        scale: standard deviations :math:`\sigma` along the axes of the tangent space at the origin, in units of length,
            ``(..., d)``, or ``(..., 1)`` for one number in all directions.
        manifold: where the points lie.

    Attributes:
        loc: expanded to the batch.
        scale: expanded to the batch and to d.
        manifold: as given.

    Raises:
        TypeError: if ``loc`` or ``scale`` is no floating-point tensor.
        ValueError: if shapes do not fit, or a standard deviation is not positive.

    >>> m = Lorentz(-1.0)
    >>> law = WrappedNormal(m.lift(torch.tensor([3.0, 4.0])), torch.tensor([0.1, 0.2]), m)
    >>> z = law.rsample((1000,))
    >>> z.shape, law.log_prob(z).shape
    (torch.Size([1000, 3]), torch.Size([1000]))
    >>> bool(m.dist(z, law.mean).mean() < 0.3)
    True
    """

    has_rsample = True

    def __init__(self, loc: Ambient, scale: Float[Tensor, "... dim"], manifold: Lorentz) -> None:
        self.manifold = require_lorentz("manifold", manifold)
        checks.vectors(2, loc=loc)
        checks.vectors(1, scale=scale)
        dim = loc.shape[-1] - 1
        if scale.shape[-1] not in {1, dim}:
            raise ValueError(f"scale must have shape (..., d = {dim}) or (..., 1), got {tuple(scale.shape)}.")
        scale = scale.expand(*scale.shape[:-1], dim)
        checks.vectors(loc=hyperboloid.space(loc), scale=scale)
        checks.above_zero("scale", scale)
        batch = torch.broadcast_shapes(loc.shape[:-1], scale.shape[:-1])
        self.loc, self.scale = loc.expand(*batch, dim + 1), scale.expand(*batch, dim)
        # Checked above, on a CPU only: torch would wait for a GPU, and refuses empty batches.
        super().__init__(batch, torch.Size([dim + 1]), validate_args=False)

    @property
    def arg_constraints(self) -> dict[str, Constraint]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What parameters satisfy: points of the manifold, and positive numbers."""
        return {"loc": self.support, "scale": constraints.independent(constraints.positive, 1)}

    @property
    def support(self) -> Constraint:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Points of the manifold, time coordinates included."""
        return _OnManifold(self.manifold)

    @property
    def mean(self) -> Ambient:
        """The Frechet mean, which is ``loc``: the law is symmetric about it."""
        return self.loc

    @property
    def mode(self) -> Ambient:
        """Where the density is largest, ``loc`` too."""
        return self.loc

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> WrappedNormal:
        """The same law in a larger batch, to which the present one broadcasts; nothing is copied."""
        new: Any = self._get_checked_instance(WrappedNormal, _instance)
        new.manifold = self.manifold
        new.loc = self.loc.expand(*batch_shape, *self.loc.shape[-1:])
        new.scale = self.scale.expand(*batch_shape, *self.scale.shape[-1:])
        Distribution.__init__(new, torch.Size(batch_shape), self.event_shape, validate_args=False)
        return new

    def rsample(self, sample_shape: Sequence[int] = ()) -> Ambient:
        """Differentiable samples, points ``(*sample_shape, *batch, d + 1)``, drawn from torch's seeded state."""
        shape = (*sample_shape, *self.scale.shape)
        noise = torch.randn(shape, dtype=self.scale.dtype, device=self.scale.device)
        loc, v = _room_for_sums(self.loc.expand(*shape[:-1], self.loc.shape[-1])), _room_for_sums(noise * self.scale)
        return hyperboloid.expmap_frame(loc, v, self.manifold.curvature)

    def log_prob(self, value: Ambient) -> Float[Tensor, "..."]:
        """The logarithm ``(...)`` of the density with respect to the Riemannian volume, at points ``(..., d + 1)``.

        Points are read by their space parts, and their other axes broadcast with the batch. What is no floating-point
        tensor is a TypeError, another shape a ValueError.
        """
        checks.vectors(loc=self.loc, value=value)
        kappa = self.manifold.curvature
        v = numerics.widen(hyperboloid.logmap_frame(self.loc, value, kappa))
        scale = numerics.widen(_room_for_sums(self.scale))
        rapidity = numerics.norm(v) * numerics.widen(kappa.reshape(())).neg().sqrt()
        flat = numerics.bounded(_normal, v, scale).squeeze(-1)
        stretch = (v.shape[-1] - 1) * numerics.log_sinhc(rapidity)
        density = flat - v.shape[-1] * math.log(2 * math.pi) / 2 - stretch
        return numerics.narrow(density, torch.promote_types(value.dtype, self.scale.dtype))

    def __repr__(self) -> str:
        return f"WrappedNormal(batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)})"


def _room_for_sums(x: Tensor) -> Tensor:
    """A parameter of many rows, whose gradients, long where samples lie far out, have a finite sum."""
    return numerics.gradient_within(x, torch.finfo(x.dtype).max * numerics.ROOM)


def _normal(v: Tensor, scale: Tensor) -> Tensor:
    """The logarithm of the normal density, up to a constant."""
    return (-(v / scale).square() / 2 - scale.log()).sum(-1, keepdim=True)


class _OnManifold(Constraint):
    """Points of a manifold, one an event."""

    event_dim = 1

    def __init__(self, manifold: Lorentz) -> None:
        self.manifold = manifold

    def check(self, value: Ambient) -> Bool[Tensor, "..."]:  # pyright: ignore[reportIncompatibleMethodOverride]
        time, tolerance = self.manifold.time(value), numerics.CHECK_TOLERANCE
        return ((value[..., :1] - time).abs() <= tolerance * (1 + time)).squeeze(-1)
