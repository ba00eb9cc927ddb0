"""Verdicts follow from trials: what violates, what confirms, and what says nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holonomy.theory.claims.verdict import Claim, Draws, Trial, judge
from holonomy.theory.claims.verify import CLAIMS, select, verify

pytestmark = pytest.mark.usefixtures("without_shape_checks")


def verdict(*trials, **options):
    return judge("a.b", "nowhere", trials, **options)


@pytest.mark.parametrize(
    ("trial", "kind", "holds"),
    [
        (Trial(1.0, 2.0), "exact", True),
        (Trial(2.0, 1.0), "exact", False),
        (Trial(2.0, 1.0), "lower", False),
        (Trial(2.0, 1.0), "upper", None),
        (Trial(1.0, 2.0), "upper", True),
        (Trial(2.0, 1.0, assumption_met=False), "exact", None),
        (Trial(1.0, math.inf), "exact", None),
        (Trial(1.0, math.nan), "exact", None),
        (Trial(1e-9, 0.0, floor=1e-6), "exact", None),
        (Trial(0.0, 0.0), "exact", True),
        (Trial(1.0, 0.0), "exact", False),
        (Trial(math.nan, 1.0), "exact", False),
        (Trial(math.inf, 1.0), "exact", False),
        (Trial(1.0 + 1e-10, 1.0), "exact", True),
        (Trial(1.0 + 1e-7, 1.0), "exact", False),
    ],
)
def test_one_trial(trial, kind, holds):
    assert verdict(trial, kind=kind).holds is holds


def test_float32_may_exceed_by_its_rounding():
    assert verdict(Trial(1.00005, 1.0), dtype=torch.float32).holds
    assert not verdict(Trial(1.001, 1.0), dtype=torch.float32).holds


def test_the_worst_trial_decides_and_a_violation_beats_all():
    found = verdict(Trial(1.0, 2.0), Trial(3.0, 4.0), Trial(9.0, 1.0, assumption_met=False))
    assert (found.holds, found.ratio, found.median, found.trials, found.counted) == (True, 0.75, 0.625, 3, 2)
    found = verdict(Trial(1.0, 2.0), Trial(2.0, 1.0, note="why"))
    assert (found.holds, found.note, found.surprising) == (False, "why", True)
    assert not verdict(Trial(2.0, 1.0), expected=False).surprising


@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        (Trial(1.0, 2.0, assumption_met=False), "assumptions"),
        (Trial(1.0, math.inf), "says nothing"),
        (Trial(0.0, 1.0, floor=1e-6), "rounding"),
    ],
)
def test_what_is_undecided_says_why(trial, reason):
    assert reason in verdict(trial).note


def test_no_trials_are_an_error():
    with pytest.raises(ValueError, match="trials must not be empty"):
        verdict()


def test_a_verdict_needs_a_dtype():
    with pytest.raises(TypeError, match=r"dtype must be a floating-point torch.*, got None"):
        judge("sines", "trigonometry", [Trial(0.5, 1.0)], dtype=None)


@given(st.integers(0, 2**31))
def test_draws_do_not_depend_on_the_dtype(seed):
    wide, narrow = Draws(seed).normal(3), Draws(seed, dtype=torch.float32).normal(3)
    assert torch.equal(wide.float(), narrow)
    assert 2 <= Draws(seed).integer(2, 4) <= 4
    assert 0.1 <= Draws(seed).logarithmic(0.1, 2.0) <= 2


def test_a_claim_starts_from_its_own_seed():
    def trials(draws):
        yield Trial(draws.uniform(0.0, 1.0), 1.0)

    claim = Claim("a.b", "nowhere", "u <= 1", trials)
    assert claim.measure(Draws(4))[0].measured == claim.measure(Draws(4))[0].measured


def test_verdicts_repeat_and_leave_the_generator_of_torch_as_it_was():
    before = torch.get_rng_state()
    first = verify(["hot.opposite"])  # whose layers draw biases from it
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert verify(["hot.opposite"]) == first


def test_selection():
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names)
    assert {claim.name.split(".")[0] for claim in select(["masked", "topology.chung"])} == {"masked", "topology"}
    with pytest.raises(ValueError, match="claims must be among"):
        select(["nothing"])
    with pytest.raises(ValueError, match="budget must be positive"):
        verify([], budget=0.0)


OURS = ("collapse", "masked", "lipschitz", "topology", "curvature", "determinant", "lower_orders", "certified")


@pytest.mark.parametrize("name", [claim.name for claim in CLAIMS if claim.name.split(".")[0] in OURS])
def test_claims_come_out_as_expected(name):
    """Every verdict is the expected one, in float64, and in float32 the same or below the floor."""
    (wide,) = verify([name], budget=0.1)
    assert wide.holds is wide.expected
    (narrow,) = verify([name], budget=0.1, dtype=torch.float32)
    assert narrow.holds in (wide.holds, None)
