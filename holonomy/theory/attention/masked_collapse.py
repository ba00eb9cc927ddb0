r"""Rank collapse under a mask that differs between queries: Simplicial Theorem 3.4, Definition 3.5, Lemma B.1.

For ordinary attention (N = 1) one layer is :math:`X \mapsto A X W_V`, A row-stochastic, and t layers are
:math:`X_t = A_t \cdots A_1\, X_0\, W_V^1 \cdots W_V^t`. Hence

.. math:: \mathrm{diam}\, X_t \le \tau(A_t \cdots A_1)\, \mathrm{diam}(X_0) \prod_s |W_V^s|_2,
    \qquad \tau(P) = \tfrac12 \max_{ij} |P_i - P_j|_1

(Dobrushin), under any mask that leaves every query a key. Theorem 3.4 for N = 1, with its constants: if
:math:`|W_V|_{1,\infty} \le 1`, :math:`\epsilon` is the least weight given to an allowed token up to t, and r the
radius, the greatest distance of a token from a centre that sees itself,

.. math:: |\mathrm{res}\, X_t|_F \le \sqrt{n/2}\; \bigl|(\max_i X_{ij} - \min_i X_{ij})_j\bigr|_2\,
    (1 - \epsilon^r)^{\lfloor t/r \rfloor} .

*Proof.* Over r layers every token gives the centre at least :math:`\epsilon^r` of its weight, so :math:`\tau \le 1 -
\epsilon^r`; ranges of columns pass through :math:`W_V` with factors :math:`|W_V|^\top`, of norm at most
:math:`|W_V|_{1,\infty}`. The printed exponent t/r needs its floor.

For N >= 2 it is false: values multiply, so a centre among the sources does not pull. Two tokens 1 and 0 in one
dimension, simplexes (1; 1, 1) and (2; 1, 2), all weights 1, meet every assumption and are a fixed point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holonomy._shapes import Bool, Float
from holonomy.theory.attention.printed_collapse import mixed_norm
from holonomy.theory.attention.projections import NotCoveredError, Projections, attention_heads, projections
from holonomy.theory.attention.sizes import diameter, spectral
from holonomy.theory.graphs.topology import hop_distances


def dobrushin(weights: Float[Tensor, "*batch queries keys"]) -> Float[Tensor, "*batch"]:
    r"""Dobrushin's coefficient :math:`\tfrac12 \max_{ij} |P_i - P_j|_1` of row-stochastic matrices."""
    return torch.cdist(weights, weights, p=1.0).amax((-2, -1)) / 2


def centre_radius(mask: Bool[Tensor, "tokens tokens"]) -> int | None:
    """Find the radius of Theorem 3.4: the least, over centres that see themselves, of the longest way from them."""
    longest = hop_distances(mask.double()).amax(0)  # of the ways from each token to all
    longest = longest[longest.isfinite() & mask.diagonal()]
    return None if longest.numel() == 0 else max(1, int(longest.min()))


def masked_collapse(
    layers: Sequence[Any], x: Float[Tensor, "tokens d"], mask: Bool[Tensor, "tokens tokens"] | None = None
) -> list[tuple[float, float]]:
    """Measure the diameter after each layer of ordinary attention beside its Dobrushin bound."""
    product, size = torch.eye(x.shape[0], dtype=x.dtype, device=x.device), diameter(x)
    found: list[tuple[float, float]] = []
    for layer in map(projections, layers):
        weights, x, value = _step(layer, x, mask)
        product, size = weights @ product, size * spectral(value)
        found.append((diameter(x).item(), (dobrushin(product) * size).item()))
    return found


def _step(layer: Projections, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, output and value matrix of a layer that is ``X -> A X W``."""
    plain = layer.value_bias is None and not layer.skip
    if not plain or layer.order > 1 or layer.keys.shape[1] > 1:
        raise NotCoveredError("layer must be ordinary attention of one head, without value bias and skip connection.")
    value = layer.values[0, 0] if layer.out is None else layer.values[0, 0] @ layer.out
    allowed = layer.allowed(x.shape[0], mask)
    if allowed is not None and not bool(allowed.any(1).all()):
        raise NotCoveredError("mask must leave every query a key: rows of zeros are not row-stochastic.")
    weights = attention_heads(x, layer, mask).weights[0]
    result = weights @ (x @ value)
    return weights, result if layer.out_bias is None else result + layer.out_bias, value


def printed_masked_collapse(
    layers: Sequence[Any], x: Float[Tensor, "tokens d"], mask: Bool[Tensor, "tokens tokens"]
) -> list[tuple[float, float]]:
    r"""Measure :math:`|\mathrm{res}\, X_t|_F` beside Theorem 3.4 for N = 1 with its constants."""
    radius = centre_radius(mask)
    ranges = (x.amax(0) - x.amin(0)).norm().item()
    start = math.sqrt(x.shape[0] / 2) * ranges
    least, met = 1.0, radius is not None
    found: list[tuple[float, float]] = []
    for depth, layer in enumerate(map(projections, layers), 1):
        weights, x, value = _step(layer, x, mask)
        least = min(least, weights[mask].min().item())
        # Matrices that were divided by their size are allowed its rounding.
        met = met and bool(mixed_norm(value) <= 1 + 10 * torch.finfo(x.dtype).eps)
        bound = start * (1 - least ** (radius or 1)) ** (depth // (radius or 1)) if met else math.nan
        found.append(((x - x.mean(0)).norm().item(), bound))
    return found
