"""Principal directions of points: a picture in the plane, or fewer coordinates."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import checks
from holonomy._autograd import eager
from holonomy._shapes import Float
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.lorentz import Lorentz, require_lorentz
from holonomy.manifolds.means import frechet_mean


@eager
def tangent_pca(
    x: Float[Tensor, "*batch n ambient"], manifold: Lorentz, dim: int = 2
) -> Float[Tensor, "*batch n reduced"]:
    r"""Points in the ``dim`` directions from their mean in which they differ most (Fletcher et al. 2004).

    With m the Frechet mean, the vectors :math:`\log_m x_i` are transported to the origin, their principal components
    are kept, and the exponential map makes points of them. The mean comes to the origin. Distances from it are kept but
    for the part in the directions that are left out, and points of a totally geodesic subspace of dimension ``dim``
    keep all distances. An isometry of x changes signs only, which are chosen such that the sum of the cubes of each
    coordinate is not negative.

    For a picture in the unit disk: ``manifold.to_poincare(tangent_pca(x, manifold)) * (-manifold.curvature).sqrt()``.

    Gradients treat the directions as constants. Directions of equal variance are not unique.

    Args:
        x: points ``(*batch, n, d + 1)``.
        manifold: where the points lie.
        dim: the number of directions; zeros where there are fewer.

    Returns:
        Points ``(*batch, n, dim + 1)`` of the same curvature.

    Raises:
        TypeError: if ``manifold`` is another one than this library's, or ``dim`` is no integer.
        ValueError: if ``x`` has no axis of points or is not finite, where it can be read, or ``dim`` is not positive.

    >>> m = Lorentz(-1.0)
    >>> x = m.lift(
    ...     torch.tensor([[2.0, 0.0, 2.0], [-1.0, 1.0, -1.0], [0.0, 3.0, 0.0]])
    ... )  # of a plane in three dimensions
    >>> flat = tangent_pca(x, m)
    >>> flat.shape, torch.allclose(m.cdist(flat, flat), m.cdist(x, x), atol=1e-4)
    (torch.Size([3, 3]), True)
    """
    require_lorentz("manifold", manifold)
    checks.vectors(2, x=x)
    checks.rows("x", x, x.shape[-1], "d + 1")
    checks.finite("x", x)
    checks.positive_int("dim", dim)
    mean = frechet_mean(x, manifold).unsqueeze(-2)
    vectors = hyperboloid.logmap_frame(mean, x, manifold.curvature)
    # torch has no decomposition in half precision.
    wide = vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32))
    directions = torch.linalg.svd(wide, full_matrices=False).Vh[..., :dim, :]
    kept = vectors @ directions.mT.to(vectors)
    signs = torch.where((kept.detach() ** 3).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    kept = functional.pad(kept * signs.to(kept), (1, dim - kept.shape[-1]))
    return manifold.expmap0(kept)
