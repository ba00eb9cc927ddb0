"""Chains: the question is the one that is meant, and the command line answers it with every model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.long_range_chains import MODELS, QUESTION, Settings, build, load, main

SMALL = Settings(chains=4, length=5, test_length=12, hidden=16, heads=2, batch=2, epochs=2)
WORDS = [
    "--chains", "4", "--length", "5", "--test-length", "12", "--hidden", "8", "--heads", "2", "--batch", "2",
    "--epochs", "2", "--seeds", "1", "--quiet",
]  # fmt: skip


def test_training_validation_and_test_chains_are_drawn_apart() -> None:
    data = load("chains", None, Settings(chains=40), 0)
    labels = [part.y.reshape(40, -1)[:, 0] for part in (data.train, data.val, data.test)]
    assert not any(torch.equal(labels[a], labels[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert (data.train.nodes == 20).all()
    assert (data.test.nodes == 200).all()
    assert not torch.equal(load("chains", None, Settings(chains=40), 1).train.y, data.train.y)


@pytest.mark.parametrize("model", MODELS)
def test_a_bit_reaches_the_other_end_where_the_model_reaches_everywhere(model: str) -> None:
    """Flipping the class at the first node changes the last node's logits, or cannot."""
    torch.manual_seed(0)
    data = load("chains", None, SMALL, 0)
    network = build(model, SMALL, data).eval()
    part = data.test.take(torch.tensor([0]))
    with torch.no_grad():
        before = network(**part.inputs())
        after = network(**part.inputs() | {"x": part.x.flip(1)})
    changed = (before - after).abs().amax(dim=1) > 0
    assert changed[0]
    # Four message-passing layers; two local layers of second order: an edge reads its ends.
    assert bool(changed[-1]) == (model in {"hot", "hot-performer", "ign", "ign-means"})


def test_the_command_line_answers_with_every_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "table.json").read_text())
    assert set(content["models"]) == set(MODELS)
    for row in content["models"].values():
        assert set(row["summary"]) == {"micro F1", "macro F1", "micro F1 at training length"}
    assert {path.name for path in tmp_path.glob("*.png")} == {"table.png", "training.png", "distance.png"}
    assert "GIN" in capsys.readouterr().out


def test_message_passing_knows_the_near_nodes_only(tmp_path: Path) -> None:
    words = ["--models", "gin", "--seeds", "1", "--no-pictures", "--quiet", "--out", str(tmp_path)]
    assert main([*words, "--test-length", "40", "--epochs", "15"]) == 0
    scores = json.loads((tmp_path / "table.json").read_text())["models"]["gin"]["summary"]
    # Four of 40 nodes, and half of the others by chance; chains of 20 nodes: 4 and half of 16.
    assert scores["micro F1"]["mean"] == pytest.approx(0.5 + 0.5 * 5 / 40, abs=0.02)
    assert scores["micro F1 at training length"]["mean"] == pytest.approx(0.5 + 0.5 * 5 / 20, abs=0.02)


def test_the_help_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert QUESTION.text.splitlines()[0] in said
    assert "--test-length" in said
