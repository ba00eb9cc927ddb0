"""On the manifold, with the curvature that was asked for, at every radius."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from holonomy.manifolds import hyperboloid
from holonomy.manifolds.points import UnitPoints
from holonomy.optim import RiemannianAdam, RiemannianSGD
from tests.laws.laws import (
    build,
    cases_where,
    drawn_settings,
    every_case,
    gradients,
    manifolds_of,
    modes,
    module_of,
    named,
    node_axes,
    output,
)

pytestmark = pytest.mark.usefixtures("without_shape_checks")  # tests/laws/test_values.py runs with them

ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}


def assert_on(manifold, points):
    """The time coordinate is the root, to the rounding of the dtype."""
    assert points.isfinite().all()
    curvature = manifold.curvature.double()
    expected = hyperboloid.time(hyperboloid.space(points).double(), curvature)
    torch.testing.assert_close(points[..., :1].double(), expected, rtol=ROUNDING[points.dtype], atol=0)


@cases_where(lambda case: case.target is not None)
@drawn_settings(4, far=True)
def test_outputs_lie_on_the_manifold(case, drawn, device, dtype):
    _, module, inputs = build(case, device, dtype, **drawn)
    for mode in modes(case, module):
        assert_on(getattr(mode, case.target), output(mode, inputs))


@cases_where(lambda case: case.target is not None and len(manifolds_of(module_of(case))) > 1)
@drawn_settings(2)
def test_the_change_of_curvature_is_executed(case, drawn, device, dtype):
    """Training and evaluation alike: the output is on its own manifold, and on no other one of the module."""
    _, module, inputs = build(case, device, dtype, **drawn, radius=0.1)  # far out all hyperboloids are one cone
    for mode in modes(case, module):
        there, points = getattr(mode, case.target), output(mode, inputs).detach()
        assert_on(there, points)
        # Offsets of hyperplanes lead far out where curvature is steep.
        near = there.dist0(points).amin().item() * math.sqrt(-there.curvature.item()) < 4
        for elsewhere in manifolds_of(mode):
            if elsewhere is not there and near:
                with pytest.raises(AssertionError):
                    assert_on(elsewhere, points)


@cases_where(lambda case: case.target is not None)
def test_the_curvature_of_the_output_receives_a_gradient_in_both_modes(case, device):
    _, module, inputs = build(case, device, torch.float64)
    for mode in modes(case, module):
        log_ratio = getattr(mode, case.target).curvature_parameter.log_ratio
        (grad,) = torch.autograd.grad(output(mode, inputs).square().sum(), [log_ratio])
        assert grad.abs().item() > 0


@cases_where(lambda case: case.any_radius)
@drawn_settings(4, far=True)
def test_finite_input_gives_finite_output_and_gradients(case, drawn, device, dtype):
    _, module, inputs = build(case, device, dtype, **drawn)
    for mode in modes(case, module):
        result, grads = gradients(mode, inputs)
        assert result.isfinite().all()
        for name, grad in grads.items():
            assert grad.isfinite().all(), name


@cases_where(lambda case: case.any_radius)
def test_the_largest_points_that_the_dtype_holds_give_points_and_finite_gradients(case, device, dtype):
    """In float64 also points whose squares, cubes or products with gradients leave the range."""
    radii = (1e37,) if dtype == torch.float32 else (1e154, 1e200, 1e242, 1e305)
    curvatures = (-1.0, -0.3, -2.5), (-100.0, -0.01, -3.0)  # where a change of curvature is a factor of 100
    for radius, each in itertools.product(radii, curvatures):
        _, module, inputs = build(case, device, dtype, radius=radius, curvatures=each)
        for mode in modes(case, module):
            result, grads = gradients(mode, inputs)
            if case.target is not None:
                assert_on(getattr(mode, case.target), result)
            for name, grad in (grads | {"result": result}).items():
                assert grad.isfinite().all(), name


@every_case
def test_coincident_points_have_finite_gradients(case, device, dtype):
    """All nodes alike, with all their pairs and tuples."""
    _, module, inputs = build(case, device, dtype)
    same = []
    for (name, x), axes in zip(named(module, inputs).items(), node_axes(case).values(), strict=True):
        first = x
        for axis in axes if x.is_floating_point() else ():
            first = first.narrow(axis, 0, 1).expand_as(first)
        same.append(first.clone())
        assert name in node_axes(case)
    for mode in modes(case, module):
        for name, grad in gradients(mode, tuple(same))[1].items():
            assert grad.isfinite().all(), name


@cases_where(lambda case: isinstance(module_of(case), UnitPoints))
@pytest.mark.parametrize("kind", [RiemannianAdam, partial(RiemannianSGD, momentum=0.9)], ids=["Adam", "momentum"])
def test_learned_points_stay_finite_at_a_rate_of_a_thousand(case, kind, device, dtype):
    """60 steps from distances towards given ones: at once as far out as the dtype reaches, and there they stay."""
    _, module, _ = build(case, device, dtype)
    optimizer = kind(module.parameters(), lr=1e3)
    for _ in range(60):
        optimizer.zero_grad()
        points = module()
        (module.manifold.cdist(points, points) - 1).square().mean().backward()
        optimizer.step()
        assert points.isfinite().all()
        assert module.unit.isfinite().all()
    assert points.abs().amax() > 1e3  # what was tried is what the name says
