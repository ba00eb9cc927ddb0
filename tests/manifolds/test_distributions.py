"""The wrapped normal: its density is that of its samples, exactly, at every radius."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from scipy.stats import kstest
from torch.distributions import constraints

from holonomy.manifolds import Lorentz, WrappedNormal, hyperboloid
from tests.reference import manifold as oracle

LOCS = ([0.0, 0.0], [0.6, -0.3], [5.0, 12.0])


@pytest.mark.parametrize("kappa", [-1.0, -0.3, -4.0])
@pytest.mark.parametrize("loc", LOCS)
def test_the_density_integrates_to_one(loc: list[float], kappa: float) -> None:
    """In polar coordinates about the mean, where the volume is sinh(s r)/s dr dphi, by a rule of Gauss."""
    manifold = Lorentz(kappa, dtype=torch.float64)
    mean = manifold.lift(torch.tensor(loc).double())
    law = WrappedNormal(mean, torch.tensor([0.7, 0.4]).double(), manifold)
    places, rule = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(200))
    radius, angle = 4 + 4 * places, torch.arange(200).double() * (2 * math.pi / 200)
    v = radius[:, None, None] * torch.stack([angle.cos(), angle.sin()], -1)
    density = law.log_prob(hyperboloid.expmap_frame(mean, v, manifold.curvature)).exp()
    root = math.sqrt(-kappa)
    volume = torch.sinh(root * radius) / root
    total = (4 * rule * density.mean(1) * 2 * math.pi * volume).sum()
    assert total.item() == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_the_jacobian_is_the_determinant_that_autograd_finds(dim: int) -> None:
    """By change of variables: density of the normal over that of the volume, in space coordinates."""
    manifold = Lorentz(-0.7, dtype=torch.float64)
    mean, scale = manifold.lift(torch.randn(dim).double()), torch.rand(dim).double() + 0.3
    law = WrappedNormal(mean, scale, manifold)
    for _ in range(5):
        v = torch.randn(dim).double()

        def sample(v: torch.Tensor) -> torch.Tensor:
            return hyperboloid.expmap_frame(mean, v, manifold.curvature)[1:]

        z = manifold.lift(sample(v))
        slope = torch.autograd.functional.jacobian(sample, v).det().abs().log()
        flat = torch.distributions.Normal(torch.zeros(dim).double(), scale).log_prob(v).sum()
        # The volume element in space coordinates is 1 / (sqrt(-kappa) z_t).
        expected = flat - slope + (z[0] * math.sqrt(0.7)).log()
        torch.testing.assert_close(law.log_prob(z), expected)


def test_samples_have_the_law_that_they_are_said_to_have() -> None:
    """Their tangent vectors are normal and independent, their distances those of a normal vector."""
    torch.manual_seed(0)
    manifold = Lorentz(-0.5, dtype=torch.float64)
    scale = torch.tensor([0.5, 0.5, 0.2]).double()
    law = WrappedNormal(manifold.lift(torch.tensor([3.0, -1.0, 2.0]).double()), scale, manifold)
    z = law.sample((20000,))
    tangent = manifold.transp0back(law.loc, manifold.logmap(law.loc, z))[:, 1:] / scale
    for column in tangent.T:
        assert kstest(column.numpy(), "norm").pvalue > 1e-3
    assert (torch.corrcoef(tangent.T) - torch.eye(3)).abs().max() < 0.03
    assert (manifold.dist(law.loc, z).square().mean() / scale.square().sum() - 1).abs() < 0.03


def test_the_mean_is_where_the_logarithms_of_samples_cancel() -> None:
    torch.manual_seed(0)
    manifold = Lorentz(-2.0, dtype=torch.float64)
    law = WrappedNormal(manifold.lift(torch.tensor([1.0, 2.0]).double()), torch.tensor([0.3, 0.6]).double(), manifold)
    z = law.sample((40000,))
    drift = hyperboloid.logmap_frame(law.mean, z, manifold.curvature).mean(0)
    assert drift.norm() < 5 * 0.6 / math.sqrt(40000)
    assert torch.equal(law.mode, law.mean)


@pytest.mark.parametrize("radius", [0.0, 1e-6, 1.0, 20.0, 60.0, 85.0])
def test_float32_densities_keep_their_digits_far_out(radius: float) -> None:
    """Against sixty digits, of pairs near one another and far apart."""
    manifold = Lorentz(-1.0)
    loc = torch.tensor([0.48, -0.6, 0.64]).double() * math.sinh(radius)
    scale = torch.tensor([0.5, 1.5, 3.0])
    for other in (loc * 1.5, -loc * 0.1, torch.tensor([0.3, 2.0, -1.0]).double(), loc.flip(0)):
        x, y = loc.float(), other.float()
        ours = WrappedNormal(manifold.lift(x), scale, manifold).log_prob(manifold.lift(y)).item()
        points = oracle.exact(x.tolist()), oracle.exact(y.tolist())
        with oracle.working(*points, kappa=mpf(-1)):
            v = oracle.logmap_frame(*points, mpf(-1))[1:]
            r = mp.sqrt(oracle.dot(v, v))
            spread = oracle.exact(scale.tolist())
            flat = mp.fsum(-((a / s) ** 2) / 2 - mp.log(s * mp.sqrt(2 * mp.pi)) for a, s in zip(v, spread, strict=True))
            truth = flat - (2 * mp.log(mp.sinh(r) / r) if r else 0)
        assert ours == pytest.approx(float(truth), rel=1e-5)


def test_batches_broadcast_and_expand() -> None:
    manifold = Lorentz(-1.0)
    law = WrappedNormal(manifold.lift(torch.randn(4, 1, 3)), torch.rand(2, 1) + 0.1, manifold)
    assert (law.batch_shape, law.event_shape) == ((4, 2), (4,))
    larger = law.expand((5, 4, 2))
    z = larger.rsample((3,))
    assert z.shape == (3, 5, 4, 2, 4)
    torch.testing.assert_close(larger.log_prob(z), law.log_prob(z))
    assert law.log_prob(manifold.origin(4)).shape == (4, 2)
    assert larger.support.check(z).all()
    assert not larger.support.check(2 * z).any()
    assert set(law.arg_constraints) == {"loc", "scale"}
    assert isinstance(law.arg_constraints["scale"], constraints.independent)
    torch.manual_seed(3)
    again = law.sample((2,))
    torch.manual_seed(3)
    assert torch.equal(law.sample((2,)), again)


def test_everything_learns() -> None:
    """Gradients of samples and densities, in mean, spread, value and curvature, against differences."""
    manifold = Lorentz(-0.7, learnable=True, dtype=torch.float64)
    noise = torch.randn(3, 2).double()
    space, spread, value = torch.randn(2).double(), torch.rand(2).double() + 0.5, torch.randn(3, 2).double()
    (angle,) = (p for p in manifold.parameters() if p.requires_grad)

    def both(space, spread, value, log_ratio):
        kappa = -0.7 * torch.exp(log_ratio)

        class Fixed(Lorentz):
            curvature = kappa

        law = WrappedNormal(hyperboloid.lift(space, kappa), spread, Fixed(-0.7, dtype=torch.float64))
        z = hyperboloid.expmap_frame(law.loc, noise * law.scale, kappa)
        return law.log_prob(hyperboloid.lift(value, kappa)), law.log_prob(z), z

    inputs = [x.requires_grad_() for x in (space, spread, value, torch.zeros_like(angle))]
    assert torch.autograd.gradcheck(both, inputs)
    law = WrappedNormal(manifold.lift(space), spread, manifold)
    law.log_prob(law.rsample((5,))).sum().backward()
    assert angle.grad is not None
    assert angle.grad.abs() > 0


def test_finite_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    manifold = Lorentz(-0.7, learnable=True, dtype=dtype)
    for radius in (0.0, 1e-30, 1.0, 1e30):
        loc = manifold.lift(torch.tensor([radius, radius / 3], dtype=dtype)).detach().requires_grad_()
        for spread in ([1e3, 1e-3], [1e-30, 1e30]):
            scale = torch.tensor(spread, dtype=dtype).requires_grad_()
            law = WrappedNormal(loc, scale, manifold)
            z = law.rsample((1000,))
            assert z.isfinite().all()
            assert law.log_prob(z.detach()).isfinite().all()
            for result in (z, law.log_prob(z.detach())):
                for grad in torch.autograd.grad(result.mean(), [loc, scale], retain_graph=True):
                    assert grad.isfinite().all()


@pytest.mark.parametrize("near", [0.0, 1e-4])
@pytest.mark.parametrize("rapidity", [36.0, 60.0, 80.0])
def test_gradients_of_a_far_point_seen_from_near_the_origin(near, rapidity):
    """Across its ray a point far out moves nothing that it is seen by, but for a share of exp(-r): no rounding may."""
    manifold = Lorentz(-1.0)
    scale = torch.tensor([0.5, 0.8])
    law = WrappedNormal(manifold.lift(torch.tensor([near, 0.0])), scale, manifold)
    v = torch.tensor([0.6, 0.8]).mul(rapidity).requires_grad_()
    (grad,) = torch.autograd.grad(law.log_prob(manifold.expmap0(torch.nn.functional.pad(v, (1, 0)))), v)
    r = v.detach().norm()
    expected = -v.detach() / scale.square() - (1 - 1 / r) * v.detach() / r  # of log N(v) - log(sinh r / r)
    torch.testing.assert_close(grad, expected, rtol=0.02, atol=0.0)
