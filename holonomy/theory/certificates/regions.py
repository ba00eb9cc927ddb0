r"""Where the inputs of a hyperbolic layer lie, and the function that finds a layer's constant there.

A layer is followed on a *region*: a ball about the origin, or balls about the tokens of one input. All lengths are in
unit coordinates; :func:`~holonomy.theory.lipschitz_bound` speaks of the layer's own distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy.layers import ExpMapHTC
from holonomy.manifolds import Lorentz
from holonomy.theory.attention.projections import NotCoveredError, as_stated
from holonomy.theory.attention.sizes import times
from holonomy.theory.certificates.stretching import METRICS, Ends, Metric, copied, ends_of, ordinary, stretch


@dataclass(frozen=True)
class Region:
    """Where the inputs of a layer lie, in unit coordinates."""

    radius: float  # all tokens lie within it about the origin
    features: int | None = None  # d, where it is known
    # The tokens of one input, ambient, on the layer's own manifold; None for the whole ball.
    points: Tensor | None = None
    spread: float = 0.0  # how far each token may be from its point; 0 for the input itself

    @property
    def exact_points(self) -> Tensor | None:
        """The points, where no token may be elsewhere; None for balls."""
        return None if self.spread else self.points

    @staticmethod
    def about(points: Tensor, manifold: Lorentz, spread: float = 0.0) -> Region:
        """Balls about tokens."""
        far = (manifold.dist0(points).amax() * root(manifold)).item()
        return Region(far + spread, points.shape[-1] - 1, points.detach(), spread)


@dataclass(frozen=True)
class Step:
    """What a layer does to a region: its constant there, and where its outputs lie; unit coordinates."""

    constant: float  # of the layer on the region; the stretch itself where the spread is zero
    region: Region  # of the outputs
    theorem: str  # by which it was found


@dataclass(frozen=True)
class Setting:
    """How configurations are measured, and of how many tokens they are."""

    metric: Metric = "sup"  # "sup" or "l2"
    tokens: int | None = None  # n, where the region has no points to tell


def root(manifold: Lorentz) -> float:
    """The square root of minus the curvature: what turns lengths of the manifold into unit coordinates."""
    return math.sqrt(-manifold.curvature.item())


def refuse_other_curvature(unit: float, taken: float, name: str) -> None:
    """Refuse what reads points of another manifold than they lie on, given the roots of both curvatures."""
    if taken != unit:
        raise ValueError(
            f"model must hand points on in one curvature, got {-(unit**2):g} before {name}, "
            f"which takes points of {-(taken**2):g}."
        )


def refuse_inner_curvature(inner: dict[str, nn.Module], source: Lorentz, target: Lorentz, name: str) -> None:
    """Refuse layers inside another one that do not map between the manifolds it reads their points on."""
    for part, layer in inner.items():
        refuse_without_ends(layer, f"{name}.{part}")
        before, after = units_of(layer)
        refuse_other_curvature(root(source), before, f"{name}.{part}")
        refuse_other_curvature(after, root(target), name)


def refuse_without_ends(layer: object, name: str) -> None:
    """Refuse a part that does not say which manifolds it maps between."""
    try:
        ends_of(layer)
    except TypeError as error:
        raise NotCoveredError(f"{name} must be a layer between hyperboloids, got {type(layer).__name__}.") from error


def units_of(layer: object) -> tuple[float, float]:
    """What turns a layer's distances, before and after it, into unit coordinates; 1 in Euclidean space."""
    source, target = ends_of(layer)
    before = layer.manifold_in if isinstance(layer, ExpMapHTC) else source
    return 1.0 if before is None else root(before), 1.0 if target is None else root(target)


@singledispatch
def follow(layer: Any, region: Region, setting: Setting) -> Step:
    """Bound a layer's stretch on a region, and find where its outputs lie."""
    del region, setting
    raise NotCoveredError(f"layer must be one that H1 to H11 cover, got {type(layer).__name__}.")


def bound_of(
    layer: Any,
    radius: float = math.inf,
    *,
    tokens: int | None = None,
    metric: Metric = "sup",
    features: int | None = None,
) -> float:
    """What :func:`lipschitz_bound` answers for a layer that :func:`follow` knows, in the layer's own distances."""
    checks.one_of("metric", metric, METRICS)
    checks.in_range("radius", radius, 0.0, math.inf)
    if tokens is not None:
        checks.positive_int("tokens", tokens)
    if features is not None:
        checks.positive_int("features", features)
    refuse_own(layer)
    layer = widened(layer)
    before, after = units_of(layer)
    step = follow(layer, Region(radius * before, features), Setting(metric, tokens))
    return step.constant * before / after


def widened(layer: Any) -> Any:
    """The layer with its numbers in float64: a copy, unless they are there already."""
    # Rounding in float32 moves a stretch far out by more than a certificate gives away: by 2 percent at rapidity 12.
    if not isinstance(layer, nn.Module):
        return layer
    tensors = (*layer.parameters(), *layer.buffers())
    narrow = any(tensor.is_floating_point() and tensor.dtype != torch.float64 for tensor in tensors)
    return copied(layer).double() if narrow else ordinary(layer)


def rounding(radius: float) -> float:
    """By what a stretch is multiplied so that rounding in float64 cannot have made it smaller: 1 + 8 eps e^r."""
    return 1 + 8 * torch.finfo(torch.float64).eps * math.exp(min(radius, 700.0))


def points_out(layer: nn.Module, region: Region) -> Tensor | None:
    """Where the region's points go."""
    if region.points is None:
        return None
    with torch.no_grad():
        return layer(region.points)


def token_stretch(layer: Callable[[Tensor], Tensor], points: Tensor, ends: Ends | None = None) -> Tensor:
    """Stretches of each token by a layer that takes tokens by themselves, in unit coordinates."""
    ends = ends or ends_of(layer)
    before, after = (1.0 if end is None else root(end) for end in ends)
    return stretch(layer, points, ends=ends) * (after / before)


def outputs(layer: nn.Module, region: Region, constant: float, radius: float, features: int | None) -> Region:
    """The region of a layer's outputs, all of them within a radius of the origin."""
    points = points_out(layer, region)
    if points is None:
        return Region(radius, features)
    about = Region.about(points, ends_of(layer).target or Lorentz(), times(region.spread, constant))
    return replace(about, radius=min(about.radius, radius) if region.spread else about.radius)


def refuse_own(layer: object) -> None:
    """A layer of a class of one's own is followed as what it inherits from: it must compute that."""
    kind = next(kind for kind in type(layer).__mro__ if kind in follow.registry)
    if kind is not object:
        as_stated(layer, kind)


def refuse_training(layer: nn.Module, name: str = "layer") -> None:
    """A random layer has no stretch at an input, and tokens that are normalised together have none each."""
    for module in layer.modules():
        for weight in cast("Iterable[str]", getattr(module, "parametrizations", ())):
            # A spectral norm in training takes a step whenever its weight is read.
            one, other = (cast("Tensor", getattr(module, weight)) for _ in range(2))
            if not torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True):
                raise NotCoveredError(
                    f"{name} must be in evaluation, with weights that stay, got a {type(module).__name__} whose "
                    f"{weight} differs each time it is read."
                )
        if isinstance(module, nn.BatchNorm1d) and (module.training or module.running_mean is None):
            raise NotCoveredError(f"{name} must be in evaluation: in training batch normalisation mixes its rows.")
        rate = getattr(module, "p", getattr(module, "dropout", 0.0))
        if module.training and isinstance(rate, int | float) and rate > 0:
            raise NotCoveredError(f"{name} must be in evaluation, in which nothing is dropped: call eval().")
