r"""Linear attention as pure functions: the feature map of Hypformer eq. 19 and the average of eq. 16.

Axes: ``(*batch, nodes, channels)``, heads among the batch axes. Everything is Euclidean: the time
coordinates of queries, keys and values play no part in linear attention. A mask is boolean, ``True``
where a key is to be ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomy import numerics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["linear_attention", "power_direction", "power_features"]


def power_direction(x: Float[Tensor, "*batch channels"], power: float) -> Float[Tensor, "*batch channels"]:
    r""":math:`\mathrm{ReLU}(x)^p`, each row divided by its largest entry before the power.

    The direction of :func:`power_features` without its length, for queries, whose length cancels
    between the numerator and the denominator of eq. 16. A row without a positive entry gives zeros.

    Args:
        x: vectors ``(*batch, channels)``.
        power: the exponent :math:`p \ge 1`.

    Returns:
        Rows with largest entry 1, or zero rows, ``(*batch, channels)``.

    >>> power_direction(torch.tensor([[-1.0, 2.0, 4.0]]), 2.0)
    tensor([[0.0000, 0.2500, 1.0000]])
    """
    positive = torch.relu(x)
    # Constant for autograd: a common factor of the row changes no direction, and the tie of a
    # maximum would leave a kink in the gradient.
    largest = positive.detach().amax(-1, keepdim=True)
    return numerics.safe_div(positive, largest).pow(power)


def power_features(x: Float[Tensor, "*batch channels"], power: float) -> Float[Tensor, "*batch channels"]:
    r"""The feature map :math:`\phi(x) = |e| / |e^p| \; e^p`, :math:`e = \mathrm{ReLU}(x)`, eq. 19 at t = 1.

    It keeps the length of :math:`e` and sharpens its direction. Being homogeneous of degree one,
    :math:`\phi(x/t) = \phi(x)/t`. At rows with no positive entry value and gradient are zero.

    Args:
        x: vectors ``(*batch, channels)``.
        power: the exponent :math:`p \ge 1`; 1 is plain ReLU.

    Returns:
        Nonnegative features ``(*batch, channels)``.

    >>> power_features(torch.tensor([[3.0, 4.0, -1.0]]), 1.0)
    tensor([[3., 4., 0.]])
    >>> power_features(torch.tensor([3.0, 4.0]), 3.0).norm()
    tensor(5.0000)
    """
    positive = torch.relu(x)
    largest = positive.detach().amax(-1, keepdim=True)
    unit = numerics.safe_div(positive, largest)
    powered = unit.pow(power)
    # With the largest entry scaled to one no power overflows, and |powered| >= 1 in live rows.
    length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    shrunk = torch.linalg.vector_norm(powered, dim=-1, keepdim=True)
    return numerics.safe_div(length, shrunk) * powered * largest


def linear_attention(
    query: Float[Tensor, "*batch query channels"],
    key: Float[Tensor, "*batch key channels"],
    value: Float[Tensor, "*batch key values"],
    mask: Bool[Tensor, "*#batch key"] | None = None,
) -> Float[Tensor, "*batch query values"]:
    r""":math:`Z = Q (K^\top V) / (Q (K^\top 1))` for nonnegative features, Hypformer eq. 16.

    Row i is the average of the values with weights :math:`q_i \cdot k_j`. A row whose weights are
    all zero (zero query, orthogonal keys, every key masked) is zero, and so is its gradient.

    Args:
        query: nonnegative features ``(*batch, query, channels)``.
        key: nonnegative features ``(*batch, key, channels)``.
        value: values ``(*batch, key, values)``.
        mask: ``(*batch, key)``, ``True`` at keys to ignore, whatever they hold.

    Returns:
        Averages ``(*batch, query, values)``.

    >>> q, k, v = torch.ones(1, 1), torch.ones(2, 1), torch.tensor([[1.0], [3.0]])
    >>> linear_attention(q, k, v)
    tensor([[2.]])
    >>> linear_attention(q, k, v, torch.tensor([False, True]))
    tensor([[1.]])
    """
    if mask is not None:
        key = key.masked_fill(mask[..., None], 0.0)
        value = value.masked_fill(mask[..., None], 0.0)
    if key.shape[-2] == 0:
        return torch.zeros_like(query[..., :1]) * value.new_zeros(value.shape[-1])
    # The scale of the keys cancels; with this one no sum over them exceeds the largest value.
    largest = key.detach().abs().amax((-2, -1), keepdim=True)
    key = numerics.safe_div(key, largest) / (key.shape[-2] * key.shape[-1])
    numerator = query @ (key.transpose(-2, -1) @ value)
    denominator = query @ key.sum(-2, keepdim=True).transpose(-2, -1)
    return numerics.safe_div(numerator, denominator)
