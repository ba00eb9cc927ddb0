r"""The Frechet mean of points: what the arithmetic mean is in flat space.

Beside it stands the Lorentzian midpoint, :meth:`holonomy.manifolds.Lorentz.centroid`, which is a formula, much faster,
and weighs far points more: it minimises the sum of :math:`\cosh d`.
"""

from __future__ import annotations

from torch import Tensor

from holonomy import checks
from holonomy._autograd import eager
from holonomy._shapes import Float
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.lorentz import Lorentz, require_lorentz


@eager
def frechet_mean(
    x: Float[Tensor, "..."], manifold: Lorentz, weights: Float[Tensor, "..."] | None = None, *, dim: int = -2
) -> Float[Tensor, "..."]:
    r"""The point with the least weighted sum of squared distances (Frechet 1948, Karcher 1977).

    .. math:: m = \operatorname{argmin}_y \sum_i w_i\, d(y, x_i)^2, \qquad \sum_i w_i \log_m x_i = 0 .

    The mean is unique. It is computed by Newton's method, with safe steps in between (Lou et al. 2020, *Differentiating
    through the Frechet Mean*), and differentiated in points, weights and curvature by the implicit function theorem: no
    step is stored. With n points of d coordinates a step takes :math:`n d^2 + d^3`.

    Mean and gradient are accurate for float32 points up to rapidity :math:`\sqrt{-\kappa}\, r = 86` if the mean lies
    within rapidity 20. Beyond, each coordinate of the mean is accurate, but float32 coordinates are too coarse to
    resolve its position among the points.

    Under ``torch.compile`` the graph breaks here; ``torch.func`` takes a fixed number of steps.

    Args:
        x: points ``(..., n, d + 1)``, where n may be another axis, see ``dim``.
        manifold: where the points lie.
        weights: finite nonnegative numbers of the shape of ``x`` without its last axis, or that broadcasts to it; equal
            weights if left out. Only their ratios count; where all are zero, or there is no point, it is the origin.
        dim: the axis of ``x`` over which the mean is taken, any but the last.

    Returns:
        Points, the shape of ``x`` without the axis ``dim``.

    Raises:
        TypeError: if the weights are not floating-point numbers, or ``dim`` is no integer.
        ValueError: if a weight is negative or not finite, where weights can be read, or if shapes do not fit.

    >>> import torch
    >>> m = Lorentz(-1.0)
    >>> x = m.expmap0(torch.tensor([[0.0, -1.0], [0.0, 1.0], [0.0, 3.0]]))
    >>> torch.allclose(m.logmap0(frechet_mean(x, m)), torch.tensor([0.0, 1.0]), atol=1e-6)
    True
    """
    require_lorentz("manifold", manifold)
    checks.vectors(2, x=x)
    checks.rows("x", x, x.shape[-1], "d + 1")
    axis = checks.row("dim", dim, x.ndim, "axes of x")
    if axis == x.ndim - 1:
        raise ValueError(f"dim must be another axis of x than the last, which holds coordinates, got {dim}.")
    weights = x.new_ones(x.shape[:-1]) if weights is None else weights
    checks.floating("weights", weights)
    checks.dense("weights", weights)
    checks.broadcasting("weights", weights, x.shape[:-1], 0, "the axes of x but the last")
    checks.finite("weights", weights, 0.0)
    weights = weights.expand(x.shape[:-1])
    return hyperboloid.frechet_mean(x.movedim(axis, -2), weights.movedim(axis, -1), manifold.curvature)
