r"""Refinements followed on a region: HRC and the layers made of it, function by function (H1, H3, H4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from holonomy.layers import HRC
from holonomy.manifolds import Lorentz
from holonomy.theory.attention.lipschitz import lipschitz_bound
from holonomy.theory.attention.projections import NotCoveredError, as_stated
from holonomy.theory.attention.sizes import times
from holonomy.theory.certificates.constants.affine import reach, transformation_stretch
from holonomy.theory.certificates.constants.functions import (
    entrywise,
    entrywise_stretch,
    layer_norm_stretch,
    least_variance,
)
from holonomy.theory.certificates.regions import (
    Region,
    Setting,
    Step,
    bound_of,
    follow,
    outputs,
    points_out,
    refuse_training,
    root,
    token_stretch,
)

Affine = tuple[Tensor | None, Tensor | None]


@follow.register
def follow_refinement(layer: HRC, region: Region, setting: Setting) -> Step:
    """The product over the functions that HRC is made of; at an input the stretch itself, whatever the function.

    Those of an ``nn.Sequential`` are known; a module of one's own names them by a method ``refinements()``. A function
    that H1, H3 and H4 do not cover, or that drops something or mixes rows where an input is given, is a
    NotCoveredError. ``setting`` is not read: tokens do not influence each other.

    >>> m = Lorentz(-1.0)
    >>> follow_refinement(HRC(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), m), Region(1.0, 2), Setting()).theorem
    'H1, H3'
    """
    del setting
    if region.points is not None:
        refuse_training(layer)
    points = points_out(layer, region)
    if region.exact_points is not None and points is not None:
        _refuse_mixing(layer, region.exact_points, points)
        constant = token_stretch(layer, region.exact_points).amax().item()
        return Step(constant, Region.about(points, layer.manifold_out), "Lemma 0")
    constant, theorems, here = 1.0, list[str](), region
    for function in parts(layer.function):
        step = _refine(function, here, layer.manifold_in)
        constant = times(constant, step.constant)
        # The next function meets balls that those before it have stretched.
        here = replace(step.region, spread=times(region.spread, constant))
        theorems.append(step.theorem)
    theorem = ", ".join(dict.fromkeys(t for t in theorems if t)) or "identity"
    return Step(constant, outputs(layer, region, constant, here.radius, here.features), theorem)


def _refuse_mixing(layer: HRC, points: Tensor, images: Tensor) -> None:
    """Refuse a function that takes rows together: that of each token by itself would be another one."""
    with torch.no_grad():
        alone = torch.cat([layer(part) for part in points.tensor_split([1]) if len(part)])
    if not torch.allclose(alone, images, equal_nan=True):
        raise NotCoveredError(f"function must take each row by itself, got {layer.function}, which mixes rows.")


def parts(function: object) -> list[object]:
    """The functions that a function of space parts is made of, first to last."""
    # A module of one's own says so by a method ``refinements()``: what its attributes are called tells nothing.
    if isinstance(function, nn.Sequential):
        as_stated(function, nn.Sequential)
        return [part for inner in function for part in parts(inner)]
    offer = getattr(function, "refinements", None)
    if callable(offer):
        return [part for inner in cast("Iterable[object]", offer()) for part in parts(inner)]
    return [function]


def _refine(function: object, region: Region, manifold: Lorentz) -> Step:
    """One function of space parts, without change of curvature."""
    scale, radius, features = root(manifold), region.radius, region.features
    kind = next((kind for kind in type(function).__mro__ if kind.__module__.startswith("torch.")), nn.Module)
    if kind is not nn.Module:
        as_stated(function, kind)
    if isinstance(function, nn.Dropout):
        rate = function.p if function.training else 0.0
        constant = 0.0 if rate == 1 else 1 / (1 - rate)
        far = radius if constant <= 1 else grown(radius, constant)
        return Step(constant, replace(_moved(region, function), radius=far), "" if rate == 0 else "H1")
    if isinstance(function, nn.Linear | nn.BatchNorm1d):
        if isinstance(function, nn.BatchNorm1d):
            gain, bias = gain_and_shift(function)
            weight = torch.diag(gain)
        else:
            weight, bias = function.weight, cast("Tensor | None", function.bias)
        weight, shift = weight.detach(), None if bias is None else bias.detach() * scale
        lifted = torch.cat([torch.zeros_like(weight[:, :1]), weight], 1)
        constant = transformation_stretch(lifted, shift, radius)
        far = reach(lifted, shift, radius, constant)
        return Step(constant, replace(_moved(region, function), radius=far, features=len(weight)), "H1")
    if isinstance(function, nn.LayerNorm):
        return _layer_norm(function, region, manifold)
    facts = entrywise(function)
    if facts is None:
        name = getattr(function, "__name__", type(function).__name__)
        raise NotCoveredError(f"function must be affine, a known activation or a LayerNorm, got {name}.")
    if features is None and (facts.offset or facts.gaps != ((1.0, 0.0),)):
        raise ValueError("features must be given: the constant of this activation grows with their number.")
    constant = entrywise_stretch(facts, features or 1, scale, radius)
    far = grown(radius, facts.growth, scale * math.sqrt(features or 1) * facts.offset)
    return Step(constant, replace(_moved(region, function), radius=far), "H3")


def grown(radius: float, factor: float, offset: float = 0.0) -> float:
    """The radius of what a map with |f(x)| <= factor |x| + offset makes of a ball."""
    if factor == 1 and offset == 0:
        return radius
    return math.asinh(factor * math.sinh(radius) + offset) if radius < 700 else math.inf


def _moved(region: Region, function: object) -> Region:
    """The region with its points moved by a function of space parts; their time is not read."""
    if region.points is None or not callable(function):
        return region
    apply = cast("Callable[[Tensor], Tensor]", function)
    with torch.no_grad():
        return replace(region, points=nn.functional.pad(apply(region.points[..., 1:]), (1, 0)))


def gain_and_shift(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Batch normalisation in evaluation, an affine map of each entry."""
    if norm.training or norm.running_var is None or norm.running_mean is None:
        raise NotCoveredError(
            "layer must be in evaluation, with running statistics: in training batch normalisation mixes its rows."
        )
    scale = (norm.running_var + norm.eps).rsqrt()
    shift = torch.zeros_like(scale)
    if norm.affine:
        scale, shift = scale * norm.weight, norm.bias
    return scale, shift - scale * norm.running_mean


def _layer_norm(norm: nn.LayerNorm, region: Region, manifold: Lorentz) -> Step:
    if len(norm.normalized_shape) > 1:
        raise NotCoveredError(f"function must be a LayerNorm over the last axis, got {norm.normalized_shape}.")
    features, scale = math.prod(norm.normalized_shape), root(manifold)
    weight, bias = (None if x is None else x.detach() for x in cast("Affine", (norm.weight, norm.bias)))
    variance = 0.0
    if region.points is not None:
        variance = least_variance(region.points[..., 1:], scale, region.spread)
    constant = layer_norm_stretch(features, norm.eps, weight, bias, scale, variance)
    longest = math.sqrt(features) * (1.0 if weight is None else weight.abs().amax().item())
    longest += 0.0 if bias is None else bias.norm().item()
    return Step(constant, replace(_moved(region, norm), radius=math.asinh(scale * longest)), "H4")


lipschitz_bound.register(HRC, bound_of)
