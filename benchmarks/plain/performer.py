"""FAVOR+ as it was published: positive features, their products, a quotient."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["favor_attention"]


def favor_attention(query: Tensor, key: Tensor, value: Tensor, projection: Tensor) -> Tensor:
    """Choromanski et al., ICLR 2021, eqs. 4-5: a query's largest exponent is subtracted, and that of all keys."""
    root = query.shape[-1] ** -0.25

    def exponents(x: Tensor) -> Tensor:
        x = x * root
        return x @ projection.mT - x.square().sum(-1, keepdim=True) / 2 - math.log(projection.shape[0]) / 2

    of_query, of_key = exponents(query), exponents(key)
    phi_q = (of_query - of_query.amax(-1, keepdim=True).detach()).exp()
    phi_k = (of_key - of_key.amax((-1, -2), keepdim=True).detach()).exp()
    weights = phi_q @ phi_k.sum(-2)[..., None]
    return phi_q @ (phi_k.mT @ value) / weights
