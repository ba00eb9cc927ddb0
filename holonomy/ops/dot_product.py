"""Scaled dot-product attention that returns zero for a query without a key, where torch returns nan or an average."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from holonomy import _autograd
from holonomy._shapes import Bool, Float


def dot_product_attention(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch key dim"],
    value: Float[Tensor, "*batch key values"],
    allowed: Bool[Tensor, "*#batch #query key"] | None = None,
    *,
    bias: Float[Tensor, "*#batch #query #key"] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch query values"]:
    r"""Averages of the values with weights :math:`\mathrm{softmax}_j(s\, q_i \cdot k_j + b_{ij})`."""
    attend = partial(functional.scaled_dot_product_attention, query, key, value, dropout_p=dropout, scale=scale)
    if _autograd.forward_mode():  # which torch's fused kernels do not have
        with sdpa_kernel(SDPBackend.MATH):
            return _masked(attend, (*query.shape[:-1], key.shape[-2]), allowed, bias, is_causal=is_causal)
    return _masked(attend, (*query.shape[:-1], key.shape[-2]), allowed, bias, is_causal=is_causal)


def _masked(
    attend: Callable[..., Tensor],
    shape: tuple[int, ...],
    allowed: Tensor | None,
    bias: Tensor | None,
    *,
    is_causal: bool,
) -> Tensor:
    if allowed is None:
        return attend(is_causal=is_causal) if bias is None else attend(attn_mask=bias.expand(shape))
    empty = ~allowed.any(-1, keepdim=True)
    # A query without a key attends to all keys, and its result is set to zero afterwards.
    mask = allowed | empty
    if bias is not None:
        mask = bias.masked_fill(~mask, -math.inf)
    return attend(attn_mask=mask.expand(shape)).masked_fill(empty, 0.0)
