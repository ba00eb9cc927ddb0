"""Molecules in colours: equal sizes, one encoding for all runs, parts left out are left out, errors in their unit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experiments import molecules
from experiments.data import encoded_graphs
from experiments.engine import comparisons
from experiments.molecules import MODELS, OPTIONS, QUESTION, Settings, build, errors, load, main

REAL = Path(__file__).parents[3] / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real data are not beside the repository")
SMALL = Settings(train=8, tests=4, budget=0, hidden=16, heads=2, layers=2, walk_features=4, steps=6)
WORDS = [
    "--train", "8", "--tests", "4", "--budget", "0", "--hidden", "8", "--heads", "2", "--layers", "1", "--batch", "4",
    "--epochs", "2", "--walk-features", "4", "--steps", "6", "--seeds", "1", "--quiet",
]  # fmt: skip


@pytest.mark.parametrize("change", [{}, {"budget": 500000, "layers": 10}])
def test_all_models_have_as_many_parameters(change: dict[str, int]) -> None:
    settings = dataclasses.replace(Settings(), **{**change, "train": 8, "tests": 4})
    data = load("generated", None, settings, 0)
    counts = [sum(p.numel() for p in build(model, settings, data).parameters()) for model in MODELS]
    assert max(counts) <= settings.budget
    assert min(counts) >= 0.9 * settings.budget


def test_pairs_are_encoded_once_for_all_models_and_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    molecules._encoded.cache_clear()
    calls: list[int] = []

    def counted(edge_index: Tensor, n: int, steps: int) -> Tensor:
        calls.append(n)
        return walks(edge_index, n, steps)

    walks = encoded_graphs.random_walk_encoding
    monkeypatch.setattr(encoded_graphs, "random_walk_encoding", counted)
    words = [*WORDS, "--models", "csa", "gin", "--seeds", "2", "--no-pictures", "--out", str(tmp_path)]
    assert main(words) == 0
    assert len(calls) == 8 + 4 + 4


def test_errors_are_in_the_unit_of_the_property() -> None:
    data = load("generated", None, SMALL, 0)
    raw = data.mean + data.deviation * data.graphs.graphs.y[data.test]

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entry = nn.Linear(4, 1)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
            return torch.zeros(int(batch.max()) + 1, 1)

    found = errors(Mean(), data, data.test)
    assert found["MAE"] == pytest.approx((raw - data.mean).abs().mean().item(), rel=1e-5)
    assert found["RMSE"] == pytest.approx((raw - data.mean).square().mean().sqrt().item(), rel=1e-5)
    assert molecules.validate(Mean(), data) == -errors(Mean(), data, data.val)["MAE"]
    esol = dataclasses.replace(data, metric="RMSE")
    assert molecules.validate(Mean(), esol) == -errors(Mean(), data, data.val)["RMSE"]
    # Who always answers with the mean has an absolute and a squared error of the standardised property.
    y = data.graphs.graphs.y[data.train[:3]]
    assert molecules.loss(Mean(), data, torch.arange(3)).item() == pytest.approx(y.abs().mean().item())
    assert molecules.loss(Mean(), esol, torch.arange(3)).item() == pytest.approx(y.square().mean().item())


@pytest.mark.parametrize("model", OPTIONS)
def test_what_is_left_out_is_left_out(model: str) -> None:
    """Colours differ within a head, mono filters do not; each answer depends on what its model may read, only."""
    torch.manual_seed(0)
    data = load("generated", None, SMALL, 0)
    network = build(model, SMALL, data).eval()
    inputs, _ = encoded_graphs.arguments(network, data.graphs, data.test[:1])
    with torch.no_grad():
        heads = {"csa-one-head": 1, "mono-one-head": 1, "mono-all-heads": 16}.get(model, 2)
        first = network.attention_maps(**inputs)[0].unflatten(-1, (heads, -1))
        assert torch.allclose(first, first[..., :1]) == model.startswith("mono")
        assert not torch.allclose(first, first[..., :1, :1]) or heads == 1
        before = network(**inputs)
        other = inputs["edge_attr"].flip(0)
        assert not torch.equal(inputs["edge_attr"], other)
        assert not torch.allclose(network(**{**inputs, "edge_attr": other}), before)
    assert all(layer.attention.edge_values != model.endswith("no-values") for layer in network.layers)
    read = {"csa-no-pairs": [], "csa-distances": ["distances"], "csa-rings": ["walks", "related"]}.get(model, ["walks"])
    assert encoded_graphs.read_by(network) == read


def test_the_command_line_answers_and_goes_on(tmp_path: Path) -> None:
    words = [*WORDS, "--models", "csa-rings", "mono", "gin"]
    assert main([*words, "--out", str(tmp_path / "whole"), "--epochs", "3"]) == 0
    content = json.loads((tmp_path / "whole" / "table.json").read_text())
    assert set(content["models"]) == {"csa-rings", "mono", "gin"}
    assert content["score"] == "MAE"
    assert (tmp_path / "whole" / "predictions.png").stat().st_size > 0

    # Stopped in the third epoch of the first model: what follows is the same to the bit.
    calls = iter(range(100))

    def stop(network: nn.Module, data: molecules.Data) -> float:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return molecules.validate(network, data)

    words += ["--epochs", "3", "--no-pictures", "--checkpoint-every", "1", "--out", str(tmp_path / "halves")]
    assert comparisons.main(dataclasses.replace(QUESTION, validate=stop), words) == 130
    assert main([*words, "--resume"]) == 0
    resumed = json.loads((tmp_path / "halves" / "table.json").read_text())
    for model, row in content["models"].items():
        assert resumed["models"][model]["scores"] == row["scores"]
        assert resumed["models"][model]["history"] == row["history"]


def test_a_budget_that_no_model_meets_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--budget", "10", "--models", "csa", "--out", str(tmp_path)]) == 2
    assert "--budget must be at least" in capsys.readouterr().err


@needs_real
def test_esol_takes_another_split_for_each_seed() -> None:
    molecules._encoded.cache_clear()
    settings = dataclasses.replace(SMALL, train=20, tests=5)
    data = [load("esol", REAL, settings, seed) for seed in range(4)]
    assert [len(part) for part in (data[0].train, data[0].val, data[0].test)] == [20, 5, 5]
    y = [one.mean + one.deviation * one.graphs.graphs.y[one.train][:, 0] for one in data]
    assert torch.allclose(y[0], y[3])
    assert not torch.allclose(y[0], y[1])
    assert {one.metric for one in data} == {"RMSE"}
    for one in data:
        parts = [set(part.tolist()) for part in (one.train, one.val, one.test)]
        assert len(set.union(*parts)) == 30
        assert one.graphs.graphs.y[one.train].mean().item() == pytest.approx(0, abs=1e-6)
    molecules._encoded.cache_clear()


@needs_real
def test_the_first_molecules_of_zinc_are_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    molecules._encoded.cache_clear()
    assert main([*WORDS, "--dataset", "zinc", "--out", str(tmp_path)]) == 2
    assert "say where they lie with --data FOLDER" in capsys.readouterr().err
    words = [*WORDS, "--dataset", "zinc", "--data", str(REAL), "--models", "csa", "--no-pictures"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    data = load("zinc", REAL, dataclasses.replace(SMALL, tests=3), 0)
    assert (len(data.train), len(data.val), len(data.test)) == (8, 3, 3)
    assert int(data.graphs.graphs.nodes[data.train[0]]) == 29
    molecules._encoded.cache_clear()
