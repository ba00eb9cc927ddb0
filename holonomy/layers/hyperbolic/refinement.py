r"""HRC, the hyperbolic readjustment and refinement cell, and the layers made of it (Hypformer eqs. 13, 21).

A function of :math:`R^d` is applied to the space part of a point, and time is made again:

.. math::
    \mathrm{HRC}(x; f, \kappa_1, \kappa_2)
    = \big(\sqrt{(\kappa_1/\kappa_2) |f(x_s)|^2 - 1/\kappa_2},\; \sqrt{\kappa_1/\kappa_2}\, f(x_s)\big).

Points are ambient, ``(..., d + 1)``, time first. Every layer moves its result from ``manifold_in`` to
``manifold_out`` (the same manifold when it is ``None``), in training and in evaluation alike. Two
refinements in a row are one with the composed function, as the paper merges them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._autograd import may_bypass
from holonomy._shapes import Float
from holonomy.manifolds import Lorentz, hyperboloid
from holonomy.manifolds.hyperboloid.rowwise import use_rowwise
from holonomy.manifolds.lorentz import require_lorentz
from holonomy.ops.lorentz.tangent_map import exponential


def resolve(manifold_in: Lorentz, manifold_out: Lorentz | None, name: str = "manifold_out") -> tuple[Lorentz, Lorentz]:
    """The two manifolds of a layer, the second being the first where it is ``None``."""
    require_lorentz("manifold_in", manifold_in)
    return manifold_in, manifold_in if manifold_out is None else require_lorentz(name, manifold_out)


def curvatures(*manifolds: Lorentz) -> list[Tensor]:
    """The curvatures of manifolds, each computed once: it is a function of a parameter."""
    found: list[Tensor] = []
    for place, manifold in enumerate(manifolds):
        known = [value for value, other in zip(found, manifolds[:place], strict=True) if other is manifold]
        found.append(known[0] if known else manifold.curvature)
    return found


def rescale_space(
    space: Float[Tensor, "*batch dim"], manifold_in: Lorentz, manifold_out: Lorentz
) -> Float[Tensor, "*batch dim"]:
    r"""The change of curvature on space parts: multiplication by :math:`\sqrt{\kappa_1/\kappa_2}`."""
    if manifold_in is manifold_out:
        return space
    return numerics.finite(space * manifold_in.ratio(manifold_out).to(space.dtype))


def change_curvature(
    space: Float[Tensor, "*batch dim"], manifold_in: Lorentz, manifold_out: Lorentz
) -> Float[Tensor, "*batch dim_plus_1"]:
    """The point that HTC and HRC make (eqs. 9, 13); what the dtype cannot hold is drawn back along its ray."""
    space = rescale_space(space, manifold_in, manifold_out)
    largest = torch.finfo(space.dtype).max / 4  # which leaves room for the time
    if checks.costs_nothing_to_read(space):
        point = hyperboloid.lift(space, manifold_out.curvature)
        if bool((point[..., 0] <= largest).all()):
            return point
    return hyperboloid.lift(numerics.within(numerics.finite(space), largest), manifold_out.curvature)


def from_tangent(tangent: Float[Tensor, "*batch dim"], manifold: Lorentz) -> Float[Tensor, "*batch dim_plus_1"]:
    """The points that tangent vectors at the origin lead to, of which a layer made the vectors."""
    return exponential(tangent, manifold.curvature)


def translated(
    points: Float[Tensor, "*batch dim_plus_1"], bias: Float[Tensor, " dim"], manifold: Lorentz
) -> Float[Tensor, "*batch dim_plus_1"]:
    r"""The translation :math:`\exp_x(P_{o \to x}\, b)` of points x that a layer has just made."""
    # In units of the radius it is (cosh|b| + h x_s.b / (1 + x_t)) x_s + h b with h = sinh|b| / |b|, in which up to
    # |b| = 1 float32 keeps its digits.
    if use_rowwise(points, bias) and points.numel() and checks.costs_nothing_to_read(points):
        root = manifold.curvature.neg().sqrt().to(points.dtype)
        size = numerics.norm(bias) * root
        if float(size.detach()) <= 1 and float(points[..., 0].detach().amax()) <= numerics.LONG:
            time, space, h = points[..., :1], points[..., 1:], numerics.sinhc(size)
            share = (space @ bias).unsqueeze(-1) * (root.square() / (1 + root * time))
            return hyperboloid.lift(space * (size.cosh() + h * share) + h * bias, manifold.curvature)
    # The gradient is a sum over all points.
    limit = torch.finfo(points.dtype).max * numerics.ROOM
    bias = numerics.gradient_within(bias.expand(points[..., 1:].shape), limit)
    return hyperboloid.expmap_frame(points, bias.to(points.dtype), manifold.curvature)


class HRC(nn.Module):
    r"""Any function of the space part, with a change of curvature: Hypformer eq. 13.

    The time coordinate of the input is not read, so its gradient is zero.

    Args:
        function: from ``(..., d)`` to ``(..., d')``; a module's parameters are registered.
        manifold_in: where the input lies, curvature :math:`\kappa_1`.
        manifold_out: where the output lies, curvature :math:`\kappa_2`; ``manifold_in`` if ``None``.

    >>> m, to = Lorentz(-1.0), Lorentz(-0.25)
    >>> HRC(torch.relu, m, to)(m.lift(torch.tensor([-3.0, 4.0])))[1:]
    tensor([0., 8.])
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], manifold_in: Lorentz, manifold_out: Lorentz | None = None
    ) -> None:
        super().__init__()
        checks.function("function", function)
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        self.function = function

    def forward(self, x: Float[Tensor, "*batch dim_in_plus_1"]) -> Float[Tensor, "*batch dim_out_plus_1"]:
        """Map points ``(*batch, d + 1)`` to points ``(*batch, d' + 1)`` of ``manifold_out``."""
        space = self.function(self.manifold_in.space(x))
        checks.vectors(0, **{"function(x)": space})
        return change_curvature(space, self.manifold_in, self.manifold_out)


class HypDropout(HRC):
    r"""Dropout of space coordinates: HRC (eq. 21) with :class:`torch.nn.Dropout`.

    Args:
        p: the probability that a coordinate is dropped, in [0, 1].
        manifold_in: where the input lies.
        manifold_out: where the output lies; ``manifold_in`` if ``None``.

    >>> m = Lorentz()
    >>> HypDropout(1.0, m)(m.lift(torch.ones(3))).tolist()
    [1.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, p: float, manifold_in: Lorentz, manifold_out: Lorentz | None = None) -> None:
        super().__init__(nn.Dropout(checks.in_range("p", p, 0.0, 1.0)), manifold_in, manifold_out)


def drop_some(layer: nn.Module, x: Float[Tensor, "*batch dim_plus_1"]) -> Float[Tensor, "*batch dim_plus_1"]:
    """``layer(x)`` of a point that was just lifted: where nothing is dropped, the point itself."""
    if may_bypass(layer, HypDropout):
        layer = cast("HypDropout", layer)
        inner = cast("nn.Dropout", layer.function)
        drops = not may_bypass(inner, nn.Dropout) or (inner.training and inner.p > 0)
        if not drops and layer.manifold_in is layer.manifold_out:
            return x
    return layer(x)


class HypActivation(HRC):
    r"""An activation of the space part: HRC (eq. 21) with a function of torch such as ``torch.relu``.

    Args:
        function: an entrywise function, or a module.
        manifold_in: where the input lies.
        manifold_out: where the output lies; ``manifold_in`` if ``None``.

    >>> m = Lorentz()
    >>> HypActivation(torch.relu, m)(m.lift(torch.tensor([-1.0, 0.0]))).tolist()
    [1.0, 0.0, 0.0]
    """


class HypConcat(nn.Module):
    r"""Concatenation of points: HRC (eq. 21) with the concatenation of space parts.

    Args:
        manifold_in: where the inputs lie.
        manifold_out: where the output lies; ``manifold_in`` if ``None``.

    >>> m = Lorentz()
    >>> x, y = m.lift(torch.tensor([3.0])), m.lift(torch.tensor([4.0]))
    >>> HypConcat(m)(x, y)[1:].tolist()
    [3.0, 4.0]
    """

    def __init__(self, manifold_in: Lorentz, manifold_out: Lorentz | None = None) -> None:
        super().__init__()
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)

    def forward(self, *points: Tensor) -> Tensor:
        """Concatenate points ``(*batch, d_i + 1)`` to points ``(*batch, sum of d_i + 1)`` of ``manifold_out``.

        Other things than tensors are a TypeError; none at all, or other leading axes, a ValueError.
        """
        if not points:
            raise ValueError("points must be at least one tensor, got none.")
        for x in points:
            checks.vectors(points=x)
            if x.shape[:-1] != points[0].shape[:-1]:
                leading = [tuple(each.shape) for each in points]
                raise ValueError(f"points must agree in all axes but the last, got shapes {leading}.")
        space = torch.cat([self.manifold_in.space(x) for x in points], dim=-1)
        return change_curvature(space, self.manifold_in, self.manifold_out)
