"""What is seen of one point from another: digits of directions between near points."""

from __future__ import annotations

import mpmath
import pytest
import torch
from mpmath import mp, mpf

from holonomy.manifolds.hyperboloid import geodesics, midpoints, views


def test_the_form_that_dynamo_traces_is_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, of functions that only a compiler calls."""
    space, scale = torch.randn(4, 3).double().requires_grad_(), torch.tensor(0.7).double().requires_grad_()
    weights = torch.rand(2, 4).double().requires_grad_()
    for function, inputs in (
        (geodesics.distance, (space, space.flip(0), scale)),
        (geodesics.logarithm0, (space, scale)),
        (midpoints.midpoint, (space, weights, scale)),
    ):
        theirs = function(*inputs)
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            ours = function(*inputs)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), inputs) for y in (ours, theirs)))


@pytest.mark.parametrize("apart", [1.0, 1e-3, 1e-9])
def test_the_part_across_of_a_near_point_keeps_its_digits(apart: float) -> None:
    """It is as short as the points are near, and is right to the last digits of its own length."""
    generator = torch.Generator().manual_seed(0)
    x, step = torch.randn(2, 20, 5, generator=generator, dtype=torch.float64)
    y = x + apart * step
    found = views._beside(x, views.ray_of(x, torch.tensor(0.7).double()), y)
    for ours, one, other in zip(found.tolist(), x.tolist(), y.tolist(), strict=True):
        with mp.workdps(50):
            a, b = mpmath.matrix([mpf(v) for v in one]), mpmath.matrix([mpf(v) for v in other])
            dots = [mpmath.fdot(a, b), mpmath.fdot(a, a)]
            truth = (b - a * (dots[0] / dots[1])) / mpmath.norm(b)
            assert mpmath.norm(mpmath.matrix(ours) - truth) <= mpf("1e-14") * mpmath.norm(truth)
