"""Encoders of nodes and the virtual node."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holonomy import layers
from tests.registry.case import Case, Inputs, Setting

__all__ = ["CASES"]

_DEGREE, _WALKS, _LAPLACIAN = layers.DegreeNodeEncoder, layers.RandomWalkNodeEncoder, layers.LaplacianNodeEncoder
EDGE_FEATURES, EDGE_TYPES = 2, 3


class Encoded(nn.Module):
    """An encoder with the encoding among its inputs, which is computed before."""

    def __init__(self, inner: layers.RandomWalkNodeEncoder | layers.LaplacianNodeEncoder) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, edge_index: Tensor, encoding: Tensor) -> Tensor:
        return self.inner(x, edge_index, encoding=encoding)


class Heard(nn.Module):
    """What each node, the virtual one last, hears beside itself: features of its neighbours and of their edges."""

    def __init__(self, inner: layers.VirtualNode) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        given = {"edge_attr": edge_attr} if self.inner.edge_features or self.inner.edge_types else {}
        graph = self.inner(x, edge_index, **given)
        (source, target), x = graph["edge_index"], graph["x"]
        heard = x.index_add(0, target, x[source])
        if "edge_attr" not in graph:
            return heard
        edges = graph["edge_attr"]
        edges = nn.functional.one_hot(edges, EDGE_TYPES + 1).to(x) if self.inner.edge_types else edges
        return torch.cat([heard, heard.new_zeros(len(x), edges.shape[1]).index_add(0, target, edges)], 1)


def _graph(setting: Setting) -> tuple[Tensor, ...]:
    """A ring with a chord, a self-loop and an edge that is listed twice."""
    edges = setting.edges()
    loop = torch.full((2, 1), setting.nodes - 1, device=setting.device)
    return setting.vectors(setting.nodes, setting.features), torch.cat([edges, loop, edges[:, :1]], 1)


def _with_edges(setting: Setting) -> tuple[Tensor, ...]:
    x, edges = _graph(setting)
    return x, edges, setting.vectors(edges.shape[1], EDGE_FEATURES)


def _with_types(setting: Setting) -> tuple[Tensor, ...]:
    x, edges = _graph(setting)
    return x, edges, torch.randint(EDGE_TYPES, edges.shape[1:], device=setting.device)


def _encoding(kind: type[nn.Module], width: int) -> Inputs:
    def inputs(setting: Setting) -> tuple[Tensor, ...]:
        x, edges = _graph(setting)
        return x, edges, kind(1, width, **setting.factory).encode(edges, setting.nodes)

    return inputs


CASES: list[Case] = [
    Case(_DEGREE, options, lambda s, o: _DEGREE(s.features, **o, **s.factory), _graph, any_radius=True)
    for options in ({"max_degree": 3}, {"max_degree": 9})
]
CASES += [
    Case(
        kind,
        {width: size},
        lambda s, o, kind=kind: Encoded(kind(s.features, **o, **s.factory)),
        _encoding(kind, size),
        random=kind is _LAPLACIAN,
        any_radius=True,
    )
    for kind, width, size in ((_WALKS, "steps", 3), (_LAPLACIAN, "count", 4), (_LAPLACIAN, "count", 12))
]
CASES += [
    Case(
        layers.VirtualNode,
        options,
        lambda s, o: Heard(layers.VirtualNode(s.features, **o, **s.factory)),
        inputs,
        any_radius=True,
        first_node=0,
    )
    for options, inputs in (
        ({"edge_features": EDGE_FEATURES}, _with_edges),
        ({"edge_features": 0}, _with_edges),
        ({"edge_types": EDGE_TYPES}, _with_types),
    )
]
