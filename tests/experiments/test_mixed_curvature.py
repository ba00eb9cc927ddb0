"""Curvatures from distances: slopes, degrees of freedom, intervals of known cases, graphs, and a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import mixed_curvature
from experiments.mixed_curvature import KINDS, distortion, generated, graph, main, space_of
from experiments.models.curvature_intervals import Fit, Signature, _moved, best_fit, distances, held_at, interval


@pytest.mark.parametrize("signature", [(("H", 2),), (("S", 2),), (("H", 3), ("E", 2), ("S", 1))])
def test_distances_are_those_of_the_library_and_slopes_their_derivatives(
    signature: tuple[tuple[str, int], ...],
) -> None:
    rng, space = np.random.default_rng(0), Signature(signature)
    points = space.lift(rng.standard_normal((7, sum(dim for _, dim in signature))))
    fit = Fit(points, np.where(space.flat, 0.0, 0.3 * rng.standard_normal(len(signature))))
    found, slopes = distances(space, fit, slopes=True)
    product = space_of(space, fit.log_radii.tolist()).double()
    x = product.lift(product.without_times(torch.from_numpy(points)))
    i, j = np.triu_indices(7, 1)
    np.testing.assert_allclose(found, product.dist(x[i], x[j]).detach(), rtol=1e-6)  # curvatures began in float32
    along = rng.standard_normal(slopes.shape[1])
    along[slopes.shape[1] - len(signature) + np.flatnonzero(space.flat)] = 0
    ahead, behind = (distances(space, _moved(space, fit, step * along))[0] for step in (1e-6, -1e-6))
    np.testing.assert_allclose((ahead - behind) / 2e-6, slopes @ along, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("signature", [(("H", 2),), (("S", 3),), (("H", 2), ("S", 2)), (("H", 2), ("E", 2))])
def test_freedom_is_the_rank_that_the_fit_leaves(signature: tuple[tuple[str, int], ...]) -> None:
    rng, space = np.random.default_rng(1), Signature(signature)
    fit = Fit(space.lift(rng.standard_normal((15, sum(dim for _, dim in signature)))), np.zeros(len(signature)))
    slopes = distances(space, fit, slopes=True)[1]
    slopes = np.delete(slopes, slopes.shape[1] - len(signature) + np.flatnonzero(space.flat), axis=1)
    assert space.freedom(15) == len(slopes) - np.linalg.matrix_rank(slopes, tol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_distances_give_the_curvature(kind: str) -> None:
    signature, _, wanted = generated(kind, 14, 1e-6, 3)
    best = best_fit(signature, wanted, 14)
    np.testing.assert_allclose(best.log_radii, 0.0, atol=1e-3)
    for factor in range(len(KINDS[kind])):
        low, high = interval(signature, wanted, best, factor)
        assert high - low < 1e-3
        assert abs(low + high) < 2 * (high - low)  # the truth is within two widths of the middle


def test_the_ends_are_where_the_sum_of_squares_is_at_its_limit() -> None:
    """1 + F / nu with the quantile of F for one and nu = 14 * 13 / 2 - (28 - 3) - 1 degrees of freedom."""
    signature, _, wanted = generated("tree", 14, 0.05, 0)
    best = best_fit(signature, wanted, 14)
    for end in interval(signature, wanted, best, 0):
        found = held_at(signature, wanted, best, 0, end).rss / best.rss - 1
        assert found == pytest.approx(3.9886 / 65, rel=0.03)


def test_what_is_flat_has_an_open_interval() -> None:
    rng = np.random.default_rng(0)
    signature = Signature((("H", 2),))
    flat = rng.standard_normal((14, 2))
    i, j = np.triu_indices(14, 1)
    wanted = np.linalg.norm(flat[i] - flat[j], axis=1)
    wanted = wanted + 0.1 * rng.standard_normal(wanted.shape)
    assert interval(signature, wanted, best_fit(signature, wanted, 14), 0)[1] == np.inf


def test_graphs_have_the_distances_that_their_names_say() -> None:
    assert graph("cycle", 0)[0].max() == 15
    both = graph("tree x cycle", 0)
    torch.testing.assert_close(both[0, 3], torch.tensor(3.0))  # the other side of a cycle of six
    left, right = both[0, ::6], both[0, :6]
    torch.testing.assert_close(both[0], (left[:, None].square() + right.square()).sqrt().flatten())


def test_signatures_have_equally_many_dimensions() -> None:
    assert {sum(int(part[1]) for part in name.split()) for name in mixed_curvature.SIGNATURES} == {3}


def test_a_cycle_lies_on_a_circle() -> None:
    found = distortion("cycle", "H2 S1", 0, 20)
    assert found["error"] < 0.02 < distortion("cycle", "E3", 0, 20)["error"]
    # Its length is four times the mean of all distances, which is one.
    assert found["curvatures"][1] == pytest.approx((np.pi / 2) ** 2, rel=0.01)


def test_a_run_leaves_its_tables_and_picture_and_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sets", "2", "--points", "12", "--noises", "0.02", "--seeds", "1", "--steps", "2", "--threads", "1"]
    words += ["--quiet", "--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(tmp_path / "found.json")]) == 0
    said = capsys.readouterr().out
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out == said
    content = json.loads((tmp_path / "found.json").read_text())
    assert [row["factor"] for row in content["coverage"]] == ["H", "S", "H", "S"]
    assert len(content["signatures"]) == 15
    assert (tmp_path / "run" / "mixed_curvature.png").exists()
    assert main([*words, "--points", "5", "--overwrite"]) == 2
    assert main([*words, "--seeds", "-1", "--overwrite"]) == 2
    assert "--points must be at least 12" in capsys.readouterr().err


def test_data_sets_are_drawn_from_the_first_seed_on(tmp_path: Path) -> None:
    words = ["--data", "sphere", "--points", "12", "--seeds", "0", "--threads", "1", "--quiet"]
    shown = list[list[list[float]]]()
    for first, sets in ((0, 2), (1, 1)):
        more = ["--first", str(first), "--sets", str(sets), "--out", str(tmp_path / f"from-{first}")]
        assert main([*words, *more]) == 0
        content = json.loads((tmp_path / f"from-{first}" / "results.json").read_text())
        assert content["first"] == first
        shown.append(content["coverage"][0]["shown"])
    assert shown[1] == shown[0][1:]
