"""Generated phylogenies have the distances that they say, and new species are placed where they are."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data.phylogeny import Branches, Phylogeny, Transfers, differing, evolved, jukes_cantor, phylogeny, ways
from experiments.phylogeny import Places, Task, fit, main, map_points, trained, without_network


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


def test_without_transfers_every_gene_has_the_species_tree() -> None:
    tree = phylogeny(4, species=20, sites=7, genes=3)
    assert tree.sequences.shape == (20, 3, 7)
    np.testing.assert_allclose(tree.gene_distances, np.broadcast_to(tree.distances, (3, 20, 20)), atol=1e-12)
    # The first gene is the sequence that a tree of one gene has.
    np.testing.assert_array_equal(tree.sequences[:, :1], phylogeny(4, species=20, sites=7).sequences)


def test_a_clade_that_received_a_gene_has_the_distances_of_the_donor() -> None:
    # Nodes 1 and 2 split at 0.5 and 0.3; at 0.6 the branch of leaf 4 receives the gene from that of leaf 5.
    parent, length = np.array([-1, 0, 0, 1, 1, 2, 2]), np.array([0.0, 0.5, 0.3, 0.5, 0.5, 0.7, 0.7])
    *tree, place = Transfers(np.array([0.6]), np.array([5]), np.array([4])).gene_tree(parent, length)
    found, true = (
        between[np.ix_(at, at)] for between, at in ((ways(*tree), place[3:]), (ways(parent, length), [3, 4, 5, 6]))
    )
    np.testing.assert_allclose(found[1, [0, 3]], true[2, [0, 3]])
    assert found[1, 2] == pytest.approx(2 * (1 - 0.6))
    np.testing.assert_allclose(found[np.ix_([0, 2, 3], [0, 2, 3])], true[np.ix_([0, 2, 3], [0, 2, 3])])
    # A whole clade: the branch of node 1 receives at 0.4 from that of leaf 6; a second transfer hands it on.
    *tree, place = Transfers(np.array([0.9, 0.4]), np.array([3, 6]), np.array([5, 1])).gene_tree(parent, length)
    found = ways(*tree)[np.ix_(place[3:], place[3:])]
    assert found[0, 1] == pytest.approx(true[0, 1])
    np.testing.assert_allclose(found[:3, 3], 1.2)
    assert found[0, 2] == pytest.approx(0.2)
    assert (tree[0][1:] < np.arange(1, len(tree[0]))).all()


def followed(transfers: Transfers, tree: Phylogeny, leaf: int) -> list[tuple[int, float, float]]:
    """Follow a gene back from a leaf: each branch on which it was, with the times from and until."""
    way, branch, until = [], leaf, tree.between[0, leaf]
    while branch >= 0:
        since = tree.between[0, tree.parent[branch]] if branch else -1.0
        events = zip(transfers.time, transfers.donor, transfers.receiver, strict=True)
        came = [(time, donor) for time, donor, to in events if to == branch and since < time < until]
        since, source = max(came) if came else (since, tree.parent[branch])
        way.append((branch, since, until))
        branch, until = source, since
    return way


@pytest.mark.parametrize("seed", range(4))
def test_genes_meet_where_following_them_back_says(seed: int) -> None:
    tree = phylogeny(seed, species=12, sites=1, height=0.5)
    length = np.array([0.0, *tree.between[np.arange(1, 23), tree.parent[1:]]])
    transfers = Transfers.drawn(np.random.default_rng(seed), tree.parent, length, 3.0)
    assert len(transfers.time) > 3
    *gene, place = transfers.gene_tree(tree.parent, length)
    found = ways(*gene)[np.ix_(place[tree.leaves], place[tree.leaves])]
    back = [followed(transfers, tree, int(leaf)) for leaf in tree.leaves]
    for (i, one), (j, other) in itertools.product(enumerate(back), repeat=2):
        met = [
            min(until, then)
            for (a, since, until), (b, before, then) in itertools.product(one, other)
            if a == b and min(until, then) > max(since, before)
        ]
        assert found[i, j] == pytest.approx(2 * (0.5 - max(met)), abs=1e-9)


def test_transfers_lead_from_a_lineage_of_their_time_and_are_as_many_as_is_said() -> None:
    tree = phylogeny(5, species=24, sites=1)
    length = np.array([0.0, *tree.between[np.arange(1, 47), tree.parent[1:]]])
    rng, below, kept = np.random.default_rng(0), tree.below(np.arange(24)), []
    for _ in range(400):
        drawn = Transfers.drawn(rng, tree.parent, length, 0.4 / 0.5)
        kept.append(1 - below[drawn.receiver].any(0).mean())
        assert (drawn.donor != drawn.receiver).all()
        for end in (drawn.donor, drawn.receiver):
            assert (tree.between[0, tree.parent[end]] < drawn.time).all()
            assert (drawn.time < tree.between[0, end]).all()
    assert np.mean(kept) == pytest.approx(np.exp(-0.4), abs=0.03)


def test_transfers_mislead_a_third_of_the_pairs_as_the_module_says() -> None:
    drawn = [phylogeny(seed, species=64, sites=1, genes=6, transfers=0.4) for seed in range(10)]
    np.testing.assert_array_equal(
        drawn[3].sequences, phylogeny(3, species=64, sites=1, genes=6, transfers=0.4).sequences
    )
    pairs = np.triu_indices(64, 1)
    misled = [~np.isclose(tree.gene_distances, tree.distances)[:, *pairs] for tree in drawn]
    assert np.mean(misled) == pytest.approx(0.35, abs=0.05)


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
    words += ["--metrics", "flat", "flat with heights"]
    assert main([*words, "--steps", "60", "--quiet", "--threads", "1", "--out", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["body"] for row in found] == ["none"] * 2 + ["euclidean"] * 2
    assert [row["metric"] for row in found[2:]] == ["flat", "flat with heights"]
    assert all(row["error"]["mean"] < 0.8 for row in found)


def test_a_token_shows_one_gene_and_only_transformers_look_at_other_species() -> None:
    task = Task.of(0, 24, 5, 3, 0.4)
    other = task.x.clone()
    other[2, 1] = 1 - other[2, 1]
    for body in ("mlp", "hypformer", "euclidean"):
        torch.manual_seed(0)
        model = Places(body, "flat", 20, 3, 3).eval()
        tokens = model.tokens(task.x)
        torch.testing.assert_close(tokens.sum(1), 3**0.5 * task.x.flatten(1))
        assert (model.tokens(other) != tokens).any(-1).nonzero().tolist() == [[2, 1]]
        changed = (model.coordinates(other) - model.coordinates(task.x)).abs().amax(1) > 1e-7
        assert changed.tolist() == [body != "mlp" or species == 2 for species in range(24)]
        # The mean lies between the tokens, in every coordinate.
        found, each = model.coordinates(task.x), model.body(tokens.flatten(0, 1)).unflatten(0, (24, 3))[..., 1:]
        assert ((each.amin(1) - 1e-6 <= found) & (found <= each.amax(1) + 1e-6)).all()


def test_the_median_of_genes_withstands_transfers_that_mislead_the_formula() -> None:
    errors = []
    for seed in range(4):
        task = Task.of(seed, 36, 2000, 7, 0.2)
        letters = task.tree.sequences
        errors.append([without_network(task, x, fitted=True)["error"] for x in ([letters], letters.swapaxes(0, 1))])
    pooled, median = np.mean(errors, axis=0)
    assert median < 0.7 * pooled


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


def test_a_run_with_genes_learns_and_names_the_median(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trees", "1", "--species", "24", "--sites", "40", "--genes", "3", "--transfers", "0.3", "--dims", "2"]
    words += ["--bodies", "mlp", "euclidean", "--hypformer-dims", "2", "--quiet", "--threads", "1"]
    assert main([*words, "--steps", "80", "--out", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["metric"] for row in found[:3]][2] == "Jukes-Cantor, median of genes"
    assert len(found) == 3 + 6
    assert all(row["error"]["mean"] < 0.8 for row in found)
    assert (tmp_path / "run" / "map.png").stat().st_size > 1000
    assert main([*words, "--transfers", "-1", "--out", str(tmp_path / "other")]) == 2
    assert "--transfers must be" in capsys.readouterr().err


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
