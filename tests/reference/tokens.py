"""Tokens, their transformer and random features again, from TokenGT's and Performer's equations, as loops.

``reference(module, *inputs)`` reads the module's parameters by name and its options, nothing else of it. Numbers on the
way are 0-d tensors, so that autograd gives the reference gradients. Each probability is handed in by the case, so that
a dropout that the module lost is missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import layers, models

Vector = list[Tensor]


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(a)) @ torch.stack(list(b))


def plus(a: Sequence[Tensor], b: Sequence[Tensor]) -> Vector:
    return [left + right for left, right in zip(a, b, strict=True)]


def affine(linear: nn.Linear, x: Sequence[Tensor]) -> Vector:
    vector = torch.stack(list(x))
    out = [row @ vector for row in linear.weight.unbind()]
    return out if linear.bias is None else plus(out, linear.bias.unbind())


def stacked(rows: Sequence[Vector]) -> Tensor:
    return torch.stack([torch.stack(list(row)) for row in rows])


# Random features and attention.


def features(x: Sequence[Tensor], projection: Tensor) -> Vector:
    """Positive random features, Performer eq. 5: exp(w.x - |x|^2/2) / sqrt(F)."""
    square = dot(x, x)
    return [torch.exp(dot(row.unbind(), x) - square / 2) / math.sqrt(len(projection)) for row in projection]


def kernel_attention(query: Tensor, key: Tensor, value: Tensor, projection: Tensor, mask: Tensor, scale: float):
    """One head, axes (n, d): query i averages the values with weights phi(q_i).phi(k_j).

    The mask, True at no key, broadcasts to (queries, keys).
    """
    of_keys = [features((k * math.sqrt(scale)).unbind(), projection) for k in key]
    rows = []
    for q, gone in zip(query, mask.expand(len(query), len(key)), strict=True):
        of_query = features((q * math.sqrt(scale)).unbind(), projection)
        rows.append(average([dot(of_query, of_key) for of_key in of_keys], value, gone))
    return torch.stack(rows)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    dropout: float = 0.0,
    added: Tensor | None = None,
) -> Tensor:
    """One head, axes (n, d): query i averages the values by exp(q_i.k_j / sqrt d), some of the weights dropped.

    The mask, True at no key, and what is added to logits are (queries, keys).
    """
    rows = []
    for i, q in enumerate(query):
        there = [j for j in range(len(key)) if not mask[i, j]]
        logits = [scale * dot(q.unbind(), key[j].unbind()) + (0.0 if added is None else added[i, j]) for j in there]
        largest = max((float(logit.detach()) for logit in logits), default=0.0)
        raw = [torch.exp(logit - largest) for logit in logits]
        row = value.new_zeros(value.shape[-1])
        for j, weight in zip(there, raw, strict=True):
            row = row + functional.dropout(weight / sum(raw), dropout) * value[j]
        rows.append(row)
    return torch.stack(rows)


def average(weights: Sequence[Tensor], value: Tensor, mask: Tensor) -> Tensor:
    numerator, denominator = value.new_zeros(value.shape[-1]), value.new_zeros(())
    for weight, v, hidden in zip(weights, value, mask, strict=True):
        if not hidden:
            numerator, denominator = numerator + weight * v, denominator + weight
    return numerator / denominator if denominator > 0 else numerator


def by_graphs(attend: Callable[..., Tensor], module: nn.Module, x: Tensor, *rest: Tensor | None, **how) -> Tensor:
    """Graph by graph, with the rest that belongs to it; a mask of pairs has as many as there are graphs, or one."""
    attn_mask = how.pop("attn_mask", None)
    rests = [[None] * len(x) if given is None else given for given in rest]
    pairs = (
        [attn_mask] * len(x)
        if attn_mask is None or attn_mask.ndim == 2
        else attn_mask.reshape(-1, *attn_mask.shape[-2:])
    )
    each = zip(x, pairs, *rests, strict=True)
    return torch.stack([attend(module, graph, *own, attn_mask=pair, **how) for graph, pair, *own in each])


def token_attention(
    module: layers.TokenAttention,
    x: Tensor,
    mask: Tensor | None = None,
    memory: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """TokenGT eq. 3, with keys and values of a memory where there is one; ``attn_mask`` as torch has it."""
    if x.ndim == 3:
        how = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout": dropout}
        return by_graphs(token_attention, module, x, mask, memory, **how)
    others = x if memory is None else memory
    hidden = torch.zeros(len(others), dtype=torch.bool) if mask is None else mask
    others = torch.where(hidden[:, None], 0.0, others)
    each = ((module.query, others if memory is None else x), (module.key, others), (module.value, others))
    query, key, value = (stacked([affine(linear, row.unbind()) for row in tokens]) for linear, tokens in each)
    gone = torch.stack([hidden for _ in query])
    added = None if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask
    for i, j in product(range(len(query)), range(len(key))):
        forbidden = attn_mask is not None and bool(attn_mask[i, j] if added is None else attn_mask[i, j] == -math.inf)
        gone[i, j] = gone[i, j] or forbidden or (is_causal and j > i)
    width = query.shape[1] // module.heads
    heads = []
    for h in range(module.heads):
        q, k, v = (t[:, h * width : (h + 1) * width] for t in (query, key, value))
        scale = 1 / math.sqrt(width)
        if module.kernel == "performer":
            heads.append(kernel_attention(q, k, v, module.projection, gone, scale))
        else:
            heads.append(softmax_attention(q, k, v, gone, scale, dropout if module.training else 0.0, added))
    mixed = torch.cat(heads, 1)
    if memory is None:
        mixed = torch.where(hidden[:, None], 0.0, mixed)
    return stacked([affine(module.out, row.unbind()) for row in mixed])


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


def encoder_layer(
    module: layers.TokenEncoderLayer,
    x: Tensor,
    mask: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    memory: Tensor | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    stochastic_depth: float = 0.0,
) -> Tensor:
    """TokenGT eqs. 9-10 (appendix A.1), with a layer normalisation before attention and before the MLP."""
    graphs = x[None] if x.ndim == 2 else x
    if mask is not None and memory is None:
        graphs = torch.where(mask.reshape(graphs.shape[:2])[..., None], 0.0, graphs)
    ones = x.new_ones(len(graphs))
    # A graph passes by attention, and by the MLP, with the same probability.
    by_attention, by_mlp = (functional.dropout(ones, stochastic_depth, module.training) for _ in range(2))
    normed = torch.stack([stacked([layer_norm(module.norm_attention, row.unbind()) for row in one]) for one in graphs])
    given = (None if each is None else each.reshape(len(graphs), *each.shape[x.ndim - 2 :]) for each in (mask, memory))
    how = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout": attention_dropout}
    attended = token_attention(module.attention, normed, *given, **how)
    out = []
    for graph, one, first, second in zip(graphs, attended, by_attention, by_mlp, strict=True):
        middle = graph + first * entries_dropped(one, dropout, module)
        out.append(middle + second * mlp(module, middle, dropout))
    return torch.stack(out).reshape(x.shape)


def entries_dropped(x: Tensor, dropout: float, module: nn.Module) -> Tensor:
    return functional.dropout(x, dropout, module.training)


def mlp(module: nn.Module, x: Tensor, dropout: float) -> Tensor:
    """What the MLP of a layer with a norm before it adds."""
    rows = []
    for row in x:
        hidden = affine(module.expand, layer_norm(module.norm_feedforward, row.unbind()))
        hidden = [functional.dropout(gelu(entry), dropout, module.training) for entry in hidden]
        rows.append(affine(module.contract, hidden))
    return entries_dropped(stacked(rows), dropout, module)


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
    module: layers.GraphTokenizer,
    x: Tensor,
    edge_index: Tensor,
    edge_attr: Tensor,
    identifiers: Tensor,
    *,
    eigenvector_dropout: float = 0.0,
) -> Tensor:
    """One graph: [graph], nodes, edges. In training each eigenvector has a random sign, and some are dropped."""
    if module.training and module.identifiers in {"laplacian", "laplacian_both"}:
        width = identifiers.shape[1]
        identifiers = identifiers * (2 * torch.randint(2, (1, width))[0] - 1)
        if eigenvector_dropout:
            identifiers = (
                identifiers
                * (torch.rand(1, width, dtype=torch.float32)[0] >= eigenvector_dropout)
                / (1 - eigenvector_dropout)
            )
    rows = [list(module.graph_token.unbind())]
    rows += [token(module, list(node.unbind()), module.of_nodes, (v, v), identifiers) for v, node in enumerate(x)]
    for e, (u, v) in enumerate(edge_index.t().tolist()):
        edge = list(edge_attr[e].unbind()) if module.of_edges is not None else None
        rows.append(token(module, edge, module.of_edges, (u, v), identifiers))
    return stacked(rows)[None]


def one_graph(outer: nn.Module, *inputs: Tensor, eigenvector_dropout: float = 0.0) -> Tensor:
    return graph_tokens(outer.inner, *inputs, eigenvector_dropout=eigenvector_dropout)


def hyperedge_tokens(module: layers.HyperedgeTokenizer, indices: Tensor, values: Tensor, identifiers: Tensor) -> Tensor:
    """One hypergraph: [graph], hyperedges."""
    rows = [list(module.graph_token.unbind())]
    for index, value in zip(indices.tolist(), values, strict=True):
        rows.append(token(module, list(value.unbind()), module.of_hyperedges, tuple(index), identifiers))
    return stacked(rows)[None]


def with_basis_residual(rows: Tensor, nodes: int, edge_index: Tensor) -> Tensor:
    """X_ii + sum_{j != i} X_ij on [graph], nodes, edges: TokenGT A.4."""
    out = list(rows.unbind())
    for i in range(nodes):
        for e, (u, v) in enumerate(edge_index.t().tolist()):
            if u == i and v != i:
                out[1 + i] = out[1 + i] + rows[1 + nodes + e]
    return torch.stack(out)


def tokengt(
    outer: nn.Module,
    x: Tensor,
    edge_index: Tensor,
    *rest: Tensor,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    eigenvector_dropout: float = 0.0,
) -> Tensor:
    """One graph through TokenGT, section 2; a layer is passed by the more often the deeper it lies."""
    module = outer.inner
    rows = graph_tokens(module.tokenizer, x, edge_index, *rest, eigenvector_dropout=eigenvector_dropout)[0]
    rows = entries_dropped(rows, dropout, module)
    for depth, layer in enumerate(module.layers, start=1):
        rows = encoder_layer(
            layer,
            rows,
            dropout=dropout,
            attention_dropout=attention_dropout,
            stochastic_depth=stochastic_depth * depth / len(module.layers),
        )
        if module.basis_residual:
            rows = with_basis_residual(rows, len(x), edge_index)
    read = rows[:1] if module.level == "graph" else rows[1 : 1 + len(x)]
    return stacked([affine(module.head, layer_norm(module.norm, row.unbind())) for row in read])


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.TokenAttention: token_attention,
    layers.TokenEncoderLayer: encoder_layer,
    # Registered inside a module that hands identifiers in and takes one tensor out.
    layers.GraphTokenizer: one_graph,
    layers.HyperedgeTokenizer: lambda outer, *inputs: hyperedge_tokens(outer.inner, *inputs),
    models.TokenGT: tokengt,
}
