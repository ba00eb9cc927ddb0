"""Functions of float32 rows against those of geodesics in float64. (`test_oracle` judges them by the oracle.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from holonomy import numerics
from holonomy.manifolds import Lorentz, hyperboloid
from holonomy.manifolds.hyperboloid import rowwise, rowwise_maps
from holonomy.manifolds.hyperboloid.rowwise_transport import _numbers

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS = 700


def pairs(kappa: float, rapidity: float, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points within a rapidity: anywhere, 1e-7 to 1e-1 apart, on one ray, opposite, at the origin, and coincident."""
    draw = torch.Generator().manual_seed(dim)
    way = torch.nn.functional.normalize(torch.randn(2, ROWS, dim, generator=draw), dim=-1)
    length = rapidity * torch.rand(2, ROWS, 1, generator=draw) / (-kappa) ** 0.5
    x, y = hyperboloid.expmap0(torch.nn.functional.pad(way * length, (1, 0)), torch.tensor([kappa]))
    y[:100] = x[:100] * (1 + torch.logspace(-7, -1, 100)[:, None] * torch.randn(100, 1, generator=draw))
    y[100:200, 1:] = x[100:200, 1:] + x[100:200, 1:].flip(-1) * torch.logspace(-7, -1, 100)[:, None]
    y[200:250, 1:] = -x[200:250, 1:]
    y[250:300], x[300:310, 1:] = x[250:300], 0.0
    return x.to(device), y.to(device)


def found(x: Tensor, y: Tensor, kappa: float, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    curvature = torch.tensor([kappa], device=x.device, dtype=dtype, requires_grad=True)
    leaves = [*(z.to(dtype, copy=True).requires_grad_() for z in (x, y)), curvature]
    distances = hyperboloid.dist(leaves[0], leaves[1], curvature)
    return [z.detach() for z in (distances, *torch.autograd.grad(distances, leaves, grad.to(dtype)))]


def parts_of(gradient: Tensor, x: Tensor) -> list[Tensor]:
    """Length along the ray of x, and across it: far out the first is small beside the second."""
    ray = torch.nn.functional.normalize(x[:, 1:].double(), dim=-1)
    along = (gradient[:, 1:].double() * ray).sum(-1, keepdim=True)
    return [along, gradient[:, 1:].double() - along * ray]


@pytest.mark.parametrize("kappa", [-0.01, -1.0, -100.0])
@pytest.mark.parametrize("rapidity", [1e-6, 1e-2, 1.0, 5.0, 12.0, 30.0, 80.0])
@pytest.mark.parametrize("dim", [1, 2, 65])
def test_agree_with_geodesics(kappa: float, rapidity: float, dim: int, device: torch.device) -> None:
    x, y = pairs(kappa, rapidity, dim, device)
    assert rowwise.use_rowwise(x, y)
    grad = torch.ones(ROWS, device=device)
    fast, exact = (found(x, y, kappa, grad, dtype) for dtype in (torch.float32, torch.float64))
    assert bool((fast[0][250:300] == 0).all())
    torch.testing.assert_close(fast[0].double(), exact[0], rtol=1e-6, atol=0)
    for place, points in ((1, x), (2, y)):
        size = torch.linalg.vector_norm(exact[place], dim=-1)
        for a, b in zip(parts_of(fast[place], points), parts_of(exact[place], points), strict=True):
            error, part = (torch.linalg.vector_norm(z, dim=-1) for z in (a - b, b))
            assert bool((error <= 1e-5 * part + 2e-7 * size).all())
            assert float((error / part.clamp_min(1e-300)).median()) < 1e-6 or dim == 1
    torch.testing.assert_close(fast[3].double(), exact[3], rtol=1e-5, atol=0)


@pytest.mark.parametrize("rapidity", [5.0, 20.0, 77.0])
def test_distances_far_out_keep_the_short_formula(rapidity: float, device: torch.device) -> None:
    """Of leaves of a tree, at one radius and in any directions: once all those beyond 14.5 were left to geodesics."""
    way = torch.nn.functional.normalize(torch.randn(2, ROWS, 10, generator=torch.Generator().manual_seed(0)), dim=-1)
    x, y = hyperboloid.expmap0(torch.nn.functional.pad(way * rapidity, (1, 0)), torch.tensor([-1.0])).to(device)
    assert not bool(rowwise_maps._dist_numbers(torch.ones(1, 1, dtype=torch.float64, device=device), x, y)[1].any())


FUNCTIONS = {
    "dist": hyperboloid.dist,
    "logmap": hyperboloid.logmap,
    "expmap": lambda x, y, kappa: hyperboloid.expmap(x, hyperboloid.tangent(x, y[..., 1:] - x[..., 1:], kappa), kappa),
    "transp": lambda x, y, kappa: hyperboloid.transp(
        x, y, hyperboloid.tangent(x, x[..., 1:] + y[..., 1:], kappa), kappa
    ),
    "expmap0": lambda x, y, kappa: hyperboloid.expmap0(x, kappa) + 0 * y,
    "logmap0": lambda x, y, kappa: hyperboloid.logmap0(x, kappa) + 0 * y,
}


@pytest.fixture(params=FUNCTIONS)
def function(request: pytest.FixtureRequest) -> Function:
    return FUNCTIONS[request.param]


def test_second_derivative_is_that_of_geodesics(function: Function, device: torch.device) -> None:
    x, y = (z[310:] for z in pairs(-1.0, 1.0, 3, device))
    seconds = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype, copy=True).requires_grad_()
        kappa = torch.tensor([-1.0], dtype=dtype, device=device, requires_grad=True)
        total = function(leaf, y.to(dtype), kappa).square().mean()
        first = torch.autograd.grad(total, [leaf, kappa], create_graph=True)
        seconds.append(torch.autograd.grad(sum(z.square().sum() for z in first), [leaf, kappa]))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-6)


def test_a_row_of_nan_stays_one(function: Function, device: torch.device) -> None:
    x, y = pairs(-1.0, 1.0, 3, device)
    x[7] = torch.nan
    x.requires_grad_()
    result = function(x, y, torch.tensor([-1.0], device=device))
    (gradient,) = torch.autograd.grad(result[:, None].sum(), x)
    for found in (result.detach().reshape(ROWS, -1), gradient):
        assert found.isnan().any(-1).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (3, 4), (1, 4), (2, 1, 4)], ids=str)
def test_shapes(function: Function, shape: tuple[int, ...], device: torch.device) -> None:
    """Any leading axes, and one point beside many."""
    x, y = pairs(-1.0, 1.0, 3, device)
    kappa = torch.tensor([-1.0], device=device)
    many = x[: torch.Size(shape).numel()].reshape(*shape, 4).clone().requires_grad_()
    for other in (torch.zeros_like(many) + y[300], y[300]):
        result = function(many, other, kappa)
        wide = function(many.double(), other.double(), kappa.double())
        torch.testing.assert_close(result.double(), wide, rtol=1e-5, atol=1e-6)
        assert torch.autograd.grad(result.sum(), many)[0].shape == many.shape


def test_no_dimension(device: torch.device) -> None:
    """The hyperbolic space of dimension zero is a point."""
    manifold = Lorentz(-4.0, device=device)
    x = manifold.origin(2, 1)
    assert manifold.dist(x, x).tolist() == [0.0, 0.0]
    assert manifold.expmap(x, torch.zeros_like(x)).tolist() == [[0.5], [0.5]]
    assert manifold.logmap(x, x).tolist() == [[0.0], [0.0]]


def test_the_rule(device: torch.device) -> None:
    x = torch.ones(9, 4, device=device)
    assert rowwise.use_rowwise(x, x)
    assert not rowwise.use_rowwise(x, x.double())
    assert not rowwise.use_rowwise(x.double(), x.double())
    with torch.autocast(device.type, torch.bfloat16):
        assert not rowwise.use_rowwise(x, x)


@pytest.mark.parametrize("flip", [False, True])
def test_steep_rows_are_left_to_the_exact_functions(flip):
    """The slope is that of the farther point, whichever it is."""
    far = 2 * numerics.ROW_STEEPEST**0.5
    x, y = torch.tensor([[0.0, 0.0], [0.3, 0.0]]), torch.tensor([[far, 0.0], [0.0, 0.4]])
    x, y = (y, x) if flip else (x, y)
    one = torch.ones((), dtype=torch.float64)
    assert rowwise_maps._log_numbers(one, x, y)[1].squeeze().tolist() == [True, False]
    assert _numbers(one, x, y, torch.ones(2, 2))[1].squeeze().tolist() == [True, False]
