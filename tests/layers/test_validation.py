"""Optional arguments, which the cases leave out, are refused by their names, too."""

from __future__ import annotations

import pytest
import torch

from holonomy import layers, models
from holonomy.layers.chromatic.attention import ProjectedEdges
from holonomy.manifolds import Lorentz
from holonomy.ops.simplicial_attention import simplicial_attention
from holonomy.structures import Hyperedges

pytestmark = pytest.mark.usefixtures("without_shape_checks")
X, PADDING, PAIRS = torch.ones(2, 3, 8), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, 3, 8)
EDGES, GRAPH = torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 8)


def shared(bias, value):
    layers.ChromaticAttention(8, 2, None)(X, ProjectedEdges(bias, value))


def routed(previous):
    layers.SimplicialEncoderLayer(8, 2, steps=2)(X, previous=previous)


def projected(to):
    layers.EquivariantLinear(2, 1, 8, 4)(Hyperedges(EDGES.T, GRAPH, 2), to=to)


def on_paths(neighbours, scores=None):
    layer = layers.SimplicialAttention(8, 2)
    layer.along_paths(*layer.projected(X), neighbours, scores)


def hypergraph(batch):
    layers.HyperedgeTokenizer(2, 8, 8)(torch.tensor([[0, 1], [1, 2]]), GRAPH, 3, batch)


def leaving(tokenizer, tokens):
    values = tokenizer(EDGES, GRAPH, 2) if tokens is None else tokenizer(GRAPH, EDGES)
    layers.basis_residual(values.values if tokens is None else values.values[:, :tokens], values)


def chosen(inner):
    layers.ExpertChoice(8, 2, inner)(X)


def sparsely(values):
    edges = Hyperedges(EDGES.T, GRAPH, 2).with_values(values)
    for layer in (layers.HigherOrderAttention(2, 1, 8, 2), layers.EquivariantLinear(2, 1, 8, 4)):
        with pytest.raises((TypeError, ValueError), match=r"^x\.values must"):
            layer(edges)
    models.InvariantGraphNetwork(8, 8, 2, entrywise=True)(edges)


def encoded(values):
    layers.HigherOrderEncoderLayer(2, 2, 8, 2, 8)(Hyperedges(EDGES.T, values, 2))


def chosen_under(mask):
    models.SimplicialTransformer(8, 2, steps=2)(X, mask)


STEPS = torch.zeros(2, 3, 1, dtype=torch.int64)


def network(num_graphs):
    models.InvariantGraphNetwork(8, 8, 2)(GRAPH, EDGES, torch.tensor([0, 0]), num_graphs=num_graphs)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: layers.SimplicialAttention(8, 2)(X, PADDING, pair_mask=[1]), TypeError, "pair_mask must be a tensor"),
        (lambda: layers.SimplicialEncoderLayer(8, 2)(X, pair_mask=PAIRS), TypeError, "pair_mask must be boolean"),
        (lambda: models.SimplicialTransformer(8, 2)(X, mask=[1]), TypeError, "mask must be a tensor, got list"),
        (lambda: routed("ab"), TypeError, "previous must be a tuple of queries and keys, got str"),
        (lambda: routed((X, X)), ValueError, r"previous must have shape .* x has them, \(2, 2, 3, 8\)"),
        (lambda: shared(PAIRS, PAIRS[:, :1]), ValueError, r"edges must have shape .* got \(2, 1, 3, 8\)"),
        (lambda: shared(PAIRS.double(), PAIRS), TypeError, "edges must have the dtype of the layer"),
        (lambda: projected([[0]]), TypeError, "to must be a tensor, got list"),
        (lambda: projected(torch.ones(1, 1) > 0), TypeError, "to must hold integers, got torch.bool"),
        (lambda: network(0), ValueError, "num_graphs must be at least the 1 that batch numbers, got 0"),
        (lambda: network(torch.ones(2)), TypeError, "num_graphs must be an integer"),
        (lambda: on_paths(None), TypeError, "neighbours must be a tensor, got NoneType"),
        (lambda: on_paths(STEPS[0, :, 0]), ValueError, r"neighbours must broadcast to \(\*batch, tokens, k\) = "),
        (lambda: on_paths(STEPS, X[..., :2]), ValueError, r"scores must broadcast to .* \(2, 3, 1\), got \(2, 3, 2\)"),
        (lambda: layers.SimplicialAttention(8, 2).projected(X[..., 1:]), ValueError, "x must have shape"),
        (lambda: hypergraph(torch.tensor([0, 0, 1])), ValueError, r"indices must join nodes of one graph, got \(1, 2"),
        (lambda: leaving(layers.HyperedgeTokenizer(2, 8, 8), None), ValueError, "tokens must be those of a GraphTok"),
        (lambda: leaving(layers.GraphTokenizer(8, 8), 3), ValueError, r"values must have shape \(graphs, tokens, feat"),
        (lambda: chosen(torch.nn.Linear(8, 16)), ValueError, r"inner\(x\) must have shape .* got \(2, 2, 16\)"),
        (lambda: chosen(torch.nn.Linear(8, 1)), ValueError, r"inner\(x\) must have shape .* got \(2, 2, 1\)"),
        (lambda: layers.NodeBatchNorm(8, eps=0.0), ValueError, "eps must be positive and finite, got 0.0"),
        (lambda: layers.HypBatchNorm(8, Lorentz(-1.0), eps=0.0), ValueError, "eps must be positive and finite, got 0"),
        (lambda: layers.GCN(8, 8, 2)(GRAPH, EDGES.to_sparse()), TypeError, "edge_index must be a dense tensor, got"),
        (lambda: sparsely(GRAPH.double()), TypeError, "x.values must have the dtype of the layer, torch.float32"),
        (lambda: sparsely(GRAPH.long()), TypeError, "x.values must be a floating-point tensor, got torch.int64"),
        (lambda: sparsely(X[0]), ValueError, r"x.values must have shape \(edges, features\) = \(2, 8\), got \(3, 8\)"),
        (lambda: encoded(GRAPH.double()), TypeError, "x.values must have the dtype of the layer, torch.float32"),
        (lambda: chosen_under(PADDING), ValueError, "mask must be None with steps or capacity"),
        (lambda: models.Hypformer(X, 8, 2), TypeError, "in_features must be a positive integer, got a Tensor[.]$"),
        (lambda: layers.GCN(8, 8, 2, residual=X), TypeError, "residual must be True or False, got a Tensor[.]$"),
        (lambda: simplicial_attention([X, X], [X], scale=float("inf")), ValueError, "scale must be finite, got inf"),
        (
            lambda: Lorentz(-1.0).centroid(X, torch.tensor([1.0, -2.0, float("nan")])),
            ValueError,
            r"weights must be finite and at least 0, got 2 of 3 numbers that are not, the first -2 at \[1\]\.",
        ),
        (lambda: models.HypTokenGT(3, 8, 2, attention="softmax", power=[2]), TypeError, "power must be a number"),
        (lambda: models.Hypformer(3, 8, 2, transformer=False, average="mean"), ValueError, "average must be one of"),
    ],
)  # fmt: skip
def test_wrong_optional_arguments_get_one_sentence(call, error, sentence):
    with pytest.raises(error, match=f"^{sentence}"):
        call()
