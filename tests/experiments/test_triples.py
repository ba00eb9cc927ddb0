"""Triples: the labels are right, the models are of one size, the times are drawn."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from experiments.triples import MODELS, NO_LABEL, TASKS, Settings, build, load, loss, main
from experiments.triples import test as measured

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


@pytest.mark.parametrize("dataset", TASKS)
def test_blanks_have_no_label_and_take_no_part(dataset: str) -> None:
    settings = Settings(tokens=9, blanks=4, modulus=7, pool=7, sequences=50, tests=20)
    data = load(dataset, None, settings, 0)
    assert torch.equal(data.train.x == 7, data.train.y == NO_LABEL)
    assert data.train.x.max() < data.kinds == 8
    assert ((data.train.x == 7).sum(1) == 4).all()
    assert (data.train.x[:, :5] == 7).any(), "blanks lie at the end"
    for x, y in zip(data.train.x, data.train.y, strict=True):
        assert torch.equal(y[x < 7], TASKS[dataset](x[x < 7][None], 7)[0])
    with pytest.raises(ValueError, match=r"--blanks must lie in 0 \.\. 8"):
        load(dataset, None, Settings(tokens=9, blanks=9), 0)


def test_what_is_said_of_blanks_does_not_count() -> None:
    settings = Settings(tokens=6, blanks=2, modulus=7, pool=7, sequences=8, tests=10)
    data = load("match3", None, settings, 0)

    class Always(torch.nn.Module):
        """Says 1 of every residue, and something of blanks."""

        def __init__(self, of_blanks: float) -> None:
            super().__init__()
            self.of_blanks = of_blanks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.zeros(x.shape), torch.where(x == 7, self.of_blanks, 2.0)], -1)

    first, second = (measured(Always(value), data) for value in (-3.0, 5.0))
    right = (data.test.y == 1).sum() / 40
    assert first == second
    assert first["accuracy"] == pytest.approx(right.item())
    assert first["commonest label"] == pytest.approx(max(right.item(), 1 - right.item()))
    chosen = torch.arange(8)
    assert torch.equal(loss(Always(-3.0), data, chosen), loss(Always(5.0), data, chosen))


def test_distinct_steps_lead_to_tokens_that_differ() -> None:
    """After a layer equal tokens are still equal but for rounding: none of 12 copies of 8 residues is met twice."""
    settings = Settings(tokens=12, pool=8, modulus=37, sequences=40, tests=2, hidden=32)
    data = load("match3", None, settings, 0)
    network = build("distinct", settings, data)
    seen: list[torch.Tensor] = []
    network.encoder.layers[1].router.register_forward_hook(lambda module, inputs, result: seen.append(result[0]))
    network(data.train.x)
    for x, rows in zip(data.train.x.tolist(), seen[0].tolist(), strict=True):
        for row in rows:
            reached = [x[j] for j in row if j >= 0]
            assert sorted(reached) == sorted(set(x))


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
