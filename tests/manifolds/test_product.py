"""Products: Geoopt's, with an exact distance; learned points that no learning curvature strands."""

from __future__ import annotations

import copy
import math
from typing import Any

import geoopt
import pytest
import torch

from holonomy.manifolds import Lorentz, LorentzEmbedding, Product, ProductEmbedding, Sphere
from holonomy.optim import RiemannianAdam


def product(**how: Any) -> Product:
    flat = geoopt.Euclidean(ndim=1)
    return Product((Lorentz(-0.5, **how), 4), (flat, 2), (Sphere(2.0, **how), 3))


def points(space: Product, *shape: int) -> torch.Tensor:
    return space.lift(torch.randn(*shape, sum(space.sizes), dtype=torch.float64)).detach()


def test_distances_are_those_of_geoopts_product() -> None:
    """With the unit sphere, which is all that Geoopt has."""
    parts = (Lorentz(-0.5, dtype=torch.float64), 4), (geoopt.Euclidean(ndim=1), 2), (Sphere(dtype=torch.float64), 3)
    space, theirs = Product(*parts), geoopt.ProductManifold(*parts[:2], (geoopt.Sphere(), 3))
    x, y = points(space, 2, 20)
    torch.testing.assert_close(space.dist(x, y), theirs.dist(x, y))
    torch.testing.assert_close(space.dist2(x, y), theirs.dist2(x, y))
    torch.testing.assert_close(space.cdist(x, y).diagonal(), space.dist(x, y))
    assert space.check_point_on_manifold(x)
    u = space.logmap(x, y)
    torch.testing.assert_close(space.inner(x, u).sqrt(), space.dist(x, y))
    torch.testing.assert_close(space.expmap(x, u), y)


def test_no_points_and_points_that_broadcast_have_maps_and_products() -> None:
    """Geoopt finds no shape for no points, and asks the flat factor of pairs that it does not broadcast."""
    space = product(dtype=torch.float64)
    for shape, other in (((0,), (0,)), ((4, 1), (3,)), ((2, 0), (1, 1))):
        x, y = points(space, *shape), points(space, *other)
        both = torch.broadcast_shapes(shape, other)
        u = space.logmap(x, y)
        maps = space.projx(x + y), space.proju(x, y), space.egrad2rgrad(x, y), space.retr(x, u), space.transp(x, y, u)
        maps += space.transp_follow_expmap(x, u, u), space.transp_follow_retr(x, u, u), space.component_inner(x, u)
        maps += *space.expmap_transp(x, u, u), *space.retr_transp(x, u, u)
        assert all(found.shape == (*both, 9) for found in maps)
        torch.testing.assert_close(space.expmap(x, u), y.expand(*both, 9))
        torch.testing.assert_close(space.inner(x, u, keepdim=True).sqrt(), space.dist(x, y, keepdim=True))
        torch.testing.assert_close(space.inner(x, u, -u), -space.dist2(x, y))


def test_maps_along_directions_are_those_of_geoopt() -> None:
    space = product(dtype=torch.float64)
    x, y = points(space, 4), points(space, 4)
    u, v = space.logmap(x, y), space.proju(x, y)
    for name in ("transp_follow_expmap", "transp_follow_retr", "expmap_transp", "retr_transp", "component_inner"):
        torch.testing.assert_close(getattr(space, name)(x, u, v), getattr(geoopt.ProductManifold, name)(space, x, u, v))


@pytest.mark.parametrize("size", [0.0, 1e-25, 1.0, 1e25])
def test_lengths_of_tangent_vectors_have_their_digits_and_gradients(size: float) -> None:
    space = product()
    x = space.lift(torch.randn(5, 8))
    u = (space.proju(x, torch.randn(5, 9)) * size).requires_grad_()
    found = space.norm(x, u)
    torch.testing.assert_close(found.double(), space.inner(x.double(), u.double()).sqrt(), rtol=1e-5, atol=0)
    (slope,) = torch.autograd.grad(found.sum(), u)
    assert slope.isfinite().all()
    assert bool(slope.any()) == bool(size)


def test_a_scaled_manifold_scales_every_distance() -> None:
    space = product(dtype=torch.float64)
    for manifold, x in ((space, points(space, 5)), *((m, m.random(5, 4)) for m, _ in space.factors[::2])):
        scaled = geoopt.Scaled(manifold, 3.0)
        torch.testing.assert_close(scaled.cdist(x, x), scaled.dist(x[:, None], x))
        torch.testing.assert_close(scaled.cdist(x, x), 3 * manifold.cdist(x, x))
    scaled, x = geoopt.Scaled(space, 3.0), points(space, 5)
    torch.testing.assert_close(scaled.factor_dist(x[:, None], x).norm(dim=-1), scaled.cdist(x, x))
    torch.testing.assert_close(scaled.factor_cdist(x, x).norm(dim=-1), scaled.cdist(x, x))


def test_the_origin_is_that_of_coordinates() -> None:
    space = product(dtype=torch.float64)
    torch.testing.assert_close(space.origin(2, 9), space.lift(torch.zeros(2, 8, dtype=torch.float64)), rtol=0, atol=0)


def test_random_points_lie_where_the_curvatures_do() -> None:
    assert product(device="meta", dtype=torch.bfloat16).random(5, 9).device.type == "meta"
    found = product(dtype=torch.float64).random(5, 9)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found[:, 6:].norm(dim=-1) * math.sqrt(2.0), torch.ones(5, dtype=torch.float64))


def test_coincident_points_are_at_distance_zero_with_zero_gradients() -> None:
    space = product(dtype=torch.float64)
    x = points(space, 5).requires_grad_()
    found = space.dist(x, x.detach())
    assert not found.any()
    assert not torch.autograd.grad(found.sum(), x)[0].any()


def test_coordinates_are_those_of_lift() -> None:
    space = product(dtype=torch.float64)
    x = points(space, 7)
    torch.testing.assert_close(space.lift(space.coordinates(x)), x)
    assert space.sizes == [3, 2, 3]
    unit = space.unit(x)
    for factor, part in zip((Lorentz(-1.0), geoopt.Euclidean(ndim=1), Sphere()), space.slices, strict=True):
        assert factor.check_point_on_manifold(unit[:, part])


def test_centroids_are_in_each_factor_its_own() -> None:
    space = product(dtype=torch.float64)
    x, weights = points(space, 6), torch.rand(2, 6, dtype=torch.float64)
    hyperbolic, flat, round_ = space.centroid(x, weights).split([4, 2, 3], -1)
    torch.testing.assert_close(hyperbolic, space.manifolds[0].centroid(x[:, :4], weights))
    torch.testing.assert_close(flat, weights @ x[:, 4:6] / weights.sum(-1, keepdim=True))
    total = weights @ x[:, 6:]
    torch.testing.assert_close(round_, total / total.norm(dim=-1, keepdim=True) / math.sqrt(2))
    origin = space.centroid(x, torch.zeros(1, 6, dtype=torch.float64))
    torch.testing.assert_close(origin, space.lift(torch.zeros(1, 8, dtype=torch.float64)))


def test_means_under_autocast_and_of_many_points_have_their_digits() -> None:
    space = product()
    x, weights = points(space, 6).float(), torch.rand(2, 6)
    expected = space.centroid(x, weights)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(space.centroid(x, weights), expected, rtol=0, atol=0)
    for kind in (torch.float16, torch.float32):  # shares below float16's normal numbers, and a long sum
        flat, ones = Product((geoopt.Euclidean(ndim=1), 1)), torch.ones(1_000_000, 1, dtype=kind)
        torch.testing.assert_close(flat.centroid(ones, ones.mT), torch.ones(1, 1, dtype=kind))


def test_means_of_long_points_do_not_leave_the_range() -> None:
    space = Product((geoopt.Euclidean(ndim=1), 2), (Sphere(), 2))
    x = space.lift(torch.tensor([[4e37, 3e37, 1.0, 0.0], [6e37, 5e37, 0.0, 1.0]]))
    mean = space.centroid(x, torch.full((1, 2), 100.0))
    torch.testing.assert_close(mean, torch.tensor([[5e37, 4e37, 0.5**0.5, 0.5**0.5]]))


def test_gradients_of_curvatures_fit_for_coordinates_as_long_as_they_are_held() -> None:
    """Which a table at a rate of a thousand has after a step: with a quotient by the root they were infinite."""
    space = Product((Lorentz(-1e-9, learnable=True), 3))
    long, short = space.lift(torch.tensor([[8e37, 1e37]])), space.lift(torch.tensor([[1.0, 2.0]]))
    distance = space.dist(long, short)
    (slope,) = torch.autograd.grad(distance.sum(), list(space.parameters()))
    assert distance.isfinite().all()
    assert slope.isfinite().all()


def test_curvatures_that_float16_does_not_hold_have_roots_that_it_holds() -> None:
    space = Product((Lorentz(-1e6), 3), (Sphere(1e6), 2))
    x = space.lift(torch.tensor([0.3, 0.4, 0.6, 0.8], dtype=torch.float16))
    assert space.coordinates(x).tolist() == pytest.approx([0.3, 0.4, 0.6, 0.8], rel=2e-3)


def test_learned_points_stay_while_curvatures_learn() -> None:
    torch.manual_seed(0)
    space = product(learnable=True)
    table = ProductEmbedding(12, space, std=0.3)
    truth = Product((Lorentz(-1.5), 4), (geoopt.Euclidean(ndim=1), 2), (Sphere(0.6), 3))
    wanted = truth.cdist(*[truth.lift(torch.randn(12, 8))] * 2)
    optimizer = RiemannianAdam(table.parameters(), lr=0.05)
    losses = []
    for step in range(200):
        optimizer.zero_grad()
        loss = (space.cdist(table(), table()) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 9:
            assert space.check_point_on_manifold(table())
            assert table.unit.manifold.check_point_on_manifold(table.unit)
    assert losses[-1] < losses[0] / 50
    assert abs(space.manifolds[0].curvature.item() + 0.5) > 0.01
    assert abs(space.manifolds[2].curvature.item() - 2.0) > 0.01


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_table_is_still_moved_on_the_product(assign: bool) -> None:
    table = ProductEmbedding(3, product())
    other = copy.deepcopy(table).to("meta")
    other.load_state_dict(table.state_dict(), assign=True)
    assert isinstance(other.unit, geoopt.ManifoldParameter)
    assert [type(part) for part in other.unit.manifold.manifolds] == [Lorentz, geoopt.Euclidean, Sphere]
    assert torch.equal(other(), table())
    table.load_state_dict(other.state_dict(), assign=assign)
    assert isinstance(table.unit, geoopt.ManifoldParameter)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((), "factors must be at least one"),
        (((Lorentz(), 1),), r"factors\[0\]\[1\] must be at least 2 for a Lorentz, got 1 \(d \+ 1 coordinates"),
        (((geoopt.Euclidean(ndim=1), 1), (Sphere(), 1)), r"factors\[1\]\[1\] must be at least 2 for a Sphere"),
        (((geoopt.Lorentz(), 3),), r"factors\[0\] must be a pair of a Lorentz, a Sphere \(both of holonomy\)"),
        (((geoopt.Euclidean(), 3),), r"factors\[0\] must be a pair"),
        ((Lorentz(),), "factors must be"),
        (((Lorentz(), 2.5),), r"factors\[0\]\[1\] must be a positive integer"),
    ],
)
def test_what_is_no_factor_gets_one_sentence(factors: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        Product(*factors)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("std", [math.inf, math.nan, -1.0])
def test_spreads_of_which_no_points_can_be_drawn_are_refused(std: float) -> None:
    """An infinite one made tables of the largest number and of nan."""
    made = [
        lambda: ProductEmbedding(3, product(), std=std),
        lambda: LorentzEmbedding(3, 2, Lorentz(), std=std),
        lambda: Lorentz().random(3, 2, std=std),
    ]
    for make in made:
        with pytest.raises(ValueError, match="std must be finite and not negative, got"):
            make()
