"""Distances, spectra and curvatures of graphs with known answers, and the bounds between them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holonomy.theory.claims.molecules import molecule, with_hydrogens
from holonomy.theory.claims.verdict import Draws
from holonomy.theory.graphs.curvature import FORMANS, curvature_shares, edge_curvature, incidence
from holonomy.theory.graphs.topology import (
    chung_bound,
    hop_distances,
    laplacian_spectrum,
    radius_and_diameter,
    spectral_diameter_bound,
)


def adjacency(edges, n):
    table = incidence(torch.tensor(edges).T, n)
    square = table @ table.T
    return square - torch.diag(square.diagonal())


def path(n):
    return adjacency([(i, i + 1) for i in range(n - 1)], n)


def cycle(n):
    return adjacency([(i, (i + 1) % n) for i in range(n)], n)


def complete(n):
    return torch.ones(n, n).double() - torch.eye(n).double()


@pytest.mark.parametrize(
    ("graph", "radius", "diameter"),
    [(path(7), 3, 6), (cycle(7), 3, 3), (complete(5), 1, 1), (torch.zeros(2, 2).double(), math.inf, math.inf)],
)
def test_radius_and_diameter(graph, radius, diameter):
    assert radius_and_diameter(graph) == (radius, diameter)


def test_hops_on_a_path():
    assert hop_distances(path(4))[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("graph", [torch.zeros(2, 2).double(), torch.block_diag(cycle(4), cycle(5))])
def test_no_bound_is_finite_where_a_graph_is_not_connected(graph, dtype):
    """Rounding gives a second eigenvalue that is not zero."""
    assert chung_bound(graph.to(dtype)) == math.inf
    for kind in ("normalised", "combinatorial"):
        assert spectral_diameter_bound(graph.to(dtype), kind) == math.inf


@pytest.mark.usefixtures("without_shape_checks")
def test_adjacencies_of_integers_are_refused():
    """They have no infinity for what is not connected."""
    for measure in (radius_and_diameter, spectral_diameter_bound, chung_bound):
        with pytest.raises(TypeError, match=r"^adjacency must be a floating-point tensor, got torch.int64\.$"):
            measure(torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_spectra_of_complete_graphs(n):
    assert torch.allclose(laplacian_spectrum(complete(n), "combinatorial")[1:], torch.tensor(float(n)).double())
    assert torch.allclose(laplacian_spectrum(complete(n))[1:], torch.tensor(n / (n - 1)).double())
    assert chung_bound(complete(n)) == 1


@pytest.mark.parametrize("graph", [path(2), path(9), cycle(4), cycle(9), complete(6)])
def test_diameter_bounds(graph):
    diameter = radius_and_diameter(graph)[1]
    assert diameter <= chung_bound(graph)
    assert diameter <= spectral_diameter_bound(graph, "normalised")


def test_the_complete_graph_of_700_breaks_the_combinatorial_reading():
    assert spectral_diameter_bound(complete(700), "combinatorial") < 1


@given(st.integers(2, 14), st.integers(0, 10**6))
def test_chung_and_gharan_hold(n, seed):
    draws = Draws(seed)
    graph = path(n)
    extra = (draws.normal(n, n) > draws.uniform(0.5, 2.0)).double()
    graph = torch.maximum(graph, torch.maximum(extra, extra.T))
    graph = graph - torch.diag(graph.diagonal())
    diameter = radius_and_diameter(graph)[1]
    assert diameter <= chung_bound(graph)
    assert diameter <= spectral_diameter_bound(graph, "normalised")


K33 = adjacency([(i, 3 + j) for i in range(3) for j in range(3)], 6)


@pytest.mark.parametrize(
    ("graph", "plain", "augmented", "balanced"),
    [
        # Topping et al., examples of balanced Forman curvature: cycles, complete graphs, grids of four-cycles.
        (cycle(3), 0, 3, 3 / 2),
        (cycle(4), 0, 0, 1),
        (cycle(5), 0, 0, 0),
        (cycle(8), 0, 0, 0),
        (complete(5), -4, 5, 5 / 4),
        (K33, -2, -2, 2 / 3 + 2 / 3 - 2 + 4 / (2 * 3)),
    ],
)
def test_curvature_of_regular_graphs(graph, plain, augmented, balanced):
    for form, expected in zip(FORMANS, (plain, augmented, balanced), strict=True):
        on_edges = edge_curvature(graph, form)[graph > 0]
        torch.testing.assert_close(on_edges, torch.full_like(on_edges, expected))


def test_leaves_are_flat_in_the_balanced_sense():
    assert edge_curvature(path(4), "balanced")[0, 1] == 0
    assert edge_curvature(path(4), "plain")[0, 1] == 1


def by_loops(graph, u, v):
    """Topping et al., Definition 1, from sets."""
    n = graph.shape[0]
    near = [{j for j in range(n) if graph[i, j] > 0} for i in range(n)]
    du, dv = len(near[u]), len(near[v])
    if min(du, dv) == 1:
        return 0.0
    triangles = len(near[u] & near[v])

    def corners(a, b):
        found = {}
        for k in near[a] - near[b] - {b}:
            closing = (near[k] & near[b]) - near[a] - {a}
            if closing:
                found[k] = len(closing)
        return found

    at_u, at_v = corners(u, v), corners(v, u)
    value = 2 / du + 2 / dv - 2 + 2 * triangles / max(du, dv) + triangles / min(du, dv)
    if at_u or at_v:
        most = max([*at_u.values(), *at_v.values()])
        value += (len(at_u) + len(at_v)) / (most * max(du, dv))
    return value


@given(st.integers(3, 9), st.integers(0, 10**6))
def test_balanced_curvature_against_sets(n, seed):
    draws = Draws(seed)
    noise = (draws.normal(n, n) > draws.uniform(-0.5, 1.0)).double()
    graph = torch.maximum(noise, noise.T)
    graph = graph - torch.diag(graph.diagonal())
    found = edge_curvature(graph[None], "balanced")[0]
    for u, v in graph.nonzero().tolist():
        assert math.isclose(found[u, v].item(), by_loops(graph, u, v), abs_tol=1e-12)


def test_line_graph_of_a_star_is_complete():
    """Plain: 4 - 3 - 1 = 0 on the star; its line graph is a triangle, 4 - 2 - 2 = 0; augmented 0 against 3."""
    star = incidence(torch.tensor([[0, 0, 0], [1, 2, 3]]), 4)[None]
    assert curvature_shares(star, "plain") == (0.0, 1.0, 0.0, 1.0, 1)
    assert curvature_shares(star, "augmented") == (1.0, 1.0, 1.0, 1.0, 1)


def test_padding_and_single_bonds_do_not_count():
    pair, three = incidence(torch.tensor([[0], [1]]), 2), incidence(torch.tensor([[0, 1], [1, 2]]), 3)
    padded = torch.zeros(2, 5, 6).double()
    padded[0, :2, :1], padded[1, :3, :2] = pair, three
    assert curvature_shares(padded, "plain") == curvature_shares(three[None], "plain")
    assert curvature_shares(padded[:1], "plain").graphs == 0


def test_bonds_that_do_not_meet_do_not_count():
    """The line graph has no edges, of which there is neither a mean nor a smallest curvature."""
    apart = incidence(torch.tensor([[0, 2], [1, 3]]), 4)[None]
    assert curvature_shares(apart, "plain") == (0.0, 0.0, 0.0, 0.0, 0)


@given(st.integers(0, 10**6))
def test_generated_molecules(seed):
    draws = Draws(seed)
    bonds, hydrogens = molecule(draws, 9)
    degree = torch.bincount(bonds.flatten(), minlength=9)
    assert radius_and_diameter(adjacency(bonds.T.tolist(), 9))[1] < math.inf
    assert ((degree + hydrogens) <= 4).all()
    whole, atoms = with_hydrogens(bonds, hydrogens)
    assert atoms == 9 + hydrogens.sum()
    assert torch.equal(torch.bincount(whole.flatten(), minlength=atoms)[:9], degree + hydrogens)


def test_a_graph_of_one_node_has_diameter_zero():
    alone = torch.zeros(1, 1).double()
    assert radius_and_diameter(alone) == (0.0, 0.0)
    assert chung_bound(alone) == spectral_diameter_bound(alone) == 0.0


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("measure", [radius_and_diameter, laplacian_spectrum, spectral_diameter_bound, chung_bound])
@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (torch.zeros(0, 0), r"^adjacency must have shape \(n, n\), n at least 1, got \(0, 0\)"),
        (torch.ones(2, 3), r"^adjacency must have shape .*, got \(2, 3\)"),
        (torch.tensor([[0.0, 1.0], [0.0, 0.0]]), r"^adjacency must be symmetric, got something else at \[0, 1\]"),
        (torch.full((2, 2), math.nan), r"^adjacency must be symmetric"),
    ],
)
def test_what_is_no_undirected_graph_is_refused(measure, graph, message):
    """One edge in one direction had the bound 1, and the diameter infinity."""
    with pytest.raises(ValueError, match=message):
        measure(graph)


@pytest.mark.parametrize("bound", [spectral_diameter_bound, chung_bound])
def test_bounds_refuse_loops_and_weights_and_what_they_do_not_change_is_taken(bound):
    weighted, looped = 0.01 * (1 - torch.eye(3)), path(3) + torch.eye(3)
    with pytest.raises(ValueError, match=r"^adjacency must be zeros and ones"):
        bound(weighted)
    with pytest.raises(ValueError, match=r"^adjacency must be zero on its diagonal, got something else at \[0\]"):
        bound(looped)
    assert radius_and_diameter(weighted) == (1.0, 1.0)
    assert radius_and_diameter(looped) == radius_and_diameter(path(3)) == (1.0, 2.0)
    torch.testing.assert_close(
        laplacian_spectrum(looped, "combinatorial"), laplacian_spectrum(path(3), "combinatorial")
    )
    torch.testing.assert_close(laplacian_spectrum(weighted, "combinatorial"), torch.tensor([0.0, 0.03, 0.03]))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("form", ["plain", "augmented", "balanced"])
def test_curvatures_of_integers_and_truths(form):
    graph = cycle(5)
    for dtype in (torch.int64, torch.bool):
        torch.testing.assert_close(edge_curvature(graph.to(dtype), form).to(graph), edge_curvature(graph, form))


@pytest.mark.usefixtures("without_shape_checks")
def test_a_laplacian_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"^kind must be one of 'combinatorial', 'normalised', got 'normalized'"):
        laplacian_spectrum(path(3), "normalized")


def test_spectra_of_half_precision():
    assert chung_bound(cycle(8).half()) == chung_bound(cycle(8)) == 4


@pytest.mark.usefixtures("without_shape_checks")
def test_a_curvature_that_is_none_is_refused():
    """It was taken for the balanced one."""
    with pytest.raises(ValueError, match=r"^form must be one of 'plain', 'augmented', 'balanced', got 'ollivier'"):
        edge_curvature(path(3), "ollivier")
