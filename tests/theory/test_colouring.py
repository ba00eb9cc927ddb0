"""Exact colourings on pairs whose answers are known, the graphs themselves, and the models beside them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.theory.claims.separation import MODELS, bounded_by, random_model, separation, separation_table
from holonomy.theory.claims.statements.colouring import CLAIMS
from holonomy.theory.claims.verdict import Draws
from holonomy.theory.expressivity.colouring import PAIRS, adjacency, cfi_graph, graph_pair, separated, stable_colours


def cliques_of_four(graph):
    found = 0
    for u, v in graph.triu(1).nonzero().tolist():
        both = (graph[u] & graph[v]).nonzero().flatten()
        found += int(graph[both][:, both].sum()) // 2
    return found // 6


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_graphs_of_equal_size(name):
    first, second = graph_pair(name)
    assert first.shape == second.shape
    assert first.sum() == second.sum()
    for graph in (first, second):
        assert torch.equal(graph, graph.T)
        assert not graph.diagonal().any()


def test_known_answers_of_each_pair():
    """Colour refinement, folklore 2-WL and 3-WL."""
    answers = {name: [separated(*graph_pair(name), k) for k in (1, 2, 3)] for name in PAIRS[:-1]}
    assert answers == {
        "path_star": [True, True, True],
        "six_cycle": [False, True, True],
        "decalin": [False, True, True],
        "shrikhande": [False, False, True],
        "cfi_k3": [False, True, True],
    }
    assert not separated(*graph_pair("cfi_k4"), 2)


def without_edge_nodes(graph, subsets):
    """The nodes for subsets of a graph of Cai, Fuerer and Immerman, joined where two nodes of an edge join them."""
    to_edges, edges = graph[:subsets, subsets:].int(), graph[subsets:, subsets:].int()
    return to_edges @ edges @ to_edges.T > 0


def test_shrikhande_and_rook_are_strongly_regular_and_cfi_graphs_of_k4():
    complete = ~torch.eye(4, dtype=torch.bool)
    made = [without_edge_nodes(cfi_graph(complete, twisted=twisted), 16) for twisted in (False, True)]
    for graph in (*graph_pair("shrikhande"), *made):
        common = graph.int() @ graph.int()
        assert common.diagonal().unique().tolist() == [6]
        assert (common - torch.diag(common.diagonal())).unique().tolist() == [0, 2]
        assert set(common[~torch.eye(16, dtype=torch.bool)].tolist()) == {2}
    # There are two such graphs: the rook's has eight cliques of four, its rows and columns, the other none.
    assert [cliques_of_four(graph) for graph in graph_pair("shrikhande")] == [0, 8]
    assert sorted(cliques_of_four(graph) for graph in made) == [0, 8]


def test_cfi_over_a_triangle_is_a_cycle_or_two():
    complete = ~torch.eye(3, dtype=torch.bool)
    plain, twisted = (without_edge_nodes(cfi_graph(complete, twisted=twisted), 6) for twisted in (False, True))
    assert torch.equal(plain.sum(0), torch.full((6,), 2))
    assert not separated(plain, graph_pair("six_cycle")[1], 2)
    assert not separated(twisted, graph_pair("six_cycle")[0], 2)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(2, 6),
    k=st.integers(1, 3),
    form=st.sampled_from(["folklore", "oblivious"]),
)
def test_colours_do_not_depend_on_the_numbering(seed, nodes, k, form):
    generator = torch.Generator().manual_seed(seed)
    upper = (torch.rand(nodes, nodes, generator=generator) < 0.5).triu(1)
    graph, order = upper | upper.T, torch.randperm(nodes, generator=generator)
    copy = graph[order][:, order]
    assert not separated(graph, copy, k, form)
    first, second = stable_colours(torch.stack([graph, copy]), k, form).reshape(2, *[nodes] * k)
    for axis in range(k):
        first = first.index_select(axis, order)
    assert torch.equal(first, second)


def test_refinement_stops_at_the_orbits_of_a_path():
    colours = stable_colours(adjacency([(0, 1), (1, 2), (2, 3), (3, 4)])[None], 1)[0].tolist()
    assert colours[0] == colours[4]
    assert colours[1] == colours[3]
    assert len(set(colours)) == 3


def test_the_table():
    table = separation_table(Draws(0), pairs=("six_cycle", "shrikhande"))
    assert table["tokengt_identifiers"] == {"six_cycle": "not invariant", "shrikhande": "not invariant"}
    separates = {name for name in MODELS if table[name]["six_cycle"] == "yes"}
    assert separates == {"ign_3", "cgt", "cgt_rings"}
    assert not [name for name in MODELS if table[name]["shrikhande"] == "yes"]


def test_a_difference_of_numbering_separates_nothing():
    six, threes = graph_pair("six_cycle")
    found = separation(lambda graph: graph[0].double(), six, threes, torch.tensor([0.0, 2.0, 4.0, 1.0, 3.0, 5.0]))
    assert found.between > 0
    assert not found.invariant
    assert not found.separates


def test_names_are_checked():
    for wrong in (graph_pair, bounded_by, lambda name: random_model(name, Draws())):
        with pytest.raises(ValueError, match="name must be"):
            wrong("petersen")


def test_graphs_of_different_numbers_of_nodes_are_separated():
    for k in (1, 2):
        assert separated(adjacency([(0, 1)]), adjacency([(0, 1), (1, 2)]), k)


def test_graphs_without_nodes_have_no_colours():
    nobody = torch.zeros(0, 0, dtype=torch.bool)
    assert not separated(nobody, nobody, 2)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adjacency([]), r"^edges must be one at least"),
        (lambda: cfi_graph(torch.zeros(2, 2, dtype=torch.bool)), r"^base must have an edge"),
        (lambda: cfi_graph(torch.ones(2, 3, dtype=torch.bool)), r"^base must have shape \(n, n\), got \(2, 3\)"),
        (lambda: separated(*[torch.ones(2, 2).triu() > 0] * 2, 1), r"^first must be symmetric"),
        (lambda: stable_colours(adjacency([(0, 1)]), 1), r"^graphs must have shape \(graphs, n, n\), got \(2, 2\)"),
    ],
)
def test_what_is_no_graph_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("without_shape_checks")
def test_graphs_are_boolean():
    with pytest.raises(TypeError, match=r"^first must be boolean, True at neighbours, got torch.float32"):
        separated(torch.ones(2, 2), torch.ones(2, 2), 1)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_verdicts_are_as_expected(claim):
    verdict, _ = claim.measure(Draws(3, budget=0.5))  # in float64 whatever the dtype
    assert verdict.holds is claim.expected
