"""The sphere: distances with all digits, maps that undo each other, and points that stay on it."""

from __future__ import annotations

import math

import geoopt
import mpmath
import pytest
import torch
from torch import Tensor

from holonomy.manifolds import Sphere
from holonomy.optim import RiemannianAdam

KAPPAS = (1.0, 0.3, 2.5)


def turned(angle: str, kappa: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """Two points of S^2 whose angle is this before rounding, and the distance of their directions, in 50 digits."""
    with mpmath.workdps(50):
        exact = mpmath.mpf(angle)
        x = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
        sideways = torch.tensor([0.8, 0.0, -0.6], dtype=torch.float64)
        rows = [float(mpmath.cos(exact)) * x + float(mpmath.sin(exact)) * sideways for exact in (mpmath.mpf(0), exact)]
        first, second = (row.to(dtype) / math.sqrt(kappa) for row in rows)
        a, b = ([mpmath.mpf(float(entry)) for entry in row] for row in (first, second))
        a, b = ([entry / mpmath.norm(row) for entry in row] for row in (a, b))
        chords = [mpmath.sqrt(sum((p - sign * q) ** 2 for p, q in zip(a, b, strict=True))) for sign in (1, -1)]
        return first, second, float(2 * mpmath.atan2(*chords) / mpmath.sqrt(mpmath.mpf(kappa)))


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("angle", ["1e-7", "1e-3", "0.5", "1.5", "3.0", "3.1415"])
def test_distances_keep_their_digits(angle: str, kappa: float, dtype: torch.dtype) -> None:
    """Near zero and near the opposite point, where an arc cosine has half of them."""
    x, y, exact = turned(angle, kappa, dtype)
    assert Sphere(kappa, dtype=torch.float64).dist(x, y).item() == pytest.approx(exact, rel=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kappa", [1.0, 0.25, 0.3])
@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0])
def test_distances_of_near_points_keep_their_digits(factor: float, kappa: float, dtype: torch.dtype) -> None:
    """Also where the radius is a power of two, so that rounded lengths lie on both sides of one."""
    sphere = Sphere(kappa, dtype=torch.float64)
    x = sphere.projx(torch.randn(50, 5, dtype=dtype))
    y = sphere.projx(x + 1e-5 * torch.randn_like(x))
    found = sphere.dist(factor * x, factor * y).tolist()
    with mpmath.workdps(50):
        for pair, distance in zip(torch.stack([factor * x, factor * y], 1).tolist(), found, strict=True):
            a, b = ([mpmath.mpf(entry) / mpmath.norm(row) for entry in row] for row in pair)
            chord = mpmath.norm([left - right for left, right in zip(a, b, strict=True)])
            exact = float(2 * mpmath.asin(chord / 2) / mpmath.sqrt(mpmath.mpf(kappa)))
            assert distance == pytest.approx(exact, rel=8 * torch.finfo(dtype).eps, abs=0)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("factors", [(2.0, 1.0), (1.0, 0.5), (0.25, 8.0), (1e-9, 1e-9), (1e9, 1e9)])
def test_a_point_is_its_direction(factors: tuple[float, float], kappa: float, dtype: torch.dtype) -> None:
    """Of another length, too: distances, logarithms, transports and ends of geodesics are those of the projections."""
    sphere = Sphere(kappa, dtype=dtype)
    x, y = sphere.projx(torch.randn(2, 50, 4, dtype=dtype))
    u, v = (sphere.proju(x, torch.randn_like(x)) for _ in range(2))
    long, short = (point * factor for point, factor in zip((x, y), factors, strict=True))
    quotient = max(factors) / min(factors)
    tight = {"rtol": 20 * quotient * torch.finfo(dtype).eps, "atol": 100 * quotient * torch.finfo(dtype).eps}
    for method in ("dist", "cdist", "logmap"):
        torch.testing.assert_close(getattr(sphere, method)(long, short), getattr(sphere, method)(x, y), **tight)
    torch.testing.assert_close(sphere.transp(long, short, v), sphere.transp(x, y, v), **tight)
    torch.testing.assert_close(sphere.expmap(long, u), sphere.expmap(x, u), **tight)
    torch.testing.assert_close(sphere.transp_follow_expmap(long, u, v), sphere.transp_follow_expmap(x, u, v), **tight)
    torch.testing.assert_close(sphere.expmap(long, sphere.logmap(long, short)), y, rtol=0, atol=5e-6)
    # The same point with another length is at no distance.
    assert sphere.dist(x, 3 * x).max() <= 4 * torch.finfo(dtype).eps / math.sqrt(kappa)
    assert sphere.expmap(torch.zeros_like(x), torch.zeros_like(u)).equal(sphere.projx(torch.zeros_like(x)))


def test_the_gradient_of_a_distance_does_not_lengthen_points(dtype: torch.dtype) -> None:
    sphere = Sphere(0.3, dtype=dtype)
    x, y = (2 * sphere.projx(torch.randn(2, 50, 4, dtype=dtype))).requires_grad_()
    for slope, at in zip(torch.autograd.grad(sphere.dist(x, y).sum(), (x, y)), (x, y), strict=True):
        assert (slope * at).sum(-1).abs().max() <= 100 * torch.finfo(dtype).eps


def test_coincident_and_opposite_points_have_zero_gradients() -> None:
    sphere = Sphere(0.5)
    x = sphere.projx(torch.randn(4, 3)).requires_grad_()
    for y, distance in ((x.detach(), 0.0), (-x.detach(), math.pi * math.sqrt(2))):
        found = sphere.dist(x, y)
        torch.testing.assert_close(found, torch.full((4,), distance))
        (slope,) = torch.autograd.grad(found.sum(), x)
        assert not slope.any()


@pytest.mark.parametrize("gap", [1e-8, 1e-20, 1e-38, 1e-42, 1e-160, 1e-250, 1e-310])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_near_and_nearly_opposite_points_have_finite_logarithms_and_transports(
    sign: float, gap: float, dtype: torch.dtype
) -> None:
    """Down to the smallest numbers of the dtype, whose squares and reciprocals it does not hold."""
    sphere = Sphere(1.0, dtype=dtype)
    x = torch.tensor([1.0, 0.0, 0.0], dtype=dtype, requires_grad=True)
    y = torch.tensor([sign, gap, 0.0], dtype=dtype, requires_grad=True)
    v = torch.tensor([0.0, 0.6, 0.8], dtype=dtype)
    log, there = sphere.logmap(x, y), sphere.transp(x, y, v)
    for found in (log, there):
        assert found.isfinite().all()
        assert all(slope.isfinite().all() for slope in torch.autograd.grad(found.sum(), (x, y)))
    if gap >= 1e-250:  # what float32 rounds to zero is the opposite point, whose logarithm is zero
        distance = sphere.dist(x, y) if y[1] else torch.zeros((), dtype=dtype)
        assert log.abs().max().item() == pytest.approx(distance.item(), rel=1e-6, abs=0.0)
    torch.testing.assert_close(there.norm(), v.norm())


def test_float16_holds_the_root_of_a_curvature_that_it_does_not_hold() -> None:
    sphere = Sphere(1e6)
    assert sphere.projx(torch.tensor([3.0, 4.0], dtype=torch.float16)).tolist() == pytest.approx([6e-4, 8e-4], rel=1e-3)
    assert sphere.radius(torch.zeros(1, dtype=torch.float16)).item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_exponential_and_logarithm_undo_each_other(kappa: float) -> None:
    sphere = Sphere(kappa, dtype=torch.float64)
    x, y = sphere.projx(torch.randn(2, 50, 4, dtype=torch.float64))
    u = sphere.logmap(x, y)
    torch.testing.assert_close(u.norm(dim=-1), sphere.dist(x, y))
    torch.testing.assert_close(sphere.expmap(x, u), y)
    assert not sphere.logmap(x, x).any()
    assert sphere.check_vector_on_tangent(x, u)
    assert sphere.check_point_on_manifold(y)
    assert not sphere.check_point_on_manifold(1.01 * y)


@pytest.mark.parametrize("turns", [3, 1000])
def test_long_tangent_vectors_keep_their_digits(turns: int) -> None:
    sphere, wide = Sphere(0.3), Sphere(float(Sphere(0.3).curvature), dtype=torch.float64)
    x = sphere.projx(torch.tensor([1.0, -2.0, 0.5]))
    u = sphere.proju(x, torch.tensor([3.0, 1.0, 2.0])) * turns
    torch.testing.assert_close(sphere.expmap(x, u).double(), wide.expmap(x.double(), u.double()), rtol=1e-6, atol=1e-6)


def test_transport_turns_the_geodesic_into_itself_and_keeps_products() -> None:
    sphere = Sphere(0.7, dtype=torch.float64)
    x, y = sphere.projx(torch.randn(2, 50, 4, dtype=torch.float64))
    v, w = (sphere.proju(x, torch.randn(50, 4, dtype=torch.float64)) for _ in range(2))
    there, also = sphere.transp(x, y, v), sphere.transp(x, y, w)
    assert sphere.check_vector_on_tangent(y, there)
    torch.testing.assert_close((there * also).sum(-1), (v * w).sum(-1))
    torch.testing.assert_close(sphere.transp(x, y, sphere.logmap(x, y)), -sphere.logmap(y, x))


@pytest.mark.parametrize("angle", [0.0, 1e-5, 1.0, math.pi - 1e-3, math.pi, 3 * math.pi])
def test_transport_along_a_geodesic_knows_it_where_its_end_does_not(angle: float, dtype: torch.dtype) -> None:
    """At the opposite point every geodesic ends; the one that u starts turns the plane of x and u by its angle."""
    sphere = Sphere(0.3, dtype=torch.float64)
    x = sphere.projx(torch.randn(20, 4, dtype=torch.float64))
    unit = torch.nn.functional.normalize(sphere.proju(x, torch.randn_like(x)), dim=-1)
    x, u, v = (each.to(dtype) for each in (x, unit * sphere.radius(x) * angle, sphere.proju(x, torch.randn_like(x))))
    length = u.double().norm(dim=-1, keepdim=True) / sphere.radius(x.double())
    along, off = (unit * v).sum(-1, keepdim=True), torch.nn.functional.normalize(x.double(), dim=-1)
    exact = v + along * ((torch.cos(length) - 1) * unit - torch.sin(length) * off)
    tolerance = 20 * torch.finfo(dtype).eps
    for found in (sphere.transp_follow_expmap(x, u, v), sphere.expmap_transp(x, u, v)[1]):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)


def test_the_gradient_of_transport_along_no_geodesic() -> None:
    sphere = Sphere(0.3, dtype=torch.float64)
    x, u = sphere.projx(torch.randn(4, dtype=torch.float64)), torch.zeros(4, dtype=torch.float64)
    v = sphere.proju(x, torch.randn(4, dtype=torch.float64))
    slope = torch.autograd.functional.jacobian(lambda u: sphere.transp_follow_expmap(x, u, v), u)
    torch.testing.assert_close(slope, -0.3 * torch.outer(x, v))


def test_the_hessian_along_no_geodesic() -> None:
    """Of <a, exp_x(u)>, as Newton's method on the sphere takes it: exp_x(u) = x + u - kappa |u|^2 x / 2 + .."""
    sphere = Sphere(0.3, dtype=torch.float64)
    x, a = sphere.projx(torch.randn(4, dtype=torch.float64)), torch.randn(4, dtype=torch.float64)
    basis = torch.linalg.qr(torch.stack([x, *torch.randn(3, 4, dtype=torch.float64)]).mT).Q[:, 1:]
    found = torch.autograd.functional.hessian(
        lambda c: (a * sphere.expmap(x, basis @ c)).sum(), torch.zeros(3).double()
    )
    torch.testing.assert_close(found, -0.3 * (a @ x) * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("size", [0.0, 1e-25, 1.0, 1e25])
def test_lengths_of_tangent_vectors_have_their_digits_and_gradients(size: float) -> None:
    """The root of a square is zero or the root of the largest number, with a gradient of nan or zero."""
    sphere = Sphere(0.3)
    x = sphere.projx(torch.randn(5, 3))
    u = (sphere.proju(x, torch.randn(5, 3)) * size).requires_grad_()
    found = sphere.norm(x, u, keepdim=True)
    torch.testing.assert_close(found.double(), u.double().norm(dim=-1, keepdim=True), rtol=1e-6, atol=0)
    (slope,) = torch.autograd.grad(found.sum(), u)
    torch.testing.assert_close(slope, torch.nn.functional.normalize(u.double(), dim=-1, eps=1e-30).float())


@pytest.mark.parametrize("kappa", [1e-6, 1.0, 1e4])
def test_points_and_tangent_vectors_are_told_from_others(kappa: float) -> None:
    sphere = Sphere(kappa)
    x = sphere.projx(torch.randn(50, 3))
    u = sphere.proju(x, torch.randn(50, 3) * sphere.radius(x))
    assert sphere.check_point_on_manifold(x)
    assert sphere.check_point_on_manifold(x[0])
    assert not sphere.check_point_on_manifold(2 * x[0])
    assert sphere.check_vector_on_tangent(x, u)
    assert not sphere.check_vector_on_tangent(x, u + x / 100)


def test_no_tangent_vectors_have_no_products() -> None:
    assert Sphere().inner(torch.ones(0, 3), torch.ones(1, 3)).shape == (0,)
    assert Sphere().inner(torch.ones(3), torch.full((3,), 1e25), keepdim=True).isfinite().all()


def test_zero_vectors_lie_on_the_first_axis() -> None:
    sphere, x = Sphere(4.0), torch.zeros(2, 3, requires_grad=True)
    points = sphere.projx(x)
    assert points.tolist() == [[0.5, 0.0, 0.0]] * 2
    (slope,) = torch.autograd.grad(points.sum(), x)
    assert not slope.any()
    assert sphere.origin(2, 3).tolist() == [[0.5, 0.0, 0.0]] * 2
    at = points.detach()
    for found in (sphere.dist(x, at), sphere.logmap(at, x), sphere.transp(x, at, x + 1), sphere.dist(x, x)):
        assert found.isfinite().all()
        assert torch.autograd.grad(found.sum(), x)[0].isfinite().all()


def test_the_gradient_of_the_curvature_is_that_of_the_radius() -> None:
    """Between points that are scaled with it, d = angle / sqrt(kappa)."""
    sphere = Sphere(2.0, learnable=True, dtype=torch.float64)
    unit = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    found = sphere.dist(*sphere.projx(unit))
    (slope,) = torch.autograd.grad(found, sphere.curvature_parameter.log_ratio)
    torch.testing.assert_close(slope, -found[None] / 2)


def test_riemannian_adam_finds_the_nearest_point() -> None:
    sphere = Sphere(0.25)
    points = geoopt.ManifoldParameter(sphere.projx(torch.randn(5, 3)), manifold=sphere)
    goal = sphere.projx(torch.tensor([1.0, 2.0, -2.0]))
    optimizer = RiemannianAdam([points], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        sphere.dist(points, goal).square().sum().backward()
        optimizer.step()
        assert sphere.check_point_on_manifold(points)
    assert sphere.dist(points, goal).max() < 0.05


@pytest.mark.parametrize("curvature", [0.0, -1.0, math.inf, math.nan])
def test_only_positive_curvatures(curvature: float) -> None:
    with pytest.raises(ValueError, match="curvature must be positive and finite, got"):
        Sphere(curvature)


def test_a_curvature_that_its_dtype_could_not_follow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must stay finite and positive in torch.float32 .*, got 1e\+30"):
        Sphere(1e30)


@pytest.mark.parametrize("kappa", [1e-6, *KAPPAS, 1e6])
@pytest.mark.parametrize("size", [1e36, 3e37, 1e38, -3.4e38])
def test_a_finite_gradient_never_becomes_nan(kappa, size):
    """Of ordinary pairs, near ones, opposite ones and equal ones; below where it is held it has its digits."""
    sphere, wide = Sphere(kappa), Sphere(kappa, dtype=torch.float64)
    x, y = (sphere.projx(torch.randn(200, 4)) for _ in range(2))
    near, opposite = (sphere.projx(each + 1e-4 * sphere.radius(x) * torch.randn(200, 4)) for each in (x, -x))
    pairs = torch.stack([torch.cat([x, x, x, x, x]), torch.cat([y, near, opposite, x, -x])])
    for name in ("dist", "dist2"):
        inputs, exact = pairs.clone().requires_grad_(), pairs.double().requires_grad_()
        found, expected = getattr(sphere, name)(*inputs), getattr(wide, name)(*exact)
        found.backward(torch.full_like(found, size))
        expected.backward(torch.full_like(expected, size))
        assert not inputs.grad.isnan().any()
        if name == "dist" and size == 1e36 and kappa >= 1:
            torch.testing.assert_close(inputs.grad[:, :200].double(), exact.grad[:, :200], rtol=1e-4, atol=1e32)
