"""Encoders of nodes and the virtual node as loops over edges and nodes: ``reference(module, *inputs)``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holonomy import layers

__all__ = ["REFERENCES"]


def degrees(encoder: layers.DegreeNodeEncoder, x: Tensor, edge_index: Tensor) -> Tensor:
    """Graphormer eq. 5; large degrees share a vector."""
    edges = edge_index.T.tolist()
    rows = []
    for i in range(len(x)):
        arriving = min(sum(target == i for _, target in edges), encoder.max_degree)
        leaving = min(sum(source == i for source, _ in edges), encoder.max_degree)
        rows.append(x[i] + encoder.incoming[arriving] + encoder.outgoing[leaving])
    return torch.stack(rows)


def walks(outer: nn.Module, x: Tensor, edge_index: Tensor, encoding: Tensor) -> Tensor:
    """The distribution of a walk that starts at each node, moved edge by edge; of the encoding, only the gradient."""
    linear, edges = outer.inner.linear, edge_index.T.tolist()
    leaving = [sum(source == i for source, _ in edges) for i in range(len(x))]
    rows = []
    for i in range(len(x)):
        there = [float(j == i) for j in range(len(x))]
        back = []
        for _ in range(linear.in_features):
            moved = [0.0] * len(x)
            for source, target in edges:
                moved[target] += there[source] / leaving[source]
            there = moved
            back.append(there[i])
        rows.append(x[i] + linear.weight @ (x.new_tensor(back) + encoding[i] - encoding[i].detach()) + linear.bias)
    return torch.stack(rows)


def eigenvectors(outer: nn.Module, x: Tensor, _edges: Tensor, encoding: Tensor) -> Tensor:
    """In training each eigenvector has a random sign; that they are eigenvectors is tested with the identifiers."""
    linear = outer.inner.linear
    signs = [1] * linear.in_features
    if outer.training:
        signs = (2 * torch.randint(2, (1, linear.in_features))[0] - 1).tolist()
    rows = []
    for i in range(len(x)):
        added = sum(sign * linear.weight[:, k] * encoding[i, k] for k, sign in enumerate(signs))
        rows.append(x[i] + added + linear.bias)
    return torch.stack(rows)


def heard(outer: nn.Module, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    """Each node hears its neighbours and the virtual node; that hears them all."""
    virtual, edge, n = outer.inner.node, outer.inner.edge, len(x)
    if outer.inner.edge_types:
        edge = torch.eye(outer.inner.edge_types + 1).to(x)
        edge, edge_attr = edge[-1], edge[edge_attr]
    by_node, by_edge = [*x, virtual], [torch.zeros_like(edge_attr[0]) for _ in range(n + 1)]
    for (source, target), attribute in zip(edge_index.T.tolist(), edge_attr, strict=True):
        by_node[target], by_edge[target] = by_node[target] + x[source], by_edge[target] + attribute
    for i in range(n):
        by_node[i], by_node[n] = by_node[i] + virtual, by_node[n] + x[i]
        if edge is not None:
            by_edge[i], by_edge[n] = by_edge[i] + edge, by_edge[n] + edge
    rows = torch.stack(by_node)
    return rows if edge is None else torch.cat([rows, torch.stack(by_edge)], 1)


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.DegreeNodeEncoder: degrees,
    # Registered inside a module that hands the encoding in.
    layers.RandomWalkNodeEncoder: walks,
    layers.LaplacianNodeEncoder: eigenvectors,
    # Registered inside a module that sums over the neighbours of each node.
    layers.VirtualNode: heard,
}
