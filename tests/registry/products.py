"""Layers and learned points of products: each kind of factor alone, and together."""

from __future__ import annotations

import geoopt
import torch
from torch import Tensor

from holonomy import layers, manifolds
from holonomy.manifolds import Lorentz, Product, Sphere
from tests.registry.case import Case, Inputs, Setting

__all__ = ["CASES"]


def product_of(setting: Setting, signature: str, index: int = 0) -> Product:
    """One factor for each letter, of as many coordinates as there are features."""
    kappa = setting.curvatures[index]
    made: list[tuple[Lorentz | Sphere | geoopt.Euclidean, int]] = []
    for letter in signature:
        if letter == "H":
            made.append((setting.manifold(index), setting.features + 1))
        elif letter == "S":
            made.append((Sphere(-kappa, learnable=True, **setting.factory), setting.features))
        else:
            made.append((geoopt.Euclidean(ndim=1), setting.features))
    return Product(*made)


def points_of(manifold: Product, setting: Setting, *shape: int) -> Tensor:
    """Points of a product, detached from its curvatures."""
    return manifold.lift(setting.vectors(*shape, sum(manifold.sizes))).detach()


def _inputs(signature: str, *, padded: bool = False) -> Inputs:
    def drawn(setting: Setting) -> tuple[Tensor, ...]:
        lead = (2,) if padded else ()
        points = points_of(product_of(setting, signature), setting, *lead, setting.nodes)
        return (points, setting.padding()) if padded else (points,)

    return drawn


CASES: list[Case] = [
    Case(
        layers.ProductLinear,
        {"bias": bias},
        lambda s, o, f=first, t=second: layers.ProductLinear(
            product_of(s, f), product_of(s, t, 1) if t else None, **o, **s.factory
        ),
        _inputs(first),
        f"{first} to {second or first}",
        any_radius=True,
    )
    for first, second, bias in (
        ("H", "", True),
        ("S", "S", True),
        ("E", "HS", False),
        ("HSE", "EH", True),
        ("HES", "", False),
    )
]
CASES += [
    Case(
        layers.ProductAttention,
        {"heads": heads},
        lambda s, o, signature=signature: layers.ProductAttention(product_of(s, signature), **o, **s.factory),
        _inputs(signature, padded=padded),
        signature + ", padded" * padded,
        any_radius=True,
    )
    for signature, heads, padded in (
        ("H", 1, False),
        ("S", 3, False),
        ("E", 2, True),
        ("HSE", 1, True),
        ("HES", 2, False),
        ("SH", 3, True),
    )
]
CASES.append(
    Case(
        manifolds.ProductEmbedding,
        {},
        lambda s, _: manifolds.ProductEmbedding(s.nodes, product_of(s, "HSE", 1), **s.factory),
        lambda s: (torch.arange(s.nodes, device=s.device).flip(0)[:, None],),
    )
)
