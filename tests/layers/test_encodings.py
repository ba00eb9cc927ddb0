"""Encodings against networkx, rustworkx and RDKit, on random graphs and on graphs with known answers."""

from __future__ import annotations

import warnings

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holonomy.layers import (
    category_product,
    chordless_cycles,
    edge_categories,
    laplacian_identifiers,
    membership,
    random_walk_encoding,
    random_walk_node_encoding,
    ring_membership,
    shortest_path_encoding,
    substructure_membership,
)

D = torch.float64


def both_ways(pairs):
    one = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    return torch.cat([one, one.flip(0)], 1)


def path(n):
    return both_ways([(i, i + 1) for i in range(n - 1)])


def cycle(n):
    return both_ways([(i, (i + 1) % n) for i in range(n)])


@st.composite
def graphs(draw, *, directed=False, most=9):
    """Edges in random order, some of them twice, some of them loops, and n; isolated nodes are common."""
    n = draw(st.integers(1, most))
    node = st.integers(0, n - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=3 * n))
    edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    return (edges, n) if directed else (torch.cat([edges, edges.flip(0)], 1), n)


def networkx_of(edges, n, kind=nx.Graph):
    graph = kind()
    graph.add_nodes_from(range(n))
    graph.add_edges_from(edges.t().tolist())
    return graph


@given(graphs(directed=True), st.integers(1, 6))
def test_walks_are_powers_of_the_transition_matrix(drawn, steps):
    edges, n = drawn
    adjacency = nx.to_numpy_array(networkx_of(edges, n, nx.MultiDiGraph), nodelist=range(n))
    degree = adjacency.sum(1, keepdims=True)
    walk = np.divide(adjacency, degree, out=np.zeros_like(adjacency), where=degree > 0)
    ours = random_walk_encoding(edges, n, steps, dtype=D)
    assert ours.shape == (n, n, steps)
    for k in range(steps):
        np.testing.assert_allclose(ours[..., k].numpy(), np.linalg.matrix_power(walk, k + 1), atol=1e-12)
    torch.testing.assert_close(
        random_walk_node_encoding(edges, n, steps, dtype=D), ours.diagonal().T, rtol=1e-12, atol=1e-12
    )


def test_walks_of_many_nodes_take_sparse_products():
    """Beyond the size of dense products, and beyond one block of starting nodes."""
    graph = nx.gnm_random_graph(301, 500, seed=0)
    edges = both_ways(list(graph.edges))
    adjacency = torch.from_numpy(nx.to_numpy_array(graph, nodelist=range(301)))
    walk = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    powers = torch.stack([torch.linalg.matrix_power(walk, k) for k in (1, 2, 3, 4)], -1)
    torch.testing.assert_close(random_walk_encoding(edges, 301, 4, dtype=D), powers)
    torch.testing.assert_close(random_walk_node_encoding(edges, 301, 4, dtype=D), powers.diagonal().T)
    assert random_walk_encoding(edges, 301, 2).dtype == torch.float32


def test_walks_agree_with_pytorch_geometric():
    transforms = pytest.importorskip("torch_geometric.transforms", reason="the extra pyg is not installed")
    data = pytest.importorskip("torch_geometric.data", reason="the extra pyg is not installed")
    edges = both_ways(list(nx.connected_watts_strogatz_graph(20, 4, 0.3, seed=1).edges))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its sparse tensors
        theirs = transforms.AddRandomWalkPE(5)(data.Data(edge_index=edges, num_nodes=20)).random_walk_pe
    torch.testing.assert_close(random_walk_node_encoding(edges, 20, 5), theirs)


def test_figure_2_walks_tell_apart_what_paths_do_not():
    """CSA figure 2, right: the middle edge of a path, RW = (0.5, 0, 0.63); left, in a triangle, none is 0."""
    edges = both_ways([(0, 1), (0, 2), (1, 3)])
    walks = random_walk_encoding(edges, 4, 3, dtype=D)[0, 1]
    torch.testing.assert_close(walks, torch.tensor([0.5, 0.0, 0.625], dtype=D))
    closed = torch.cat([edges, both_ways([(2, 1)])], 1)
    assert random_walk_encoding(closed, 4, 3, dtype=D)[0, 1, 1] > 0
    for graph in (edges, closed):
        assert shortest_path_encoding(graph, 4, 8)[0, 1] == 1


def test_rows_of_walks_are_distributions_where_there_is_an_edge():
    edges = torch.cat([cycle(5), torch.tensor([[5], [5]])], 1)  # a loop alone stays; node 6 has nowhere to go
    total = random_walk_encoding(edges, 7, 3, dtype=D).sum(1)
    torch.testing.assert_close(total[:6], torch.ones(6, 3, dtype=D))
    assert not total[6].any()


@given(graphs(directed=True), st.integers(1, 5))
def test_distances_are_those_of_networkx(drawn, limit):
    edges, n = drawn
    expected = torch.full((n, n), limit + 1)
    for i, reached in nx.all_pairs_shortest_path_length(networkx_of(edges, n, nx.DiGraph), cutoff=limit):
        for j, length in reached.items():
            expected[i, j] = length
    ours = shortest_path_encoding(edges, n, limit)
    assert ours.dtype == torch.int64
    assert torch.equal(ours, expected)


def test_a_path_of_eight_nodes_has_distances_one_to_seven():
    assert shortest_path_encoding(path(8), 8, 10)[0].tolist() == list(range(8))
    # The index of the first nonzero power, as eq. 11 has it.
    walks = random_walk_encoding(path(8), 8, 7)[0, 1:]
    assert ((walks != 0).int().argmax(-1) + 1).tolist() == list(range(1, 8))


def rings_of(rings):
    return sorted(frozenset(ring) for ring in rings if len(ring) > 2)


@given(graphs(most=8), st.integers(3, 9))
def test_rings_are_the_chordless_cycles_of_networkx(drawn, length):
    edges, n = drawn
    simple = networkx_of(edges, n)
    simple.remove_edges_from(nx.selfloop_edges(simple))
    ours = chordless_cycles(edges, n, length)
    theirs = {frozenset(found) for found in nx.chordless_cycles(simple, length_bound=length)}
    assert {frozenset(ring) for ring in ours} == theirs
    assert len(ours) == len(theirs)
    for ring in ours:
        assert all(simple.has_edge(u, v) for u, v in zip(ring, ring[1:] + ring[:1], strict=True))
    expected = torch.zeros(n, n, dtype=torch.bool)
    for ring in theirs:
        for i in ring:
            for j in ring:
                expected[i, j] = True
    assert torch.equal(ring_membership(edges, n, length), expected)


@given(graphs(most=8), st.integers(3, 8))
def test_rings_are_the_simple_cycles_of_rustworkx_without_chords(drawn, length):
    rustworkx = pytest.importorskip("rustworkx", reason="rustworkx is not installed")
    edges, n = drawn
    graph = rustworkx.PyDiGraph(multigraph=False)
    graph.add_nodes_from(range(n))
    graph.add_edges_from_no_data([(u, v) for u, v in edges.t().tolist() if u != v])
    theirs = set()
    for found in map(list, rustworkx.simple_cycles(graph)):
        inside = sum(graph.has_edge(u, v) for u in found for v in found)
        if 3 <= len(found) <= length and inside == 2 * len(found):
            theirs.add(frozenset(found))
    assert {frozenset(ring) for ring in chordless_cycles(edges, n, length)} == theirs


@given(graphs(most=8), st.integers(3, 6))
def test_rings_are_induced_cycles_reference_gradients_3_1(drawn, length):
    edges, n = drawn
    patterns = [cycle(k) for k in range(3, length + 1)]
    related = substructure_membership(edges, n, patterns, induced=True)
    assert torch.equal(related, ring_membership(edges, n, length))


@pytest.mark.parametrize("induced", [False, True])
@given(drawn=graphs(most=6), pattern=graphs(most=4))
def test_substructures_are_the_monomorphisms_of_networkx(induced, drawn, pattern):
    edges, n = drawn
    shape = pattern[0][:, pattern[0][0] != pattern[0][1]]
    small = networkx_of(shape, int(shape.max()) + 1 if shape.numel() else 0)
    large = networkx_of(edges, n)
    large.remove_edges_from(nx.selfloop_edges(large))
    matcher = nx.algorithms.isomorphism.GraphMatcher(large, small)
    found = matcher.subgraph_isomorphisms_iter() if induced else matcher.subgraph_monomorphisms_iter()
    expected = membership([set(image) for image in found], n) if small else torch.zeros(n, n, dtype=torch.bool)
    assert torch.equal(substructure_membership(edges, n, [shape], induced=induced), expected)


@pytest.mark.parametrize("node", [-1, 3])
def test_groups_have_nodes_that_are_there(node):
    """-1 was the last node."""
    with pytest.raises(ValueError, match=r"^groups must lie in \[0, n = 3\), got "):
        membership([(0, 1), (0, node)], 3)


def test_a_chord_ends_a_ring_but_not_a_subgraph():
    square = torch.cat([cycle(4), both_ways([(0, 2)])], 1)
    assert not ring_membership(square, 4, 4)[1, 3]
    assert not substructure_membership(square, 4, [cycle(4)], induced=True).any()
    assert substructure_membership(square, 4, [cycle(4)]).all()


def test_substructures_of_several_patterns_are_united():
    edges = torch.cat([cycle(3), both_ways([(3, 4), (4, 5), (2, 3)])], 1)
    triangles = substructure_membership(edges, 6, [cycle(3)])
    stars = substructure_membership(edges, 6, [both_ways([(0, 1), (0, 2), (0, 3)])])
    united = substructure_membership(edges, 6, [cycle(3), both_ways([(0, 1), (0, 2), (0, 3)])])
    assert torch.equal(united, triangles | stars)
    assert not substructure_membership(edges, 6, []).any()


MOLECULES = {
    "naphthalene": ("c1ccc2ccccc2c1", 6),
    "caffeine": ("Cn1c(=O)c2c(ncn2C)n(C)c1=O", 6),
    "indole": ("c1ccc2[nH]ccc2c1", 6),
    "macrocycle": ("C1CCCCCCCCCCCCC1", 18),
    "spiro": ("C1CCC2(CC1)CCCC2", 8),
    "chain": ("CCCCO", 8),
}


@pytest.mark.parametrize("name", MOLECULES)
def test_rings_of_molecules_are_those_of_rdkit(name):
    chemistry = pytest.importorskip("rdkit.Chem", reason="the extra molecules is not installed")
    smiles, length = MOLECULES[name]
    molecule = chemistry.MolFromSmiles(smiles)
    n = molecule.GetNumAtoms()
    edges = both_ways([(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()) for bond in molecule.GetBonds()])
    assert torch.equal(ring_membership(edges, n, length), membership(molecule.GetRingInfo().AtomRings(), n))


def test_edges_are_completed_by_self_and_no_edge():
    edges = torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 2, 1]])
    types = torch.tensor([0, 0, 3, 3, 1, 2])
    expected = torch.tensor([[1, 4, 0], [2, 1, 5], [0, 5, 3]])  # the loop has its type, the repetition the larger
    assert torch.equal(edge_categories(edges, 3, types), expected)
    assert torch.equal(edge_categories(edges.flip(1), 3, types.flip(0)), expected)
    assert edge_categories(edges, 3).max() == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1))
def test_the_product_of_categories_is_one_to_one(pairs):
    first, second = torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs])
    product = category_product(first, second)
    assert torch.equal(product // 2, first)
    assert torch.equal(product % 2 == 1, second)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_without_edges(n):
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert not random_walk_encoding(none, n, 2).any()
    assert random_walk_encoding(none, n, 2).shape == (n, n, 2)
    assert not random_walk_node_encoding(none, n, 2).any()
    expected = torch.full((n, n), 5).fill_diagonal_(0)
    assert torch.equal(shortest_path_encoding(none, n, 4), expected)
    assert torch.equal(edge_categories(none, n), torch.eye(n, dtype=torch.int64))
    assert not ring_membership(none, n, 6).any()
    assert not substructure_membership(none, n, [cycle(3)]).any()
    single = torch.zeros(2, 0, dtype=torch.int64)
    assert not substructure_membership(none, n, [single]).any()


@given(graphs(), st.randoms(use_true_random=False))
def test_encodings_follow_a_permutation_of_the_nodes(drawn, random):
    edges, n = drawn
    order = torch.tensor(random.sample(range(n), n))
    renumbered = torch.empty_like(order)
    renumbered[order] = torch.arange(n)
    for encode in (
        lambda e: random_walk_encoding(e, n, 3, dtype=D),
        lambda e: shortest_path_encoding(e, n, 3),
        lambda e: ring_membership(e, n, 5),
        lambda e: substructure_membership(e, n, [path(3)]),
        lambda e: edge_categories(e, n),
    ):
        torch.testing.assert_close(encode(renumbered[edges]), encode(edges)[order][:, order])


@pytest.mark.parametrize("n", [3, 200])
def test_torchs_default_device_plays_no_part(n):
    edges = cycle(3)
    here = torch.tensor([0, 1, 2])
    with torch.device("meta"):
        every = [random_walk_encoding(edges, n, 2), random_walk_node_encoding(edges, n, 2)]
        every += [shortest_path_encoding(edges, n, 2), edge_categories(edges, n), ring_membership(edges, n, 3)]
        every += [membership([(0, 1, 2)], n), laplacian_identifiers(edges, n, 2)]
    assert all(encoding.device == here.device and encoding.any() for encoding in every)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_types_and_edges_may_be_any_integers(kind):
    edges, types = torch.tensor([[0, 1], [1, 0]]), torch.tensor([4, 4])
    assert torch.equal(edge_categories(edges.to(kind), 3, types.to(kind)), edge_categories(edges, 3, types))


@pytest.mark.parametrize("types", [torch.tensor([1]), torch.tensor([[1], [2]]), [-1, 0]])
@pytest.mark.usefixtures("without_shape_checks")
def test_types_that_do_not_fit_are_refused(types):
    with pytest.raises(ValueError, match=r"^edge_type must be an integer from zero on for each of 2 edges, got"):
        edge_categories(torch.tensor([[0, 1], [1, 0]]), 3, torch.as_tensor(types))


@pytest.mark.parametrize("encode", [
    lambda e: random_walk_encoding(e, 3, 2),
    lambda e: random_walk_node_encoding(e, 200, 2),
    lambda e: shortest_path_encoding(e, 3, 2),
    lambda e: ring_membership(e, 3, 5),
    lambda e: edge_categories(e, 3),
])  # fmt: skip
@pytest.mark.usefixtures("without_shape_checks")
def test_wrong_edges_are_refused(encode):
    with pytest.raises(ValueError, match=r"edge_index must have shape \(2, edges\), got \(3, 1\)"):
        encode(torch.zeros(3, 1, dtype=torch.int64))
    for wrong in (-1, 200):
        with pytest.raises(ValueError, match="edge_index must name nodes in"):
            encode(torch.tensor([[0], [wrong]]))
    with pytest.raises(ValueError, match="steps must be a positive integer, got 0"):
        random_walk_encoding(cycle(3), 3, 0)
    with pytest.raises(ValueError, match="limit must be a positive integer, got 0"):
        shortest_path_encoding(cycle(3), 3, 0)
