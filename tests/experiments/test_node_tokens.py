"""Node tokens: no label of a test node is read, every model answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments import node_tokens
from experiments.data import datasets
from experiments.engine.comparisons import fit
from experiments.node_tokens import MODELS, QUESTION, Settings, load, main

WORDS = ["--hidden", "8", "--layers", "1", "--identifier", "8", "--epochs", "2", "--seeds", "1", "--quiet"]


@pytest.fixture(autouse=True)
def _small_tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tree = datasets.sir_tree
    monkeypatch.setattr(datasets, "sir_tree", lambda **options: tree(60, **options))
    node_tokens._identifiers.cache_clear()
    yield
    node_tokens._identifiers.cache_clear()


@pytest.mark.parametrize("model", MODELS)
def test_the_labels_of_test_nodes_are_not_learnt_from(model: str) -> None:
    settings = Settings(hidden=8, layers=1, identifier=8, epochs=2)
    data = load("tree", None, settings, 0)
    y = data.graph.y.clone()
    y[data.graph.test] = 1 - y[data.graph.test]
    other = dataclasses.replace(data, graph=dataclasses.replace(data.graph, y=y))
    first, second = (fit(QUESTION, model, settings, one, 0) for one in (data, other))
    assert first["history"] == second["history"]
    assert first["scores"] != second["scores"]


def test_the_command_line_answers_with_every_model(tmp_path: Path) -> None:
    assert main([*WORDS, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "table.json").read_text())
    assert set(content["models"]) == set(MODELS)
    assert all(0 <= row["summary"]["test"]["mean"] <= 1 for row in content["models"].values())
    assert (tmp_path / "table.png").exists()


def test_sparse_features_are_made_dense_and_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, columns = torch.tensor([0, 2, 3, 4, 6]), torch.tensor([0, 1, 1, 0, 0, 1])
    x = datasets.sparse_rows(starts, columns, torch.ones(6), (4, 2))
    data = datasets.NodeData(
        "chameleon", x, torch.tensor([[0], [1]]), torch.tensor([0, 1, 0, 1]), *torch.tensor([[0], [1], [2]]),
        num_classes=2,
    )  # fmt: skip
    monkeypatch.setattr(datasets, "load", lambda *_, **__: data)
    got = load("chameleon", None, QUESTION.settings_for("chameleon", {"scale": 4.0}), 0).graph.x
    assert torch.equal(got, torch.tensor([[2.0, 2.0], [0.0, 4.0], [4.0, 0.0], [2.0, 2.0]]))
