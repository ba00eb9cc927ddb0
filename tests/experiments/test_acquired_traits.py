"""Acquired traits: the settings, its attack, and a run at toy size."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments import acquired_traits
from experiments.acquired_traits import CHOSEN, GRID, TITLES, attacked, data, main
from experiments.data.transfers import trees

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Linear(nn.Module):
    """Logits that are linear in a node's own features."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 3).double()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        return self.map(x)


def test_the_settings_are_those_that_validation_chose() -> None:
    content = json.loads((RESULTS / "demo_search.json").read_text())
    assert [tuple(point) for point in content["grid"]] == list(GRID)
    for model, row in content["models"].items():
        assert [tuple(one["settings"]) for one in row["rows"]] == list(GRID)
        best = max(row["rows"], key=lambda one: one["val"]["all"])
        assert tuple(best["settings"]) == CHOSEN[model]


def test_the_attack_finds_the_nearest_border_of_a_linear_model() -> None:
    torch.manual_seed(0)
    model: Any = Linear()
    x = torch.randn(6, 4, dtype=torch.float64)
    found = attacked(model, x, torch.empty(2, 0, dtype=torch.long), torch.arange(6))
    weight, scores = model.map.weight.detach(), model(x, torch.empty(2, 0)).detach()
    for node in range(6):
        top = int(scores[node].argmax())
        borders = [
            float((scores[node, top] - scores[node, k]) / (weight[top] - weight[k]).norm()) for k in {0, 1, 2} - {top}
        ]
        # No attack is nearer than the border, and this one is not much farther.
        assert min(borders) * (1 - 1e-6) <= float(found[node]) <= min(borders) * 1.3


@pytest.mark.slow
def test_a_run_leaves_tables_and_pictures_and_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquired_traits, "attacked", partial(attacked, starts=1, steps=8))
    # Trees so small that certificates, of all species but the eight sources, take no minute.
    monkeypatch.setattr(acquired_traits, "trees", partial(trees, nodes=14))
    monkeypatch.setattr(acquired_traits, "data", cache(data.__wrapped__))
    words = ["--seeds", "1", "--steps", "6", "--threads", "1", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(tmp_path / "result.json")]) == 0
    said = capsys.readouterr().out
    for title in TITLES.values():
        assert title in said
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out == said
    content = json.loads((tmp_path / "result.json").read_text())
    proved = content["certificate"]
    assert len(proved["radii"]) == len(proved["attacks"]) == 6
    # A certificate that an attack broke would be none.
    assert all(0 < radius <= attack for radius, attack in zip(proved["radii"], proved["attacks"], strict=True))
    assert (tmp_path / "run" / "table.png").read_bytes().startswith(b"\x89PNG")
    assert main(["--device", "meta", "--out", str(tmp_path / "other")]) == 2
