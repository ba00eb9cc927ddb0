"""Every example at toy size: it learns what chance does not know, writes what it found, and draws it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.__main__ import scripts
from tests.distributed.launch import launch


def certified_below_attacked(found: dict) -> bool:
    """No certificate is above what an attack leaves, and at radius zero both are the accuracy."""
    ways = [way for way in found.values() if isinstance(way, dict)]
    below = all(a <= b + 1e-6 for way in ways for a, b in zip(way["certified"], way["attacked"], strict=True))
    return len(ways) == 2 and below and all(abs(way["certified"][0] - way["clean"]) < 1e-6 for way in ways)


HERE = Path(__file__).parents[2] / "examples"
# What is typed, and what has to be true of the scores.
TOYS: dict[str, tuple[str, Callable[[dict], bool]]] = {
    "attention_maps": ("--steps 40", lambda found: found["right"] > 0.6 and found["weight on the answer"] > 0.3),
    "certified_nodes": ("--nodes 24 --epochs 6", certified_below_attacked),
    "chains": ("--steps 40 --length 40 --batch 8", lambda found: found["attention"] > 0.95 > found["message passing"]),
    "characters": ("--texts 60 --length 12 --width 8 --steps 40 --lr 0.01", lambda found: found["Hyperbolic"] < 1.9),
    "demo": ("--steps 2 --certified 3", lambda found: len(found["radii"]) == 3 and min(found["radii"]) > 0),
    "digits": ("--epochs 2 --width 16", lambda found: found["right"] > 0.3),
    "hyperedges": ("--epochs 8", lambda found: found["sets found"] > 0.5 + found["others taken for sets"]),
    "links": ("--nodes 200 --epochs 40", lambda found: found["auc"] > 0.75),
    "molecules": ("--molecules 300 --epochs 6", lambda found: found["error"] < 0.7 * found["error of the mean"]),
    "nodes": ("--nodes 400 --epochs 40", lambda found: found["right"] > 2 * found["largest community"]),
    "own_graph": ("--nodes 150 --epochs 20", lambda found: found["test"] > 0.4),
    "processes": ("--graphs 300 --epochs 4 --batch 20 --lr 0.01", lambda found: found["right"] > 0.6),
    "sets": ("--sets 200 --points 8 --epochs 4", lambda found: found["f1"] > 1.05 * found["f1 of joining all"]),
    "tree": ("--nodes 40 --steps 100", lambda found: found["hyperbolic"] < 0.8 * found["flat"]),
}


@pytest.mark.parametrize("name", TOYS)
def test_an_example_learns_and_leaves_numbers_and_a_picture(name: str, tmp_path: Path) -> None:
    words, holds = TOYS[name]
    found = importlib.import_module(f"examples.{name}").main([*words.split(), "--seed", "1", "--out", str(tmp_path)])
    assert holds(found), found
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text("utf-8")) == found
    pictures = [path.read_bytes() for path in tmp_path.glob("*.png")]
    assert len(pictures) == (name not in {"characters", "hyperedges", "own_graph", "processes"})
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


def test_every_example_is_short_is_run_and_is_shown() -> None:
    assert {f"examples.{name}" for name in TOYS} == scripts(HERE).keys()
    page = (HERE.parent / "docs" / "examples.md").read_text("utf-8")
    assert [name for name in TOYS if f"python -m examples.{name}`" not in page] == []
    lines = {name: len((HERE / f"{name}.py").read_text("utf-8").splitlines()) for name in TOYS}
    assert max(lines.values()) <= 120, lines


def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    options = ["--graphs", "60", "--epochs", "2", "--out", str(tmp_path)]
    one = importlib.import_module("examples.processes").main(options)
    launch(2, "examples.processes", options)
    two = json.loads((tmp_path / "processes.json").read_text("utf-8"))
    assert (two["processes"], len(two["losses"])) == (2, 4)
    assert two["losses"] == pytest.approx(one["losses"], rel=0, abs=1e-10)
    assert 1 < two["most nodes over mean"] < 1.1


def test_the_same_seed_gives_the_same_scores(tmp_path: Path) -> None:
    main = importlib.import_module("examples.nodes").main
    first, again, other = (
        main(["--nodes", "100", "--epochs", "3", "--seed", seed, "--out", str(tmp_path)]) for seed in "112"
    )
    assert first == again != other
