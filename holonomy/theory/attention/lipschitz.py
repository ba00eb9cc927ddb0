r"""How much attention can stretch a change of its tokens: upper bounds, for a ball and for one input.

Tokens lie in the ball of radius R; the stretch is the largest singular value of the Jacobian of :math:`X \mapsto f(X)`
on :math:`\mathbb R^{n \times d}`. With the notation of :mod:`holonomy.theory.attention.projections`, :math:`\hat k_m =
|W_K^m| R + |b_K^m|` and :math:`\hat v_m` alike,

**Theorem L+** (ours; any mask). With :math:`b = s \prod_{m=0}^N \hat k_m`,

.. math:: \mathrm{Lip} \le \sum_m \sqrt{c_m}\, |W_V^m| \prod_{j \ne m} \hat v_j
    + s \prod_m \hat v_m \Bigl( |W_K^0| \prod_{j \ge 1} \hat k_j
    + \sum_{m \ge 1} \sqrt{c_m}\, |W_K^m| \prod_{j \ne m} \hat k_j \Bigr),

.. math:: c_m = \max_k \sum_i \frac{\varphi_{ik}}{\varphi_{ik} + (1 - \varphi_{ik}) e^{-2b}},

:math:`\varphi_{ik}` the share of query i's simplexes that have k in slot m; without a mask
:math:`c = n / (1 + (n-1) e^{-2b})`. Heads: :math:`|W_O| (\sum_h \mathrm{Lip}_h^2)^{1/2}`; a skip connection adds 1.

*Proof.* :math:`Df_i = E_i[dT] + s\,\mathrm{Cov}_i(T, \kappa)\, dq_i + s \sum_m E_i[(T - E_i T) \langle q_i, d_m
\kappa\rangle]`, :math:`E_i` the mean under :math:`A_i` and :math:`d_m` the differential in the m-th key. The middle
term touches only row i. The first is at most :math:`\sum_m |A^{(m)}| |W_V^m| \prod \hat v_j`, :math:`A^{(m)}` the
row-stochastic share of each token in slot m, whose norm is at most the root of its largest column sum. The third by
Cauchy-Schwarz under :math:`A_i` and the same column sums. Logits lie in [-b, b], hence
:math:`A^{(m)}_{ik} \le \varphi / (\varphi + (1 - \varphi) e^{-2b})`. Biases enter through :math:`\hat k, \hat v` alone,
and the determinant form as :math:`|\kappa_K| \le \prod |k^m|`. Where no query has two simplexes, as for one
token, the covariances vanish, and with them all but the first sum. QED. Theorem 3.7 follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Bool
from holonomy.theory.attention.projections import NotCoveredError, Projections, projections, read_stack
from holonomy.theory.attention.sizes import or_infinite, others, reach, spectral, through_heads, times

Theorem = Literal["L+", "Simplicial 3.7", "Castin"]


@singledispatch
def lipschitz_bound(
    layer: Any,
    radius: float = math.inf,
    *,
    tokens: int | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    theorem: Theorem = "L+",
) -> float:
    r"""Bound the Lipschitz constant of a layer over all inputs within a radius.

    For attention: every token within ``radius`` of the origin, Frobenius norms. A sequence of attention layers, a list
    or an ``nn.Sequential``, has the product of its layers' bounds, each on the ball that the layers before it leave; a
    mask is one for all of them. Other kinds of layers have their own bounds behind the same name
    (``lipschitz_bound.register``), hyperbolic ones in the hyperbolic metric.

    Args:
        layer: what :func:`holonomy.theory.attention.projections.projections` reads.
        radius: R; attention has no finite constant without it.
        tokens: n, where no mask tells.
        mask: ``(n, ..., n)``, N+1 axes, ``True`` at simplexes that count; only Theorem L+ covers one.
        theorem: ``"L+"``; ``"Simplicial 3.7"`` and ``"Castin"`` (Simplicial Remark 3.8) as printed, to compare with.

    Returns:
        The bound, computed in float64; infinite where sizes are beyond that.

    Raises:
        NotCoveredError: if the theorem does not cover the layer.
        TypeError: if the mask is no boolean tensor, or a number none.
        ValueError: if neither ``tokens`` nor ``mask`` says how many tokens there are, the radius is negative, or a
            layer of a sequence does not take what the one before it gives.

    >>> layer = torch.nn.MultiheadAttention(4, 2, bias=False)
    >>> lipschitz_bound(layer, 1.0, tokens=8) <= lipschitz_bound(layer, 2.0, tokens=8)
    True
    """
    checks.one_of("theorem", theorem, get_args(Theorem))
    checks.in_range("radius", radius, 0.0, math.inf)
    if isinstance(layer, list | tuple):
        return _of_stack(cast("Sequence[Any]", layer), radius, tokens, mask, theorem)
    if mask is not None:
        checks.boolean("mask", mask, None, "simplexes that count")
    read = projections(layer).to(torch.float64)
    count = tokens if tokens is not None else None if mask is None else mask.shape[0]
    if count is None:
        raise ValueError("tokens must be given where there is no mask: the bound grows with their number.")
    checks.positive_int("tokens", count)
    if math.isinf(radius):
        return math.inf
    within = torch.tensor(float(radius), dtype=torch.float64, device=read.keys.device)
    if theorem == "L+":
        return or_infinite(plus_bound(read, within, count, mask)).item()
    if mask is not None or read.masks:
        raise NotCoveredError(f"mask must be left out: {theorem} is a statement on attention without one.")
    printed = printed_lipschitz if theorem == "Simplicial 3.7" else castin_bound
    return or_infinite(printed(read, within, count)).item()


def _of_stack(layers: Sequence[Any], radius: float, tokens: int | None, mask: Tensor | None, theorem: Theorem) -> float:
    """The product of bounds; a constant layer makes it zero, however large the others are."""
    total = 1.0
    for layer, read in zip(layers, read_stack(layers), strict=True):
        bound = lipschitz_bound(layer, radius, tokens=tokens, mask=mask, theorem=theorem)
        total = times(total, bound)
        if math.isfinite(radius):
            radius = radius_after(read.to(torch.float64), radius).item()
    return total


def radius_after(layer: Projections, radius: float | Tensor) -> Tensor:
    """How long a token can be after a layer, if it was within a radius of the origin before it."""
    value = reach(layer.values, layer.value_bias, radius)[1].prod(0)
    bias = 0 if layer.out_bias is None else layer.out_bias.norm()
    return or_infinite(through_heads(layer, value) + bias + (radius if layer.skip else 0))


def plus_bound(
    layer: Projections, radius: float | Tensor, tokens: int, mask: Bool[Tensor, "..."] | None = None
) -> Tensor:
    """Theorem L+ (see the module), differentiable in the projections."""
    w_key, key = reach(layer.keys, layer.key_bias, radius)
    w_value, value = reach(layer.values, layer.value_bias, radius)
    # Per head: logits are at most b = s prod of the lengths of query and keys.
    columns = _column_sums(layer, tokens, mask, layer.scale * key.prod(0)).sqrt()
    of_values = (columns * w_value * others(value)).sum(0)
    # Through the weights: by the query, and by each key.
    of_query = w_key[0] * key[1:].prod(0)
    of_keys = (columns * w_key[1:] * others(key)[1:]).sum(0)
    if _chooses(layer, tokens, mask):
        of_values = of_values + layer.scale * value.prod(0) * (of_query + of_keys)
    bound = through_heads(layer, of_values)
    return bound + 1 if layer.skip else bound


def _chooses(layer: Projections, tokens: int, mask: Tensor | None) -> bool:
    """Whether some query has two simplexes: under one alone nothing goes through the weights."""
    allowed = layer.allowed(tokens, mask)
    return tokens > 1 if allowed is None else bool((allowed.sum(1) > 1).any())


def _column_sums(layer: Projections, tokens: int, mask: Tensor | None, logits: Tensor) -> Tensor:
    """c_m, ``(N, heads)``: how much attention one token can receive in slot m, logits within the given size."""
    # Two weights of a row differ by at most e^{2b}: a token gets at most 1 / (1 + (n - 1) e^{-2b}) of it.
    least = torch.exp(-2 * logits)
    allowed = layer.allowed(tokens, mask)
    if allowed is None:
        return (tokens / (1 + (tokens - 1) * least)).expand(layer.order, -1)
    shaped = allowed.to(least.dtype).reshape((tokens,) * (layer.order + 1))
    total = shaped.flatten(1).sum(1)[:, None]
    sums: list[Tensor] = []
    for m in range(1, layer.order + 1):
        counts = shaped.movedim(m, 1).flatten(2).sum(2) if layer.order > 1 else shaped
        # p, the share of a query's simplexes with the token in slot m, gets p / (p + (1 - p) e^{-2b}) at most.
        share = torch.where(total > 0, counts / total.clamp(min=1), 0.0)
        floor = share[..., None] + (1 - share[..., None]) * least
        # Where e^{-2b} underflows, a token that the query may not use still gets nothing.
        weight = torch.where(share[..., None] > 0, share[..., None] / torch.where(floor > 0, floor, 1.0), 0.0)
        sums.append(weight.sum(0).amax(0))
    return torch.stack(sums)


def printed_lipschitz(layer: Projections, radius: float | Tensor, tokens: int) -> Tensor:
    r"""Simplicial Theorem 3.7: :math:`n\sqrt{2n}\, N V^N R^{N-1} (1 + d N^2 (KR)^{2(N+1)})^{1/2}`."""
    _as_printed(layer)
    order, channels = layer.order, layer.keys.shape[-1]
    value, key = spectral(layer.values).max(), spectral(layer.keys).max()
    inner = 1 + channels * order**2 * (key * radius) ** (2 * (order + 1))
    return tokens * math.sqrt(2 * tokens) * order * value**order * radius ** (order - 1) * inner.sqrt()


def castin_bound(layer: Projections, radius: float | Tensor, tokens: int) -> Tensor:
    r"""Castin et al. (Simplicial Remark 3.8), N = 1: :math:`\sqrt3 |V| (|A|^2 R^4 (4n+1) + n)^{1/2}`."""
    _as_printed(layer)
    if layer.order > 1:
        raise NotCoveredError(f"layer must be ordinary attention, N = 1, for this bound, got N = {layer.order}.")
    form = layer.scale * spectral(layer.keys[0, 0] @ layer.keys[1, 0].mT)
    inner = form**2 * radius**4 * (4 * tokens + 1) + tokens
    return math.sqrt(3) * spectral(layer.values[0, 0]) * inner.sqrt()


def _as_printed(layer: Projections) -> None:
    plain = layer.key_bias is None and layer.value_bias is None and layer.out is None and layer.out_bias is None
    usual = layer.scale <= layer.keys.shape[-1] ** -0.5
    if not plain or not usual or layer.skip or layer.masks or layer.keys.shape[1] > 1 or layer.form != "product":
        raise NotCoveredError(
            "layer must have one head in product form, scale 1/sqrt(d), no biases, mask, output matrix or skip "
            "connection: of others the printed theorem says nothing."
        )
