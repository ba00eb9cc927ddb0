r"""Attention heads as equivariant basis tensors: TokenGT Lemma 1 and Theorems 1 and 2, with the constructed weights.

Tokens are the :math:`n^k` multi-indices, each with its nodes' orthonormal identifiers and the identifier of its type,
its equality pattern: :math:`[P_{i_1}, .., P_{i_k}, E^{\gamma}]`, the types at equal angles on a unit circle. A head for
each equivalence class :math:`\mu` of :math:`(\mathbf j, \mathbf i)`, input first as everywhere in this library, has
query i, key j and the logit

.. math::
    \frac{a}{\sqrt{d_H}} \Big( E^{\gamma(\mathbf i)} \cdot E^{\gamma^Q} + E^{\gamma(\mathbf j)} \cdot E^{\gamma^K}
    + \sum_{r,s} \operatorname{sgn}_\mu(r, s)\, P_{i_r} \cdot P_{j_s} \Big), \qquad d_H = k^2 d_p + 2 d_e,

which is largest exactly on the class, by at least :math:`a \min(1, \varepsilon) / \sqrt{d_H}`,
:math:`\varepsilon = 1 - \cos(2\pi / \mathrm{bell}(k))`. So at most
:math:`\frac{n^k - c}{c} e^{-a \min(1, \varepsilon) / \sqrt{d_H}}` of a row's weight lies outside its class of c keys.
For k = 1 there is one type, which no token can miss, and the gap is 1 where the printed :math:`\varepsilon` is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holonomy import checks, numerics
from holonomy._shapes import Bool, Float, Int
from holonomy.layers import EquivariantLinear, bell, orthogonal_identifiers, set_partitions
from holonomy.layers.equivariant.basis.partitions import Partition, canonical, equality_classes

_TYPE_FEATURES = 2  # d_e: a circle


class Head(NamedTuple):
    """Weights and biases of the query and key of a head, ``(k d_p + d_e, d_H)`` and ``(d_H,)``."""

    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor


@dataclass(frozen=True)
class BasisApproximation:
    """How far attention is from the basis tensors, rows normalised."""

    # The largest weight outside its class over all heads and rows, which is half the l1 distance of the row from the
    # row of the basis tensor.
    measured: float
    bound: float  # what Lemma 1 allows in that row
    ratio: float  # the largest ratio of the two over all heads and rows
    logit: float  # the largest size of a logit: times the rounding of the dtype, what a tie is broken by


@dataclass(frozen=True)
class LayerByHeads:
    """An equivariant linear layer computed by heads, TokenGT Theorem 1."""

    output: Tensor  # of the shape that the layer gives
    # No entry of the output is farther than this from that of the layer, in the Euclidean norm of its features.
    bound: float


def head_gap(order: int, dim: int) -> float:
    r"""By how much the logits of a class stand above all others, over a: :math:`\min(1, \varepsilon) / \sqrt{d_H}`."""
    missed = 1.0 if order == 1 else 1 - math.cos(2 * math.pi / bell(order))
    return min(1.0, missed) / math.sqrt(order**2 * dim + 2 * _TYPE_FEATURES)


def type_identifiers(
    order: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Float[Tensor, "bell 2"]:
    """Unit vectors at equal angles, one for each equality pattern of k indices."""
    angle = torch.arange(bell(order), dtype=torch.float64) * (2 * math.pi / bell(order))
    return torch.empty(len(angle), 2, device=device, dtype=dtype).copy_(torch.stack([angle.cos(), angle.sin()], 1))


def _tuples(nodes: int, length: int, device: torch.device) -> Tensor:
    """All multi-indices, ``(n^length, length)``, the last index running fastest."""
    places = nodes ** torch.arange(length - 1, -1, -1, device=device)
    return torch.arange(nodes**length, device=device)[:, None] // places % nodes


def equality_patterns(nodes: int, length: int, *, device: torch.device | str | None = None) -> Int[Tensor, " tuples"]:
    """The equality pattern of every multi-index, the last index running fastest."""
    return equality_classes(_tuples(nodes, length, torch.device(device or "cpu")))


def basis_tensors(
    order: int, nodes: int, *, device: torch.device | str | None = None
) -> Bool[Tensor, "classes queries keys"]:
    r"""The basis :math:`B^\mu` of the equivariant maps from order k to order k, one matrix a class: HOT eq. 2."""
    number = equality_patterns(nodes, 2 * order, device=device)
    by_input = number.reshape(nodes**order, nodes**order)
    return torch.arange(bell(2 * order), device=number.device)[:, None, None] == by_input.T


def token_identifiers(order: int, identifiers: Float[Tensor, "nodes dim"]) -> Float[Tensor, "tokens features"]:
    """What TokenGT section 3.3 puts beside the features of each entry of an order-k tensor."""
    tuples = _tuples(identifiers.shape[0], order, identifiers.device)
    types = type_identifiers(order, device=identifiers.device, dtype=identifiers.dtype)
    return torch.cat([identifiers[tuples].flatten(1), types[equality_classes(tuples)]], 1)


def basis_head(
    order: int,
    partition: Partition,
    dim: int,
    a: float,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Head:
    """The weights of the proof of Lemma 1 for a class, without the zero rows for the features of tokens."""
    types = type_identifiers(order, device=device, dtype=dtype)
    root = math.sqrt(a)
    pairs, width = order**2 * dim, order**2 * dim + 2 * _TYPE_FEATURES
    query = types.new_zeros(order * dim + _TYPE_FEATURES, width)
    key, query_bias, key_bias = torch.zeros_like(query), types.new_zeros(width), types.new_zeros(width)
    one, circle = torch.eye(dim).to(types), torch.eye(_TYPE_FEATURES).to(types)
    for r in range(order):
        for s in range(order):
            sign = 1 if partition[order + r] == partition[s] else -1
            columns = slice((r * order + s) * dim, (r * order + s + 1) * dim)
            query[r * dim : (r + 1) * dim, columns] = sign * root * one
            key[s * dim : (s + 1) * dim, columns] = root * one
    patterns = set_partitions(order)
    query[order * dim :, pairs : pairs + _TYPE_FEATURES] = root * circle
    key_bias[pairs : pairs + _TYPE_FEATURES] = root * types[patterns.index(canonical(partition[order:]))]
    key[order * dim :, pairs + _TYPE_FEATURES :] = root * circle
    query_bias[pairs + _TYPE_FEATURES :] = root * types[patterns.index(canonical(partition[:order]))]
    return Head(query, query_bias, key, key_bias)


def basis_attention(
    order: int, a: float, identifiers: Float[Tensor, "nodes dim"]
) -> tuple[Float[Tensor, "classes queries keys"], float]:
    """The attention of all heads with the constructed weights."""
    tokens = token_identifiers(order, identifiers)
    maps: list[Tensor] = []
    largest = 0.0
    for partition in set_partitions(2 * order):
        head = basis_head(order, partition, identifiers.shape[1], a, device=identifiers.device, dtype=identifiers.dtype)
        query, key = tokens @ head.query_weight + head.query_bias, tokens @ head.key_weight + head.key_bias
        logits = query @ key.T / math.sqrt(query.shape[1])
        largest = max(largest, logits.abs().amax().item())
        maps.append(torch.softmax(logits, -1))
    return torch.stack(maps), largest


def _orthonormal(identifiers: Tensor, nodes: int) -> Tensor:
    """Identifiers, if they are orthonormal and one for each node."""
    checks.floating("identifiers", identifiers)
    if identifiers.ndim != 2 or identifiers.shape[0] != nodes:
        raise ValueError(f"identifiers must be (nodes = {nodes}, dim), got {tuple(identifiers.shape)}.")
    off = (identifiers @ identifiers.mT - torch.eye(nodes).to(identifiers)).abs().amax().item()
    if not off <= numerics.tolerance(identifiers.dtype).atol:
        raise ValueError(f"identifiers must have orthonormal rows, got products that are off by {off:g}.")
    return identifiers


def basis_approximation_error(
    order: int,
    nodes: int,
    a: float,
    *,
    identifiers: Float[Tensor, "nodes dim"] | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> BasisApproximation:
    """Measure the constructed attention against the basis tensors, beside the bound.

    Rows without a key in their class are left out, as in the paper.

    Args:
        order: k, at least 1; there are bell(2k) heads of n^2k weights.
        nodes: n.
        a: the scale, positive.
        identifiers: ``(n, d_p)`` with orthonormal rows, one-hot if left out.
        dtype: in which to compute, where no identifiers are given.
        device: where to compute, where no identifiers are given.

    Returns:
        The error and its bound, at the row where their ratio is largest.

    Raises:
        ValueError: if ``a`` is not positive, or there are not n orthonormal identifiers.

    >>> basis_approximation_error(3, 3, 1000.0).measured < 1e-20
    True
    """
    checks.positive_int("order", order)
    checks.positive_int("nodes", nodes)
    checks.positive("a", a)
    checks.floating_dtype(dtype, needed=True)
    p = torch.eye(nodes, dtype=dtype, device=device) if identifiers is None else _orthonormal(identifiers, nodes)
    attention, logit = basis_attention(order, a, p)
    basis = basis_tensors(order, nodes, device=p.device).to(p.dtype)
    size = basis.sum(-1)
    half = (attention - basis / size.clamp_min(1)[..., None]).abs().sum(-1) / 2
    bound = (nodes**order - size) / size.clamp_min(1) * math.exp(-a * head_gap(order, p.shape[1]))
    there = size > 0
    error, allowed = half[there].double(), bound[there].double()
    # A class that is all tokens has bound zero, and error zero up to rounding: the others decide.
    if not bool((allowed > 0).any()):
        return BasisApproximation(error.amax().item(), 0.0, 1.0, logit)
    ratio = torch.where(allowed > 0, error / allowed, 0)
    worst = ratio.argmax()
    return BasisApproximation(error[worst].item(), allowed[worst].item(), ratio[worst].item(), logit)


def layer_by_heads(
    layer: EquivariantLinear,
    x: Float[Tensor, "*axes features"],
    a: float,
    *,
    identifiers: Float[Tensor, "nodes dim"] | None = None,
) -> LayerByHeads:
    r"""Compute an equivariant linear layer by bell(2k) heads: TokenGT Theorem 1.

    Head :math:`\mu` averages the tokens with its attention and applies :math:`w_\mu`; the feed-forward map, which the
    proof has by universal approximation and which is exact here, multiplies by the size of the class and adds the bias.
    An entry is off by no more than :math:`\sum_\mu (n^k - c_\mu) e^{-a\,\mathrm{gap}} \mathrm{diam}(X w_\mu)`, as two
    distributions that differ by half their l1 distance give means that differ by that times a diameter.

    ``x`` is ``(n, ..., n, d)``, k axes of n nodes, without a batch.
    """
    checks.positive("a", a)
    checks.floating("x", x)
    order = layer.order_in
    if layer.order_out != order or layer.lightweight or layer.normalise is not None:
        raise ValueError("layer must map order k to order k by all classes, without normalise.")
    checks.positive_int("order of the layer", order)
    nodes = x.shape[0] if x.ndim else 0
    if not nodes or x.shape != (*[nodes] * order, layer.in_features):
        wanted = ", ".join([*["n"] * order, f"d = {layer.in_features}"])
        raise ValueError(f"x must have shape ({wanted}) without a batch, got {tuple(x.shape)}.")
    if identifiers is None:
        identifiers = orthogonal_identifiers(nodes, nodes, device=x.device, dtype=x.dtype)
    attention, _ = basis_attention(order, a, _orthonormal(identifiers, nodes))
    basis = basis_tensors(order, nodes, device=x.device)
    size = basis.sum(-1).to(x.dtype)
    with torch.no_grad():
        values = torch.einsum("jd,hde->hje", x.flatten(0, order - 1), layer.weight)
        y = torch.einsum("hi,hij,hje->ie", size, attention, values)
        off = (nodes**order - size) * (size > 0) * torch.cdist(values, values).amax((1, 2))[:, None]
        if layer.bias is not None:
            y = y + layer.bias[equality_patterns(nodes, order, device=x.device)]
    bound = off.sum(0).amax().item() * math.exp(-a * head_gap(order, identifiers.shape[1]))
    return LayerByHeads(y.reshape(*x.shape[:-1], -1), bound)
