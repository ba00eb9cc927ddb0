r"""Layers between hyperboloids followed on a region: HTC (H2), positions (H7), the ends of a model (H11), classifiers.

A classifier's logits are distances: to a hyperplane, signed and times :math:`|z_k|`, or to a point, squared. A distance
is 1-Lipschitz, so the logits together have at most :math:`|Z|_F` (reached far out, where all distances grow along the
ray) and :math:`2 s (\sum_k (\rho + r_k)^2)^{1/2}` (H13).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy.layers import (
    HTC,
    ExpMapHTC,
    HypConcat,
    HypMLR,
    HypPositionalEncoding,
    HypPrototypes,
    HypResidual,
    TangentLinear,
)
from holonomy.theory.attention.lipschitz import lipschitz_bound
from holonomy.theory.attention.projections import as_stated
from holonomy.theory.certificates.constants.affine import ball_stretch, reach, transformation_stretch
from holonomy.theory.certificates.constants.midpoint import concatenation_stretch, exponential_stretch, residual_stretch
from holonomy.theory.certificates.constants.tangent import tangent_stretch
from holonomy.theory.certificates.regions import (
    Region,
    Setting,
    Step,
    bound_of,
    follow,
    outputs,
    refuse_inner_curvature,
    root,
    token_stretch,
)
from holonomy.theory.certificates.stretching import Ends, ends_of, stretch


def unit_bias(layer: HTC) -> Tensor | None:
    """HTC's bias in unit coordinates."""
    bias = cast("Tensor | None", layer.bias)
    return None if bias is None else bias.detach() * root(layer.manifold_in)


class Image(NamedTuple):
    """What some rows of HTC make of a region, in unit coordinates."""

    constant: float  # their stretch on the region
    radius: float  # of a ball about the origin that holds the image
    diameter: float  # of the image, or more
    theorem: str  # by which the constant was found


def transformation(layer: HTC, rows: slice, region: Region) -> Image:
    """Bound the stretch of some rows of HTC, such as a head's, and find where their image lies."""
    # Radius and diameter follow from the constant on the whole ball that holds the region: how far a point is sent
    # depends on the way to it from the origin, which balls about tokens do not contain.
    as_stated(layer, HTC)
    bias = unit_bias(layer)
    bias = None if bias is None else bias[rows]
    weight = layer.weight.detach()[rows]
    whole = transformation_stretch(weight, bias, region.radius)
    radius = reach(weight, bias, region.radius, whole)
    diameter = 2 * min(radius, whole * region.radius) if whole else 0.0
    if region.points is None:
        return Image(whole, radius, diameter, "H2" if weight[:, 0].any() else "H1")
    at = rows_stretch(layer, rows, region.points)
    length = 0.0 if bias is None else bias.norm().item()
    constant = min(whole, max(ball_stretch(s, length, region.spread) for s in at.tolist()))
    return Image(constant, radius, diameter, "H2'")


def rows_stretch(layer: HTC, rows: slice, points: Tensor) -> Tensor:
    """Stretches of each token by some rows of HTC, in unit coordinates."""

    def part(x: Tensor) -> Tensor:
        return layer.manifold_out.lift(layer.space(x)[..., rows])

    return token_stretch(part, points, Ends(layer.manifold_in, layer.manifold_out))


@follow.register
def follow_transformation(layer: HTC, region: Region, setting: Setting) -> Step:
    """HTC by H1 or H2, about points by H2'; after the exponential map by H11.

    The region of :class:`~holonomy.layers.ExpMapHTC` is one of vectors, in unit coordinates. ``setting`` is not read:
    tokens do not influence each other.

    >>> from holonomy.manifolds import Lorentz
    >>> follow_transformation(HTC(2, 2, Lorentz(-1.0)), Region(1.0), Setting()).theorem
    'H1'
    """
    if isinstance(layer, ExpMapHTC):
        return _embedded(layer, region, setting)
    image = transformation(layer, slice(None), region)
    region = outputs(layer, region, image.constant, image.radius, layer.out_features)
    return Step(image.constant, region, image.theorem)


def _embedded(layer: ExpMapHTC, region: Region, setting: Setting) -> Step:
    """The exponential map at the origin, then HTC; the region's lengths are those of vectors in unit coordinates."""
    source = layer.manifold_in
    sizes, bias, like = (layer.in_features, layer.out_features), unit_bias(layer) is not None, layer.weight
    inner = HTC(*sizes, source, layer.manifold_out, bias=bias, device=like.device, dtype=like.dtype)
    inner.weight, inner.bias = layer.weight, layer.bias
    wide = 1.0 if layer.in_features == 1 else exponential_stretch(region.radius)
    if region.points is None:
        step = follow(inner, Region(region.radius, layer.in_features), setting)
        return Step(wide * step.constant, step.region, "H11, " + step.theorem)
    if region.spread == 0:
        constant = stretch(layer, region.points, ends=ends_of(layer)).amax().item() * root(layer.manifold_out)
        return Step(constant / root(source), Region.about(layer(region.points).detach(), layer.manifold_out), "Lemma 0")
    start = source.expmap0(nn.functional.pad(region.points, (1, 0)))
    # Moved by at most the spread, a vector's point stays in the ball of the radius, whose stretch bounds its path.
    about = replace(Region.about(start, source, region.spread * wide), radius=region.radius)
    step = follow(inner, about, setting)
    return Step(wide * step.constant, step.region, "H11, " + step.theorem)


@follow.register
def _(layer: TangentLinear, region: Region, _: Setting) -> Step:
    as_stated(layer.linear, nn.Linear)
    weight, bias = layer.linear.weight.detach(), cast("Tensor | None", layer.linear.bias)
    before, after = root(layer.manifold_in), root(layer.manifold_out)
    weight = weight.double() * (after / before)
    shift = 0.0 if bias is None else bias.detach().double().norm().item() * after
    norm = torch.linalg.matrix_norm(weight, 2).item()
    constant = tangent_stretch(weight, shift, region.radius)
    if region.exact_points is not None:
        constant = token_stretch(layer, region.exact_points).amax().item()
    far = (norm * region.radius if norm else 0.0) + shift
    return Step(constant, outputs(layer, region, constant, far, weight.shape[0]), "H14")


@follow.register
def _(layer: HypPositionalEncoding, region: Region, setting: Setting) -> Step:
    refuse_inner_curvature({"position": layer.position}, layer.manifold, layer.manifold, type(layer).__name__)
    inner = follow(layer.position, region, setting)
    constant = residual_stretch(inner.constant, layer.epsilon)
    if region.exact_points is not None:
        constant = token_stretch(layer, region.exact_points).amax().item()
    radius = max(region.radius, inner.region.radius)
    return Step(constant, outputs(layer, region, constant, radius, region.features), "H7, " + inner.theorem)


@follow.register
def _(layer: HypMLR, region: Region, _: Setting) -> Step:
    # A signed distance is 1-Lipschitz, and far out all of them point the same way.
    constant = layer.weight.detach().double().norm().item()
    return _read(layer, region, constant / root(layer.manifold), "H13")


@follow.register
def _(layer: HypPrototypes, region: Region, _: Setting) -> Step:
    with torch.no_grad():
        radii = layer.manifold.dist0(layer.prototypes()).double()
    # The square of a distance has the slope of twice the distance.
    far = radii + region.radius / root(layer.manifold)
    constant = 2 * numerics.exp(layer.log_scale.detach()).item() * far.norm().item()
    return _read(layer, region, constant / root(layer.manifold), "H13")


def _read(layer: HypMLR | HypPrototypes, region: Region, constant: float, theorem: str) -> Step:
    """A step that leaves for Euclidean space, whose lengths are their own units."""
    if region.exact_points is not None:
        constant = token_stretch(layer, region.exact_points, Ends(layer.manifold, None)).amax().item()
    return Step(constant, Region(math.inf), theorem)


def _of_concatenation(layer: HypConcat, radius: float = math.inf) -> float:
    as_stated(layer, HypConcat)
    checks.in_range("radius", radius, 0.0, math.inf)
    before, after = root(layer.manifold_in), root(layer.manifold_out)
    return concatenation_stretch(radius * before) * before / after


def _of_residual(layer: HypResidual, radius: float = math.inf) -> float:
    """In the sup metric of x and F(x): H5."""
    as_stated(layer, HypResidual)
    checks.in_range("radius", radius, 0.0, math.inf)
    return max(root(layer.manifold_in), root(layer.manifold_branch)) / root(layer.manifold_out)


for kind in (HTC, TangentLinear, HypPositionalEncoding, HypMLR, HypPrototypes):
    lipschitz_bound.register(kind, bound_of)
lipschitz_bound.register(HypConcat, _of_concatenation)
lipschitz_bound.register(HypResidual, _of_residual)
