"""Linear maps far from the origin: what a step count means, the controls, and a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import linear_maps
from experiments.linear_maps import MAPS, SPACE, InsideHyperplanes, charts, growth, main, predicted, radii, steps
from holonomy.layers import LorentzPLFC
from holonomy.theory.certificates.far_out import hyperplane_stretch


def test_a_layer_with_the_length_inside_is_that_outside_where_it_is_one():
    inside, outside = InsideHyperplanes(4), LorentzPLFC(4, 4, SPACE, bias=False)
    with torch.no_grad():
        inside.offset.normal_()
        outside.hyperplanes.weight.copy_(inside.weight)
        outside.hyperplanes.offset.copy_(inside.offset)
    x = SPACE.lift(torch.randn(5, 4))
    torch.testing.assert_close(inside(x), outside(x))


def test_distances_are_those_of_the_manifold():
    for near in (6.0, 1.0):
        x, y = (linear_maps.point(torch.randn(8), rapidity) for rapidity in (near, 6.0))
        torch.testing.assert_close(linear_maps.apart(x, y).float(), SPACE.dist(x, y))


def test_steps_are_counted_until_the_target_is_near():
    for name in MAPS:
        found = steps(name, "anywhere", 2.0, 3, optimizer="sgd", rate=0.05, most=200)
        assert 0 < found < 60, name
        assert steps(name, "anywhere", 2.0, 3, optimizer="sgd", rate=0.05, most=found - 1) == found
    assert steps("htc", "anywhere", 5.0, 0, optimizer="sgd", rate=0.05, most=20) == 21


def test_htc_takes_the_steps_of_the_law():
    found = sorted(steps("htc", "anywhere", 3.0, seed, optimizer="sgd", rate=0.05, most=200) for seed in range(3))
    assert found[1] == pytest.approx(predicted(3.0, 3), rel=0.2)


def test_charts_and_starts_by_what_is_known_of_them():
    found = charts(2.0, 0)
    assert found["hyperboloid (htc)"] == pytest.approx([1 / torch.tensor(2.0).cosh().item(), 1.0])
    assert found["exponential (tangent)"] == pytest.approx([1.0, torch.tensor(2.0).sinh().item() / 2])
    assert found["hyperplanes, axis"] == pytest.approx([1.0, 1.0])
    assert radii("htc, orthogonal", 3, 0) == pytest.approx([3.0] * 3, abs=1e-3)
    assert radii("hyperplanes, deviation 0.02", 3, 0)[-1] < 0.1
    assert growth(3.0) == pytest.approx(hyperplane_stretch(1.5, 3.0), rel=1e-6)


def test_a_run_leaves_its_tables_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--problems", "2", "--rapidities", "1", "2", "--most", "3", "--threads", "1", "--quiet"]
    words += ["--out", str(tmp_path / "run")]
    assert main([*words, "--json", str(tmp_path / "maps.json")]) == 0
    said = capsys.readouterr().out
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out == said
    content = json.loads((tmp_path / "maps.json").read_text())
    assert [row["map"] for row in content["rows"][:5]] == [name for name, _ in linear_maps.ROWS]
    assert (tmp_path / "run" / "linear_maps.png").exists()
    assert main([*words, "--rapidities", "0.2", "--overwrite"]) == 2
    assert "--rapidities" in capsys.readouterr().err
