"""Sets of graphs: a batch is its graphs and nothing else; chains and molecules are what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.data.graph_sets import GraphSet, Parts, chains, qm9, random_molecules, read_molecules, zinc
from experiments.engine.options import RefusedError

REAL = Path(__file__).parents[3] / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real data are not beside the repository")


def one(graphs: GraphSet, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut one graph out by loops."""
    node, edge = sum(graphs.nodes[:number].tolist()), sum(graphs.edges[:number].tolist())
    nodes, edges = int(graphs.nodes[number]), int(graphs.edges[number])
    return (
        graphs.x[node : node + nodes],
        graphs.edge_index[:, edge : edge + edges],
        graphs.edge_attr[edge : edge + edges],
    )


def test_a_batch_is_its_graphs_side_by_side() -> None:
    graphs = random_molecules(9, seed=0)
    for chosen in (torch.tensor([4]), torch.tensor([7, 0, 7, 3])):
        batch = graphs.take(chosen)
        assert torch.equal(batch.y, graphs.y[chosen])
        shift = 0
        for place, number in enumerate(chosen.tolist()):
            x, edge_index, edge_attr = one(graphs, number)
            nodes = batch.batch == place
            edges = nodes[batch.edge_index[0]]
            assert torch.equal(batch.x[nodes], x)
            assert torch.equal(batch.edge_index[:, edges] - shift, edge_index)
            assert torch.equal(batch.edge_attr[edges], edge_attr)
            shift += len(x)
        assert shift == len(batch.x)


def test_a_subset_and_batches_hold_what_take_holds() -> None:
    for graphs in (random_molecules(7, seed=1), chains(7, 4, seed=1)):
        chosen = torch.tensor([5, 2, 2])
        part = graphs.subset(chosen)
        assert len(part) == 3
        for got, wanted in zip(part.take(torch.arange(3)), graphs.take(chosen), strict=True):
            assert torch.equal(got, wanted)
        sizes = [int(batch.batch.max()) + 1 for batch in graphs.batches(3)]
        assert sizes == [3, 3, 1]


def test_identifiers_are_those_of_each_graph_alone() -> None:
    graphs = random_molecules(5, seed=1).identified(16)
    assert graphs.take(torch.tensor([1])).identifiers.shape[1] == 16
    assert chains(2, 3, seed=0).take(torch.tensor([1])).identifiers.shape == (3, 0)
    for number in range(5):
        part = graphs.subset(torch.tensor([number])).take(torch.tensor([0]))
        vectors = part.identifiers.double()
        n = len(part.x)
        assert torch.allclose(vectors @ vectors.T, torch.eye(n).double(), atol=1e-5)
        adjacency = torch.zeros(n, n).double()
        adjacency[part.edge_index[0], part.edge_index[1]] = 1
        scale = adjacency.sum(dim=1).rsqrt()
        laplacian = torch.eye(n) - scale[:, None] * adjacency * scale
        values = (vectors * (laplacian @ vectors)).sum(dim=0)
        assert torch.allclose(laplacian @ vectors, vectors * values, atol=1e-5)
        assert (values[:n].diff() > -1e-5).all()


def test_edge_features_without_columns_are_not_given_to_a_model() -> None:
    assert chains(2, 3, seed=0).take(torch.arange(2)).inputs()["edge_attr"] is None
    assert random_molecules(2, seed=0).take(torch.arange(2)).inputs()["edge_attr"] is not None


def test_only_the_first_node_of_a_chain_knows_its_class() -> None:
    graphs = chains(10, 6, seed=3)
    x, y = graphs.x.reshape(10, 6, 2), graphs.y.reshape(10, 6)
    assert (x[:, 1:] == 0).all()
    assert torch.equal(x[:, 0].argmax(dim=1), y[:, 0])
    assert (y == y[:, :1]).all()
    assert y[:, 0].sum() == 5
    edges = {tuple(pair) for pair in one(graphs, 4)[1].T.tolist()}
    assert edges == {(a, b) for a in range(6) for b in range(6) if abs(a - b) == 1}


def test_generated_molecules_have_the_property_they_say() -> None:
    graphs = random_molecules(30, seed=5)
    rings = set()
    for number in range(30):
        x, edge_index, edge_attr = one(graphs, number)
        kind, bond = x.argmax(dim=1), edge_attr.argmax(dim=1)
        pairs = {tuple(pair) for pair in edge_index.T.tolist()}
        # Both directions, each once, no loops, connected (fewer than n - 1 bonds cannot be).
        assert len(pairs) == edge_index.shape[1]
        assert {(b, a) for a, b in pairs} == pairs
        assert all(a != b for a, b in pairs)
        reached, before = {0}, 0
        while len(reached) != before:
            before = len(reached)
            reached |= {b for a, b in pairs if a in reached}
        assert len(reached) == len(x)
        assert torch.bincount(edge_index[0]).max() <= 4
        ring = len(pairs) // 2 - len(x) + 1
        rings.add(ring)
        differ = kind[edge_index[0]] != kind[edge_index[1]]
        assert graphs.y[number].item() == int((differ & (bond == 0)).sum()) / 2 + 2 * ring
    assert {0, 3} <= rings


def test_parts_are_standardised_by_the_training_part() -> None:
    graphs = random_molecules(40, seed=2)
    parts = Parts.cut(graphs, torch.arange(40).split([20, 10, 10]), 4)
    assert parts.train.y.mean().item() == pytest.approx(0, abs=1e-6)
    assert parts.train.y.std().item() == pytest.approx(1, abs=1e-6)
    assert torch.allclose(parts.mean + parts.deviation * parts.test.y, graphs.y[30:], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nodes": torch.tensor([2, 2])}, "nodes must be positive and sum up to the 3 rows of x"),
        ({"nodes": torch.tensor([3, 0])}, "nodes must be positive and sum up to the 3 rows of x"),
        ({"edges": torch.tensor([1, 1])}, "edges must sum up to the 1 columns of edge_index"),
        ({"edge_index": torch.tensor([[0], [2]])}, "edge_index must hold node numbers within each graph"),
        ({"y": torch.zeros(3)}, "y must have 2 rows, got 3"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Tensor], sentence: str) -> None:
    whole = {
        "x": torch.zeros(3, 1),
        "edge_index": torch.tensor([[0], [1]]),
        "edge_attr": torch.zeros(1, 0),
        "nodes": torch.tensor([2, 1]),
        "edges": torch.tensor([1, 0]),
        "y": torch.zeros(2),
    }
    assert len(GraphSet(**whole)) == 2
    with pytest.raises(ValueError, match=sentence):
        GraphSet(**{**whole, **change})


def written(folder: Path, **change: np.ndarray) -> None:
    """Two molecules of two atoms, with one thing wrong."""
    counts, bonds = {"num_nodes": np.array([2, 2]), "num_bonds": np.array([1, 1])}, np.array([[0, 0], [1, 1]])
    both = {**counts, "bond_index": bonds, "bond_type": np.array([1, 2]), "split": np.array([0, 1])}
    zincs = {**both, "atom_type": np.array([0, 27, 3, 4]), "y": np.array([1.0, 2.0])}
    qm9s = {**both, "atom_feat": np.array([[6, 8, 4]] * 4)}
    np.savez(folder / "zinc12k.npz", **{**zincs, **{key: change[key] for key in change if key in zincs}})
    np.savez(folder / "qm9_graphs.npz", **{**qm9s, **{key: change[key] for key in change if key in qm9s}})
    esols = {**qm9s, "y": zincs["y"], "split": np.array([[0, 1]] * 3)}
    np.savez(folder / "esol.npz", **{**esols, **{key: change[key] for key in change if key in esols}})
    np.savez(folder / "qm9_targets.npz", y=change.get("targets", np.ones((2, 8))))


def test_small_molecules_are_read(tmp_path: Path) -> None:
    written(tmp_path)
    for name in ("zinc", "qm9", "esol"):
        graphs, parts = read_molecules(name, tmp_path, 0, 0)
        assert len(graphs) == 2
        assert [part.tolist() for part in parts[0]] == [[0], [1], []]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("zinc", {"atom_type": np.array([0, 28, 0, 0])}, "atom_type must lie between 0 and 27, got 0 to 28"),
        ("zinc", {"bond_type": np.array([0, 1])}, "bond_type - 1 must lie between 0 and 2, got -1 to 0"),
        ("zinc", {"bond_index": np.zeros((3, 2), dtype=int)}, "bond_index must have shape"),
        ("zinc", {"split": np.array([0])}, "split must have an entry for each of 2 molecules, got 1"),
        ("qm9", {"atom_feat": np.array([[5, 8, 4]] * 4)}, "atom_feat must lie between 0 and 3, got -1 to -1"),
        ("qm9", {"atom_feat": np.ones((4, 2), dtype=int)}, "atom_feat must have 3 columns at least"),
        ("esol", {"atom_feat": np.ones((4, 0), dtype=int)}, r"atom_feat must have a row for each atom .* got \(4, 0\)"),
        ("esol", {"atom_feat": np.ones((0, 5), dtype=int)}, r"atom_feat must have a row for each atom .* got \(0, 5\)"),
        ("qm9", {"targets": np.ones((2, 7))}, "y of the targets must have 8 columns at least"),
    ],
)
def test_molecules_that_do_not_fit_are_one_sentence(tmp_path: Path, name: str, change: dict, said: str) -> None:
    written(tmp_path, **change)
    with pytest.raises(RefusedError, match=said):
        read_molecules(name, tmp_path, 0, 0)


@needs_real
def test_zinc_is_what_its_page_says() -> None:
    graphs, split = zinc(REAL)
    assert (len(graphs), len(graphs.x), graphs.edge_index.shape[1]) == (12000, 277864, 597970)
    assert torch.bincount(split).tolist() == [10000, 1000, 1000]
    assert (int(graphs.nodes[0]), int(graphs.edges[0])) == (29, 64)
    # The page's score of the training median.
    y = graphs.y[:, 0]
    assert (y[split == 2] - y[split == 0].median()).abs().mean().item() == pytest.approx(1.549, abs=0.001)


@needs_real
def test_qm9_is_what_its_page_says() -> None:
    graphs, split = qm9(REAL)
    assert (len(graphs), len(graphs.x), graphs.edge_index.shape[1]) == (130831, 1150724, 2 * 1231874)
    assert torch.bincount(split).tolist() == [110000, 10000, 10831]
    assert torch.equal(graphs.x.sum(dim=1), torch.full((len(graphs.x),), 3.0))
    # Methane: a carbon with four hydrogens, gap 0.5048 Hartree.
    assert np.flatnonzero(graphs.x[0].numpy()).tolist() == [0, 5, 11]
    assert graphs.y[0].item() == pytest.approx(0.5048 * 27211.386, rel=1e-5)
