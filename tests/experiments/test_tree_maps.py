"""Maps of trees: the split of the pairs, the drawing, the controls, and a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse.csgraph
import torch

from experiments import tree_maps
from experiments.data import transfers
from experiments.tree_maps import MAPS, Pairs, drawn, fit, main, paths


def tree(nodes: int = 20, seed: int = 0) -> torch.Tensor:
    return transfers.hops(transfers.grown(np.random.default_rng(seed), nodes))


def test_pairs_are_split_without_overlap() -> None:
    pairs = Pairs.of(tree(), 1, 0.5)
    sets = [{tuple(pair) for pair in part.T.tolist()} for part in (pairs.known, pairs.val, pairs.test)]
    assert len(set.union(*sets)) == sum(map(len, sets)) == 190
    assert [len(part) for part in sets] == [95, 19, 76]
    assert not pairs.all_known
    assert Pairs.of(tree(), 1).all_known


def test_paths_follow_known_pairs() -> None:
    pairs = Pairs.of(tree(), 2, 0.3)
    graph = np.zeros((20, 20))
    graph[tuple(pairs.known.numpy())] = pairs.hops[*pairs.known]
    ways = torch.from_numpy(scipy.sparse.csgraph.shortest_path(graph, directed=False)).float()
    assert paths(pairs) == pytest.approx(float(pairs.errors(ways[*pairs.test], pairs.test).mean()))
    assert paths(Pairs.of(tree(), 2)) == 0


def test_the_drawing_is_as_far_out_as_nodes_are_deep() -> None:
    hops = tree(30)
    places = drawn(hops, 3)
    torch.testing.assert_close(places.norm(dim=1), tree_maps.EDGE * hops[0])
    assert not places[:, 2].any()
    # No two nodes share a place.
    assert torch.pdist(places).min() > 0.01


def test_heights_hold_a_star_exactly() -> None:
    star = transfers.hops(np.array([-1] + [0] * 9))
    pairs = Pairs.of(star, 0)
    space = fit("flat with heights", pairs, 0.01 * torch.ones(10, 2), 0.1, 300)
    assert pairs.errors(space(pairs.test), pairs.test).mean().item() < 0.01


def test_in_two_numbers_a_node_hyperbolic_space_holds_a_tree_best() -> None:
    pairs = Pairs.of(tree(40, seed=1), 0)
    starts = (
        drawn(pairs.hops, 2),
        drawn(pairs.hops, 2),
        0.1 * torch.randn(40, 2, generator=torch.Generator().manual_seed(0)),
    )
    spaces = [fit(kind, pairs, start, 0.1, 200) for kind, start in zip(MAPS, starts, strict=True)]
    errors = [pairs.errors(space(pairs.test), pairs.test).mean().item() for space in spaces]
    assert errors[0] < 0.7 * min(errors[1:])


def test_a_run_leaves_its_table_and_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "10", "--dims", "2", "--seeds", "2", "--steps", "3", "--threads", "1", "--quiet"]
    words += ["--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(tmp_path / "maps.json")]) == 0
    said = capsys.readouterr().out
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out == said
    content = json.loads((tmp_path / "maps.json").read_text())
    assert [row["map"] for row in content["rows"]] == 2 * ["paths", *MAPS]
    assert {"commit", "threads"} <= content["versions"].keys()
    assert main([*words, "--dims", "1", "--overwrite"]) == 2
    assert "--dims must be at least 2" in capsys.readouterr().err
    assert main([*words, "--shares", "0.01", "--overwrite"]) == 2
    assert "--shares must be so large that known pairs join all nodes" in capsys.readouterr().err
    assert (tmp_path / "run" / "results.json").exists()  # the old run
