"""Lemma 0: the stretch of a map at a point, against small steps; and the ascent, which never exceeds a constant."""

from __future__ import annotations

import math

import pytest
import torch

from holonomy.layers import HRC, HTC, ExpMapHTC, HypActivation, HypMLR, HypSoftmaxAttention
from holonomy.manifolds import Lorentz
from holonomy.theory import measure_stretch, stretch
from holonomy.theory.certificates.stretching import Ends, ends_of

DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def by_small_steps(layer, source, target, x, joint, directions=400, step=1e-5):
    """The largest ratio of distances after and before a small step, in random directions."""
    v = source.proju(x, torch.randn(directions, *x.shape, dtype=x.dtype))
    length = source.norm(v)
    length = length.square().sum(-1).sqrt()[..., None, None] if joint else length[..., None]
    moved = target.dist(layer(x), layer(source.expmap(x, v / length * step))).detach()
    return ((moved.square().sum(-1).sqrt() if joint else moved) / step).amax(0)


@pytest.mark.parametrize("kappas", [(-1.0, -1.0), (-1.7, -0.4)])
def test_token_stretch_is_what_small_steps_find(kappas):
    source, target = (Lorentz(k, **DOUBLE) for k in kappas)
    layer = HTC(2, 3, source, target, **DOUBLE)
    x = source.lift(torch.randn(6, 2, **DOUBLE))
    seen = by_small_steps(layer, source, target, x, joint=False)
    exact = stretch(layer, x)
    assert (seen <= exact * (1 + 1e-4)).all()
    assert (seen >= exact * 0.999).all()


def test_joint_stretch_is_what_small_steps_find():
    source, target = Lorentz(-1.7, **DOUBLE), Lorentz(-0.4, **DOUBLE)
    layer = HypSoftmaxAttention(1, 1, source, target, **DOUBLE)
    x = source.lift(torch.randn(3, 2, 1, **DOUBLE))
    seen = by_small_steps(layer, source, target, x, joint=True)
    exact = stretch(layer, x, joint=True)
    assert (seen <= exact * (1 + 1e-4)).all()
    assert (seen >= exact * 0.999).all()


def test_ends_are_read_off_the_layer_or_refused():
    m, to = Lorentz(-1.0), Lorentz(-2.0)
    assert ends_of(ExpMapHTC(2, 3, m, to)) == Ends(None, to)
    assert ends_of(HypMLR(2, 3, m)) == Ends(m, None)
    with pytest.raises(TypeError, match="must name the manifolds"):
        ends_of(torch.nn.Linear(2, 2))


def test_between_euclidean_spaces_it_is_the_spectral_norm():
    weight = torch.randn(3, 4, **DOUBLE)
    at = stretch(lambda x: x @ weight.mT, torch.randn(5, 4, **DOUBLE), ends=Ends(None, None))
    torch.testing.assert_close(at, torch.linalg.matrix_norm(weight, 2).expand(5))


def test_sup_metric_of_a_mean_is_one_and_of_l2_less():
    def mean(x):
        return x.mean(-2, keepdim=True).expand_as(x)

    x = torch.randn(2, 5, 3, **DOUBLE)
    torch.testing.assert_close(
        stretch(mean, x, ends=Ends(None, None), joint=True, metric="sup"), torch.ones(2, **DOUBLE)
    )
    torch.testing.assert_close(stretch(mean, x, ends=Ends(None, None), joint=True), torch.ones(2, **DOUBLE))

    def first(x):
        return 3 * x[..., :1, :] - 2 * x[..., 1:2, :]

    torch.testing.assert_close(
        stretch(first, x, ends=Ends(None, None), joint=True, metric="sup"), torch.full((2,), 5.0, **DOUBLE)
    )
    torch.testing.assert_close(
        stretch(first, x, ends=Ends(None, None), joint=True), torch.full((2,), math.sqrt(13), **DOUBLE)
    )


def test_the_exact_constant_of_a_dilation_is_found():
    m = Lorentz(-1.0, **DOUBLE)
    half = HRC(torch.nn.Linear(3, 3, bias=False, **DOUBLE), m)
    with torch.no_grad():
        half.function.weight.copy_(0.5 * torch.eye(3))
    expected = 0.5 * math.cosh(2) / math.sqrt(1 + 0.25 * math.sinh(2) ** 2)
    found = measure_stretch(half, 2.0, 3, generator=torch.Generator().manual_seed(0))
    assert found == pytest.approx(expected, rel=1e-9)


def test_ascent_wants_a_ball():
    m = Lorentz(-1.0)
    for radius in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="radius must be positive and finite"):
            measure_stretch(HypActivation(torch.relu, m), radius, 2)


def test_fused_attention_climbs_too():
    """The kernels of scaled dot products have no second derivative of their own."""
    m = Lorentz(-1.0, **DOUBLE)
    layer = HypSoftmaxAttention(2, 1, m, similarity="lorentz_squared", **DOUBLE)
    at_random = measure_stretch(layer, 1.0, 2, tokens=3, starts=2, steps=0, generator=torch.Generator().manual_seed(1))
    climbed = measure_stretch(layer, 1.0, 2, tokens=3, starts=2, steps=8, generator=torch.Generator().manual_seed(1))
    assert climbed > at_random


def test_what_is_no_number_is_no_stretch():
    assert measure_stretch(HRC(lambda s: s * math.nan, Lorentz(-1.0, **DOUBLE)), 1.0, 2, steps=2) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_derivatives_are_taken_whatever_mode_is_on(mode):
    """Without gradients the ascent stayed at its starts, and reported what it saw there."""
    source = Lorentz(-1.0, **DOUBLE)
    layer, x = HRC(torch.tanh, source), source.lift(torch.randn(3, 2, **DOUBLE))

    def measured():
        return measure_stretch(layer, 2.0, 2, starts=2, steps=10, generator=torch.Generator().manual_seed(0))

    expected = stretch(layer, x), measured()
    with mode():
        found, most = stretch(layer, x.clone()), measured()
    assert torch.equal(found, expected[0])
    assert most == expected[1]


def test_what_was_made_in_inference_mode_has_a_stretch():
    with torch.inference_mode():
        source = Lorentz(-1.0, learnable=True, **DOUBLE)
        layer, x = HTC(2, 3, source, **DOUBLE), source.lift(torch.randn(3, 2, **DOUBLE))
        found, most = stretch(layer, x), measure_stretch(layer, 1.0, 2, starts=2, steps=2)
        given = stretch(layer, x, ends=ends_of(layer))
    assert 0 < most < math.inf
    twin = HTC(2, 3, Lorentz(-1.0, **DOUBLE), **DOUBLE)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(found, stretch(twin, x.clone()))
    assert torch.equal(found, given)
