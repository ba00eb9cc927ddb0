r"""Attention of one equivalence class between dense strata: HOT eqs. 10-13 and 18-21.

The stratum of a pattern with u blocks holds one entry for each tuple of u different nodes: ``(*batch, n, .., n,
features)`` with u node axes. A class pairs queries on the output's stratum with keys on the input's: the axes they
share are equal, all others differ. Features are laid out as ``heads * dim``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product

import torch
from torch import Tensor

from holonomy._shapes import Bool, Float
from holonomy.layers.equivariant.basis.orbits import EVERYTHING, Orbit, Term, free_axes, number_of_blocks
from holonomy.layers.equivariant.linear import dense
from holonomy.ops.dot_product import dot_product_attention
from holonomy.ops.performer import log_features


def different(nodes: int, order: int, device: torch.device) -> Bool[Tensor, "..."]:
    """Which tuples consist of different nodes."""
    return _differing(nodes, order, combinations(range(order), 2), device)


def _apart(nodes: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """``(n ** queries, n ** keys)``: whether the free nodes of a query all differ from those of a key."""
    across = product(range(queries), range(queries, queries + keys))
    return _differing(nodes, queries + keys, across, device).reshape(nodes**queries, nodes**keys)


def _differing(nodes: int, order: int, axes: Iterable[tuple[int, ...]], device: torch.device) -> Tensor:
    """Which tuples have different nodes at each of the given pairs of axes."""
    result = torch.ones([nodes] * order, dtype=torch.bool, device=device)
    for orbit in axes:
        apart = ~torch.eye(nodes, dtype=torch.bool, device=device)
        result = result & apart.reshape([nodes if axis in orbit else 1 for axis in range(order)])
    return result


def _front(x: Tensor, axes: tuple[int, ...], order: int) -> Tensor:
    """Bring the given node axes of ``(*batch, n, .., n, f)`` in front and flatten the others to one."""
    batch = x.ndim - order - 1
    rest = [axis for axis in range(order) if axis not in axes]
    x = x.permute(*range(batch), *(batch + axis for axis in (*axes, *rest)), x.ndim - 1)
    return x.reshape(*x.shape[: batch + len(axes)], math.prod(x.shape[batch + len(axes) : -1]), x.shape[-1])


def settle(x: Float[Tensor, "..."], orbit: Orbit, nodes: int) -> Float[Tensor, "..."]:
    """Bring the result of a class, kept axes first and free ones flattened, back to the axes of its stratum."""
    free = free_axes(orbit)[1]
    batch = x.shape[: x.ndim - 2 - len(orbit.writes.places)]
    x = x.reshape(*batch, *[nodes] * (len(orbit.writes.places) + len(free)), x.shape[-1])
    return dense.place(x, (*orbit.writes.places, *free), number_of_blocks(orbit.writes.pattern))


def softmax_class(
    orbit: Orbit,
    query: Float[Tensor, "..."],
    key: Float[Tensor, "..."],
    value: Float[Tensor, "..."],
    valid: Bool[Tensor, "..."],
    heads: int,
) -> Float[Tensor, "..."]:
    """Average the values of a class with softmax weights, HOT eq. 12; each row subtracts its own maximum."""
    free_in, free_out = free_axes(orbit)
    order_in, order_out = number_of_blocks(orbit.reads.pattern), number_of_blocks(orbit.writes.pattern)
    nodes = key.shape[-2]
    q, k, v = (
        _front(x, axes, order).unflatten(-1, (heads, -1)).transpose(-2, -3)
        for x, axes, order in (
            (query, orbit.writes.places, order_out),
            (key, orbit.reads.kept, order_in),
            (value, orbit.reads.kept, order_in),
        )
    )
    present = _front(valid[..., None], orbit.reads.kept, order_in).squeeze(-1)[..., None, None, :]
    allowed = present & _apart(nodes, len(free_out), len(free_in), key.device)
    batch = q.shape[:-3]
    allowed = allowed.expand(*batch, 1, *allowed.shape[-2:])
    # torch's fused kernels need exactly four axes.
    q, k, v, allowed = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v, allowed))
    mixed = dot_product_attention(q, k, v, allowed)
    return mixed.reshape(*batch, *mixed.shape[-3:]).transpose(-2, -3).flatten(-2)


def kernel_class(
    orbit: Orbit,
    query: Float[Tensor, "..."],
    key: Float[Tensor, "..."],
    value: Float[Tensor, "..."],
    valid: Bool[Tensor, "..."],
    heads: int,
    projection: Float[Tensor, "features dim"],
    terms: Sequence[Term],
) -> Float[Tensor, "..."]:
    """The same with random features in place of the softmax: HOT eqs. 18-20, decoupled eq. 21."""
    # The keys of a class are all that agree on the shared axes, minus those that agree on more, plus .. : inclusion and
    # exclusion over the partial matchings of free axes. Where nothing certain is left, the result is zero.
    order_in, order_out = number_of_blocks(orbit.reads.pattern), number_of_blocks(orbit.writes.pattern)
    logs = _log_features(query, key, valid, heads, projection, order_in, order_out)
    phi_q, phi_k, counted = with_count(terms, *logs, value.unflatten(-1, (heads, -1)))
    letters_in, letters_out = "abcdefg"[:order_in], "ABCDEFG"[:order_out]

    def part_of(term: Term) -> Tensor:
        # Output axes have capital letters. An input axis that a term identifies with an output axis gets its letter.
        shared = dict(zip(term.kept, term.places, strict=True))
        named = "".join(letters_out[shared[axis]] if axis in shared else letters_in[axis] for axis in range(order_in))
        kept = "".join(letters_out[place] for place in term.places)
        # With all input axes shared, one key meets each query, and no outer product is needed.
        if len(shared) == order_in:
            weight = torch.einsum(f"...{letters_out}hm,...{named}hm->...{letters_out}h", phi_q, phi_k)
            return torch.einsum(f"...{letters_out}h,...{named}hv->...{letters_out}hv", weight, counted)
        # Sum phi(k) v^T over the free keys first, then contract with phi(q): no pair of tuples is formed.
        table = torch.einsum(f"...{named}hm,...{named}hv->...{kept}hmv", phi_k, counted)
        return torch.einsum(f"...{letters_out}hm,...{kept}hmv->...{letters_out}hv", phi_q, table)

    return quotient_of_terms(terms, part_of).to(value.dtype).flatten(-2)


def with_count(
    terms: Sequence[Term], log_q: Float[Tensor, "..."], log_k: Float[Tensor, "..."], value: Float[Tensor, "..."]
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]:
    """The features, and the values with a one after them, whose weighted sum is the sum of weights."""
    # Over all keys of a graph the weights sum to at least one. Over those of a class they may nearly vanish, and the
    # alternating sum over its terms loses digits: float64. The features too: their gradients are large where they are
    # small, and the product of both is the gradient of the logarithm.
    wide = log_q.dtype if tuple(terms) == (EVERYTHING,) else torch.float64
    counted = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    return log_q.to(wide).exp(), log_k.to(wide).exp(), counted.to(wide)


def quotient_of_terms(terms: Sequence[Term], part_of: Callable[[Term], Tensor]) -> Float[Tensor, "..."]:
    """Weighted sums over the sum of weights of a class; the first of its terms is the sum over the most keys."""
    first, *others = terms
    most = part_of(first)
    total = most
    for term in others:
        total = total + part_of(term) * term.sign
    return quotient(total, most[..., -1:])


def _log_features(
    query: Tensor, key: Tensor, valid: Tensor, heads: int, projection: Tensor, order_in: int, order_out: int
) -> tuple[Tensor, Tensor]:
    """Logarithms of features ``(*batch, n, .., n, heads, features)`` of queries and keys, -inf for absent keys."""
    # The largest of each feature of the keys in a graph goes over to the queries: none underflows at all keys.
    root = projection.shape[1] ** -0.25
    log_q = log_features(query.unflatten(-1, (heads, -1)) * root, projection, of_query=True)
    log_k = log_features(key.unflatten(-1, (heads, -1)) * root, projection)
    log_k = log_k.masked_fill(~valid[..., None, None], -math.inf)
    nodes_in = tuple(range(-order_in - 2, -2))
    top = log_k.detach().amax(nodes_in, keepdim=True)
    top = torch.where(top.isfinite(), top, 0)
    batch = top.shape[: top.ndim - order_in - 2]
    log_q = log_q + top.reshape(*batch, *[1] * order_out, *top.shape[-2:])
    return log_q - log_q.detach().amax(-1, keepdim=True), log_k - top


def quotient(total: Float[Tensor, "*rows counted"], largest: Float[Tensor, "*rows 1"]) -> Float[Tensor, "*rows values"]:
    """Weighted sums over the sum of weights, the last entry; zero where that is rounding, or its square underflows."""
    weights = total[..., -1:]
    limits = torch.finfo(total.dtype)
    # Weights of nan are not less, so that they are seen in the result.
    certain = ~(weights <= (largest * (64 * limits.eps)).clamp_min(math.sqrt(limits.tiny)))
    return torch.where(certain, total[..., :-1] / torch.where(certain, weights, 1), 0)
