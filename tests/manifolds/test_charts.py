"""Poincare and Klein charts: isometric to Geoopt's ball and HypLL's, both ways, to the boundary."""

from __future__ import annotations

import geoopt
import pytest
import torch
from torch import Tensor

from holonomy.manifolds import Lorentz

KAPPAS = (-0.01, -1.0, -100.0)


def spread(kappa: float, dim: int = 3, *, reach: float = 6.0) -> tuple[Lorentz, Tensor]:
    """Float64 points at distances from 0 to ``reach`` curvature units, in random directions."""
    manifold = Lorentz(kappa, dtype=torch.float64)
    rays = torch.randn(12, dim, dtype=torch.float64)
    rays = rays / rays.norm(dim=-1, keepdim=True) / abs(kappa) ** 0.5
    vectors = rays * torch.linspace(0, reach, 12, dtype=torch.float64)[:, None]
    return manifold, manifold.expmap0(torch.cat([torch.zeros(12, 1), vectors], -1)).detach()


@pytest.mark.parametrize("kappa", KAPPAS)
def test_isometric_to_geoopts_ball(kappa: float) -> None:
    manifold, x = spread(kappa)
    ball = geoopt.PoincareBall(c=torch.tensor(-kappa, dtype=torch.float64))
    inside = manifold.to_poincare(x)
    expected = ball.dist(inside[:, None], inside)
    torch.testing.assert_close(manifold.cdist(x, x), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(manifold.dist0(x), ball.dist0(inside), rtol=1e-8, atol=1e-12)
    # The differential at the origin is one half: their exponential maps meet.
    vectors = torch.randn(12, 3, dtype=torch.float64) / abs(kappa) ** 0.5
    ours = manifold.expmap0(torch.cat([torch.zeros(12, 1), vectors], -1))
    # Geoopt measures tangent vectors at the origin with conformal factor 2.
    torch.testing.assert_close(manifold.to_poincare(ours), ball.expmap0(vectors / 2))


@pytest.mark.parametrize("kappa", KAPPAS)
def test_isometric_to_hyplls_ball(kappa: float) -> None:
    hypll = pytest.importorskip("hypll.manifolds.poincare_ball")
    tensors = pytest.importorskip("hypll.tensors")
    manifold, x = spread(kappa, reach=4.0)
    identity = {"constraining_strategy": lambda value: value}
    # HypLL's curvature is a float32 number.
    theirs = hypll.PoincareBall(c=hypll.Curvature(-kappa, **identity))
    inside = manifold.to_poincare(x)
    one, other = (tensors.ManifoldTensor(p, manifold=theirs) for p in (inside, inside.flip(0)))
    torch.testing.assert_close(manifold.dist(x, x.flip(0)), theirs.dist(one, other).detach(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_klein_is_projective(kappa: float) -> None:
    """Geodesics are straight lines in the Klein ball, and its distance is the cross-ratio's."""
    manifold, x = spread(kappa, dim=2, reach=3.0)
    flat = manifold.to_klein(x)
    middle = manifold.to_klein(manifold.centroid(torch.stack([x[3], x[9]])))
    one, other = flat[3], flat[9]
    cross = (middle - one)[0] * (other - one)[1] - (middle - one)[1] * (other - one)[0]
    assert abs(cross.item()) * abs(kappa) < 1e-12
    # Hilbert's metric of the ball: half the log of the cross-ratio, over sqrt|kappa|.
    along, c = other - one, -kappa
    a, b, d = along @ along, one @ along, one @ one - 1 / c
    root = (b * b - a * d).sqrt()
    low, high = (-b - root) / a, (-b + root) / a
    ratio = ((high / (high - 1)) * ((1 - low) / -low)).log() / 2 / c**0.5
    torch.testing.assert_close(manifold.dist(x[3], x[9]), ratio)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("chart", ["poincare", "klein"])
def test_both_ways(chart: str, kappa: float) -> None:
    manifold, x = spread(kappa, reach=14.0 if chart == "poincare" else 7.0)
    inside = getattr(manifold, f"to_{chart}")(x)
    assert (inside.norm(dim=-1) * abs(kappa) ** 0.5 < 1).all()
    back = getattr(manifold, f"from_{chart}")(inside)
    assert back.shape == x.shape
    # The ball forgets e^r (Poincare) or e^2r (Klein) of the sixteen digits at radius r.
    torch.testing.assert_close(back, x, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("chart", ["poincare", "klein"])
def test_boundary_is_finite(chart: str, dtype: torch.dtype) -> None:
    """Points that round onto or past the boundary come back finite, with finite gradients; those beyond are refused."""
    manifold = Lorentz(-1.0, learnable=True, dtype=dtype)
    rounded = 1 + torch.finfo(dtype).eps
    ball = torch.tensor([[1.0, 0.0], [0.6, 0.8], [rounded, 0.0], [0.0, 0.0]], dtype=dtype)
    ball = ball.requires_grad_()
    points = getattr(manifold, f"from_{chart}")(ball)
    assert torch.isfinite(points).all()
    (gradient,) = torch.autograd.grad(points.sum(), ball)
    assert torch.isfinite(gradient).all()
    with pytest.raises(ValueError, match=r"^p must lie in the ball of radius 1, got a point of length 2\.$"):
        getattr(manifold, f"from_{chart}")(2 * ball)
    outside = torch.func.vmap(getattr(manifold, f"from_{chart}"))(2 * ball.detach())
    assert torch.isfinite(outside).all()
    far = manifold.lift(torch.tensor([[1e4, 0.0], [3e37, -2e37]], dtype=dtype))
    inside = getattr(manifold, f"to_{chart}")(far)
    assert (inside.norm(dim=-1) <= 1).all()
