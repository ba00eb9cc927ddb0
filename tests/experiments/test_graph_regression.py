"""Molecules: the error is in the property's unit, every model answers, the real sets are taken in part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments import graph_regression
from experiments.graph_regression import (
    MODELS,
    Settings,
    attention_distances,
    build,
    error,
    load,
    main,
    token_distances,
    tokens_of,
)

REAL = Path(__file__).parents[3] / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real data are not beside the repository")
WORDS = [
    "--train", "12", "--tests", "6", "--hidden", "8", "--heads", "2", "--layers", "1", "--batch", "4", "--epochs", "1",
    "--identifier", "4", "--seeds", "1", "--quiet",
]  # fmt: skip


def test_the_error_is_in_the_unit_of_the_property() -> None:
    data = load("generated", None, Settings(train=50, tests=20), 0)
    raw = data.mean + data.deviation * data.test.y

    class Mean(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
            return torch.zeros(int(batch.max()) + 1, 1)

    assert error(Mean(), data, data.test) == pytest.approx((raw - data.mean).abs().mean().item(), rel=1e-5)


def test_a_tokenizer_gets_entries_whose_squares_have_mean_one_in_every_batch() -> None:
    settings = Settings(train=50, tests=20, hidden=8, heads=2, layers=1)
    data = load("generated", None, settings, 0)
    network = build("tokengt", settings, data)
    for chosen in (torch.arange(3), torch.arange(3, 50)):
        part = data.train.take(chosen)
        given = tokens_of(network, part)
        assert torch.allclose(given["x"], part.x * 2)
        assert torch.allclose(given["edge_attr"], part.edge_attr * 3**0.5)
        assert all(given[name] is getattr(part, name) for name in ("edge_index", "batch", "identifiers"))
    random = build("tokengt-orf", settings, data)
    assert tokens_of(random, part)["identifiers"] is None


def test_with_a_budget_all_models_are_of_one_size() -> None:
    settings = Settings(train=12, tests=6, budget=60000)
    data = load("generated", None, settings, 0)
    sizes = {model: sum(x.numel() for x in build(model, settings, data).parameters()) for model in MODELS}
    assert max(sizes.values()) <= settings.budget, sizes
    assert min(sizes.values()) >= 0.9 * settings.budget, sizes


def test_a_transformer_without_identifiers_sees_features_and_no_bonds() -> None:
    """Tokens of the same features in another order, at other nodes: the same answer; a TokenGT tells them apart."""
    torch.manual_seed(0)
    settings = Settings(train=12, tests=6, hidden=8, heads=2, layers=1, identifier=16)
    data = load("generated", None, settings, 0)
    part = data.test.take(torch.tensor([0]))
    elsewhere = {**part.inputs(), "edge_index": part.edge_index[:, torch.randperm(part.edge_index.shape[1])]}
    with torch.no_grad():
        for model, same in (("transformer", True), ("tokengt", False)):
            network = build(model, settings, data).eval()
            said = [network(**inputs) for inputs in (part.inputs(), elsewhere)]
            assert torch.allclose(*said, atol=1e-5) is same


@pytest.mark.parametrize("model", MODELS)
def test_a_molecule_does_not_see_its_batch_mates(model: str) -> None:
    torch.manual_seed(0)
    settings = Settings(train=12, tests=6, hidden=8, heads=2, layers=1, identifier=16)
    data = load("generated", None, settings, 0)
    network = build(model, settings, data).eval()
    with torch.no_grad():
        together = network(**data.test.take(torch.arange(3)).inputs())
        assert together.shape == (3, 1)
        if model.startswith("tokengt"):
            return  # its identifiers are drawn anew for each batch, or have free signs
        for number in range(3):
            alone = network(**data.test.take(torch.tensor([number])).inputs())
            assert torch.allclose(alone[0], together[number], atol=1e-5)


def test_tokens_are_as_far_apart_as_their_nodes() -> None:
    """A path 0 - 1 - 2 - 3: nodes, the edge (0, 1) and the edge (2, 3)."""
    path = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
    pairs = torch.tensor([[0, 0], [3, 3], [0, 1], [2, 3]])
    wanted = torch.tensor([[0, 3, 0.5, 2.5], [3, 0, 2.5, 0.5], [0.5, 2.5, 0.5, 2.0], [2.5, 0.5, 2.0, 0.5]])
    assert torch.equal(token_distances(pairs, path, 4), wanted)


@pytest.mark.parametrize("model", ["tokengt", "tokengt-orf"])
def test_attention_that_looks_everywhere_looks_over_the_mean_distance(model: str) -> None:
    settings = Settings(train=4, tests=2, hidden=8, heads=2, layers=2, identifier=4)
    data = load("generated", None, settings, 0)
    network = build(model, settings, data).eval()
    for name, value in network.named_parameters():
        if "attention" in name:
            nn.init.zeros_(value)
    wanted = []
    for number in range(2):
        part = data.test.take(torch.tensor([number]))
        loops = torch.arange(len(part.x)).expand(2, -1)
        pairs = torch.cat([loops, part.edge_index], dim=1).T
        wanted.append(token_distances(pairs, part.edge_index, len(part.x)).mean())
    with torch.no_grad():
        found = attention_distances(network, data.test)
    assert torch.allclose(found, torch.stack(wanted).mean().expand(2, 2), atol=1e-5)


def test_the_command_line_answers_with_every_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "table.json").read_text())
    assert set(content["models"]) == set(MODELS)
    assert all(row["summary"]["MAE"]["mean"] > 0 for row in content["models"].values())
    for model, row in content["models"].items():
        tokens = model in graph_regression.READS
        (distances,) = row["details"].values() if tokens else ([[0.5, 0.5]],)
        assert tokens or not row["details"]
        assert np.shape(distances) == (1, 2)
        assert np.min(distances) > 0
    assert {"predictions.png", "attention_distance.png"} <= {path.name for path in tmp_path.iterdir()}
    assert main([*WORDS, "--dataset", "zinc", "--out", str(tmp_path)]) == 2
    assert "say where they lie with --data FOLDER" in capsys.readouterr().err


@needs_real
def test_the_first_molecules_of_the_official_split_are_taken(tmp_path: Path) -> None:
    graph_regression._load.cache_clear()
    words = [*WORDS, "--dataset", "zinc", "--data", str(REAL), "--models", "gin", "--no-pictures"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    data = load("zinc", REAL, Settings(train=12, tests=0), 0)
    assert (len(data.train), len(data.val), len(data.test)) == (12, 1000, 1000)
    graph_regression._load.cache_clear()
