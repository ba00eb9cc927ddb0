"""Both kinds of attention when tokens move: keys and values of all of them, then each query by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from holonomy.layers import HTC, HypLinearAttention, HypSoftmaxAttention
from holonomy.theory.affine.arithmetic.ellipsoids import Threat, TokenForms, merged, tokens_of
from holonomy.theory.affine.arithmetic.entrywise import positive_power
from holonomy.theory.affine.arithmetic.forms import Form, join
from holonomy.theory.affine.attention.averages import linear_average
from holonomy.theory.affine.attention.features import features, split, values_of
from holonomy.theory.affine.attention.softmax import softmax_average
from holonomy.theory.affine.points import Scaled, above, bias_of, root, transformed, unscaled
from holonomy.theory.attention.projections import as_stated, refuse_rotations

# Tokens side by side: more of them do not fit the cache.
_CHUNK = 96


@dataclass(frozen=True)
class Around:
    """The tokens that a layer attends among, and their keys and values of each head."""

    tokens: TokenForms
    keys: list[TokenForms]
    values: list[TokenForms]

    def with_token(self, layer: HypLinearAttention | HypSoftmaxAttention, token: int, space: Form) -> Around:
        """The same with one token from elsewhere; the only one that moves, unless all do."""
        forms = _projected(layer, merged(space).form(torch.arange(1)))
        each = [old.with_token(token, form) for old, form in zip([*self.keys, *self.values], forms, strict=True)]
        return Around(self.tokens.with_token(token, space), each[: layer.heads], each[layer.heads :])

    def within(self, share: float) -> Around:
        """The same on a ball that is smaller by a factor."""
        keys, values = ([each.within(share) for each in part] for part in (self.keys, self.values))
        return Around(self.tokens.within(share), keys, values)


def chunks(count: int) -> Iterator[Tensor]:
    """Numbers below count, some at a time."""
    return iter(torch.arange(count).split(_CHUNK))


def heads_of(layer: HypLinearAttention | HypSoftmaxAttention, points: TokenForms) -> Around:
    """The keys and values of points on ``manifold_in``, given by their space parts."""
    as_stated(layer, type(layer))
    refuse_rotations(layer)
    parts = [[merged(each) for each in _projected(layer, points.form(some))] for some in chunks(len(points.center))]
    found = [tokens_of([part[i] for part in parts]) for i in range(2 * layer.heads)]
    if not points.everything:
        found = [each.still() for each in found]
    return Around(points, found[: layer.heads], found[layer.heads :])


def _projected(layer: HypLinearAttention | HypSoftmaxAttention, space: Form) -> list[Form]:
    """Keys of each head, then values of each head."""
    point = unscaled(space, layer.manifold_in)
    return [*_of_heads(layer, layer.key, point), *_values(layer, point)]


def _of_heads(layer: HypLinearAttention | HypSoftmaxAttention, part: HTC, point: Scaled) -> list[Form]:
    """Space parts of each head: features for linear attention, else points with their times."""
    forms = split(transformed(part, point), layer.heads)
    if isinstance(layer, HypLinearAttention):
        return [features(form, layer.power) for form in forms]
    return [above(form, layer.manifold_hidden) for form in forms]


def _values(layer: HypLinearAttention | HypSoftmaxAttention, point: Scaled) -> list[Form]:
    if isinstance(layer, HypSoftmaxAttention):
        return _of_heads(layer, layer.value, point)
    own = values_of(layer, point)
    return [above(form, layer.manifold_hidden) for form in own] if layer.average == "midpoint" else own


def attended_among(layer: nn.Module, query: Scaled, around: Around, threat: Threat) -> Form:
    """The space part of the layer's result for queries of scale one, on its output manifold."""
    if isinstance(layer, HypSoftmaxAttention):
        k = root(layer.manifold_hidden)
        asked = _of_heads(layer, layer.query, query)
        found = join(*(
            softmax_average(one, keys, values, layer.similarity, k, threat)
            for one, keys, values in zip(asked, around.keys, around.values, strict=True)
        ))  # fmt: skip
    else:
        layer = cast("HypLinearAttention", layer)
        found = _linear(layer, query, around, threat)
    return found * (root(layer.manifold_hidden) / root(layer.manifold_out))


def _linear(layer: HypLinearAttention, query: Scaled, around: Around, threat: Threat) -> Form:
    k = root(layer.manifold_hidden) if layer.average == "midpoint" else None
    asked = [positive_power(form, layer.power) for form in split(transformed(layer.query, query), layer.heads)]
    found = [
        linear_average(one, keys, values, k, threat)
        for one, keys, values in zip(asked, around.keys, around.values, strict=True)
    ]
    residual = layer.residual
    as_stated(residual, nn.Linear)
    own = join(*values_of(layer, query)).linear(residual.weight.double(), bias_of(residual))
    return join(*found) + own
