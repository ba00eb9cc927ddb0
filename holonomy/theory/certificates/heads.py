r"""Hyperbolic attention layers followed on a region: their heads by H8 and H10, put together again by H11.

The head's queries, keys and values are rows of HTC, with constants of their own (H2). The concatenation of heads within
a radius rho costs :math:`\cosh\rho` for softmax attention, whose heads are points, and nothing for linear attention,
whose averages are Euclidean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from holonomy import numerics
from holonomy.layers import HTC, HypLinearAttention, HypSoftmaxAttention
from holonomy.manifolds import hyperboloid
from holonomy.ops.linear_attention.reference import power_features
from holonomy.theory.attention.lipschitz import lipschitz_bound
from holonomy.theory.attention.projections import NotCoveredError, as_stated, refuse_rotations
from holonomy.theory.certificates.constants.linear_attention import local_linear
from holonomy.theory.certificates.constants.midpoint import concatenation_stretch, unit_curvature
from holonomy.theory.certificates.constants.softmax_attention import (
    Extent,
    local_softmax_stretch,
    softmax_stretch,
    unit_scale,
)
from holonomy.theory.certificates.layers import rows_stretch, transformation
from holonomy.theory.certificates.regions import (
    Region,
    Setting,
    Step,
    bound_of,
    follow,
    outputs,
    refuse_inner_curvature,
    refuse_training,
    root,
)
from holonomy.theory.certificates.stretching import Ends, stretch


@follow.register
def attend_softmax(layer: HypSoftmaxAttention, region: Region, setting: Setting) -> Step:
    r"""H8 for each head, and :math:`\cosh\rho\,(\sum_h \mathrm{Lip}_h^2)^{1/2}` for several.

    At an input (spread zero) it is the local form. A key mask for all queries only changes how many tokens there are;
    dropped weights are masks of single queries. A layer with rotary positions is a NotCoveredError.

    >>> from holonomy.manifolds import Lorentz
    >>> layer = HypSoftmaxAttention(4, 1, Lorentz(-1.0), similarity="geodesic")
    >>> attend_softmax(layer, Region(math.inf), Setting()).constant < math.inf
    True
    """
    refuse_rotations(layer)
    _refuse_inner(layer)
    channels = layer.query.out_features // layer.heads
    scale = unit_scale(layer.similarity, channels, layer.manifold_hidden.curvature.item())
    heads, points = [slice(i * channels, (i + 1) * channels) for i in range(layer.heads)], region.exact_points
    if points is None:
        found = [_head(layer, rows, region, setting, scale) for rows in heads]
    else:
        refuse_training(layer)
        found = [_local_head(layer, rows, points, setting, scale) for rows in heads]
    constant, radius = found[0]
    if layer.heads > 1:
        # H11: concatenation stretches each head by cosh of its radius; heads add in squares.
        constant = math.hypot(*(concatenation_stretch(far) * bound if bound else 0.0 for bound, far in found))
        radii = [far for _, far in found]
        radius = math.asinh(math.hypot(*map(math.sinh, radii))) if max(radii) < 700 else math.inf
    out = outputs(layer, region, constant, radius, layer.query.out_features)
    return Step(constant, out, "H8" if points is None else "H8 local")


def _refuse_inner(layer: HypSoftmaxAttention | HypLinearAttention) -> None:
    """Refuse queries, keys and values on other manifolds than the layer reads them on."""
    inner = {name: getattr(layer, name) for name in ("query", "key", "value")}
    refuse_inner_curvature(inner, layer.manifold_in, layer.manifold_hidden, type(layer).__name__)


def _head(
    layer: HypSoftmaxAttention, rows: slice, region: Region, setting: Setting, scale: float
) -> tuple[float, float]:
    query, key, value = (transformation(htc, rows, region) for htc in (layer.query, layer.key, layer.value))
    constants = (query.constant, key.constant, value.constant)
    extent = Extent(key.diameter, query.radius + key.radius, value.diameter)
    bound = softmax_stretch(
        *constants,
        _about_points(layer, rows, region, constants, extent),
        scale=scale,
        similarity=layer.similarity,
        metric=setting.metric,
        tokens=setting.tokens if region.points is None else region.points.shape[0],
        masked=layer.training and layer.dropout > 0,
    )
    return bound, value.radius


def _projected(layer: HypSoftmaxAttention, rows: slice, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a head, space parts in unit coordinates."""
    scale = root(layer.manifold_hidden)
    with torch.no_grad():
        query, key, value = (htc.space(points)[:, rows] * scale for htc in (layer.query, layer.key, layer.value))
    return query.double(), key.double(), value.double()


def _about_points(
    layer: HypSoftmaxAttention, rows: slice, region: Region, constants: tuple[float, float, float], cap: Extent
) -> Extent:
    """Distances at the points, enlarged by how far the region lets them move; never above what holds a priori."""
    if region.points is None:
        return cap
    kappa = unit_curvature()
    query, key, value = (hyperboloid.lift(z.cpu(), kappa) for z in _projected(layer, rows, region.points))
    moved = [region.spread * constant for constant in constants]

    def largest(a: Tensor, b: Tensor) -> float:
        return hyperboloid.cdist(a, b, kappa).amax().item()

    return Extent(
        min(cap.keys, largest(key, key) + 2 * moved[1]),
        min(cap.reach, largest(query, key) + moved[0] + moved[1]),
        min(cap.values, largest(value, value) + 2 * moved[2]),
    )


def _local_head(
    layer: HypSoftmaxAttention, rows: slice, points: Tensor, setting: Setting, scale: float
) -> tuple[float, float]:
    query, key, value = _projected(layer, rows, points)
    stretches = [rows_stretch(htc, rows, points) for htc in (layer.query, layer.key, layer.value)]
    bound = local_softmax_stretch(
        query, key, value, stretches, scale=scale, similarity=layer.similarity, metric=setting.metric
    )
    # Midpoints lie in the hull of the values.
    return bound, math.asinh(value.norm(dim=-1).amax().item())


@follow.register
def attend_linear(layer: HypLinearAttention, region: Region, setting: Setting) -> Step:
    """H10: infinite over a ball, where the layer is discontinuous; its local form at an input.

    Points with a spread, and a layer that takes midpoints, are a NotCoveredError.

    >>> from holonomy.manifolds import Lorentz
    >>> attend_linear(HypLinearAttention(4, 1, Lorentz(-1.0)), Region(1.0), Setting()).constant
    inf
    """
    if layer.average != "space":
        raise NotCoveredError("layer must average space parts: H10 is on them, and no theorem here on its midpoints.")
    _refuse_inner(layer)
    if region.points is None:
        far = transformation(layer.value, slice(None), Region(region.radius)).radius
        longest = numerics.exp(-layer.log_scale.detach()).item() * math.sinh(far) if far < 700 else math.inf
        # Each head's average is no longer than its longest value, and the heads may choose different ones.
        as_stated(layer.residual, nn.Linear)
        residual = torch.linalg.matrix_norm(layer.residual.weight.detach().double(), 2).item()
        bias = layer.residual.bias.detach().double().norm().item() * root(layer.manifold_hidden)
        radius = math.asinh(longest * (math.sqrt(layer.heads) + residual) + bias)
        return Step(math.inf, Region(radius, layer.query.out_features), "H10")
    if region.spread > 0:
        raise NotCoveredError("layer must be softmax attention for balls about points: H10 has no such form.")
    refuse_training(layer)
    constant = _local_linear(layer, region.points, setting) * root(layer.manifold_hidden) / root(layer.manifold_in)
    return Step(constant, outputs(layer, region, constant, math.inf, layer.query.out_features), "H10 local")


def _local_linear(layer: HypLinearAttention, points: Tensor, setting: Setting) -> float:
    """The stretch from hyperbolic distances of the input to Euclidean ones of the output, in original coordinates."""
    ends = Ends(layer.manifold_in, None)
    shrink = numerics.exp(-layer.log_scale.detach())

    def features(htc: HTC, x: Tensor, factor: Tensor | None = None) -> Tensor:
        return power_features(htc.space(x, factor).unflatten(-1, (layer.heads, -1)), layer.power)

    values: list[Tensor] = []
    stretches: list[Tensor] = []
    for htc, factor in ((layer.query, None), (layer.key, None), (layer.value, shrink)):
        heads = [
            stretch(lambda x, h=h, htc=htc, factor=factor: features(htc, x, factor)[..., h, :], points, ends=ends)
            for h in range(layer.heads)
        ]
        stretches.append(torch.stack(heads))
        with torch.no_grad():
            values.append(features(htc, points, factor).transpose(0, 1))
    average = local_linear(values, stretches, setting.metric)
    residual = stretch(lambda x: layer.residual(features(layer.value, x, shrink).flatten(-2)), points, ends=ends)
    return average + residual.amax().item()


for kind in (HypSoftmaxAttention, HypLinearAttention):
    lipschitz_bound.register(kind, bound_of)
