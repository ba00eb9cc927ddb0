"""Lorentz as others use it: drawn from, optimized on by Geoopt, shared, moved, learned."""

from __future__ import annotations

import copy
import math

import geoopt
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from holonomy.manifolds import Curvature, Lorentz
from holonomy.numerics import tolerance

KAPPAS = (-0.01, -1.0, -100.0)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("std", [1e-3, 0.5, 2.0])
def test_random_is_a_wrapped_normal(kappa: float, std: float, device: torch.device) -> None:
    """The log map of samples is normal with the asked standard deviation in every coordinate."""
    manifold = Lorentz(kappa, dtype=torch.float64, device=device)
    torch.manual_seed(1)
    log = manifold.logmap0(manifold.random(4000, 4, std=std))[..., 1:]
    assert log.shape == (4000, 3)
    sample = (log / std).cpu()
    # Twelve thousand normals: the spread is known to 0.65%, its mean to 0.9%; four of each.
    assert sample.std().item() == pytest.approx(1, abs=0.026)
    assert sample.mean().item() == pytest.approx(0, abs=0.037)
    assert stats.kstest(sample.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(torch.corrcoef(sample.T)[0, 1].item()) < 0.065


def test_random_is_on_the_manifold_and_seeded(dtype: torch.dtype, device: torch.device) -> None:
    manifold = Lorentz(-0.5, dtype=dtype, device=device)
    torch.manual_seed(3)
    first = manifold.random(5, 4, std=3.0)
    torch.manual_seed(3)
    assert torch.equal(first, manifold.random(5, 4, std=3.0))
    assert not torch.equal(first, manifold.random(5, 4, std=3.0))
    assert first.dtype == dtype
    assert first.device.type == device.type
    torch.testing.assert_close(first.detach(), manifold.lift(first[..., 1:]).detach())


@pytest.mark.parametrize("kappa", [-0.01, -0.3, -1.0, -7.7, -100.0])
def test_curvature_is_exact_at_construction(kappa: float, dtype: torch.dtype) -> None:
    for learnable in (False, True):
        manifold = Lorentz(kappa, learnable=learnable, dtype=dtype)
        assert manifold.curvature.shape == (1,)
        assert manifold.curvature.dtype == dtype
        expected = torch.tensor([kappa], dtype=dtype)
        assert torch.equal(manifold.curvature.detach(), expected)
        torch.testing.assert_close(manifold.k.detach(), -1 / expected)
        assert any(p.requires_grad for p in manifold.parameters()) == learnable


@pytest.mark.parametrize("value", [0.0, 1.0, math.nan, -math.inf])
def test_curvature_is_refused_unless_negative_and_finite(value: float) -> None:
    with pytest.raises(ValueError, match="curvature"):
        Lorentz(value)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e30, math.inf])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_curvature_is_negative_and_finite_after_any_step(size: float, sign: float, dtype: torch.dtype) -> None:
    for kappa in KAPPAS:
        manifold = Lorentz(kappa, learnable=True, dtype=dtype)
        (parameter,) = [p for p in manifold.parameters() if p.requires_grad]
        with torch.no_grad():
            parameter.add_(sign * size)
        for value in (manifold.curvature, manifold.k):
            assert value.shape == (1,)
            assert torch.isfinite(value).all()
        assert (manifold.curvature < 0).all()
        assert (manifold.k > 0).all()
        # And what is computed there still means something.
        x = manifold.lift(torch.tensor([[1.0, 2.0], [-0.5, 1.0]], dtype=dtype))
        assert torch.isfinite(manifold.dist(x[0], x[1])).all()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_curvature_survives_an_optimizer_at_absurd_rates(optimizer: type) -> None:
    manifold = Lorentz(-1.0, learnable=True)
    step = optimizer(manifold.parameters(), lr=1e30)
    x = manifold.lift(torch.tensor([[1.0, 2.0], [-0.5, 1.0]])).detach()
    for _ in range(3):
        step.zero_grad()
        manifold.dist(x[0], x[1]).sum().backward()
        step.step()
        assert torch.isfinite(manifold.curvature).all()
        assert (manifold.curvature < 0).all()


def test_curvature_moves_with_the_module() -> None:
    manifold = Lorentz(-0.7, learnable=True)
    assert manifold.to(torch.float64).curvature.dtype == torch.float64
    assert manifold.curvature.item() == pytest.approx(-0.7, rel=1e-7)
    assert manifold.to("meta").curvature.device.type == "meta"


@pytest.mark.cuda
def test_curvature_moves_to_a_gpu() -> None:
    manifold = Lorentz(-0.7, learnable=True).cuda()
    assert manifold.curvature.is_cuda
    x = manifold.lift(torch.randn(3, 2, device="cuda"))
    assert manifold.dist0(x).is_cuda


def test_curvature_is_shared_by_reference() -> None:
    manifold = Lorentz(-1.0, learnable=True)
    both = nn.ModuleList([nn.ModuleDict({"m": manifold}), nn.ModuleDict({"m": manifold})])
    learned = [p for p in both.parameters() if p.requires_grad]
    assert len(learned) == 1
    with torch.no_grad():
        learned[0].add_(0.5)
    assert both[0]["m"].curvature.item() == both[1]["m"].curvature.item() != -1.0
    apart = copy.deepcopy(both)
    with torch.no_grad():
        learned[0].add_(0.5)
    assert apart[0]["m"].curvature.item() == apart[1]["m"].curvature.item()
    assert apart[0]["m"].curvature.item() != manifold.curvature.item()


def test_state_dict_round_trip() -> None:
    learned = Lorentz(-0.3, learnable=True)
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.add_(0.25)
    other = Lorentz(-5.0, learnable=True)
    other.load_state_dict(learned.state_dict())
    assert torch.equal(other.curvature, learned.curvature)
    assert isinstance(Curvature(-2.0).value, Tensor)


@pytest.mark.parametrize(("value", "kind"), [(-1e40, None), (-1e-40, None), (-1e32, None), (-0.5, torch.float16)])
def test_a_curvature_that_its_dtype_could_not_follow_is_refused(value: float, kind: torch.dtype | None) -> None:
    with pytest.raises(ValueError, match=r"curvature must stay finite and negative in torch\.float"):
        Lorentz(value, dtype=kind)


@pytest.mark.parametrize("name", ["RiemannianAdam", "RiemannianSGD"])
@pytest.mark.parametrize("kappa", [-0.25, -4.0])
def test_geoopt_optimizes_on_it(name: str, kappa: float) -> None:
    """Geoopt finds the point nearest to two others: the middle of their geodesic."""
    manifold = Lorentz(kappa)
    targets = manifold.lift(torch.tensor([[0.9, -0.3], [-0.4, 0.8]])).detach()
    start = manifold.lift(torch.tensor([1.5, 2.0])).detach()
    point = geoopt.ManifoldParameter(start, manifold=manifold)
    rates = {"RiemannianAdam": 0.1, "RiemannianSGD": 0.2}
    optimizer = getattr(geoopt.optim, name)([point], lr=rates[name])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for _ in range(200):
        optimizer.zero_grad()
        manifold.dist(point, targets).square().sum().backward()
        optimizer.step()
        schedule.step()
    middle = manifold.centroid(targets)
    gap = 0.03 if name == "RiemannianAdam" else 1e-4
    assert manifold.dist(point, middle).item() < gap
    torch.testing.assert_close(point.detach(), manifold.projx(point).detach())


def test_geoopt_accepts_it_in_a_product() -> None:
    """A product with a Euclidean factor: distances add in squares, a step moves both factors."""
    manifold = Lorentz(-1.0)
    product = geoopt.ProductManifold((manifold, 3), (geoopt.Euclidean(1), 2))
    points = [manifold.lift(torch.randn(2)).detach() for _ in range(2)]
    flat = [torch.randn(2) for _ in range(2)]
    x, y = (product.pack_point(p, f) for p, f in zip(points, flat, strict=True))
    expected = manifold.dist(*points).square() + (flat[0] - flat[1]).square().sum()
    torch.testing.assert_close(product.dist(x, y).square(), expected.reshape(()))
    parameter = geoopt.ManifoldParameter(x, manifold=product)
    optimizer = geoopt.optim.RiemannianAdam([parameter], lr=0.05)
    before = product.dist(parameter, y).item()
    for _ in range(50):
        optimizer.zero_grad()
        product.dist2(parameter, y).sum().backward()
        optimizer.step()
    assert product.dist(parameter, y).item() < before / 2
    moved = product.take_submanifold_value(parameter.detach(), 0)
    torch.testing.assert_close(moved, manifold.projx(moved).detach())


def test_geoopt_checks_pass(dtype: torch.dtype) -> None:
    """Geoopt's own checks of points and vectors accept ours, far out too."""
    manifold = Lorentz(-2.0, dtype=dtype)
    x = manifold.lift(torch.randn(4, 3).to(dtype) * torch.tensor([[0.1], [1.0], [10.0], [1e4]]))
    manifold.assert_check_point_on_manifold(x)
    u = manifold.proju(x, torch.randn(4, 4).to(dtype))
    manifold.assert_check_vector_on_tangent(x, u)
    manifold.assert_check_vector_on_tangent(x.expand(2, 4, 4), u.expand(2, 4, 4))
    assert not manifold.check_vector_on_tangent(x, u + 1)


def test_against_geoopt_where_geoopt_is_right() -> None:
    """In float64 at moderate radii Geoopt's formulas hold: ours give the same."""
    ours, theirs = Lorentz(-0.5, dtype=torch.float64), geoopt.Lorentz(torch.tensor(2.0).double())
    x, y = (ours.lift(torch.randn(6, 3).double()).detach() for _ in range(2))
    u = ours.proju(x, torch.randn(6, 4).double())
    rtol, atol = tolerance(torch.float64)
    for mine, other in (
        (ours.dist(x, y), theirs.dist(x, y)),
        (ours.dist0(x), theirs.dist0(x)),
        (ours.expmap(x, u), theirs.expmap(x, u)),
        (ours.logmap(x, y), theirs.logmap(x, y)),
        (ours.logmap0(x), theirs.logmap0(x)),
        (ours.expmap0(ours.logmap0(x)), theirs.expmap0(theirs.logmap0(x))),
        (ours.transp(x, y, u), theirs.transp(x, y, u)),
        (ours.projx(x * 1.5), theirs.projx(x * 1.5)),
        (ours.proju(x, torch.ones_like(x)), theirs.proju(x, torch.ones_like(x))),
        (ours.egrad2rgrad(x, y), theirs.egrad2rgrad(x, y)),
        (ours.inner(x, u, u), theirs.inner(x, u, u)),
        (ours.norm(u), theirs.norm(u)),
    ):
        torch.testing.assert_close(mine, other.reshape(mine.shape), rtol=rtol * 1e3, atol=atol * 1e3)


@pytest.mark.parametrize("source", ["x", "y", "u", "gradient", "nothing"])
@pytest.mark.parametrize("name", ["dist", "expmap", "logmap", "transp"])
def test_nan_stays_visible(name: str, source: str) -> None:
    """In gradients of its row and in that of the curvature, whichever input it came in with."""
    manifold = Lorentz(-0.5, learnable=True, dtype=torch.float64)
    tensors = {key: torch.randn(2, 4, dtype=torch.float64) for key in ("x", "y", "u")}
    read = {"dist": "xy", "expmap": "xu", "logmap": "xy", "transp": "xyu"}[name]
    if source in tensors:
        tensors[source][0, 2] = torch.nan
    given = [tensors[key].requires_grad_() for key in read]
    result = getattr(manifold, name)(*given)
    gradient = torch.ones_like(result)
    if source == "gradient":
        gradient[0] = torch.nan
    *grads, on_curvature = torch.autograd.grad(result, (*given, *manifold.parameters()), gradient)
    spoiled = source == "gradient" or source in read
    assert bool(on_curvature.isnan()) == spoiled
    # Transport is linear: its gradient in u does not know u.
    assert any(bool(grad[0].isnan().any()) for grad in grads) == spoiled
    for grad in grads:
        assert grad[1].isfinite().all()


@pytest.mark.parametrize("source", ["x", "gradient", "nothing"])
@pytest.mark.parametrize("name", ["cdist", "centroid"])
def test_nan_of_one_point_stays_visible_in_sums_over_all(name: str, source: str) -> None:
    """In every gradient, whichever of the inputs is not a number."""
    manifold = Lorentz(-0.5, dtype=torch.float64)
    x = manifold.lift(torch.randn(3, 2, dtype=torch.float64))
    other = manifold.lift(torch.randn(4, 2).double()) if name == "cdist" else torch.rand(4, 3, dtype=torch.float64)
    if source == "x":
        x[0, 2] = torch.nan
    given = x.requires_grad_(), other.requires_grad_()
    result = getattr(manifold, name)(*given)
    gradient = torch.full_like(result, torch.nan if source == "gradient" else 1.0)
    for grad in torch.autograd.grad(result, given, gradient):
        assert bool(grad.isnan().any()) == (source != "nothing")


PER_SAMPLE = {
    "dist": lambda m, x, y: m.dist(x, y),
    "dist0": lambda m, x, y: m.dist0(x),
    "cdist": lambda m, x, y: m.cdist(x, y),
    "centroid": lambda m, x, y: m.centroid(x, y.square() @ x.square().mT),
    "expmap": lambda m, x, y: m.expmap(x, m.proju(x, y)),
    "logmap": lambda m, x, y: m.logmap(x, y),
    "expmap0": lambda m, x, y: m.expmap0(x),
    "logmap0": lambda m, x, y: m.logmap0(x),
    "transp": lambda m, x, y: m.transp(x, y, m.proju(x, y)),
    "to_poincare": lambda m, x, y: m.to_poincare(x),
    "to_klein": lambda m, x, y: m.to_klein(x),
}


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("name", PER_SAMPLE)
def test_gradients_of_each_sample_by_torch_func(name: str, rows: int, dtype: torch.dtype) -> None:
    """``vmap(grad(f))`` is a loop of backward passes, for few pairs and for as many as have forms of their own."""
    manifold = Lorentz(-0.7, dtype=dtype)
    x, y = (manifold.lift(torch.randn(2, rows, 3, dtype=dtype)) for _ in range(2))

    def total(x: Tensor, y: Tensor) -> Tensor:
        return PER_SAMPLE[name](manifold, x, y).square().sum()

    each = torch.func.vmap(torch.func.grad(total))(x, y)
    for i in range(2):
        one = x[i].clone().requires_grad_()
        (expected,) = torch.autograd.grad(total(one, y[i]), one)
        torch.testing.assert_close(each[i], expected, rtol=1e-4, atol=1e-4 * expected.abs().amax().item())


@pytest.mark.usefixtures("without_shape_checks")
def test_a_mask_is_no_weight() -> None:
    manifold = Lorentz(-1.0)
    with pytest.raises(TypeError, match=r"weights must be a floating-point tensor, got torch\.bool"):
        manifold.centroid(manifold.lift(torch.randn(3, 2)), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("name", ["proju", "egrad2rgrad"])
def test_projections_of_any_size_saturate(name: str) -> None:
    """Their products left float64: infinite, or the difference of two infinities."""
    manifold = Lorentz(-1.0, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    x, u = (
        torch.randn(2000, 4, generator=draw, dtype=torch.float64)
        * 10 ** torch.empty(2000, 1, dtype=torch.float64).uniform_(-300, 300, generator=draw)
        for _ in range(2)
    )
    assert getattr(manifold, name)(manifold.projx(x), u).isfinite().all()


def test_weights_of_more_axes_than_the_points() -> None:
    manifold = Lorentz(-1.0)
    x, weights = manifold.lift(torch.randn(3, 2, 4)), torch.rand(5, 1, 3, 1, 2)
    middle = manifold.centroid(x, weights)
    assert middle.shape == (5, 1, 3, 1, 5)
    torch.testing.assert_close(middle[2, 0], manifold.centroid(x, weights[2, 0]))


def test_midpoints_of_batches_are_the_same_over_a_group(mesh: DeviceMesh) -> None:
    manifold = Lorentz(-0.6, dtype=torch.float64)
    x, weights = manifold.lift(torch.randn(2, 3, 4, 2).double()), torch.rand(2, 3, 5, 4).double()
    for given in (weights, weights[:, :, 0], None):
        shared = manifold.centroid(x, given, group=mesh.get_group())
        torch.testing.assert_close(shared, manifold.centroid(x, given))


def test_the_ratio_of_curvatures_whose_quotient_leaves_the_range_is_finite():
    strong, weak = Lorentz(-1e25, learnable=True), Lorentz(-1e-20, learnable=True)
    for one, other, expected in ((strong, weak, 3.1622776e22), (weak, strong, 3.1622776e-23)):
        torch.testing.assert_close(one.ratio(other), torch.tensor([expected]), rtol=1e-6, atol=0.0)
        (grad,) = torch.autograd.grad(one.ratio(other).log(), one.curvature_parameter.log_ratio)
        torch.testing.assert_close(grad, torch.tensor([0.5]))
    assert strong.ratio(strong) == 1
