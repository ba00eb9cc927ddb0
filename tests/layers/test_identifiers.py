"""Node identifiers: orthonormal where that is possible, the rule where it is not, each graph for itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from scipy.linalg import block_diag

from holonomy.layers import (
    laplacian_identifiers,
    near_orthogonal_identifiers,
    orthogonal_identifiers,
    perturb_identifiers,
)
from holonomy.layers.tokens import identifiers

D = torch.float64


def ring(n):
    """A ring with a chord: no two eigenvalues agree beyond those of its mirror symmetry."""
    i = torch.arange(n)
    one_way = torch.cat([torch.stack([i, (i + 1) % n]), torch.tensor([[0], [n // 2]])], 1)
    return torch.cat([one_way, one_way.flip(0)], 1)


def random_graph(n, m):
    one_way = torch.randint(n, (2, m))
    return torch.cat([one_way, one_way.flip(0)], 1)


def laplacian(edge_index, n):
    """I - D^-1/2 A D^-1/2, entry by entry."""
    adjacent = [[0.0] * n for _ in range(n)]
    for u, v in edge_index.t().tolist():
        adjacent[u][v] += float(u != v)
    adjacent = [[max(adjacent[u][v], adjacent[v][u]) for v in range(n)] for u in range(n)]
    degree = [max(sum(row), 1.0) for row in adjacent]
    return torch.tensor(
        [[float(u == v) - adjacent[u][v] / math.sqrt(degree[u] * degree[v]) for v in range(n)] for u in range(n)],
        dtype=D,
    )


BATCH = torch.tensor([2, 0, 1, 0, 0, 1, 0, 0, 3])


def make(kind, n, dim, batch=None):
    if kind == "orthogonal":
        return orthogonal_identifiers(n, dim, batch=batch, dtype=D)
    edges = random_graph(n, 2 * n)
    if batch is not None:
        edges = edges[:, batch[edges[0]] == batch[edges[1]]]
    return laplacian_identifiers(edges, n, dim, which=kind, batch=batch, dtype=D)


@pytest.mark.parametrize("kind", ["orthogonal", "lowest", "both"])
@pytest.mark.parametrize(("n", "dim"), [(1, 1), (1, 4), (5, 5), (5, 8), (9, 4), (9, 3)])
def test_rows_or_columns_are_orthogonal(kind, n, dim):
    """Rows of length one and zeros behind them for n <= dim; else columns of squared length n / dim."""
    p = make(kind, n, dim)
    if n <= dim:
        torch.testing.assert_close(p @ p.mT, torch.eye(n, dtype=D))
        assert not p[:, n:].any()
    else:
        torch.testing.assert_close(p.mT @ p, torch.eye(dim, dtype=D) * n / dim)
        torch.testing.assert_close(p.square().sum(1).mean().item(), 1.0)


@pytest.mark.parametrize("kind", ["orthogonal", "lowest", "both"])
def test_every_graph_of_a_batch_has_its_own(kind):
    p = make(kind, 9, 3, BATCH)
    for graph, size in enumerate([5, 2, 1, 1]):
        mine = p[graph == BATCH]
        assert len(mine) == size
        gram = mine @ mine.mT if size <= 3 else mine.mT @ mine * 3 / size
        torch.testing.assert_close(gram, torch.eye(min(size, 3), dtype=D))
        assert not mine[:, size:].any()


def test_orthogonal_ones_are_uniform():
    """Every entry has mean 0 and the same variance, also the diagonal, whose sign QR would fix."""
    batch = torch.arange(6000) // 3
    p = orthogonal_identifiers(6000, 3, batch=batch, dtype=D).reshape(-1, 3, 3)
    assert p.mean(0).abs().max() < 0.06
    assert (p.square().mean(0) - 1 / 3).abs().max() < 0.03


def test_random_ones_repeat_with_their_seed_in_every_dtype(device):
    batch = BATCH.to(device)
    draw = [
        lambda dtype, g: orthogonal_identifiers(9, 4, generator=g, dtype=dtype),
        lambda dtype, g: orthogonal_identifiers(9, 4, batch=batch, generator=g, dtype=dtype),
        lambda dtype, g: near_orthogonal_identifiers(9, 4, generator=g, dtype=dtype),
    ]
    for make_one in draw:
        narrow, wide = (
            make_one(dtype, torch.Generator(device).manual_seed(7)) for dtype in (torch.float32, torch.float64)
        )
        assert (narrow.dtype, narrow.device.type) == (torch.float32, device.type)
        torch.testing.assert_close(narrow, wide.float(), rtol=0, atol=1e-7)
        other = make_one(torch.float32, torch.Generator(device).manual_seed(8))
        assert not torch.equal(narrow, other)


def test_near_orthogonal_ones_are_nearly_so():
    p = near_orthogonal_identifiers(300, 400, dtype=D)
    gram = p @ p.mT
    torch.testing.assert_close(gram.diagonal(), torch.ones(300, dtype=D))
    off = gram - torch.eye(300, dtype=D)
    assert abs(off.square().sum() / (300 * 299) * 400 - 1) < 0.1


@pytest.mark.parametrize(("which", "places"), [("lowest", [0, 1, 2, 3, 4]), ("both", [0, 1, 2, 7, 8])])
def test_laplacian_ones_are_eigenvectors_in_order(which, places):
    edges = torch.cat([random_graph(9, 12), torch.tensor([[3, 0], [3, 1]])], 1)  # a loop, an edge
    matrix = laplacian(edges, 9)
    p = laplacian_identifiers(edges, 9, 5, which=which, dtype=D)
    values = torch.linalg.eigvalsh(matrix)[places]
    torch.testing.assert_close(matrix @ p, p * values)
    assert (p.pow(3).sum(0) > -1e-9).all()


def test_sparse_eigenvectors_span_what_dense_ones_do(monkeypatch):
    edges, n = random_graph(80, 150), 80
    dense = laplacian_identifiers(edges, n, 7, which="both", dtype=D)
    monkeypatch.setattr(identifiers, "_DENSE_NODES", 10)
    sparse = laplacian_identifiers(edges, n, 7, which="both", dtype=D)
    torch.testing.assert_close(sparse, laplacian_identifiers(edges, n, 7, which="both", dtype=D), rtol=0, atol=0)
    torch.testing.assert_close(sparse @ sparse.mT, dense @ dense.mT)


STAR = torch.stack([torch.zeros(29, dtype=torch.int64), torch.arange(1, 30)])
LINE = torch.stack([torch.arange(29), torch.arange(1, 30)])
SPARSE = {"nothing": LINE[:, :0], "an edge": LINE[:, :1], "a star": STAR, "a line": LINE, "paths": LINE[:, 1::3]}


@pytest.mark.parametrize("which", ["lowest", "both"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_eigenvectors_are_orthogonal_whatever_the_graph(name, which, monkeypatch):
    """Also where an eigenvalue reaches from the lower end to the upper."""
    monkeypatch.setattr(identifiers, "_DENSE_NODES", 10)
    edges, matrix = SPARSE[name], laplacian(SPARSE[name], 30)
    p = laplacian_identifiers(edges, 30, 7, which=which, dtype=D)
    values = torch.linalg.eigvalsh(matrix)[[0, 1, 2, 3, 4, 5, 6] if which == "lowest" else [0, 1, 2, 3, 27, 28, 29]]
    torch.testing.assert_close(p.mT @ p, torch.eye(7, dtype=D) * 30 / 7)
    torch.testing.assert_close(matrix @ p, p * values)


TREE = torch.stack([(torch.arange(1, 127) - 1) // 2, torch.arange(1, 127)])


@pytest.mark.parametrize("which", ["lowest", "both"])
@pytest.mark.parametrize("dim", [8, 16])
def test_sparse_eigenvectors_have_every_copy_of_an_eigenvalue(dim, which, monkeypatch):
    """Lanczos meets one vector of each eigenspace: others came in the place of its further ones."""
    monkeypatch.setattr(identifiers, "_DENSE_NODES", 10)
    matrix = laplacian(TREE, 127)
    p = laplacian_identifiers(TREE, 127, dim, which=which, dtype=D)
    values = torch.linalg.eigvalsh(matrix)
    half = dim // 2 if which == "both" else 0
    torch.testing.assert_close(p.mT @ p, torch.eye(dim, dtype=D) * 127 / dim)
    torch.testing.assert_close(matrix @ p, p * torch.cat([values[: dim - half], values[127 - half :]]))


def complete(n):
    return np.ones((n, n)) - np.eye(n)


def line(n):
    return np.eye(n, k=1) + np.eye(n, k=-1)


def random_sparse(n, edges):
    adjacency = np.zeros((n, n))
    adjacency[tuple(np.random.default_rng(0).integers(0, n, (2, edges)))] = 1
    return np.triu(adjacency, 1) + np.triu(adjacency, 1).T


def star(n):
    return np.block([[0, np.ones((1, n - 1))], [np.ones((n - 1, 1)), np.zeros((n - 1, n - 1))]])


# Few eigenvalues of high multiplicity, many near the end of the spectrum, one at both ends.
SPECTRA = {
    "a clique and isolated nodes": lambda: block_diag(complete(1000), np.zeros((100, 100))),
    "a clique": lambda: complete(1100),
    "cliques": lambda: np.kron(np.eye(11), complete(100)),
    "complete multipartite": lambda: np.kron(complete(22), np.ones((50, 50))),
    "complete bipartite": lambda: np.kron(complete(2), np.ones((600, 600))),
    "a star": lambda: star(1500),
    "stars": lambda: np.kron(np.eye(40), star(30)),
    "a line": lambda: line(1500),
    "lines": lambda: np.kron(np.eye(300), line(5)),
    "a grid": lambda: np.kron(line(40), np.eye(40)) + np.kron(np.eye(40), line(40)),
    "no edges": lambda: np.zeros((1100, 1100)),
    "a clique, lines and isolated nodes": lambda: block_diag(
        complete(500), np.kron(np.eye(100), line(5)), np.zeros((100, 100))
    ),
    "a sparse random graph": lambda: random_sparse(1200, 4000),
    "a random graph in many components": lambda: random_sparse(3000, 1200),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_the_spectrum_is_that_of_a_dense_solver(name):
    """Large graphs: every copy of an eigenvalue, in order, orthogonal, with its eigenvector."""
    adjacency = SPECTRA[name]()
    n, edges = len(adjacency), torch.from_numpy(np.stack(np.nonzero(np.triu(adjacency))))
    root = np.sqrt(np.maximum(adjacency.sum(1), 1))
    matrix = torch.from_numpy(np.eye(n) - adjacency / root[:, None] / root)
    values = torch.linalg.eigvalsh(matrix)
    for which, places in (("lowest", range(16)), ("both", [*range(8), *range(n - 8, n)])):
        p = laplacian_identifiers(edges, n, 16, which=which, dtype=D)
        torch.testing.assert_close(p.mT @ p * 16 / n, torch.eye(16, dtype=D), rtol=0, atol=1e-10)
        torch.testing.assert_close(matrix @ p, p * values[list(places)], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("n", "inverted"), [(150, False), (400, True)])
def test_the_matrix_is_inverted_only_where_it_converges_too_slowly(n, inverted, monkeypatch):
    """Factors of the matrix of a random graph fill up: ten thousand nodes take minutes."""
    calls, splu = [], scipy.sparse.linalg.splu
    monkeypatch.setattr(scipy.sparse.linalg, "splu", lambda matrix: calls.append(matrix) or splu(matrix))
    monkeypatch.setattr(identifiers, "_DENSE_NODES", 10)
    edges = torch.from_numpy(np.stack(np.nonzero(np.triu(line(n)))))
    p, matrix = laplacian_identifiers(edges, n, 2, dtype=D), laplacian(edges, n)
    torch.testing.assert_close(matrix @ p, p * torch.linalg.eigvalsh(matrix)[:2])
    assert bool(calls) == inverted


def test_each_graph_of_a_batch_has_those_it_has_alone():
    """Nodes of several graphs mixed, numbers without a node among the graphs."""
    batch = torch.tensor([4, 1, 4, 4, 1, 2, 1, 4, 1, 4])
    rings = [torch.tensor([0, 2, 3, 7]), torch.tensor([1, 4, 6, 8])]
    edges = torch.cat([torch.stack([nodes, nodes.roll(1)])[:, :-1] for nodes in rings], 1)
    p = laplacian_identifiers(edges, 10, 3, batch=batch, dtype=D)
    for graph in (1, 2, 4):
        nodes = (batch == graph).nonzero()[:, 0]
        inside = (edges[0][:, None] == nodes).any(1)
        own = (edges[:, inside][..., None] == nodes).long().argmax(-1)
        alone = laplacian_identifiers(own, len(nodes), 3, dtype=D)
        torch.testing.assert_close(p[nodes], alone)


def test_permuting_the_nodes_permutes_laplacian_ones_up_to_sign():
    edges = ring(7)[:, :-3]
    order = torch.randperm(7)
    p = laplacian_identifiers(edges, 7, 7, dtype=D)
    permuted = laplacian_identifiers(order.argsort()[edges], 7, 7, dtype=D)
    torch.testing.assert_close(permuted.abs(), p[order].abs())


def test_no_edges_and_one_node():
    torch.testing.assert_close(
        laplacian_identifiers(torch.zeros(2, 0, dtype=torch.int64), 3, 3, dtype=D).abs(), torch.eye(3, dtype=D)
    )
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert laplacian_identifiers(none, 0, 4).shape == (0, 4)
    assert orthogonal_identifiers(0, 4).shape == (0, 4)
    assert laplacian_identifiers(none, 1, 2).tolist() == [[1.0, 0.0]]


def test_signs_and_dropout_act_on_whole_columns_of_a_graph():
    batch = torch.arange(4000) // 2
    ones = torch.ones(4000, 3, dtype=D)
    signs = perturb_identifiers(ones, batch=batch)
    assert torch.equal(signs[::2], signs[1::2])
    assert signs.abs().eq(1).all()
    assert signs[::2].mean(0).abs().max() < 0.08
    dropped = perturb_identifiers(ones, batch=batch, sign_flip=False, dropout=0.25)
    assert torch.equal(dropped[::2], dropped[1::2])
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(dropped[::2].mean() - 1) < 0.05
    assert not perturb_identifiers(ones, dropout=1.0).any()


def test_perturbation_repeats_with_its_seed():
    p = torch.randn(5, 20)
    first, second, other = (
        perturb_identifiers(p, dropout=0.5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    torch.testing.assert_close(first.abs()[first != 0], 2 * p.abs()[first != 0])


@pytest.mark.usefixtures("without_shape_checks")
def test_a_wrong_choice_is_refused():
    with pytest.raises(ValueError, match=r"^which must be one of 'lowest', 'both', got 'highest'\.$"):
        laplacian_identifiers(ring(4), 4, 2, which="highest")
    with pytest.raises(ValueError, match=r"^dim must be a positive integer, got 0\.$"):
        laplacian_identifiers(ring(4), 4, 0)
    with pytest.raises(ValueError, match=r"^dim must be a positive integer, got 0\.$"):
        orthogonal_identifiers(4, 0)
    for dropout in (-0.5, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"^dropout must lie in \[0\.0, 1\.0\], got "):
            perturb_identifiers(torch.ones(4, 2), dropout=dropout)
    with pytest.raises(ValueError, match=r"^batch must have shape \(n = 4,\), got \(1,\)\.$"):
        perturb_identifiers(torch.ones(4, 2), batch=torch.zeros(1, dtype=torch.int64))


@pytest.mark.usefixtures("without_shape_checks")
def test_graphs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^edge_index must name nodes in \[0, n = 3\), got 0 \.\. 3\.$"):
        laplacian_identifiers(ring(4), 3, 2)
    with pytest.raises(TypeError, match=r"^edge_index must hold integers, got torch\.float32\.$"):
        laplacian_identifiers(ring(4).float(), 4, 2)
    with pytest.raises(ValueError, match=r"^edge_index must join nodes of one graph, got the edge \(1, 2\)\.$"):
        laplacian_identifiers(torch.tensor([[0, 1], [1, 2]]), 4, 2, batch=torch.tensor([0, 0, 1, 1]))
    for make_one in (
        lambda b: laplacian_identifiers(ring(4), 4, 2, batch=b),
        lambda b: orthogonal_identifiers(4, 2, batch=b),
    ):
        with pytest.raises(ValueError, match=r"^batch must have shape \(n = 4,\), got \(2,\)\.$"):
            make_one(torch.tensor([0, 0]))


def test_identifiers_lie_where_their_generator_does():
    with torch.device("meta"):
        assert not orthogonal_identifiers(4, 3, generator=torch.Generator("cpu")).is_meta
