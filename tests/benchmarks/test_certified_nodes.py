"""The attack on certified nodes goes through the model itself, and no certified ball holds what it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.certified_nodes import main, searched
from experiments.data import datasets
from experiments.engine.attacks import own_logits, smallest_attack
from experiments.engine.options import RefusedError
from holonomy.layers import GCN
from holonomy.models import Hypformer
from holonomy.theory import certified_radius
from holonomy.theory.affine.enclosure import Enclosure


def test_attacks_stay_outside_certified_balls() -> None:
    torch.manual_seed(2)
    encoder = GCN(3, 5, 6, layers=3, residual=True)
    model = Hypformer(3, 6, 2, layers=1, heads=2, graph_encoder=encoder).double().eval()
    x, edges = torch.randn(6, 3).double(), torch.tensor([[0, 1, 1, 2, 2, 3, 4], [1, 0, 2, 1, 3, 2, 4]])
    enclosure, node = Enclosure(model, x, edges), 2
    logits, change = own_logits(enclosure, node), torch.randn(4, 3).double()
    for one, found in zip(change, logits(change), strict=True):
        moved = x.clone()
        moved[node] += one
        torch.testing.assert_close(found, model(moved, edges)[node])
    generator = torch.Generator().manual_seed(0)
    radius = certified_radius(model, x, edges, torch.tensor([node])).item()
    attack = smallest_attack(logits, 3, int(enclosure.logits[node].argmax()), 12, generator).norm()
    assert 0 < radius < attack
    found = searched(enclosure, logits, node, radius, 40, generator)
    assert (found["violations"], found["points"]) == (0, 40 + 19 * 4)
    assert found["change"] >= 1
    # To first order both changes are one.
    assert searched(enclosure, logits, node, 1e-5, 40, generator)["change"] < 1.01


@pytest.mark.parametrize(("model", "dataset"), [("gcn", "tree"), ("hypformer", "cora/public")])
def test_a_run_of_another_model_or_graph_is_refused(model: str, dataset: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"model": model, "dataset": dataset, "settings": {}}))
    with pytest.raises(RefusedError, match=f"--run must be of hypformer on tree, got {model}"):
        main(["--run", str(tmp_path), "--out", str(tmp_path / "out.json")])


def test_nodes_are_those_of_the_split_that_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, folder: Path, **more: Any) -> None:
        raise RefusedError(f"{name} {more['protocol']} {more['seed']}")

    monkeypatch.setattr(datasets, "load", load)
    said = {"model": "hypformer", "dataset": "cora/public", "settings": {}}
    (tmp_path / "results.json").write_text(json.dumps(said))
    with pytest.raises(RefusedError, match="cora public 3"):
        main(["--run", str(tmp_path), "--dataset", "cora", "--seed", "3", "--out", str(tmp_path / "out.json")])
