"""Tokens, their transformer and random features again, from TokenGT's and Performer's equations, as loops.

``reference(module, *inputs)`` reads the module's parameters by name and its options, nothing else of it. Numbers on the
way are 0-d tensors, so that autograd gives the reference gradients. For evaluation mode: without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from holonomy import layers, models

Vector = list[Tensor]


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    total = a[0].new_zeros(())
    for left, right in zip(a, b, strict=True):
        total = total + left * right
    return total


def plus(a: Sequence[Tensor], b: Sequence[Tensor]) -> Vector:
    return [left + right for left, right in zip(a, b, strict=True)]


def affine(linear: nn.Linear, x: Sequence[Tensor]) -> Vector:
    out = [dot(row.unbind(), x) for row in linear.weight.unbind()]
    return out if linear.bias is None else plus(out, linear.bias.unbind())


def stacked(rows: Sequence[Vector]) -> Tensor:
    return torch.stack([torch.stack(list(row)) for row in rows])


# Random features and attention.


def features(x: Sequence[Tensor], projection: Tensor) -> Vector:
    """Positive random features, Performer eq. 5: exp(w.x - |x|^2/2) / sqrt(F)."""
    square = dot(x, x)
    return [torch.exp(dot(row.unbind(), x) - square / 2) / math.sqrt(len(projection)) for row in projection]


def kernel_attention(query: Tensor, key: Tensor, value: Tensor, projection: Tensor, mask: Tensor, scale: float):
    """One head, axes (n, d): query i averages the values with weights phi(q_i).phi(k_j); mask (n,) True at no key."""
    of_keys = [features((k * math.sqrt(scale)).unbind(), projection) for k in key]
    rows = []
    for q in query:
        of_query = features((q * math.sqrt(scale)).unbind(), projection)
        rows.append(average([dot(of_query, of_key) for of_key in of_keys], value, mask))
    return torch.stack(rows)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One head, axes (n, d): query i averages the values with weights exp(q_i.k_j / sqrt d)."""
    rows = []
    for q in query:
        logits = [scale * dot(q.unbind(), k.unbind()) for k in key]
        largest = max(float(logit.detach()) for logit in logits)
        rows.append(average([torch.exp(logit - largest) for logit in logits], value, mask))
    return torch.stack(rows)


def average(weights: Sequence[Tensor], value: Tensor, mask: Tensor) -> Tensor:
    numerator, denominator = value.new_zeros(value.shape[-1]), value.new_zeros(())
    for weight, v, hidden in zip(weights, value, mask, strict=True):
        if not hidden:
            numerator, denominator = numerator + weight * v, denominator + weight
    return numerator / denominator if denominator > 0 else numerator


def token_attention(module: layers.TokenAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """TokenGT eq. 6."""
    if x.ndim == 3:
        masks = [None] * len(x) if mask is None else mask
        return torch.stack([token_attention(module, graph, one) for graph, one in zip(x, masks, strict=True)])
    hidden = torch.zeros(len(x), dtype=torch.bool) if mask is None else mask
    x = torch.where(hidden[:, None], 0.0, x)
    query, key, value = (
        stacked([affine(linear, row.unbind()) for row in x]) for linear in (module.query, module.key, module.value)
    )
    width = query.shape[1] // module.heads
    heads = []
    for h in range(module.heads):
        q, k, v = (t[:, h * width : (h + 1) * width] for t in (query, key, value))
        scale = 1 / math.sqrt(width)
        if module.kernel == "performer":
            heads.append(kernel_attention(q, k, v, module.projection, hidden, scale))
        else:
            heads.append(softmax_attention(q, k, v, hidden, scale))
    return stacked([affine(module.out, row.unbind()) for row in torch.cat(heads, 1)])


# The encoder.


def layer_norm(norm: nn.LayerNorm, x: Sequence[Tensor]) -> Vector:
    mean = sum(x) / len(x)
    variance = sum((entry - mean) ** 2 for entry in x) / len(x)
    return [
        (entry - mean) / (variance + norm.eps).sqrt() * weight + bias
        for entry, weight, bias in zip(x, norm.weight.unbind(), norm.bias.unbind(), strict=True)
    ]


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def encoder_layer(module: layers.TokenEncoderLayer, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """TokenGT eqs. 7-8 (appendix A.1), with a layer normalisation before attention and before the MLP."""
    if x.ndim == 3:
        masks = [None] * len(x) if mask is None else mask
        return torch.stack([encoder_layer(module, graph, one) for graph, one in zip(x, masks, strict=True)])
    if mask is not None:
        x = torch.where(mask[:, None], 0.0, x)
    normed = stacked([layer_norm(module.norm_attention, row.unbind()) for row in x])
    middle = x + token_attention(module.attention, normed, mask)
    rows = []
    for row in middle:
        hidden = affine(module.expand, layer_norm(module.norm_feedforward, row.unbind()))
        rows.append(plus(row.unbind(), affine(module.contract, [gelu(entry) for entry in hidden])))
    return stacked(rows)


# Tokens.


def equality_pattern(index: Sequence[int]) -> tuple[int, ...]:
    return tuple(index.index(node) for node in index)


def classes(order: int) -> list[tuple[int, ...]]:
    """Every equality pattern of k indices, in lexicographic order of their restricted growth strings."""
    found = {equality_pattern(index) for index in product(range(order), repeat=order)}
    growth = {pattern: tuple(sorted(set(pattern)).index(first) for first in pattern) for pattern in found}
    return sorted(found, key=growth.__getitem__)


def token(module: nn.Module, x: Vector | None, linear: nn.Linear | None, index: Sequence[int], identifiers: Tensor):
    """[X, P_i1, .., P_ik, E_gamma(i)] w_in, the rows of w_in standing in the module's linear maps."""
    embedding, width = module.embedding, len(module.graph_token)
    out = [module.graph_token.new_zeros(()) for _ in range(width)]
    if linear is not None:
        out = plus(out, affine(linear, x))
    if embedding.of_identifiers is not None:
        out = plus(out, affine(embedding.of_identifiers, [p for node in index for p in identifiers[node].unbind()]))
    if embedding.of_types is not None:
        gamma = classes(len(index)).index(equality_pattern(index))
        out = plus(out, affine(embedding.of_types, embedding.type_identifiers[gamma].unbind()))
    return out


def graph_tokens(
    module: layers.GraphTokenizer, x: Tensor, edge_index: Tensor, edge_attr: Tensor, identifiers: Tensor
) -> Tensor:
    """One graph: [graph], nodes, edges."""
    rows = [list(module.graph_token.unbind())]
    rows += [token(module, list(node.unbind()), module.of_nodes, (v, v), identifiers) for v, node in enumerate(x)]
    for e, (u, v) in enumerate(edge_index.t().tolist()):
        edge = list(edge_attr[e].unbind()) if module.of_edges is not None else None
        rows.append(token(module, edge, module.of_edges, (u, v), identifiers))
    return stacked(rows)[None]


def hyperedge_tokens(module: layers.HyperedgeTokenizer, indices: Tensor, values: Tensor, identifiers: Tensor) -> Tensor:
    """One hypergraph: [graph], hyperedges."""
    rows = [list(module.graph_token.unbind())]
    for index, value in zip(indices.tolist(), values, strict=True):
        rows.append(token(module, list(value.unbind()), module.of_hyperedges, tuple(index), identifiers))
    return stacked(rows)[None]


def with_basis_residual(rows: Tensor, nodes: int, edge_index: Tensor) -> Tensor:
    """X_ii + sum_{j != i} X_ij on [graph], nodes, edges: TokenGT A.5."""
    out = list(rows.unbind())
    for i in range(nodes):
        for e, (u, v) in enumerate(edge_index.t().tolist()):
            if u == i and v != i:
                out[1 + i] = out[1 + i] + rows[1 + nodes + e]
    return torch.stack(out)


def tokengt(module: models.TokenGT, x: Tensor, edge_index: Tensor, edge_attr: Tensor, identifiers: Tensor) -> Tensor:
    """One graph through TokenGT, section 2."""
    rows = graph_tokens(module.tokenizer, x, edge_index, edge_attr, identifiers)[0]
    for layer in module.layers:
        rows = encoder_layer(layer, rows)
        if module.basis_residual:
            rows = with_basis_residual(rows, len(x), edge_index)
    read = rows[:1] if module.level == "graph" else rows[1 : 1 + len(x)]
    return stacked([affine(module.head, layer_norm(module.norm, row.unbind())) for row in read])


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.TokenAttention: token_attention,
    layers.TokenEncoderLayer: encoder_layer,
    # Registered inside a module that hands identifiers in and takes one tensor out.
    layers.GraphTokenizer: lambda outer, *inputs: graph_tokens(outer.inner, *inputs),
    layers.HyperedgeTokenizer: lambda outer, *inputs: hyperedge_tokens(outer.inner, *inputs),
    models.TokenGT: lambda outer, *inputs: tokengt(outer.inner, *inputs),
}
