"""Midpoints and attention: known answers, the flat limit, masks, heads, and where a theorem ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.layers import HypLinearAttention, HypSoftmaxAttention
from holonomy.manifolds import Lorentz
from holonomy.ops.softmax_attention import SIMILARITIES, hyperbolic_softmax_attention
from holonomy.theory import certify, hyperbolic_collapse_bound, lipschitz_bound, stretch
from holonomy.theory.attention.projections import NotCoveredError
from holonomy.theory.certificates.constants.linear_attention import Features, linear_stretch_with_eps
from holonomy.theory.certificates.constants.midpoint import midpoint_shares, residual_stretch, weights_bound
from holonomy.theory.certificates.constants.softmax_attention import Extent, softmax_stretch, unit_scale
from holonomy.theory.certificates.stretching import METRICS, Ends

DOUBLE = {"dtype": torch.float64}
UNIT = Lorentz(-1.0, **DOUBLE)
seeds = st.integers(0, 10**6)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@settings(max_examples=20)
@given(seed=seeds, count=st.integers(2, 5))
def test_shares_are_the_derivatives_of_the_midpoint(seed, count):
    generator = torch.Generator().manual_seed(seed)
    x = UNIT.lift(torch.randn(count, 3, generator=generator, **DOUBLE))
    weights = torch.rand(1, count, generator=generator, **DOUBLE)
    shares, _ = midpoint_shares(weights, UNIT.space(x))
    assert shares.sum().item() == pytest.approx(1)
    for j in range(count):

        def moved(z, j=j):
            points = torch.cat([x[:j], z[None], x[j + 1 :]])
            return UNIT.centroid(points, weights)[0]

        assert stretch(moved, x[j], ends=Ends(UNIT, UNIT)).item() == pytest.approx(shares[0, j].item())


def test_a_midpoint_of_two_ends_moves_with_its_weights_as_far_as_it_may():
    ends = UNIT.lift(torch.tensor([[math.sinh(1.3)], [-math.sinh(1.3)]], **DOUBLE))
    weights = torch.tensor([[math.exp(0.4), math.exp(-0.4)], [math.exp(-0.4), math.exp(0.4)]], **DOUBLE)
    a, b = UNIT.centroid(ends, weights)
    assert UNIT.dist(a, b).item() == pytest.approx(weights_bound(2.6, 1.6), rel=1e-12)
    assert weights_bound(2.6, 0.0) == 0
    assert weights_bound(2.6, math.inf) == pytest.approx(2.6)


def test_residual_known_answers():
    assert residual_stretch(3.0) == 2
    assert residual_stretch(0.0) == 0.5
    assert residual_stretch(0.0, 3.0) == 0.5  # the branch may pull by a half only
    assert residual_stretch(3.0, 3.0) == 2.5
    assert residual_stretch(math.inf) == math.inf


def test_logits_by_distance_need_no_radius():
    layer = HypSoftmaxAttention(4, 1, UNIT, similarity="geodesic", **DOUBLE)
    constants = [lipschitz_bound(h) for h in (layer.query, layer.key, layer.value)]
    # One head: L_v + s (L_q + L_k), with tanh = 1 and s = 1/sqrt(4).
    assert lipschitz_bound(layer) == pytest.approx(constants[2] + 0.5 * (constants[0] + constants[1]))
    for similarity in ("geodesic_squared", "lorentz_squared"):
        assert lipschitz_bound(HypSoftmaxAttention(4, 1, UNIT, similarity=similarity, **DOUBLE)) == math.inf


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_scales_do_not_depend_on_units(similarity):
    """Attention on points of another curvature, scaled to unit distances, has the logits of the unit scale."""
    m = Lorentz(-4.0, **DOUBLE)
    x = torch.randn(5, 3, **DOUBLE)
    out = 2 * hyperbolic_softmax_attention(x, x, x, curvature=m.curvature, similarity=similarity)
    y = UNIT.lift(2 * x)
    d = UNIT.cdist(y, y)
    distance = {"geodesic": d, "geodesic_squared": d**2, "lorentz_squared": 2 * (d.cosh() - 1)}[similarity]
    weights = (-unit_scale(similarity, 3, -4.0) * distance).softmax(-1)
    torch.testing.assert_close(out, UNIT.space(UNIT.centroid(y, weights)))


def test_coincident_values_leave_only_the_values_path():
    at = softmax_stretch(5.0, 5.0, 0.7, Extent(3.0, 3.0, 0.0), scale=1.0)
    assert at == pytest.approx(0.7)
    many = softmax_stretch(0.0, 0.0, 1.0, Extent(0.0, 0.0, 0.0), scale=1.0, metric="l2", tokens=9)
    assert many == pytest.approx(1)  # equal weights: an average
    assert softmax_stretch(0.0, 0.0, 1.0, Extent(0.0, 0.0, 0.0), scale=1.0, metric="l2", tokens=9, masked=True) == 3
    with pytest.raises(ValueError, match="tokens must be given"):
        softmax_stretch(1.0, 1.0, 1.0, Extent(1.0, 1.0, 1.0), scale=1.0, metric="l2")


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("metric", METRICS)
def test_key_padding_and_heads_are_covered(similarity, metric):
    source, target, hidden = (Lorentz(k, **DOUBLE) for k in (-1.7, -0.6, -0.9))
    layer = HypSoftmaxAttention(4, 2, source, target, manifold_hidden=hidden, similarity=similarity, **DOUBLE)
    mask = torch.tensor([False, False, False, True, True])
    x = source.lift(0.3 * torch.randn(20, 5, 4, **DOUBLE))
    radius = source.dist0(x).max().item()

    def masked(points):
        return layer(points, mask.expand(points.shape[:-1]))

    found = stretch(masked, x, ends=Ends(source, target), joint=True, metric=metric).max().item()
    assert 0 < found <= lipschitz_bound(layer, radius, tokens=3, metric=metric)


def test_dropped_weights_are_masks_of_single_queries():
    layer = HypSoftmaxAttention(4, 1, UNIT, dropout=0.5, **DOUBLE)
    bound = {mode: lipschitz_bound(layer.train(mode), 0.1, tokens=9, metric="l2") for mode in (True, False)}
    assert bound[True] > 2 * bound[False]  # sqrt(9) for nearly 1
    assert lipschitz_bound(layer.train(), 0.1) == lipschitz_bound(layer.eval(), 0.1)  # sup: no difference
    with pytest.raises(NotCoveredError, match="call eval"):
        certify(layer.train(), x=UNIT.lift(torch.randn(3, 4, **DOUBLE)))


def test_midpoints_of_linear_attention_are_not_covered():
    layer = HypLinearAttention(4, 1, UNIT, average="midpoint", **DOUBLE)
    with pytest.raises(NotCoveredError, match="must average space parts"):
        lipschitz_bound(layer, 0.1)


# H9


@settings(max_examples=20)
@given(seed=seeds, kappa=st.floats(-3.0, -0.1))
def test_rank_collapse(seed, kappa):
    generator = torch.Generator().manual_seed(seed)
    m = Lorentz(kappa, **DOUBLE)
    query, key, value = (0.7 * torch.randn(4, 2, generator=generator, **DOUBLE) for _ in range(3))
    mask = torch.tensor([False, False, False, True])  # one for all queries
    for hidden in (None, mask):
        out = hyperbolic_softmax_attention(query, key, value, hidden, curvature=m.curvature)
        shown = [query, *(z if hidden is None else z[:3] for z in (key, value)), out]
        sizes = [m.cdist(m.lift(z), m.lift(z)).max().item() * math.sqrt(-kappa) for z in shown]
        assert sizes[3] <= hyperbolic_collapse_bound(*sizes[:3], unit_scale("geodesic_squared", 2, kappa))


def test_rank_collapse_tends_to_theorem_rc():
    """Flat: diam f <= tanh(s diam q diam k / 4) diam v with s = 2/sqrt(d), the form ``product`` at N = 1."""
    query, key, value = (torch.randn(5, 3, **DOUBLE) for _ in range(3))
    sizes = [torch.cdist(z, z).max().item() for z in (query, key, value)]
    flat = math.tanh(2 / math.sqrt(3) * sizes[0] * sizes[1] / 4) * sizes[2]
    logits = -torch.cdist(query, key).square() / math.sqrt(3)
    mean = logits.softmax(-1) @ value
    for kappa, room in ((-1e-3, 1e-2), (-1e-6, 1e-5)):
        root = math.sqrt(-kappa)
        bound = hyperbolic_collapse_bound(*(root * z for z in sizes), unit_scale("geodesic_squared", 3, kappa)) / root
        assert bound == pytest.approx(flat, rel=room)
        out = hyperbolic_softmax_attention(query, key, value, curvature=torch.tensor([kappa], **DOUBLE))
        torch.testing.assert_close(out, mean, rtol=10 * room, atol=10 * room)
    assert torch.cdist(mean, mean).max().item() <= flat


def test_masks_of_single_queries_break_rank_collapse():
    """Two queries that coincide, each with a key of its own, put out two different values."""
    ends = torch.tensor([[1.0], [-1.0]], **DOUBLE)
    nowhere = torch.zeros(2, 1, 1, **DOUBLE)
    own = torch.tensor([[False, True], [True, False]])  # as a batch of two queries
    out = hyperbolic_softmax_attention(
        nowhere, ends.expand(2, 2, 1), ends.expand(2, 2, 1), own, curvature=torch.tensor([-1.0], **DOUBLE)
    )
    assert (out[0] - out[1]).abs().item() == pytest.approx(2)
    assert hyperbolic_collapse_bound(0.0, 2 * math.asinh(1), 2 * math.asinh(1), 1.0) == 0


# H10


def test_linear_attention_has_no_constant_where_a_query_vanishes():
    layer = HypLinearAttention(2, 1, UNIT, **DOUBLE)
    assert lipschitz_bound(layer, 1.0, tokens=4) == math.inf
    assert linear_stretch_with_eps(Features((1.0,) * 3, (1.0,) * 3, 0.0), 0.0, 4) == math.inf


def test_n_over_eps_is_real():
    """All keys k, all values v: the slope in the query at zero is N |k| |v| / eps."""
    k, v, eps, n = torch.tensor([0.6, 0.8], **DOUBLE), torch.tensor([2.0], **DOUBLE), 0.1, 7

    def average(q):
        meets = n * (q @ k)
        return meets[..., None] * v / (meets[..., None] + eps)

    slope = stretch(average, torch.zeros(1, 2, **DOUBLE), ends=Ends(None, None)).item()
    assert slope == pytest.approx(n * 2 / eps)
    bound = linear_stretch_with_eps(Features((1.0, 0.0, 0.0), (0.0, 1.0, 2.0), 0.0), eps, n)
    assert slope <= bound == pytest.approx(math.sqrt(2) * slope)


def test_one_query_collapses_whatever_the_keys():
    for sizes in ((0.0, math.inf, 1.0), (math.inf, 0.0, 1.0), (0.0, 1.0, math.inf)):
        assert hyperbolic_collapse_bound(*sizes[:2], 5.0, sizes[2]) == 0
