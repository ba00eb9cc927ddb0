"""Points of products: each factor moves as it would by itself, and none leaves the range."""

from __future__ import annotations

import copy
import itertools

import geoopt
import pytest
import torch

from holonomy.manifolds import Lorentz, Product, Sphere
from holonomy.optim import RiemannianAdam, RiemannianSGD
from tests.optim.problems import normal

KINDS = {
    "adam": (RiemannianAdam, {"lr": 0.05}),
    "all of adam": (
        RiemannianAdam,
        {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1, "betas": (0.7, 0.9), "eps": 0.01},
    ),
    "sgd": (RiemannianSGD, {"lr": 0.05}),
    "nesterov": (RiemannianSGD, {"lr": 0.05, "momentum": 0.7, "nesterov": True, "weight_decay": 0.1}),
}
each_kind = pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS.keys())


def product(dtype=torch.float64):
    curved = Lorentz(-1.0, dtype=dtype), Sphere(2.0, dtype=dtype), Lorentz(-0.3, dtype=dtype)
    return Product((curved[0], 4), (curved[1], 3), (geoopt.Euclidean(ndim=1), 2), (curved[2], 3))


def table(space, *shape, dtype=torch.float64):
    points = space.lift(normal(torch.Generator().manual_seed(0), *shape, sum(space.sizes)).to(dtype))
    return geoopt.ManifoldParameter(points.detach(), manifold=space)


def factors_of(points):
    space = points.manifold
    return [
        geoopt.ManifoldParameter(points.detach()[..., part].clone(), manifold=factor)
        for (factor, _), part in zip(space.factors, space.slices, strict=True)
    ]


def gradient(points, step):
    return normal(torch.Generator().manual_seed(step), *points.shape).to(points)


@each_kind
@pytest.mark.parametrize("shape", [(7,), (2, 3), ()])
def test_a_product_moves_as_its_factors_do(kind, options, shape):
    whole = table(product(), *shape)
    parts = factors_of(whole)
    one, many = kind([whole], **options), kind(parts, **options)
    for step in range(20):
        whole.grad = gradient(whole, step)
        for part, columns in zip(parts, whole.manifold.slices, strict=True):
            part.grad = whole.grad[..., columns].clone()
        one.step(), many.step()
        if step == 10:  # a state that was saved goes on
            one.load_state_dict(copy.deepcopy(one.state_dict()))
    torch.testing.assert_close(whole.detach(), torch.cat([part.detach() for part in parts], -1), rtol=1e-12, atol=1e-12)


@each_kind
def test_rows_of_a_product_move_by_themselves(kind, options):
    options = {**options, "weight_decay": 0.0}
    sparse, dense = table(product(), 7), table(product(), 7)
    one, other = kind([sparse], **options), kind([dense], **options)
    for step in range(10):
        grad = gradient(dense, step)
        sparse.grad = torch.sparse_coo_tensor(torch.arange(7)[None], grad, grad.shape, check_invariants=True)
        dense.grad = grad
        one.step(), other.step()
    torch.testing.assert_close(sparse.detach(), dense.detach(), rtol=1e-13, atol=1e-13)
    before = sparse.detach().clone()
    sparse.grad = torch.sparse_coo_tensor([[2]], grad[:1], grad.shape, check_invariants=True)
    one.step()
    assert (sparse.detach() != before).any(-1).nonzero().flatten().tolist() == [2]


def test_a_state_of_an_optimizer_that_knows_no_manifolds_is_refused():
    points = table(product(), 7)
    flat = torch.nn.Parameter(points.detach().clone())
    theirs, ours = torch.optim.Adam([flat]), RiemannianAdam([points])
    flat.grad = gradient(flat, 0)
    theirs.step()
    with pytest.raises(ValueError, match="exp_avg_sq must be one number for each point"):
        ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e20, 1e37, 3e38])
@pytest.mark.parametrize("lr", [1e-3, 1e3, 1e30])
def test_finite_gradients_give_finite_points_of_spheres_and_products(dtype, size, lr):
    kinds = (
        (RiemannianAdam, {"eps": 0.0}),
        (RiemannianAdam, {"amsgrad": True}),
        (RiemannianSGD, {}),
        (RiemannianSGD, {"momentum": 0.9}),
    )
    for space, (kind, options) in itertools.product((product(dtype), Product((Sphere(4.0, dtype=dtype), 4))), kinds):
        points = table(space, 8, dtype=dtype)
        optimizer = kind([points], lr=lr, **options)
        for step in range(6):
            points.grad = (size * gradient(points, step)).clamp(-size, size)
            optimizer.step()
            for name, tensor in {"points": points, **optimizer.state_dict()["state"][0]}.items():
                assert tensor is None or torch.as_tensor(tensor).isfinite().all(), (name, step)


def test_gradients_beyond_the_square_root_of_the_range_do_not_stop_a_sphere():
    """Their second moment was infinite, and every later step zero."""
    points = table(Product((Sphere(), 3)), 5, dtype=torch.float32)
    optimizer = RiemannianAdam([points], lr=0.1)
    before = points.detach().clone()
    points.grad = 1e25 * gradient(points, 0)
    optimizer.step()
    turned = Sphere().dist(before, points.detach())
    assert ((turned > 0.05) & (turned < 0.11)).all()


def test_a_product_of_which_a_curvature_learns_is_warned_of():
    space = Product((Sphere(learnable=True), 3), (Lorentz(-1.0, learnable=True), 3))
    with pytest.warns(UserWarning, match=r"^params hold a point of .*ProductEmbedding.*, which follows\.$"):
        RiemannianAdam([geoopt.ManifoldParameter(space.lift(torch.ones(2, 5)).detach(), manifold=space)])
