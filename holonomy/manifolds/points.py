r"""Learned points: Riemannian optimizers move them exactly, and a learning curvature strands none.

A parameter lies on one hyperboloid; when the curvature moves, that hyperboloid is no longer the manifold, and the next
exponential map starts from a point that is on neither. So a learned point is held on the *unit* hyperboloid, which
never moves, and multiplied by :math:`1/\sqrt{-\kappa}` when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import geoopt
import numpy as np
import torch
from torch import Tensor, nn

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Ambient, Float, Int
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.lorentz import Lorentz, require_lorentz


class UnitPoints(nn.Module):
    """What learned points share: a parameter ``unit`` on a manifold that never moves, kept through moves and loads."""

    unit: nn.Parameter

    def __setattr__(self, name: str, value: Any) -> None:
        # What fully_shard puts in the place of the points has no manifold: RiemannianAdam refuses it by this mark.
        if name == "unit" and isinstance(value, nn.Parameter) and hasattr(value, "device_mesh"):
            vars(value)["sharded_points"] = True
        super().__setattr__(name, value)

    # Where a module leaves the meta device, or is given the tensors of a state, torch makes ordinary parameters.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> UnitPoints:  # noqa: FBT001, FBT002
        super()._apply(fn, recurse)
        self._hold()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        state, prefix, errors = args[0], args[1], args[-1]
        unit = state.get(f"{prefix}unit")
        if isinstance(unit, Tensor) and not (unit.layout == torch.strided and unit.is_floating_point()):
            said = f"dtype {unit.dtype} and layout {unit.layout}"
            errors.append(f"{prefix}unit must be a dense tensor of a floating-point dtype, got {said}.")
            return
        super()._load_from_state_dict(*args, **kwargs)
        self._hold()

    def _hold(self) -> None:
        if type(self.unit) is nn.Parameter:
            unit = on_manifold(self.unit, self._fixed(self.unit))
            if torch.__future__.get_swap_module_params_on_conversion():
                torch.utils.swap_tensors(self.unit, unit)  # the parameter that optimizers hold
            else:
                self.unit = unit

    def _fixed(self, like: Tensor) -> geoopt.Manifold:
        """The manifold that ``unit`` is on, in the dtype and on the device of a tensor."""
        return sheet(like.device, like.dtype)


class LorentzPoints(UnitPoints):
    """A set of learned points of a hyperbolic space: ``points()`` gives them, ``(num, dim + 1)``.

    Points are computed from the space parts of the parameter, so that they lie on the manifold after any step or
    average.

    Args:
        num: how many points.
        dim: dimension of the space.
        manifold: the space, whose curvature may be learnable.
        std: spread of the initial points: a wrapped normal, in units of the unit hyperboloid.
        generator: source of randomness; torch's seeded state if left out.
        device: where the points live.
        dtype: their dtype.

    Attributes:
        unit: the parameter, ``(num, dim + 1)`` on the hyperboloid of curvature -1.

    Raises:
        TypeError: if ``num`` or ``dim`` is not an integer, or ``manifold`` another one than this library's.
        ValueError: if ``num`` or ``dim`` is not positive, or ``std`` is negative.

    >>> LorentzPoints(3, 2, Lorentz(-0.5))().shape
    torch.Size([3, 3])
    """

    def __init__(
        self,
        num: int,
        dim: int,
        manifold: Lorentz,
        *,
        std: float = 0.1,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.positive_int("num", num)
        checks.positive_int("dim", dim)
        checks.nonnegative("std", std)
        self.manifold = require_lorentz("manifold", manifold)
        checks.floating_dtype(dtype)
        points = sheet(device, dtype).random(num, dim + 1, std=std, generator=generator, dtype=dtype)
        self.unit = on_manifold(points.requires_grad_(), self._fixed(points))

    def forward(self) -> Float[Tensor, "num ambient"]:
        """All points ``(num, dim + 1)``, on the manifold."""
        return self.read(self.unit)

    def read(self, unit: Ambient) -> Ambient:
        """The points of the manifold that points ``(..., dim + 1)`` of the unit hyperboloid stand for.

        Those beyond what the dtype can hold saturate along their ray.
        """
        curvature = self.manifold.curvature
        unit = plain(unit)
        readable = checks.costs_nothing_to_read(unit) and checks.costs_nothing_to_read(curvature)
        if readable and _autograd.supports_custom_backward(unit, curvature):
            return _autograd.apply_function(_Read, unit, curvature)
        return _read_reference(unit, curvature)


def _read_reference(unit: Ambient, curvature: Float[Tensor, " 1"]) -> Ambient:
    radius = curvature.to(unit.dtype).neg().rsqrt()
    return hyperboloid.lift(numerics.shrink(hyperboloid.space(unit) * radius, unit.dtype), curvature)


class _Read(torch.autograd.Function):
    r"""The same in fewer passes, with its gradient in closed form.

    With :math:`x_s = r u_s`, :math:`r = (-\kappa)^{-1/2}` and the gradients :math:`g` by the points, the total gradient
    by their space parts is :math:`c = g_s + g_t\, x_s / x_t`, so that those by :math:`u_s` and :math:`\kappa` are

    .. math:: r\, c \qquad\text{and}\qquad \tfrac{1}{-2\kappa} \sum (c \cdot x_s + g_t\, r^2 / x_t).
    """

    @staticmethod
    def forward(ctx: Any, unit: Tensor, curvature: Tensor) -> Tensor:
        radius = curvature.neg().rsqrt()
        points = unit * radius
        length = torch.linalg.vector_norm(hyperboloid.space(points), dim=-1, keepdim=True)
        # Not of nan, nor where squares overflow, which is long before anything shrinks.
        ctx.ordinary = bool((length < math.inf).all())
        if ctx.ordinary:
            points[..., :1] = numerics.hypot(length, radius)
        else:
            points = _read_reference(unit, curvature)
        ctx.save_for_backward(unit, curvature, points)
        return points

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        unit, curvature, points = ctx.saved_tensors
        (grad,) = grad_outputs
        if ctx.ordinary and not _autograd.through_reference(grad):
            radius = curvature.neg().rsqrt()
            slope = grad[..., :1] / points[..., :1]
            on_unit = torch.addcmul(grad, points, slope).mul_(radius)
            on_unit[..., 0] = 0
            entries = (x.detach().reshape(-1).numpy() for x in (on_unit, points))
            along = float(np.einsum("i,i->", *entries, dtype=np.float64))
            if math.isfinite(along):
                on_curvature = None
                if ctx.needs_input_grad[1]:
                    radius = radius.double()
                    rates = along / radius + slope.sum(dtype=torch.float64) * radius.square()
                    on_curvature = numerics.narrow(rates / (-2 * curvature.double()), curvature.dtype)
                return on_unit, on_curvature
        return _autograd.reference_gradients(_read_reference, (unit, curvature), grad, tuple(ctx.needs_input_grad))


class LorentzEmbedding(LorentzPoints):
    """A lookup table of learned points, as :class:`torch.nn.Embedding` is one of vectors.

    Args:
        num_embeddings: number of rows.
        embedding_dim: dimension of the space.
        manifold: the space, whose curvature may be learnable.
        sparse: give the table a sparse gradient, so that a step of this library's optimizers costs what the rows that
            were looked up cost, however long the table is.
        padding_idx: a row that starts at the origin and gets no gradient; negative ones count from the end.
        std: spread of the initial points: a wrapped normal, in units of the unit hyperboloid.
        generator: source of randomness; torch's seeded state if left out.
        device: where the table lives.
        dtype: its dtype.

    Raises:
        TypeError: if a size or ``padding_idx`` is not an integer, or ``manifold`` another one than this library's.
        ValueError: if a size is not positive, ``padding_idx`` names no row, or ``std`` is negative.

    >>> LorentzEmbedding(10, 3, Lorentz(-1.0))(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 4])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        manifold: Lorentz,
        *,
        sparse: bool = False,
        padding_idx: int | None = None,
        std: float = 0.1,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            checks.positive_int("num_embeddings", num_embeddings),
            checks.positive_int("embedding_dim", embedding_dim),
            manifold,
            std=std,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        checks.flags(sparse=sparse)
        self._look_up_as(sparse=sparse, padding_idx=padding_idx)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.unit[self.padding_idx] = Lorentz(-1.0).origin(embedding_dim + 1).to(self.unit)

    @classmethod
    def from_pretrained(
        cls,
        points: Float[Tensor, "num ambient"],
        manifold: Lorentz,
        *,
        freeze: bool = True,
        sparse: bool = False,
        padding_idx: int | None = None,
    ) -> LorentzEmbedding:
        """A table of given points.

        Args:
            points: points ``(num, dim + 1)`` of the manifold, read by their space parts; ``manifold.lift`` makes them
                of vectors.
            manifold: the space, whose curvature may be learnable.
            freeze: leave the points where they are; they move with the curvature all the same.
            sparse: as in the constructor.
            padding_idx: a row that gets no gradient; it keeps its point.

        Returns:
            The table, in the dtype and on the device of ``points``.

        Raises:
            TypeError: if ``points`` is not a floating-point tensor, or ``manifold`` another one than this library's.
            ValueError: if ``points`` is not a matrix of finite numbers with a row and two columns at least, or a time
                is negative, as where vectors were not lifted, or ``padding_idx`` names no row.
        """
        checks.matrix("points", points, "num", "dim + 1")
        num, ambient = points.shape
        if num < 1 or ambient < 2:
            raise ValueError(f"points must have shape (num >= 1, dim + 1 >= 2), got {(num, ambient)}.")
        checks.finite("points", points)
        if bool((points[:, 0] < 0).any()):
            least = points[:, 0].min().item()
            raise ValueError(
                f"points must have no negative times (manifold.lift makes points of vectors), got {least:g}."
            )
        like: dict[str, Any] = {"device": points.device, "dtype": points.dtype}
        # A generator of its own: torch's is left as it is.
        table = cls(num, ambient - 1, manifold, std=0.0, generator=torch.Generator(points.device), **like)
        table._look_up_as(sparse=sparse, padding_idx=padding_idx)
        with torch.no_grad():
            scale = manifold.curvature.to(points).neg().sqrt()
            table.unit.copy_(sheet(**like).lift(numerics.shrink(hyperboloid.space(points) * scale, points.dtype)))
        table.unit.requires_grad_(not freeze)
        return table

    def _look_up_as(self, *, sparse: bool, padding_idx: int | None) -> None:
        if padding_idx is not None:
            padding_idx = checks.row("padding_idx", padding_idx, self.num_embeddings, "num_embeddings")
        self.sparse, self.padding_idx = sparse, padding_idx

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return self.unit.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Dimension of the space."""
        return self.unit.shape[1] - 1

    def extra_repr(self) -> str:
        """Sizes and what they are looked up as, for ``repr``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}" + ", sparse=True" * self.sparse

    def forward(self, index: Int[Tensor, "..."] | None = None) -> Ambient:
        """The rows with these indices.

        Args:
            index: integer indices of any shape; all rows if left out.

        Returns:
            Points, the shape of ``index`` followed by ``embedding_dim + 1``.

        Raises:
            TypeError: if ``index`` is not an integer tensor.
            ValueError: if an index names no row.
        """
        if index is None:
            if self.padding_idx is None:
                return self.read(self.unit)
            index = torch.arange(self.num_embeddings, device=self.unit.device)
        else:
            checks.codes("index", index, self.num_embeddings, "num_embeddings")
        return self.read(nn.functional.embedding(index.long(), plain(self.unit), self.padding_idx, sparse=self.sparse))


def sheet(device: torch.device | str | None, dtype: torch.dtype | None) -> Lorentz:
    """The unit hyperboloid; float16, in which no curvature can be held, has a float32 one."""
    return Lorentz(-1.0, device=device, dtype=torch.float32 if dtype == torch.float16 else dtype)


def plain(points: Tensor) -> Tensor:
    """Points as a tensor of torch's class: ``make_fx`` looks up no rows in others, and torch.export warns of this."""
    kept = torch.compiler.is_compiling() or not isinstance(points, geoopt.ManifoldTensor)
    return points if kept else points.as_subclass(Tensor)


def on_manifold(points: Tensor, manifold: geoopt.Manifold) -> geoopt.ManifoldParameter:
    """A parameter of points, which Riemannian optimizers move on the manifold."""
    values = points.detach().as_subclass(Tensor)
    # Geoopt types neither this constructor nor its keywords.
    return geoopt.ManifoldParameter(values, manifold=manifold, requires_grad=points.requires_grad)  # pyright: ignore[reportCallIssue]
