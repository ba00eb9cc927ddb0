"""The ends of the range: every method of the manifold is finite on finite arguments, and so are its gradients.

Rows of subnormal to the largest numbers, in all combinations, along one ray, against it and across it. What the dtype
cannot hold saturates, in results and in gradients; see "Where float32 ends" in ``docs/numerics.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from holonomy.manifolds import Curvature, Lorentz
from tests.fuzz.calls import METHODS
from tests.laws.test_geometry import ROUNDING

ROWS, DIM = 600, 3
SIZES = {
    torch.float32: (0.0, 1e-45, 1e-40, 1e-20, 1e-8, 0.1, 1.0, 10.0, 1e3, 1e5, 1e8, 1e12, 1e18, 1e25, 1e30, 1e36, 1e38),
    torch.float64: (
        0.0,
        5e-324,
        1e-310,
        1e-160,
        1e-16,
        0.1,
        1.0,
        30.0,
        1e3,
        1e8,
        1e16,
        1e75,
        1e150,
        1e220,
        1e300,
        1e308,
    ),
}


class Rows:
    """Rows of arguments for one call, in one dtype and on one manifold."""

    def __init__(self, manifold: Lorentz, dtype: torch.dtype, seed: int) -> None:
        self.manifold, self.dtype = manifold, dtype
        self.random = torch.Generator().manual_seed(seed)
        self.seen: dict[str, Tensor] = {}

    def vector(self, *shape: int) -> Tensor:
        """Vectors of all sizes, some along the first argument of the call."""
        shape = shape or (ROWS, DIM)
        x = torch.randn(shape, generator=self.random, dtype=torch.float64)
        x[::5, ..., 1:] = 0.0
        x[1::5] = 1.0
        first = next(iter(self.seen.values()), None)
        if first is not None and first.shape == (*shape[:-1], shape[-1] + 1):
            along = first[..., 1:].double()
            along = along / along.abs().amax(-1, keepdim=True).clamp(min=5e-324)
            x[2::5] = along[2::5]
            x[3::10] = -along[3::10]
        x = x * self.size(*shape[:-1]).unsqueeze(-1)
        limit = torch.finfo(self.dtype).max
        return x.clamp(-limit, limit).to(self.dtype)

    def size(self, *shape: int) -> Tensor:
        """Positive numbers of all sizes."""
        sizes = torch.tensor(SIZES[self.dtype], dtype=torch.float64)
        return sizes[torch.randint(len(sizes), shape, generator=self.random)]

    def tangent(self) -> Tensor:
        return torch.nn.functional.pad(self.vector(), (1, 0))

    def point(self, *shape: int) -> Tensor:
        return self.manifold.lift(self.vector(*shape)).detach()

    def beside(self) -> Tensor:
        """Points of which some are the first of the call, next to it, or opposite."""
        x, first = self.vector(), next(iter(self.seen.values()))[..., 1:]
        x[::7], x[1::7], x[2::7] = first[::7], -first[1::7], first[2::7] * (1 - 1e-6)
        return self.manifold.lift(x).detach()

    def unit(self) -> Tensor:
        u = self.manifold.transp0(self.seen["x"].double(), torch.nn.functional.normalize(self.tangent().double()))
        limit = torch.finfo(self.dtype).max
        return u.detach().clamp(-limit, limit).to(self.dtype)

    def ball(self) -> Tensor:
        share = torch.linspace(0.0, 1.0, ROWS, dtype=torch.float64).sqrt().unsqueeze(-1)
        direction = torch.nn.functional.normalize(torch.randn(ROWS, DIM, generator=self.random, dtype=torch.float64))
        return (direction * share / math.sqrt(-self.manifold.curvature.item())).to(self.dtype)


DRAWN: dict[str, Callable[[Rows], Any]] = {
    "vector": Rows.vector,
    "point": Rows.point,
    "first": Rows.point,
    "other": Rows.beside,
    "points": lambda rows: rows.point(ROWS // 10, 3, DIM),
    "some_points": lambda rows: rows.point(ROWS // 3, 3, DIM),
    "loose_ambient": lambda rows: rows.vector(ROWS, DIM + 1),
    "ambient": lambda rows: rows.vector(ROWS, DIM + 1),
    "tangent": Rows.tangent,
    "tangent0": Rows.tangent,
    "unit": Rows.unit,
    "arc": lambda rows: rows.size(ROWS, 1).to(rows.dtype),
    "ball": Rows.ball,
    "manifold": lambda rows: Lorentz(-7.0, dtype=rows.dtype),
    "weights": lambda rows: rows.size(ROWS // 3, 2, 3).to(rows.dtype),
}


@pytest.mark.parametrize("kappa", [-1.0, -1e-6, -1e6])
@pytest.mark.parametrize("name", [name for name in METHODS if "x:" in METHODS[name] or "u:" in METHODS[name]])
def test_finite_arguments_give_finite_results_and_gradients(name: str, kappa: float, dtype: torch.dtype) -> None:
    manifold = Lorentz(kappa, learnable=True, dtype=dtype)
    row, _, points = METHODS[name].partition(" -> ")
    rows = Rows(manifold, dtype, len(name))
    for part in row.replace("?", "").split():
        argument, kind = part.split(":")
        if kind in DRAWN:
            rows.seen[argument] = DRAWN[kind](rows)
    tensors = {key: x.requires_grad_() for key, x in rows.seen.items() if isinstance(x, Tensor)}
    result = getattr(manifold, name)(**rows.seen)
    finite(result, tensors, "the result")
    if points:
        expected = manifold.lift(result.detach().double()[..., 1:])[..., :1].detach()
        torch.testing.assert_close(result[..., :1].detach().double(), expected, rtol=ROUNDING[dtype], atol=0)
    leaves = tensors | dict(manifold.named_parameters())
    for size in (1.0, torch.finfo(dtype).max / 128):
        signs = torch.cos(2.3 * torch.arange(result.numel(), dtype=torch.float64)).reshape(result.shape) * size
        asked = list(leaves.values())
        gradients = torch.autograd.grad(result, asked, signs.to(dtype), retain_graph=True, materialize_grads=True)
        for key, gradient in zip(leaves, gradients, strict=True):
            finite(gradient, tensors, f"the gradient in {key} of results weighted by {size:.0e}")


def finite(found: Tensor, arguments: dict[str, Tensor], what: str) -> None:
    """Fail with the first row that is not."""
    wrong = ~found.isfinite()
    if wrong.any():
        place = tuple(wrong.nonzero()[0][: max(found.ndim - 1, 0)].tolist()) if found.numel() > 1 else ()
        listing = {key: x[place].tolist() for key, x in arguments.items()} if place else "?"
        raise AssertionError(f"{int(wrong.sum())} numbers of {what}, first at {place}: {found[place]}, of {listing}")


def test_gradients_of_a_curvature_that_many_uses_share_saturate(dtype: torch.dtype) -> None:
    """Each use is a node of its own, whose gradient is finite; so is the sum of a hundred."""
    curvature = Curvature(-1.0, learnable=True, dtype=dtype)
    steepest = torch.finfo(dtype).max
    total = sum((curvature.value * steepest for _ in range(100)), start=torch.zeros(1, dtype=dtype))
    (found,) = torch.autograd.grad(total, curvature.log_ratio, -torch.ones_like(total))
    assert 0 < found.item() < math.inf


def test_gradients_of_a_vector_that_many_points_share_saturate(dtype: torch.dtype) -> None:
    """Each is finite; their sum is not."""
    manifold = Lorentz(-1.0, dtype=dtype)
    x = manifold.lift(torch.ones(3, 2, dtype=dtype)).detach()
    u, v = (torch.tensor([[0.0, size, size]], dtype=dtype, requires_grad=True) for size in (1e3, 1.0))
    moved = manifold.transp_follow_expmap(x, u, v)
    for gradient in torch.autograd.grad(moved, (u, v), torch.cos(moved)):
        assert gradient.isfinite().all()
