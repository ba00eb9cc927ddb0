"""Stochastic blocks: the recipe's statistics, accuracy and loss balanced over classes, equal sizes, every model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import stochastic_blocks
from experiments.data import encoded_graphs
from experiments.engine.scores import balanced_accuracy
from experiments.stochastic_blocks import MODELS, Settings, build, cluster_graphs, generated, load, main, pattern_graphs

WORDS = [
    "--train", "4", "--tests", "2", "--budget", "0", "--hidden", "8", "--heads", "2", "--layers", "1", "--batch", "2",
    "--epochs", "2", "--walk-features", "4", "--steps", "3", "--seeds", "1", "--patterns", "2", "--quiet",
]  # fmt: skip


def density(graphs: list[tuple[np.ndarray, ...]], chosen: str) -> float:
    """Return the share of joined pairs of nodes among those of one class, or of two."""
    links = pairs = 0
    for _, label, joined in graphs:
        same = label[:, None] == label
        wanted = np.triu(same if chosen == "same" else ~same, k=1)
        links, pairs = links + int(joined[wanted].sum()), pairs + int(wanted.sum())
    return links / pairs


def test_blocks_are_joined_as_the_recipe_says() -> None:
    graphs = cluster_graphs(60, np.random.default_rng(0))
    assert density(graphs, "same") == pytest.approx(0.55, abs=0.01)
    assert density(graphs, "different") == pytest.approx(0.25, abs=0.01)
    sizes = np.concatenate([np.bincount(label, minlength=6) for _, label, _ in graphs])
    assert (sizes.min(), sizes.max()) == (5, 34)
    assert sizes.mean() == pytest.approx(19.5, abs=1.5)
    for signal, label, joined in graphs:
        # One node of each block says its number.
        assert sorted(signal[signal > 0]) == [1, 2, 3, 4, 5, 6]
        assert (signal[signal > 0] == label[signal > 0] + 1).all()
        assert (joined == joined.T).all()
        assert not joined.diagonal().any()


def test_a_pattern_is_hidden_as_the_recipe_says() -> None:
    graphs = pattern_graphs(60, 3, np.random.default_rng(0))
    hidden = {}
    across, within = [], []
    for number, (signal, label, joined) in enumerate(graphs):
        assert (joined == joined.T).all()
        assert not joined.diagonal().any()
        assert set(signal) <= {0, 1, 2}
        mine = label == 1
        across.append(joined[mine][:, ~mine])
        within.append(joined[~mine][:, ~mine])
        # Every third graph has the same pattern with the same signal.
        pattern = (joined[mine][:, mine], signal[mine])
        first = hidden.setdefault(number % 3, pattern)
        assert all((a == b).all() for a, b in zip(first, pattern, strict=True))
    assert np.concatenate([part.ravel() for part in across]).mean() == pytest.approx(0.5, abs=0.01)
    # Five blocks of 5 to 34 nodes: a pair is of one block with a chance between 1/5 and 1/3.
    assert 0.35 + 0.15 / 5 < np.concatenate([part.ravel() for part in within]).mean() < 0.35 + 0.15 / 3
    assert not all(np.array_equal(hidden[0][1], hidden[number][1]) for number in (1, 2))


@pytest.mark.parametrize(("dataset", "signals"), [("pattern", 3), ("cluster", 7)])
def test_drawn_graphs_list_both_directions_in_random_order(dataset: str, signals: int) -> None:
    graphs = generated(dataset, 5, 2, seed=1)
    assert graphs.x.shape[1] == signals
    assert (graphs.x.sum(dim=1) == 1).all()
    part = graphs.take(torch.tensor([3]))
    pairs = {tuple(pair) for pair in part.edge_index.T.tolist()}
    assert len(pairs) == part.edge_index.shape[1]
    assert {(b, a) for a, b in pairs} == pairs
    assert not torch.equal(part.y, part.y.sort().values)
    assert torch.equal(generated(dataset, 5, 2, seed=1).y, graphs.y)


def test_accuracy_counts_classes_alike() -> None:
    truth = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    assert balanced_accuracy(truth, truth) == 1.0
    # Who always says the most frequent class: one class of three.
    assert balanced_accuracy(torch.zeros(7, dtype=torch.int64), truth) == pytest.approx(1 / 3)
    said = torch.tensor([0, 0, 0, 1, 1, 0, 1])
    assert balanced_accuracy(said, truth) == pytest.approx((3 / 4 + 1 / 2 + 0) / 3)


def test_a_rare_class_weighs_more_in_the_loss() -> None:
    settings = Settings(train=3, tests=1, hidden=8, heads=2, layers=1, walk_features=4, steps=3, budget=0)
    data = load("pattern", None, settings, 0)
    torch.manual_seed(0)
    network = build("gcn", settings, data).eval()
    with torch.no_grad():
        logits, y = encoded_graphs.ask(network, data.graphs, data.train)
        chance = logits.log_softmax(dim=1)[torch.arange(len(y)), y]
        weight = torch.tensor([(y == 1).double().mean(), (y == 0).double().mean()])[y]
        wanted = -(weight * chance).sum() / weight.sum()
        assert weight[y == 1].mean() > weight[y == 0].mean()
        assert stochastic_blocks.loss(network, data, torch.arange(3)).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_all_models_have_as_many_parameters() -> None:
    settings = Settings(train=3, tests=1)
    for full in (settings, dataclasses.replace(settings, layers=6, budget=259000)):
        data = load("pattern", None, full, 0)
        counts = [sum(p.numel() for p in build(model, full, data).parameters()) for model in MODELS]
        assert max(counts) <= full.budget
        assert min(counts) >= 0.9 * full.budget


@pytest.mark.parametrize(("dataset", "models"), [("pattern", ["csa", "gcn"]), ("cluster", list(MODELS))])
def test_the_command_line_answers_with_every_model_and_goes_on(tmp_path: Path, dataset: str, models: list[str]) -> None:
    words = [*WORDS, "--dataset", dataset, "--models", *models, "--out", str(tmp_path)]
    assert main(words) == 0
    content = json.loads((tmp_path / "table.json").read_text())
    assert list(content["models"]) == models
    for row in content["models"].values():
        assert 0 <= row["summary"]["balanced accuracy"]["mean"] <= 1
        assert len(row["history"][0]["val"]) == 2
    # The curve over the epochs.
    assert (tmp_path / "training.png").stat().st_size > 0
    kept = tmp_path / f"csa-lr-{stochastic_blocks.QUESTION.settings_for(dataset).lr:g}" / "part-seed-0.json"
    before = kept.stat().st_mtime_ns
    assert main([*words, "--resume", "--models", "csa"]) == 0
    assert kept.stat().st_mtime_ns == before


def test_gin_gcn_and_gps_pass_messages() -> None:
    settings = Settings(train=2, tests=2)
    data = load("pattern", None, settings, 0)
    layers = {model: type(build(model, settings, data).layers[0]).__name__ for model in MODELS}
    assert {model: layers[model] for model in ("gin", "gcn", "gps")} == {
        "gin": "GINLayer", "gcn": "GCNLayer", "gps": "GPSLayer",
    }  # fmt: skip
    assert layers["csa"] == layers["mono"] != "GPSLayer"
