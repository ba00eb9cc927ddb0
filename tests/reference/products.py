"""Layers and points of products again, as loops over factors, heads, nodes and coordinates.

Conventions are those of :mod:`tests.reference.hyperbolic`, whose hyperbolic factor this is. On the sphere distances are
twice the arc sine of half the chord, on the half that is nearer, and the arc cosine beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from holonomy import layers, manifolds
from tests.reference.hyperbolic import (
    Vector,
    affine,
    curvature,
    dot,
    length,
    midpoint,
    over_rows_kept,
    plus,
    point,
    rowwise,
    squared_distance,
    times,
)

# A factor: its kind, its curvature (zero of flat space), and how many ambient coordinates it has.
Factor = tuple[str, Tensor, int]


def factors(manifold: manifolds.Product, heads: int = 1) -> list[Factor]:
    found: list[Factor] = []
    for factor, shape in zip(manifold.manifolds, manifold.shapes, strict=True):
        kind, size = type(factor).__name__, shape[0]
        hyperbolic = kind == "Lorentz"
        kappa = torch.zeros(()) if kind == "Euclidean" else curvature(factor)
        found.append((kind, kappa, (size - hyperbolic) // heads + hyperbolic))
    return found


def cut(x: Sequence[Tensor], sizes: Sequence[int]) -> list[Vector]:
    entries = iter(x)
    return [[next(entries) for _ in range(size)] for size in sizes]


def set_on(factor: Factor, coordinates: Vector) -> Vector:
    kind, kappa, _ = factor
    if kind == "Lorentz":
        return point(times(1 / (-kappa).sqrt(), coordinates), kappa)
    if kind == "Sphere":
        size = length(coordinates)
        one = [torch.ones_like(size), *times(0.0, coordinates[1:])]
        return times(1 / kappa.sqrt(), times(1 / size, coordinates) if size > 0 else one)
    return coordinates


def scaled(factor: Factor, x: Vector) -> Vector:
    return x if factor[0] == "Euclidean" else times(factor[1].abs().sqrt(), x)


def square(factor: Factor, x: Vector, y: Vector) -> Tensor:
    kind, kappa, _ = factor
    if kind == "Lorentz":
        return squared_distance(x, y, kappa)
    difference = plus(x, times(-1, y))
    if kind == "Euclidean":
        return dot(difference, difference)
    chord = kappa * dot(difference, difference)
    if chord < 1e-6:
        return chord / kappa * (1 + chord / 12)
    angle = 2 * torch.asin(chord.sqrt() / 2) if chord < 2 else torch.acos(kappa * dot(x, y))
    return angle**2 / kappa


def mean(factor: Factor, points: Sequence[Vector], weights: Sequence[Tensor]) -> Vector:
    kind, kappa, _ = factor
    if kind == "Lorentz":
        return midpoint(points, weights, kappa)
    total = times(0.0, points[0])
    for weight, x in zip(weights, points, strict=True):
        total = plus(total, times(weight, x))
    return set_on(factor, total) if kind == "Sphere" else times(1 / sum(weights), total)


def free(factor: Factor) -> int:
    return factor[2] - (factor[0] == "Lorentz")


def linear(module: layers.ProductLinear, x: Tensor) -> Tensor:
    before, after = factors(module.manifold_in), factors(module.manifold_out)

    def both(entries: Vector) -> Vector:
        parts = cut(entries, [size for *_, size in before])
        unit = [entry for factor, part in zip(before, parts, strict=True) for entry in scaled(factor, part)]
        shares = cut(affine(module.weight, module.bias, unit), [free(factor) for factor in after])
        return [entry for factor, share in zip(after, shares, strict=True) for entry in set_on(factor, share)]

    return rowwise(both, x)


def attention(
    module: layers.ProductAttention,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    memory: Tensor | None = None,
) -> Tensor:
    """``attn_mask`` ``(nodes, nodes)`` is True where a node must not attend."""
    whole, head = factors(module.manifold), factors(module.manifold, module.heads)
    root = math.sqrt(sum(free(factor) for factor in head))

    def coordinates(row: Tensor) -> list[Vector]:
        parts = cut(list(row.unbind()), [size for *_, size in whole])
        return [
            scaled(factor, part)[1:] if factor[0] == "Lorentz" else scaled(factor, part)
            for factor, part in zip(whole, parts, strict=True)
        ]

    def share(row: Tensor, number: int) -> list[Vector]:
        each = zip(head, coordinates(row), strict=True)
        return [set_on(f, part[number * free(f) : (number + 1) * free(f)]) for f, part in each]

    def graph(nodes: Tensor, kept: list[int], others: Tensor | None = None) -> Tensor:
        there = nodes if others is None else others
        maps = [linear(module.query, nodes), linear(module.key, there), linear(module.value, there)]
        places = kept if others is None else list(range(len(others)))
        joined: list[list[Vector]] = [[[] for _ in whole] for _ in kept]
        for number in range(module.heads):
            query, key, value = ([share(row, number) for row in rows] for rows in maps)
            strengths = module.log_weight[number].exp()
            for i, place in enumerate(kept):
                seen = [
                    j
                    for j, other in enumerate(places)
                    if (attn_mask is None or not attn_mask[place, other]) and (not is_causal or other <= place)
                ]
                logits = [
                    -sum(w * square(f, a, b) for w, f, a, b in zip(strengths, head, query[i], key[j], strict=True))
                    / root
                    for j in seen
                ]
                weights = list(torch.stack(logits).softmax(0).unbind())
                for part, factor in enumerate(head):
                    middle = scaled(factor, mean(factor, [value[j][part] for j in seen], weights))
                    joined[i][part] = joined[i][part] + middle[len(middle) - free(factor) :]
        return torch.stack([lifted(row) for row in joined])

    def lifted(parts: list[Vector]) -> Tensor:
        return torch.stack([e for factor, part in zip(whole, parts, strict=True) for e in set_on(factor, part)])

    if memory is not None:
        masks = torch.zeros(memory.shape[:-1], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        each = zip(x, memory, masks, strict=True)
        return torch.stack([graph(own, list(range(len(own))), other[~mask]) for own, other, mask in each])
    zeros = [[x.new_zeros(()) for _ in range(free(factor))] for factor in whole]
    return over_rows_kept(graph, x, key_padding_mask, lifted(zeros))


def learned_points(module: manifolds.ProductEmbedding, index: Tensor | None = None) -> Tensor:
    unit = module.unit.as_subclass(Tensor)
    parts = factors(module.manifold)

    def read(entries: Vector) -> Vector:
        each = zip(parts, cut(entries, [size for *_, size in parts]), strict=True)
        return [e for factor, part in each for e in set_on(factor, part[len(part) - free(factor) :])]

    return rowwise(read, unit if index is None else unit[index])


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.ProductAttention: attention,
    layers.ProductLinear: linear,
    manifolds.ProductEmbedding: learned_points,
}
