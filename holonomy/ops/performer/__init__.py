r"""FAVOR+: softmax attention through positive random features, linear in the keys (TokenGT section 4.2, Performer).

With rows :math:`w_f` of a random projection, :math:`e^{x \cdot y}` is the mean over f of :math:`\phi_f(x) \phi_f(y)`,
:math:`\phi_f(x) = \exp(w_f \cdot x - |x|^2/2)` (Choromanski et al., ICLR 2021, eq. 5), so that

.. math:: \frac{\sum_j e^{q_i \cdot k_j} v_j}{\sum_j e^{q_i \cdot k_j}} \approx
    \frac{\sum_f \phi_f(q_i) \sum_j \phi_f(k_j) v_j}{\sum_f \phi_f(q_i) \sum_j \phi_f(k_j)} .

Features are handed around as logarithms: whoever sums their exponentials subtracts its own maximum. Axes are
``(*batch, nodes, channels)``, heads among the batch axes; a mask is boolean, ``True`` where a key is to be ignored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomy import _autograd

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["log_features", "orthogonal_projection", "performer_attention", "redraw"]


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
    # QR alone is not uniform: it prefers a sign of the diagonal of R.
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :]
    rows = q * torch.linalg.vector_norm(gaussian[1], dim=-1, keepdim=True)
    return torch.empty(features, dim, device=device, dtype=dtype).copy_(rows.flatten(0, 1)[:features])


def redraw(projection: Float[Tensor, "features dim"] | None, generator: torch.Generator | None = None) -> None:
    """Draw other random features in place; nothing where there are none, as in a layer of softmax attention."""
    if projection is not None:
        rows, dim = projection.shape
        projection.copy_(orthogonal_projection(rows, dim, generator=generator, device=projection.device))


def log_features(
    x: Float[Tensor, "*batch dim"], projection: Float[Tensor, "features dim"], *, of_query: bool = False
) -> Float[Tensor, "*batch features"]:
    r""":math:`w_f \cdot x - |x|^2/2 - \log\sqrt{F}`, the logarithm of the positive random features.

    The mean over projections of :math:`\sum_f e^{\ell_f(x) + \ell_f(y)}` is :math:`e^{x \cdot y}`. No maximum is
    subtracted here: which one cancels is known to the sum that the features enter. Under autocast the logarithm is
    still taken in the projection's precision, for its error is the relative error of the feature.

    Of a query, :math:`-|x|^2/2` is common to all features, and no average sees it; where queries are large, the
    differences of features would drown in its rounding. It is left out there.
    """
    with torch.autocast(_autograd.autocast_device(x), enabled=False):
        x = x.to(torch.promote_types(x.dtype, projection.dtype))
        if of_query:
            return x @ projection.to(x.dtype).mT
        square = x.square().sum(-1, keepdim=True)
        return x @ projection.to(x.dtype).mT - (square + math.log(projection.shape[0])) / 2


def performer_attention(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch key dim"],
    value: Float[Tensor, "*batch key values"],
    projection: Float[Tensor, "features dim"],
    mask: Bool[Tensor, "*#batch key"] | None = None,
    *,
    scale: float | None = None,
) -> Float[Tensor, "*batch query values"]:
    r"""Softmax attention with the exponential replaced by random features, in linear time and memory.

    It is computed as two softmaxes, which is the quotient above with nothing left out,

    .. math:: \sum_f \mathrm{softmax}_f(\ell_f(q_i) + L_f) \sum_j \mathrm{softmax}_j(\ell_f(k_j))\, v_j, \qquad
        L_f = \log \sum_j e^{\ell_f(k_j)},

    so that no feature of a query meets only keys that have underflowed, however large the logits are; a maximum of
    all keys' features would not do (queries and keys of opposite directions leave 0/0). A row without a key is zero.
    """
    if key.shape[-2] == 0:
        return torch.zeros_like(query[..., :1]) * value.new_zeros(value.shape[-1])
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if mask is not None:
        key, value = key.masked_fill(mask[..., None], 0.0), value.masked_fill(mask[..., None], 0.0)
    # Logarithms of half precision are none: their error is the relative error of a feature.
    projection = projection.to(torch.promote_types(projection.dtype, torch.float32))
    of_query = log_features(query * root, projection, of_query=True)
    # Keys in the last axis: both sums over them run along memory.
    of_key = log_features(key * root, projection).mT.contiguous()
    if mask is not None:
        # Without a key there is no softmax: such a row attends to all, whose values are zero.
        hidden = mask & ~mask.all(-1, keepdim=True)
        of_key = of_key.masked_fill(hidden[..., None, :], -math.inf)
    total = of_key.logsumexp(-1)[..., None, :]
    averages = of_key.softmax(-1).to(value.dtype) @ value
    return (of_query + total).softmax(-1).to(value.dtype) @ averages
