"""What layers do to distances: the known isometries, the known flips, and the claims' verdicts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.layers import HRC, HTC, HypActivation
from holonomy.manifolds import Lorentz
from holonomy.theory import distance_scaling
from holonomy.theory.certificates.distances import boost, flipped, naive_change
from holonomy.theory.certificates.stretching import Ends
from holonomy.theory.claims.statements.distances import CLAIMS
from holonomy.theory.claims.verdict import Draws

DOUBLE = {"dtype": torch.float64}
seeds = st.integers(0, 10**6)
curvatures = st.floats(-10.0, -0.1)


@settings(max_examples=20)
@given(seed=seeds, first=curvatures, second=curvatures, features=st.integers(1, 5))
def test_a_boost_scales_all_distances_alike(seed, first, second, features):
    generator = torch.Generator().manual_seed(seed)
    source, target = Lorentz(first, **DOUBLE), Lorentz(second, **DOUBLE)
    layer = HTC(features, features, source, target, bias=False, **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(boost(torch.randn(features, generator=generator, **DOUBLE)))
    found = distance_scaling(layer, source.lift(torch.randn(6, features, generator=generator, **DOUBLE)))
    assert found.expected == pytest.approx(math.sqrt(first / second))
    assert found.least == pytest.approx(found.expected, rel=1e-9)
    assert found.largest == pytest.approx(found.expected, rel=1e-9)
    assert found.flipped == 0


def test_triples_are_counted():
    """Three points on a line: 0, 1, 3 become 0, 2, 1: seen from 0 and from the last the order changes, from 1 not."""
    before = torch.tensor([[0.0, 1.0, 3.0], [1.0, 0.0, 2.0], [3.0, 2.0, 0.0]])
    after = torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    # From 0: 1 < 3 becomes 2 > 1. From 1: 1 < 2 becomes 2 > 1. From 3: 3 > 2 becomes equal, which is no flip.
    assert flipped(before, after) == pytest.approx(2 / 3)
    assert flipped(before, before) == 0
    assert flipped(torch.ones(3, 3), after) == 0  # nothing differs before


def test_the_naive_change_flips_a_triple_of_a_line():
    source, target = Lorentz(-1.0, **DOUBLE), Lorentz(-1e-4, **DOUBLE)
    line = source.lift(torch.tensor([[1.0], [0.0], [2.2]], **DOUBLE))
    before = source.cdist(line, line)[0]
    after = target.cdist(naive_change(line, target), naive_change(line, target))[0]
    assert before[1] > before[2]
    assert after[1] < after[2]
    # The right change, multiplication by sqrt(kappa_1 / kappa_2), keeps every ratio.
    assert distance_scaling(HRC(torch.nn.Identity(), source, target), line).flipped == 0


def test_what_is_no_map_of_hyperboloids_is_refused():
    m = Lorentz(-1.0)
    x = m.lift(torch.randn(2, 3))
    with pytest.raises(ValueError, match="n at least 3"):
        distance_scaling(HypActivation(torch.relu, m), x)
    with pytest.raises(ValueError, match="Euclidean end"):
        distance_scaling(HypActivation(torch.relu, m), x, ends=Ends(m, None))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_verdicts_are_as_expected_in_both_dtypes(claim, dtype):
    verdict, _ = claim.measure(Draws(3, dtype=dtype, budget=0.2))
    assert verdict.holds is claim.expected


def test_about_a_quarter_of_the_triples_change_order():
    (claim,) = (claim for claim in CLAIMS if claim.name == "distances.general")
    _, trials = claim.measure(Draws(0, budget=2.0))
    for kind in range(3):  # linear maps, ReLU, LayerNorm
        shares = [trial.measured for trial in trials if trial.at["kind"] == kind]
        assert 0.15 < sum(shares) / len(shares) < 0.35


def test_points_that_coincide_have_no_ratio():
    manifold = Lorentz(-1.0, **DOUBLE)
    x = manifold.lift(torch.randn(3, 2, **DOUBLE))
    twice = distance_scaling(HRC(torch.neg, manifold), torch.cat([x, x]))
    assert twice.least == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"^x must hold two points apart"):
        distance_scaling(HRC(torch.neg, manifold), x[:1].expand(4, -1))
    with pytest.raises(ValueError, match=r"^x must be finite"):
        distance_scaling(HRC(torch.neg, manifold), x * math.nan)
    with pytest.raises(ValueError, match=r"^layer\(x\) must be finite"):
        distance_scaling(HRC(lambda s: s * math.nan, manifold), x)
