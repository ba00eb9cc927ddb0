"""Triangulations: what is asked is Delaunay's, padding is never asked, every model answers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiments import set_to_graph
from experiments.set_to_graph import MODELS, Settings, build, load, main, triangulated
from holonomy.layers import HigherOrderAttention

WORDS = [
    "--train", "4", "--tests", "2", "--hidden", "8", "--heads", "2", "--layers", "2", "--batch", "2", "--epochs", "1",
    "--seeds", "1", "--quiet",
]  # fmt: skip


def test_an_edge_is_joined_where_some_circle_holds_no_other_point() -> None:
    """Delaunay's own definition: a triangle counts if its circumscribed circle is empty."""
    sets = triangulated(3, 7, 9, seed=0)
    for points, mask, joined in zip(sets.points, sets.mask, sets.joined, strict=True):
        n = int(mask.sum())
        xy = points[:n].double().numpy()
        wanted = np.zeros((len(mask), len(mask)), dtype=bool)
        for corners in itertools.combinations(range(n), 3):
            a, b, c = xy[list(corners)]
            matrix = 2 * np.stack([b - a, c - a])
            centre = np.linalg.solve(matrix, [b @ b - a @ a, c @ c - a @ a])
            others = [i for i in range(n) if i not in corners]
            if (np.linalg.norm(xy[others] - centre, axis=1) > np.linalg.norm(a - centre)).all():
                for i, j in itertools.permutations(corners, 2):
                    wanted[i, j] = True
        assert (joined.numpy() == wanted).all()
        assert not points[n:].any()


def test_each_pair_of_points_is_asked_once() -> None:
    sets = triangulated(4, 5, 8, seed=1)
    pairs = sets.pairs()
    n = sets.mask.sum(dim=1)
    assert (pairs.sum(dim=(1, 2)) == n * (n - 1) // 2).all()
    assert not (pairs & pairs.transpose(1, 2)).any()
    smaller = sets.take(n.argmin()[None])
    assert smaller.points.shape == (1, int(n.min()), 2)
    assert smaller.mask.all()


@pytest.mark.parametrize(
    ("model", "given"), [*((model, {}) for model in MODELS), ("hot-performer", {"sums": "coupled"})]
)
def test_a_set_does_not_see_its_padding_nor_its_order(model: str, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    settings = Settings(hidden=8, heads=2, layers=2, train=2, tests=2, **given)
    sets = triangulated(2, 6, 9, seed=4)
    assert sets.mask.sum(dim=1).tolist() != [9, 9]
    network = build(model, settings, load("delaunay-50", None, settings, 0)).eval()
    with torch.no_grad():
        padded = network(sets.points, sets.mask)
        for number in range(2):
            one = sets.take(torch.tensor([number]))
            n = one.points.shape[1]
            alone = network(one.points, one.mask)[0]
            asked = one.pairs()[0]
            assert torch.allclose(alone[asked], padded[number, :n, :n][asked], atol=1e-5)
            assert torch.allclose(alone, alone.T, atol=1e-5)
            order = torch.randperm(n)
            moved = network(one.points[:, order], one.mask)[0]
            off = ~torch.eye(n, dtype=torch.bool)
            assert torch.allclose(moved[off], alone[order][:, order][off], atol=1e-5)


def test_kernel_attention_has_the_random_features_that_are_asked_for() -> None:
    settings = Settings(hidden=8, heads=2, layers=2, train=2, tests=2, random_features=5)
    data = load("delaunay-30", None, settings, 0)
    assert data.train.points.shape == (2, 30, 2)
    projections = [x for name, x in build("hot-performer", settings, data).named_buffers() if name.endswith("tion")]
    assert [x.shape for x in projections] == [(5, 4)] * 2
    kinds = {
        sums: build("hot-performer", dataclasses.replace(settings, sums=sums), data)
        for sums in ("coupled", "decoupled")
    }
    for sums, network in kinds.items():
        assert {one.sums for one in network.modules() if isinstance(one, HigherOrderAttention)} == {sums}


def test_who_knows_the_triangulation_has_an_f1_of_one() -> None:
    settings = Settings(train=2, tests=3)
    data = load("delaunay-20-80", None, settings, 0)
    answers = {len(part.points): part for part in (data.val, data.test)}
    assert len(answers) == 1

    class Oracle(torch.nn.Module):
        def forward(self, points: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for part in (data.val, data.test):
                width = points.shape[1]
                if torch.equal(part.points[: len(points), :width], points):
                    return part.joined[: len(points), :width, :width].float() - 0.5
            raise AssertionError

    assert set_to_graph.test(Oracle(), data) == {"accuracy": 1.0, "precision": 1.0, "recall": 1.0, "f1": 1.0}


def test_partitions_are_compared_pair_by_pair() -> None:
    said, truth = np.array([0, 0, 1, 1, 2, 2]), np.array([4, 4, 4, 7, 9, 9])
    pairs = list(itertools.combinations(range(6), 2))
    both = [(said[i] == said[j], truth[i] == truth[j]) for i, j in pairs]
    hits, claimed, real = (sum(map(rule, both)) for rule in (all, lambda pair: pair[0], lambda pair: pair[1]))
    expected = claimed * real / len(pairs)
    assert set_to_graph.partition_scores(said, truth) == {
        "F1": pytest.approx(2 * hits / (claimed + real)),
        "RI": pytest.approx(sum(a == b for a, b in both) / len(pairs)),
        "ARI": pytest.approx((hits - expected) / ((claimed + real) / 2 - expected)),
    }
    assert set(set_to_graph.partition_scores(truth, truth).values()) == {1.0}


def test_tracks_that_are_joined_through_others_count_as_of_one_vertex() -> None:
    data = load("jets-generated", None, Settings(train=6, tests=9), 0)
    sets = data.test

    class Chain(torch.nn.Module):
        """Joins each track to the next one of its vertex, and to none of the others."""

        def forward(self, points: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            width = points.shape[1]
            truth = sets.joined[:, :width, :width]
            after = truth.triu(1) & (truth.triu(1).cumsum(dim=2) == 1)
            return after.float() - 0.5

    found = set_to_graph.of_jets(Chain(), sets, sets.flavour, 0.0)
    assert set(found.values()) == {1.0}
    assert {name.split()[0] for name in found} == {"F1", "RI", "ARI"}


@pytest.mark.parametrize("dataset", ["delaunay-50", "delaunay-20-80", "delaunay-30", "jets-generated"])
def test_the_command_line_answers_with_every_model(tmp_path: Path, dataset: str) -> None:
    assert main([*WORDS, "--dataset", dataset, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "table.json").read_text())
    assert set(content["models"]) == set(MODELS)
    jets = dataset == "jets-generated"
    for row in content["models"].values():
        names = {name.split()[0] for name in row["summary"]}
        assert names == ({"F1", "RI", "ARI"} if jets else {"accuracy", "precision", "recall", "f1"})
    if jets:
        return
    with Image.open(tmp_path / "triangulations.png") as picture:
        assert picture.size[0] > 1000
