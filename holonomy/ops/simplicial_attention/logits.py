r"""The logits of simplicial attention: one number of N + 1 vectors, linear in each (Simplicial sections 2.2 and 2.4).

============= =====================================================================
form          logit of :math:`x_0, \dots, x_N`, d channels each
============= =====================================================================
product       :math:`\sum_a x_{0a} x_{1a} \cdots x_{Na}`
determinant   :math:`\sum_c \det[x_0^{(c)}, \dots, x_N^{(c)}]`, chunks c of N + 1 channels
============= =====================================================================

Either is an inner product of features of the first two vectors with features of the others: of :math:`x_0 * x_1` with
:math:`x_2 * \cdots * x_N`, or of :math:`x_0 \wedge x_1` with the minors of the others (Laplace's expansion along two
columns). The logits of any N are thus one matrix product, see :mod:`holonomy.ops.simplicial_attention`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from holonomy._shapes import Float, Int

Form = Literal["product", "determinant"]
"""How N + 1 vectors become a logit."""

FORMS: tuple[Form, ...] = ("product", "determinant")

# Of the angles of rotary positions.
_BASE = 10000.0


def chunks(channels: int, order: int) -> int:
    r"""Chunks of N + 1 channels: :math:`\lfloor d/(N+1) \rfloor`; the printed :math:`\lfloor d/N \rfloor` overruns."""
    if channels <= order:
        raise ValueError(f"keys must have at least N + 1 = {order + 1} channels for a determinant, got {channels}.")
    return channels // (order + 1)


def first_key_terms(
    query: Float[Tensor, "..."], key: Float[Tensor, "..."], *, order: int, form: Form
) -> list[tuple[Float[Tensor, "..."], Float[Tensor, "..."]]]:
    r"""Features of the first two vectors, as sums :math:`\sum_r l^r_i * r^r_j` of entrywise products."""
    if form == "product":
        return [(query, key)]
    # Laplace: det = sum over a < b of (x_0a x_1b - x_0b x_1a) times the signed minor without rows a and b.
    size, number = order + 1, chunks(query.shape[-1], order)
    first, second = _pairs(size, number, query.device)
    return [
        (query.index_select(-1, first), key.index_select(-1, second)),
        (query.index_select(-1, second).neg(), key.index_select(-1, first)),
    ]


def other_keys_features(factors: Sequence[Float[Tensor, "..."]], *, order: int, form: Form) -> Float[Tensor, "..."]:
    r"""Features of the other vectors :math:`x_2, \dots, x_N`, entry by entry over their leading axes."""
    if form == "product":
        return reduce(torch.mul, factors)
    size = order + 1
    number = chunks(factors[0].shape[-1], order)
    parts = [factor[..., : number * size].unflatten(-1, (number, size)) for factor in factors]
    minors = [_minor(parts, first, second) for first, second in itertools.combinations(range(size), 2)]
    return torch.stack(minors, -1).flatten(-2)


def rescale_to_safe_range(factors: Sequence[Float[Tensor, "..."]], terms: int) -> list[Float[Tensor, "..."]]:
    """Factors with the same entrywise product, whose product and its sum over ``terms`` terms do not overflow."""
    # All but the first are divided by powers of two until they are at most one; the rows of the first are multiplied by
    # these, which is exact, or by less where they would become infinite. Each entry of a batch has its own powers.
    sizes = [x.detach().abs().amax(-1 if x is factors[0] else (-2, -1), keepdim=True) for x in factors]
    exponents = [torch.frexp(size).exponent.clamp(min=0) for size in sizes]
    # The largest exponent with which a sum of so many products stays finite.
    most = math.frexp(torch.finfo(factors[0].dtype).max)[1] - 1 - math.ceil(math.log2(terms))
    total = reduce(torch.add, exponents).clamp(max=most)
    shrunk = [x * _power(x, -exponent) for x, exponent in zip(factors, exponents, strict=True)]
    return [shrunk[0] * _power(factors[0], total), *shrunk[1:]]


def _power(like: Tensor, exponent: Tensor) -> Tensor:
    # torch 2.6 raises 2 to the exponent in the default dtype.
    return torch.ldexp(like.new_ones(exponent.shape), exponent).to(like.dtype)


def _pairs(size: int, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Channels a and b of all pairs a < b within a chunk, chunk by chunk."""
    within = list(itertools.combinations(range(size), 2))
    both = torch.tensor(within, device=device).T
    start = torch.arange(number, device=device)[:, None] * size
    return (both[0] + start).flatten(), (both[1] + start).flatten()


def _minor(parts: Sequence[Tensor], first: int, second: int) -> Tensor:
    """The signed minor without two rows by Leibniz's formula, whose gradient is finite at singular matrices."""
    rows = [row for row in range(len(parts) + 2) if row not in (first, second)]
    terms: list[Tensor] = []
    # Not by `itertools.permutations`, which the compiler of torch 2.6 does not know.
    for chosen in itertools.product(*[range(len(rows))] * len(rows)):
        if len(set(chosen)) < len(rows):
            continue
        term = reduce(torch.mul, (part[..., rows[row]] for part, row in zip(parts, chosen, strict=True)))
        odd = sum(a > b for a, b in itertools.combinations(chosen, 2)) % 2  # the number of inversions
        terms.append(-term if odd else term)
    total = sum(terms[1:], start=terms[0])
    return total if (first + second) % 2 else -total


def rotary(
    x: Float[Tensor, "*batch nodes dim"], positions: Int[Tensor, "*#batch nodes"] | None = None, *, size: int
) -> Float[Tensor, "*batch nodes dim"]:
    """Rotary positions for chunks of any size (Simplicial section 2.4; RoPE for ``size=2``)."""
    # Each chunk of a token at position p is turned by the p-th power of a rotation in SO(size), the same for all N + 1
    # vectors: it turns the planes (0, 1), (2, 3), .. of the chunk, an odd one out is its axis.
    nodes, number = x.shape[-2], x.shape[-1] // size
    if positions is None:
        positions = torch.arange(nodes, device=x.device)
    planes = size // 2
    # In float64: in float32 an angle of a million radians is known to 0.06 only.
    fraction = torch.arange(number * planes, device=x.device, dtype=torch.float64) / max(1, number * planes)
    angles = positions[..., None].to(torch.float64) * _BASE**-fraction
    cosine, sine = (f(angles).to(x.dtype).unflatten(-1, (number, planes)) for f in (torch.cos, torch.sin))
    whole = x[..., : number * size].unflatten(-1, (number, size))
    even, odd = whole[..., 0 : 2 * planes : 2], whole[..., 1 : 2 * planes : 2]
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)
    turned = torch.cat([turned, whole[..., 2 * planes :]], -1).flatten(-2)
    return torch.cat([turned, x[..., number * size :]], -1)
