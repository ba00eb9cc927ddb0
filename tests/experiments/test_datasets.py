"""Graphs: what the generated tree must be, what a file may be, and the sentence for each that is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.data.datasets import (
    PROTOCOLS,
    NodeData,
    from_pyg,
    load,
    prepared,
    read_npz,
    row_normalise,
    sir_tree,
    sparse_rows,
    standardise,
    stratified_split,
)

REAL = Path(__file__).parents[3] / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real data are not beside the repository")


def parents(data: NodeData) -> np.ndarray:
    half = data.edge_index[:, : data.edge_index.shape[1] // 2].numpy()
    out = np.full(data.num_nodes, -1)
    out[half[1]] = half[0]
    return out


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_tree_is_a_tree_and_the_infection_came_along_its_edges(seed: int) -> None:
    data = sir_tree(400, seed=seed)
    parent = parents(data)
    assert parent[0] == -1
    # n - 1 edges, and every node's parent comes before it: connected, without cycles.
    assert data.edge_index.shape == (2, 2 * 399)
    assert (parent[1:] >= 0).all()
    assert (parent[1:] < np.arange(1, 400)).all()
    assert np.bincount(parent[1:]).max() <= 10
    y = data.y.numpy()
    assert y[0] == 1
    infected = np.flatnonzero(y)[1:]
    assert (y[parent[infected]] == 1).all()
    assert 0.25 <= y.mean() <= 0.6


def test_the_readings_tell_susceptibility() -> None:
    data = sir_tree(3000, noise=0.1)
    reading = data.x.double().mean(dim=1)
    # Given an infected parent, resistant nodes (s <= 0.2) escape more often than the others (s >= 0.6).
    parent = torch.from_numpy(parents(data))[1:]
    exposed = (data.y[parent] == 1).nonzero().flatten() + 1
    weak = reading[exposed] < 0.4
    assert 0.2 < weak.double().mean() < 0.3
    caught = data.y[exposed].double()
    assert caught[weak].mean() < 0.4
    assert caught[~weak].mean() > 0.8


def test_same_seed_same_tree_and_the_split_has_its_own() -> None:
    first, again, other = sir_tree(200), sir_tree(200), sir_tree(200, split_seed=1)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.x, other.x)
    assert not torch.equal(first.train, other.train)
    assert not torch.equal(first.x, sir_tree(200, seed=1).x)


def test_the_split_covers_every_node_once_with_its_shares_of_each_class() -> None:
    y = torch.tensor([0] * 100 + [1] * 20)
    parts = stratified_split(y, (0.3, 0.1), seed=3)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(120))
    assert [y[part].bincount().tolist() for part in parts] == [[30, 6], [10, 2], [60, 12]]


def test_a_hopeless_epidemic_is_refused() -> None:
    with pytest.raises(ValueError, match=r"infection=0.0 .* never reached"):
        sir_tree(50, infection=0.0)
    with pytest.raises(ValueError, match="nodes must be at least 20, got 5"):
        sir_tree(5)


def test_scores_are_accuracy_and_f1_of_the_positive_class() -> None:
    data = sir_tree(20)
    y = torch.tensor([1, 1, 1, 0, 0] * 4)
    data = dataclasses.replace(data, y=y)
    guessed = torch.tensor([1, 0, 0, 1, 0] * 4)
    logits = torch.nn.functional.one_hot(guessed, 2).float()
    nodes = torch.arange(20)
    # 4 hits, 4 false alarms, 8 missed.
    assert data.score(logits, nodes) == pytest.approx(2 * 4 / (8 + 12))
    assert dataclasses.replace(data, metric="accuracy").score(logits, nodes) == pytest.approx(8 / 20)
    assert data.score(torch.tensor([[1.0, 0.0]] * 20), nodes) == 0.0


def test_rows_are_normalised_alike_dense_and_sparse() -> None:
    dense = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    sparse = sparse_rows(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 2, 1]), torch.tensor([1.0, 3.0, 5.0]), (3, 3))
    wanted = torch.tensor([[0.25, 0.0, 0.75], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert torch.equal(row_normalise(dense), wanted)
    assert torch.equal(row_normalise(sparse).to_dense(), wanted)


def test_measured_columns_are_standardised_and_indicators_stay() -> None:
    x = torch.randn(50, 4) * torch.tensor([1.0, 100.0, 0.0, 0.0]) + 0.1
    x[:, 3] = torch.arange(50) % 2
    out = standardise(x, 5.0)
    assert torch.allclose(out[:, :3].mean(dim=0), torch.zeros(3), atol=1e-5)
    assert torch.allclose(out[:, :3].std(dim=0, correction=0), torch.tensor([5.0, 5.0, 0.0]), atol=1e-4)
    assert torch.equal(out[:, 3], x[:, 3])
    assert torch.allclose(standardise(x, 5.0, indicators=True)[:, 3], 10 * x[:, 3] - 5)
    data = sir_tree(30)
    assert torch.equal(prepared(data, "standard", 2.0).x, standardise(data.x, 2.0))
    sparse = sparse_rows(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1.0]), (1, 2))
    with pytest.raises(ValueError, match="needs dense features"):
        standardise(sparse)


def test_features_can_be_scaled_and_an_unknown_choice_is_refused() -> None:
    data = sir_tree(30)
    assert torch.equal(prepared(data, "raw", 2.0).x, 2 * data.x)
    with pytest.raises(ValueError, match="features must be raw, row, standard or columns, got 'colour'"):
        prepared(data, "colour")


# Files. A small set of the same form as the real one, then one thing wrong at a time.


def arrays() -> dict[str, dict[str, np.ndarray]]:
    n = 12
    rng = np.random.default_rng(0)
    edges = np.stack([np.arange(n - 1), np.arange(1, n)]).astype(np.uint16)
    split = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]] * 5, dtype=np.uint8)
    lists = {"train": [0, 1, 2], "val": [3, 4], "test": [5, 6, 7]}
    return {
        "cora": {
            "x_indptr": np.arange(n + 1, dtype=np.int32) * 2,
            "x_indices": np.tile(np.array([0, 3], dtype=np.uint16), n),
            "x_shape": np.array([n, 5]),
            "edge_index": edges,
            "y": (np.arange(n) % 3).astype(np.int8),
            "labelled": np.arange(n) != 7,
            "num_classes": np.array(3),
        }
        | {f"{part}_idx": np.array(nodes, dtype=np.int32) for part, nodes in lists.items()},
        "airport": {
            "x": rng.standard_normal((n, 4)).astype(np.float32),
            "y": (np.arange(n) % 4).astype(np.int8),
            "edge_index": edges,
            "split": split,
            "num_classes": np.array(4),
        },
        "disease_lp": {
            "x": rng.standard_normal((n, 11)).astype(np.float32),
            "y": (np.arange(n) % 2).astype(np.int8),
            "edge_index": edges,
            "split": split,
            "num_classes": np.array(2),
        },
        "released_splits": {
            f"{name}_{part}": np.array(nodes, dtype=np.int32)
            for name in ("cora", "airport")
            for part, nodes in (lists | {"unseen_test": [6]}).items()
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in arrays().items():
        np.savez(tmp_path / f"{name}.npz", **content)
    return tmp_path


def test_small_files_are_read_as_they_are(folder: Path) -> None:
    cora = load("cora", folder, protocol="public")
    assert cora.x.layout == torch.sparse_csr
    assert cora.x.to_dense()[0].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert cora.edge_index.shape == (2, 22)
    assert cora.test.tolist() == [5, 6]  # node 7 has no label
    airport = load("airport", folder)
    assert airport.num_features == 11
    # The ends of the path have degree 1, the others 2; the last column is the constant.
    assert airport.x[0, 4:].tolist() == [0, 1, 0, 0, 0, 0, 1]
    assert airport.x[1, 4:].tolist() == [0, 0, 1, 0, 0, 0, 1]
    leaky, unseen = (load("airport", folder, protocol=name) for name in ("leaky", "unseen"))
    assert "LEAKY" in leaky.note
    assert leaky.also["unseen"].tolist() == unseen.test.tolist() == [6]
    assert load("disease_lp", folder).metric == "f1"


# dataset, array, what it becomes (None: left out), what the sentence must say
WRONG = [
    ("cora", "y", None, "the array 'y' is missing"),
    ("cora", "y", np.zeros(12), r"y must be an integer array with 1 axes, got float64 of shape \(12,\)"),
    ("cora", "y", np.zeros(9, dtype=np.int8), "labelled must have the shape"),
    ("cora", "y", np.full(12, 5, dtype=np.int8), "y must lie between 0 and 2, got 5 to 5"),
    ("cora", "labelled", np.zeros((12, 1), dtype=bool), "labelled must be a boolean array with 1 axes"),
    ("cora", "labelled", np.zeros(12, dtype=bool), "the list of train nodes is empty"),
    ("cora", "edge_index", np.zeros((3, 4), dtype=int), r"edge_index must have shape \(2, edges\)"),
    ("cora", "edge_index", np.full((2, 4), 12), "edge_index must lie between 0 and 11"),
    ("cora", "x_indptr", np.arange(13), "do not describe a sparse matrix"),
    ("cora", "x_indptr", np.arange(9), "do not fit together"),
    ("cora", "x_indices", np.full(24, 5), "do not describe a sparse matrix"),
    ("cora", "train_idx", np.array([0, 99]), "train must lie between 0 and 11, got 0 to 99"),
    ("airport", "x", np.full((12, 4), np.nan), "x holds values that are not finite"),
    ("airport", "x", np.full((12, 4), 1e300), "x holds values that are not finite in float32"),
    ("airport", "x", np.zeros((11, 4)), "x must have 12 rows, one for each entry of y, got 11"),
    ("airport", "split", np.full((5, 12), 3), "split must have shape"),
    ("airport", "split", np.zeros((5, 11), dtype=int), "split must have shape"),
    ("airport", "split", np.zeros((5, 12), dtype=int), "the list of val nodes is empty"),
    ("disease_lp", "x", np.zeros((10, 11), dtype=np.float32), r"y must have shape \(10,\)"),
    ("disease_lp", "num_classes", np.array([2]), "num_classes must be an integer array with 0 axes"),
    ("disease_lp", "x", np.array([{}, []], dtype=object), "allow_pickle"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value", "sentence"), WRONG)
def test_each_wrong_array_has_its_sentence(folder, name, key, value, sentence) -> None:
    content = arrays()[name]
    if value is None:
        del content[key]
    else:
        content[key] = value
    np.savez(folder / f"{name}.npz", **content)
    with pytest.raises(ValueError, match=sentence) as error:
        load(name, folder, protocol="public" if name == "cora" else None)
    assert str(folder / f"{name}.npz") in str(error.value)
    assert "\n" not in str(error.value)


def test_the_byte_order_of_another_machine_is_read(tmp_path: Path) -> None:
    content = arrays()["airport"]
    np.savez(tmp_path / "swapped.npz", **{key: each.astype(each.dtype.newbyteorder()) for key, each in content.items()})
    read = read_npz(tmp_path / "swapped.npz", {"x": "f2", "y": "i1", "num_classes": "i0"})
    for key, array in read.items():
        assert torch.equal(torch.from_numpy(array), torch.from_numpy(content[key]))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_has_its_sentence(folder: Path, share: float) -> None:
    path = folder / "airport.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"airport\.npz cannot be read: it is truncated or not"):
        load("airport", folder)


def test_a_damaged_file_has_its_sentence(folder: Path) -> None:
    path = folder / "airport.npz"
    whole = bytearray(path.read_bytes())
    place = whole.find(b"NUMPY") + 300
    whole[place : place + 40] = bytes(40)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"airport\.npz cannot be read"):
        load("airport", folder)


def test_other_files_have_their_sentence(folder: Path) -> None:
    path = folder / "airport.npz"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="not an npz file"):
        load("airport", folder)
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(ValueError, match="not an npz file"):
        load("airport", folder)


def test_what_is_not_there_has_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file cora\.npz in the folder"):
        load("cora", tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load("cora", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="say where it lies with --data FOLDER"):
        load("cora")
    with pytest.raises(ValueError, match=r"dataset must be one of tree, .*, got 'karate'"):
        load("karate")
    with pytest.raises(ValueError, match=r"protocol of cora must be one of random, public, got 'own'"):
        load("cora", tmp_path, protocol="own")


def test_arrays_that_may_be_absent_are_checked_when_they_are_there(folder: Path) -> None:
    path = folder / "airport.npz"
    assert set(read_npz(path, {"y": "i1"}, {"z": "f1"})) == {"y"}
    with pytest.raises(ValueError, match="x must be a boolean array"):
        read_npz(path, {"y": "i1"}, {"x": "b2"})


# PyTorch Geometric


def masks(n: int = 6) -> dict[str, torch.Tensor]:
    return {f"{part}_mask": torch.arange(n) % 3 == place for place, part in enumerate(("train", "val", "test"))}


def test_an_object_with_the_attributes_of_pyg_is_taken_over() -> None:
    x, edge_index, y = torch.randn(6, 2), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1, 2, 0, 1, 2])
    data = from_pyg(SimpleNamespace(x=x, edge_index=edge_index, y=y[:, None], **masks()))
    assert torch.equal(data.y, y)
    assert data.num_classes == 3
    assert data.val.tolist() == [1, 4]
    with pytest.raises(ValueError, match="missing: y, test_mask"):
        from_pyg(SimpleNamespace(x=x, edge_index=edge_index, **{k: v for k, v in masks().items() if k != "test_mask"}))
    several = {key: mask[:, None].expand(-1, 2) for key, mask in masks().items()}
    with pytest.raises(ValueError, match="hold several splits"):
        from_pyg(SimpleNamespace(x=x, edge_index=edge_index, y=y, **several))


def test_a_pyg_data_object_is_taken_over() -> None:
    pyg = pytest.importorskip("torch_geometric.data", reason="PyTorch Geometric is not installed")
    x, edge_index, y = torch.randn(6, 2), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1, 2, 0, 1, 2])
    data = from_pyg(pyg.Data(x=x, edge_index=edge_index, y=y, **masks()))
    assert torch.equal(data.x, x)
    assert data.train.tolist() == [0, 3]


# The real files

SIZES = {  # nodes, features, edges, classes; train, val, test nodes by protocol
    "cora": (2708, 1433, 5278, 7, {"random": (140, 500, 1000), "public": (140, 500, 1000)}),
    "citeseer": (3327, 3703, 4552, 6, {"random": (119, 498, 994), "public": (120, 500, 1000)}),
    "pubmed": (19717, 500, 44324, 3, {"random": (60, 500, 1000), "public": (60, 500, 1000)}),
    "airport": (3188, 11, 18630, 4, {"clean": (2232, 478, 478), "leaky": (3364, 524, 524), "unseen": (3364, 524, 238)}),
    "disease_lp": (2665, 11, 2664, 2, {"split": (1181, 212, 1272)}),
    "chameleon": (2277, 3132, 31371, 5, {"geomgcn": (1092, 729, 456)}),
}  # fmt: skip


@needs_real
@pytest.mark.parametrize("name", SIZES)
def test_real_graphs_have_the_sizes_their_page_gives(name: str) -> None:
    nodes, features, edges, classes, protocols = SIZES[name]
    assert tuple(protocols) == PROTOCOLS[name]
    for protocol, lists in protocols.items():
        data = load(name, REAL, protocol=protocol)
        assert (data.num_nodes, data.num_features, data.num_classes) == (nodes, features, classes)
        assert data.edge_index.shape[1] == 2 * edges
        assert tuple(len(part) for part in (data.train, data.val, data.test)) == lists


@needs_real
def test_the_leak_of_airport_is_what_its_page_says() -> None:
    leaky, clean = load("airport", REAL, protocol="leaky"), load("airport", REAL)
    train, test = (set(part.tolist()) for part in (leaky.train, leaky.test))
    assert len(test) == 506
    assert len(train & test) == 225
    assert not set(leaky.also["unseen"].tolist()) & train
    assert not set(clean.train.tolist()) & set(clean.test.tolist())
