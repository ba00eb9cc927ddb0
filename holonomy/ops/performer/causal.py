r"""Causal attention by random features: the quotient of FAVOR+ over the keys up to each query, in chunks of rows.

.. math:: z_i = \frac{\sum_f e^{\ell_f(q_i)} \sum_{j \le i} e^{\ell_f(k_j)} v_j}
    {\sum_f e^{\ell_f(q_i)} \sum_{j \le i} e^{\ell_f(k_j)}}

Each feature f has a scale of its own, :math:`t_{if} = \max_{j \le i} \ell_f(k_j)`: one for all features, which the sums
of :mod:`~holonomy.ops.linear_attention.causal` have, leaves 0/0 where queries and keys have opposite directions. Where
all keys of one stretch of rows lie before all queries of another, with r the scale at the end of the former,

.. math:: e^{\ell_f(q_i) + \ell_f(k_j) - c_i} = e^{\ell_f(q_i) + r_f - c_i}\; e^{\ell_f(k_j) - r_f}, \qquad
    c_i = \max_f\, (\ell_f(q_i) + t_{if}),

is a product of two factors of at most one. It computes the sums over earlier chunks, and within a chunk those of the
second half over the first, halved again and again down to single rows. The denominator over :math:`e^{c_i}` is at least
one, and later keys have no effect. Time and memory are linear in the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import numerics
from holonomy._shapes import Bool, Float
from holonomy.ops.performer.features import log_features, root_of_scale
from holonomy.ops.recomputed_causal import part_by_part

# Rows of a chunk, a power of two, and chunks at once, whose scales are one tensor.
_CHUNK, _CHUNKS = 32, 64


class PerformerState(NamedTuple):
    """What attention by random features keeps of the tokens so far; batch axes first, in each of its tensors."""

    sums: Float[Tensor, "*batch features values_plus_1"]  # sum_j exp(l_f(k_j) - t_f) (v_j, 1)
    largest: Float[Tensor, "*batch features 1"]  # t_f, the largest l_f(k_j)

    @classmethod
    def empty(cls, value: Float[Tensor, "*batch rows values"], projection: Tensor) -> PerformerState:
        """The state before the first token."""
        dtype = torch.promote_types(torch.promote_types(value.dtype, projection.dtype), torch.float32)
        sums = value.new_zeros(*value.shape[:-2], projection.shape[0], value.shape[-1] + 1, dtype=dtype)
        return cls(sums, torch.full_like(sums[..., :1], _lowest(dtype)))


# A state holds tensors alone, so that torch.load(weights_only=True) may make one.
torch.serialization.add_safe_globals([PerformerState])


def performer_attention_after(
    query: Float[Tensor, "*batch rows dim"],
    key: Float[Tensor, "*batch rows dim"],
    value: Float[Tensor, "*batch rows values"],
    projection: Float[Tensor, "features dim"],
    mask: Bool[Tensor, "*#batch rows"] | None,
    state: PerformerState,
) -> tuple[Float[Tensor, "*batch rows values"], PerformerState]:
    """Average the values of the keys up to each query, and of those in a state; zero where there is none."""
    if key.shape[-2] == 0:
        return numerics.zeros_of(value.shape, value, query, key), state
    root, projection = root_of_scale(query), projection.to(state.sums.dtype)
    if mask is not None:
        key, value = key.masked_fill(mask[..., None], 0.0), value.masked_fill(mask[..., None], 0.0)
    of_query, of_key = log_features(query * root, projection, of_query=True), log_features(key * root, projection)
    wide = functional.pad(value.to(state.sums.dtype), (0, 1), value=1.0)
    if mask is not None:
        of_key = of_key.masked_fill(mask[..., None], _lowest(of_key.dtype))
        wide = wide.masked_fill(mask[..., None], 0.0)
    mixed, state = part_by_part(_attend, _CHUNK * _CHUNKS, state, of_query, of_key, wide)
    return mixed.to(value.dtype), state


def _lowest(dtype: torch.dtype) -> float:
    """The logarithm of a feature that no key has: differences of it are finite."""
    return torch.finfo(dtype).min / 4


def _attend(state: PerformerState, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, PerformerState]:
    """Some chunks of logarithms of features, and of values with a one, after a state."""
    rows = key.shape[-2]
    chunk = _CHUNK if rows > 1 else 1
    # Rows without a key at the end change nothing before it, and no sum.
    query, value = (functional.pad(x, (0, 0, 0, -rows % chunk)) for x in (query, value))
    key = functional.pad(key, (0, 0, 0, -rows % chunk), value=_lowest(key.dtype))
    # Scales cancel in the quotient, hence their gradients do.
    start = state.largest.detach().mT
    largest = torch.maximum(key.detach().cummax(-2).values, start)
    query = query - (query.detach() + largest).amax(-1, keepdim=True)
    query, key, value, largest = (x.unflatten(-2, (-1, chunk)) for x in (query, key, value, largest))
    # Of each chunk the sums over the scale at its end, then those of all chunks up to it, feature by feature.
    ends = largest[..., -1, :]
    scales = torch.cat([start, ends], -2).mT
    carried = (scales[..., None, :] - scales[..., 1:, None]).exp().tril(1)
    added = (key - ends[..., None, :]).exp().mT @ value
    table = torch.cat([state.sums[..., None, :, :], added], -3).transpose(-3, -2)
    sums = carried @ table
    earlier = torch.cat([table[..., :1, :], sums[..., :-1, :]], -2).transpose(-3, -2)
    total = (query + scales.mT[..., :-1, None, :]).exp() @ earlier + _within(query, key, value, largest)
    mixed = numerics.safe_div(total[..., :-1], total[..., -1:]).flatten(-3, -2)
    return mixed[..., :rows, :], PerformerState(sums[..., -1, :], scales[..., -1:])


def _within(query: Tensor, key: Tensor, value: Tensor, largest: Tensor) -> Tensor:
    """Sums over the keys of the same chunk up to each query."""
    rows = key.shape[-2]
    if rows == 1:
        return (query + key).exp().sum(-1, keepdim=True) * value
    query, key, value, largest = (x.unflatten(-2, (2, rows // 2)) for x in (query, key, value, largest))
    first, second = _within(query, key, value, largest).unbind(-3)
    scale = largest[..., 0, -1:, :]
    weights = (query[..., 1, :, :] + scale).exp() @ (key[..., 0, :, :] - scale).exp().mT
    return torch.cat([first, second + weights @ value[..., 0, :, :]], -2)
