"""Folders in OGB's layout are read as they were written, whatever their form, and train with the metric of theirs."""

from __future__ import annotations

import gzip
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data import ogb
from experiments.data.large_graphs import TEST, TRAIN, UNUSED, VALID, About
from experiments.engine.options import RefusedError
from experiments.large_graph import Areas, command, main

NODES, EDGES, FEATURES = 60, 200, 5
FORMS = ["text", "compressed", "stored", "by column"]


class Drawn:
    """Two communities, whose features and labels differ; some nodes have no label and no use."""

    def __init__(self, tasks: int = 1) -> None:
        rng = np.random.default_rng(0)
        kind = np.arange(NODES) % 2
        source = rng.integers(NODES, size=EDGES)
        target = (source + 2 * rng.integers(1, NODES // 2, size=EDGES) + (rng.random(EDGES) < 0.1)) % NODES
        self.edges = np.stack([source, target])
        self.x = (kind[:, None] + 0.5 * rng.normal(size=(NODES, FEATURES))).round(3)
        self.of_edges = (kind[source][:, None] + 0.5 * rng.normal(size=(EDGES, FEATURES))).round(3)
        self.labels = kind[:, None] if tasks == 1 else np.stack([kind, 1 - kind, np.zeros_like(kind)], 1)
        order = rng.permutation(NODES)
        self.split = dict(zip(("train", "valid", "test"), np.split(order[:50], [20, 35]), strict=True))
        self.unknown = order[50:]


def text(path: Path, table: np.ndarray, form: str = "%g") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as stream:
        np.savetxt(stream, np.atleast_1d(table), form, delimiter=",")


def write(path: Path, drawn: Drawn, form: str = "text", *, scheme: str = "time", edges_only: bool = False) -> Path:
    """A folder of OGB's."""
    raw = path / "raw"
    for name, nodes in drawn.split.items():
        text(path / "split" / scheme / f"{name}.csv.gz", nodes, "%d")
    if form == "text":
        text(raw / "num-node-list.csv.gz", np.array([NODES]))
        text(raw / "num-edge-list.csv.gz", np.array([EDGES]))
        text(raw / "edge.csv.gz", drawn.edges.T, "%d")
        text(raw / "node-label.csv.gz", drawn.labels, "%d")
        text(
            raw / ("edge-feat.csv.gz" if edges_only else "node-feat.csv.gz"), drawn.of_edges if edges_only else drawn.x
        )
        return path
    labels = drawn.labels.astype(np.float32)
    labels[drawn.unknown] = np.nan
    order = "F" if form == "by column" else "C"
    save = np.savez_compressed if form == "compressed" else np.savez
    raw.mkdir(parents=True, exist_ok=True)
    arrays = {"edge_index": drawn.edges, "node_feat": drawn.x.astype(np.float32), "node_year": np.ones((NODES, 1))}
    sizes = {"num_nodes_list": np.array([NODES]), "num_edges_list": np.array([EDGES])}
    save(raw / "data.npz", **{name: np.asarray(value, order=order) for name, value in arrays.items()}, **sizes)
    save(raw / "node-label.npz", node_label=labels)
    return path


@pytest.mark.parametrize("numbers", [1, 7, 2**20])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_is_what_was_written(form, numbers, tmp_path, monkeypatch):
    """In blocks of any size, from the files that are data, none of them unpickled."""
    drawn = Drawn()
    source = write(tmp_path / "ogbn_papers", drawn, form)
    for rest in ("processed/data_processed", "split/time/split_dict.pt", "mapping/nodeidx2paperid.csv.gz"):
        (source / rest).parent.mkdir(exist_ok=True)
        (source / rest).write_bytes(b"not to be opened")
    monkeypatch.setattr(ogb, "NUMBERS", numbers)
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, None)
    ogb.convert(source, tmp_path / "data")
    about = About.read(tmp_path / "data")
    assert about[:-1] == (NODES, FEATURES, 2, 2 * EDGES, 1, "accuracy")
    found = {name: np.array(about.mapped(tmp_path / "data", name, "r")) for name in ("edges", "labels", "split")}
    assert np.array_equal(found["edges"], np.concatenate([drawn.edges, drawn.edges[::-1]], 1))
    assert np.array_equal(about.mapped(tmp_path / "data", "features0", "r"), drawn.x.astype(np.float32))
    labels = drawn.labels.copy()
    if form != "text":
        labels[drawn.unknown] = -1
    assert np.array_equal(found["labels"], labels)
    for name, code in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        assert {*np.flatnonzero(found["split"] == code)} == {*drawn.split[name]}
    assert {*np.flatnonzero(found["split"] == UNUSED)} == {*drawn.unknown}


def test_nodes_without_features_have_the_means_of_those_of_their_edges(tmp_path):
    drawn = Drawn(tasks=3)
    drawn.edges[drawn.edges == 7] = 8  # one has no edges
    ogb.convert(write(tmp_path / "ogbn_proteins", drawn, scheme="species", edges_only=True), tmp_path / "data")
    about = About.read(tmp_path / "data")
    assert about[:-1] == (NODES, FEATURES, 3, 2 * EDGES, 3, "ROC-AUC")
    found = about.mapped(tmp_path / "data", "features0", "r")
    for node in range(NODES):
        at = [x for edge, x in zip(drawn.edges.T, drawn.of_edges, strict=True) for end in edge if end == node]
        expected = np.mean(at, 0) if at else np.zeros(FEATURES)
        np.testing.assert_allclose(found[node], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("tasks", "metric", "modes"),
    [(1, "accuracy", ["whole", "rows", "stream"]), (3, "ROC-AUC", ["partitions", "stream"])],
)
def test_a_folder_trains_with_its_metric(tasks, metric, modes, tmp_path):
    source = write(tmp_path / "ogbn", Drawn(tasks))
    ogb.convert(source, tmp_path / "data-ogbn")
    size = ["--epochs", "9", "--every", "3", "--hidden", "8", "--chunk", "25", "--parts", "2", "--lr", "0.02"]
    found = {m: main(["--folder", str(source), "--out", str(tmp_path), "--mode", m, *size]) for m in modes}
    for mode, result in found.items():
        tested = [record for record in result["history"] if metric in record]
        assert len(tested) == 3, mode
        assert result["chosen"]["valid"] == max(record["valid"] for record in tested), mode
        assert result["chosen"][metric] > 0.8, mode
    if "rows" in found:
        rows, chunks = (found[mode]["history"][-1] for mode in ("rows", "stream"))
        assert (rows["loss"], rows[metric]) == pytest.approx((chunks["loss"], chunks[metric]), rel=1e-3)


def test_the_area_is_the_mean_of_tasks_with_both_answers():
    metric = Areas()
    scores = torch.tensor([[0.1, 5.0, 3.0], [0.9, 6.0, 1.0], [0.5, 7.0, 2.0]])
    y = torch.tensor([[0, 1, 1], [1, 1, 0], [-1, 1, 1]])
    metric.add(scores[:2], y[:2])
    metric.add(scores[2:], y[2:])
    assert metric.value(None) == 1.0  # of the first task without its unknown label, and the third
    metric.add(torch.tensor([[2.0, 0.0, 2.5]]), torch.tensor([[0, -1, 0]]))
    assert metric.value(None) == pytest.approx((0.5 + 0.75) / 2)


def spoiled(path: Path, what: str) -> None:
    """A folder in which something is wrong."""
    drawn = Drawn()
    array = what.startswith("array")
    write(path, drawn, "stored" if array else "text")
    raw, split = path / "raw", path / "split" / "time"
    change = {
        "no edges": (raw / "edge.csv.gz").unlink,
        "no split": (split / "valid.csv.gz").unlink,
        "no features": (raw / "node-feat.csv.gz").unlink,
        "a word": lambda: text(raw / "edge.csv.gz", np.array(["a,b"]), "%s"),
        "no gzip": lambda: (raw / "node-feat.csv.gz").write_text("1,2"),
        "cut": lambda: (raw / "edge.csv.gz").write_bytes((raw / "edge.csv.gz").read_bytes()[:40]),
        "a node too much": lambda: text(raw / "edge.csv.gz", drawn.edges.T + 1, "%d"),
        "an edge too few": lambda: text(raw / "edge.csv.gz", drawn.edges.T[1:], "%d"),
        "an edge too much": lambda: text(raw / "edge.csv.gz", np.repeat(drawn.edges.T, 2, 0), "%d"),
        "not finite": lambda: text(raw / "node-feat.csv.gz", drawn.x / 0),
        "not float32": lambda: text(raw / "node-feat.csv.gz", drawn.x * 1e300),
        "no columns": lambda: text(raw / "node-feat.csv.gz", np.empty((0, 0))),
        "half a class": lambda: text(raw / "node-label.csv.gz", drawn.labels / 2),
        "twice": lambda: text(split / "test.csv.gz", drawn.split["train"], "%d"),
        "two graphs": lambda: text(raw / "num-node-list.csv.gz", np.array([3, 4])),
        "two splits": lambda: write(path, drawn, scheme="random"),
        "arrays without features": lambda: np.savez(raw / "data.npz", num_nodes_list=[NODES], num_edges_list=[EDGES]),
        "arrays of objects": lambda: np.savez(raw / "node-label.npz", node_label=np.array([{}] * NODES)),
        "arrays in a broken file": lambda: (raw / "data.npz").write_bytes((raw / "data.npz").read_bytes()[:-90]),
    }
    with np.errstate(divide="ignore"):
        change[what]()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no edges", "raw must hold edge.csv.gz, as the folders of OGB do, got none"),
        ("no split", "time must hold valid.csv.gz, as the folders of OGB do, got none"),
        ("no features", "raw must hold features of nodes or of edges, got neither"),
        ("a word", "edge.csv.gz must be text of numbers, compressed by gzip, got one with this: could not convert"),
        ("no gzip", "node-feat.csv.gz must be text of numbers, compressed by gzip, got one with this: Not a gzipped"),
        ("cut", "edge.csv.gz must be text of numbers, compressed by gzip, got one with this: Compressed file ended"),
        ("a node too much", "edge.csv.gz must hold whole numbers from 0 to 59, got 60"),
        ("an edge too few", r"edge.csv.gz must have shape \(200, 2\), got 398 numbers"),
        ("an edge too much", r"edge.csv.gz must have shape \(200, 2\), got \(400, 2\) or more"),
        ("not finite", "node-feat.csv.gz must hold finite numbers of float32, got"),
        ("not float32", "node-feat.csv.gz must hold finite numbers of float32, got"),
        ("no columns", "node-feat.csv.gz must hold a feature at least, got none"),
        ("half a class", "node-label.csv.gz must hold whole numbers from 0 to 32767, got 0.5"),
        ("twice", "test.csv.gz must hold nodes, each in one list once"),
        ("two graphs", r"num-node-list.csv.gz must hold the size of one graph, got \[3.0, 4.0\]"),
        ("two splits", r"split must hold one folder, or --split name one, got \['random', 'time'\]"),
        ("arrays without features", "raw must hold features of nodes or of edges, got neither"),
        ("arrays of objects", "node-label.npz must be an npz file of plain arrays, got one with this: an array of"),
        ("arrays in a broken file", "data.npz must be an npz file of plain arrays, got one with this"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_sentence(what, said, tmp_path):
    spoiled(tmp_path / "ogbn", what)
    with pytest.raises(RefusedError, match=said):
        ogb.convert(tmp_path / "ogbn", tmp_path / "data")
    assert not (tmp_path / "data" / "graph.json").exists()


def test_a_split_is_chosen_and_another_graph_is_not_taken_for_it(tmp_path, monkeypatch, capsys):
    drawn = Drawn()
    write(tmp_path / "ogbn", drawn)
    drawn.split = dict(zip(drawn.split, reversed(drawn.split.values()), strict=True))
    write(tmp_path / "ogbn", drawn, scheme="random")
    ogb.convert(tmp_path / "ogbn", tmp_path / "data-ogbn", "random")
    split = About.read(tmp_path / "data-ogbn").mapped(tmp_path / "data-ogbn", "split", "r")
    assert {*np.flatnonzero(split == TRAIN)} == {*drawn.split["train"]}
    words = ["--folder", str(tmp_path / "ogbn"), "--split", "time", "--out", str(tmp_path), "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["large_graph", *words])
    assert command() == 2
    error = capsys.readouterr().err
    assert "data-ogbn must hold the graph of --folder and --split, or be removed, got" in error
    assert error.count("\n") == 1
