"""Chromatic attention again, from CSA's equations, as loops over nodes and channels.

``reference(module, *inputs)`` reads the module's parameters by name and its options, nothing else of it. Each
probability is handed in by the case, so that a dropout that the module lost is missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import layers, models
from tests.reference.tokens import affine, dot, entries_dropped, layer_norm, plus, stacked

Matrix = list[list[Tensor]]


def heads_of(channels: int, heads: int) -> list[int]:
    """The head of each channel."""
    return [c // (channels // heads) for c in range(channels)]


def logit(q: Tensor, k: Tensor, bias: list[Tensor], c: int, heads: int, mode: str, activation: Callable | None):
    """The exponent of a_c(i, j), CSA eqs. 4 and 5 with the scale of appendix B, and the additive form."""
    head = heads_of(len(q), heads)
    if mode == "additive":
        return activation(q[c] + k[c] + (bias[c] if bias else 0.0))
    members = [channel for channel in range(len(q)) if head[channel] == head[c]]
    score = dot([q[m] for m in members], [k[m] for m in members]) / math.sqrt(len(members))
    if not bias:
        return score
    return score + (bias[head[c]] if mode == "mono" else bias[c])


def attention_filters(module: layers.ChromaticAttention, x: Tensor, biases: list | None, nodes: list[int]) -> dict:
    """The filters of one graph: (i, j) to a number a channel."""
    query = {i: torch.stack(affine(module.query, x[i].unbind())) for i in nodes}
    key = {i: torch.stack(affine(module.key, x[i].unbind())) for i in nodes}
    found: dict[tuple[int, int], list[Tensor]] = {(i, j): [] for i in nodes for j in nodes}
    for i in nodes:
        for c in range(module.features):
            row = [
                logit(query[i], key[j], biases[i][j] if biases else [], c, module.heads, module.mode, module.activation)
                for j in nodes
            ]
            largest = max(float(entry.detach()) for entry in row)
            a = [torch.exp(entry - largest) for entry in row]
            for j, entry in zip(nodes, a, strict=True):
                found[i, j].append(entry / sum(a))
    return found


def attention(
    module: layers.ChromaticAttention,
    x: Tensor,
    edges: Tensor | None = None,
    mask: Tensor | None = None,
    maps: layers.EdgeProjection | None = None,
    *,
    dropout: float = 0.0,
    dropout_over: str = "edges",
) -> Tensor:
    """CSA eq. 7 for a batch of graphs, the maps of edges being the module's own where none are given.

    A graph loses filters of single pairs, of all that attend to a node, or of a channel.
    """
    maps = module.edges if maps is None else maps
    over = {"edges": (x.shape[1], x.shape[1], 1), "nodes": (1, x.shape[1], 1), "channels": (1, 1, x.shape[2])}
    kept = functional.dropout(x.new_ones(len(x), *over[dropout_over]), dropout, module.training)
    kept = kept.expand(len(x), x.shape[1], x.shape[1], x.shape[2])
    out = torch.zeros_like(x)
    for g in range(len(x)):
        nodes = [i for i in range(x.shape[1]) if mask is None or bool(mask[g, i])]
        biases = values = None
        if edges is not None:
            pairs = {(i, j): edges[g, i, j].unbind() for i in nodes for j in nodes}
            biases = _square({p: affine(maps.bias, e) for p, e in pairs.items()}, x.shape[1])
            if maps.value is not None:
                values = {p: affine(maps.value, e) for p, e in pairs.items()}
        filters = attention_filters(module, x[g], biases, nodes)
        for i in nodes:
            total = [x.new_zeros(()) for _ in range(module.features)]
            for j in nodes:
                message = affine(module.value, x[g, j].unbind())
                if values is not None:
                    message = plus(message, values[i, j])
                terms = zip(kept[g, i, j], filters[i, j], message, strict=True)
                total = plus(total, [k * a * m for k, a, m in terms])
            out = out.index_put((torch.tensor(g), torch.tensor(i)), torch.stack(affine(module.out, total)))
    return out


def _square(pairs: dict[tuple[int, int], list[Tensor]], n: int) -> list:
    return [[pairs.get((i, j), []) for j in range(n)] for i in range(n)]


def projection(module: layers.EdgeProjection, edges: Tensor) -> Tensor:
    """Biases and values side by side."""
    maps = [module.bias] if module.value is None else [module.bias, module.value]
    rows = [[entry for linear in maps for entry in affine(linear, e.unbind())] for e in edges.flatten(0, 2)]
    return stacked(rows).reshape(*edges.shape[:3], -1)


# Encoders of pairs: CSA eqs. 8, 9, 11, 12 and section 3.4.


def edge_type(module: layers.EdgeTypeEncoder, category: int, related: bool | None, attributes: Tensor | None):
    row = module.types.weight[category if related is None else 2 * category + int(related)]
    return list(row.unbind()) if attributes is None else plus(row, affine(module.attributes, attributes.unbind()))


def edge_types(module: layers.EdgeTypeEncoder, categories: Tensor, *rest: Tensor | None) -> Tensor:
    related, attributes = (*rest, None, None)[:2]
    rows = []
    for g, i, j in every_pair(categories):
        relation = None if related is None else bool(related[g, i, j])
        rows.append(edge_type(module, int(categories[g, i, j]), relation, at(attributes, g, i, j)))
    return stacked(rows).reshape(*categories.shape, -1)


def every_pair(categories: Tensor) -> list[tuple[int, int, int]]:
    graphs, n, _ = categories.shape
    return [(g, i, j) for g in range(graphs) for i in range(n) for j in range(n)]


def at(x: Tensor | None, g: int, i: int, j: int) -> Tensor | None:
    return None if x is None else x[g, i, j]


def shortest_paths(module: layers.ShortestPathEncoder, distances: Tensor) -> Tensor:
    rows = [list(module.distances.weight[int(d)].unbind()) for d in distances.flatten()]
    return stacked(rows).reshape(*distances.shape, -1)


def random_walks(module: layers.RandomWalkEncoder, walks: Tensor) -> Tensor:
    rows = [affine(module.walks, row.unbind()) for row in walks.flatten(0, -2)]
    return stacked(rows).reshape(*walks.shape[:-1], -1)


def pair_vectors(
    module: layers.PairEncoder,
    categories: Tensor,
    walks: Tensor | None = None,
    distances: Tensor | None = None,
    related: Tensor | None = None,
    attributes: Tensor | None = None,
) -> Tensor:
    """CSA eq. 9, and the added form of section 3.4, of those inputs that the encoder was made for."""
    rows = []
    for g, i, j in every_pair(categories):
        relation = bool(related[g, i, j]) if module.edges.product else None
        extra = None if module.edges.attributes is None else attributes[g, i, j]
        row = edge_type(module.edges, int(categories[g, i, j]), relation, extra)
        if module.walks is not None:
            row = row + affine(module.walks.walks, walks[g, i, j].unbind())
        if module.distances is not None:
            row = row + list(module.distances.distances.weight[int(distances[g, i, j])].unbind())
        if module.related is not None:
            row = plus(row, module.related.weight[int(related[g, i, j])].unbind())
        rows.append(row)
    return stacked(rows).reshape(*categories.shape, -1)


# The layer and the model: CSA section 3.5, figure 1.


def batch_norm(module: layers.NodeBatchNorm, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """By the mean and variance of the nodes of all graphs in training, by the running ones in evaluation."""
    graphs, n, _ = x.shape
    nodes = [(g, i) for g in range(graphs) for i in range(n) if mask is None or bool(mask[g, i])]
    mean, variance = module.running_mean, module.running_var
    if module.training:
        mean = sum(x[node] for node in nodes) / len(nodes)
        variance = sum((x[node] - mean) ** 2 for node in nodes) / len(nodes)
    out = torch.zeros_like(x)
    for g, i in nodes:
        scaled = (x[g, i] - mean) / (variance + module.eps).sqrt()
        out = out.index_put((torch.tensor(g), torch.tensor(i)), scaled * module.weight + module.bias)
    return out


def normalised(norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    if isinstance(norm, layers.NodeBatchNorm):
        return batch_norm(norm, x, mask)
    rows = [layer_norm(norm, row.unbind()) for row in x.flatten(0, 1)]
    out = stacked(rows).reshape(x.shape)
    return out if mask is None else torch.where(mask[..., None], out, 0.0)


def encoder_layer(
    module: layers.ChromaticEncoderLayer,
    x: Tensor,
    edges: Tensor | None = None,
    mask: Tensor | None = None,
    maps: layers.EdgeProjection | None = None,
    *,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout_over: str = "edges",
) -> Tensor:
    x = x if mask is None else torch.where(mask[..., None], x, 0.0)
    attended = attention(module.attention, x, edges, mask, maps, dropout=attention_dropout, dropout_over=dropout_over)
    y = normalised(module.norm_attention, x + entries_dropped(attended, dropout, module), mask)
    rows = []
    for row in y.flatten(0, 1):
        hidden = [torch.clamp(entry, min=0) for entry in affine(module.expand, row.unbind())]
        hidden = [functional.dropout(entry, dropout, module.training) for entry in hidden]
        rows.append(affine(module.contract, hidden))
    added = entries_dropped(stacked(rows).reshape(y.shape), dropout, module)
    return normalised(module.norm_feedforward, y + added, mask)


def model(
    outer: nn.Module,
    nodes: Tensor,
    categories: Tensor,
    mask: Tensor,
    walks: Tensor,
    distances: Tensor,
    related: Tensor,
    *,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout_over: str = "edges",
) -> Tensor:
    """Figure 1, layer by layer for all graphs, whose nodes share the statistics of a batch norm."""
    module = outer.inner
    edges = pair_vectors(module.pairs, categories, walks, distances, related)
    h = []
    for g in range(len(nodes)):
        for i in range(nodes.shape[1]):
            row = affine(module.nodes, nodes[g, i].unbind())
            if module.node_walks is not None:
                row = row + affine(module.node_walks.walks, walks[g, i, i].unbind())
            h.append(row)
    h = stacked(h).reshape(*nodes.shape[:2], -1)
    options = {"dropout": dropout, "attention_dropout": attention_dropout, "dropout_over": dropout_over}
    for layer in module.layers:
        h = encoder_layer(layer, h, edges, mask, module.shared, **options)
    results = []
    for g in range(len(nodes)):
        rows = [h[g, i] for i in range(nodes.shape[1]) if mask[g, i]]
        if module.level == "graph":
            rows = [sum(rows) / (1 if module.pooling == "sum" else len(rows))]
        results.append(stacked([decoded(module, row) for row in rows]))
    if module.level == "graph":
        return torch.cat(results)
    return torch.stack([torch.cat([r, r.new_zeros(mask.shape[1] - len(r), r.shape[1])]) for r in results])


def decoded(module: models.ChromaticGraphTransformer, row: Tensor) -> list[Tensor]:
    first, _, last = module.head
    return affine(last, [torch.clamp(entry, min=0) for entry in affine(first, row.unbind())])


# Special cases, each from its own paper's formula.


def graphormer(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, b: Tensor) -> Tensor:
    """One head of Graphormer (Ying et al. 2021, eq. 6): A_ij = q_i.k_j / sqrt d + b_phi(i, j)."""
    out = []
    for i in range(len(q)):
        a = [torch.exp(dot(q[i], k[j]) / math.sqrt(q.shape[1]) + b[distance[i, j]]) for j in range(len(q))]
        out.append(sum(entry * v[j] for j, entry in enumerate(a)) / sum(a))
    return torch.stack(out)


def graphit(q: Tensor, k: Tensor, v: Tensor, kernel: Tensor) -> Tensor:
    """One head of GraphiT (Mialon et al. 2021, eq. 5): normalised exp(q_i.k_j / sqrt d) K_r(i, j)."""
    out = []
    for i in range(len(q)):
        a = [torch.exp(dot(q[i], k[j]) / math.sqrt(q.shape[1])) * kernel[i, j] for j in range(len(q))]
        out.append(sum(entry * v[j] for j, entry in enumerate(a)) / sum(a))
    return torch.stack(out)


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.ChromaticAttention: attention,
    layers.EdgeTypeEncoder: edge_types,
    layers.ShortestPathEncoder: shortest_paths,
    layers.RandomWalkEncoder: random_walks,
    layers.PairEncoder: lambda outer, *inputs: pair_vectors(outer.inner, *inputs),
    layers.NodeBatchNorm: batch_norm,
    layers.ChromaticEncoderLayer: encoder_layer,
    models.ChromaticGraphTransformer: model,
    # Registered inside a module that lays biases and values side by side.
    layers.EdgeProjection: lambda outer, edges: projection(outer.inner, edges),
}
