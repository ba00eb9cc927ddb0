"""On the manifold, with the curvature that was asked for, at every radius."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.manifolds import hyperboloid
from tests.laws.laws import build, cases_where, every_case, gradients, output, settings_of, twins

# Exponents of ten: from where squares underflow in float64 to where they overflow in float32.
RADII = st.one_of(st.just(0.0), st.integers(-30, 18).map(lambda e: 10.0**e))
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}


def assert_on(manifold, points):
    """The time coordinate is the root, to the rounding of the dtype."""
    assert points.isfinite().all()
    curvature = manifold.curvature.double()
    expected = hyperboloid.time(hyperboloid.space(points).double(), curvature)
    torch.testing.assert_close(points[..., :1].double(), expected, rtol=ROUNDING[points.dtype], atol=0)


@cases_where(lambda case: case.target is not None)
@given(drawn=settings_of(radii=RADII))
@settings(max_examples=4)
def test_outputs_lie_on_the_manifold(case, drawn, device, dtype):
    setting, module, inputs = build(case, device, dtype, **drawn)
    for mode in twins(module):
        manifold = _target(mode, module, setting, case)
        assert_on(manifold, output(mode, inputs))


def _target(mode, module, setting, case):
    """The copy's own manifold, for a copied module has copied curvatures."""
    wanted = setting.manifold(case.target)
    names = {id(m): name for name, m in module.named_modules()}
    return dict(mode.named_modules())[names[id(wanted)]] if id(wanted) in names else wanted


@cases_where(lambda case: case.source is not None and case.target not in (None, case.source))
@given(drawn=settings_of())
@settings(max_examples=4)
def test_the_change_of_curvature_is_executed(case, drawn, device, dtype):
    """Training and evaluation alike: the layer with one manifold, and its result multiplied by the ratio."""
    drawn["curvatures"] = (-1.0, -0.04, -2.5)
    setting, module, inputs = build(case, device, dtype, **drawn)
    here, there = setting.manifold(case.source), setting.manifold(case.target)
    for mode in twins(module):
        assert_on(there, output(mode, inputs).detach())
        with pytest.raises(AssertionError):
            assert_on(here, output(mode, inputs).detach())


@cases_where(lambda case: case.target is not None and case.target != case.source and case.source is not None)
def test_the_curvature_of_the_output_receives_a_gradient_in_both_modes(case, device):
    setting, module, inputs = build(case, device, torch.float64)
    log_ratio = setting.manifold(case.target).curvature_parameter.log_ratio
    for training in (True, False):
        module.train(training)
        result = output(module, inputs)
        (grad,) = torch.autograd.grad(result.square().sum(), [log_ratio])
        assert grad.abs().item() > 0


@cases_where(lambda case: case.any_radius)
@given(drawn=settings_of(radii=RADII))
@settings(max_examples=4)
def test_finite_input_gives_finite_output_and_gradients(case, drawn, device, dtype):
    _, module, inputs = build(case, device, dtype, **drawn)
    for mode in twins(module):
        result, grads = gradients(mode, inputs)
        assert result.isfinite().all()
        for name, grad in grads.items():
            assert grad.isfinite().all(), name


@cases_where(lambda case: case.any_radius)
def test_the_largest_points_that_float32_holds_stay_finite(case, device):
    _, module, inputs = build(case, device, torch.float32, radius=1e37)
    for mode in twins(module):
        assert output(mode, inputs).isfinite().all()


@every_case
def test_coincident_points_have_finite_gradients(case, device, dtype):
    _, module, inputs = build(case, device, dtype)
    same = tuple(x[..., :1, :].expand_as(x).clone() if x.is_floating_point() and x.ndim > 1 else x for x in inputs)
    for mode in twins(copy.deepcopy(module)):
        for name, grad in gradients(mode, same)[1].items():
            assert grad.isfinite().all(), name
