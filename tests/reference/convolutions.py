"""Hyperbolic graph convolutions again, from their papers' equations, as loops over nodes and their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from holonomy import layers, models
from tests.reference.hyperbolic import REFERENCES as MAPS
from tests.reference.hyperbolic import (
    Vector,
    affine,
    change,
    curvature,
    distance,
    exponential,
    logarithm,
    midpoint,
    mlr,
    plus,
    point,
    product,
    rowwise,
    times,
)
from tests.reference.hypformer import decoded, refined


def weights_of(edge_index: Tensor, nodes: int, edge_weight: Tensor | None, like: Tensor) -> list[list[Tensor]]:
    """A + I: row i has the weight of each j that i hears; a loop that is listed stands in place of one."""
    zero = like.new_zeros(())
    matrix = [[zero] * nodes for _ in range(nodes)]
    listed: set[int] = set()
    for place, (source, target) in enumerate(edge_index.T.tolist()):
        matrix[target][source] = matrix[target][source] + (zero + 1 if edge_weight is None else edge_weight[place])
        if source == target:
            listed.add(source)
            matrix[target][source] = zero + 1 if edge_weight is None else matrix[target][source]
    for i in set(range(nodes)) - listed:
        matrix[i][i] = zero + 1
    return matrix


def mean(rows: Sequence[Vector], weights: Sequence[Tensor]) -> Vector:
    """sum_j w_j v_j / sum_j w_j, zero where the weights are."""
    total = sum(weights)
    if total == 0:
        return times(0.0, rows[0])
    result = times(weights[0] / total, rows[0])
    for weight, row in zip(weights[1:], rows[1:], strict=True):
        result = plus(result, times(weight / total, row))
    return result


def exponential_at(x: Vector, u: Vector, kappa: Tensor) -> Vector:
    """Eq. 22 at any point."""
    square = -kappa * product(u, u)
    if square <= 0:
        return plus(x, u)
    size = square.sqrt()
    return plus(times(torch.cosh(size), x), times(torch.sinh(size) / size, u))


def logarithm_at(x: Vector, y: Vector, kappa: Tensor) -> Vector:
    """Its inverse."""
    angle = kappa * product(x, y)
    gap = plus(y, times(-angle, x))
    if angle <= 1 + 1e-12:
        return gap
    return times(torch.acosh(angle) / (angle**2 - 1).sqrt(), gap)


def translated(x: Vector, bias: Tensor | None, kappa: Tensor) -> Vector:
    """HGCN eq. 7: exp_x(P_{o -> x} b)."""
    if bias is None:
        return x
    origin = point(times(0.0, x[1:]), kappa)
    vector = [0 * x[0], *bias.unbind()]
    factor = -kappa * product(x, vector) / (1 + kappa * product(origin, x))
    return exponential_at(x, plus(vector, times(factor, plus(origin, x))), kappa)


def hidden(module: layers.HGCNConv | layers.HGATConv, x: Tensor) -> list[Vector]:
    """HGCN eqs. 6 and 7 for every node."""
    kappa = curvature(module.manifold_in)
    rows = []
    for row in x:
        image = affine(module.linear.linear.weight, None, logarithm(list(row.unbind()), kappa))
        rows.append(translated(point(exponential(image, kappa), kappa), module.bias, kappa))
    return rows


def out(module: layers.HGCNConv | layers.HGATConv, rows: Sequence[Vector]) -> Tensor:
    """HGCN eq. 10, from tangent vectors at the origin."""
    kappa, activation = curvature(module.manifold_out), module.activation or (lambda value: value)
    points = [point(exponential(list(activation(torch.stack(row)).unbind()), kappa), kappa) for row in rows]
    return torch.stack([torch.stack(p) for p in points])


def hgcn_conv(module: layers.HGCNConv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    """Chami et al. 2019, eqs. 6, 7, 9 and 10."""
    kappa, points = curvature(module.manifold_in), hidden(module, x)
    matrix, rows = weights_of(edge_index, len(x), edge_weight, x), []
    for here, weights in zip(points, matrix, strict=True):
        if module.aggregation == "origin":
            rows.append(mean([logarithm(p, kappa) for p in points], weights))
        else:
            drawn = mean([logarithm_at(here, p, kappa) for p in points], weights)
            rows.append(logarithm(exponential_at(here, drawn, kappa), kappa))
    return out(module, rows)


def hgat_conv(module: layers.HGATConv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    """Weights w exp(-d) between the points of each head."""
    kappa = curvature(module.manifold_in)
    tangents = [logarithm(p, kappa) for p in hidden(module, x)]
    matrix = weights_of(edge_index, len(x), edge_weight, x)
    width = len(tangents[0]) // module.heads
    rows: list[Vector] = [[] for _ in tangents]
    for head in range(module.heads):
        parts = [t[head * width : (head + 1) * width] for t in tangents]
        points = [point(exponential(part, kappa), kappa) for part in parts]
        for i, weights in enumerate(matrix):
            shares = [w * torch.exp(-distance(points[i], p, kappa)) for w, p in zip(weights, points, strict=True)]
            rows[i] = rows[i] + mean(parts, shares)
    return out(module, rows)


def lorentz_plfc(module: layers.LorentzPLFC, x: Tensor) -> Tensor:
    """Distances to hyperplanes as coordinates, then the translation of HGCN eq. 7."""
    root, target = (-curvature(module.manifold_in)).sqrt(), curvature(module.manifold_out)

    def moved(distances: Vector) -> Vector:
        y = change([torch.sinh(root * distance) / root for distance in distances], module)
        return translated(y, module.bias, target)

    return rowwise(moved, mlr(module.hyperplanes, x))


def lgcn_conv(module: layers.LGCNConv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    """Hypformer eq. 7 for every node, then eq. 4."""
    kappa = curvature(module.manifold_out)
    if module.activation is not None:
        before = curvature(module.manifold_in)
        x = rowwise(lambda p: point(list(module.activation.function(torch.stack(p[1:])).unbind()), before), x)
    points = [list(row.unbind()) for row in MAPS[type(module.linear)](module.linear, x)]
    matrix = weights_of(edge_index, len(x), edge_weight, x)
    return torch.stack([torch.stack(midpoint(points, weights, kappa)) for weights in matrix])


def hgcn(module: models.HGCN, x: Tensor, edge_index: Tensor, *, dropout: float = 0.0, **weights: Tensor) -> Tensor:
    """The exponential at the origin, convolutions, and a decoder of nodes."""
    start = curvature(module.manifold_in)
    points = rowwise(lambda u: point(exponential(u, start), start), x)
    for convolution in module.convolutions:
        here = curvature(convolution.manifold_in)
        points = refined(points[..., 1:], lambda entry: entry, dropout, here, training=module.training)
        points = REFERENCES[type(convolution)](convolution, points, edge_index, **weights)
    if isinstance(module.decoder, nn.Identity):
        return points
    kappa = curvature(module.manifold_out)
    return decoded(module, rowwise(lambda p: logarithm(p, kappa), points))


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.HGATConv: hgat_conv,
    layers.HGCNConv: hgcn_conv,
    layers.LGCNConv: lgcn_conv,
    layers.LorentzPLFC: lorentz_plfc,
    models.HGCN: hgcn,
}
