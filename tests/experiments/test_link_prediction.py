"""Link prediction: the split, the scores of pairs, and a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import link_prediction
from experiments.link_prediction import MODELS, Linker, Twin, main, numbered, split, strangers, train, tree
from holonomy.models import HGCN


def as_set(pairs: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(sorted(pair)) for pair in pairs.T.tolist()}


def test_the_split_hides_edges_and_draws_pairs_that_are_none() -> None:
    _, edges = tree(nodes=200)
    parts = split(edges, 200, 0)
    true = [as_set(parts[name][0]) for name in ("train", "val", "test")]
    assert set.union(*true) == as_set(edges)
    assert [len(part) for part in true] == [171, 9, 19]
    for positive, negative in parts.values():
        assert negative.shape == positive.shape
        assert not as_set(negative) & as_set(edges)
        assert (negative[0] != negative[1]).all()


def test_strangers_are_drawn_from_all_pairs() -> None:
    edges = torch.tensor([[0, 2], [1, 1]])
    found = strangers(numbered(edges, 4), 4, 400, torch.Generator().manual_seed(0))
    assert found.shape == (2, 400)
    assert as_set(found) == {(0, 2), (0, 3), (1, 3), (2, 3)}


def test_hidden_edges_are_drawn_as_negatives_of_training_as_often_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    x, edges = tree(nodes=12)
    hidden = as_set(edges) - as_set(split(edges, 12, 0)["train"][0])
    drawn: list[tuple[int, ...]] = []

    def kept(*asked: Any) -> torch.Tensor:
        found = strangers(*asked)
        drawn.extend(as_set(found))
        return found

    monkeypatch.setattr(link_prediction, "strangers", kept)
    train("mlp", x, edges, 0, 0.01, 0.0, 60, 60)
    assert hidden <= set(drawn)
    assert not set(drawn) & (as_set(edges) - hidden)


def test_flat_scores_against_a_loop() -> None:
    torch.manual_seed(0)
    x, edges = tree(nodes=30)
    both, pairs = torch.cat([edges, edges.flip(0)], 1), torch.randint(30, (2, 12))
    for model in ("gcn", "sage", "gcn-bias", "gat-bias"):
        network = Linker(model, 11, 0.0).eval()
        places = network.encoder(x, both)
        for score, (a, b) in zip(network(x, both, pairs), pairs.T.tolist(), strict=True):
            if not model.endswith("-bias"):
                wanted = 2.0 - (places[a] - places[b]).square().sum()
            else:
                wanted = 2.0 + places[a, 0] + places[b, 0] - (places[a, 1:] - places[b, 1:]).square().sum()
            torch.testing.assert_close(score, wanted)


def test_the_flat_twin_is_hgcn_where_space_is_nearly_flat() -> None:
    torch.manual_seed(0)
    x, edges = tree(nodes=30)
    both = torch.cat([edges, edges.flip(0)], 1)
    curved, flat = HGCN(11, 16, curvature=-1e-8).double(), Twin(11, 16, 16, dropout=0.0).double()
    with torch.no_grad():
        for convolution, linear in zip(curved.convolutions, (flat.first, flat.last), strict=True):
            convolution.linear.linear.weight.copy_(linear.weight)
            convolution.bias.copy_(linear.bias)
    points = curved(x.double(), both)
    torch.testing.assert_close(points[:, 1:], flat(x.double(), both), rtol=1e-5, atol=1e-5)


def test_every_parameter_is_trained() -> None:
    x, edges = tree(nodes=30)
    both = torch.cat([edges, edges.flip(0)], 1)
    for model in MODELS[:-1]:
        network = Linker(model, 11, 0.0)
        network(x, both, edges).square().sum().backward()
        idle = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
        assert not idle, (model, idle)


def test_common_neighbours_are_counted() -> None:
    # Two triangles that share an edge: the hidden pairs of a clique share neighbours, strangers do not.
    torch.manual_seed(0)
    block = torch.combinations(torch.arange(8)).T
    edges = torch.cat([block, block + 8], 1)
    found = train("common", torch.zeros(16, 3), edges, 0, 0.01, 0.0, 1, 1)
    assert found["test"]["auc"] == 1.0


def test_a_run_leaves_its_table_and_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--seeds", "2", "--epochs", "3", "--threads", "1", "--quiet", "--models", "lgcn", "gcn-bias", "common"]
    words += ["--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(tmp_path / "links.json")]) == 0
    said = capsys.readouterr().out
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out == said
    rows = json.loads((tmp_path / "links.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["lgcn", "gcn-bias", "common"]
    # No tree has two nodes that are neighbours and share one.
    assert rows[2]["summary"]["auc"]["mean"] <= 0.5
    assert main([*words, "--dataset", "cora", "--overwrite"]) == 2
    assert (tmp_path / "run" / "results.json").exists()  # the old run
    assert main(["--rates", "0.01", "-1", "--out", str(tmp_path / "other")]) == 2
    assert main(["--dropouts", "2", "--out", str(tmp_path / "other")]) == 2


def test_rates_that_differ_in_the_seventh_digit_are_different_parts(tmp_path: Path) -> None:
    words = ["--seeds", "1", "--epochs", "1", "--threads", "1", "--quiet", "--models", "twin", "--dropouts", "0"]
    words += ["--out", str(tmp_path / "run")]
    assert main([*words, "--rates", "0.1234567"]) == 0
    assert main([*words, "--rates", "0.1234568", "--resume"]) == 0
    assert len(list((tmp_path / "run").glob("part-twin-*"))) == 2


def test_a_loss_that_is_none_ends_the_run_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--seeds", "1", "--epochs", "9", "--threads", "1", "--quiet", "--models", "twin", "--rates", "1e30"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 1
    assert "try a smaller learning rate" in capsys.readouterr().err


def test_training_ends_when_the_validation_pairs_stop_to_improve(monkeypatch: pytest.MonkeyPatch) -> None:
    x, edges = tree(nodes=60)
    scores = iter([0.5, 0.1, 0.7, 0.2, 0.6, 0.7])  # validation, and test where that improved
    monkeypatch.setattr(link_prediction, "measured", lambda *_: {"auc": next(scores)})
    found = train("mlp", x, edges, 0, 0.01, 0.0, 100, 10)
    assert (found["epoch"], found["test"]["auc"]) == (10, 0.2)
    assert next(scores, None) is None
