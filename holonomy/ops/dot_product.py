"""Scaled dot-product attention that returns zero for a query without a key, where torch returns nan or an average."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from holonomy import _autograd

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch key dim"],
    value: Float[Tensor, "*batch key values"],
    allowed: Bool[Tensor, "*#batch #query key"] | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch query values"]:
    r"""Averages of the values with weights :math:`\mathrm{softmax}_j(s\, q_i \cdot k_j)`."""
    if _autograd.forward_mode():  # which torch's fused kernels do not have
        with sdpa_kernel(SDPBackend.MATH):
            return _attend(query, key, value, allowed, scale, dropout)
    return _attend(query, key, value, allowed, scale, dropout)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    if allowed is None:
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale)
    empty = ~allowed.any(-1, keepdim=True)
    # A query without a key attends to all keys, and its result is set to zero afterwards.
    mask = (allowed | empty).expand(*query.shape[:-1], key.shape[-2])
    mixed = functional.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
    return mixed.masked_fill(empty, 0.0)
