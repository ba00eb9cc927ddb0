"""The verdicts on our own theorems: none violated, exact ones exact, float32 as float64."""

from __future__ import annotations

import pytest
import torch

from holonomy.theory.claims.statements import hyperbolic, hyperbolic_attention
from holonomy.theory.claims.verdict import Draws

pytestmark = pytest.mark.usefixtures("without_shape_checks")

CLAIMS = {claim.name: claim for claim in (*hyperbolic.CLAIMS, *hyperbolic_attention.CLAIMS)}
EXACT = (
    "hyperbolic.refinement",
    "hyperbolic.bias",
    "hyperbolic.dropout",
    "hyperbolic.transformation",
    "hyperbolic.weights",
    "hyperbolic.ends",
    "hyperbolic.collapse",
)


@pytest.mark.parametrize("name", CLAIMS)
def test_no_theorem_is_violated_and_what_is_exact_is_attained(name):
    verdict, trials = CLAIMS[name].measure(Draws(2, budget=0.1))
    assert verdict.holds is True
    assert verdict.ratio <= 1 + 1e-9
    assert sum(trial.measured > 0 for trial in trials) > len(trials) / 2
    if name in EXACT:
        assert verdict.ratio == pytest.approx(1, abs=1e-6)


# Of fixed layers over the curvature: in float32 the claims on HTC, LayerNorm and attention by themselves say the same.
@pytest.mark.parametrize("name", [name for name in CLAIMS if name != "hyperbolic.curvature"])
def test_verdicts_in_float32_are_those_in_float64(name):
    verdict, _ = CLAIMS[name].measure(Draws(1, dtype=torch.float32, budget=0.05))
    assert verdict.holds is True or verdict.note == "below the rounding floor"
    assert not verdict.ratio > 1 + 1e-4


def test_a_verdict_is_reproduced_by_its_seed():
    for name in ("hyperbolic.linear_at", "hyperbolic.about"):
        first, second = (CLAIMS[name].measure(Draws(5, budget=0.2))[0] for _ in range(2))
        assert first == second
