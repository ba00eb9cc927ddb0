"""Maps of attention: what is drawn is a distribution, channels differ, atoms stand where their distances want them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from experiments import attention_in_colors, molecules
from experiments.attention_in_colors import ATOMS, Attention, attention, diverse, layout, main, shares, spread
from experiments.engine import runs
from holonomy.layers import ring_membership, shortest_path_encoding

WORDS = [
    "--train", "8", "--tests", "4", "--budget", "0", "--hidden", "8", "--heads", "2", "--layers", "2", "--batch", "4",
    "--epochs", "1", "--walk-features", "4", "--steps", "6", "--quiet",
]  # fmt: skip


def example(maps: list[Tensor]) -> Attention:
    """A ring of six atoms with a tail of two."""
    one_way = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 6], [1, 2, 3, 4, 5, 0, 6, 7]])
    bonds = torch.cat([one_way, one_way.flip(0)], dim=1)
    hops, rings = shortest_path_encoding(bonds, 8, 8), ring_membership(bonds, 8, 18)
    none = torch.zeros(16, dtype=torch.int64)
    return Attention(torch.stack(maps), hops, rings, bonds, none, torch.zeros(8, dtype=torch.int64))


def rows(mask: Tensor) -> Tensor:
    return mask / mask.sum(dim=1, keepdim=True)


def maps() -> list[Tensor]:
    """Attention to oneself, to neighbours, to all, to what is far."""
    hops = example([torch.zeros(8, 8)]).hops
    return [rows((wanted).float()) for wanted in (hops == 0, hops == 1, hops >= 0, hops >= 3)]


def test_shares_say_where_the_attention_goes() -> None:
    itself, neighbours, everywhere, far = shares([example(maps()), example(maps())]).tolist()
    assert itself == pytest.approx([1, 0, 0, 0])
    assert neighbours == pytest.approx([0, 1, 0, 0])
    # An atom of the ring has 3 others of its ring beyond its neighbours, an atom of the tail none.
    assert everywhere == pytest.approx([1 / 8, 16 / 64, 6 * 3 / 64, (64 - 8 - 16 - 18) / 64])
    assert far[:2] == [0, 0]


def test_diverse_channels_are_the_different_ones_from_near_to_far() -> None:
    itself, neighbours, everywhere, far = maps()
    near = rows(neighbours + 0.01)
    seen = example([far, itself, near, neighbours, 0.9 * itself + 0.1 * everywhere])
    assert diverse([seen, seen], 3) == [1, 3, 0]
    assert diverse([seen], 1) == [1]
    assert diverse([seen], 99) == [1, 4, 3, 2, 0]


def test_drawn_atoms_are_far_apart() -> None:
    hops = example(maps()).hops
    assert spread(hops, 2) == [7, 3]
    assert len(set(spread(hops, 4))) == 4
    assert spread(hops[:1, :1], 4) == [0]


def test_a_path_is_straight_and_a_ring_round() -> None:
    steps = torch.arange(7)
    path = (steps[:, None] - steps).abs()
    assert torch.cdist(layout(path), layout(path)).numpy() == pytest.approx(path.numpy(), abs=0.02)
    ring = torch.minimum(path[:6, :6], 6 - path[:6, :6])
    places = layout(ring)
    radius = (places - places.mean(dim=0)).norm(dim=1)
    side = (places - places.roll(1, 0)).norm(dim=1)
    assert radius.tolist() == pytest.approx([radius.mean().item()] * 6, rel=1e-3)
    assert side.tolist() == pytest.approx([radius.mean().item() * 2 * math.sin(math.pi / 6)] * 6, rel=1e-3)
    assert layout(torch.zeros(1, 1)).isfinite().all()
    assert layout(torch.tensor([[0, 1], [1, 0]])).diff(dim=0).norm().item() == pytest.approx(1.0, rel=1e-3)


def test_maps_are_distributions_of_the_molecule_that_is_asked_for() -> None:
    settings = molecules.Settings(train=8, tests=4, budget=0, hidden=8, heads=2, layers=2, walk_features=4, steps=6)
    data = molecules.load("generated", None, settings, 0)
    network = molecules.build("csa-rings", settings, data)
    seen = attention(network, data, 2, 1)
    part = data.graphs.graphs.take(data.test[2:3])
    assert seen.maps.shape == (8, len(part.x), len(part.x))
    assert torch.allclose(seen.maps.sum(dim=-1), torch.ones(8, len(part.x)), atol=1e-5)
    assert set(zip(*(seen.hops == 1).nonzero().T.tolist(), strict=True)) == set(map(tuple, part.edge_index.T.tolist()))
    assert len(ATOMS["generated"]) == part.x.shape[1]
    assert not torch.allclose(seen.maps, attention(network, data, 2, 0).maps)


def test_atoms_of_every_set_of_molecules_have_names() -> None:
    assert ATOMS.keys() == molecules.QUESTION.datasets.keys()


def test_a_small_model_is_trained_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--out", str(tmp_path), "--channels", "2"]) == 0
    with Image.open(tmp_path / "channels.png") as picture:
        assert picture.size[0] > 1000
    content = json.loads((tmp_path / "channels.json").read_text())
    assert len(content["drawn"]) == 2
    assert content["command"].startswith("python -m experiments.attention_in_colors --train 8")
    assert [sum(row) for row in content["shares"]["channels"]] == pytest.approx([1.0] * 8, abs=1e-3)
    assert f"| {content['drawn'][0]} |" in capsys.readouterr().out


def test_the_model_of_a_run_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "--models", "csa", "gin", "--seeds", "1", "--no-pictures", "--out", str(tmp_path / "run")]
    assert molecules.main(words) == 0
    seen: list[list[Tensor]] = []

    def asked(*arguments: Any) -> attention_in_colors.Asked:
        found = real(*arguments)
        seen.append(list(found[0].state_dict().values()))
        return found

    real = attention_in_colors.asked
    monkeypatch.setattr(attention_in_colors, "asked", asked)
    folder = tmp_path / "run" / "csa-lr-0.002"
    assert main(["--run", str(folder), "--out", str(tmp_path / "out"), "--layer", "0", "--molecule", "1"]) == 0
    kept = runs.read_state(folder / "part-seed-0.model.pt")
    assert all(torch.equal(a, b) for a, b in zip(kept.values(), seen[0], strict=True))
    for words, sentence in (
        (["--run", str(tmp_path)], "--run must be the folder of one model of a run that is finished"),
        (["--run", str(tmp_path / "run" / "gin-lr-0.002")], "--run must hold a chromatic model, got 'gin'"),
        (["--run", str(folder), "--layer", "2"], "--layer must be one of 2 layers, got 2"),
        (["--run", str(folder), "--molecule", "4"], "--molecule must be less than the 4 test molecules, got 4"),
        (["--run", str(folder), "--channels", "0"], "--channels must be at least 1, got 0"),
    ):
        capsys.readouterr()
        assert main([*words, "--out", str(tmp_path / "other")]) == 2
        assert sentence in capsys.readouterr().err
