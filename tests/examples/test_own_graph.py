"""A model is trained, kept, and asked about a graph from a file; nodes of unknown class train nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from examples.own_graph import main, read, tree


def test_a_kept_model_predicts_what_the_trained_one_did(tmp_path):
    out = ["--out", str(tmp_path)]
    scores = main([*out, "--nodes", "120", "--epochs", "15"])
    np.savez(tmp_path / "same.npz", **tree(120, 0))
    again = main([*out, "--graph", str(tmp_path / "same.npz"), "--predict"])
    assert again["nodes"] == 120
    assert again["right"] > 0.4  # a quarter by chance
    assert np.load(tmp_path / "predicted.npz")["y"].shape == (120,)
    np.savez(tmp_path / "unknown.npz", **{name: part for name, part in tree(30, 0).items() if name != "y"})
    assert main([*out, "--graph", str(tmp_path / "unknown.npz"), "--predict"]) == {"nodes": 30}
    assert 0 <= scores["epoch"] < 15


def test_training_stops_and_unknown_classes_are_left_out(tmp_path):
    graph = tree(60, 1)
    graph["y"][::2] = -1
    np.savez(tmp_path / "some.npz", **graph)
    scores = main(["--graph", str(tmp_path / "some.npz"), "--out", str(tmp_path), "--epochs", "30", "--patience", "2"])
    assert scores["epoch"] < 29
    assert json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))["sizes"]["out_features"] == 4


def test_several_graphs_train_and_are_predicted_together(tmp_path):
    paths = [tmp_path / f"{seed}.npz" for seed in range(10)]
    for seed, path in enumerate(paths):
        np.savez(path, **tree(40 + seed, seed))
    files = ["--graph", *map(str, paths)]
    scores = main([*files, "--out", str(tmp_path), "--epochs", "12"])
    found = main([*files, "--out", str(tmp_path), "--predict"])
    assert found["nodes"] == 445
    assert found["right"] > 0.45  # a quarter by chance
    assert scores["test"] > 0.45
    assert np.bincount(np.load(tmp_path / "predicted.npz")["graph"]).tolist() == list(range(40, 50))


def test_a_file_with_pickled_objects_is_refused(tmp_path):
    np.savez(tmp_path / "bad.npz", x=np.array([{}], dtype=object), edge_index=np.zeros((2, 0)), y=np.zeros(1))
    with pytest.raises(ValueError, match="allow_pickle"):
        read(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"y": np.full(30, -1)}, "y must be known for nodes to learn from and to stop by, got 0"),
        ({"y": np.zeros(30)}, "y of .*npz must hold integers, got torch.float64"),
        ({"y": np.zeros((30, 1), int)}, r"y of .*npz must have shape \(nodes,\) = \(30,\), got \(30, 1\)"),
        ({"y": np.zeros(29, int)}, r"y of .*npz must have shape \(nodes,\) = \(30,\), got \(29,\)"),
        (
            {"x": np.full((30, 4), np.nan)},
            r"x of .*npz must be finite, got 120 of 120 numbers that are not, the first nan at \[0, 0\]\.",
        ),
        ({"x": np.zeros(30)}, r"x must have shape \(nodes, features\), got \(30,\)"),
        ({"edge_index": np.zeros((2, 3))}, r"edge_index of graphs\[0\] must hold integers"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_a_sentence(tmp_path, wrong, message):
    np.savez(tmp_path / "wrong.npz", **{**tree(30, 0), **wrong})
    with pytest.raises((TypeError, ValueError), match=message):
        main(["--graph", str(tmp_path / "wrong.npz"), "--out", str(tmp_path), "--epochs", "2"])


def test_a_tree_has_every_edge_twice():
    _, edge_index, y = tree(50, 0).values()
    assert edge_index.shape == (2, 98)
    assert torch.equal(edge_index[:, :49], edge_index[:, 49:].flip(0))
    within = edge_index[:, (edge_index > 0).all(0)]  # the root's branches are told apart below it
    assert torch.equal(y[within[0]], y[within[1]])


def test_a_file_without_features_is_named_with_what_it_holds(tmp_path):
    np.savez(tmp_path / "frame.npz", features=np.zeros((30, 4)), edge_index=np.zeros((2, 0), int))
    with pytest.raises(ValueError, match=r"frame\.npz must hold x and edge_index, got \['features', 'edge_index'\]\.$"):
        read(tmp_path / "frame.npz")
