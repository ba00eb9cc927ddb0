"""Equivariant maps and higher-order attention again, from HOT's equations, as loops over all multi-indices.

A class is found by comparing indices, never by the library's tables. Axes: ``(batch, n, .., n, features)``; a mask is
``True`` at nodes, a support ``True`` at the entries that are there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import layers, models

Index = tuple[int, ...]


@cache
def pattern(index: Index) -> Index:
    """Name the equality pattern: each entry replaced by the rank of its first occurrence."""
    seen = list(dict.fromkeys(index))
    return tuple(seen.index(entry) for entry in index)


@cache
def patterns(order: int) -> list[Index]:
    """Every equality pattern, in lexicographic order."""
    return sorted({pattern(index) for index in itertools.product(range(order), repeat=order)})


def indices(nodes: int, order: int) -> list[Index]:
    return list(itertools.product(range(nodes), repeat=order))


def here(mask: Tensor | None, index: Index, batch: int) -> bool:
    return mask is None or bool(mask[(batch, list(index))].all())


def entry(x: Tensor, batch: int, index: Index) -> Tensor:
    return x[(batch, *index)]


def assembled(rows: dict[tuple[int, Index], Tensor], batch: int, nodes: int, order: int) -> Tensor:
    every = [rows[b, j] for b in range(batch) for j in indices(nodes, order)]
    return torch.stack(every).reshape(batch, *[nodes] * order, -1)


def equivariant_linear(module: layers.EquivariantLinear, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """HOT eq. 1, with eq. 2's basis tensors as a comparison of indices; a sum over (i, j) of a class is a loop."""
    k, ell = module.order_in, module.order_out
    batch, nodes = x.shape[0], x.shape[1] if k else 0
    known = [p for p in patterns(k + ell) if not module.lightweight or set(p[:k]) <= set(p[k:])]
    rows = {}
    for b in range(batch):
        count = nodes if mask is None else int(mask[b].sum())
        for j in indices(nodes, ell):
            total = x.new_zeros(module.out_features)
            if here(mask, j, b):
                if module.bias is not None:
                    total = total + module.bias[patterns(ell).index(pattern(j))]
                for i in indices(nodes, k):
                    if pattern(i + j) in known and here(mask, i, b):
                        term = entry(x, b, i) @ module.weight[known.index(pattern(i + j))]
                        total = total + term / (terms(i, j, count) if module.normalise else 1)
            rows[b, j] = total
    return assembled(rows, batch, nodes, ell)


def terms(i: Index, j: Index, count: int) -> int:
    """How many i' make (i', j) look like (i, j): an injection of the blocks of i that j does not have."""
    free = len(set(i) - set(j))
    return math.prod(count - len(set(j)) - step for step in range(free))


def projected(
    at: Callable[[Index], Tensor], order_in: int, tuple_: Index, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """HOT Prop. 1 with eq. 14: the entries of A whose nodes all lie in a tuple of different nodes, each its weight."""
    u = len(tuple_)
    known = [
        p for p in patterns(order_in + u) if len(set(p[order_in:])) == u and set(p[:order_in]) <= set(p[order_in:])
    ]
    total = weight.new_zeros(weight.shape[-1])
    if bias is not None:
        total = total + bias[0]
    for i in itertools.product(tuple_, repeat=order_in):
        total = total + at(i) @ weight[known.index(pattern(i + tuple_))]
    return total


def distinct(index: Index) -> Index:
    return tuple(dict.fromkeys(index))


def higher_order_attention(
    module: layers.HigherOrderAttention, x: Tensor, mask: Tensor | None = None, support: Tensor | None = None
) -> Tensor:
    """HOT eqs. 10, 12, 13 (softmax) and 18-20 or 21 (performer), class by class and output by output."""
    k, ell, heads = module.order_in, module.order_out, module.heads
    batch, nodes = x.shape[0], x.shape[1]
    classes = [
        p for p in patterns(k + ell) if set(p[:k]) & set(p[k:]) or len(module.classes.orbits) == len(patterns(k + ell))
    ]
    attended = [p for p in classes if set(p[:k]) - set(p[k:])]

    def there(b: int, i: Index) -> bool:
        return here(mask, i, b) and (support is None or bool(support[(b, *i)]))

    zeroed = torch.stack(
        [
            torch.stack(
                [entry(x, b, i) if there(b, i) else torch.zeros_like(entry(x, b, i)) for i in indices(nodes, k)]
            )
            for b in range(batch)
        ]
    ).reshape(x.shape)

    def mean(b: int, shape: Index) -> Tensor:
        """The mean of the entries of a pattern that are there."""
        found = [entry(x, b, i) for i in indices(nodes, k) if pattern(i) == shape and there(b, i)]
        return torch.stack(found).mean(0) if found else x.new_zeros(module.features)

    def projection_of(end: str, p: Index, tuple_: Index, at: Callable[[Index], Tensor]) -> Tensor:
        """(heads, dim) of the query or key of a class at a tuple of different nodes."""
        if end == "query" and not tuple_:
            return module.constant_query.reshape(len(attended), heads, -1)[attended.index(p)]
        name = pattern(p[k:]) if end == "query" else p[:k]
        alike = [q for q in attended if (pattern(q[k:]) if end == "query" else q[:k]) == name]
        module_ = getattr(module, end)["order" + "".join(map(str, name))]
        whole = projected(at, k, tuple_, module_.weight, module_.bias)
        return whole.reshape(len(alike), heads, -1)[alike.index(p)]

    def centre(p: Index, b: int) -> Tensor:
        """Where keys are counted from, which softmax does not see: the key and, up to length 8, the query of means."""
        means = {q: mean(b, q) for q in patterns(k)}
        key, query = (
            projection_of(end, p, tuple(range(len(set(ends)))), lambda i: means[pattern(i)])
            for end, ends in (("key", p[:k]), ("query", p[k:]))
        )
        return key + query * (8 / query.norm(dim=-1, keepdim=True).clamp(min=8))

    rows = {}
    for b in range(batch):
        for j in indices(nodes, ell):
            total = x.new_zeros(module.features)
            for rank, p in enumerate(classes):
                if not here(mask, j, b) or pattern(j) != pattern(p[k:]):
                    continue
                decoupled = module.sums == "decoupled" and module.kernel == "performer" and p in attended
                keys = [
                    i
                    for i in indices(nodes, k)
                    if there(b, i) and (pattern(i) == p[:k] if decoupled else pattern(i + j) == p)
                ]
                if not keys:
                    continue
                values = torch.stack([(entry(x, b, i) @ module.value[rank]).reshape(heads, -1) for i in keys])
                if p in attended:
                    q = projection_of("query", p, distinct(j), partial(entry, zeroed, b))
                    kk = torch.stack([projection_of("key", p, distinct(i), partial(entry, zeroed, b)) for i in keys])
                    values = (similarities(module, q, kk - centre(p, b))[..., None] * values).sum(0, keepdim=True)
                total = total + values[0].reshape(-1) @ module.out[rank]
            rows[b, j] = total
    return assembled(rows, batch, nodes, ell)


def similarities(module: layers.HigherOrderAttention, q: Tensor, keys: Tensor) -> Tensor:
    """Attention weights (keys, heads) of one query (heads, dim): sigma(q, k) / Z."""
    if module.kernel == "softmax":
        scores = torch.exp((q * keys).sum(-1) / math.sqrt(q.shape[-1]))
    else:
        scores = (phi(q, module.projection) * phi(keys, module.projection)).sum(-1)
    return scores / scores.sum(0)


def phi(x: Tensor, projection: Tensor) -> Tensor:
    """Performer eq. 5 with the scale in it."""
    x = x * x.shape[-1] ** -0.25
    return torch.exp(x @ projection.T - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(projection))


def normed(layer: torch.nn.LayerNorm, t: Tensor) -> Tensor:
    return functional.layer_norm(t, t.shape[-1:], layer.weight, layer.bias, layer.eps)


def encoder_layer(
    module: layers.HigherOrderEncoderLayer, x: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0
) -> Tensor:
    """HOT eqs. 8-9 with a norm before each branch, of which entries are dropped; the input is added where the order
    stays. Padding starts as zeros."""
    if mask is not None:
        there = [here(mask, i, b) for b in range(len(x)) for i in indices(x.shape[1], module.order_in)]
        x = torch.where(torch.tensor(there).reshape(x.shape[:-1])[..., None], x, 0.0)
    y = higher_order_attention(module.attention, normed(module.norm_attention, x), mask)
    y = functional.dropout(y, dropout, module.training)
    if module.order_in == module.order_out:
        y = y + x
    hidden = module.activation(lightweight(module.expand, normed(module.norm_feedforward, y), mask))
    return y + functional.dropout(lightweight(module.contract, hidden, mask), dropout, module.training)


def transformer(outer: torch.nn.Module, x: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0) -> Tensor:
    """HOT section 4: a lightweight map, encoder layers from order to order, a norm, a lightweight map."""
    module = outer.inner
    h = lightweight(module.embed, x, mask)
    for layer in module.layers:
        h = encoder_layer(layer, h, mask, dropout=dropout)
    return lightweight(module.head, normed(module.norm, h), mask)


def invariant_network(
    outer: torch.nn.Module,
    x: Tensor,
    mask: Tensor | None = None,
    *,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    dropout: float = 0.0,
) -> Tensor:
    """Maron et al. 2019: equivariant linear maps, each with an activation and dropout behind it."""
    module = outer.inner
    h = lightweight(module.embed, x, mask)
    for layer in module.layers:
        h = functional.dropout(activation(equivariant_linear(layer.linear, h, mask)), dropout, module.training)
    return lightweight(module.head, h, mask)


def lightweight(module: torch.nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """HOT eq. 14, of all classes without a sum or of the entry itself."""
    if isinstance(module, layers.EquivariantLinear):
        return equivariant_linear(module, x, mask)
    rows = {
        (b, j): (entry(x, b, j) @ module.weight + module.bias) * here(mask, j, b)
        for b in range(x.shape[0])
        for j in indices(x.shape[1], module.order)
    }
    return assembled(rows, x.shape[0], x.shape[1], module.order)


REFERENCES = {
    layers.EquivariantLinear: equivariant_linear,
    layers.HigherOrderAttention: higher_order_attention,
    layers.HigherOrderEncoderLayer: encoder_layer,
    # Registered inside a module that calls them with dense tensors.
    models.HigherOrderTransformer: transformer,
    models.InvariantGraphNetwork: invariant_network,
}
