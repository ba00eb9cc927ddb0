"""Training with certificates: smoothing of a half-space whose radii are known, and a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import nn

from experiments.certified_training import ALPHA, main, smoothed


class Sign(nn.Module):
    """The class 0 where the first feature is positive, else 1."""

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.stack([x[:, 0], -x[:, 0], x[:, 0] - 9, x[:, 0] - 9], -1)


def test_smoothing_of_a_half_space_is_as_known() -> None:
    torch.manual_seed(0)
    x = torch.zeros(3, 8)
    x[:, 0] = torch.tensor([0.5, 5.0, 5.0])
    data = x, torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 0, 1])
    radii = smoothed(Sign(), data, torch.arange(3), 0.5, 400)
    # All draws agree five units away: the bound of the share is the root of alpha.
    assert radii[1].item() == pytest.approx(0.5 * stats.norm.ppf(ALPHA ** (1 / 300)))
    assert radii[2] < 0 < radii[0] < 0.5


def test_a_run_certifies_less_than_attacks_leave_and_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seeds", "1", "--nodes", "24", "--epochs", "6", "--draws", "20", "--quiet", "--out", str(tmp_path)]
    assert main(words) == 0
    said = capsys.readouterr().out
    ways = json.loads((tmp_path / "results.json").read_text())["ways"]
    assert list(ways) == ["cross-entropy", "certificates too"]
    for way in ways.values():
        pairs = zip(way["means"]["certified"], way["means"]["attacked"], strict=True)
        assert all(certified <= attacked <= way["clean"] for certified, attacked in pairs)
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out == said
    assert main(["--draws", "30", "--out", str(tmp_path / "other")]) == 2
