"""The door that the models of graphs share: ``x, edge_index, batch, edge_attr=`` as PyTorch Geometric holds them."""

from __future__ import annotations

import re

import pytest
import torch

from holonomy.models import ChromaticGraphTransformer, Hypformer
from holonomy.models.graph_pairs import GraphPairs
from tests.registry import graphs
from tests.registry.graphs import BATCHED, MODELS


def made(name):
    return graphs.made(name, dtype=torch.float64)


def graph():
    """Nodes of two graphs mixed, an isolated node, a self-loop; the number 1 is an empty graph."""
    edge_index = torch.tensor([[0, 3, 1, 4, 4, 5], [3, 0, 4, 1, 4, 1]])
    return torch.randn(6, 3, dtype=torch.float64), edge_index, torch.randn(6, 2, dtype=torch.float64)


BATCH = torch.tensor([0, 2, 0, 0, 2, 2])


@pytest.mark.parametrize("name", MODELS)
def test_indices_of_few_bits_are_indices(name):
    model, (x, edge_index, attr) = made(name), graph()
    expected = model(x, edge_index, BATCH, edge_attr=attr)
    for kind in (torch.int32, torch.int16, torch.int8):
        torch.testing.assert_close(model(x, edge_index.to(kind), BATCH.to(kind), edge_attr=attr), expected)
    if "CGT" not in name:
        of_edges = graphs.made(name, dtype=torch.float64, level="edge")
        found = of_edges(x, edge_index.int(), BATCH.int(), edge_attr=attr)
        torch.testing.assert_close(found, of_edges(x, edge_index, BATCH, edge_attr=attr))


def test_pairs_without_an_edge_have_no_attributes():
    x, edge_index, attr = graph()
    pairs = GraphPairs.of(x, edge_index, None, attr, BATCH).attributes
    expected = torch.zeros_like(pairs)
    place = [0, 0, 1, 2, 1, 2]  # of each node in its graph
    for (source, target), row in zip(edge_index.T.tolist(), attr, strict=True):
        expected[BATCH[source], place[source], place[target]] += row
    assert torch.equal(pairs, expected)


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_graph_has_a_finite_row(name):
    model, (x, edge_index, attr) = made(name), graph()
    result = model(x, edge_index, BATCH, edge_attr=attr)
    assert result.shape == (3, 2)
    assert result.isfinite().all()
    without = model(x, edge_index, BATCH // 2, edge_attr=attr)
    torch.testing.assert_close(result[[0, 2]], without)


@pytest.mark.parametrize("name", BATCHED)
def test_without_nodes_there_is_one_graph_and_in_an_empty_batch_none(name):
    model, (x, edge_index, attr) = made(name), graph()
    given = {"x": x[:0], "edge_index": edge_index[:, :0]} | ({"edge_attr": attr[:0]} if name in MODELS else {})
    alone = model(**given)
    assert alone.shape == (1, 2)
    assert alone.isfinite().all()
    assert model(**given, batch=BATCH[:0]).shape == (0, 2)


@pytest.mark.parametrize("name", [name for name in BATCHED if name.startswith(("HGCN", "Hypformer", "CGT"))])
def test_without_a_batch_no_number_is_read(name):
    """On the meta device there is none. The table of the page of models has these models compiled whole."""
    model, (x, edge_index, attr) = made(name).to("meta"), graph()
    given = {"x": x, "edge_index": edge_index} | ({"edge_attr": attr} if name in MODELS else {})
    assert model(**{key: value.to("meta") for key, value in given.items()}).shape == (1, 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("without_shape_checks")
def test_shapes_that_do_not_fit_get_one_sentence(name):
    model, (x, edge_index, attr) = made(name), graph()
    for given, sentence in (
        ((x[:, 0], edge_index, None, attr), r"^x must have shape \(nodes, features\), got \(6,\)\.$"),
        ((x, edge_index[:, :5].T, None, attr[:5]), r"^edge_index must have shape \(2, edges\), got \(5, 2\)\.$"),
        ((x, edge_index[0], None, attr), r"^edge_index must have shape \(2, edges\), got \(6,\)\.$"),
        ((x, edge_index, None, attr[:, 0]), r"^edge_attr must .*, got \(6,\)\.$"),
        ((x, edge_index, None, attr[:4]), r"^edge_attr must .*, got \(4, 2\)\.$"),
        ((x, edge_index, BATCH[:4], attr), r"^batch must have shape \(.* = 6,\), got \(4,\)\.$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(*given[:3], edge_attr=given[3])


# What a newcomer passes, as what it replaces and what the sentence says. The first came through as another graph, or
# got the words of whatever function of torch came to it first.
SLIPS = {
    "batch is a mask": ("batch", BATCH.bool(), "batch must hold integers, got torch.bool."),
    "batch is float": ("batch", BATCH.float(), "batch must hold integers, got torch.float32."),
    "batch is a list": ("batch", BATCH.tolist(), "batch must be a tensor, got list."),
    "batch is negative": ("batch", BATCH - 1, "batch must number graphs from 0 on, got -1."),
    "edge_index is a mask": ("edge_index", graph()[1].bool(), "edge_index must hold integers, got torch.bool."),
    "edge_index is float": ("edge_index", graph()[1].float(), "edge_index must hold integers, got torch.float32."),
    "edge_index is a list": ("edge_index", [[0], [1]], "edge_index must be a tensor, got list."),
    "edge_index from 1 on": ("edge_index", graph()[1] + 1, "edge_index must name nodes in [0, n = 6), got 1 .. 6."),
    "edge_index from -1 on": ("edge_index", graph()[1] - 1, "edge_index must name nodes in [0, n = 6), got -1 .. 4."),
    "x holds integers": (
        "x",
        torch.ones(6, 3, dtype=torch.int64),
        "x must be a floating-point tensor, got torch.int64.",
    ),
    "x is a whole graph": ("x", {"x": None}, "x must be a tensor, got dict."),
    "x has other features": ("x", graph()[0][:, :2], "x must have shape (..., in_features = 3), got (6, 2)."),
}
OF_EDGES = {
    "an edge joins two graphs": (
        "edge_index",
        torch.tensor([[0, 3, 1, 4, 4, 0], [3, 0, 4, 1, 4, 1]]),
        "edge_index must join nodes of one graph, got the edge (0, 1).",
    ),
    "edge_attr has other features": ("edge_attr", torch.ones(6, 3), "edge_features"),
    "edge_attr is a list": ("edge_attr", [[0.0, 0.0]] * 6, "got list."),
}


@pytest.mark.parametrize("slip", [*SLIPS, *OF_EDGES])
@pytest.mark.parametrize("name", [*MODELS, "Hypformer", "Hypformer, no GCN"])
@pytest.mark.usefixtures("without_shape_checks")
def test_a_slip_gets_one_sentence(name, slip):
    argument, given, sentence = (SLIPS | OF_EDGES)[slip]
    x, edge_index, attr = graph()
    arguments = {"x": x, "edge_index": edge_index, "edge_attr": attr, "batch": BATCH, argument: given}
    if name in MODELS:
        model = made(name)
    elif argument == "edge_attr":
        return  # which it does not take
    else:
        del arguments["edge_attr"]
        model = Hypformer(3, 8, 2, graph_encoder=None if "no" in name else "gcn", dtype=torch.float64)
    with pytest.raises((TypeError, ValueError), match=rf"^{argument} must .*{re.escape(sentence.split(' must ')[-1])}"):
        model(**arguments)


@pytest.mark.parametrize("name", ["HOT", "IGN", "CGT"])
@pytest.mark.usefixtures("without_shape_checks")
def test_sparse_features_are_refused_where_there_is_no_product_of_them(name):
    x, edge_index, attr = graph()
    with pytest.raises(TypeError, match=r"^x must be a dense tensor, got torch\.sparse_coo\.$"):
        made(name)(x.to_sparse(), edge_index, BATCH, edge_attr=attr)


@pytest.mark.usefixtures("without_shape_checks")
def test_types_of_edges_and_distances_are_those_of_the_table():
    """A negative type was taken for no edge, or for a node with itself."""
    x, edge_index, _ = graph()
    model = ChromaticGraphTransformer(3, 8, 2, edge_types=4, limit=2, dtype=torch.float64)
    types, distances = torch.zeros(6, dtype=torch.int64), torch.zeros(36, dtype=torch.int64)
    for wrong, came in ((types - 1, "-1"), (types + 4, "4")):
        with pytest.raises(ValueError, match=rf"^edge_attr must lie in \[0, edge_types = 4\), got {came}\.$"):
            model(x, edge_index, edge_attr=wrong, distances=distances)
    with pytest.raises(ValueError, match=r"^distances must lie in \[0, limit \+ 2 = 4\), got 9\.$"):
        model(x, edge_index, edge_attr=types, distances=distances + 9)
    with pytest.raises(TypeError, match=r"^distances must hold integers, got torch\.float32\.$"):
        model(x, edge_index, edge_attr=types, distances=distances.float())


@pytest.mark.usefixtures("without_shape_checks")
def test_types_and_rows_of_pairs_have_their_numbers():
    x, edge_index, _ = graph()
    model = ChromaticGraphTransformer(3, 8, 2, edge_types=4, limit=2, dtype=torch.float64)
    distances = torch.zeros(36, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^edge_attr must have shape \(edges,\) = \(6,\), got \(6, 1\)"):
        model(x, edge_index, edge_attr=torch.zeros(6, 1, dtype=torch.int64), distances=distances)
    with pytest.raises(ValueError, match=r"^distances must have shape \(36,\), got \(35,\)"):
        model(x, edge_index, edge_attr=torch.zeros(6, dtype=torch.int64), distances=distances[1:])
