r"""Products of hyperbolic, flat and spherical factors (Gu et al., ICLR 2019), and learned points of them.

A point is the points of its factors, one after another on the last axis. Distances are
:math:`d(x, y) = \sqrt{\sum_f d_f(x_f, y_f)^2}`.
"""

# As for Lorentz, points live on the last axis only.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any, cast

import geoopt
import torch
from geoopt.manifolds.base import ScalingInfo
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._shapes import Ambient, Float, Int
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.midpoints import midpoint_of_sum
from holonomy.manifolds.lorentz import Lorentz
from holonomy.manifolds.points import UnitPoints, on_manifold, plain, sheet
from holonomy.manifolds.sphere import Sphere

Factor = Lorentz | Sphere | geoopt.Euclidean


class Product(geoopt.ProductManifold):
    r"""A product of :class:`~holonomy.manifolds.Lorentz`, :class:`~holonomy.manifolds.Sphere` and flat factors.

    A :class:`geoopt.ProductManifold`, built as Geoopt's: each factor comes with the number of its ambient coordinates,
    which is d + 1 for hyperbolic space and the sphere of dimension d, and d for flat space. Where Geoopt's distance
    adds 1e-15 under the root, this one is exact, with a zero gradient between coincident points.

    **Coordinates** are what linear maps and attention compute with: the space part of a hyperbolic point and the
    ambient coordinates of a spherical one, in units of the radius :math:`1/\sqrt{|\kappa|}`, and those of a flat one.
    Any numbers are coordinates of a point (:meth:`lift`); on a sphere it is the one in their direction.

    In the methods ``x`` and ``y`` are points ``(..., ambient)``. ``keepdim`` keeps the last axis of a result with size
    one.

    Args:
        *factors: pairs of a manifold and the number of its ambient coordinates.

    Raises:
        TypeError: if a factor is no such pair.
        ValueError: if there is none, or a number of coordinates is too small: hyperbolic factors and spheres need two.

    >>> import math
    >>> m = Product((Lorentz(-1.0), 3), (geoopt.Euclidean(ndim=1), 1), (Sphere(4.0), 2))
    >>> x = m.lift(torch.tensor([0.0, 0.0, 3.0, 1.0, 0.0]))
    >>> x.tolist()
    [1.0, 0.0, 0.0, 3.0, 0.5, 0.0]
    >>> m.dist(x, m.lift(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))) == math.hypot(3.0, math.pi / 4)
    tensor(True)
    """

    # For geoopt.Scaled, which scales the methods that are named here.
    __scaling__ = geoopt.ProductManifold.__scaling__.copy()

    def __init__(self, *factors: tuple[Factor, int]) -> None:
        for number, pair in enumerate(checks.sequence("factors", factors, "pairs of a manifold and a size", tuple)):
            name = f"factors[{number}]"
            right = len(pair) == 2 and isinstance(pair[0], Factor) and pair[0].ndim == 1
            if not right:
                kinds = "a Lorentz, a Sphere (both of holonomy) or a geoopt.Euclidean(ndim=1)"
                raise TypeError(f"{name} must be a pair of {kinds} and a size, got {pair}.")
            flat = isinstance(pair[0], geoopt.Euclidean)
            least, unit = (1, "") if flat else (2, " (d + 1 coordinates for dimension d)")
            if checks.positive_int(f"{name}[1]", pair[1]) < least:
                raise ValueError(f"{name}[1] must be at least {least} for a {pair[0].name}, got {pair[1]}{unit}.")
        if not factors:
            raise ValueError("factors must be at least one, got none.")
        super().__init__(*factors)

    @property
    def factors(self) -> list[tuple[Factor, int]]:
        """The factors, each with the number of its ambient coordinates."""
        factors = cast("list[Factor]", list(self.manifolds))
        return [(factor, part.stop - part.start) for factor, part in zip(factors, self.slices, strict=True)]

    @property
    def sizes(self) -> list[int]:
        """How many coordinates each factor has."""
        return [ambient - 1 if isinstance(factor, Lorentz) else ambient for factor, ambient in self.factors]

    def lift(self, coordinates: Float[Tensor, "... coordinates"]) -> Ambient:
        """The points ``(..., ambient)`` with any numbers ``(..., sum(sizes))`` as coordinates."""
        checks.last_axis("coordinates", coordinates, sum(self.sizes), "sum(sizes)")
        parts = coordinates.split(self.sizes, -1)
        return torch.cat([_lift(factor, part) for (factor, _), part in zip(self.factors, parts, strict=True)], -1)

    def coordinates(self, x: Ambient) -> Float[Tensor, "... coordinates"]:
        """The coordinates ``(..., sum(sizes))`` of points, the inverse of :meth:`lift`."""
        return self.without_times(self.unit(x))

    def unit(self, x: Ambient) -> Ambient:
        """Points in units of the radii: those of the product with the curvatures -1, 0 and 1."""
        return torch.cat([_in_units(*each) for each in self._parts(x=x)], -1)

    def without_times(self, x: Ambient) -> Float[Tensor, "... coordinates"]:
        """Ambient coordinates without the times of hyperbolic factors, ``(..., sum(sizes))``."""
        return torch.cat([part[..., isinstance(factor, Lorentz) :] for factor, part in self._parts(x=x)], -1)

    def projx(self, x: Ambient) -> Ambient:
        """Projection of ambient vectors to points."""
        return self._in_each("projx", x)

    def proju(self, x: Ambient, u: Ambient) -> Ambient:
        """Orthogonal projection of ambient vectors ``u`` onto the tangent space at ``x``."""
        return self._in_each("proju", x, u)

    def egrad2rgrad(self, x: Ambient, u: Ambient) -> Ambient:
        """Riemannian gradient at ``x`` from the ambient Euclidean one, ``u``."""
        return self._in_each("egrad2rgrad", x, u)

    def expmap(self, x: Ambient, u: Ambient) -> Ambient:
        """Exponential map."""
        return self._in_each("expmap", x, u)

    def retr(self, x: Ambient, u: Ambient) -> Ambient:
        """Retraction, that of each factor."""
        return self._in_each("retr", x, u)

    def logmap(self, x: Ambient, y: Ambient) -> Ambient:
        """Logarithm, the inverse of :meth:`expmap`."""
        return self._in_each("logmap", x, y)

    def transp(self, x: Ambient, y: Ambient, v: Ambient) -> Ambient:
        """Parallel transport of ``v`` along the geodesic from ``x`` to ``y``."""
        return self._in_each("transp", x, y, v)

    def transp_follow_expmap(self, x: Ambient, u: Ambient, v: Ambient) -> Ambient:
        """Parallel transport of ``v`` along the geodesic from ``x`` in the direction ``u``."""
        return self._in_each("transp_follow_expmap", x, u, v)

    # By the maps above: Geoopt's find no shape for empty batches.
    transp_follow_retr = geoopt.Manifold.transp_follow_retr
    retr_transp = geoopt.Manifold.retr_transp

    def expmap_transp(self, x: Ambient, u: Ambient, v: Ambient) -> tuple[Tensor, Tensor]:
        """:meth:`expmap` and :meth:`transp_follow_expmap`."""
        return self.expmap(x, u), self.transp_follow_expmap(x, u, v)

    def component_inner(self, x: Ambient, u: Ambient, v: Ambient | None = None) -> Ambient:
        """Inner products of tangent vectors in each factor, at each of its coordinates; of flat ones the products."""
        return self._in_each("component_inner", x, u, u if v is None else v)

    def inner(self, x: Ambient, u: Ambient, v: Ambient | None = None, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Inner products ``(...)`` of tangent vectors at ``x``, of ``u`` with itself if ``v`` is left out."""
        v = u if v is None else v
        checks.vectors(x=x, u=u, v=v)
        inner = [_inner(*each) for each in self._parts(x=x, u=u, v=v)]
        return numerics.finite(torch.cat(torch.broadcast_tensors(*inner), -1).sum(-1, keepdim=keepdim))

    def norm(self, x: Ambient, u: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Lengths ``(...)`` of tangent vectors at ``x``, also where squares leave the range; zero gradient at zero."""
        checks.vectors(x=x, u=u)
        lengths = [_norm(*each) for each in self._parts(x=x, u=u)]
        return numerics.norm(torch.cat(torch.broadcast_tensors(*lengths), -1), keepdim=keepdim)

    def random_combined(
        self,
        *size: int | tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> geoopt.ManifoldTensor:
        """Random points of each factor, in the dtype and on the device of the first curvature if these are left out."""
        for factor, _ in self.factors:
            if not isinstance(factor, geoopt.Euclidean):
                dtype, device = dtype or factor.curvature.dtype, device or factor.curvature.device
        return super().random_combined(*size, dtype=dtype, device=device)

    random = random_combined

    @__scaling__(ScalingInfo(1))
    def factor_dist(self, x: Ambient, y: Ambient) -> Float[Tensor, "..."]:
        """The distance in each factor, ``(..., factors)``."""
        checks.vectors(x=x, y=y)
        return torch.stack([_dist(*each) for each in self._parts(x=x, y=y)], -1)

    def dist(self, x: Ambient, y: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Geodesic distances ``(...)``; zero gradients where the points coincide."""
        return numerics.norm(self.factor_dist(x, y), keepdim=keepdim)

    def dist2(self, x: Ambient, y: Ambient, *, keepdim: bool = False) -> Float[Tensor, "..."]:
        """Squared geodesic distances ``(...)``; where the points coincide their Hessian is twice the metric."""
        checks.vectors(x=x, y=y)
        squares = torch.stack([_dist2(*each) for each in self._parts(x=x, y=y)], -1)
        return numerics.finite(squares.sum(-1, keepdim=keepdim))

    @__scaling__(ScalingInfo(1))
    def factor_cdist(
        self, x: Float[Tensor, "... n ambient"], y: Float[Tensor, "... m ambient"]
    ) -> Float[Tensor, "... n m factors"]:
        """As :meth:`cdist`, in each factor: ``(..., n, m, factors)``."""
        checks.rows("x", x, self.n_elements, "ambient")
        checks.rows("y", y, self.n_elements, "ambient")
        return torch.stack([_cdist(*each) for each in self._parts(x=x, y=y)], -1)

    @__scaling__(ScalingInfo(1))
    def cdist(self, x: Float[Tensor, "... n ambient"], y: Float[Tensor, "... m ambient"]) -> Float[Tensor, "... n m"]:
        """All distances ``(..., n, m)`` between points ``(..., n, ambient)`` and ``(..., m, ambient)``."""
        return numerics.norm(self.factor_cdist(x, y))

    def centroid(
        self, x: Float[Tensor, "... n ambient"], weights: Float[Tensor, "... m n"]
    ) -> Float[Tensor, "... m ambient"]:
        """Weighted means ``(..., m, ambient)`` of points ``(..., n, ambient)``, in each factor.

        The Lorentzian midpoint, the mean, or the mean in ambient space projected to the sphere. Weights ``(..., m, n)``
        are nonnegative; a row of zeros gives the origin.
        """
        checks.rows("x", x, self.n_elements, "ambient")
        checks.rows("weights", weights, x.shape[-2], "n")
        return torch.cat([_centroid(factor, part, weights) for factor, part in self._parts(x=x)], -1)

    def _in_each(self, method: str, *points: Tensor) -> Tensor:
        """What a method of the factors gives for points and vectors whose other axes broadcast."""
        checks.vectors(**dict(zip("xyv", points, strict=False)))
        points = torch.broadcast_tensors(*points)
        if points[0].numel() == 0:  # for which Geoopt finds no shape
            return points[0]
        each = self._parts(**dict(zip("xyv", points, strict=False)))
        return torch.cat([getattr(factor, method)(x, *others).expand_as(x) for factor, x, *others in each], -1)

    def _parts(self, **named: Tensor) -> list[tuple[Any, ...]]:
        """Each factor with its coordinates of these points and vectors."""
        for name, x in named.items():
            checks.last_axis(name, x, self.n_elements, "ambient")
        each = zip(self.factors, self.slices, strict=True)
        return [(factor, *[x[..., part] for x in named.values()]) for (factor, _), part in each]


class ProductEmbedding(UnitPoints):
    """A lookup table of learned points of a product, as :class:`~holonomy.manifolds.LorentzEmbedding` of one factor.

    The parameter lies on the product with the curvatures -1, 0 and 1, which never moves, and is multiplied by the radii
    when it is read: Riemannian optimizers move it exactly, and points follow curvatures that learn.

    Args:
        num_embeddings: number of rows.
        manifold: the product, whose curvatures may be learnable.
        std: spread of the initial coordinates, around the origin and, on a sphere, around the end of its first axis.
        generator: source of randomness; torch's seeded state if left out.
        device: where the table lives.
        dtype: its dtype.

    Attributes:
        unit: the parameter, ``(num_embeddings, ambient)``.

    Raises:
        TypeError: if ``num_embeddings`` is no integer, or ``manifold`` no :class:`Product`.
        ValueError: if ``num_embeddings`` is not positive, or ``std`` is negative.

    >>> space = Product((Lorentz(-1.0, learnable=True), 3), (Sphere(1.0, learnable=True), 3))
    >>> points = ProductEmbedding(10, space)
    >>> space.dist(points(torch.tensor([0, 1])), points(torch.tensor([2, 3]))).shape
    torch.Size([2])
    """

    def __init__(
        self,
        num_embeddings: int,
        manifold: Product,
        *,
        std: float = 0.1,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.positive_int("num_embeddings", num_embeddings)
        checks.nonnegative("std", std)
        checks.floating_dtype(dtype)
        self.manifold = require_product("manifold", manifold)
        shape = num_embeddings, sum(manifold.sizes)
        drawn = std * torch.randn(shape, generator=generator, device=device, dtype=dtype)
        fixed = self._fixed(drawn)
        # Of zeros lift makes the origin, and so the end of the first axis of a sphere.
        origin = fixed.coordinates(fixed.lift(torch.zeros_like(drawn)))
        self.unit = on_manifold(fixed.lift(origin + drawn).requires_grad_(), fixed)

    def _fixed(self, like: Tensor) -> Product:
        where: dict[str, Any] = {"device": like.device, "dtype": sheet(like.device, like.dtype).curvature.dtype}
        return Product(*((_of_unit_curvature(factor, where), ambient) for factor, ambient in self.manifold.factors))

    def forward(self, index: Int[Tensor, "..."] | None = None) -> Ambient:
        """The points with integer indices ``(...)``, ``(..., ambient)``; all rows if the index is left out.

        Anything but integers is a TypeError, and an index that names no row a ValueError.
        """
        unit = plain(self.unit)
        if index is not None:
            checks.codes("index", index, len(unit), "num_embeddings")
            unit = nn.functional.embedding(index.long(), unit)
        return self.manifold.lift(self.manifold.without_times(unit))

    def extra_repr(self) -> str:
        """The number of rows, for ``repr``."""
        return f"{len(self.unit)}"


def require_product(name: str, manifold: Product) -> Product:
    """``manifold``, if it is a product of this library."""
    if not isinstance(manifold, Product):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be a holonomy.manifolds.Product, got {type(manifold)}.")
    return manifold


def _of_unit_curvature(factor: Factor, where: dict[str, Any]) -> Factor:
    if isinstance(factor, geoopt.Euclidean):
        return factor
    return Lorentz(-1.0, **where) if isinstance(factor, Lorentz) else Sphere(1.0, **where)


def _in_units(factor: Factor, x: Tensor) -> Tensor:
    """Points in units of the radius, whose square is the reciprocal of the absolute curvature."""
    if isinstance(factor, geoopt.Euclidean):
        return x
    return numerics.bounded(torch.mul, x, factor.curvature.abs().double().sqrt().to(x.dtype))


def _lift(factor: Factor, coordinates: Tensor) -> Tensor:
    if isinstance(factor, Lorentz):
        # Times the radius: the gradient of a quotient by its root overflows for long coordinates.
        radius = factor.curvature.neg().double().rsqrt().to(coordinates.dtype)
        space = numerics.shrink(numerics.bounded(torch.mul, coordinates, radius), coordinates.dtype)
        return hyperboloid.lift(space, factor.curvature)
    return factor.projx(coordinates) if isinstance(factor, Sphere) else numerics.shrink(coordinates, coordinates.dtype)


def _dist(factor: Factor, x: Tensor, y: Tensor) -> Tensor:
    return numerics.norm(x - y) if isinstance(factor, geoopt.Euclidean) else factor.dist(x, y)


def _dist2(factor: Factor, x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1) if isinstance(factor, geoopt.Euclidean) else factor.dist2(x, y)


def _inner(factor: Factor, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return numerics.dot(u, v) if isinstance(factor, geoopt.Euclidean) else factor.inner(x, u, v, keepdim=True)


def _norm(factor: Factor, x: Tensor, u: Tensor) -> Tensor:
    at_origin = factor.transp0back(x, u) if isinstance(factor, Lorentz) else torch.broadcast_tensors(x[..., :1], u)[1]
    return numerics.norm(at_origin, keepdim=True)


def _cdist(factor: Factor, x: Tensor, y: Tensor) -> Tensor:
    if isinstance(factor, geoopt.Euclidean):
        return _dist(factor, x.unsqueeze(-2), y.unsqueeze(-3))
    return factor.cdist(x, y)


def _centroid(factor: Factor, x: Tensor, weights: Tensor) -> Tensor:
    wide = numerics.widen(weights)  # float32 sums of a million points have two digits
    if isinstance(factor, Lorentz):
        kappa = factor.curvature
        total = wide @ hyperboloid.lift(numerics.widen(hyperboloid.space(x)), kappa)
        middle = midpoint_of_sum(total, wide.sum(-1, keepdim=True), kappa, torch.finfo(wide.dtype).eps)
        return hyperboloid.lift(numerics.narrow(middle, x.dtype), kappa)
    share = numerics.safe_div(wide, wide.sum(-1, keepdim=True))  # of long points no sum leaves the range
    total = share @ numerics.widen(x)
    return numerics.narrow(factor.projx(total) if isinstance(factor, Sphere) else total, x.dtype)
