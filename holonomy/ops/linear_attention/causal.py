r"""Causal linear attention: the average of Hypformer eq. 16 over the keys up to each query.

.. math:: z_i = \frac{q_i S_i}{q_i s_i}, \qquad
    S_i = \sum_{j \le i} k_j v_j^\top, \quad s_i = \sum_{j \le i} k_j

Rows come in chunks. Inside one the weights :math:`q_i \cdot k_j` are a lower triangle; what lies before it enters by
its sums, which are those of earlier chunks, times a lower triangle of scales. Time and memory are linear in the rows.

No sum overflows, and no later key has a say: with :math:`m_j` the largest entry of key j,
:math:`M_i = \max_{j \le i} m_j` and :math:`N_i` the keys up to i, sums are held divided by :math:`N_i M_i`, which
cancels in the quotient. Every factor on the way, as :math:`m_j / M_i`, is at most one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd, numerics
from holonomy._shapes import Bool, Float
from holonomy.ops.linear_attention.reference import held, product, quotient
from holonomy.ops.recomputed_causal import part_by_part

# Rows of a chunk, whose weights are a matrix, and chunks at once, whose scales are one.
_CHUNK, _CHUNKS = 32, 64


class LinearState(NamedTuple):
    """What linear attention keeps of the tokens so far; batch axes first, in each of its tensors."""

    sums: Float[Tensor, "*batch channels values_plus_1"]  # sum_j k_j (v_j, 1), over the scale
    largest: Float[Tensor, "*batch 1 1"]  # the largest entry of a key; times ``tokens`` it is the scale
    tokens: Float[Tensor, "*batch 1 1"]  # their number

    @classmethod
    def empty(cls, key: Float[Tensor, "*batch rows channels"], values: int) -> LinearState:
        """The state before the first token."""
        *batch, _, channels = key.shape
        zero = key.new_zeros(*batch, 1, 1)
        return cls(key.new_zeros(*batch, channels, values + 1), zero, zero)


# A state holds tensors alone, so that torch.load(weights_only=True) may make one.
torch.serialization.add_safe_globals([LinearState])


def causal_linear_attention(
    query: Float[Tensor, "*batch rows channels"],
    key: Float[Tensor, "*batch rows channels"],
    value: Float[Tensor, "*batch rows values"],
    mask: Bool[Tensor, "*#batch rows"] | None = None,
    state: LinearState | None = None,
) -> tuple[Float[Tensor, "*batch rows values"], LinearState]:
    """Average the values of the keys up to each query, and of those in a state; zero where all weights are."""
    # As zero counts what is less than 1e-19 in float32 (the root of the smallest number) of the largest query entry
    # times the largest key entry so far, times the number of key entries so far.
    dtype = value.dtype
    if dtype in (torch.bfloat16, torch.float16):  # in which no long sum has digits
        with torch.autocast(_autograd.autocast_device(value), enabled=False):
            mixed, after = causal_linear_attention(query.float(), key.float(), value.float(), mask, state)
            return mixed.to(dtype), after
    if mask is not None:
        key = key.masked_fill(mask[..., None], 0.0)
        value = value.masked_fill(mask[..., None], 0.0)
    if state is None:
        state = LinearState.empty(key, value.shape[-1])
    if key.shape[-2] == 0:
        return numerics.zeros_of(value.shape, value, query, key), state
    sizes = numerics.positive(key.detach().amax(-1, keepdim=True))
    key, value = held(key) / sizes, functional.pad(value, (0, 1), value=1.0)
    query = held(query) / numerics.power_of_two(numerics.positive(query.detach().amax(-1, keepdim=True)))
    return part_by_part(_attend, _CHUNK * _CHUNKS, state, query, key, value, sizes)


def linear_attention_weights(
    query: Float[Tensor, "*batch query channels"],
    key: Float[Tensor, "*batch key channels"],
    mask: Bool[Tensor, "*#batch key"] | None = None,
    *,
    is_causal: bool = False,
) -> Float[Tensor, "*batch query key"]:
    """What the values are averaged with, all pairs of them."""
    if query.dtype in (torch.bfloat16, torch.float16):  # in which no long sum has digits
        with torch.autocast(_autograd.autocast_device(query), enabled=False):
            return linear_attention_weights(query.float(), key.float(), mask, is_causal=is_causal).to(query.dtype)
    if mask is not None:
        key = key.masked_fill(mask[..., None], 0.0)
    keys, channels = key.shape[-2:]
    if keys == 0:
        return numerics.zeros_of((*query.shape[:-1], 0), query, key)
    sizes = numerics.positive(key.amax(-1, keepdim=True).detach())
    largest, count = sizes.amax(-2, keepdim=True), sizes.new_tensor(keys)
    if is_causal:
        largest, count = sizes.cummax(-2).values, torch.arange(1, keys + 1, device=key.device)[:, None].to(key.dtype)
    query = held(query) / numerics.power_of_two(numerics.positive(query.detach().amax(-1, keepdim=True)))
    pairs = (query / (count * channels)) @ (held(key) / sizes).mT * (sizes.mT / largest)
    pairs = pairs.tril() if is_causal else pairs
    return quotient(pairs, pairs.sum(-1, keepdim=True))


def _attend(state: LinearState, query: Tensor, key: Tensor, value: Tensor, sizes: Tensor) -> tuple[Tensor, LinearState]:
    """Some chunks, of keys that were divided by their ``sizes``, after a state."""
    rows, channels = key.shape[-2:]
    chunk = min(rows, _CHUNK)
    # Rows without a key at the end change nothing before it, and no sum.
    shape, more = (-1, chunk), -rows % chunk
    query, key, value, sizes = (functional.pad(x, (0, 0, 0, more)) for x in (query, key, value, sizes))
    largest = torch.maximum(sizes.cummax(-2).values, state.largest).unflatten(-2, shape)
    place = torch.arange(1, rows + more + 1, device=key.device, dtype=key.dtype).clamp(max=rows)
    count = (state.tokens + place[:, None]).unflatten(-2, shape)
    query, key, value, sizes = (x.unflatten(-2, shape) for x in (query, key, value, sizes))
    query = query / (count * channels)
    # Of each chunk the sums, over the scale at its end, then those of all chunks up to it.
    scale = largest[..., -1:, :], count[..., -1:, :]
    added = product((key * (sizes / scale[0] / scale[1])).mT, value)
    first = state.sums[..., None, :, :]
    scales = [torch.cat([x, y.squeeze(-1)], -2) for x, y in zip((state.largest, state.tokens), scale, strict=True)]
    carried = ((scales[0].mT / scales[0][..., 1:, :]) * (scales[1].mT / scales[1][..., 1:, :])).tril(1)
    sums = (carried @ torch.cat([first, added], -3).flatten(-2)).unflatten(-1, added.shape[-2:])
    earlier = torch.cat([first, sums[..., :-1, :, :]], -3)
    before = [x[..., :-1, :, None] for x in scales]
    inside = (query @ key.mT) * (sizes.mT / largest).tril()
    total = product(inside, value) + product(query, earlier) * (before[0] / largest * before[1])
    mixed = quotient(*total.tensor_split([-1], -1)).flatten(-3, -2)
    return mixed[..., :rows, :], LinearState(sums[..., -1, :, :], scales[0][..., -1:, :], scales[1][..., -1:, :])
