r"""Hypformer's linear attention from points to points, with its projections: eqs. 14-19 in one function.

Axes: ``(*batch, nodes, channels)``. A mask is boolean, ``True`` at padding, whose rows are zero. The plain definition
is made of :mod:`~holonomy.ops.linear_attention.reference`; the fast form computes some rows at a time
(:mod:`~holonomy.ops.linear_attention.chunked`) and keeps nothing that grows with the nodes but its result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from holonomy._autograd import apply_function
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.rows import rows_at_once
from holonomy.ops.heads import merge_heads, without_padding
from holonomy.ops.linear_attention.chunked import Options, RecomputedAttention
from holonomy.ops.linear_attention.reference import linear_attention, power_features
from holonomy.ops.lorentz.lifted import use_chunked

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["linear_attention_block", "linear_attention_block_reference"]


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
) -> Float[Tensor, "*batch nodes outputs"]:
    """The definition of :func:`linear_attention_block`, with the same arguments."""
    maps = zip(weight.chunk(3), bias.chunk(3), (True, False, False), strict=True)
    # Features before heads become batch axes: rows of channels are contiguous there.
    query, key, value = (
        power_features(functional.linear(x, w, b).unflatten(-1, (heads, -1)), power, unit=unit) for w, b, unit in maps
    )
    average = merge_heads(
        linear_attention(
            query.transpose(-3, -2),
            key.transpose(-3, -2),
            value.transpose(-3, -2),
            None if mask is None else mask[..., None, :],
        )
    )
    space = average + functional.linear(value.flatten(-2), residual_weight, residual_bias)
    space = without_padding(space, mask)
    return space if curvature is None else hyperboloid.lift(space, curvature)


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
    rows: int | None = None,
) -> Float[Tensor, "*batch nodes outputs"]:
    r"""Linear attention with its linear maps, residual and time coordinate.

    .. math::
        Q, K, V = \phi(x W_q^\top + b_q), \phi(x W_k^\top + b_k), \phi(x W_v^\top + b_v), \qquad
        z = \frac{Q (K^\top V)}{Q (K^\top 1)} + V W_r^\top + b_r

    per head, with :math:`\phi` of :func:`~holonomy.ops.linear_attention.reference.power_features`, and z lifted to
    the hyperboloid where a curvature is given. Rows without weight are treated as in
    :func:`~holonomy.ops.linear_attention.reference.linear_attention`.

    The fast form makes queries, keys and values of some rows at a time, and again on the way back. Gradients of
    gradients are right: where autograd is asked for them, the plain definition is differentiated, at its price.
    ``torch.func.grad`` works, ``vmap`` does not. The plain definition runs where nodes are few, below 2048, under
    ``torch.compile``, under autocast, and in other dtypes than float32 and float64.
    """
    tensors = (x, weight, bias, residual_weight, residual_bias, curvature, mask)
    if rows is None and not use_chunked(x, x.shape[-2]):
        return linear_attention_block_reference(*tensors, heads=heads, power=power)
    rows = rows_at_once(x, residual_bias.shape[0]) if rows is None else rows
    graphs = x.reshape(-1, *x.shape[-2:])
    masks = None if mask is None else mask.reshape(-1, mask.shape[-1])
    options = Options(heads, power, rows, linear_attention_block_reference)
    out = apply_function(RecomputedAttention, graphs, masks, *tensors[1:6], options)[0]
    return out.reshape(*x.shape[:-1], -1)
