"""The Frechet mean: optimal wherever the points lie, and differentiated as the optimum is."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from mpmath import mpf

from holonomy.manifolds import Lorentz, frechet_mean, hyperboloid
from holonomy.manifolds.hyperboloid import means
from tests.reference import manifold as oracle

pytestmark = pytest.mark.usefixtures("without_shape_checks")

KINDS = ("one radius", "all radii", "cone", "one far", "steep weights")


def sets(kind: str, radius: float, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Twenty sets of eight points on the unit hyperboloid, with weights."""
    source = torch.Generator().manual_seed(dim)
    rays = torch.randn(20, 8, dim, generator=source, dtype=torch.float64)
    if kind in {"cone", "steep weights"}:
        rays = rays * 0.01 + rays[:, :1]
    reach = torch.full((20, 8, 1), radius, dtype=torch.float64)
    weights = torch.rand(20, 8, generator=source, dtype=torch.float64)
    if kind == "all radii":
        reach = reach * torch.rand(20, 8, 1, generator=source, dtype=torch.float64)
    elif kind == "one far":
        reach[:, 1:] *= 1e-3
    elif kind == "steep weights":
        weights = 10.0 ** (30 * weights - 30)
    return (rays / rays.norm(dim=-1, keepdim=True) * torch.sinh(reach)).to(dtype), weights.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("radius", [1e-6, 0.1, 1.0, 5.0, 15.0, 40.0, 86.0])
def test_the_logarithms_of_the_points_cancel(radius: float, kind: str) -> None:
    """In float64, to the rounding of its own coordinates: there is one such point, and it is the mean."""
    manifold = Lorentz(-1.0, dtype=torch.float64)
    for dim in (1, 2, 5):
        space, weights = sets(kind, radius, dim, torch.float32)
        x, weights = manifold.lift(space.double()), weights.double()
        mean = frechet_mean(x, manifold, weights)
        logs = hyperboloid.logmap_frame(mean.unsqueeze(-2), x, manifold.curvature)
        share = weights / weights.sum(-1, keepdim=True)
        left = (share.unsqueeze(-1) * logs).sum(-2).norm(dim=-1)
        # A coordinate's rounding moves the mean by as many lengths as the metric there says, and the sum by D coth D
        # times that.
        assert (left <= 1e-13 * (mean[..., 0] + radius) * (1 + radius)).all()


def test_no_set_needs_as_many_steps_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the search ends because it has arrived."""
    monkeypatch.setattr(means, "_STEPS", means._STEPS // 2)
    manifold = Lorentz(-1.0, dtype=torch.float64)
    for kind in KINDS:
        for dim in (1, 2, 5):
            space, weights = sets(kind, 86.0, dim, torch.float32)
            x = manifold.lift(space.double())
            half = frechet_mean(x, manifold, weights.double())
            monkeypatch.undo()
            assert torch.equal(frechet_mean(x, manifold, weights.double()), half)
            monkeypatch.setattr(means, "_STEPS", means._STEPS // 2)


@pytest.mark.parametrize("kappa", [-1.0, -0.3, -25.0])
@pytest.mark.parametrize("radius", [1e-3, 1.0, 6.0, 15.0, 40.0])
def test_float32_values_and_gradients_against_many_digits(radius: float, kappa: float) -> None:
    root = math.sqrt(-kappa)
    manifold = Lorentz(kappa, learnable=True)
    for kind in ("one radius", "all radii", "one far"):
        space, weights = (x[0, :4] for x in sets(kind, radius, 3, torch.float32))
        x = manifold.lift(space / root).detach().requires_grad_()
        weights.requires_grad_()
        mean = frechet_mean(x, manifold, weights)
        cotangent = torch.tensor([0.0, 0.7, -1.1, 0.4])
        (angle,) = (p for p in manifold.parameters() if p.requires_grad)
        found = torch.autograd.grad(mean, [x, weights, angle], cotangent)
        exact_kappa = mpf(float(manifold.curvature.detach()))
        places = [oracle.exact(row) for row in [*x[:, 1:].tolist(), weights.tolist()]]
        near = oracle.exact(mean[1:].tolist())
        # The place to start from is no argument: the mean does not move with it.
        with oracle.working(*places, kappa=exact_kappa):
            truth = oracle.frechet(near, *places, exact_kappa)
            slopes = oracle.jacobian(partial(oracle.frechet, truth[1:]), places, exact_kappa)
        weigh = oracle.exact(cotangent.tolist())
        want = [[float(oracle.dot(weigh, column)) for column in columns] for columns in slopes]
        close(mean[1:], [float(v) for v in truth[1:]])
        close(found[0][:, 1:].flatten(), [v for row in want[:-2] for v in row])
        close(found[1], want[-2])
        assert not found[0][:, 0].any()
        # d kappa / d angle is kappa itself at the initial curvature.
        close(found[2], [want[-1][0] * float(exact_kappa)])


def close(ours: torch.Tensor, truth: list[float]) -> None:
    """Compare in the norm of the whole."""
    wanted = torch.tensor(truth, dtype=torch.float64)
    assert (ours.detach().double() - wanted).norm() <= 2e-5 * wanted.norm() + 1e-12


def test_derivatives_of_both_orders_against_differences() -> None:
    scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(means.frechet_mean, (x, weights, scale))
    assert torch.autograd.gradgradcheck(means.frechet_mean, (x, weights, scale))


def test_known_means() -> None:
    manifold = Lorentz(-0.5, dtype=torch.float64)
    line = manifold.expmap0(torch.tensor([[0.0, -2.0, 0.0], [0.0, 1.0, 0.0], [0.0, 7.0, 0.0]]).double())
    torch.testing.assert_close(manifold.logmap0(frechet_mean(line, manifold))[1:], torch.tensor([2.0, 0.0]).double())
    weighted = frechet_mean(line, manifold, torch.tensor([3.0, 0.0, 1.0]).double())
    torch.testing.assert_close(manifold.logmap0(weighted)[1:], torch.tensor([0.25, 0.0]).double())
    x = manifold.lift(torch.randn(2, 4).double())
    torch.testing.assert_close(frechet_mean(x, manifold), manifold.centroid(x))
    same = x[:1].expand(6, 5)
    torch.testing.assert_close(frechet_mean(same, manifold), x[0])


def test_axes_weights_and_nothing_to_average(dtype: torch.dtype) -> None:
    manifold = Lorentz(-1.5, dtype=dtype)
    x = manifold.lift(torch.randn(4, 3, 2, dtype=dtype))
    weights = torch.rand(4, 3, dtype=dtype)
    first = frechet_mean(x, manifold, weights, dim=0)
    torch.testing.assert_close(first, frechet_mean(x.transpose(0, 1), manifold, weights.T))
    torch.testing.assert_close(first[1], frechet_mean(x[:, 1], manifold, weights[:, 1] * 1e4))
    even = frechet_mean(x, manifold)
    torch.testing.assert_close(frechet_mean(x, manifold, torch.full((), 7.0, dtype=dtype)), even)
    origin = manifold.origin(4, 3).as_subclass(torch.Tensor)
    x.requires_grad_()
    empty = frechet_mean(x, manifold, torch.zeros(3, dtype=dtype))
    torch.testing.assert_close(empty, origin)
    (grad,) = torch.autograd.grad(empty.sum(), x)
    assert not grad.any()
    torch.testing.assert_close(frechet_mean(x[:, :0], manifold), origin)


def test_nan_stays_visible_in_the_mean_of_its_own_points(dtype: torch.dtype) -> None:
    manifold = Lorentz(-0.7, dtype=dtype)
    x = manifold.lift(torch.randn(3, 5, 2, dtype=dtype))
    expected, spoiled = frechet_mean(x, manifold), x.clone()
    spoiled[1, 4, 2] = torch.nan
    mean = frechet_mean(spoiled.requires_grad_(), manifold)
    torch.testing.assert_close(mean[::2], expected[::2])
    assert bool(mean[1].isnan().all())
    (grad,) = torch.autograd.grad(mean.sum(), spoiled)
    assert grad.isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_sets_that_have_arrived_wait_for_the_others() -> None:
    """Some points are their own mean, from the first step on; of others it takes several."""
    manifold = Lorentz(-1.0, dtype=torch.float64)
    space = torch.randn(4, 5, 3).double() * torch.tensor([0.0, 1.0, 30.0, 1e4]).double()[:, None, None]
    x = manifold.lift(space)
    torch.testing.assert_close(frechet_mean(x, manifold), torch.stack([frechet_mean(each, manifold) for each in x]))


def test_weights_of_no_points_have_gradients_of_their_shape() -> None:
    manifold = Lorentz(-1.0, dtype=torch.float64)
    x = manifold.lift(torch.randn(2, 3, 0, 2).double()).requires_grad_()
    weights = torch.rand(2, 3, 0).double().requires_grad_()
    mean = frechet_mean(x, manifold, weights)
    torch.testing.assert_close(mean, manifold.origin(2, 3, 3).as_subclass(torch.Tensor))
    found = torch.autograd.grad(mean.sum(), [x, weights])
    assert [grad.shape for grad in found] == [x.shape, weights.shape]


def test_an_ensemble_by_vmap_agrees_with_its_members() -> None:
    manifold = Lorentz(-1.0, dtype=torch.float64)
    x = manifold.lift(torch.randn(3, 5, 2).double())
    torch.testing.assert_close(torch.func.vmap(lambda x: frechet_mean(x, manifold))(x), frechet_mean(x, manifold))


def test_shapes_on_the_meta_device_take_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing there says when to stop, and all two hundred steps take half a minute."""
    steps = []
    real = means._matters
    monkeypatch.setattr(means, "_matters", lambda *given: steps.append(given) or real(*given))
    manifold = Lorentz(-1.0, learnable=True, device="meta")
    assert frechet_mean(torch.empty(2, 3, 4, device="meta"), manifold).shape == (2, 4)
    assert len(steps) == 1
