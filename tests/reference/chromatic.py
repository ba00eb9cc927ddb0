"""Chromatic attention again, from CSA's equations, as loops over nodes and channels.

``reference(module, *inputs)`` reads the module's parameters by name and its options, nothing else of it. For
evaluation mode: without dropout, batch norm by its running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from holonomy import layers, models
from tests.reference.tokens import affine, dot, layer_norm, plus, stacked

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
) -> Tensor:
    """CSA eq. 7 for a batch of graphs, the maps of edges being the module's own where none are given."""
    maps = module.edges if maps is None else maps
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
                total = plus(total, [a * m for a, m in zip(filters[i, j], message, strict=True)])
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
    """By the running statistics."""
    out = torch.zeros_like(x)
    for g in range(x.shape[0]):
        for i in range(x.shape[1]):
            if mask is None or bool(mask[g, i]):
                scaled = (x[g, i] - module.running_mean) / (module.running_var + module.eps).sqrt()
                out = out.index_put((torch.tensor(g), torch.tensor(i)), scaled * module.weight + module.bias)
    return out


def normalised(norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    if isinstance(norm, layers.NodeBatchNorm):
        return batch_norm(norm, x, mask)
    rows = [layer_norm(norm, row.unbind()) for row in x.flatten(0, 1)]
    out = stacked(rows).reshape(x.shape)
    return out if mask is None else torch.where(mask[..., None], out, 0.0)


def encoder_layer(
    module: layers.ChromaticEncoderLayer, x: Tensor, edges: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    return block(module, x, attention(module.attention, x, edges, mask), mask)


def block(module: layers.ChromaticEncoderLayer, x: Tensor, attended: Tensor, mask: Tensor | None) -> Tensor:
    """What follows attention."""
    x = x if mask is None else torch.where(mask[..., None], x, 0.0)
    y = normalised(module.norm_attention, x + attended, mask)
    rows = []
    for row in y.flatten(0, 1):
        hidden = [torch.clamp(entry, min=0) for entry in affine(module.expand, row.unbind())]
        rows.append(plus(row.unbind(), affine(module.contract, hidden)))
    return normalised(module.norm_feedforward, stacked(rows).reshape(y.shape), mask)


def model(
    module: models.ChromaticGraphTransformer,
    nodes: Tensor,
    categories: Tensor,
    mask: Tensor,
    walks: Tensor,
    distances: Tensor,
    related: Tensor,
) -> Tensor:
    """Graph by graph, each without its padding."""
    results = []
    for g in range(len(nodes)):
        there = mask[g].nonzero()[:, 0]
        pick = [p[g][there][:, there][None] for p in (categories, walks, distances, related)]
        edges = pair_vectors(module.pairs, *pick)
        h = []
        for i in range(len(there)):
            row = affine(module.nodes, nodes[g, there[i]].unbind())
            if module.node_walks is not None:
                row = row + affine(module.node_walks.walks, pick[1][0, i, i].unbind())
            h.append(row)
        h = stacked(h)[None]
        for layer in module.layers:
            attended = attention(layer.attention, h, edges, None, module.shared)
            h = block(layer, h, attended, None)
        if module.level == "graph":
            total = [sum(h[0, :, c]) for c in range(h.shape[2])]
            h = torch.stack([t if module.pooling == "sum" else t / len(there) for t in total])[None, None]
        first, _, last = module.head
        rows = [affine(last, [torch.clamp(e, min=0) for e in affine(first, row.unbind())]) for row in h[0]]
        results.append(stacked(rows))
    if module.level == "graph":
        return torch.cat(results)
    return torch.stack([torch.cat([r, r.new_zeros(mask.shape[1] - len(r), r.shape[1])]) for r in results])


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
    models.ChromaticGraphTransformer: lambda outer, *inputs: model(outer.inner, *inputs),
    # Registered inside a module that lays biases and values side by side.
    layers.EdgeProjection: lambda outer, edges: projection(outer.inner, edges),
}
