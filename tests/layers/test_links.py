"""Decoders of pairs: known angles, cones within cones, and the ends of the range."""

from __future__ import annotations

import math

import pytest
import torch

from holonomy.layers import EntailmentCones, FermiDiracDecoder
from holonomy.manifolds import Lorentz


def test_logits_are_those_of_the_distribution() -> None:
    manifold = Lorentz(-0.5, dtype=torch.float64)
    decoder = FermiDiracDecoder(manifold, radius=3.0, temperature=0.5, dtype=torch.float64)
    x, y = (manifold.lift(torch.randn(9, 3).double()) for _ in range(2))
    square = manifold.dist(x, y) ** 2
    torch.testing.assert_close(decoder(x, y).sigmoid(), 1 / (torch.exp((square - 3) / 0.5) + 1))
    assert decoder(x[:, None], y).shape == (9, 9)


@pytest.mark.parametrize("kappa", [-1.0, -0.2, -9.0])
def test_half_apertures_are_those_of_the_poincare_ball(kappa: float) -> None:
    """Ganea et al. 2018, eq. 22; in units of the radius the curvature does not matter."""
    manifold, constant = Lorentz(kappa, dtype=torch.float64), 0.2
    x = manifold.expmap0(torch.tensor([[0.0, r, 0.0] for r in (0.5, 1.0, 4.0, 9.0)]).double() / (-kappa) ** 0.5)
    p = (manifold.to_poincare(x) * (-kappa) ** 0.5).norm(dim=-1)
    cones = EntailmentCones(manifold, constant=constant)
    torch.testing.assert_close(cones.half_aperture(x), torch.asin(constant * (1 - p**2) / p))


def test_a_cone_contains_the_cones_of_its_points() -> None:
    """Ganea et al. 2018, the property from which half apertures are derived."""
    manifold = Lorentz(-1.0, dtype=torch.float64)
    cones = EntailmentCones(manifold)
    x, y, z = (
        manifold.expmap0(torch.nn.functional.pad(torch.randn(800000, 2).double() * r, (1, 0))) for r in (1.0, 2.0, 4.0)
    )
    beyond = cones.half_aperture(x) < math.pi / 2  # of the ball that Ganea leaves out
    children = (cones(x, y) == 0) & (cones(y, z) == 0)
    assert (children & beyond).sum() > 50
    assert (cones(x, z)[children & beyond] == 0).all()
    assert (cones(x, z)[children & ~beyond] > 0.1).any()


@pytest.mark.parametrize("radius", [0.3, 5.0, 20.0, 60.0, 80.0])
def test_what_lies_on_the_ray_is_in_the_cone_and_what_lies_behind_is_not(radius: float) -> None:
    """In float32, however thin the cone."""
    manifold = Lorentz(-1.0)
    cones = EntailmentCones(manifold)
    space = torch.tensor([0.48, -0.6, 0.64]) * math.sinh(radius)
    x = manifold.lift(space)
    for factor in (1.0, 2.0, 64.0):
        assert cones(x, manifold.lift(space * factor)) == 0
    for factor in (0.5, 0.0, -1.0):
        expected = math.pi - cones.half_aperture(x).item()
        assert cones(x, manifold.lift(space * factor)).item() == pytest.approx(expected, rel=1e-6)
    thin = math.asin(min(0.2 / math.sinh(radius), 1.0)) if radius < 1 else 0.2 / math.sinh(radius)
    assert cones.half_aperture(x).item() == pytest.approx(thin, rel=1e-2 if radius == 5.0 else 1e-5)


def test_near_the_origin(dtype: torch.dtype) -> None:
    manifold = Lorentz(-1.0, dtype=dtype)
    cones, x = EntailmentCones(manifold), manifold.lift(torch.randn(20, 3, dtype=dtype))
    origin = manifold.origin(4).as_subclass(torch.Tensor)
    assert cones.half_aperture(origin) == pytest.approx(math.pi / 2)
    assert (cones(origin, x) == 0).all()
    assert (cones(x, x) == 0).all()


def test_gradients_are_finite_at_every_kink(dtype: torch.dtype) -> None:
    """At the origin, where points meet, on one line, at the ball's rim, and at the ends of the range."""
    manifold = Lorentz(-1.0, learnable=True, dtype=dtype)
    sizes = [0.0, 1e-30, 1e-8, 0.1, 0.2, math.nextafter(0.2, 1.0), 1.0, 1e8, 1e30]
    rows = [[s * a, s * b] for s in sizes for a, b in ((1.0, 0.0), (-1.0, 0.0), (0.6, 0.8))]
    space = torch.tensor(rows, dtype=dtype)
    x, y = (manifold.lift(space).detach().requires_grad_() for _ in range(2))
    for module in (EntailmentCones(manifold), FermiDiracDecoder(manifold, dtype=dtype)):
        result = module(x[:, None], y)
        assert result.isfinite().all()
        leaves = [x, y, *module.parameters()]
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        for grad in torch.autograd.grad(result.sum(), leaves):
            assert grad.isfinite().all()
    half = EntailmentCones(manifold).half_aperture(x)
    assert torch.autograd.grad(half.sum(), x)[0].isfinite().all()


def test_gradcheck() -> None:
    manifold = Lorentz(-0.7, dtype=torch.float64)
    cones = EntailmentCones(manifold)
    x, y = (2 * torch.randn(6, 3, dtype=torch.float64) for _ in range(2))
    inputs = (x.requires_grad_(), y.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, y: cones(manifold.lift(x), manifold.lift(y)), inputs)
    assert torch.autograd.gradgradcheck(lambda x, y: cones(manifold.lift(x), manifold.lift(y)), inputs)
