r"""How far apart the tokens can be after attention: upper bounds of the diameter of its output.

No mask, or one that all queries share. :math:`\mathrm{diam}(M) = \max_{ij} |M_i - M_j|_2`, osc = max - min, otherwise
the notation of :mod:`holonomy.theory.attention.projections`; :math:`\hat v_m` is the greatest length of a value.

**Theorem RC** (ours), four forms, each weaker and asking less than the one before:

============ =========================================================================================================
``pair``     :math:`\tanh(\max_{ij} \mathrm{osc}_K \langle s (q_i - q_j), \kappa_K\rangle / 4)\, \mathrm{diam}(T)`
``product``  :math:`\tanh(s\, \mathrm{diam}(q)\, \mathrm{diam}(\kappa) / 4)\, \mathrm{diam}(T)`
``weights``  :math:`\tanh(s\, \Delta_q \Delta_\kappa / 4)\, \min(\Delta_T, 2 \prod \hat v_m)`
``cubic``    :math:`s\, \Delta_q \Delta_\kappa \Delta_T / 4`
============ =========================================================================================================

Where nothing is masked but tokens, for all queries alike, the form ``chain`` of
:mod:`~holonomy.theory.attention.chained_collapse` is below ``weights`` and reads as little; ``cubic`` is up to N times
above it.

In the last two :math:`\Delta_q = |W_K^0|\, \mathrm{diam} X`, :math:`\Delta_\kappa = \mathrm{diam} X \sum_m |W_K^m|
\prod_{j \ne m} \hat k_j` and :math:`\Delta_T` alike, with :math:`\hat k_m = |W_K^m| R + |b_K^m|`; without biases
``cubic`` is :math:`(s N^2 / 4) \prod |W_K| \prod |W_V| R^{2(N-1)} \mathrm{diam}(X)^3`.

*Proof.* :math:`f_i - f_j = \sum_K (A_{iK} - A_{jK}) T_K`. Two softmaxes whose logits differ by a function of
oscillation D are within tanh(D/4) in total variation: the ratio of the densities lies in :math:`[c, c e^D]` with mean
1, and two points are extremal. A signed measure of mass zero and total variation :math:`\tau` integrates T to at most
:math:`\tau\, \mathrm{diam}(T)`. The logits of rows i and j differ by :math:`\langle s(q_i - q_j), \kappa_K\rangle`, of
oscillation at most :math:`s |q_i - q_j|\, \mathrm{diam}(\kappa)`. Telescope the N factors, with
:math:`|a * b|_2 \le |a|_2 |b|_2`. Biases drop out of differences. Heads:
:math:`|W_O| (\sum_h \mathrm{diam}_h^2)^{1/2}`; a skip connection adds diam X. QED.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Bool, Float
from holonomy.theory.attention.chained_collapse import chain
from holonomy.theory.attention.lipschitz import radius_after
from holonomy.theory.attention.projections import (
    NotCoveredError,
    Projections,
    attend,
    attention_heads,
    check_tokens,
    read_stack,
)
from holonomy.theory.attention.sizes import diameter, or_infinite, others, reach, through_heads

CollapseForm = Literal["pair", "product", "chain", "weights", "cubic"]
"""A form of Theorem RC, from those that need most to the one that needs least."""

FORMS: tuple[CollapseForm, ...] = ("pair", "product", "weights", "cubic")
"""The forms that hold under any mask of simplexes that all queries share, each weaker than the one before."""

_BY_SIZE = ("chain", "weights", "cubic")

_LIMIT = 4096  # beyond so many tuples diam(kappa) and diam(T) are telescoped from the diameters of their factors


def collapse_step(
    layer: Projections,
    x: Float[Tensor, "tokens d"],
    form: CollapseForm = "product",
    mask: Bool[Tensor, "..."] | None = None,
) -> Tensor:
    """Theorem RC for one layer and one input: a bound of the diameter of the output.

    ``chain``, ``weights`` and ``cubic`` read only the radius and the diameter of the input.
    """
    shared = _shared(layer, x.shape[0], mask, form)
    if form in _BY_SIZE:
        return _by_size(layer, x.norm(dim=-1).amax(), diameter(x), form)
    heads = attention_heads(x, layer)
    kappa, products = heads.kappa, heads.products
    if shared is not None:
        if not bool(shared.any()):
            return _to_output(layer, kappa.new_zeros(kappa.shape[0]), diameter(x))
        kappa, products = kappa[:, shared], products[:, shared]
    if form == "pair":
        # osc over tuples of the difference of the logits of two queries, for all pairs of queries.
        change = layer.scale * heads.keys[0] @ kappa.mT  # (heads, n, tuples)
        apart = (change[:, :, None] - change[:, None]).flatten(1, 2)
        osc = (apart.amax(-1) - apart.amin(-1)).amax(-1)
    else:
        osc = layer.scale * diameter(heads.keys[0]) * _diameter_of_products(kappa, heads.keys[1:])
    per_head = torch.tanh(osc / 4) * _diameter_of_products(products, heads.values)
    return _to_output(layer, per_head, diameter(x))


def _shared(layer: Projections, tokens: int, mask: Tensor | None, form: CollapseForm) -> Tensor | None:
    allowed = layer.allowed(tokens, mask)
    if allowed is None:
        return None
    if not bool((allowed == allowed[:1]).all()):
        raise NotCoveredError("mask must be the same for every query: under others Theorem RC is false.")
    if form == "chain":
        # The slots' tokens, and how many simplexes they would make: as many as there are if tokens alone are masked.
        simplexes = allowed[0].reshape((tokens,) * layer.order)
        kept = [simplexes.movedim(m, 0).reshape(tokens, -1).any(1).sum().item() for m in range(layer.order)]
        if math.prod(kept) != simplexes.sum().item():
            raise NotCoveredError("mask must be one of tokens for the form chain, which takes keys as independent.")
    return allowed[0]


def _diameter_of_products(products: Tensor, factors: Tensor) -> Tensor:
    if products.shape[1] <= _LIMIT:
        return diameter(products)
    # Exchange one factor at a time: the sum of its diameter times the lengths of the others.
    longest = factors.norm(dim=-1).amax(-1)
    return (diameter(factors) * others(longest)).sum(0)


def _by_size(layer: Projections, radius: Tensor, diam: Tensor, form: CollapseForm) -> Tensor:
    w_key, key = reach(layer.keys, layer.key_bias, radius)
    w_value, value = reach(layer.values, layer.value_bias, radius)
    of_kappa = (w_key[1:] * others(key[1:])).sum(0) * diam
    of_products = (w_value * others(value)).sum(0) * diam
    # osc / 4, as s diam(Q) diam(kappa) / 4.
    size = layer.scale * w_key[0] * diam * of_kappa / 4
    if form == "cubic":
        return _to_output(layer, size * of_products, diam)
    per_head = torch.tanh(size) * torch.minimum(of_products, 2 * value.prod(0))
    if form == "chain":
        field = layer.scale * w_key[0] * diam * diam * (w_key[1:] * others(key[1:])).amax(0)
        moved = diam * (w_value * others(value)).amax(0)
        chained = moved * chain(layer.order, field, _interaction(layer, w_key, key, diam))
        # Sizes beyond what the dtype holds leave the chain undefined, and the other form what it is.
        per_head = torch.minimum(per_head, chained.nan_to_num(math.inf, math.inf))
    return _to_output(layer, per_head, diam)


def _interaction(layer: Projections, w_key: Tensor, key: Tensor, diam: Tensor) -> Tensor:
    """The form ``chain``'s z: by how much one key can move what another one does to a logit."""
    pairs = list(combinations(range(1, layer.order + 1), 2))
    if not pairs:
        return torch.zeros_like(w_key[0])
    moved: list[Tensor] = []
    for m, other in pairs:
        still = [key[j] for j in range(layer.order + 1) if j not in (m, other)]
        moved.append(w_key[m] * w_key[other] * torch.stack(still).prod(0))
    return layer.scale * diam * diam * torch.stack(moved).amax(0)


def _to_output(layer: Projections, per_head: Tensor, diam: Tensor) -> Tensor:
    # Equal tokens stay equal, whatever the radius.
    through = through_heads(layer, torch.where(diam == 0, 0.0, per_head))
    return or_infinite(through + diam if layer.skip else through)


def collapse_bound(
    layers: Sequence[Any],
    x: Float[Tensor, "tokens d"],
    *,
    form: CollapseForm = "weights",
    mask: Bool[Tensor, "..."] | None = None,
) -> list[float]:
    """Bound the diameter of the tokens after each layer of a stack.

    ``chain``, ``weights`` and ``cubic`` are iterated: from the radius and diameter of ``x`` alone, for every input of
    that size. ``pair`` and ``product`` take each layer's own input and so certify one step each.

    Args:
        layers: what :func:`holonomy.theory.attention.projections.projections` reads, in order.
        x: tokens ``(n, d)``.
        form: of Theorem RC.
        mask: ``(n, ..., n)``, ``True`` at simplexes that count, the same for every query and layer.

    Returns:
        A bound for each layer, computed in float64; infinite where sizes are beyond that.

    Raises:
        TypeError: if ``layers`` are no sequence, or ``x`` is no floating-point tensor.
        ValueError: if a layer has no projections or does not take what the one before it gives, or ``x`` has not the
            shape that the first one takes.

    >>> layer = Projections(0.1 * torch.eye(2).expand(2, 1, 2, 2), torch.eye(2).expand(1, 1, 2, 2))
    >>> [b <= 0.1 for b in collapse_bound([layer] * 3, torch.eye(2))]
    [True, True, True]
    """
    checks.one_of("form", form, get_args(CollapseForm))
    bounds: list[Tensor] = []
    read, x = _stack(layers, x), x.double()
    radius, diam = x.norm(dim=-1).amax(), diameter(x)
    for layer in (layer.to(torch.float64) for layer in read):
        if form in _BY_SIZE:
            _shared(layer, x.shape[0], mask, form)
            diam, radius = _by_size(layer, radius, diam, form), radius_after(layer, radius)
            bounds.append(diam)
        else:
            bounds.append(collapse_step(layer, x, form, mask))
            x = attend(x, layer, mask)
    return [bound.item() for bound in bounds]


def _stack(layers: Sequence[Any], x: Tensor) -> list[Projections]:
    read = read_stack(checks.sequence("layers", layers, "layers"))
    check_tokens(x, read[0] if read else None)
    return read


def measure_collapse(
    layers: Sequence[Any], x: Float[Tensor, "tokens d"], *, mask: Bool[Tensor, "..."] | None = None
) -> list[float]:
    """Measure the diameter of the tokens after each layer of a stack, with the arguments of :func:`collapse_bound`.

    Below about 1000 eps times the size of the tokens a diameter is rounding; it is nan where tokens are beyond what
    their dtype holds.

    >>> layer = Projections(torch.zeros(2, 1, 2, 2), torch.eye(2).expand(1, 1, 2, 2))
    >>> measure_collapse([layer], torch.eye(2))
    [0.0]
    """
    found: list[float] = []
    read, x = _stack(layers, x), x.to(torch.promote_types(x.dtype, torch.float32))
    for layer in read:
        x = attend(x, layer.to(x.dtype), mask)
        found.append(diameter(x).item())
    return found
