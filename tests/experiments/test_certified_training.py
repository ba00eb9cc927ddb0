"""Training with certificates: smoothing of a half-space whose radii are known, and a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

from experiments.certified_training import ALPHA, main, smoothed
from experiments.data import datasets


def test_smoothing_of_a_half_space_is_as_known() -> None:
    torch.manual_seed(0)

    def logits(change: torch.Tensor, start: float) -> torch.Tensor:
        first = start + change[:, 0]
        return torch.stack([first, -first, first - 9], -1)

    far = smoothed(lambda change: logits(change, 5.0), 8, 0, 0.5, 400)
    # All draws agree five units away: the bound of the share is the root of alpha.
    assert far == pytest.approx(0.5 * stats.norm.ppf(ALPHA ** (1 / 300)))
    assert 0 < smoothed(lambda change: logits(change, 0.5), 8, 0, 0.5, 400) < 0.5
    assert smoothed(lambda change: logits(change, 5.0), 8, 1, 0.5, 400) < 0


def test_a_run_certifies_less_than_attacks_leave_and_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seeds", "1", "--epochs", "3", "--measured", "2", "--draws", "20", "--quiet", "--out", str(tmp_path)]
    assert main(words) == 0
    said = capsys.readouterr().out
    ways = json.loads((tmp_path / "results.json").read_text())["ways"]
    assert list(ways) == ["cross-entropy", "certificates too"]
    for way in ways.values():
        pairs = zip(way["means"]["certified"], way["means"]["attacked"], strict=True)
        assert all(certified <= attacked <= way["clean"] for certified, attacked in pairs)
    assert (tmp_path / "curves.png").stat().st_size > 0
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out == said
    assert main([*words, "--dataset", "cora", "--overwrite"]) == 2
    assert (tmp_path / "results.json").exists()  # the old run
    assert main(["--draws", "30", "--out", str(tmp_path / "other")]) == 2
    assert main(["--train-share", "0", "--out", str(tmp_path / "other")]) == 2
    assert main(["--epochs", "0", "--out", str(tmp_path / "other")]) == 2


def test_a_run_takes_sparse_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = datasets.prepared
    monkeypatch.setattr(datasets, "prepared", lambda *given: _sparse(dense(*given)))
    words = ["--seeds", "1", "--epochs", "3", "--measured", "1", "--draws", "8", "--quiet", "--out", str(tmp_path)]
    assert main(words) == 0


def _sparse(data: datasets.NodeData) -> datasets.NodeData:
    return replace(data, x=data.x.to_sparse_csr())
