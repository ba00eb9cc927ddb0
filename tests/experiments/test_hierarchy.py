"""Hierarchies: their closure, the loss and the ranking against loops, and a run that survives being stopped."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments import hierarchy as example
from experiments.engine import runs
from experiments.engine.options import RefusedError
from experiments.hierarchy import (
    MODELS,
    Hierarchy,
    KnownEdges,
    Settings,
    along_edges,
    branches,
    build,
    fit,
    held_out,
    load,
    loss_of_pairs,
    loss_of_rows,
    main,
    measure,
    measure_links,
    random_tree,
    reconstruction,
    transitive_closure,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
QUICK = ["--quiet", "--threads", "1", "--nodes", "30", "--epochs", "4", "--evaluate-every", "2"]


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Given:
    """A space whose distances are given."""

    def __init__(self, distances: Tensor) -> None:
        self.distances = distances

    def pairwise(self, rows: Tensor) -> Tensor:
        return self.distances[rows]

    def listed(self, rows: Tensor, others: Tensor) -> Tensor:
        return self.distances[rows[:, None], others]

    def curvature(self) -> float:
        return 0.0


def diamond() -> Hierarchy:
    """Two ways from 3 up to 0, and a chain below: 5 -> 4 -> 3 -> {1, 2} -> 0."""
    return Hierarchy("diamond", torch.tensor([[1, 2, 3, 3, 4, 5], [0, 0, 1, 2, 3, 4]]), list("abcdef"))


def test_closure_follows_every_way_up() -> None:
    pairs = {tuple(pair) for pair in diamond().closure.T.tolist()}
    above = {1: {0}, 2: {0}, 3: {0, 1, 2}, 4: {0, 1, 2, 3}, 5: {0, 1, 2, 3, 4}}
    assert pairs == {(u, v) for u, found in above.items() for v in found}
    assert diamond().descendants().tolist() == [5, 3, 3, 2, 1, 0]
    nodes = torch.arange(6)
    related = diamond().related(nodes[:, None], nodes)
    assert {tuple(pair) for pair in related.nonzero().tolist()} == pairs | {(u, u) for u in range(6)}


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        transitive_closure(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)


def test_a_random_tree_is_one() -> None:
    tree = random_tree(50, children=4, seed=3)
    assert tree.direct[0].tolist() == list(range(1, 50))
    assert bool((tree.direct[1] < tree.direct[0]).all())
    assert int(torch.bincount(tree.direct[1]).max()) <= 4
    assert set(tree.ancestors[49].tolist()) - {-1} == {int(v) for v in tree.closure[1][tree.closure[0] == 49]}
    assert len(set(tree.names)) == 50


def test_ranking_against_a_loop() -> None:
    tree = random_tree(40, seed=1)
    distances = torch.rand(40, 40)
    ranks, precision = [], []
    for u in range(1, 40):
        mine = [v for v in tree.ancestors[u].tolist() if v >= 0]
        order = sorted((v for v in range(40) if v != u), key=lambda v: float(distances[u, v]))
        hits = 0.0
        for found, v in enumerate((v for v in order if v in mine), 1):
            ranks.append(1 + sum(1 for w in order[: order.index(v)] if w not in mine))
            hits += found / (order.index(v) + 1)
        precision.append(hits / len(mine))
    measured = measure(Given(distances), tree)
    assert measured["mean_rank"] == pytest.approx(np.mean(ranks))
    assert measured["map"] == pytest.approx(np.mean(precision))


def test_ties_count_against_the_ancestor() -> None:
    tree = random_tree(10)
    ranks, precision = reconstruction(torch.zeros(1, 10), torch.tensor([1]), tree.ancestors[1:2])
    assert ranks.tolist() == [9]
    assert precision.item() == pytest.approx(1 / 9)


def test_loss_of_rows_against_a_loop() -> None:
    tree, heat = random_tree(12, seed=2), 0.7
    distances = torch.rand(12, 12, dtype=torch.float64)
    terms = []
    for u, v in tree.closure.T.tolist():
        own = {u, *tree.ancestors[u].tolist()}
        weights = [math.exp(-float(distances[u, w]) / heat) for w in range(12) if w not in own]
        hit = math.exp(-float(distances[u, v]) / heat)
        terms.append(-math.log(hit / (hit + sum(weights))))
    loss = loss_of_rows(Given(distances), tree, torch.randperm(12), heat)
    assert loss.item() == pytest.approx(np.mean(terms), rel=1e-9)


def test_loss_of_pairs_against_a_loop() -> None:
    tree, heat = random_tree(12, seed=2), 0.7
    distances = torch.rand(12, 12, dtype=torch.float64)
    torch.manual_seed(5)
    loss = loss_of_pairs(Given(distances), tree, tree.closure, 20, heat)
    torch.manual_seed(5)
    drawn = torch.randint(12, (tree.closure.shape[1], 20))
    terms = []
    for (u, v), others in zip(tree.closure.T.tolist(), drawn.tolist(), strict=True):
        own = {u, *tree.ancestors[u].tolist()}
        hit = math.exp(-float(distances[u, v]) / heat)
        rest = sum(math.exp(-float(distances[u, w]) / heat) for w in others if w not in own)
        terms.append(-math.log(hit / (hit + rest)))
    assert loss.item() == pytest.approx(np.mean(terms), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "negatives", "sparse"),
    [*((model, 0, False) for model in MODELS), ("learned", 5, False), ("fixed", 5, True)],
)
def test_every_space_learns_a_small_tree(model: str, negatives: int, sparse: bool) -> None:
    tree = random_tree(30, children=3, seed=0)
    settings = Settings(dim=4, epochs=40, batch=30 if negatives == 0 else 50, negatives=negatives, evaluate_every=40)
    settings = dataclasses.replace(settings, sparse=sparse)
    torch.manual_seed(0)
    space, _ = build(model, 30, settings)
    before = measure(space, tree)["map"]
    record = fit(model, settings, tree, 0)
    assert record["map"] > max(0.6, before + 0.2)
    assert record["history"]["loss"][-1] < record["history"]["loss"][0]
    assert len(record["history"]["measured_at"]) == 2


def test_geoopt_and_ours_agree_where_the_curvature_is_fixed() -> None:
    tree = random_tree(30, seed=0)
    settings = Settings(dim=3, epochs=3, batch=16)
    ours, theirs = (fit(model, settings, tree, 0)["history"]["loss"] for model in ("fixed", "geoopt-fixed"))
    assert ours == pytest.approx(theirs, rel=1e-2)


def test_rate_and_temperature() -> None:
    settings = Settings(epochs=10, lr=0.1, burn_in=2, temperature=(0.1, 0.4), growth=0.4)
    assert settings.rate(1) == pytest.approx(0.01)
    assert settings.rate(6) == pytest.approx(0.05)
    assert settings.heat(1) == pytest.approx(0.1)
    assert settings.heat(3) == pytest.approx(0.2)
    assert settings.heat(10) == pytest.approx(0.4)


def test_the_command_line_leaves_numbers_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "kept" / "tree.json"
    words = [*QUICK, "--models", "learned", "euclidean", "--dims", "2", "3", "--lrs", "0.05", "0.1"]
    assert main([*words, "--out", str(tmp_path / "run"), "--json", str(table)]) == 0
    assert "hyperbolic, learned curvature" in capsys.readouterr().out
    content = json.loads(table.read_text())
    assert [(row["model"], row["settings"]["dim"]) for row in content["rows"]] == [
        (model, dim) for dim in (2, 3) for model in ("learned", "euclidean")
    ]
    for row in content["rows"]:
        assert row["settings"]["lr"] == float(max(row["search"], key=row["search"].__getitem__))
        assert 0 < row["summary"]["map"]["mean"] <= 1
    cells = [f"{row['model']}-{row['settings']['dim']}-lr-{row['settings']['lr']:g}" for row in content["rows"]]
    for picture in ("table.png", f"{cells[0]}/disk.png", f"{cells[2]}/disk.png", f"{cells[2]}/training.png"):
        assert (tmp_path / "run" / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("negatives", ["0", "7"])
def test_a_stopped_run_ends_in_the_same_bits(negatives: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*QUICK, "--no-pictures", "--epochs", "6", "--negatives", negatives, "--checkpoint-every", "2", "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    kept = runs.Run.write_state

    def stop_at_the_second(run: runs.Run, name: str, state: dict) -> Path:
        path = kept(run, name, state)
        if state.get("epoch") == 4:
            raise KeyboardInterrupt
        return path

    with monkeypatch.context() as patch:
        patch.setattr(runs.Run, "write_state", stop_at_the_second)
        assert main([*words, str(tmp_path / "halves")]) == 130
    assert main([*words, str(tmp_path / "halves"), "--resume"]) == 0
    for name in ("learned-2/part-seed-0.json",):
        whole, halves = (json.loads((tmp_path / part / name).read_text()) for part in ("whole", "halves"))
        for record in (whole["result"], halves["result"]):
            del record["seconds"], record["processor_seconds"]
        assert whole["result"] == halves["result"]
    points = [runs.read_state(tmp_path / part / "learned-2" / "part-seed-0.model.pt") for part in ("whole", "halves")]
    assert all(torch.equal(points[0][key], points[1][key]) for key in points[0])


def test_what_cannot_be_done_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--dataset", "mammals"], "--data FOLDER"),
        (["--dataset", "mammals", "--data", str(tmp_path)], "no file wordnet_mammals.npz"),
        (["--dims", "0"], "--dims must be positive"),
        (["--lr", "-1"], "--lr must be positive"),
        (["--lrs", "0.1", "-1"], "--lrs must be positive"),
        (["--lrs", "0.1", "0.3", "--lr", "0.2"], "--lrs says which learning rates"),
        (["--models", "fixed", "--baseline", "all"], "--models"),
        (["--sparse"], "--sparse needs --negatives"),
        (["--sparse", "--negatives", "5", "--models", "euclidean"], "got euclidean"),
    ):
        assert main([*words, "--quiet", "--out", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    np.savez(tmp_path / "wordnet_mammals.npz", direct=np.array([[1], [0]]))
    assert main(["--dataset", "mammals", "--data", str(tmp_path), "--quiet"]) == 2
    assert "'name'" in capsys.readouterr().err


def test_names_are_texts_or_bytes_of_utf8(tmp_path: Path) -> None:
    path, direct = tmp_path / "wordnet_mammals.npz", np.array([[1], [0]])
    np.savez(path, direct=direct, name=np.array(["l\u00f6we.n.01#x".encode(), b"cat_of_prey"]))
    assert load("mammals", tmp_path).names == ["l\u00f6we.n.01", "cat of prey"]
    for names in (np.array([b"\xff", b"cat"]), np.array(["cat", None]), np.array([1, 2])):
        np.savez(path, direct=direct, name=names)
        with pytest.raises(RefusedError, match=r"wordnet_mammals\.npz"):
            load("mammals", tmp_path)


def test_branches_are_below_what_holds_most() -> None:
    # 0 holds all; 1 holds most of it and is opened; 2 and 3 are the branches.
    direct = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 1, 2, 2, 3, 0, 3]])
    labels, names = branches(Hierarchy("h", direct, [str(node) for node in range(9)]))
    assert names == ["2", "3", "7", "others"]
    assert labels.tolist() == [3, 3, 0, 1, 0, 0, 1, 2, 1]


@pytest.mark.skipif(not DATA.is_dir(), reason="the WordNet files are not there")
def test_wordnet_has_the_papers_pairs() -> None:
    nouns = load("nouns", DATA)
    assert (nouns.num_nodes, nouns.closure.shape[1]) == (82115, 743241)
    mammals = load("mammals", DATA)
    with np.load(DATA / "wordnet_mammals.npz", allow_pickle=False) as archive:
        stored = {tuple(pair) for pair in archive["closure"].T.tolist()}
    assert {tuple(pair) for pair in mammals.closure.T.tolist()} == stored
    assert mammals.names[int(mammals.descendants().argmax())] == "mammal"
    assert example.DATASETS[1:] == ("mammals", "nouns")


def test_held_out_pairs_are_ancestors_beyond_the_parents() -> None:
    tree = random_tree(60, seed=3)
    links = held_out(tree, 0.4)
    pairs = [{tuple(pair) for pair in part.T.tolist()} for part in (links.known.closure, links.val, links.test)]
    assert set.union(*pairs) == {tuple(pair) for pair in tree.closure.T.tolist()}
    assert sum(map(len, pairs)) == tree.closure.shape[1]
    assert {tuple(pair) for pair in tree.direct.T.tolist()} <= pairs[0]
    for node in range(60):
        known = links.known.ancestors[node]
        assert {(node, other) for other in known[known >= 0].tolist()} == {pair for pair in pairs[0] if pair[0] == node}


def test_ranks_of_held_out_pairs_against_a_loop() -> None:
    tree = random_tree(40, seed=4)
    links = held_out(tree, 0.3)
    distances = torch.randint(0, 30, (40, 40)).double()
    ranks = []
    for child, ancestor in links.test.T.tolist():
        barred = {child, *tree.ancestors[child].tolist()}
        ranks.append(1 + sum(float(distances[child, w] <= distances[child, ancestor]) for w in {*range(40)} - barred))
    found = measure_links(Given(distances), tree, links.test)
    assert found["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)))
    assert found["hits10"] == pytest.approx(np.mean(np.array(ranks) <= 10))


def test_known_edges_lead_to_every_ancestor() -> None:
    tree = random_tree(50, seed=5)
    row = along_edges(tree, held_out(tree, 0.2))
    assert row["summary"]["mrr"]["mean"] == row["summary"]["hits10"]["mean"] == 1.0
    steps = KnownEdges(held_out(tree, 0.0).known).pairwise(torch.arange(50))
    deep = int((tree.ancestors >= 0).sum(1).argmax())
    # Through parents alone, ancestors come one after the other.
    assert sorted(steps[deep][tree.ancestors[deep]].tolist()) == list(range(1, tree.ancestors.shape[1] + 1))


def test_known_edges_are_counted_along_the_shortest_way() -> None:
    known = held_out(random_tree(40, seed=6), 0.3).known
    space, rows, others = KnownEdges(known), torch.randint(40, (7,)), torch.randint(40, (7, 3))
    steps = torch.full((40, 40), torch.inf, dtype=torch.float64).fill_diagonal_(0.0)
    steps[*known.closure] = 1.0
    for between in range(40):
        steps = torch.minimum(steps, steps[:, between, None] + steps[between])
    torch.testing.assert_close(space.pairwise(rows), steps[rows], rtol=0, atol=0)
    torch.testing.assert_close(space.listed(rows, others), steps[rows[:, None], others], rtol=0, atol=0)


def test_known_edges_of_many_nodes_need_no_table_of_all_pairs() -> None:
    n = 200_000
    pairs = torch.stack([torch.arange(1, n), torch.arange(1, n) // 50])
    space = KnownEdges(Hierarchy("wide", pairs, [""] * n))
    assert space.listed(torch.tensor([n - 1]), torch.tensor([[0, n - 1, 1]])).tolist() == [[1.0, 0.0, 1.0]]


def test_every_model_stands_in_one_table_and_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [*MODELS, "edges"]
    assert main([*QUICK, "--epochs", "1", "--models", *models, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "nan" not in said
    assert all(example.TITLES[model] in said for model in models)
    assert (tmp_path / "run" / "table.png").read_bytes().startswith(b"\x89PNG")


def test_known_edges_alone_leave_a_table(tmp_path: Path) -> None:
    assert main([*QUICK, "--models", "edges", "--out", str(tmp_path / "run")]) == 0
    content = json.loads((tmp_path / "run" / "table.json").read_text())
    assert [row["model"] for row in content["rows"]] == ["edges"]


def test_a_bias_is_added_to_the_node_that_is_ranked() -> None:
    space, _ = build("euclidean-bias", 6, Settings(dim=3))
    assert space.inner.points.shape == (6, 2)
    before, rows = space.pairwise(torch.arange(6)), torch.arange(6)
    with torch.no_grad():
        space.bias[4] += 2.5
    moved = space.pairwise(rows) - before
    torch.testing.assert_close(moved, 2.5 * (torch.arange(6) == 4).float().expand(6, 6))
    others = torch.tensor([[4, 1]]).expand(6, 2)
    torch.testing.assert_close(space.listed(rows, others), space.pairwise(rows)[:, [4, 1]])


def test_held_out_links_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *QUICK,
        "--known",
        "0.3",
        "--models",
        "euclidean-bias",
        "dot",
        "edges",
        "--dims",
        "3",
        "--lrs",
        "0.1",
        "0.3",
    ]
    assert main([*words, "--no-pictures", "--out", str(tmp_path / "run"), "--json", str(tmp_path / "t.json")]) == 0
    assert "held-out MRR" in capsys.readouterr().out
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["edges", "euclidean-bias", "dot"]
    for row in rows[1:]:
        # The learning rate is the one that the pairs to choose by like best.
        assert row["summary"]["val_mrr"]["mean"] == max(row["search"].values())
    assert main([*QUICK, "--models", "dot", "--dims", "1", "--out", str(tmp_path / "one")]) == 2
    assert "--dims must be at least 2 for dot" in capsys.readouterr().err
    assert main([*QUICK, "--known", "1", "--out", str(tmp_path / "all")]) == 2
    assert "leaves no pairs" in capsys.readouterr().err


def test_a_learning_rate_of_many_digits_is_searched_and_used(tmp_path: Path) -> None:
    """Rounded to six digits in the name of its folder, it was another rate, and the run was refused."""
    rate, file = 0.123456789, tmp_path / "t.json"
    words = [*QUICK, "--seeds", "1", "--no-pictures", "--lrs", str(rate), "--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["settings"]["lr"] == rate
    assert list(row["search"]) == [str(rate)]
