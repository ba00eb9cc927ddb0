"""Parameters on many manifolds, and gradients for them that are the same for every optimizer."""

from __future__ import annotations

import geoopt
import torch

from holonomy.manifolds import Lorentz


def on(manifold, x, dtype=torch.float64):
    return geoopt.ManifoldParameter(manifold.projx(x).to(dtype), manifold=manifold)


def normal(generator, *size, scale=1.0):
    return scale * torch.randn(size, generator=generator, dtype=torch.float64)


def euclidean(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    tensors = normal(draw, 4, 3), normal(draw, 5), normal(draw), normal(draw, 2, 3, 3, 3)
    return [torch.nn.Parameter(x.to(dtype)) for x in tensors]


def tables(dtype=torch.float64, kind=geoopt.Lorentz):
    """Tables of several curvatures, widths and shapes on Geoopt's Lorentz or on ours."""
    draw = torch.Generator().manual_seed(1)
    one, wide = (
        (geoopt.Lorentz(torch.tensor(k, dtype=torch.float64)) for k in (1.0, 2.5))
        if kind is geoopt.Lorentz
        else (Lorentz(-1 / k, dtype=torch.float64) for k in (1.0, 2.5))
    )
    return [
        on(one, normal(draw, 50, 6, scale=0.8), dtype),
        on(wide, normal(draw, 7, 6, scale=0.8), dtype),
        on(one, normal(draw, 2, 3, 4, scale=0.8), dtype),
        on(one, normal(draw, 4, scale=0.8), dtype),
    ]


def elsewhere(dtype=torch.float64):
    """Manifolds that go through their own methods, a product with a hyperboloid in it included."""
    draw = torch.Generator().manual_seed(2)
    lorentz, sphere, ball = geoopt.Lorentz(), geoopt.Sphere(), geoopt.PoincareBall()
    stiefel = geoopt.Stiefel(canonical=False)
    product = geoopt.ProductManifold((lorentz, 4), (sphere, 3), (geoopt.Euclidean(), 2))
    return [
        on(sphere, normal(draw, 6, 4), dtype),
        on(ball, normal(draw, 6, 4, scale=0.1), dtype),
        on(stiefel, normal(draw, 5, 3), dtype),
        on(product, normal(draw, 3, 9), dtype),
        on(geoopt.Euclidean(ndim=1), normal(draw, 3, 2), dtype),
    ]


def everything(dtype=torch.float64):
    return [*euclidean(dtype), *tables(dtype), *elsewhere(dtype)]


def train(optimizer, steps, *, start=0, scale=1.0):
    """Random gradients with a pull towards the origin, so that points stay near and steps stay long."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(start, start + steps):
        draw = torch.Generator().manual_seed(step)
        for p in parameters:
            noise = normal(draw, *p.shape) + 0.3 * p.detach().double()
            p.grad = (scale * noise).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def deviation(ours, theirs):
    return max(
        float((a.detach().double() - b.detach().double()).abs().max()) for a, b in zip(ours, theirs, strict=True)
    )
