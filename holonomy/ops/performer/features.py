r"""Positive random features (Performer, Choromanski et al., ICLR 2021), as logarithms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy._shapes import Float


def orthogonal_projection(
    features: int,
    dim: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "features dim"]:
    r"""Gaussian rows, orthogonal in blocks of ``dim``: each row is normal, and the rows of a block are orthogonal.

    A block is a uniformly random orthogonal matrix, from the QR decomposition of a Gaussian one, whose rows get
    independent lengths with the :math:`\chi` distribution of ``dim`` degrees of freedom.
    """
    if generator is not None and device is None:
        device = generator.device
    drawn = generator.device if generator is not None else device
    blocks = math.ceil(features / dim)
    gaussian = torch.randn(2, blocks, dim, dim, generator=generator, device=drawn, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian[0])
    # Q alone is not uniformly distributed: QR fixes the signs of the diagonal of R. Random signs come back here.
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :]
    rows = q * torch.linalg.vector_norm(gaussian[1], dim=-1, keepdim=True)
    return torch.empty(features, dim, device=device, dtype=dtype).copy_(rows.flatten(0, 1)[:features])


def redraw(projection: Float[Tensor, "features dim"] | None, generator: torch.Generator | None = None) -> None:
    """Draw new random features in place; without a projection, as in softmax attention, do nothing."""
    if projection is not None:
        rows, dim = projection.shape
        projection.copy_(orthogonal_projection(rows, dim, generator=generator, device=projection.device))


def root_of_scale(query: Float[Tensor, "*batch query dim"]) -> float:
    r"""What queries and keys are both multiplied by, for logits :math:`q \cdot k / \sqrt d`."""
    return math.sqrt(1 / math.sqrt(query.shape[-1]))


def log_features(
    x: Float[Tensor, "*batch dim"], projection: Float[Tensor, "features dim"], *, of_query: bool = False
) -> Float[Tensor, "*batch features"]:
    r""":math:`\ell_f(x) = w_f \cdot x - |x|^2/2 - \log\sqrt{F}`, the logarithms of the features of eq. 5.

    The mean over projections of :math:`\sum_f e^{\ell_f(x) + \ell_f(y)}` is :math:`e^{x \cdot y}`. No maximum is
    subtracted here; the sums that the features enter subtract theirs. Autocast has no effect on the logarithm, whose
    error is the relative error of the feature.

    For a query, :math:`-|x|^2/2` is common to all features and cancels in the average. It is left out, because at large
    queries its rounding is larger than the differences of features.
    """
    with torch.autocast(_autograd.autocast_device(x), enabled=False):
        x = x.to(torch.promote_types(x.dtype, projection.dtype))
        if of_query:
            return x @ projection.to(x.dtype).mT
        square = x.square().sum(-1, keepdim=True)
        return x @ projection.to(x.dtype).mT - (square + math.log(projection.shape[0])) / 2
