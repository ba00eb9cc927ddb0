"""Triples: the labels are right, the models are of one size, the times are drawn."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from examples.triples import MODELS, TASKS, Settings, build, load, main

WORDS = ["--hidden", "16", "--heads", "2", "--sequences", "300", "--tests", "60", "--quiet", "--seeds", "1"]


def test_labels_are_what_loops_say() -> None:
    x = torch.randint(7, (20, 5), generator=torch.Generator().manual_seed(0))
    y = {name: task(x, 7) for name, task in TASKS.items()}
    for s, row in enumerate(x.tolist()):
        for i, own in enumerate(row):
            assert y["match3"][s, i] == any((own + a + b) % 7 == 0 for a, b in product(row, row))
            assert y["sorting"][s, i] == sum(other < own for other in row)
            assert y["parity"][s, i] == sum(other % 2 for other in row) % 2


@pytest.mark.parametrize("layers", [2, 4])
def test_models_have_equally_many_parameters(layers: int) -> None:
    settings = Settings(layers=layers, sequences=2, tests=2)
    data = load("match3", None, settings, 0)
    sizes = [sum(p.numel() for p in build(model, settings, data).parameters()) for model in MODELS]
    assert max(sizes) < 1.01 * min(sizes)


def test_seeds_draw_other_sequences_and_the_same_ones_again() -> None:
    settings = Settings(sequences=4, tests=4)
    first, again, other = (load("parity", None, settings, seed) for seed in (0, 0, 1))
    assert torch.equal(first.train.x, again.train.x)
    assert not torch.equal(first.train.x, other.train.x)
    assert not torch.equal(first.val.x, first.test.x)


def test_triples_are_learned_where_pairs_are_not(tmp_path: Path) -> None:
    """A small modulus, few tokens: minutes of the real run in seconds."""
    words = [*WORDS, "--sequences", "4000", "--tokens", "5", "--modulus", "13", "--pool", "4"]
    words += ["--epochs", "14", "--lr", "0.01", "--hidden", "24", "--models", "simplicial", "pairwise"]
    assert main([*words, "--out", str(tmp_path), "--no-pictures"]) == 0
    rows = json.loads((tmp_path / "table.json").read_text())["models"]
    right = {model: row["summary"]["accuracy"]["mean"] for model, row in rows.items()}
    assert right["simplicial"] > 0.95
    assert right["simplicial"] > right["pairwise"] + 0.02


def test_times_are_drawn(tmp_path: Path) -> None:
    assert main([*WORDS, "--epochs", "1", "--dataset", "sorting", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "time.png").stat().st_size > 0
