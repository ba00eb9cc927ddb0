"""The trials of single claims at inputs that can be done by hand: what they measure and what they allow."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from holonomy.layers import EquivariantLinear
from holonomy.theory import Draws, select, verify
from holonomy.theory.attention.projections import Projections
from holonomy.theory.certificates.constants.affine import affine_stretch
from holonomy.theory.certificates.constants.linear_attention import Features, linear_stretch_with_eps
from holonomy.theory.claims import pictures, sharpest
from holonomy.theory.claims.statements import collapse, hyperbolic, lipschitz, printed, tokens
from holonomy.theory.claims.verdict import Trial

DOUBLE = {"dtype": torch.float64}


def numbers(*rows):
    return torch.tensor(rows, **DOUBLE)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), **DOUBLE)


def test_the_softmax_of_a_rare_key_by_hand():
    most, least = printed._entrywise(numbers(0.1, 0.9), numbers(1.0, 0.0))
    total = 0.1 * math.e + 0.9
    assert (most.measured, most.bound) == (pytest.approx(math.e / total), 3.0)
    assert (least.measured, least.bound) == (0.0, pytest.approx(1 / total))


def test_what_goes_through_weights_and_values_follows_the_scale():
    layer = Projections(drawn(2, 1, 2, 2), drawn(1, 1, 2, 2), scale=0.3)
    x = drawn(3, 2)
    usual = replace(layer, keys=0.3**0.5 * layer.keys, scale=1.0)
    for part in ("values", "weights"):
        here, same, other = (
            lipschitz.stretch_through(x, each, part) for each in (layer, usual, replace(layer, scale=2.0))
        )
        torch.testing.assert_close(here, same)
        assert abs(here / other - 1) > 0.01


def test_lemma_c2_by_hand():
    layer, x = (
        Projections(0.5 * torch.ones(3, 1, 1, 1, **DOUBLE), torch.ones(2, 1, 1, 1, **DOUBLE)),
        numbers([2.0], [1.0]),
    )
    for corrected, factor in ((False, 2.0), (True, 3.0)):
        found = lipschitz._compare_c2(x, layer, corrected=corrected)
        assert found.bound.item() == pytest.approx(factor * 1.0**3 * 2.0)


def test_three_tokens_far_out_by_hand():
    first = next(iter(printed._not_global(Draws())))
    assert first.measured == pytest.approx(2 * 3**2 / 3)


def test_scores_of_a_class_that_is_none_are_counted():
    assert printed._scoring((1, 0), [(0,), (1,)]) == 2
    assert printed._scoring((0, 1), [(0,), (1,)]) == 0


def test_theorem_l_plus_is_reached_up_to_the_factor_that_is_claimed():
    assert max(trial.ratio for trial in lipschitz._orders(Draws(budget=0.1))) > 0.9


def test_an_allowance_on_a_chain_is_the_smaller_of_two(monkeypatch):
    for family in ("search", "_opposites"):
        monkeypatch.setattr(collapse, family, lambda *_: ())
    trials = list(collapse._chain(Draws()))
    assert len(trials) == 60
    assert all(trial.bound <= trial.at["order"] for trial in trials)


def test_refinements_are_bounded_on_the_ball_that_they_are_tried_on(monkeypatch):
    layers = []

    def over_ball(_draws, layer, radius, _features):
        layers.append(layer)
        bound = hyperbolic.lipschitz_bound(layer, radius / hyperbolic.root(layer.manifold_in))
        return [Trial(0.0, bound, at={"radius": radius})]

    monkeypatch.setattr(hyperbolic, "over_ball", over_ball)
    (claim,) = select(["hyperbolic.refinement"])
    trials = [trial for trial in claim.trials(Draws()) if "radius" in trial.at]
    assert len(trials) == len(layers) == 8
    for trial, layer in zip(trials, layers, strict=True):
        before, after = (math.sqrt(-end.curvature.item()) for end in (layer.manifold_in, layer.manifold_out))
        bias = None if layer.function.bias is None else before * layer.function.bias.detach()
        unit = affine_stretch(layer.function.weight, bias, trial.at["radius"])
        assert trial.bound == pytest.approx(unit * before / after)


def test_the_first_round_refutes_that_any_direction_is_reached_in_few_steps():
    (found,) = verify(["linear_maps.steps_anywhere"], budget=0.05)
    assert found.trials == 1
    assert found.holds is False


def test_two_parts_of_a_point_are_stretched_by_the_root_of_two():
    (claim,) = select(["hyperbolic.ends"])
    bounds = [trial.bound for trial in claim.trials(Draws(budget=0.25))]
    assert sum(abs(bound - math.sqrt(2)) < 1e-12 for bound in bounds) == 64


def test_an_average_is_bounded_at_the_lengths_of_its_features():
    parts = [drawn(2, 2).abs() * size for size in (1.0, 2.0, 0.5)]
    radii = tuple(part.norm(dim=-1).amax().item() for part in parts)
    wanted = linear_stretch_with_eps(Features((1.0, 1.0, 1.0), radii, 0.0), 0.1, 2, "l2")
    assert sharpest.average_bound(parts, 0.1, cone=False) == pytest.approx(wanted)


@pytest.mark.parametrize("family", ["about_points", "activations", "refinements", "residuals", "dropouts"])
def test_the_sharpest_inputs_reach_what_is_known(family):
    for trial in getattr(sharpest, family)(Draws()):
        assert trial.ratio == pytest.approx(trial.known, rel=1e-2 if family == "about_points" else 1e-3)


def test_queries_keys_and_values_alone_reach_their_terms():
    for trial in sharpest.softmax_at(Draws(), "geodesic"):
        assert trial.ratio == pytest.approx(trial.known, rel=5e-3)
        assert trial.bound > 1  # values that coincide would leave 0.1, of their own stretch


def test_a_sum_over_rows_is_the_largest_output_of_ones():
    for kind in range(15):
        layer = EquivariantLinear(2, 2, 1, 1, bias=False, **DOUBLE)
        with torch.no_grad():
            layer.weight.zero_()
            layer.weight[kind] = 2.0
            wanted = layer(torch.ones(4, 4, 1, **DOUBLE)).amax().item()
        assert tokens._steepness(layer, 4) == pytest.approx(wanted)


def test_errors_of_networks_fall_with_the_scale(monkeypatch):
    monkeypatch.setattr(tokens, "_scales", lambda _: (1.0, 3.0, 30.0))
    found = {}
    for trial in tokens._networks(Draws()):
        found.setdefault((trial.at["k"], trial.at["n"]), []).append(trial.bound)
    assert found
    for bounds in found.values():
        assert all(b < a for a, b in pairwise(bounds))


class Axes:
    """Keeps what is plotted."""

    def __init__(self):
        self.lines = []

    def plot(self, across, up, style, label=None, color=None):
        del style, color
        self.lines.append((label, list(across), list(up)))

    def set(self, **_):
        pass

    set_ylabel = set_ylim = legend = imshow = lambda self, *_, **__: None


def test_every_panel_shows_its_trials():
    at = {"n": 4.0, "radius": 1.0, "printed": 3.0, "castin": 3.0, "plus": 2.0, "lower": 1.0, "a": 3.0}
    trials = {
        "lipschitz.plus_sharp": [Trial(1.0, 2.0, at={**at, "b": b}) for b in (0.3, 3.0, 10.0)],
        "lipschitz.ball": [Trial(1.0, 2.0, at={**at, "N": order}) for order in (1.0, 2.0, 3.0)],
        "tokens.lemma_1": [Trial(1.0, 2.0, at={**at, "k": order}) for order in (1.0, 2.0, 3.0)],
    }
    for draw in (pictures._sandwich, pictures._radius, tokens._heads):
        axes = [Axes() for _ in range(3)]
        draw(axes, trials)
        panels = axes[-1:] if draw is tokens._heads else axes
        assert all(panel.lines and all(up for _, _, up in panel.lines) for panel in panels)
    assert [label for label, _, _ in axes[-1].lines if label] == ["k = 1", "k = 2", "k = 3"]
