r"""Hypformer's linear attention from points to points, with its projections: eqs. 14-19 in one function.

Axes: ``(*batch, nodes, channels)``. A mask is boolean, ``True`` at padding, whose rows are zero. The reference
is made of :mod:`~holonomy.ops.linear_attention.reference`; the fast form computes some rows at a time
(:mod:`~holonomy.ops.linear_attention.chunked`) and keeps two numbers a head and node beside its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import numerics
from holonomy._autograd import apply_function
from holonomy._parts import Group
from holonomy._shapes import Bool, Float
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.midpoints import midpoint_of_sum
from holonomy.ops.heads import merge_heads, without_padding
from holonomy.ops.linear_attention.causal import LinearState, causal_linear_attention
from holonomy.ops.linear_attention.chunked import Options, RecomputedAttention
from holonomy.ops.linear_attention.reference import linear_attention, power_features
from holonomy.ops.lorentz.lifted import rows_of_chunk, use_chunked
from holonomy.ops.recomputed_causal import recomputed_parts

# Rows of causal attention that are computed at once.
_CAUSAL_ROWS = 2048


def linear_average(
    query: Float[Tensor, "*batch query channels"],
    key: Float[Tensor, "*batch key channels"],
    value: Float[Tensor, "*batch key values"],
    mask: Bool[Tensor, "*#batch key"] | None = None,
    state: LinearState | None = None,
    *,
    curvature: Float[Tensor, "*one"] | None = None,
    group: Group | None = None,
    unit: bool = False,
) -> tuple[Float[Tensor, "*batch query values"], LinearState | None]:
    """Averages of the values with the weights of linear attention: of all keys, or with a state of those up to each.

    With a curvature Lorentzian midpoints (Hypformer eq. 4) of the points above the values, summed in float64.
    """
    dtype = value.dtype
    if curvature is not None:
        query, key = numerics.widen(query), numerics.widen(key)
        value = hyperboloid.lift(numerics.widen(value), curvature)
    if state is None:
        mean = linear_attention(query, key, value, mask, group, unit=unit)
    else:
        mean, state = causal_linear_attention(query, key, value, mask, state)
    if curvature is None:
        return mean, state
    some = (mean[..., :1] != 0).to(mean.dtype)  # of nan, too
    return numerics.narrow(midpoint_of_sum(mean, some, curvature, torch.finfo(mean.dtype).eps), dtype), state


def linear_attention_block_reference(
    x: Float[Tensor, "*batch nodes inputs"],
    weight: Float[Tensor, "three_dims inputs"],
    bias: Float[Tensor, " three_dims"],
    residual_weight: Float[Tensor, "dim dim"],
    residual_bias: Float[Tensor, " dim"],
    curvature: Float[Tensor, "*one"] | None = None,
    mask: Bool[Tensor, "*batch nodes"] | None = None,
    *,
    heads: int,
    power: float,
    is_causal: bool = False,
) -> Float[Tensor, "*batch nodes outputs"]:
    """The reference of :func:`linear_attention_block`, with the same arguments."""
    state = causal_start(x, residual_bias.shape[0], heads) if is_causal else None
    maps = weight, bias, residual_weight, residual_bias, curvature
    return linear_attention_block_after(x, mask, state, *maps, heads=heads, power=power)[0]


def causal_start(x: Float[Tensor, "*batch nodes inputs"], dim: int, heads: int) -> LinearState:
    """The state before the first row."""
    return LinearState.empty(x.new_empty(*x.shape[:-2], heads, 0, dim // heads), dim // heads)


def linear_attention_block_after(
    x: Float[Tensor, "*batch nodes inputs"],
    mask: Bool[Tensor, "*batch nodes"] | None,
    state: LinearState | None,
    weight: Float[Tensor, "three_dims inputs"],
    bias: Float[Tensor, " three_dims"],
    residual_weight: Float[Tensor, "dim dim"],
    residual_bias: Float[Tensor, " dim"],
    curvature: Float[Tensor, "*one"] | None,
    *,
    heads: int,
    power: float,
) -> tuple[Float[Tensor, "*batch nodes outputs"], LinearState | None]:
    """Rows of causal attention after a state, and the state after them; attention among all rows without one."""
    maps = zip(weight.chunk(3), bias.chunk(3), (True, False, False), strict=True)
    # Features before heads become batch axes: rows of channels are contiguous there.
    query, key, value = (
        power_features(functional.linear(x, w, b).unflatten(-1, (heads, -1)), power, unit=unit) for w, b, unit in maps
    )
    query, key, by_head = (part.transpose(-3, -2) for part in (query, key, value))
    hidden = None if mask is None else mask[..., None, :]
    average, state = linear_average(query, key, by_head, hidden, state, unit=True)
    space = merge_heads(average) + functional.linear(value.flatten(-2), residual_weight, residual_bias)
    space = without_padding(space, mask)
    return space if curvature is None else hyperboloid.lift(space, curvature), state


def linear_attention_block(
    x: Float[Tensor, "*batch nodes inputs"],
    weight: Float[Tensor, "three_dims inputs"],
    bias: Float[Tensor, " three_dims"],
    residual_weight: Float[Tensor, "dim dim"],
    residual_bias: Float[Tensor, " dim"],
    curvature: Float[Tensor, "*one"] | None = None,
    mask: Bool[Tensor, "*batch nodes"] | None = None,
    *,
    heads: int,
    power: float,
    is_causal: bool = False,
) -> Float[Tensor, "*batch nodes outputs"]:
    r"""Linear attention with its linear maps, residual and time coordinate.

    .. math::
        Q, K, V = \phi(x W_q^\top + b_q), \phi(x W_k^\top + b_k), \phi(x W_v^\top + b_v), \qquad
        z = \frac{Q (K^\top V)}{Q (K^\top 1)} + V W_r^\top + b_r

    per head, z lifted to the hyperboloid where a curvature is given. The fast form computes some rows at a time, and
    again in the backward pass; second derivatives are those of the reference. ``torch.func.grad`` works, ``vmap`` does
    not. The reference runs below 2048 nodes, compiled, under autocast, and in other dtypes than float32 and float64.
    """
    tensors = (x, weight, bias, residual_weight, residual_bias, curvature, mask)
    if not use_chunked(x, x.shape[-2]):
        return linear_attention_block_reference(*tensors, heads=heads, power=power, is_causal=is_causal)
    graphs = x.reshape(-1, *x.shape[-2:])
    masks = None if mask is None else mask.reshape(-1, mask.shape[-1])
    if is_causal:

        def attend(state: LinearState, x: Tensor, hidden: Tensor | None, *maps: Any) -> tuple[Tensor, Any]:
            hidden = None if hidden is None else hidden.squeeze(-1)
            return linear_attention_block_after(x, hidden, state, *maps, heads=heads, power=power)

        column = None if masks is None else masks[..., None]
        start = causal_start(graphs, residual_bias.shape[0], heads)
        out = recomputed_parts(attend, _CAUSAL_ROWS, start, graphs, column, maps=tensors[1:6])
    else:
        # Queries, keys, values, their features, and those of keys and values once more, squared.
        rows = rows_of_chunk(x, 8 * residual_bias.shape[0])
        options = Options(heads, power, rows, linear_attention_block_reference)
        out = apply_function(RecomputedAttention, graphs, masks, *tensors[1:6], options)[0]
    return out.reshape(*x.shape[:-1], -1)
