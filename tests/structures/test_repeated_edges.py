"""Edges of an edge_index that are listed twice add up, whoever reads them."""

from __future__ import annotations

import pytest
import torch

from holonomy.layers import (
    GraphTokenizer,
    edge_categories,
    laplacian_identifiers,
    random_walk_encoding,
    random_walk_node_encoding,
    ring_membership,
    shortest_path_encoding,
)
from holonomy.models import ChromaticGraphTransformer
from holonomy.ops.propagation import normalised_edges
from tests.registry.graphs import MODELS, made

D = torch.float64
# Edges of two triangles that share a node, some of them twice and some thrice, and a self-loop twice.
EDGES = torch.tensor(
    [[0, 1, 1, 2, 2, 0, 2, 3, 3, 4, 4, 2, 0, 0, 4, 1, 1], [1, 0, 2, 1, 0, 2, 3, 2, 4, 3, 2, 4, 1, 1, 2, 1, 1]]
)
ONCE, PLACE = EDGES.unique(dim=1, return_inverse=True)


def counts(n=5):
    """How often each pair is listed."""
    return torch.zeros(n, n, dtype=D).index_put(tuple(EDGES), torch.ones(EDGES.shape[1], dtype=D), accumulate=True)


@pytest.mark.parametrize("name", [name for name in MODELS if "Token" not in name])
def test_features_are_summed(name):
    model, x, attr = made(name, dtype=D), torch.randn(5, 3, dtype=D), torch.randn(EDGES.shape[1], 2, dtype=D)
    summed = attr.new_zeros(ONCE.shape[1], 2).index_add(0, PLACE, attr)
    torch.testing.assert_close(model(x, EDGES, edge_attr=attr), model(x, ONCE, edge_attr=summed))


def test_convolutions_weigh_by_how_often():
    source, target, weight = normalised_edges(EDGES, 5, D)
    found = torch.zeros(5, 5, dtype=D).index_put((target, source), weight, accumulate=True)
    expected = counts().T.fill_diagonal_(1)
    scale = expected.sum(1).rsqrt()
    torch.testing.assert_close(found, scale[:, None] * expected * scale)


@pytest.mark.parametrize("n", [5, 150])
def test_walks_take_an_edge_as_often_as_it_is_listed(n):
    """By dense and by sparse products."""
    step = counts(n) / counts(n).sum(1, keepdim=True).clamp_min(1)
    powers = torch.stack([step, step @ step, step @ step @ step], -1)
    torch.testing.assert_close(random_walk_encoding(EDGES, n, 3, dtype=D), powers)
    torch.testing.assert_close(random_walk_node_encoding(EDGES, n, 3, dtype=D), powers.diagonal().T)


def test_eigenvectors_are_of_the_matrix_of_counts():
    weights = counts().fill_diagonal_(0)
    weights = torch.maximum(weights, weights.T)
    scale = weights.sum(1).rsqrt()
    p = laplacian_identifiers(EDGES, 5, 5, dtype=D)
    torch.testing.assert_close(p.T @ p, torch.eye(5, dtype=D))
    found = p.T @ (torch.eye(5, dtype=D) - scale[:, None] * weights * scale) @ p
    torch.testing.assert_close(found, found.diagonal().diag())


def test_each_has_a_token():
    tokens = GraphTokenizer(3, 4, identifiers=None)(torch.randn(5, 3), EDGES)
    assert torch.equal(tokens.indices[5:], EDGES.T)


def test_what_is_so_or_not_is_not_counted():
    for function in (lambda e: shortest_path_encoding(e, 5, 3), lambda e: ring_membership(e, 5, 4)):
        assert torch.equal(function(EDGES), function(ONCE))


@pytest.mark.parametrize("types", [[2, 0, 1], [0, 1, 2], [1, 2, 0]])
def test_of_types_the_largest_counts(types):
    edges = torch.tensor([[0, 0, 0], [1, 1, 1]])
    assert edge_categories(edges, 2, torch.tensor(types)).tolist() == [[1, 4], [0, 1]]
    model = ChromaticGraphTransformer(3, 8, 2, heads=2, edge_types=3).eval()
    x = torch.randn(2, 3)
    assert torch.equal(
        model(x, edges, edge_attr=torch.tensor(types)), model(x, edges[:, :1], edge_attr=torch.tensor([2]))
    )
