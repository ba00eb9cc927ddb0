"""All pairs of distances on the hyperboloid, beside torch's Euclidean ones of the space parts."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.case import Case, Contenders, Figure, Line, stepped
from holonomy.manifolds import Lorentz, hyperboloid

__all__ = ["CASES"]

DIMENSION = 64
NOTE = (
    "the products of near pairs' chunks, and all forward, are in float64: forward they alone take 1.5 of torch.cdist, "
    "which takes float32"
)


def points(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two sets of radii about one, a hundred of the second near points of the first: 1e-5 to 1e-2 away."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(count, DIMENSION, generator=draw) / 8 for _ in range(2))
    few = min(100, count)
    way = torch.nn.functional.normalize(torch.randn(few, DIMENSION, generator=draw))
    y[:few] = x[:few] + torch.logspace(-5, -2, few)[:, None] * way
    return x.to(device), y.to(device)


def contenders(count: int, device: torch.device, *, backward: bool) -> Contenders:
    manifold = Lorentz(-1.0, device=device)
    flat = points(count, device)
    ambient = tuple(manifold.lift(z) for z in flat)
    leaves = {"torch.cdist": flat, "ours": ambient}
    for pair in leaves.values() if backward else ():
        for z in pair:
            z.requires_grad_()
    functions = {"torch.cdist": torch.cdist, "ours": manifold.cdist}
    return {
        name: stepped(partial(function, *leaves[name]), leaves[name] if backward else ())
        for name, function in functions.items()
    }


def worst_error(count: int, device: torch.device) -> float:
    """The largest relative error against float64, near pairs among them."""
    kappa = torch.tensor([-1.0], device=device)
    x, y = (hyperboloid.lift(z, kappa) for z in points(count, device))
    exact = hyperboloid.cdist(*(hyperboloid.lift(z[..., 1:].double(), kappa.double()) for z in (x, y)), kappa.double())
    return float(((hyperboloid.cdist(x, y, kappa) - exact).abs() / exact).max())


CASES = (
    Case(
        name="cdist-forward",
        title=f"Lorentz.cdist in {DIMENSION} dimensions, forward",
        unit="points",
        sizes=(500, 2000),
        contenders=partial(contenders, backward=False),
        lines=(
            Line("ours", "torch.cdist", {2000: "<= 2.8"}, note=NOTE),
            Line("ours", "torch.cdist", of="workspace"),
            Figure("largest relative error, float32", worst_error, {2000: "<= 1e-6"}),
        ),
    ),
    Case(
        name="cdist-backward",
        title=f"Lorentz.cdist in {DIMENSION} dimensions, forward and backward",
        unit="points",
        sizes=(500, 2000),
        contenders=partial(contenders, backward=True),
        lines=(
            Line("ours", "torch.cdist", {2000: "<= 1.4"}, note=NOTE),
            Line("ours", "torch.cdist", of="workspace"),
        ),
    ),
)
