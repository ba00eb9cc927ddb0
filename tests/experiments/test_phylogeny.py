"""Generated phylogenies have the distances that they say, and new species are placed where they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data.phylogeny import Branches, differing, evolved, jukes_cantor, phylogeny
from experiments.phylogeny import Places, Task, fit, main, map_points, trained


def test_all_species_are_equally_deep_and_every_node_splits_in_two() -> None:
    tree = phylogeny(3, species=40, sites=10, height=0.7)
    np.testing.assert_allclose(tree.between[0, tree.leaves], 0.7)
    assert (np.bincount(tree.parent[1:], minlength=79)[tree.parent[1:]] == 2).all()
    assert (tree.parent[1:] < np.arange(1, 79)).all()


@pytest.mark.parametrize("shape", [0.5, 2.0])
def test_sequences_differ_as_far_as_the_species_are_apart(shape: float) -> None:
    # One branch of each length: the letters at its ends.
    share = np.zeros((2, 2))
    for length in (0.05, 0.3, 1.0):
        ends = evolved(np.random.default_rng(0), np.array([-1, 0]), np.array([0.0, length]), 400_000, shape)
        share = differing(ends)
        assert jukes_cantor(share, shape)[0, 1] == pytest.approx(length, rel=0.02)
    # Equal rates would have shown more of them.
    assert share[0, 1] < 0.75 * (1 - np.exp(-4 / 3)) - 0.005


@pytest.mark.parametrize("seed", range(6))
def test_true_distances_lead_to_the_true_branch(seed: int) -> None:
    tree, known, new = phylogeny(seed, species=30, sites=5), np.arange(20), np.arange(20, 30)
    branches = Branches.of(tree, known)
    assert len(branches.length) == 2 * len(known) - 3
    assert len({min(side.tobytes(), (~side).tobytes()) for side in branches.below}) == len(branches.below)
    within = tree.distances[np.ix_(known, known)]
    # The lengths of the branches between two known species are the way between them.
    apart = branches.below[:, :, None] != branches.below[:, None]
    np.testing.assert_allclose((apart * branches.length[:, None, None]).sum(0), within, atol=1e-12)
    true = branches.holding(tree, known, new)
    np.testing.assert_array_equal(branches.best(tree.distances[np.ix_(new, known)]), true)
    # Of distances that say nothing it finds no more than chance.
    noise = np.random.default_rng(seed).uniform(0.5, 1.0, (len(new), len(known)))
    assert (branches.best(noise) == true).mean() < 0.5


def test_true_distances_are_without_fault_and_others_are_not() -> None:
    task = Task.of(0, 24, 50)
    test = task.parts[2]
    assert task.measured(task.tree.distances, test) == {"error": 0.0, "nearest": 1.0, "placement": 1.0}
    assert task.measured(1.1 * task.tree.distances, test)["error"] == pytest.approx(0.1)
    assert task.measured(task.tree.distances.max() - task.tree.distances, test)["nearest"] < 0.5


def test_the_flat_twin_has_hypformers_sizes_and_learns_as_it_does(tmp_path: Path) -> None:
    sizes = [
        sum(p.numel() for p in Places(body, "flat", 40, 3).body.parameters()) for body in ("hypformer", "euclidean")
    ]
    assert sizes[1] < sizes[0] < 1.2 * sizes[1]
    words = ["--trees", "1", "--species", "24", "--sites", "100", "--bodies", "euclidean", "--hypformer-dims", "2"]
    assert main([*words, "--steps", "60", "--quiet", "--threads", "1", "--out", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["body"] for row in found] == ["none"] * 2 + ["euclidean"] * 3
    assert all(row["error"]["mean"] < 0.8 for row in found)


def test_a_run_says_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trees", "2", "--species", "24", "--sites", "100", "--dims", "2", "--hypformer-dims"]
    words += ["--steps", "60", "--quiet", "--threads", "1"]
    assert main([*words, "--out", str(tmp_path / "run"), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    named = {(row["body"], row["metric"], row["dim"]): row for row in found["rows"]}
    assert len(named) == 2 + 3
    assert all(len(row["trees"]) == 2 for row in found["rows"])
    # Trained distances are nearer to the truth than none at all, whose error is 1.
    assert named["mlp", "hyperbolic", 2]["error"]["mean"] < 0.8
    assert named["none", "Jukes-Cantor, true rates", 0]["error"]["mean"] < 0.5
    assert (tmp_path / "run" / "error.png").stat().st_size > 1000
    assert (tmp_path / "run" / "map.png").stat().st_size > 1000
    assert "2 trees" in capsys.readouterr().out
    assert main(["--dims", "1", "--out", str(tmp_path / "other")]) == 2
    assert "--dims must be at least 2" in capsys.readouterr().err


def test_clades_are_the_branches_of_an_early_time() -> None:
    tree = phylogeny(3, species=30, sites=5)
    for count in (1, 2, 7, 30):
        clades = tree.clades(count)
        assert sorted(set(clades)) == list(range(count))
        within = tree.distances[clades[:, None] == clades]
        apart = tree.distances[clades[:, None] != clades]
        # All leaves are equally deep: those of one clade have met later than any two of different ones.
        assert count == 1 or within.max() < apart.min()


def test_points_of_the_map_are_those_whose_distances_are_measured() -> None:
    task = Task.of(0, 24, 50)
    for metric in ("hyperbolic", "flat"):
        asked = ("mlp", metric, 0.006, 20, 0)
        places = torch.tensor(map_points(task, *asked))
        wanted = fit(task, "mlp", metric, 2, *asked[2:])
        if metric == "hyperbolic":
            model = trained(task, "mlp", metric, 2, *asked[2:])
            unit = float(task.tree.distances[0, 1] / task.distances[0, 1])
            on = model.manifold.expmap0(torch.nn.functional.pad(places.float() / unit, (1, 0)))
            np.testing.assert_allclose(model.manifold.dist0(on).detach() * unit, places.norm(dim=1), rtol=1e-5)
            found = unit * model.manifold.dist(on[:, None], on[None]).detach()
        else:
            found = torch.cdist(places, places)
        np.testing.assert_allclose(found, wanted, atol=1e-4)
