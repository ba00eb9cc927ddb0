"""The Busemann function: a limit of distances. Its values and derivatives everywhere are in test_oracle.py."""

from __future__ import annotations

import pytest
import torch

from holonomy.manifolds import Lorentz, busemann


@pytest.mark.parametrize("kappa", [-1.0, -0.2, -7.0])
def test_it_is_the_limit_of_distances_to_a_point_that_leaves(kappa: float) -> None:
    manifold = Lorentz(kappa, dtype=torch.float64)
    x, direction = manifold.lift(torch.randn(50, 3).double()), torch.randn(3).double()
    far = 16 / abs(kappa) ** 0.5
    leaving = manifold.expmap0(torch.nn.functional.pad(far * direction / direction.norm(), (1, 0)))
    torch.testing.assert_close(busemann(x, direction, manifold), manifold.dist(x, leaving) - far)


def test_its_gradient_has_length_one() -> None:
    manifold = Lorentz(-0.4, dtype=torch.float64)
    x = manifold.lift(torch.randn(50, 3).double() * torch.logspace(-6, 2, 50).double()[:, None]).requires_grad_()
    (grad,) = torch.autograd.grad(busemann(x, torch.randn(3).double(), manifold).sum(), x)
    slope = manifold.egrad2rgrad(x.detach(), grad)
    torch.testing.assert_close(manifold.inner(x.detach(), slope), torch.ones(50).double(), rtol=1e-6, atol=0)


def test_signs_and_shapes(dtype: torch.dtype) -> None:
    manifold = Lorentz(-1.0, dtype=dtype)
    direction = torch.tensor([0.0, 2.0], dtype=dtype)
    steps = torch.tensor([-30.0, -1.0, 0.0, 1e-6, 2.0, 30.0], dtype=dtype)
    x = manifold.expmap0(torch.nn.functional.pad(steps[:, None], (2, 0)))
    torch.testing.assert_close(busemann(x, direction, manifold), -steps)
    assert busemann(x[:, None], torch.randn(4, 2, dtype=dtype), manifold).shape == (6, 4)
    assert busemann(x[0], direction, manifold).shape == ()


def test_a_rotation_of_both_changes_nothing() -> None:
    manifold = Lorentz(-1.0, dtype=torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(4, 4).double())
    space, direction = 5 * torch.randn(30, 4).double(), torch.randn(30, 4).double()
    turned = busemann(manifold.lift(space @ turn), direction @ turn, manifold)
    torch.testing.assert_close(turned, busemann(manifold.lift(space), direction, manifold))


def test_the_gradient_of_a_short_direction_that_many_points_share_is_finite(dtype: torch.dtype) -> None:
    _ = torch.manual_seed(0)
    manifold, x = Lorentz(-1.0), torch.randn(2, 3, 3, dtype=dtype)
    direction = torch.full((1, 1, 2), torch.finfo(dtype).tiny, dtype=dtype, requires_grad=True)
    weights = torch.tensor([1000.0, -100.0, 1.0], dtype=dtype)
    (weights * busemann(manifold.lift(x[..., 1:]), direction, manifold)).sum().backward()
    assert direction.grad is not None
    assert direction.grad.isfinite().all()
