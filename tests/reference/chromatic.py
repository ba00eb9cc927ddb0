"""Chromatic attention again, from CSA's equations, as loops over nodes and channels.

``reference(module, *inputs)`` reads the module's parameters by name and its options, nothing else of it. For
evaluation mode: without dropout, batch norm by its running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from holonomy import layers
from tests.reference.tokens import affine, dot, plus, stacked

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
    module: layers.ChromaticAttention, x: Tensor, edges: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """CSA eq. 7 for a batch of graphs."""
    out = torch.zeros_like(x)
    for g in range(len(x)):
        nodes = [i for i in range(x.shape[1]) if mask is None or bool(mask[g, i])]
        biases = values = None
        if edges is not None:
            pairs = {(i, j): edges[g, i, j].unbind() for i in nodes for j in nodes}
            biases = _square({p: affine(module.edges.bias, e) for p, e in pairs.items()}, x.shape[1])
            if module.edges.value is not None:
                values = {p: affine(module.edges.value, e) for p, e in pairs.items()}
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
    # Registered inside a module that lays biases and values side by side.
    layers.EdgeProjection: lambda outer, edges: projection(outer.inner, edges),
}
