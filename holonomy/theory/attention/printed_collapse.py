r"""Rank collapse as printed: Simplicial Theorem 3.1 and Corollary 3.2, and inputs that break them.

.. math:: |\mathrm{res}(X')|_{1,\infty} \le \tfrac{4\gamma}{\sqrt d}\, \beta'\, |X|_{1,\infty}^{2(N-1)}\,
    |\mathrm{res}(X)|_{1,\infty}^3, \qquad
    \beta' = (2 \max_m |W_K^m|_{1,\infty})^{N+1} (2 \max_m |W_V^m|_{1,\infty})^N,

:math:`|M|_{1,\infty} = \sqrt{|M|_1 |M|_\infty}` with the largest column and row sums, :math:`\mathrm{res}(X) = X -
1u^\top` at the best u. That is not a norm (``A = e1 1^T`` and its transpose, 4 by 4: 5 > 4) and its minimum over u is
not convex, so residuals are compared by certain bounds: from below on the left, from above on the right.

:math:`\gamma` is not defined for N-simplices. Here it is the least number for which the proof's assumption holds, over
all pairs of tuples: time and memory of order n^(2N+1), for toys only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Float
from holonomy.theory.attention.projections import NotCoveredError, Projections, attend, tuple_products
from holonomy.theory.attention.sizes import others


def mixed_norm(x: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    r""":math:`|M|_{1,\infty}`, the root of largest column sum times largest row sum of absolute values."""
    return (x.abs().sum(-2).amax(-1) * x.abs().sum(-1).amax(-1)).sqrt()


def residual_lower(x: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    r"""Bound :math:`\min_u |X - 1u^\top|_{1,\infty}` from below."""
    # The minima of both factors are taken apart: the greatest deviation of a column from its median, and half the
    # diameter of the rows in l1.
    columns = (x - x.median(0).values).abs().sum(0).amax()
    rows = torch.cdist(x, x, p=1.0).amax() / 2
    return (columns * rows).sqrt()


def residual_upper(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, ""], Float[Tensor, " d"]]:
    r"""Bound :math:`\min_u |X - 1u^\top|_{1,\infty}` from above, by trying medians, means, mid-ranges and each row."""
    tries = torch.cat([torch.stack([x.median(0).values, x.mean(0), (x.amax(0) + x.amin(0)) / 2]), x])
    sizes = mixed_norm(x - tries[:, None])
    best = sizes.argmin()
    return sizes[best], tries[best]


def linear_logits(x: Float[Tensor, "n d"], u: Float[Tensor, " d"], layer: Projections) -> Tensor:
    r"""The logits up to first order in :math:`R = X - 1u^\top`, Lemma A.1: a constant and one term for each slot."""
    shared, rest = u @ layer.keys, (x - u) @ layer.keys  # (N+1, heads, d_h), (N+1, heads, n, d_h)
    logits = shared.prod(0).sum(-1)[:, None].expand(-1, x.shape[0])
    terms = [(part * around[:, None]).sum(-1) for part, around in zip(rest, others(shared), strict=True)]
    keys = reduce(lambda a, b: (a[:, :, None] + b[:, None]).flatten(1), terms[1:])
    return layer.scale * ((logits + terms[0])[:, :, None] + keys[:, None])


def assumed_gamma(logits: Float[Tensor, "heads n tuples"]) -> Float[Tensor, ""]:
    r"""The least gamma that appendix A can assume.

    .. math:: \max_{iKK'} |\Delta| \sum_i \max_{KK'} |\Delta| \le \gamma^2 \Bigl(\max_{KK'} \sum_i |\Delta|\Bigr)^2,
        \qquad \Delta = E_{iK} - E_{iK'} .
    """
    apart = (logits[..., :, None] - logits[..., None, :]).abs()
    each = apart.amax((-2, -1))
    together = apart.sum(1).amax((-2, -1))
    return torch.where(together > 0, (each.amax(-1) * each.sum(-1)).sqrt() / numerics.positive(together), 1.0).amax()


def printed_collapse(x: Float[Tensor, "n d"], layer: Projections) -> Float[Tensor, ""]:
    """Theorem 3.1 as printed, from above: residual by :func:`residual_upper`, the larger of two readings of gamma."""
    # The readings take for E the logits, or their part beyond :func:`linear_logits`, as the proof does. Heads as in
    # Corollary 3.2: H times the largest.
    plain = layer.key_bias is None and layer.value_bias is None and layer.out is None and layer.out_bias is None
    if not plain or layer.skip or layer.masks or layer.form != "product":
        raise NotCoveredError("layer must be in product form without biases, output matrix, mask and skip connection.")
    size, u = residual_upper(x)
    return _printed(_larger_gamma(x, u, layer), [layer], mixed_norm(x)) * size**3


def _larger_gamma(x: Tensor, u: Tensor, layer: Projections) -> Tensor:
    """The larger of the two readings of gamma."""
    keys = x @ layer.keys
    logits = layer.scale * keys[0] @ tuple_products(keys[1:].unbind()).mT
    return torch.maximum(assumed_gamma(logits), assumed_gamma(logits - linear_logits(x, u, layer)))


def _printed(gamma: Tensor, layers: Sequence[Projections], size: Tensor) -> Tensor:
    order, heads, channels = layers[0].order, layers[0].keys.shape[1], layers[0].keys.shape[-1]
    key = torch.stack([mixed_norm(layer.keys).amax() for layer in layers]).amax()
    value = torch.stack([mixed_norm(layer.values).amax() for layer in layers]).amax()
    beta = (2 * key) ** (order + 1) * (2 * value) ** order
    return 4 * gamma * heads / math.sqrt(channels) * beta * size ** (2 * (order - 1))


def printed_depth(x: Float[Tensor, "n d"], layers: Sequence[Projections]) -> list[tuple[float, float]]:
    r"""Corollary 3.2 as printed, :math:`|\mathrm{res}|^{3^L} (\cdots)^{(3^L - 1)/2}`, with the residual it bounds."""
    size, _ = residual_upper(x)
    gamma, largest = size.new_zeros(()), mixed_norm(x)
    found: list[tuple[float, float]] = []
    for depth, layer in enumerate(layers, 1):
        gamma = torch.maximum(gamma, _larger_gamma(x, residual_upper(x)[1], layer))
        x = attend(x, layer)
        largest = torch.maximum(largest, mixed_norm(x))
        factor = _printed(gamma, layers[:depth], largest)
        power = 3.0**depth
        bound = (power * size.double().log() + (power - 1) / 2 * factor.double().log()).exp()
        found.append((residual_lower(x).item(), bound.item()))
    return found


def split_queries(n: int, *, delta: float = 2.0**-20) -> tuple[float, float]:
    r"""An input of ordinary attention that breaks Theorem 3.1 from n = 4098 on, without its n by n matrices.

    n = d, :math:`X = \epsilon I + 1x^\top`, :math:`W_K^0 = a\, s e_1^\top` with alternating signs s, :math:`W_K^1 =
    b(e_1 - e_2) e_1^\top`, :math:`W_V = c(e_1 - e_2) 1^\top`; a second column :math:`\delta (e_1 + e_2)` in both keys
    and x large along :math:`e_1 + e_2`, so that every query splits between tokens 1 and 2. Then the residual is
    :math:`\sqrt n\, abc\, \epsilon^3`, the bound :math:`64 \gamma \sqrt n\, abc\, \epsilon^3`, and
    :math:`\gamma = 1/\sqrt n`: the proof takes :math:`|W_{QK}|_1` for at most :math:`|W_K^0|_{1,\infty}
    |W_K^1|_{1,\infty}`, which it is not.
    """
    eps, a, gap = 1.0, 2.0**-7, 60.0
    b = a * math.sqrt(n / 2)
    sign = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()
    # Beside what keys share, tokens 1 and 2 have 2 xi eps delta^2 / sqrt(n) = gap, and +- a b eps^2 s_i / sqrt(n).
    signal = a * b * eps**2 * sign / math.sqrt(n)
    logits = torch.stack([gap + signal, gap - signal, torch.full_like(sign, math.log(n - 2))], 1)
    # eps delta on top of 2 xi: tokens 1 and 2, as queries, see the gap a little larger. It is beyond the last digit.
    weights = logits.softmax(1)
    output = eps * (weights[:, 0] - weights[:, 1])  # every column is this one; c = 1
    low, high = output.aminmax()
    columns = (output - output.median()).abs().sum()
    measured = (columns * n * (high - low) / 2).sqrt()
    queries = math.sqrt(max(n * a, 2 * delta) * (a + delta))
    keys = math.sqrt(max(2 * b, 2 * delta) * (b + delta))
    values = math.sqrt(2 * n)
    # E differs most between tokens 1 and 2, equally in every row: gamma^2 = e n e / (n e)^2; so do the logits.
    bound = 4 / math.sqrt(n) / math.sqrt(n) * (2 * max(queries, keys)) ** 2 * 2 * values * eps**3
    return measured.item(), bound


def outnumbered_tokens(order: int, copies: int, scale: float, token: float, crowd: float) -> tuple[float, float]:
    """The output's diameter for one token against copies of another, in one dimension with all weights 1.

    The constant :math:`s N / 4` in place of the :math:`s N^2 / 4` of Theorem RC's cubic form is broken by N = 2, a
    token 5 and 1303 tokens 4 at s = 0.35676.
    """
    single = torch.arange(order + 1, dtype=torch.float64)  # how many keys of a tuple are the single token
    ways = torch.tensor([math.comb(order, j) for j in range(order + 1)], dtype=torch.float64)
    products = token**single * crowd ** (order - single)
    entropy = ways.log() + (order - single) * math.log(copies)
    low, high = ((scale * query * products + entropy).softmax(0) @ products for query in (crowd, token))
    bound = scale * order / 4 * max(abs(token), abs(crowd)) ** (2 * (order - 1)) * abs(token - crowd) ** 3
    return abs(high - low).item(), bound
