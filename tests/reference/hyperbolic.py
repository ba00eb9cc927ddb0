"""Every hyperbolic layer and graph encoder again, from the printed equations, as loops over nodes, heads and channels.

``reference(module, *inputs)`` reads the module's parameters by name and nothing else of it but its
options. Tensors go in and out, every number on the way is a 0-d tensor, so that autograd gives the
reference gradients. Formulas are as printed (times minus times, arcosh), hence for float64 and
moderate radii; where a formula is 0/0 the value agreed on is zero.

A point is its space part: time is made again from it wherever a formula needs it, except in the
linear maps (eqs. 7, 9), which read the time coordinate that is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import layers, manifolds

Vector = list[Tensor]


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(a)) @ torch.stack(list(b))


def length(a: Sequence[Tensor]) -> Tensor:
    square = dot(a, a)
    return square.sqrt() if square > 0 else square


def times(factor: Tensor | float, a: Sequence[Tensor]) -> Vector:
    return [factor * entry for entry in a]


def plus(a: Sequence[Tensor], b: Sequence[Tensor]) -> Vector:
    return [left + right for left, right in zip(a, b, strict=True)]


def affine(weight: Tensor, bias: Tensor | None, x: Sequence[Tensor]) -> Vector:
    vector = torch.stack(list(x))
    out = [row @ vector for row in weight.unbind()]
    return out if bias is None else plus(out, bias.unbind())


def curvature(manifold: layers.HTC | nn.Module) -> Tensor:
    return manifold.curvature.reshape(()).double()


def point(space: Sequence[Tensor], kappa: Tensor) -> Vector:
    return [(dot(space, space) - 1 / kappa).sqrt(), *space]


def product(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    """<x, y>."""
    return dot(x[1:], y[1:]) - x[0] * y[0]


def distance(x: Sequence[Tensor], y: Sequence[Tensor], kappa: Tensor) -> Tensor:
    """Eq. 1, by half of the angle: the arcosh of a point with itself far out is that of a rounding."""
    gap = _gap(x, y, kappa)
    if gap <= 0:
        return 0 * gap
    return 2 * torch.asinh(gap.sqrt() / 2) / (-kappa).sqrt()


def squared_distance(x: Sequence[Tensor], y: Sequence[Tensor], kappa: Tensor) -> Tensor:
    """The square of eq. 1; below 1e-6 the first terms of its series, which has a gradient at zero."""
    gap = _gap(x, y, kappa)
    if gap < 1e-6:
        return gap / -kappa * (1 - gap / 12)
    return distance(x, y, kappa) ** 2


def _gap(x: Sequence[Tensor], y: Sequence[Tensor], kappa: Tensor) -> Tensor:
    """2 (cosh - 1), from the difference."""
    difference = plus(x, times(-1, y))
    return -kappa * product(difference, difference)


def midpoint(points: Sequence[Vector], weights: Sequence[Tensor | float], kappa: Tensor) -> Vector:
    """Eq. 4; the origin where the weights are zero."""
    total = times(0.0, points[0])
    for weight, x in zip(weights, points, strict=True):
        total = plus(total, times(weight, x))
    norm = (-kappa * (-product(total, total))).sqrt() if total[0] > 0 else total[0]
    return times(1 / norm, total) if total[0] > 0 else point(total[1:], kappa)


def change(space: Sequence[Tensor], module: nn.Module, first: str = "manifold_in") -> Vector:
    """The tail of eqs. 9, 13 and 18: out with the space part times sqrt(kappa_1 / kappa_2)."""
    before, after = curvature(getattr(module, first)), curvature(module.manifold_out)
    return point(times((before / after).sqrt(), space), after)


def rowwise(function: Callable[..., Sequence[Tensor]], x: Tensor, *more: Tensor) -> Tensor:
    """Apply a function of vectors to the last axis of tensors with equal leading axes."""
    batch = x.shape[:-1]
    tables = [t.reshape(-1, t.shape[-1]) for t in (x, *more)]
    rows = [torch.stack(list(function(*(list(t[i].unbind()) for t in tables)))) for i in range(tables[0].shape[0])]
    return torch.stack(rows).reshape(*batch, -1)


def htc(module: layers.HTC, x: Tensor) -> Tensor:
    """Eq. 9."""
    return rowwise(lambda p: change(affine(module.weight, module.bias, p), module), x)


def exp_htc(module: layers.ExpMapHTC, u: Tensor) -> Tensor:
    """Eq. 22 at the origin, then eq. 9."""
    u = u.to_dense() if u.layout != torch.strided else u
    kappa = curvature(module.manifold_in)

    def both(vector: Vector) -> Vector:
        mapped = point(exponential(vector, kappa), kappa)
        return change(affine(module.weight, module.bias, mapped), module)

    return rowwise(both, u)


def exponential(tangent: Sequence[Tensor], kappa: Tensor) -> Vector:
    """Space part of exp_o."""
    size = (-kappa).sqrt() * length(tangent)
    return times(torch.sinh(size) / size if size > 0 else 1.0, tangent)


def logarithm(x: Sequence[Tensor], kappa: Tensor) -> Vector:
    """Space part of log_o."""
    size = (-kappa).sqrt() * length(x[1:])
    return times(torch.asinh(size) / size if size > 0 else 1.0, x[1:])


def tangent_linear(module: layers.TangentLinear, x: Tensor) -> Tensor:
    """Eq. 6."""
    before, after = curvature(module.manifold_in), curvature(module.manifold_out)

    def mapped(p: Vector) -> Vector:
        image = affine(module.linear.weight, module.linear.bias, logarithm(p, before))
        return point(exponential(image, after), after)

    return rowwise(mapped, x)


def fully_lorentz_linear(module: layers.FullyLorentzLinear, x: Tensor) -> Tensor:
    """Eq. 7."""
    activation = module.activation or (lambda value: value)

    def mapped(p: Vector) -> Vector:
        hidden = list(activation(torch.stack(p)).unbind())
        direction = affine(module.direction.weight, module.direction.bias, hidden)
        size = length(direction)
        scale = module.log_scale.exp().reshape(()) * torch.sigmoid(
            affine(module.length.weight, module.length.bias, p)[0]
        )
        return change(times(scale / size if size > 0 else 0 * scale, direction), module)

    return rowwise(mapped, x)


def hrc(module: layers.HRC, x: Tensor) -> Tensor:
    """Eq. 13, the function being given."""
    space = module.function(x[..., 1:])
    return rowwise(lambda s: change(s, module), space)


def layer_norm(module: layers.HypLayerNorm, x: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Eqs. 13 and 21 with layer normalisation."""
    norm = module.function.norm

    def mapped(p: Vector) -> Vector:
        space = p[1:]
        mean = sum(space) / len(space)
        variance = sum((s - mean) ** 2 for s in space) / len(space)
        out = [(s - mean) / (variance + eps).sqrt() for s in space]
        if norm.weight is not None:
            scaled = [w * s for w, s in zip(norm.weight.unbind(), out, strict=True)]
            out = plus(scaled, norm.bias.unbind())
        return change(out, module)

    return rowwise(mapped, x)


def rms_norm(module: layers.HypRMSNorm, x: Tensor, *, eps: float = 1e-5) -> Tensor:
    """HELM's normalisation, with the change of curvature of eq. 13."""
    norm = module.function.norm

    def mapped(p: Vector) -> Vector:
        root = (dot(p[1:], p[1:]) / len(p[1:]) + eps).sqrt()
        gains = [1.0] * len(p[1:]) if norm.weight is None else norm.weight.unbind()
        return change([gain * s / root for gain, s in zip(gains, p[1:], strict=True)], module)

    return rowwise(mapped, x)


def batch_norm(module: layers.HypBatchNorm, x: Tensor) -> Tensor:
    """Eqs. 13 and 21 with batch normalisation; running statistics are read, not moved."""
    norm = module.function.norm
    table = x[..., 1:].reshape(-1, x.shape[-1] - 1)
    columns = []
    for channel, column in enumerate(table.unbind(-1)):
        if module.training or norm.running_mean is None:
            mean = sum(column.unbind()) / len(column)
            variance = sum((s - mean) ** 2 for s in column.unbind()) / len(column)
        else:
            mean, variance = norm.running_mean[channel], norm.running_var[channel]
        out = [(s - mean) / (variance + norm.eps).sqrt() for s in column.unbind()]
        if norm.weight is not None:
            out = [norm.weight[channel] * s + norm.bias[channel] for s in out]
        columns.append(torch.stack(out))
    space = torch.stack(columns, -1).reshape(*x.shape[:-1], -1)
    return rowwise(lambda s: change(s, module), space)


def dropout(module: layers.HypDropout, x: Tensor, *, p: float) -> Tensor:
    """Eqs. 13 and 21 with dropout."""
    return rowwise(lambda row: change([functional.dropout(s, p, module.training) for s in row[1:]], module), x)


def activation(module: layers.HypActivation, x: Tensor) -> Tensor:
    """Eqs. 13 and 21 with an entrywise function."""
    return rowwise(lambda p: change([module.function(s) for s in p[1:]], module), x)


def concat(module: layers.HypConcat, *points: Tensor) -> Tensor:
    """Eqs. 13 and 21 with concatenation."""
    return rowwise(lambda *ps: change([s for p in ps for s in p[1:]], module), *points)


def residual(module: layers.HypResidual, x: Tensor, branch: Tensor) -> Tensor:
    """The midpoint of x and eps F(x), both brought to the manifold of the result."""
    after = curvature(module.manifold_out)
    x_ratio = (curvature(module.manifold_in) / after).sqrt()
    y_ratio = (curvature(module.manifold_branch) / after).sqrt()

    def mapped(p: Vector, q: Vector) -> Vector:
        both = [point(times(x_ratio, p[1:]), after), point(times(y_ratio, q[1:]), after)]
        return point(midpoint(both, [1.0, module.epsilon], after)[1:], after)

    return rowwise(mapped, x, branch)


def positional_encoding(module: layers.HypPositionalEncoding, x: Tensor) -> Tensor:
    """Eq. 20."""
    kappa = curvature(module.manifold)

    def mapped(p: Vector) -> Vector:
        position = affine(module.position.weight, module.position.bias, p)
        both = [point(p[1:], kappa), point(position, kappa)]
        return point(midpoint(both, [1.0, module.epsilon], kappa)[1:], kappa)

    return rowwise(mapped, x)


def phi(values: Sequence[Tensor], power: float, scale: Tensor) -> Vector:
    """Eq. 19; zero where nothing is positive."""
    tilde = [torch.relu(value) / scale for value in values]
    powered = [value**power for value in tilde]
    size = length(powered)
    return times(length(tilde) / size, powered) if size > 0 else times(0.0, tilde)


def heads(module: nn.Module, projection: layers.HTC, x: Tensor) -> list[list[Vector]]:
    """Eq. 14 without its time, as [head][node][channel]."""
    before, hidden = curvature(module.manifold_in), curvature(module.manifold_hidden)
    ratio = (before / hidden).sqrt()
    rows = [times(ratio, affine(projection.weight, projection.bias, row.unbind())) for row in x]
    width = len(rows[0]) // module.heads
    return [[row[h * width : (h + 1) * width] for row in rows] for h in range(module.heads)]


def over_graphs(
    attend: Callable[[nn.Module, Tensor, list[int]], Tensor],
    module: nn.Module,
    x: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Attention within each graph, over the nodes that are not padding; padding gives the origin."""
    kappa = curvature(module.manifold_out)
    origin = torch.stack(point(times(0.0, list(torch.ones_like(x.flatten(0, -2)[0, 1:]).unbind())), kappa))
    return over_rows_kept(lambda graph, kept: attend(module, graph, kept), x, mask, origin)


def over_rows_kept(
    attend: Callable[[Tensor, list[int]], Tensor], x: Tensor, mask: Tensor | None, origin: Tensor
) -> Tensor:
    """The same with the origin given."""
    batch, nodes = x.shape[:-2], x.shape[-2]
    graphs = x.reshape(-1, nodes, x.shape[-1])
    masks = torch.zeros(graphs.shape[:2], dtype=torch.bool) if mask is None else mask.reshape(-1, nodes)
    out = []
    for graph, padding in zip(graphs, masks, strict=True):
        rows = [origin] * nodes
        kept = [i for i in range(nodes) if not padding[i]]
        if kept:
            for i, row in zip(kept, attend(graph[kept], kept).unbind(), strict=True):
                rows[i] = row
        out.append(torch.stack(rows))
    return torch.stack(out).reshape(*batch, nodes, -1)


def over_memory(
    attend: Callable[..., Tensor], module: nn.Module, x: Tensor, memory: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention of each graph to tokens that are not its own, but for those that are padding."""
    graphs, others = x.reshape(-1, *x.shape[-2:]), memory.reshape(-1, *memory.shape[-2:])
    masks = torch.zeros(others.shape[:2], dtype=torch.bool) if mask is None else mask.reshape(-1, mask.shape[-1])
    each = zip(graphs, others, masks, strict=True)
    return torch.stack([attend(module, graph, keys=other[~padding]) for graph, other, padding in each]).reshape(x.shape)


def linear_attention(
    module: layers.HypLinearAttention,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    memory: Tensor | None = None,
) -> Tensor:
    """Eqs. 14-19, with t wherever it is printed; causally with the sums of eq. 16 over j <= i."""
    if memory is not None:
        return over_memory(_linear_attention, module, x, memory, key_padding_mask)
    return over_graphs(partial(_linear_attention, is_causal=is_causal), module, x, key_padding_mask)


def _linear_attention(
    module: layers.HypLinearAttention,
    x: Tensor,
    _: Sequence[int] = (),
    *,
    is_causal: bool = False,
    keys: Tensor | None = None,
) -> Tensor:
    scale, kappa = module.log_scale.exp().reshape(()), curvature(module.manifold_hidden)
    nodes, keys = x.shape[0], x if keys is None else keys
    average: list[Vector] = [[] for _ in range(nodes)]
    values: list[Vector] = [[] for _ in range(nodes)]
    maps = ((module.query, x), (module.key, keys), (module.value, keys), (module.value, x))
    for each in zip(*(heads(module, htc, points) for htc, points in maps), strict=True):
        q, k, v, own = ([phi(row, module.power, scale) for row in rows] for rows in each)
        for i in range(nodes):
            seen = range(i + 1) if is_causal else range(len(keys))
            weights = [dot(q[i], k[j]) for j in seen]
            total = sum(weights)
            if module.average == "midpoint" and total > 0:
                mean = midpoint([point(v[j], kappa) for j in seen], weights, kappa)[1:]
            else:
                mean = times(0.0, own[i])
                for j in seen:
                    if total > 0:
                        mean = plus(mean, times(weights[j] / total, v[j]))
            average[i] = average[i] + mean
            values[i] = values[i] + own[i]
    rows = []
    for i in range(nodes):
        extra = affine(module.residual.weight, module.residual.bias, values[i])
        rows.append(torch.stack(change(plus(average[i], extra), module, "manifold_hidden")))
    return torch.stack(rows)


def softmax_attention(
    module: layers.HypSoftmaxAttention,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    memory: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Eqs. 3-5; in training a query loses each key with the probability ``dropout``, and has the midpoint of others.

    ``attn_mask`` hides a key where it is ``True``, ``(nodes, keys)``; numbers, ``(graphs, 1, nodes, keys)``, are added.
    """
    if memory is not None:
        return over_memory(_softmax_attention, module, x, memory, key_padding_mask)
    *batch, nodes, _ = x.shape
    lost = torch.zeros(*batch, module.heads, nodes, nodes, dtype=torch.bool)
    if dropout and module.training:
        lost = torch.rand_like(lost, dtype=torch.float32) < dropout
    if is_causal:
        lost = lost | torch.tensor([[j > i for j in range(nodes)] for i in range(nodes)])
    added = torch.zeros(*batch, 1, nodes, nodes)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        lost = lost | attn_mask
    elif attn_mask is not None:
        added = attn_mask
    each = zip(lost.reshape(-1, module.heads, nodes, nodes), added.reshape(-1, nodes, nodes), strict=True)

    def attend(module: layers.HypSoftmaxAttention, graph: Tensor, kept: list[int]) -> Tensor:
        gone, more = next(each)
        return _softmax_attention(module, graph, gone[:, kept][:, :, kept], more[kept][:, kept], places=kept)

    return over_graphs(attend, module, x, key_padding_mask)


def _softmax_attention(
    module: layers.HypSoftmaxAttention,
    x: Tensor,
    lost: Tensor | None = None,
    added: Tensor | None = None,
    *,
    keys: Tensor | None = None,
    places: Sequence[int] = (),
) -> Tensor:
    kappa, nodes, keys = curvature(module.manifold_hidden), x.shape[0], x if keys is None else keys
    lost = torch.zeros(module.heads, nodes, len(keys), dtype=torch.bool) if lost is None else lost
    added = torch.zeros(nodes, len(keys)) if added is None else added
    result: list[Vector] = [[] for _ in range(nodes)]
    maps = ((module.query, x), (module.key, keys), (module.value, keys))
    projected = [heads(module, htc, points) for htc, points in maps]
    for q, k, v, gone in zip(*projected, lost, strict=True):
        if module.rope:
            q, k = ([turned(row, place) for row, place in zip(rows, places, strict=True)] for rows in (q, k))  # noqa: PLW2901
        q, k, v = ([point(row, kappa) for row in rows] for rows in (q, k, v))  # noqa: PLW2901
        root = math.sqrt(len(q[0]) - 1)
        for i in range(nodes):
            seen = [j for j in range(len(keys)) if not gone[i, j] and added[i, j] > -math.inf]
            logits = [added[i, j] - dissimilarity(q[i], k[j], kappa, module.similarity) / root for j in seen]
            largest = max((float(logit.detach()) for logit in logits), default=0.0)
            raw = [torch.exp(logit - largest) for logit in logits]
            weights = [value / sum(raw) for value in raw]
            mean = midpoint([v[j] for j in seen], weights, kappa)[1:] if seen else times(0.0, q[i][1:])
            result[i] = result[i] + mean
    return torch.stack([torch.stack(change(row, module, "manifold_hidden")) for row in result])


def turned(x: Vector, place: int) -> Vector:
    """RoPE (Su et al. 2021, eqs. 14, 15) of a space part: pairs of channels, each by an angle of its own."""
    out, pairs = list(x), len(x) // 2
    for i in range(pairs):
        angle = place * 10000 ** (-i / pairs)
        even, odd = x[2 * i : 2 * i + 2]
        out[2 * i] = math.cos(angle) * even - math.sin(angle) * odd
        out[2 * i + 1] = math.sin(angle) * even + math.cos(angle) * odd
    return out


def dissimilarity(x: Vector, y: Vector, kappa: Tensor, similarity: str) -> Tensor:
    if similarity == "geodesic":
        return distance(x, y, kappa)
    if similarity == "geodesic_squared":
        return squared_distance(x, y, kappa)
    gap = plus(x, times(-1, y))
    return product(gap, gap)


def mlr(module: layers.HypMLR, x: Tensor) -> Tensor:
    """Signed distance to each hyperplane times the length of its normal."""
    root = (-curvature(module.manifold)).sqrt()

    def logits(p: Vector) -> Vector:
        out = []
        for normal, offset in zip(module.weight.unbind(), module.offset.unbind(), strict=True):
            size = length(normal.unbind())
            if size == 0:
                out.append(0 * size)
                continue
            side = torch.cosh(root * offset) * dot(normal.unbind(), p[1:])
            alpha = side - torch.sinh(root * offset) * size * point(p[1:], -(root**2))[0]
            out.append(size / root * torch.asinh(root * alpha / size))
        return out

    return rowwise(logits, x)


def prototypes(module: layers.HypPrototypes, x: Tensor) -> Tensor:
    """Minus the scaled squared distances to points held on the unit hyperboloid."""
    kappa = curvature(module.manifold)
    radius = 1 / (-kappa).sqrt()
    points = [point(times(radius, row[1:].unbind()), kappa) for row in module.prototypes.unit]
    scale = module.log_scale.exp().reshape(())
    return rowwise(lambda p: [-scale * squared_distance(point(p[1:], kappa), q, kappa) for q in points], x)


def adjacency(edge_index: Tensor, nodes: int, like: Tensor) -> list[list[Tensor]]:
    """D^-1/2 (A + I) D^-1/2 as [target][source]."""
    matrix = [[0.0] * nodes for _ in range(nodes)]
    for source, target in edge_index.t().tolist():
        if source != target:
            matrix[target][source] += 1.0
    for i in range(nodes):
        matrix[i][i] = 1.0
    degree = [sum(row) for row in matrix]
    return [
        [like.new_tensor(matrix[i][j] / math.sqrt(degree[i] * degree[j])) for j in range(nodes)] for i in range(nodes)
    ]


def propagate(matrix: list[list[Tensor]], rows: list[Vector]) -> list[Vector]:
    out = []
    for weights in matrix:
        total = times(0.0, rows[0])
        for weight, row in zip(weights, rows, strict=True):
            total = plus(total, times(weight, row))
        out.append(total)
    return out


def entries_dropped(rows: list[Vector], dropout: float, module: nn.Module) -> list[Vector]:
    return [[functional.dropout(entry, dropout, module.training) for entry in row] for row in rows]


def gcn(module: layers.GCN, x: Tensor, edge_index: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Kipf and Welling 2017, with dropout of what enters each convolution."""
    x = x.to_dense() if x.layout != torch.strided else x
    matrix = adjacency(edge_index, x.shape[0], x)
    rows = [list(row.unbind()) for row in x]
    last = len(module.convolutions) - 1
    for i, (convolution, bias) in enumerate(zip(module.convolutions, module.biases, strict=True)):
        rows = entries_dropped(rows, dropout, module)
        convolved = propagate(matrix, [affine(convolution.weight, None, row) for row in rows])
        convolved = [plus(row, bias.unbind()) for row in convolved]
        if len(module.skips):
            skip = module.skips[i]
            kept = [row if isinstance(skip, nn.Identity) else affine(skip.weight, None, row) for row in rows]
            convolved = [plus(a, b) for a, b in zip(convolved, kept, strict=True)]
        rows = convolved if i == last else [[torch.relu(s) for s in row] for row in convolved]
    return torch.stack([torch.stack(row) for row in rows])


def appnp(module: layers.Propagation, x: Tensor, edge_index: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Gasteiger et al. 2019, eq. 4, with dropout of what enters each map."""
    x = x.to_dense() if x.layout != torch.strided else x
    matrix = adjacency(edge_index, x.shape[0], x)
    rows = entries_dropped([list(row.unbind()) for row in x], dropout, module)
    hidden = [[torch.relu(h) for h in affine(module.first.weight, module.first.bias, row)] for row in rows]
    hidden = entries_dropped(hidden, dropout, module)
    rows = start = [affine(module.second.weight, module.second.bias, row) for row in hidden]
    for _ in range(module.steps):
        moved = propagate(matrix, rows)
        rows = [
            plus(times(1 - module.teleport, row), times(module.teleport, first))
            for row, first in zip(moved, start, strict=True)
        ]
    return torch.stack([torch.stack(row) for row in rows])


def learned_points(module: manifolds.LorentzPoints, index: Tensor | None = None) -> Tensor:
    """Rows held on the unit hyperboloid, times the radius of the manifold's."""
    kappa = curvature(module.manifold)
    unit = module.unit.as_subclass(Tensor)
    rows = unit if index is None else unit[index]
    return rowwise(lambda p: point(times(1 / (-kappa).sqrt(), p[1:]), kappa), rows)


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.GCN: gcn,
    layers.HRC: hrc,
    layers.HTC: htc,
    layers.ExpMapHTC: exp_htc,
    layers.FullyLorentzLinear: fully_lorentz_linear,
    layers.HypActivation: activation,
    layers.HypBatchNorm: batch_norm,
    layers.HypConcat: concat,
    layers.HypDropout: dropout,
    layers.HypLayerNorm: layer_norm,
    layers.HypLinearAttention: linear_attention,
    layers.HypMLR: mlr,
    layers.HypPositionalEncoding: positional_encoding,
    layers.HypPrototypes: prototypes,
    layers.HypRMSNorm: rms_norm,
    layers.HypResidual: residual,
    layers.HypSoftmaxAttention: softmax_attention,
    layers.Propagation: appnp,
    layers.TangentLinear: tangent_linear,
    manifolds.LorentzEmbedding: learned_points,
    manifolds.LorentzPoints: learned_points,
}
