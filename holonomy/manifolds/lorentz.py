"""The Lorentz manifold of Geoopt, with learnable curvature.

The only file that says ``k = -1/kappa``: Geoopt names a hyperboloid by the square of its radius, the library by its
sectional curvature. Geometry is :mod:`holonomy.manifolds.hyperboloid`; this class binds it to one curvature.
"""

# Points live on the last axis only: Geoopt's `dim`, `project` and `norm_tan` are left out of every signature.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import math
from functools import partial

import geoopt
import torch
from geoopt.manifolds.base import ScalingInfo
from geoopt.utils import size2shape
from torch import Tensor

from holonomy import checks, numerics
from holonomy._parts import Group
from holonomy._shapes import Ambient, Float
from holonomy.manifolds import charts, hyperboloid
from holonomy.manifolds.curvature import Curvature, manifold_tensor, origin, root_ratio


class Lorentz(geoopt.Lorentz):
    r"""Hyperbolic space of curvature :math:`\kappa < 0` as a hyperboloid, time first.

    .. math:: \{x : -x_t^2 + |x_s|^2 = 1/\kappa,\ x_t > 0\}

    A :class:`geoopt.Lorentz`, for ``ManifoldParameter``, Riemannian optimizers and ``ProductManifold``. Points live on
    the last axis, so Geoopt's ``dim`` is not offered, and no vector needs Geoopt's ``norm_tan`` or ``project``. Methods
    read the space part ``x[..., 1:]`` of a point and compute its time from it (:mod:`holonomy.manifolds.hyperboloid`).
    Layers that share a manifold share its curvature.

    In the methods ``x`` and ``y`` are points ``(..., d+1)``, ``u`` and ``v`` tangent vectors at ``x`` (at the origin
    where the name ends in 0) in ambient coordinates. Their other axes broadcast. ``keepdim`` keeps the last axis of a
    result with size one.

    A bare ``ManifoldParameter`` does not follow a learned curvature; use :class:`~holonomy.manifolds.LorentzPoints` or
    :class:`~holonomy.manifolds.LorentzEmbedding`.

    Args:
        curvature: the sectional curvature, finite and negative; a tensor of one number is read once, and refused if it
            learns. Geoopt's ``k`` is ``-1/curvature``.
        learnable: whether the curvature receives gradients.
        device: where the curvature lives.
        dtype: its dtype.

    Raises:
        TypeError: if ``curvature`` is no number.
        ValueError: if ``curvature`` is not finite and negative.

    >>> manifold = Lorentz(-0.5)
    >>> x = manifold.lift(torch.zeros(3))
    >>> round(manifold.k.item(), 6), x.tolist()[1:]
    (2.0, [0.0, 0.0, 0.0])
    """

    # For geoopt.Scaled, which scales the methods that are named here.
    __scaling__ = geoopt.Lorentz.__scaling__.copy()

    def __init__(
        self,
        curvature: float | Tensor = -1.0,
        *,
        learnable: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Past geoopt.Lorentz.__init__, which would make k a parameter of its own.
        super(geoopt.Lorentz, self).__init__()
        self.curvature_parameter = Curvature(curvature, learnable=learnable, device=device, dtype=dtype)

    @property
    def curvature(self) -> Float[Tensor, " 1"]:
        """Sectional curvature, a negative tensor ``(1,)``."""
        return self.curvature_parameter.value

    @property
    def k(self) -> Float[Tensor, " 1"]:
        """Geoopt's name for the same number: ``-1/curvature``, the squared radius, a tensor ``(1,)``."""
        return -1 / self.curvature

    def extra_repr(self) -> str:
        """The curvature now and whether it learns, for ``repr``.

        >>> Lorentz(-0.5)
        Lorentz(curvature=-0.5, learnable=False) manifold
        """
        return self.curvature_parameter.extra_repr().replace("value", "curvature", 1)

    def ratio(self, to: Lorentz) -> Float[Tensor, " 1"]:
        r"""The factor :math:`\sqrt{\kappa/\kappa'}`, ``(1,)``, of a change of curvature (Hypformer eqs. 9, 13, 18).

        A space part on this manifold, multiplied by it, is the space part on ``to``. It is exactly one where both
        are the same manifold.

        >>> Lorentz(-1.0).ratio(Lorentz(-4.0)).item()
        0.5
        """
        require_lorentz("to", to)
        return root_ratio(self.curvature, to.curvature)

    def lift(self, space: Float[Tensor, "... dim"]) -> Ambient:
        """The points ``(..., d+1)`` above any vectors ``(..., d)`` as space parts.

        >>> Lorentz(-1.0).lift(torch.zeros(2)).tolist()
        [1.0, 0.0, 0.0]
        """
        checks.vectors(0, space=space)
        return hyperboloid.lift(space, self.curvature)

    def space(self, x: Ambient) -> Float[Tensor, "... dim"]:
        """Space parts ``(..., d)`` of points, a view."""
        checks.vectors(x=x)
        return hyperboloid.space(x)

    def time(self, x: Ambient) -> Float[Tensor, "... 1"]:
        """Time coordinates ``(..., 1)`` of points, made anew from their space parts."""
        checks.vectors(x=x)
        return hyperboloid.time(hyperboloid.space(x), self.curvature)

    def dist(self, x: Ambient, y: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Geodesic distances ``(...)``; zero gradients where the points coincide.

        >>> m = Lorentz(-1.0)
        >>> m.dist(m.origin(3), m.origin(3)).item()
        0.0
        """
        checks.vectors(x=x, y=y)
        return _keep(hyperboloid.dist(x, y, self.curvature), keepdim=keepdim)

    def dist2(self, x: Ambient, y: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Squared geodesic distances ``(...)``; where the points coincide their Hessian is twice the metric.

        >>> m = Lorentz(-1.0)
        >>> torch.autograd.functional.hessian(lambda u: m.dist2(m.lift(u), m.origin(3)), torch.zeros(2))
        tensor([[2., 0.],
                [0., 2.]])
        """
        checks.vectors(x=x, y=y)
        space, other = hyperboloid.space(x), hyperboloid.space(y)
        same = (space == other).all(-1, keepdim=True)
        # There the square of the chord has the same derivatives, and a distance has no second one.
        chord = self.lift(space) - self.lift(torch.where(same, other, space.detach()))
        near = chord[..., 1:].square().sum(-1, keepdim=True) - chord[..., :1].square()
        # Squared in float64, where a distance times a gradient fits.
        away = numerics.widen(self.dist(torch.where(same, 1.0, x), torch.where(same, 0.0, y), keepdim=True)).square()
        found = torch.where(same, near, numerics.narrow(away, near.dtype))
        return found if keepdim else found.squeeze(-1)

    def dist0(self, x: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Geodesic distances ``(...)`` from the origin; zero gradient there."""
        checks.vectors(x=x)
        return _keep(hyperboloid.dist0(x, self.curvature), keepdim=keepdim)

    @__scaling__(ScalingInfo(1))
    def cdist(self, x: Float[Tensor, "... n ambient"], y: Float[Tensor, "... m ambient"]) -> Float[Tensor, "... n m"]:
        """All distances ``(..., n, m)`` between points ``(..., n, d+1)`` and ``(..., m, d+1)``, near and far alike."""
        checks.vectors(x=x)
        checks.rows("x", x, x.shape[-1], "d + 1")
        checks.rows("y", y, x.shape[-1], "d + 1")
        checks.vectors(y=y)
        return hyperboloid.cdist(x, y, self.curvature)

    def expmap(self, x: Ambient, u: Ambient) -> Ambient:
        """Exponential map, for tangent vectors of any length (Hypformer eq. 22)."""
        checks.vectors(x=x, u=u)
        return hyperboloid.expmap(x, u, self.curvature)

    def retr(self, x: Ambient, u: Ambient) -> Ambient:
        """Retraction: the exponential map itself."""
        return self.expmap(x, u)

    def geodesic_unit(self, t: Float[Tensor, "..."] | float, x: Ambient, u: Ambient) -> Ambient:
        """Points at arc lengths ``t`` along the geodesics that leave ``x`` with unit velocity ``u``.

        ``t`` is a number, or ``(..., 1)``, broadcast against ``x``.
        """
        checks.vectors(x=x, u=u)
        if not isinstance(t, Tensor):
            t = u.new_tensor(checks.in_range("t", t, -math.inf, math.inf))
        checks.vectors(x=x[..., :1], u=u[..., :1], t=torch.atleast_1d(t))
        return hyperboloid.geodesic(x, u, t, self.curvature)

    def logmap(self, x: Ambient, y: Ambient) -> Ambient:
        """Logarithm, the inverse of :meth:`expmap`: tangent vectors at ``x`` that lead to ``y``."""
        checks.vectors(x=x, y=y)
        return hyperboloid.logmap(x, y, self.curvature)

    def expmap0(self, u: Ambient) -> Ambient:
        """Exponential map at the origin."""
        checks.vectors(u=u)
        return hyperboloid.expmap0(u, self.curvature)

    def logmap0(self, y: Ambient) -> Ambient:
        """Logarithm at the origin, the inverse of :meth:`expmap0`: tangent vectors there, time zero."""
        checks.vectors(y=y)
        return hyperboloid.logmap0(y, self.curvature)

    def logmap0back(self, x: Ambient) -> Ambient:
        """Logarithm at ``x`` of the origin."""
        checks.vectors(x=x)
        return hyperboloid.logmap(x, torch.zeros_like(x), self.curvature)

    def transp(self, x: Ambient, y: Ambient, v: Ambient) -> Ambient:
        """Parallel transport of ``v`` along the geodesic from ``x`` to ``y``."""
        checks.vectors(x=x, y=y, v=v)
        return hyperboloid.transp(x, y, v, self.curvature)

    def transp0(self, y: Ambient, u: Ambient) -> Ambient:
        """Parallel transport of ``u`` from the origin to ``y``."""
        checks.vectors(y=y, u=u)
        return hyperboloid.transp0(y, u, self.curvature)

    def transp0back(self, x: Ambient, u: Ambient) -> Ambient:
        """Parallel transport of ``u`` from ``x`` to the origin."""
        checks.vectors(x=x, u=u)
        return hyperboloid.transp0back(x, u, self.curvature)

    def transp_follow_expmap(self, x: Ambient, u: Ambient, v: Ambient) -> Ambient:
        """Parallel transport of ``v`` along the geodesic that leaves ``x`` with velocity ``u``, for unit time."""
        checks.vectors(x=x, u=u, v=v)
        x, kappa = numerics.sums_saturate(x), self.curvature
        return hyperboloid.transp(x, hyperboloid.expmap(x, u, kappa), v, kappa)

    def projx(self, x: Ambient) -> Ambient:
        """The points with the space parts of ambient vectors ``(..., d+1)``."""
        checks.vectors(x=x)
        return self.lift(hyperboloid.space(x))

    def proju(self, x: Ambient, v: Ambient) -> Ambient:
        """Orthogonal projection of ambient vectors ``v`` onto the tangent space at ``x``."""
        checks.vectors(x=x, v=v)
        return hyperboloid.proju(x, v, self.curvature)

    def egrad2rgrad(self, x: Ambient, u: Ambient) -> Ambient:
        """Riemannian gradient at ``x`` from the ambient Euclidean one, ``u``, which is left unchanged."""
        checks.vectors(x=x, u=u)
        return hyperboloid.egrad2rgrad(x, u, self.curvature)

    def inner(
        self,
        x: Ambient,
        u: Ambient,
        v: Ambient | None = None,
        *,
        keepdim: bool = False,
    ) -> Float[Tensor, "..."]:
        """Inner products ``(...)`` of tangent vectors at ``x``, of ``u`` with itself if ``v`` is left out."""
        v = u if v is None else v
        checks.vectors(x=x, u=u, v=v)
        return _keep(hyperboloid.inner(x, u, v, self.curvature), keepdim=keepdim)

    def norm(self, u: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Lengths ``(...)`` of tangent vectors from their ambient coordinates, as Geoopt's method of this name.

        Without the point, digits are lost far from the origin; ``inner(x, u).sqrt()`` loses none.

        >>> Lorentz(-1.0).norm(torch.tensor([0.0, 3.0, 4.0])).item()
        5.0
        """
        checks.vectors(u=u)
        return _keep(hyperboloid.minkowski_norm(u), keepdim=keepdim)

    def random_normal(
        self,
        *size: int | tuple[int, ...],
        mean: float = 0.0,
        std: float = 1.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> geoopt.ManifoldTensor:
        """Points of the wrapped normal distribution: the exponential map of normal tangent vectors at the origin.

        Args:
            *size: the shape of the result, last entry ``d+1``.
            mean: mean of every tangent coordinate.
            std: standard deviation of every tangent coordinate, in units of length on the manifold.
            generator: source of randomness; torch's seeded state if left out.
            dtype: dtype of the result; the curvature's if left out.
            device: device of the result; the curvature's if left out.

        Returns:
            Points, as Geoopt's manifold tensor.

        Raises:
            ValueError: if ``size`` has no axis for the coordinates.

        >>> Lorentz(-1.0).random(5, 3, std=0.1, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3])
        """
        shape = size2shape(*size)  # pyright: ignore[reportArgumentType]
        checks.size(shape)
        checks.finite_number("mean", mean)
        checks.nonnegative("std", std)
        checks.floating_dtype(dtype)
        like = self.curvature
        tangent = torch.randn(shape, generator=generator, dtype=dtype or like.dtype, device=device or like.device)
        with torch.no_grad():
            return manifold_tensor(self.expmap0(tangent * std + mean), self)

    random = random_normal

    def origin(
        self,
        *size: int | tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> geoopt.ManifoldTensor:
        """The origin, repeated to a shape.

        Args:
            *size: the shape of the result, last entry ``d+1``.
            dtype: dtype of the result; the curvature's if left out.
            device: device of the result; the curvature's if left out.
            seed: part of Geoopt's interface for manifolds whose origin is drawn; this one's is not.

        Returns:
            Points, as Geoopt's manifold tensor.

        >>> Lorentz(-0.25).origin(2).tolist()
        [2.0, 0.0]
        """
        del seed
        return origin(self, size, dtype or self.curvature.dtype, device or self.curvature.device)

    def centroid(
        self,
        x: Float[Tensor, "... n ambient"],
        weights: Float[Tensor, "..."] | None = None,
        *,
        group: Group | None = None,
    ) -> Ambient:
        """Lorentzian midpoints of weighted points (Hypformer eq. 4).

        Of float32 points far out on nearly one ray they keep their digits, and so do gradients, up to rapidity 86. Of
        several midpoints of one set, those off the ray of the heaviest point do so up to rapidity 36 and 15.

        Args:
            x: points ``(..., n, d+1)``.
            weights: finite nonnegative weights, ``(..., m, n)`` for m midpoints, or, with fewer axes than ``x``,
                ``(..., n)`` for one; equal weights if left out. A row of zeros gives the origin.
            group: processes that share the points: ``x`` and ``weights`` are those of this one, and all get the
                midpoints of all points. They are sums of d + 2 numbers in float64, with digits up to rapidity 15.

        Returns:
            Points ``(..., m, d+1)`` or ``(..., d+1)``.

        Raises:
            TypeError: if the weights are not floating-point numbers, or ``group`` is not a process group.
            ValueError: if a weight is negative or not finite. Weights on a GPU, under ``torch.compile`` or in a
                transformation of ``torch.func`` are not read, and such ones give an undefined result.

        >>> m = Lorentz(-1.0)
        >>> m.centroid(m.lift(torch.tensor([[2.0], [-2.0]]))).tolist()
        [1.0, 0.0]
        """
        checks.vectors(x=x)
        checks.rows("x", x, x.shape[-1], "d + 1")
        if weights is None:
            weights = x.new_ones(x.shape[:-1])
        checks.last_axis("weights", weights, x.shape[-2], "n")
        one = weights.ndim < x.ndim
        checks.vectors(0, x=x[..., 0] if one else x[..., None, :, 0], weights=weights)
        checks.finite("weights", weights, 0.0)
        centroid = hyperboloid.centroid if group is None else partial(hyperboloid.centroid_of_parts, group=group)
        if one:
            return centroid(x, weights.unsqueeze(-2), self.curvature).squeeze(-2)
        return centroid(x, weights, self.curvature)

    def rescale(self, x: Ambient, to: Lorentz) -> Ambient:
        """The same points on a manifold of another curvature (Hypformer Prop. 4.2); distances scale by :meth:`ratio`.

        >>> Lorentz(-1.0).rescale(torch.tensor([1.0, 0.0]), Lorentz(-4.0)).tolist()
        [0.5, 0.0]
        """
        checks.vectors(x=x)
        require_lorentz("to", to)
        return hyperboloid.rescale(x, self.curvature, to.curvature)

    def to_poincare(self, x: Ambient) -> Float[Tensor, "... dim"]:
        """Points ``(..., d)`` of the Poincare ball of radius ``1/sqrt(-curvature)``.

        That is Geoopt's ``PoincareBall(c=-curvature)``; see :mod:`~holonomy.manifolds.charts`.
        """
        checks.vectors(x=x)
        return charts.to_poincare(x, self.curvature)

    def from_poincare(self, p: Float[Tensor, "... dim"]) -> Ambient:
        """The inverse of :meth:`to_poincare`.

        A point on the rim, or beyond it by no more than rounding, is read as the farthest one inside.

        Args:
            p: points ``(..., d)`` of the ball.

        Returns:
            Points ``(..., d+1)``.

        Raises:
            ValueError: if a point lies outside the ball. Points on a GPU, under ``torch.compile`` or in a
                transformation of ``torch.func`` are not read; there such a point counts as one on the rim.
        """
        checks.vectors(p=p)
        checks.in_ball(p, self.curvature, numerics.tolerance(p.dtype).rtol)
        return charts.from_poincare(p, self.curvature)

    def to_klein(self, x: Ambient) -> Float[Tensor, "... dim"]:
        """As :meth:`to_poincare`, to the Klein ball of the same radius."""
        checks.vectors(x=x)
        return charts.to_klein(x, self.curvature)

    def from_klein(self, p: Float[Tensor, "... dim"]) -> Ambient:
        """As :meth:`from_poincare`, from the Klein ball."""
        checks.vectors(p=p)
        checks.in_ball(p, self.curvature, numerics.tolerance(p.dtype).rtol)
        return charts.from_klein(p, self.curvature)

    def _check_point_on_manifold(self, x: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        # Geoopt compares -x_t^2 + |x_s|^2, which is all rounding far out; the time coordinate itself is not.
        if torch.allclose(x[..., :1], self.time(x), atol=atol, rtol=rtol):
            return True, None
        return False, f"the time coordinate is not sqrt(|space|^2 - 1/({self.curvature.item():g}))"

    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        expected = hyperboloid.tangent(x, hyperboloid.space(u), self.curvature)
        if torch.allclose(u, expected, atol=atol, rtol=rtol):
            return True, None
        return False, "the time coordinate is not x_space . u_space / x_time"


def require_lorentz(name: str, manifold: Lorentz) -> Lorentz:
    """``manifold``, if it is one of this library: Geoopt's has another curvature, ``k``."""
    if not isinstance(manifold, Lorentz):  # pyright: ignore[reportUnnecessaryIsInstance]
        advice = " (Lorentz(-1 / k) of Geoopt's k)" if isinstance(manifold, geoopt.Lorentz) else ""
        raise TypeError(f"{name} must be a holonomy.manifolds.Lorentz{advice}, got {type(manifold)}.")
    return manifold


def _keep(x: Tensor, *, keepdim: bool) -> Tensor:
    return x.unsqueeze(-1) if keepdim else x
