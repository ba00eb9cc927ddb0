r"""The cap: what is known of the transformer branch from its last normalisation alone: L9.

**L9.** Whatever comes in, the last LayerNorm gives :math:`y = \gamma u + \beta` with :math:`|u| \le \sqrt d`
orthogonal to 1, and an RMS norm :math:`\gamma u` with any u that long. So for every a, with m the least
:math:`a \cdot y` on this set, R the largest :math:`|y|` and :math:`f(t) = \operatorname{arsinh}(k t)/k`, the product
:math:`a \cdot \log_o(y)` is at least :math:`-|a| f(\min(R, -m/|a|))` if m < 0, and :math:`m f(R)/R` if not.

*Proof.* :math:`a \cdot \log_o(y) = (a \cdot y) f(|y|)/|y|`, where :math:`a \cdot y \ge \max(m, -|a| |y|)`. f
increases and f(t)/t decreases, so for m < 0 the worst length is where both bounds agree. QED
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from holonomy._shapes import Float
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import HypformerBlock
from holonomy.theory.affine.arithmetic.forms import ROUNDING
from holonomy.theory.affine.points import RowNorm, centered, gain_of, root


def farthest(encoder: HypformerEncoder) -> Float[Tensor, ""]:
    """How long the logarithm of a result of the encoder is at most; infinite where no such norm is last."""
    norm, radius = _last_norm(encoder), longest(encoder)
    if norm is None:
        return radius
    k = root(norm.manifold_out)
    return (k * radius).asinh() / k * (1 + ROUNDING)


def longest(encoder: HypformerEncoder) -> Float[Tensor, ""]:
    """How long the space part of a result of the encoder is at most; infinite where no such norm is last."""
    norm = _last_norm(encoder)
    if norm is None:
        return torch.tensor(torch.inf).double()
    gain, shift = gain_of(norm)
    return (math.sqrt(norm.features) * gain.abs().amax() + shift.norm()) * (1 + ROUNDING)


def least_products(
    encoder: HypformerEncoder, rows: Float[Tensor, "problem class dim"]
) -> Float[Tensor, "problem class"]:
    """The least that each row's product with the logarithm of a result of the encoder can be."""
    norm = _last_norm(encoder)
    if norm is None:
        return torch.full(rows.shape[:-1], -torch.inf, dtype=rows.dtype)
    gain, shift = gain_of(norm)
    k, root_size = root(norm.manifold_out), math.sqrt(norm.features)
    turned = centered(norm, rows * gain)
    least = (rows * shift).sum(-1) - root_size * turned.norm(dim=-1)
    least = least - ROUNDING * root_size * (rows.abs() * (gain.abs() + shift.abs())).sum(-1)
    size = rows.norm(dim=-1)
    radius = root_size * gain.abs().amax() + shift.norm()
    reach = torch.minimum(least.abs() / torch.where(size > 0, size, 1.0), radius)
    below = -size * (k * reach).asinh() / k
    above = least * (k * radius).asinh() / (k * radius)
    return torch.where(least < 0, below, above) - ROUNDING * size * radius


def _last_norm(encoder: HypformerEncoder) -> RowNorm | None:
    norm = cast("nn.Module", cast("HypformerBlock", encoder.blocks[-1]).norm_feedforward)
    return norm if isinstance(norm, RowNorm) else None
