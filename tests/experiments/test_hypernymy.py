"""Hypernymy: the reduction, the split and its negatives, the energies against loops, and a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from experiments.hierarchy import Hierarchy, random_tree
from experiments.hypernymy import (
    CONSTANT,
    MODELS,
    RATES,
    Distances,
    FlatCones,
    Task,
    basic,
    corrupted,
    edges,
    loss,
    main,
    measured,
    network,
    split,
    train,
    without_roots,
)

TREE = without_roots(random_tree(40, children=3, seed=1))


def as_set(pairs: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(pair) for pair in pairs.T.tolist()}


def test_the_reduction_leaves_out_what_follows() -> None:
    """5 -> 4 -> 3 -> {1, 2} -> 0, with 5 -> 3 and 3 -> 0 stated, though they follow."""
    direct = torch.tensor([[1, 2, 3, 3, 4, 5, 5, 3], [0, 0, 1, 2, 3, 4, 3, 0]])
    whole = Hierarchy("diamond", direct, list("abcdef"))
    assert as_set(whole.closure[:, basic(whole)]) == {(1, 0), (2, 0), (3, 1), (3, 2), (4, 3), (5, 4)}


def test_roots_are_left_out_and_all_else_stays() -> None:
    whole = random_tree(30, seed=2)
    rest = without_roots(whole)
    assert rest.names == whole.names[1:]
    assert as_set(rest.closure + 1) == {pair for pair in as_set(whole.closure) if 0 not in pair}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_the_split_holds_no_pair_twice_and_learns_the_basic_ones(share: float) -> None:
    task, far = split(TREE, share, 3), int((~basic(TREE)).sum())
    known = as_set(task.known.closure)
    assert as_set(TREE.closure[:, basic(TREE)]) <= known
    assert len(known) == int(basic(TREE).sum()) + round(share * far)
    true = [as_set(pairs[:, truth]) for pairs, truth in (task.val, task.test)]
    assert not known & true[0]
    assert not true[1] & (known | true[0])
    assert [len(part) for part in true] == [int(0.5 * far) - int(0.45 * far), int(0.45 * far)]
    # Whatever the share, the same pairs measure.
    assert as_set(split(TREE, 0.1, 3).test[0]) == as_set(task.test[0])


def test_what_stands_beside_a_pair_shares_a_node_with_it_and_is_none() -> None:
    task = split(TREE, 0.0, 0)
    closure = as_set(TREE.closure)
    for pairs, truth in (task.val, task.test):
        none = as_set(pairs[:, ~truth])
        assert not none & closure
        assert all(child != parent for child, parent in none)
        assert 9 * int(truth.sum()) < int((~truth).sum()) <= 10 * int(truth.sum())
    others, _ = corrupted(TREE.closure[:, :7], TREE)
    assert (others[1, :5] == TREE.closure[1, :7]).all()
    assert (others[0, 5:] == TREE.closure[0, :7]).all()


def test_known_edges_answer_everything() -> None:
    assert edges(split(TREE, 0.0, 0)) == 1.0


def test_flat_cones_against_a_loop() -> None:
    points = 1 + torch.rand(12, 3)
    net = FlatCones(points)
    child, parent = torch.arange(6), torch.arange(6, 12)
    for found, y, x in zip(net(child, parent).tolist(), points[:6], points[6:], strict=True):
        cosine = float((y - x) @ x / ((y - x).norm() * x.norm()))
        aperture = math.asin(CONSTANT / float(x.norm()))
        assert found == pytest.approx(max(0.0, math.acos(cosine) - aperture), abs=1e-5)


def test_heights_make_balls_that_lie_in_each_other() -> None:
    net = Distances("euclidean-bias", 20, 4)
    with torch.no_grad():
        net.space.bias.normal_()
    child, parent = torch.arange(10), torch.arange(10, 20)
    places, heights = net.space.inner.points, net.space.bias[:, 0]
    wanted = (places[child] - places[parent]).norm(dim=1) + heights[parent] - heights[child] - net.offset
    torch.testing.assert_close(net(child, parent), wanted)


@pytest.mark.parametrize("model", ["cones", "order", "euclidean", "dot"])
def test_losses_against_a_loop(model: str) -> None:
    true, none, real = torch.rand(5), torch.rand(10, 5), torch.rand(10, 5) < 0.7
    terms = []
    for a in range(5):
        beside = [float(none[i, a]) for i in range(10) if real[i, a]]
        if model in {"cones", "order"}:
            margin = 0.01 if model == "cones" else 1.0
            terms.append(float(true[a]) + sum(max(0.0, margin - e) for e in beside))
        elif model == "euclidean":
            hit = math.exp(-float(true[a]))
            terms.append(-math.log(hit / (hit + sum(math.exp(-e) for e in beside))))
        else:
            terms.append(math.log1p(math.exp(float(true[a]))) + sum(math.log1p(math.exp(-e)) for e in beside))
    assert loss(model, true, none, real).item() == pytest.approx(sum(terms) / 5, rel=1e-5)


@pytest.mark.parametrize("model", MODELS[:-1])
def test_every_model_learns_a_small_tree(model: str) -> None:
    """Asked what it learns from: all pairs, and ten beside each."""
    torch.manual_seed(0)
    others, none = corrupted(TREE.closure, TREE)
    pairs = torch.cat([TREE.closure, others[:, none]], dim=1)
    asked = pairs, torch.arange(pairs.shape[1]) < TREE.closure.shape[1]
    start = torch.randn(TREE.num_nodes, 4) / 4 if model.endswith("cones") else None
    _, record = train(model, Task(TREE, asked, asked), 4, RATES[model][1], 40, 0, start)
    guess = measured(network(model, TREE.num_nodes, 4, start), Task(TREE, asked, asked))["test"]
    assert record["test"] > guess + 0.03
    assert (len(record["curve"]), max(record["curve"])) == (10, record["val"])


def test_a_run_leaves_its_table_and_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "60", "--dims", "2", "--shares", "0", "0.5", "--seeds", "2", "--steps", "5", "--threads", "1"]
    words += ["--quiet", "--models", "cones", "dot", "edges", "--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(tmp_path / "hypernymy.json")]) == 0
    said = capsys.readouterr().out
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out == said
    rows = json.loads((tmp_path / "hypernymy.json").read_text())["rows"]
    assert [(row["model"], row["share"]) for row in rows] == [
        (model, share) for model in ("cones", "dot", "edges") for share in (0, 0.5)
    ]
    assert rows[-1]["summary"] == {"mean": 1.0, "std": 0.0, "n": 2}
    for option, value, sentence in (
        ("--dims", "1", "--dims must be at least 2"),
        ("--shares", "0.9", "--shares must lie"),
        ("--nodes", "8", "--nodes must leave 20 pairs"),
    ):
        assert main([*words, option, value, "--overwrite"]) == 2
        assert sentence in capsys.readouterr().err
    assert (tmp_path / "run" / "results.json").exists()  # the old run
