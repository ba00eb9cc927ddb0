"""Characters: bits count what the grammar leaves to chance, bfloat16 is another run, and the picture is drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments import characters

TOY = [
    "--epochs",
    "1",
    "--hidden",
    "8",
    "--heads",
    "2",
    "--texts",
    "40",
    "--tests",
    "10",
    "--length",
    "8",
    "--seeds",
    "1",
]
DATA = characters.load("brackets", None, characters.Settings(texts=4, tests=100, length=12), 0)


def test_a_model_that_knows_nothing_needs_two_bits() -> None:
    class Even(nn.Module):
        def forward(self, texts: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*texts.shape, 4)

    found = characters.test(characters.Reader(Even(), bfloat16=False), DATA)
    assert found["bits"] == pytest.approx(2.0)
    assert found["above the entropy"] == pytest.approx(2.0 - DATA.chance)


def test_seeds_draw_other_texts_and_no_part_is_drawn_twice() -> None:
    assert not torch.equal(DATA.val, DATA.test)
    assert not torch.equal(
        DATA.val, characters.load("", None, characters.Settings(tests=100, length=12, texts=4), 1).val
    )


@pytest.mark.parametrize("kind", ["hyperbolic", "flat"])
def test_bfloat16_is_near_and_not_the_same(kind: str) -> None:
    found = []
    for model in (kind, f"{kind}-bfloat16"):
        torch.manual_seed(0)
        found.append(characters.bits(characters.build(model, characters.Settings(length=12), DATA).eval(), DATA.val))
    assert found[0] != found[1]
    assert math.isclose(*found, rel_tol=0.01)


def test_every_model_is_drawn(tmp_path: Path) -> None:
    assert characters.main([*TOY, "--quiet", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "table.json").read_text())["models"].keys() == characters.MODELS.keys()
    assert (tmp_path / "loss.png").stat().st_size > 10_000
