"""Distances by matrix products against distances by differences in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid import geodesics, pairwise, pairwise_matmul
from holonomy.manifolds.hyperboloid.pairwise_distances import use_products

CURVATURES = (-0.01, -1.0, -100.0)
ROWS, COLUMNS = 310, 190


def clouds(kappa: float, rapidity: float, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two sets within a rapidity, among them pairs that coincide and pairs 1e-7 to 1e-2 apart."""
    draw = torch.Generator().manual_seed(dim)

    def cloud(count: int) -> Tensor:
        way = torch.nn.functional.normalize(torch.randn(count, dim, generator=draw), dim=-1)
        length = rapidity * torch.rand(count, 1, generator=draw) / (-kappa) ** 0.5
        return hyperboloid.expmap0(torch.nn.functional.pad(way * length, (1, 0)), torch.tensor([kappa]))

    x, y = cloud(ROWS), cloud(COLUMNS)
    y[:50] = x[:50]
    y[:25, 1:] += x[:25, 1:] * torch.logspace(-7, -2, 25)[:, None]
    return x.to(device), y.to(device)


def distances_and_gradients(x: Tensor, y: Tensor, kappa: float, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    curvature = torch.tensor([kappa], device=x.device, dtype=dtype, requires_grad=True)
    leaves = [*(z.to(dtype, copy=True).requires_grad_() for z in (x, y)), curvature]
    distances = hyperboloid.cdist(leaves[0], leaves[1], curvature)
    return [distances.detach(), *torch.autograd.grad(distances, leaves, grad.to(dtype))]


def apart(found: Tensor, expected: Tensor) -> Tensor:
    """Distances of rows in units of the second; where that is zero both are."""
    error, size = (torch.linalg.vector_norm(z, dim=-1) for z in (found.double() - expected, expected))
    assert bool((error[size == 0] == 0).all())
    return error / size.clamp_min(torch.finfo(torch.float64).tiny)


@pytest.mark.parametrize("kappa", CURVATURES)
@pytest.mark.parametrize("rapidity", [1e-10, 1e-6, 1e-3, 0.1, 1.0, 3.0, 8.0, 15.0])
@pytest.mark.parametrize("dim", [1, 2, 64])
def test_agree_with_differences(kappa: float, rapidity: float, dim: int, device: torch.device) -> None:
    x, y = clouds(kappa, rapidity, dim, device)
    assert use_products(x, y)
    grad = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(device)
    found = distances_and_gradients(x, y, kappa, grad, torch.float32)
    expected = distances_and_gradients(x, y, kappa, grad, torch.float64)
    assert float(apart(found[0][..., None], expected[0][..., None]).max()) < 1e-6
    for a, b in zip(found[1:3], expected[1:3], strict=True):
        errors = apart(a, b)
        assert float(errors.median()) < 2e-6
        assert float(errors.max()) < 3e-4  # a row whose terms cancel, up and down a line
    assert float(apart(found[3], expected[3])) < 1e-5


def test_batches_are_sets_one_by_one(device: torch.device) -> None:
    """Sets of which one takes products and another differences, and a set that all share."""
    sets = [clouds(-1.0, rapidity, 3, device) for rapidity in (1.0, 40.0)]
    x, y = torch.stack([x for x, _ in sets])[:, None], sets[0][1]
    assert use_products(x, y)
    grad = torch.randn(2, 1, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(device)
    distances, of_x, of_y, of_kappa = distances_and_gradients(x, y, -1.0, grad, torch.float32)
    alone = [distances_and_gradients(a[0], y, -1.0, g[0], torch.float32) for a, g in zip(x, grad, strict=True)]
    assert torch.equal(distances, torch.stack([found[0] for found in alone])[:, None])
    assert torch.equal(of_x, torch.stack([found[1] for found in alone])[:, None])
    torch.testing.assert_close(of_y, sum(found[2] for found in alone), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_kappa, sum(found[3] for found in alone))


@pytest.mark.parametrize("rapidity", [1e-12, 1e-4, 1.0, 8.0])
def test_pairs_apart_for_their_lengths_are_not_measured_again(rapidity: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the origin, too, where all distances are small; a pair measured alone takes a hundred times as long."""
    x, y = clouds(-1.0, rapidity, 3, torch.device("cpu"))
    alone: list[int] = []

    def counted(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        alone.append(len(a))
        return geodesics.distance(a, b, scale)

    for module in (pairwise, pairwise_matmul):
        monkeypatch.setattr(module, "geodesics", SimpleNamespace(distance=counted))
    for dtype, coincident in ((torch.float32, 50), (torch.float64, 0)):
        alone.clear()
        hyperboloid.cdist(x.to(dtype), y.to(dtype), torch.tensor([-1.0], dtype=dtype))
        assert sum(alone) <= coincident + ROWS * COLUMNS // 1000


@pytest.mark.parametrize(
    ("rapidity", "centre", "why"),
    [(1e-5, 1.0, "all pairs near"), (1e-25, 0.0, "squares too small"), (40.0, 0.0, "squares too large for float32")],
)
def test_differences_where_products_cannot(rapidity: float, centre: float, why: str, device: torch.device) -> None:
    x, y = clouds(-1.0, rapidity, 3, device)
    x, y = (hyperboloid.lift(z[:, 1:] + centre, torch.tensor([-1.0], device=device)) for z in (x, y))
    grad = torch.ones(ROWS, COLUMNS, device=device)
    found = distances_and_gradients(x, y, -1.0, grad, torch.float32)
    expected = distances_and_gradients(x, y, -1.0, grad, torch.float64)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-7, msg=lambda words: f"{why}: {words}")


def test_second_derivative_goes_through_differences(device: torch.device) -> None:
    x, y = clouds(-1.0, 1.0, 3, device)
    x, y = x[60:], y[50:]  # no pair coincides
    assert use_products(x, y)
    seconds = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype, copy=True).requires_grad_()
        kappa = torch.tensor([-1.0], device=device, dtype=dtype, requires_grad=True)
        total = hyperboloid.cdist(leaf, y.to(dtype), kappa).square().mean()
        first = torch.autograd.grad(total, [leaf, kappa], create_graph=True)
        seconds.append(torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), [leaf, kappa]))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-6)


def test_a_row_of_nan_stays_one(device: torch.device) -> None:
    x, y = clouds(-1.0, 1.0, 3, device)
    x[7] = torch.nan
    distances = hyperboloid.cdist(x, y, torch.tensor([-1.0], device=device))
    assert bool(distances[7].isnan().all())
    assert int(distances.isnan().sum()) == COLUMNS


def test_the_rule() -> None:
    large, small = torch.ones(ROWS, 4), torch.ones(9, 4)
    assert use_products(large, large)
    assert use_products(large.bfloat16(), large)
    assert not use_products(large, small)
    assert not use_products(large, large.double())
    assert use_products(large[None], large[None])
    assert not use_products(small.expand(900, 9, 4), small)


@pytest.mark.parametrize("radius", [1.0, 10.0, 30.0, 60.0, 80.0])
@pytest.mark.parametrize("count", [3, 200])
@pytest.mark.usefixtures("without_decorators")
def test_compiled_and_transformed_distances_are_the_eager_ones(count: int, radius: float) -> None:
    """Of points far out on one ray, a unit in the last place apart, opposite, and coincident."""
    kappa = torch.tensor([-1.0])
    way = torch.nn.functional.normalize(torch.randn(count, 3, dtype=torch.float64), dim=-1)
    x = (way * math.sinh(radius)).float()
    other = torch.full_like(x, torch.finfo(torch.float32).max)
    y = torch.cat([x * 0.5, x.nextafter(other), -x, x[:1]])
    x, y = (torch.nn.functional.pad(z, (1, 0)) for z in (x, y))
    weights = torch.randn(count, len(y))
    tangents = torch.randn_like(x), torch.randn_like(y)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return hyperboloid.cdist(x, y, kappa)

    def weighted(x: Tensor, y: Tensor) -> Tensor:
        return (function(x, y) * weights).sum()

    leaves = [z.clone().requires_grad_() for z in (x, y)]
    expected = function(*leaves)
    gradients = torch.autograd.grad(expected, leaves, weights)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(compiled, expected)
    for ours, want in zip(torch.autograd.grad(compiled, leaves, weights), gradients, strict=True):
        assert torch.equal(ours, want)
    mapped = torch.func.vmap(function)(x[None], y[None])[0]
    torch.testing.assert_close(mapped, expected.detach(), rtol=1e-6, atol=0)
    moved = torch.func.jvp(function, (x, y), tangents)[1]
    for ours, want in zip(torch.func.grad(weighted, argnums=(0, 1))(x, y), gradients, strict=True):
        assert float(apart(ours * 2.0**radius, want.double() * 2.0**radius).max()) < 1e-5
    along = sum((g * t).sum(dtype=torch.float64) for g, t in zip(gradients, tangents, strict=True))
    torch.testing.assert_close((moved * weights).sum(dtype=torch.float64), along, rtol=1e-4, atol=0)
