r"""The Lorentzian midpoint of two points: the residual connection, and eq. 20's sum (Hypformer).

.. math:: m = \frac{x + \epsilon y}{\sqrt{|\kappa|\,|\langle x + \epsilon y, x + \epsilon y\rangle|}}

The norm under the root is never taken as the difference of two large squares: with
:math:`q = |\kappa| \langle x - y, x - y\rangle = 4 \sinh^2(\sqrt{|\kappa|}\, d(x,y)/2)`,

.. math:: |\kappa|\,|\langle x + \epsilon y, x + \epsilon y\rangle| = (1 + \epsilon)^2 + \epsilon\, q .
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holonomy import _autograd, checks, numerics
from holonomy._autograd import may_bypass
from holonomy.layers.hyperbolic.refinement import HypLayerNorm, may_bypass_norm, rescale_space, resolve
from holonomy.manifolds import Lorentz, hyperboloid
from holonomy.manifolds.hyperboloid import geodesics
from holonomy.ops.lorentz.lifted import use_chunked
from holonomy.ops.lorentz.midpoint import LiftedMidpoint
from holonomy.ops.lorentz.residual_norm import residual_norm

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["HypResidual", "add_and_norm", "lifted_midpoint", "midpoint"]


def midpoint(
    x: Float[Tensor, "*batch dim"],
    y: Float[Tensor, "*batch dim"],
    epsilon: float,
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch dim"]:
    """Space part of the Lorentzian midpoint of ``x`` and ``epsilon * y``, two points of one manifold."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    inputs = numerics.widen(x), numerics.widen(y), numerics.widen(curvature.reshape(()).neg()).sqrt()
    # Float64 holds every product of float32 numbers and their gradients, but not those of its own.
    middle = partial(_middle, epsilon)
    found = numerics.bounded(middle, *inputs) if dtype == torch.float64 else middle(*inputs)
    return numerics.narrow(found, dtype)


def _middle(epsilon: float, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    norm = torch.sqrt((1 + epsilon) ** 2 + epsilon * geodesics.squared_chord(x, y, scale))
    # Divided before the sum, which might not fit float64 where the midpoint does.
    return x * (1 / norm) + y * (epsilon / norm)


def lifted_midpoint(
    x: Float[Tensor, "*batch ambient"],
    y: Float[Tensor, "*batch ambient_or_dim"],
    epsilon: float,
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch ambient"]:
    """The midpoint of points, lifted.

    On the CPU, where rows are many, :class:`~holonomy.ops.lorentz.midpoint.LiftedMidpoint` makes it in parts.
    """
    if not _in_parts(x, y):
        return _lifted_midpoint(x, y, curvature, epsilon)
    rows = (z.reshape(-1, z.shape[-1]) for z in (x, y))
    found: Tensor = _autograd.apply_function(LiftedMidpoint, *rows, curvature, epsilon, _lifted_midpoint)
    return found.view_as(x)


def _lifted_midpoint(x: Tensor, y: Tensor, curvature: Tensor, epsilon: float) -> Tensor:
    dim = x.shape[-1] - 1
    return hyperboloid.lift(midpoint(x[..., 1:], y[..., y.shape[-1] - dim :], epsilon, curvature), curvature)


def add_and_norm(
    residual: HypResidual,
    norm: HypLayerNorm,
    x: Float[Tensor, "*batch ambient"],
    branch: Float[Tensor, "*batch ambient"],
) -> Float[Tensor, "*batch ambient"]:
    """``norm(residual(x, branch))``, on one manifold by the formula that needs no midpoint."""
    manifolds = (residual.manifold_in, residual.manifold_branch, norm.manifold_in)
    one = all(manifold is residual.manifold_out for manifold in manifolds)
    readable = one and may_bypass(residual, HypResidual) and may_bypass_norm(norm)
    if not readable or x.shape != branch.shape or x.shape[-1] != norm.features + 1:
        return norm(residual(x, branch))
    gain, shift, last, eps = norm.affine(x)
    # A larger eps would show the rounding of what it is multiplied with.
    if eps * norm.features > 1:
        return norm(residual(x, branch))
    return residual_norm(
        x, branch, residual.manifold_out.curvature, gain, shift, last, weight=residual.epsilon, eps=eps
    )


def _in_parts(x: Tensor, y: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and use_chunked(x, x.numel() // x.shape[-1])
        and x.shape[:-1] == y.shape[:-1]
        and x.dtype == y.dtype
    )


class HypResidual(nn.Module):
    r"""The residual connection: the Lorentzian midpoint of x and :math:`\epsilon\, F(x)`.

    A block maps ``manifold_in`` to ``manifold_out``, and points of two manifolds have no midpoint. So
    both are first brought to ``manifold_out``, by multiplication with :math:`\sqrt{\kappa/\kappa'}`. Contracting:
    with :math:`\epsilon = 1` the Lipschitz constant is the mean of those of x and F(x).

    Args:
        manifold_in: where x lies.
        manifold_out: where the midpoint lies; ``manifold_in`` if ``None``.
        manifold_branch: where F(x) lies; ``manifold_out`` if ``None``.
        epsilon: the weight of F(x).

    >>> from holonomy.manifolds import Lorentz
    >>> m, to = Lorentz(-1.0), Lorentz(-0.25)
    >>> x = m.lift(torch.tensor([1.0, 2.0]))
    >>> torch.allclose(HypResidual(m, to)(x, m.rescale(x, to)), m.rescale(x, to))
    True
    """

    def __init__(
        self,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        manifold_branch: Lorentz | None = None,
        epsilon: float = 1.0,
    ) -> None:
        super().__init__()
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        _, self.manifold_branch = resolve(self.manifold_out, manifold_branch, "manifold_branch")
        self.epsilon = checks.positive("epsilon", epsilon)

    def forward(
        self, x: Float[Tensor, "*batch dim_plus_1"], branch: Float[Tensor, "*batch dim_plus_1"]
    ) -> Float[Tensor, "*batch dim_plus_1"]:
        """Add the branch.

        Args:
            x: points ``(*batch, d + 1)`` on ``manifold_in``.
            branch: points ``(*batch, d + 1)`` on ``manifold_branch``.

        Returns:
            Points ``(*batch, d + 1)`` on ``manifold_out``.
        """
        checks.vectors(x=x)
        checks.last_axis("branch", branch, x.shape[-1], "features + 1")
        out = self.manifold_out
        # Only space parts are read: those of another manifold may come with its times.
        return lifted_midpoint(
            rescale_space(x, self.manifold_in, out),
            rescale_space(branch, self.manifold_branch, out),
            self.epsilon,
            out.curvature,
        )

    def extra_repr(self) -> str:
        """The weight, for ``repr``.

        Returns:
            The line that ``repr`` shows.
        """
        return f"epsilon={self.epsilon}"
