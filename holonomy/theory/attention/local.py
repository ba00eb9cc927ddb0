r"""How much attention can stretch a change of its tokens near one input: certificates from that input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._shapes import Bool, Float
from holonomy.theory.attention.projections import (
    Heads,
    NotCoveredError,
    Projections,
    as_function,
    as_stated,
    attend,
    attention_heads,
    check_tokens,
    projections,
    read_stack,
    tuple_products,
)
from holonomy.theory.attention.sizes import or_infinite, spectral, through_heads


def local_lipschitz(
    layer: Any,
    x: Float[Tensor, "tokens d"],
    mask: Bool[Tensor, "..."] | None = None,
    *,
    form: Literal["sums", "blocks"] = "sums",
) -> Tensor:
    r"""Bound the norm of the Jacobian at one input, masks, heads and biases included.

    ``"sums"`` is the proof of Theorem L+ with what this input has in place of what a ball allows: with
    :math:`G^{m,a}_{ik} = E_i[1_{k_m = k} \prod_{j \ne m} v^j_a]` for each channel a,

    .. math:: \sum_m |W_V^m| \max_a |G^{m,a}| + s |W_K^0| \max_i |\mathrm{Cov}_i(T, \kappa)| + s \sum_m |W_K^m| B_m,

    :math:`B_m` the smaller of :math:`(\max_k \sum_i A^{(m)}_{ik} c_i^2 \lambda_{\max} \mathrm{Cov}_i(T))^{1/2}`,
    :math:`c_i = \max |q_i * \prod_{j \ne m} k^j|`, and the norm of the matrix
    :math:`E_i[1_{k_m = k} |T - E_i T| |q_i * \prod_{j \ne m} k^j|]`. It costs what the layer itself costs, and
    singular values of n by n matrices.

    ``"blocks"`` holds for any differentiable layer: :math:`|J|^2 = |J J^\top|` is at most the norm of the n by n matrix
    of the norms of its blocks. It costs the Jacobian, (n d)^2 numbers, and comes within two percent in the median.

    A sequence of layers has, by ``"sums"``, the product of their bounds, each at its own input.

    Args:
        layer: what :func:`~holonomy.theory.attention.projections.projections` reads, or a list or ``nn.Sequential`` of
            such; for ``"blocks"`` any function of the tokens.
        x: tokens ``(n, d)``.
        mask: ``(n, ..., n)``, ``True`` at simplexes that count; all if left out.
        form: which bound.

    Returns:
        The bound, a tensor without axes, computed in float64 where the layer has projections; infinite where sizes are
        beyond the dtype.

    Raises:
        NotCoveredError: if the layer has no projections and the form needs them.
        TypeError: if ``x`` is no floating-point tensor.
        ValueError: if it has not the shape that the layer takes, or is not finite.

    >>> layer = Projections(torch.zeros(2, 1, 1, 1), torch.ones(1, 1, 1, 1))
    >>> local_lipschitz(layer, torch.tensor([[1.0], [1.0]]))
    tensor(1., dtype=torch.float64)
    """
    checks.one_of("form", form, ("sums", "blocks"))
    check_tokens(x)
    if isinstance(layer, list | tuple | nn.Sequential) and form == "sums":
        if isinstance(layer, nn.Sequential):
            as_stated(layer, nn.Sequential)
        total = torch.ones((), dtype=torch.float64, device=x.device)
        layers = list(cast("Iterable[Any]", layer))
        for inner, read in zip(layers, read_stack(layers), strict=True):
            total = total * local_lipschitz(inner, x, mask)
            x = attend(numerics.widen(x), read.to(torch.float64), mask)
        return total
    read: Projections | None = None
    try:
        read = projections(layer).to(torch.float64)
    except NotCoveredError:
        if form == "sums":
            raise
    if read is not None:
        check_tokens(x, read)
        layer, x = read, numerics.widen(x)
    if form == "blocks" or read is None:
        jacobian = torch.func.jacrev(as_function(layer, mask))(x)  # (n, d_out, n, d)
        # The n by n blocks of J J^T, their norms, and the norm of the matrix of these.
        gram = torch.einsum("iajb,kcjb->ikac", jacobian, jacobian)
        return spectral(spectral(gram)).sqrt()
    heads = attention_heads(x, read, mask)
    mean = heads.weights @ heads.products
    away = heads.products[:, None] - mean[:, :, None]  # (heads, n, n^N, d_v)
    weighted = heads.weights[..., None] * away
    # |Cov_i(T, kappa)|, largest over queries, and lambda_max Cov_i(T).
    spread = spectral(weighted.mT @ heads.kappa[:, None]).amax(1)
    variance = spectral(weighted.mT @ away)  # (heads, n)
    # The three terms of "sums": by the query, by each value, by each key.
    bound = read.scale * spectral(read.keys[0]) * spread
    for m in range(read.order):
        bound = bound + spectral(read.values[m]) * _value_norm(heads, m)
        bound = bound + read.scale * spectral(read.keys[m + 1]) * _key_norm(read, heads, m, away.norm(dim=-1), variance)
    bound = or_infinite(through_heads(read, bound))
    return bound + 1 if read.skip else bound


def _slots(weights: Tensor, order: int, m: int) -> Tensor:
    """``(heads, n, n, n^(N-1))``: the weights by query, by token in slot m, and by the tokens in all other slots."""
    tokens = weights.shape[1]
    return weights.unflatten(-1, (tokens,) * order).movedim(2 + m, 2).reshape(weights.shape[0], tokens, tokens, -1)


def _value_norm(heads: Heads, m: int) -> Tensor:
    order = heads.values.shape[0]
    weights = _slots(heads.weights, order, m)
    if order == 1:
        return spectral(weights.squeeze(-1))
    # G^{m,a}: the sum over the tokens of all other slots of A times the product of their values.
    rest = tuple_products([heads.values[j] for j in range(order) if j != m])
    return spectral(torch.einsum("hikr,hra->haik", weights, rest)).amax(1)


def _key_norm(layer: Projections, heads: Heads, m: int, away: Tensor, variance: Tensor) -> Tensor:
    weights = _slots(heads.weights, layer.order, m)
    others = [heads.keys[j] for j in range(1, layer.order + 1) if j != m + 1]
    query = heads.keys[0]
    if layer.form == "product":
        squares = (
            query.square() @ tuple_products(others).square().mT if others else query.square().sum(-1, keepdim=True)
        )
        factor = squares.sqrt()  # (heads, n, n^(N-1)), or (heads, n, 1)
    else:
        # Hadamard: minors of the query and the other keys are at most the product of their norms.
        factor = query.norm(dim=-1, keepdim=True)
        for key in others:
            factor = factor * key.norm(dim=-1).amax(-1)[:, None, None]
    # Both forms of B_m.
    by_columns = (weights.sum(-1) * (factor.amax(-1) ** 2 * variance)[..., None]).sum(1).amax(-1).sqrt()
    by_norm = spectral((weights * _slots(away, layer.order, m) * factor[:, :, None]).sum(-1))
    return torch.minimum(by_columns, by_norm)
