"""Second derivatives, judged by differences of the first ones."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
from geoopt import Euclidean
from torch import Tensor
from torch.nn import functional

from holonomy.manifolds import Lorentz, Product, Sphere, hyperboloid

pytestmark = pytest.mark.usefixtures("without_shape_checks")

# One random direction instead of the whole matrix.
gradgradcheck = partial(torch.autograd.gradgradcheck, fast_mode=True)


def ambient(space: Tensor) -> Tensor:
    """Put any time coordinate before a space part: none is read."""
    return functional.pad(space, (1, 0))


BINARY = {
    "dist": lambda x, y, _, k: hyperboloid.dist(ambient(x), ambient(y), k),
    "cdist": lambda x, y, _, k: hyperboloid.cdist(ambient(x), ambient(y), k),
    "expmap": lambda x, _, u, k: hyperboloid.expmap(ambient(x), ambient(u), k),
    "logmap": lambda x, y, _, k: hyperboloid.logmap(ambient(x), ambient(y), k),
    "transp": lambda x, y, u, k: hyperboloid.transp(ambient(x), ambient(y), ambient(u), k),
}


@pytest.mark.parametrize("name", BINARY)
def test_geodesics(name: str) -> None:
    """Of points at some distance from the origin and from each other."""
    x, y, u = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kappa = torch.tensor([-0.7], dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(BINARY[name], (x, y, u, kappa))


MAPS = BINARY | {
    "expmap_frame": lambda x, _, u, k: hyperboloid.expmap_frame(ambient(x), u, k),
    "logmap_frame": lambda x, y, _, k: hyperboloid.logmap_frame(ambient(x), ambient(y), k),
    "inner": lambda x, y, u, k: hyperboloid.inner(ambient(x), ambient(u), ambient(y), k),
    "frechet_mean": lambda x, y, u, k: hyperboloid.frechet_mean(
        ambient(torch.stack([x, y, u], -2)), torch.ones(3, dtype=torch.float64), k
    ),
}
# Which of x, y and u are zero, or x, or on its ray: directions have no derivative there, but these maps have.
PLACES = {
    "x at the origin": (0, 1, 1),
    "y at the origin": (1, 0, 1),
    "no step": (1, 1, 0),
    "both at the origin": (0, 0, 1),
    "all zero": (0, 0, 0),
    "equal": (1, "x", 1),
    "a radius out": ("out", "out", 1),
    "on one ray": (1, "2x", 1),
}
EQUAL = {"both at the origin", "all zero", "equal", "a radius out"}
ROWS = [(m, p) for m, p in itertools.product(MAPS, PLACES) if not (m.endswith("dist") and p in EQUAL)]


def weighted(x: Tensor) -> Tensor:
    """A sum of all entries, each with another weight."""
    return (x * torch.arange(x.numel()).add(0.5).cos().view_as(x)).sum()


@pytest.mark.parametrize(("name", "place"), ROWS)
def test_rows_without_a_direction(name: str, place: str) -> None:
    """One row is there and the other is not; first derivatives are the same as when nobody asks for second ones."""
    x, y, u = (torch.randn(2, 3, dtype=torch.float64) for _ in range(3))
    out = torch.tensor([-(0.7**-0.5), 0.0, 0.0], dtype=torch.float64)
    factors = {0: 0.0 * x[0], "x": x[0], "2x": 2 * x[0], "out": out}
    for tensor, factor in zip((x, y, u), PLACES[place], strict=True):
        tensor[0] = factors.get(factor, tensor[0])
    inputs = [t.requires_grad_() for t in (x, y, u, torch.tensor([-0.7], dtype=torch.float64))]

    def slope(inputs: list[Tensor], *, again: bool = False) -> Tensor:
        grads = torch.autograd.grad(weighted(MAPS[name](*inputs)), inputs, create_graph=again, materialize_grads=True)
        return torch.stack([weighted(grad) for grad in grads]).sum()

    first = slope(inputs, again=True)
    torch.testing.assert_close(first, slope(inputs), rtol=1e-12, atol=1e-12)
    for number, ours in enumerate(torch.autograd.grad(first, inputs, materialize_grads=True)):
        along = torch.randn_like(inputs[number])

        def beside(step: float, number: int = number, along: Tensor = along) -> Tensor:
            near = [t + step * along if i == number else t for i, t in enumerate(inputs)]
            return slope([t.detach().requires_grad_() for t in near])

        theirs = (beside(1e-4) - beside(-1e-4)) / 2e-4
        torch.testing.assert_close((ours * along).sum(), theirs, rtol=1e-6, atol=1e-6 * (1 + abs(first.item())))


def test_the_hessian_of_a_squared_length_is_the_metric() -> None:
    """At equal points far out, where the metric is 1 across the ray and 1 / x_t^2 along it."""
    space = torch.tensor([30.0, 40.0], dtype=torch.float64)
    here, kappa = hyperboloid.lift(space, torch.tensor([-1.0], dtype=torch.float64)), torch.tensor([-1.0]).double()

    def half(y: Tensor) -> Tensor:
        return hyperboloid.logmap_frame(here, ambient(y), kappa).square().sum() / 2

    for hessian in (torch.autograd.functional.hessian(half, space), torch.func.hessian(half)(space)):
        expected = torch.eye(2, dtype=torch.float64) - torch.outer(space, space) / 2501
        torch.testing.assert_close(hessian, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kappa", [-0.01, -1.0, -100.0])
def test_time_at_the_origin(kappa: float) -> None:
    """There |x| has no derivative, but the time coordinate has two: zero, and the identity times sqrt(-kappa)."""
    space, curvature = torch.zeros(3, dtype=torch.float64), torch.tensor([kappa], dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda x: hyperboloid.time(x, curvature).squeeze(), space)
    torch.testing.assert_close(hessian, torch.eye(3, dtype=torch.float64) * (-kappa) ** 0.5)
    space = torch.tensor([[0.0, 0.0], [1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(hyperboloid.lift, (space, curvature.requires_grad_()), eps=1e-6 * min(1.0, -kappa))


@pytest.mark.parametrize("reach", [0.3, 3.0])
@pytest.mark.parametrize("place", ["apart", "origin", "midpoint", "alone", "together"])
def test_centroid(place: str, reach: float) -> None:
    """In points, weights and curvature, also where a point lies at the origin or on the midpoint."""
    space = torch.randn(1 if place == "alone" else 3, 2, dtype=torch.float64) * reach
    if place == "origin":
        space[0] = 0
    if place == "midpoint":
        space[1:] = torch.stack([-space[0], torch.zeros_like(space[0])])
    if place == "together":
        space[:] = space[:1].clone()
    weights = torch.rand(2, len(space), dtype=torch.float64) + 0.1
    if place == "midpoint":
        weights[0, 1] = weights[0, 0]
    kappa = torch.tensor([-0.7], dtype=torch.float64)
    inputs = tuple(t.requires_grad_() for t in (space, weights, kappa))
    assert gradgradcheck(lambda x, w, k: hyperboloid.centroid(hyperboloid.lift(x, k), w, k), inputs)
    assert gradgradcheck(lambda x, w, k: hyperboloid.centroid(ambient(x), w, k), inputs)


def test_centroid_without_weight() -> None:
    """A row of zeros gives the origin, and no derivative of any order."""
    space = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.zeros(1, 3, dtype=torch.float64)
    middle = hyperboloid.centroid(ambient(space), weights, torch.tensor([-1.0], dtype=torch.float64))
    (first,) = torch.autograd.grad(middle.square().sum(), space, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), space)
    assert torch.equal(first, torch.zeros_like(space))
    assert torch.equal(second, torch.zeros_like(space))


SPACES = Lorentz(-0.7), Sphere(0.7), Product((Lorentz(-0.7), 3), (Euclidean(ndim=1), 3), (Sphere(0.7), 3))


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("space", SPACES, ids=lambda space: type(space).__name__)
def test_the_hessian_of_a_squared_distance_is_that_of_points_nearby(
    space: Lorentz | Sphere | Product, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """At equal points, where that of a distance is nan: twice the metric, in both arguments, beside other rows."""
    at = torch.randn(*shape[:-1], space.n_elements if isinstance(space, Product) else 3, dtype=dtype)
    at = space.projx(at)
    beside = space.projx(at + 1e-4 * torch.randn_like(at)).double()
    if at.ndim > 1:
        beside[0] = at[0]
    wide = copy.deepcopy(space).double()

    def hessian(x: Tensor, y: Tensor) -> Tensor:
        here = wide if x.dtype == torch.float64 else space
        both = torch.cat([x.flatten(), y.flatten()])
        found = partial(_of_both, here, x.shape)
        ours = torch.autograd.functional.hessian(found, both)
        torch.testing.assert_close(ours, torch.func.hessian(found)(both))
        return ours

    assert not space.dist2(at, at).any()
    torch.testing.assert_close(hessian(at, at).double(), hessian(beside, at.double()), rtol=1e-3, atol=1e-3)


def _of_both(space: Lorentz | Sphere | Product, shape: torch.Size, both: Tensor) -> Tensor:
    x, y = both.view(2, *shape)
    return space.dist2(x, y).sum()


@pytest.mark.parametrize("space", SPACES, ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e18])
def test_squared_distances_are_squares_with_finite_gradients(
    space: Lorentz | Sphere | Product, size: float, dtype: torch.dtype
) -> None:
    x, y = (space.projx(size * torch.randn(5, 9 if isinstance(space, Product) else 3, dtype=dtype)) for _ in range(2))
    x[0] = y[0]
    x, y = x[:, None].requires_grad_(), y.requires_grad_()
    found = space.dist2(x, y, keepdim=True)
    torch.testing.assert_close(found, space.dist(x, y, keepdim=True).square(), rtol=1e-5, atol=0)
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), (x, y)),
        torch.autograd.grad(space.dist(x, y).square().sum(), (x, y)),
        strict=True,
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
