"""Encoders of nodes and virtual nodes on batches, beside the laws, which have one graph and hand encodings in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holonomy.layers import (
    GCN,
    DegreeNodeEncoder,
    LaplacianNodeEncoder,
    RandomWalkNodeEncoder,
    VirtualNode,
    perturb_identifiers,
)
from holonomy.models import HGCN, Hypformer, TokenGT
from holonomy.structures import join_graphs

D = torch.float64


def encoders():
    """One of each class, with parameters away from zero."""
    torch.manual_seed(0)
    made = DegreeNodeEncoder(3, max_degree=2), RandomWalkNodeEncoder(3, 4), LaplacianNodeEncoder(3, 4)
    return [encoder.to(D).eval() for encoder in made]


def graphs():
    """Trees without symmetry, whose eigenvalues are simple, one with extra edges; no node; one node."""
    trees = [[(0, 1), (1, 2), (2, 3), (2, 4), (4, 5), (5, 6)], [(0, 1), (1, 2), (2, 3), (1, 4), (4, 5), (5, 6), (0, 7)]]
    made = []
    for pairs, n in ((trees[0], 7), ([], 0), (trees[1], 8), ([], 1), ([*trees[0], (0, 1), (3, 3)], 7)):
        one_way = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
        made.append({"x": torch.randn(n, 3, dtype=D), "edge_index": torch.cat([one_way, one_way.flip(0)], 1)})
    return made


@pytest.mark.parametrize("encoder", encoders(), ids=lambda encoder: type(encoder).__name__)
def test_a_graph_is_encoded_as_it_is_alone_in_any_order_of_its_nodes(encoder):
    torch.manual_seed(1)
    batch = join_graphs(graphs())
    x, edges, of_graph = batch["x"], batch["edge_index"], batch["batch"]
    together = encoder(x, edges, of_graph)
    assert not torch.equal(together, x)
    for number, graph in enumerate(graphs()):
        graph["x"] = x[of_graph == number]
        torch.testing.assert_close(encoder(**graph), together[of_graph == number])
    order = torch.randperm(len(x))  # the nodes of all graphs mixed
    torch.testing.assert_close(encoder(x[order], order.argsort()[edges], of_graph[order]), together[order])


def test_in_training_each_eigenvector_of_each_graph_has_a_random_sign():
    """That of evaluation or the other, also where the encoding was computed before."""
    encoder, batch = encoders()[2], join_graphs(graphs())
    nn.init.eye_(encoder.linear.weight)
    nn.init.zeros_(encoder.linear.bias)
    x, edges, of_graph = 0 * batch["x"], batch["edge_index"], batch["batch"]
    encoding, signs = encoder.encode(edges, len(x), of_graph), set()
    for seed in range(20):
        torch.manual_seed(seed)
        found = encoder.train()(x, edges, of_graph)
        torch.manual_seed(seed)
        assert torch.equal(encoder(x, edges, of_graph, encoding=encoding), found)
        torch.manual_seed(seed)
        torch.testing.assert_close(found, perturb_identifiers(encoding, batch=of_graph)[:, :3])
        signs.add(tuple((found / encoding[:, :3])[[0, 7]].flatten().sign().tolist()))
    assert len(signs) > 10


def moved(model, first, second):
    """Which rows of two results differ by more than rounding."""
    return (model(**first) - model(**second)).abs().amax(1) > 1e-6


def two_trees():
    """As one batch, and as it is with other features of its first node."""
    given = join_graphs(graphs()[::2])
    changed = given["x"].clone()
    changed[0] += 1.0
    return given, given | {"x": changed}


def test_components_hear_each_other_by_a_virtual_node():
    torch.manual_seed(2)
    model, virtual = GCN(3, 8, 2, dtype=D).eval(), VirtualNode(3, dtype=D)
    # As one graph of two components.
    pair = [{"x": given["x"], "edge_index": given["edge_index"]} for given in two_trees()]
    assert not moved(model, *pair)[7:].any()
    assert moved(model, *(virtual(**given) for given in pair))[7:].all()


@pytest.mark.parametrize("kind", [HGCN, Hypformer, TokenGT])
def test_graphs_of_a_batch_do_not_hear_each_other_by_virtual_nodes(kind):
    torch.manual_seed(2)
    model, virtual = kind(3, 8, 2, level="node", dtype=D).eval(), VirtualNode(3, dtype=D)
    pair = [virtual(**given) for given in two_trees()]
    assert torch.equal(moved(model, *pair), pair[0]["batch"] == 0)


def test_a_graph_without_nodes_has_its_virtual_node():
    virtual = VirtualNode(3, edge_features=2)
    x, edges, batch = torch.randn(2, 3), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([1, 1])
    graph = virtual(x, edges, batch, edge_attr=torch.zeros(0, 2), num_graphs=4)
    assert graph["batch"].tolist() == [1, 1, 0, 1, 2, 3]
    assert graph["edge_index"].tolist() == [[0, 1, 3, 3], [3, 3, 0, 1]]
    assert torch.equal(graph["x"][2:], virtual.node.expand(4, -1))
    assert torch.equal(graph["edge_attr"], virtual.edge.expand(4, -1))
    typed = VirtualNode(3, edge_types=5)(x, torch.tensor([[0, 1], [1, 0]]), edge_attr=torch.tensor([4, 0]))
    assert typed["edge_attr"].tolist() == [4, 0, 5, 5, 5, 5]
    alone = VirtualNode(3)(x[:0], edges)
    assert (alone["x"].shape, alone["edge_index"].shape, alone.keys()) == ((1, 3), (2, 0), {"x", "edge_index"})


@pytest.mark.parametrize("small", [torch.int8, torch.int16])
def test_virtual_nodes_have_numbers_that_the_dtype_of_the_batch_does_not_hold(small):
    n, edges = 2**15, torch.tensor([[0], [1]])
    graph = VirtualNode(1)(torch.randn(n, 1), edges, (torch.arange(n) >= n // 2).to(small))
    assert graph["edge_index"][1, 1 : n + 1].unique().tolist() == [n, n + 1]


@pytest.mark.parametrize("kind", [RandomWalkNodeEncoder, LaplacianNodeEncoder])
def test_shapes_are_those_of_the_meta_device(kind):
    """As of every module: encodings are computed on the CPU, from numbers that are not there."""
    encoder = kind(4, 2, device="meta")
    edge_index = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    assert encoder(torch.empty(3, 4, device="meta"), edge_index).shape == (3, 4)


def test_the_type_of_new_edges_is_one_that_the_dtype_holds():
    x, edge_index = torch.randn(2, 4), torch.tensor([[0, 1], [1, 0]])
    types = torch.tensor([0, 126], dtype=torch.int8)
    assert VirtualNode(4, edge_types=127)(x, edge_index, edge_attr=types)["edge_attr"].tolist() == [0, 126, *[127] * 4]
    with pytest.raises(
        TypeError, match=r"^edge_attr must be of a dtype that holds edge_types = 128, .* got torch.int8"
    ):
        VirtualNode(4, edge_types=128)(x, edge_index, edge_attr=types)
