r"""The sphere as a Geoopt manifold, with learnable curvature.

A sphere of curvature :math:`\kappa > 0` has the radius :math:`1/\sqrt\kappa`, as the hyperboloid of curvature
:math:`-\kappa` has. A point is its direction: methods that make points give them the radius, the others take lengths
within a factor of 1e9 of it, where a distance loses as many digits as the quotient of two lengths has.
"""

# As for Lorentz, points live on the last axis only.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import geoopt
import torch
from geoopt.manifolds.base import ScalingInfo
from torch import Tensor

from holonomy import checks, numerics
from holonomy._shapes import Ambient, Float
from holonomy.manifolds.curvature import Curvature, origin

# What the gradient of an angle may be, of the largest number.
_SHARE = 2.0**-8


class Sphere(geoopt.Sphere):
    r"""The sphere of curvature :math:`\kappa > 0`, :math:`\{x : |x|^2 = 1/\kappa\}`, in ambient coordinates.

    A :class:`geoopt.Sphere`, whose own radius is one, for ``ManifoldParameter``, Riemannian optimizers and
    :class:`~holonomy.manifolds.Product`. Distances come from chords,
    :math:`2\, \mathrm{atan2}(|x-y|, |x+y|)/\sqrt\kappa`, and keep their digits between points that are near each other
    or nearly opposite; their gradient at coincident and at opposite points is zero. The curvature is that of a
    :class:`~holonomy.manifolds.Curvature` with the opposite sign. Names in the methods are those of
    :class:`~holonomy.manifolds.Lorentz`: ``x`` and ``y`` points, ``u`` and ``v`` tangent vectors at ``x``.

    Args:
        curvature: the sectional curvature, finite and positive.
        learnable: whether the curvature receives gradients.
        device: where the curvature lives.
        dtype: its dtype.

    Raises:
        TypeError: if ``curvature`` is no number.
        ValueError: if ``curvature`` is not finite and positive.

    >>> import math
    >>> sphere = Sphere(0.25)  # of radius 2
    >>> round(sphere.dist(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])).item() / math.pi, 6)
    1.0
    """

    # For geoopt.Scaled, which scales the methods that are named here.
    __scaling__ = geoopt.Sphere.__scaling__.copy()

    def __init__(
        self,
        curvature: float = 1.0,
        *,
        learnable: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        opposite = -checks.positive("curvature", curvature)
        try:
            self.curvature_parameter = Curvature(opposite, learnable=learnable, device=device, dtype=dtype)
        except ValueError as error:
            said = str(error).replace("negative", "positive").replace(str(opposite), str(curvature))
            raise ValueError(said) from None

    @property
    def curvature(self) -> Float[Tensor, " 1"]:
        """Sectional curvature, a positive tensor ``(1,)``."""
        return -self.curvature_parameter.value

    def radius(self, x: Float[Tensor, "..."]) -> Float[Tensor, " 1"]:
        """The radius ``(1,)`` in the dtype of ``x``."""
        # The root first: float16 holds it, and not each curvature.
        return self.curvature.double().rsqrt().to(x.dtype)

    def extra_repr(self) -> str:
        """The curvature now and whether it learns, for ``repr``.

        >>> Sphere(0.5)
        Sphere(curvature=0.5, learnable=False) manifold
        """
        return self.curvature_parameter.extra_repr().replace("value=-", "curvature=", 1)

    def projx(self, x: Ambient) -> Ambient:
        """The points in the directions of vectors; on the first axis where a vector is zero.

        >>> Sphere().projx(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929], [1.0, 0.0]]
        """
        checks.vectors(x=x)
        # In float64, where a gradient by a short vector of float32 fits.
        wide = numerics.widen(x)
        length = numerics.norm(wide, keepdim=True)
        first = torch.zeros_like(wide[..., :1]) + 1.0
        pole = torch.cat([first, torch.zeros_like(wide[..., 1:])], -1)
        unit = torch.where(length == 0, pole, numerics.safe_div(wide, length))
        return numerics.narrow(unit * self.radius(wide), x.dtype)

    def proju(self, x: Ambient, u: Ambient) -> Ambient:
        """Orthogonal projection of ambient vectors ``u`` onto the tangent space at ``x``."""
        checks.vectors(x=x, u=u)
        wide, vector = numerics.widen(x), numerics.widen(u)
        normal = numerics.unit_vector(wide)
        return numerics.narrow(vector - normal * numerics.dot(normal, vector), u.dtype)

    egrad2rgrad = proju

    def inner(self, x: Ambient, u: Ambient, v: Ambient | None = None, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Inner products of tangent vectors at ``x``, of ``u`` with itself if ``v`` is left out."""
        checks.vectors(x=x, u=u, v=u if v is None else v)
        _, left, right = torch.broadcast_tensors(x, u, u if v is None else v)
        found = numerics.dot(left, right)
        return found if keepdim else found.squeeze(-1)

    def norm(self, x: Ambient, u: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Lengths of tangent vectors at ``x``, also where their squares leave the range; zero gradient at zero."""
        checks.vectors(x=x, u=u)
        return numerics.norm(torch.broadcast_tensors(x, u)[1], keepdim=keepdim)

    def dist(self, x: Ambient, y: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Geodesic distances, up to pi times the radius; zero gradients where the points coincide or are opposite."""
        checks.vectors(x=x, y=y)
        # Over a power of two their squares fit the dtype.
        unit = numerics.power_of_two(self.radius(x).detach())
        found = _angle(x / unit, y / unit)
        # On the way back sines and cosines, times up to 16, multiply the gradient before they cancel.
        found = numerics.gradient_within(found, torch.finfo(found.dtype).max * _SHARE) * self.radius(found)
        return found if keepdim else found.squeeze(-1)

    def dist2(self, x: Ambient, y: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Squared geodesic distances; where the points coincide their Hessian is twice the metric.

        >>> at = torch.tensor([1.0, 0.0])
        >>> torch.autograd.functional.hessian(lambda x: Sphere().dist2(x, at), at)
        tensor([[0., 0.],
                [0., 2.]])
        """
        checks.vectors(x=x, y=y)
        distance = self.dist(x, y, keepdim=True)
        same = distance.detach() == 0
        # There the square of the chord has the same derivatives, and a distance has no second one.
        ends = numerics.widen(x), numerics.widen(torch.where(same, y, x.detach()))
        chord = numerics.unit_vector(ends[0]) - numerics.unit_vector(ends[1])
        near = chord.square().sum(-1, keepdim=True) * self.radius(chord).square()
        found = torch.where(same, numerics.narrow(near, distance.dtype), distance.square())
        return found if keepdim else found.squeeze(-1)

    @__scaling__(ScalingInfo(1))
    def cdist(self, x: Float[Tensor, "... n ambient"], y: Float[Tensor, "... m ambient"]) -> Float[Tensor, "... n m"]:
        """All distances ``(..., n, m)`` between points ``(..., n, d+1)`` and ``(..., m, d+1)``, by differences."""
        checks.vectors(x=x)
        checks.rows("x", x, x.shape[-1], "d + 1")
        checks.rows("y", y, x.shape[-1], "d + 1")
        return self.dist(x.unsqueeze(-2), y.unsqueeze(-3))

    def expmap(self, x: Ambient, u: Ambient) -> Ambient:
        """Exponential map."""
        checks.vectors(x=x, u=u)
        wide, vector = numerics.widen(x), numerics.widen(u)
        turn = vector / self.radius(wide)
        cos, sinc = numerics.cos_sinc(numerics.dot(turn, turn))
        there = self.projx(self.projx(wide) * cos + vector * sinc)
        return numerics.narrow(there, x.dtype)

    def logmap(self, x: Ambient, y: Ambient) -> Ambient:
        """Logarithm, the inverse of :meth:`expmap`; zero at the opposite point, where every direction leads."""
        checks.vectors(x=x, y=y)
        wide, other = numerics.widen(x), numerics.widen(y)
        towards = self.proju(wide, other - wide)
        found = torch.where(_short(towards), towards, _direction(towards) * self.dist(wide, other, keepdim=True))
        return numerics.narrow(found, x.dtype)

    def transp(self, x: Ambient, y: Ambient, v: Ambient) -> Ambient:
        """Parallel transport of ``v`` along the geodesic from ``x`` to ``y``."""
        checks.vectors(x=x, y=y, v=v)
        # v - <y, v> (x + y) / (1/kappa + <x, y>), whose denominator is half the square of x + y.
        middle = _direction(numerics.unit_vector(numerics.widen(x)) + numerics.unit_vector(numerics.widen(y)))
        wide = numerics.widen(v)
        return numerics.narrow(wide - 2 * middle * (middle * wide).sum(-1, keepdim=True), v.dtype)

    def transp_follow_expmap(self, x: Ambient, u: Ambient, v: Ambient) -> Ambient:
        """Parallel transport of ``v`` along the geodesic that leaves ``x`` with velocity ``u``, for unit time.

        Where it ends opposite to ``x``, too, which :meth:`transp` cannot tell from the end.
        """
        checks.vectors(x=x, u=u, v=v)
        wide, step, vector = numerics.widen(x), numerics.widen(u), numerics.widen(v)
        half = step / self.radius(wide) / 2
        cos, sinc = numerics.cos_sinc(numerics.dot(half, half))
        # The plane of x and u turns by twice this angle: v loses <c, v> (c + cos x / |x|).
        chord = half * sinc
        turned = chord + numerics.unit_vector(wide) * cos
        return numerics.narrow(vector - 2 * numerics.dot(chord, vector) * turned, v.dtype)

    def expmap_transp(self, x: Ambient, u: Ambient, v: Ambient) -> tuple[Tensor, Tensor]:
        """:meth:`expmap` and :meth:`transp_follow_expmap`."""
        return self.expmap(x, u), self.transp_follow_expmap(x, u, v)

    def origin(
        self,
        *size: int | tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> geoopt.ManifoldTensor:
        """The end of the first axis, where :meth:`projx` takes zeros, as :meth:`.Lorentz.origin` is called.

        >>> Sphere(0.25).origin(2).tolist()
        [2.0, 0.0]
        """
        del seed
        return origin(self, size, dtype or self.curvature.dtype, device or self.curvature.device)

    def random_uniform(
        self,
        *size: int | tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Uniform points, in the dtype and on the device of the curvature if these are left out."""
        like = self.curvature
        return super().random_uniform(*size, dtype=dtype or like.dtype, device=device or like.device)

    random = random_uniform

    def _check_point_on_manifold(self, x: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        length = numerics.norm(x, keepdim=True)
        if torch.allclose(length, self.radius(x).expand_as(length), atol=atol, rtol=rtol):
            return True, None
        return False, f"the length is not 1/sqrt({self.curvature.item():g})"

    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        # Geoopt compares <x, u>, whose rounding grows with the radius, with a number.
        if torch.allclose(*torch.broadcast_tensors(u, self.proju(x, u)), atol=atol, rtol=rtol):
            return True, None
        return False, "the vector is not orthogonal to the point"


def _angle(x: Tensor, y: Tensor) -> Tensor:
    """The angles ``(..., 1)`` between vectors, whose lengths may differ."""
    apart, together = x - y, x + y
    plus = numerics.norm(together, keepdim=True)
    # What of x - y is along x + y, and what is across it: all of it, where lengths are equal.
    along = (apart * together).sum(-1, keepdim=True) / numerics.positive(plus)
    across = numerics.norm(torch.addcmul(apart, together, along / numerics.positive(plus), value=-1), keepdim=True)
    # Sine and cosine times 4 |x| |y|.
    return torch.atan2(2 * across * plus, (plus - across) * (plus + across) - along.square())


def _short(v: Tensor) -> Tensor:
    """Whether rows of float64 are too short for the gradient of their direction to fit."""
    limits = torch.finfo(v.dtype)
    return numerics.norm(v.detach(), keepdim=True) < limits.tiny / limits.eps


def _direction(v: Tensor) -> Tensor:
    """Rows of length one; zero, with a zero gradient, for short ones."""
    v = torch.where(_short(v), 0.0, v)
    return numerics.unit_vector(v)
