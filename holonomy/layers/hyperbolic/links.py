r"""Decoders of pairs of points: links by distance, and entailment by cones.

Points are ambient, ``(..., d + 1)``, time first; their leading axes broadcast, and a pair has one number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._shapes import Float
from holonomy.manifolds import Lorentz, hyperboloid
from holonomy.manifolds.lorentz import require_lorentz


class FermiDiracDecoder(nn.Module):
    r"""Logits of links by the Fermi-Dirac distribution (Krioukov et al. 2010, Nickel and Kiela 2017, HGCN eq. 12).

    .. math:: \ell(x, y) = \frac{r - d(x, y)^2}{t}, \qquad
        p(x \sim y) = \frac{1}{e^{(d(x, y)^2 - r)/t} + 1} = \mathrm{sigmoid}(\ell) .

    It returns :math:`\ell`, the input of :class:`torch.nn.BCEWithLogitsLoss`; the authors' code of HGCN returns p. Both
    numbers are learned, t as its logarithm.

    Its ``parameters()`` include a learned curvature, as do those of an encoder on the same manifold. Do not concatenate
    the two lists: torch's optimizers warn of duplicate parameters. Put both into one module, which lists it once::

        optimizer = RiemannianAdam(nn.ModuleList([encoder, decoder]).parameters(), lr=0.005)

    Args:
        manifold: where the points lie.
        radius: the initial r, the squared distance at which a link is as likely as none.
        temperature: the initial t > 0.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if ``manifold`` is another one than this library's, or a number is none.
        ValueError: if ``radius`` is not finite, or ``temperature`` not positive and finite.

    >>> m = Lorentz(-1.0)
    >>> x = m.expmap0(torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 3.0]]))
    >>> FermiDiracDecoder(m)(x[:1], x).tolist()
    [2.0, 1.0, -7.0]
    """

    def __init__(
        self,
        manifold: Lorentz,
        *,
        radius: float = 2.0,
        temperature: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.manifold = require_lorentz("manifold", manifold)
        largest = torch.finfo(torch.float32).max
        checks.in_range("radius", radius, -largest, largest)
        checks.positive("temperature", temperature)
        self.radius = nn.Parameter(torch.full((1,), radius, device=device, dtype=dtype))
        self.log_temperature = nn.Parameter(torch.full((1,), math.log(temperature), device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "... dim_plus_1"], y: Float[Tensor, "... dim_plus_1"]) -> Float[Tensor, "..."]:
        """The logits ``(...)`` of pairs of points ``(..., d + 1)``."""
        return (self.radius - self.manifold.dist(x, y).square()) * numerics.exp(-self.log_temperature)


class EntailmentCones(nn.Module):
    r"""Hyperbolic entailment cones (Ganea et al. 2018), on the hyperboloid.

    A point y lies in the cone of x if the angle :math:`\Xi` at x between the outward ray from the origin and the
    geodesic to y is at most the half aperture :math:`\psi`. Children are trained to lie in the cones of their parents.

    .. math::
        \psi(x) = \arcsin\frac{2K}{\sqrt{-\kappa}\,|x_s|}, \qquad
        \Xi(x, y) = \pi - \angle(o, x, y), \qquad
        E(x, y) = \max(0,\, \Xi(x, y) - \psi(x)) .

    This is Ganea's :math:`\psi = \arcsin(K (1 - |p|^2)/|p|)` of points p of the Poincare ball, as
    :math:`(1 - |p|^2)/|p| = 2/\sinh r`. Cones are nested, a child's lies in its parent's, but for parents in the ball
    :math:`\sqrt{-\kappa}\,|x_s| < 2K` about the origin, which Ganea leaves out. Half apertures there are :math:`\pi/2`:
    the origin entails everything, and the cone of another such point is a half space, out of which cones of children at
    its border reach.

    For float32 points angles and apertures are accurate up to rapidity 86, and a child exactly on its parent's ray has
    energy zero however narrow the cone. Gradients are finite everywhere, and zero inside cones.

    Args:
        manifold: where the points lie.
        constant: K > 0, which says how wide cones are; Ganea takes 0.1.

    Raises:
        TypeError: if ``manifold`` is another one than this library's, or ``constant`` is no number.
        ValueError: if ``constant`` is not positive and finite.

    >>> m = Lorentz(-1.0)
    >>> parent = m.expmap0(torch.tensor([0.0, 1.0, 0.0]))
    >>> children = m.expmap0(torch.tensor([[0.0, 3.0, 0.1], [0.0, 0.0, 2.0]]))
    >>> EntailmentCones(m).energy(parent, children) > 0
    tensor([False,  True])
    """

    def __init__(self, manifold: Lorentz, *, constant: float = 0.1) -> None:
        super().__init__()
        self.manifold = require_lorentz("manifold", manifold)
        self.constant = checks.positive("constant", constant)

    def half_aperture(self, x: Float[Tensor, "... dim_plus_1"]) -> Float[Tensor, "..."]:
        r"""The half apertures :math:`\psi` of points ``(..., d + 1)``: angles ``(...)`` up to :math:`\pi/2`."""
        checks.vectors(x=x)
        return numerics.narrow(self._half_aperture(x), x.dtype)

    def energy(
        self, parent: Float[Tensor, "... dim_plus_1"], child: Float[Tensor, "... dim_plus_1"]
    ) -> Float[Tensor, "..."]:
        """How far children ``(..., d + 1)`` lie outside of their parents' cones: angles ``(...)``, zero in cones."""
        checks.vectors(parent=parent, child=child)
        # Apertures are taken off before rounding: of thin cones nothing else would be left.
        angle = hyperboloid.ray_angle(numerics.widen(parent), numerics.widen(child), self.manifold.curvature)
        energy = torch.relu(angle - self._half_aperture(parent))
        return numerics.narrow(energy, torch.promote_types(parent.dtype, child.dtype))

    def forward(
        self, parent: Float[Tensor, "... dim_plus_1"], child: Float[Tensor, "... dim_plus_1"]
    ) -> Float[Tensor, "..."]:
        """The same as :meth:`energy`."""
        return self.energy(parent, child)

    def extra_repr(self) -> str:
        """K, for ``repr``."""
        return f"constant={self.constant}"

    def _half_aperture(self, x: Tensor) -> Tensor:
        """In float64, by the tangent: the sine has no derivative where it is one."""
        scale = numerics.widen(self.manifold.curvature.reshape(())).neg().sqrt()
        radius = numerics.finite(numerics.norm(numerics.widen(hyperboloid.space(x))) * scale)
        least = 2 * self.constant
        beyond = radius > least
        held = torch.where(beyond, radius, 2 * least)
        side = (held - least).sqrt() * (held + least).sqrt()
        return torch.where(beyond, torch.atan2(torch.full_like(side, least), side), math.pi / 2)
