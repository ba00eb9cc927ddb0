"""Every certificate survives the search for two inputs that refute it; one that composes wrongly does not."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from benchmarks.certificates import KINDS, attacked
from holonomy.layers import HTC
from holonomy.manifolds import Lorentz
from holonomy.theory import assert_lipschitz, certify, lipschitz_bound
from holonomy.theory.certificates import heads, layers, refinements
from holonomy.theory.certificates.constants.affine import reach
from holonomy.theory.certificates.regions import follow

# An attack calls the manifold a thousand times.
pytestmark = pytest.mark.usefixtures("without_shape_checks")


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


def expands_and_contracts():
    """Ten times longer, then a tenth: about a point far from the origin the second map contracts nothing."""
    m = Lorentz(-1.0, dtype=torch.float64)
    model = nn.Sequential(*(HTC(1, 1, m, bias=False, dtype=torch.float64) for _ in range(2)))
    with torch.no_grad():
        for layer, size in zip(model, (10.0, 0.1), strict=True):
            layer.weight.copy_(torch.tensor([[0.0, size]]))
    return model, m.lift(torch.tensor([[math.sinh(1.0)]], dtype=torch.float64))


def test_a_radius_from_the_wrong_ball_is_refuted(monkeypatch):
    model, x = expands_and_contracts()
    assert_lipschitz(model, certify(model, 0.01, x=x, starts=0).constant, x=x, radius=0.01)
    whole_ball_forgotten(monkeypatch)
    with pytest.raises(AssertionError):
        assert_lipschitz(model, certify(model, 0.01, x=x, starts=0).constant, x=x, radius=0.01)


def test_balls_that_are_not_stretched_are_refuted(monkeypatch):
    assert not attacked(124, names=["HRC"]).violated
    stretched_balls_forgotten(monkeypatch)
    assert attacked(124, names=["HRC"]).violated
