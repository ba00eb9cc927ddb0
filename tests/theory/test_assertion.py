"""The assertion of a bound: a wrong one is refuted with a pair that anybody can check, a right one never."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from holonomy.layers import (
    HRC,
    HTC,
    ExpMapHTC,
    HypDropout,
    HypLayerNorm,
    HypMLR,
    HypSoftmaxAttention,
    SimplicialAttention,
)
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer
from holonomy.theory import BoundViolatedError, assert_lipschitz, certify, lipschitz_bound
from holonomy.theory.attention.projections import NotCoveredError, projections
from holonomy.theory.certificates.attack import Scope, _Hunt, _Space, attack_at
from holonomy.theory.certificates.stretching import Ends

pytestmark = pytest.mark.usefixtures("without_shape_checks")  # an attack calls the manifold ten thousand times
DOUBLE = {"dtype": torch.float64}
CURVED, FLATTER = Lorentz(-1.7, **DOUBLE), Lorentz(-0.6, **DOUBLE)


def linear(seed, features=3):
    torch.manual_seed(seed)
    return nn.Linear(features, features, **DOUBLE)


def spectral(layer):
    return torch.linalg.matrix_norm(layer.weight, 2).item()


# Layers whose constants are known exactly, the constant, and where it holds.
KNOWN = {
    "linear": (linear(0), spectral(linear(0)), {}),
    "linear in a ball": (linear(1), spectral(linear(1)), {"radius": 0.1, "tokens": 1}),
    "linear about an input": (linear(2), spectral(linear(2)), {"radius": 0.1, "x": torch.randn(2, 3)}),
    "linear at an input": (linear(3), spectral(linear(3)), {"x": torch.randn(2, 3), "metric": "sup"}),
    "softplus": (functional.softplus, 1.0, {"features": 2}),
    "refinement": (HRC(linear(4), CURVED, FLATTER), None, {}),
    "refinement in a ball": (HRC(linear(5), CURVED), None, {"radius": 0.5}),
    "transformation": (HTC(3, 2, CURVED, FLATTER, bias=False, **DOUBLE), None, {}),
    "layer norm": (HypLayerNorm(4, CURVED, eps=0.1, elementwise_affine=False), None, {"metric": "l2"}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_bound_that_is_too_small_is_refuted_and_a_right_one_holds(name):
    layer, bound, scope = KNOWN[name]
    bound = lipschitz_bound(layer, scope.get("radius", math.inf)) if bound is None else bound
    assert 0.95 * bound < assert_lipschitz(layer, bound, **scope) <= bound * (1 + 1e-5)
    with pytest.raises(AssertionError, match=r"bound must be at least .* got"):
        assert_lipschitz(layer, 0.9 * bound, **scope)


def test_the_pair_of_an_error_lies_in_the_scope_and_is_stretched_by_its_ratio():
    layer = HTC(2, 2, CURVED, FLATTER, **DOUBLE)
    x = CURVED.lift(torch.randn(3, 2, **DOUBLE))
    for about, centre in ((x, x), (None, CURVED.lift(torch.zeros(3, 2, **DOUBLE)))):
        with pytest.raises(BoundViolatedError) as caught:
            assert_lipschitz(layer, 0.1, radius=0.3, x=about)
        error, found = caught.value, caught.value.found
        apart, moved = CURVED.dist(found.x, found.y).amax(), FLATTER.dist(layer(found.x), layer(found.y)).amax()
        assert (moved / apart).item() == pytest.approx(found.ratio, rel=1e-6)
        assert max(CURVED.dist(z, centre).amax().item() for z in (found.x, found.y)) <= 0.3 * (1 + 1e-9)
        assert error.bound == 0.1
        assert str(found.x) in str(error)
        assert str(found.y) in str(error)
    with pytest.raises(BoundViolatedError) as caught:
        assert_lipschitz(layer, 0.1, x=x)
    found = caught.value.found
    ratio = FLATTER.dist(layer(found.x), layer(found.y)).amax() / CURVED.dist(found.x, found.y).amax()
    assert ratio.item() == pytest.approx(found.ratio, rel=1e-3)


def test_the_same_generator_finds_the_same_pair():
    layer = HypSoftmaxAttention(2, 1, CURVED, **DOUBLE)
    first, second, other = (
        assert_lipschitz(
            layer, math.inf, radius=1.0, generator=None if seed is None else torch.Generator().manual_seed(seed)
        )
        for seed in (None, 0, 1)
    )
    assert first == second != other


def test_one_channel_of_many_is_found():
    layer = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(64))
        layer.weight[41, 41] = 3.0
    with pytest.raises(AssertionError):
        assert_lipschitz(layer, 2.5)


def test_attention_and_models_are_attacked_in_the_metric_of_their_bound():
    torch.manual_seed(0)
    layers = (SimplicialAttention(4, 2, order=2), nn.MultiheadAttention(4, 2), projections(nn.MultiheadAttention(4, 2)))
    for layer in layers:
        assert 0.05 < assert_lipschitz(layer, bound := lipschitz_bound(layer, 1.0, tokens=3), radius=1.0) / bound <= 1
    model = Hypformer(3, 4, 2, layers=1, attention="softmax", norm_eps=0.5, graph_encoder=None).eval()
    x = torch.randn(4, 3)
    at = certify(model, x=x)
    assert assert_lipschitz(model, at.constant, x=x) == pytest.approx(at.measured, rel=1e-6)
    with pytest.raises(AssertionError):
        assert_lipschitz(model, 0.9 * at.measured, x=x)
    embedding = ExpMapHTC(3, 2, CURVED)
    assert assert_lipschitz(embedding, bound := lipschitz_bound(embedding, 0.5), radius=0.5, tokens=1) / bound > 0.8


def test_a_function_that_torch_cannot_batch_is_called_for_each_input():
    def rooted(x):
        return x * 2 if x.sum().item() > 0 else 2 * x

    assert assert_lipschitz(rooted, 2.0, features=2, tokens=1) == pytest.approx(2)
    with pytest.raises(AssertionError):
        assert_lipschitz(rooted, 1.9, features=2, tokens=1)


@pytest.mark.parametrize("radius", [0.03, 30.0])
def test_a_right_bound_in_float32_never_fails_however_far_out(radius):
    torch.manual_seed(0)
    m = Lorentz(-0.8)
    for layer in (HTC(3, 3, m), HRC(nn.Linear(3, 3), m)):
        far = m.lift(torch.randn(2, 3) * math.sinh(min(radius, 12.0)))
        assert assert_lipschitz(layer, lipschitz_bound(layer, radius), radius=radius) > 0
        assert_lipschitz(layer, lipschitz_bound(layer), radius=0.1, x=far)
    plain = nn.Linear(3, 3)
    assert assert_lipschitz(plain, spectral(plain), radius=1e3 * radius) > 0


@pytest.mark.parametrize("gap", [1e-12, 5e-11, 1e-8])
def test_rounding_of_a_layer_that_cancels_refutes_nothing(gap):
    """Logits of points far out, on the way to a farther hyperplane: some of the pairs round apart, and none counts."""
    m = Lorentz(-2500.0, **DOUBLE)
    layer = HypMLR(1, 1, m, **DOUBLE)
    with torch.no_grad():
        layer.weight.fill_(0.25)
        layer.offset.fill_(4.0)
        rapidity = torch.linspace(7.0, 8.0, 4000, **DOUBLE)[:, None, None]
        x, y = (m.lift((rapidity + gap).sinh() / 50) for gap in (0.0, gap))
        origin = m.lift(torch.zeros(1, 1, **DOUBLE))
        before, after, ratio = _Hunt(layer, Scope(Ends(m, None), "sup", origin, 8 / 50)).compare(x, y)
    assert (after / before).amax() > (1 + 1e-5) * 0.25
    assert ratio.amax() <= 0.25


def test_what_does_not_fit_gets_one_sentence():
    layer = HTC(2, 2, CURVED)
    for bound in (-1.0, math.nan):
        with pytest.raises(ValueError, match="bound must lie in"):
            assert_lipschitz(layer, bound)
    for radius in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="radius must be positive and finite"):
            assert_lipschitz(layer, 1.0, radius=radius)
    with pytest.raises(ValueError, match=r"x must have shape \(tokens, dim\)"):
        assert_lipschitz(layer, 1.0, x=torch.zeros(3))
    with pytest.raises(ValueError, match="features must be given: the layer does not tell"):
        assert_lipschitz(torch.sin, 1.0)
    with pytest.raises(ValueError, match="metric must be"):
        assert_lipschitz(layer, 1.0, metric="l1")
    with pytest.raises(NotCoveredError, match="call eval"):
        assert_lipschitz(HypDropout(0.5, CURVED), 2.0, features=2)


def test_a_map_without_slope_or_constant_is_no_trouble():
    assert assert_lipschitz(torch.zeros_like, 0.0, features=2) == 0
    with pytest.raises(AssertionError):
        assert_lipschitz(torch.sign, 10.0, features=2)


@pytest.mark.parametrize("manifold", [None, Lorentz(-100.0, **DOUBLE), Lorentz(-0.01, **DOUBLE)])
def test_rounding_and_sizes_are_measured_in_the_units_of_the_points(manifold):
    """A coordinate 1000 times as large rounds 1000 times as far, a point's distances that much squared.

    Far out the trusted stretch of the identity is one.
    """
    space = torch.tensor([[1.0, 2.0], [1000.0, 2000.0]], **DOUBLE)
    x = space if manifold is None else manifold.lift(space)
    near, far = _Space(manifold).noise(x).tolist()
    assert 200 < (far / near) ** (1 if manifold is None else 1 / 2) < 1001
    at = attack_at(lambda z: z, Scope(Ends(manifold, manifold), "sup", x[1:], 0.1))
    assert at.ratio == pytest.approx(1, rel=1e-3)
    for metric, size in (("sup", 4.0), ("l2", 5.0)):
        hunt = _Hunt(lambda z: z, Scope(Ends(manifold, manifold), metric, x, 0.1))
        assert hunt.size(torch.tensor([3.0, 4.0])).item() == pytest.approx(size)


def test_a_layer_that_gives_no_number_holds_no_bound():
    layer = nn.MultiheadAttention(4, 2, **DOUBLE)
    nn.init.constant_(layer.in_proj_weight, torch.nan)
    for scope in ({"radius": 1.0}, {"x": torch.randn(3, 4, **DOUBLE)}):
        with pytest.raises(ValueError, match=r"^layer\(x\) must be finite"):
            assert_lipschitz(layer, 1.0, **scope)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("scope", [{"radius": 1.0}, {"x": CURVED.lift(torch.ones(2, 3, **DOUBLE))}])
def test_an_attack_climbs_whatever_mode_is_on(mode, scope):
    layer = HTC(3, 2, CURVED, FLATTER, **DOUBLE)
    expected = assert_lipschitz(layer, math.inf, **scope)
    with mode():
        assert assert_lipschitz(layer, math.inf, **{name: value * 1.0 for name, value in scope.items()}) == expected
