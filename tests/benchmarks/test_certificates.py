"""Every certificate survives the search for two inputs that refute it; one that composes wrongly does not."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import certificates
from benchmarks.certificates import KINDS, Attacked, attacked, main
from holonomy.theory import lipschitz_bound
from holonomy.theory.certificates import heads, layers, refinements
from holonomy.theory.certificates.constants.affine import reach
from holonomy.theory.certificates.regions import follow


def test_every_layer_that_has_a_bound_is_attacked():
    known = {kind.__name__ for registry in (follow.registry, lipschitz_bound.registry) for kind in registry}
    assert known - {"object"} <= set(KINDS)


@pytest.mark.parametrize("part", range(4))
def test_no_certificate_is_refuted(part):
    for number in range(part, 2 * len(KINDS), 4):
        found = attacked(number)
        assert not found.violated, (number, found)


def whole_ball_forgotten(monkeypatch):
    """Radii and diameters of images from the constant of the small balls about the tokens."""
    real = layers.transformation

    def wrong(layer, rows, region):
        image = real(layer, rows, region)
        bias = layers.unit_bias(layer)
        far = reach(layer.weight[rows], None if bias is None else bias[rows], region.radius, image.constant)
        wide = 2 * min(far, image.constant * region.radius) if image.constant else 0.0
        return image._replace(radius=far, diameter=wide)

    for module in (layers, heads):
        monkeypatch.setattr(module, "transformation", wrong)


def stretched_balls_forgotten(monkeypatch):
    """Inside a refinement the balls stay as large as they came."""

    def wrong(region, **changes):
        changes.pop("spread", None)
        return dataclasses.replace(region, **changes)

    monkeypatch.setattr(refinements, "replace", wrong)


def test_a_radius_from_the_wrong_ball_is_refuted_by_a_random_draw(monkeypatch):
    # Scope "about" is the second of three: draws 1, 4, 7.
    assert not any(attacked(number, names=["there and back"]).violated for number in (1, 4, 7))
    whole_ball_forgotten(monkeypatch)
    assert any(attacked(number, names=["there and back"]).violated for number in (1, 4, 7))


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    drawn = []

    def counted(number, seed):
        drawn.append(number)
        return Attacked("HTC", "ball", 0.25 * number, number == 2)

    monkeypatch.setattr(certificates, "attacked", counted)
    file = tmp_path / "certificates.json"
    for draws in ("2", "4", "4"):
        main(["--draws", draws, "--json", str(file)])
    content = json.loads(file.read_text())
    assert drawn == [0, 1, 2, 3]
    assert (content["draws"], content["violations"], content["worst"]) == (4, 1, 0.75)
    assert content["kinds"] == {"HTC, ball": {"draws": 4, "violations": 1, "worst": 0.75}}
    assert "4 of 4 draws: 1 violations, worst ratio 0.75" in capsys.readouterr().out


def test_balls_that_are_not_stretched_are_refuted(monkeypatch):
    assert not attacked(16, names=["HRC"]).violated
    stretched_balls_forgotten(monkeypatch)
    assert attacked(16, names=["HRC"]).violated
