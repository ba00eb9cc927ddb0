"""Label trees: examples of leaves, frozen prototypes, scores against a loop, and a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.label_trees import MODELS, Hyperbolic, labelled, main, measured, network, placed, train
from experiments.tree_maps import HyperbolicMap
from holonomy.manifolds import LorentzEmbedding


def test_classes_are_the_leaves_and_near_ones_have_near_means() -> None:
    data = labelled(40, 3)
    beside = (data.hops == 1).sum(1)
    assert data.leaves.tolist() == [node for node in range(1, 40) if beside[node] == 1]
    x, y = data.parts["train"]
    means = torch.stack([x[y == kind].mean(0) for kind in range(len(data.leaves))])
    above = torch.triu_indices(len(means), len(means), 1)
    pair = torch.stack([torch.cdist(means, means)[*above], data.between[*above]])
    assert torch.corrcoef(pair)[0, 1] > 0.4


def test_scores_against_a_loop() -> None:
    torch.manual_seed(0)
    logits, truth = torch.randn(50, 6), torch.randint(6, (50,))
    between = torch.randint(1, 9, (6, 6)).float()
    between = (between + between.T).fill_diagonal_(0)
    found, far, least = measured(logits, truth, between), [], []
    for row, true in zip(logits.softmax(1).tolist(), truth.tolist(), strict=True):
        far.append(float(between[true, row.index(max(row))]))
        expected = [sum(p * float(between[k, c]) for k, p in enumerate(row)) for c in range(6)]
        least.append(float(between[true, expected.index(min(expected))]))
    wrong = [distance for distance in far if distance]
    assert found["accuracy"] == pytest.approx(1 - len(wrong) / 50)
    assert found["mistakes"] == pytest.approx(sum(wrong) / len(wrong))
    assert found["distance"] == pytest.approx(sum(far) / 50)
    assert found["least"] == pytest.approx(sum(least) / 50)
    assert measured(torch.eye(6), torch.arange(6), between) == {
        "accuracy": 1.0,
        "mistakes": 0.0,
        "distance": 0.0,
        "least": 0.0,
    }


def test_prototypes_stand_as_far_apart_as_their_classes_and_stay() -> None:
    torch.manual_seed(0)
    data = labelled(20, 0)
    space, error = placed("hyperbolic", data, 3, 150)
    assert error < 0.15
    assert isinstance(space, HyperbolicMap)
    decoder = Hyperbolic(space.points, data.leaves)
    points = decoder.head.prototypes
    assert isinstance(points, LorentzEmbedding)
    found = points.manifold.cdist(points(), points())
    apart = ~torch.eye(len(found), dtype=torch.bool)
    assert (found / data.between - 1)[apart].abs().mean() < 0.2
    # A point on a prototype is of its class; only the scale is learned.
    assert decoder(points.manifold.logmap0(points())[:, 1:]).argmax(1).tolist() == list(range(len(found)))
    assert [name for name, p in decoder.named_parameters() if p.requires_grad] == ["head.log_scale"]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns(model: str) -> None:
    data = labelled(12, 1)
    record = train(model, data, 2, 0.03, 40, 0)
    assert record["accuracy"] > 2 / len(data.leaves)
    net, _ = network(model, data, 2, 1)
    net(data.parts["val"][0]).square().sum().backward()
    assert not [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None]


def test_a_run_leaves_its_table_and_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "10", "--dims", "2", "--seeds", "2", "--steps", "4", "--threads", "1", "--quiet"]
    words += ["--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(tmp_path / "labels.json")]) == 0
    said = capsys.readouterr().out
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out == said
    rows = json.loads((tmp_path / "labels.json").read_text())["rows"]
    assert [(row["model"], row["dim"]) for row in rows] == [*((model, 2) for model in MODELS[:-1]), ("one-hot", 0)]
    for row in rows:
        assert row["seeds"][0]["val"] >= 0
    assert main([*words, "--dims", "1", "--overwrite"]) == 2
    assert "--dims must be at least 2" in capsys.readouterr().err
