r"""FAVOR+: softmax attention through positive random features, linear in the keys (TokenGT section 5.2, Performer).

With rows :math:`w_f` of a random projection, :math:`e^{x \cdot y}` is the mean over f of :math:`\phi_f(x) \phi_f(y)`,
:math:`\phi_f(x) = \exp(w_f \cdot x - |x|^2/2)` (Choromanski et al., ICLR 2021, eq. 5), so that

.. math:: \frac{\sum_j e^{q_i \cdot k_j} v_j}{\sum_j e^{q_i \cdot k_j}} \approx
    \frac{\sum_f \phi_f(q_i) \sum_j \phi_f(k_j) v_j}{\sum_f \phi_f(q_i) \sum_j \phi_f(k_j)} .

Functions exchange features as logarithms; each sum of their exponentials subtracts its own maximum. Axes are
``(*batch, nodes, channels)``, heads among the batch axes; a mask is boolean, ``True`` where a key is to be ignored.

:func:`pool_keys` and :func:`attend_pooled` compute the same attention for many heads over one list of rows. In float32
or float64 without autocast they take chunks of 512 rows and write each into the same few buffers, and recompute a chunk
in the backward pass. Memory is that of the rows: with 256 features in all, a half of the reference's at 1024 rows, a
third at 2048 and a seventh at 8192. A training step takes as long as the reference's at 1024 rows, 0.7 of its time at
8192 and 0.4 at 65,536. Of fewer features of rows than 2**18 the reference runs, which is faster there. Second
derivatives, and gradients of the projection, are those of the reference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from holonomy import _autograd, _parts, numerics
from holonomy._parts import Group
from holonomy._shapes import Bool, Float
from holonomy.ops.lorentz.lifted import use_chunked
from holonomy.ops.performer.causal import PerformerState, performer_attention_after
from holonomy.ops.performer.chunked import ChunkedAttention, ChunkedPooling, use_chunks
from holonomy.ops.performer.features import log_features, orthogonal_projection, redraw, root_of_scale
from holonomy.ops.performer.reference import attend_pooled_reference, pool_keys_reference
from holonomy.ops.recomputed_causal import recomputed_parts

# Rows of causal attention that are computed at once.
_CAUSAL_ROWS = 512

__all__ = ["attend_pooled", "log_features", "orthogonal_projection", "performer_attention", "pool_keys", "redraw"]


def pool_keys(
    x: Float[Tensor, "keys width"],
    weight: Float[Tensor, "width heads_dim"],
    bias: Float[Tensor, " heads_dim"],
    projection: Float[Tensor, "features dim"],
    first: int,
    last: int,
) -> tuple[Float[Tensor, "heads features"], Float[Tensor, "heads features values"]]:
    """:math:`L_f` and :math:`M_f` of each feature of each head, equations 1 and 2 of the reference."""
    if use_chunks(x, weight, bias, projection):
        top, table = _autograd.apply_function(ChunkedPooling, x, weight, bias, projection, first, last)
    else:
        top, table = pool_keys_reference(x, weight, bias, projection, first, last)
    table = table.unflatten(-1, top.shape)
    # The row of ones has summed the exponentials: L_f = top + log(sum), M_f = weighted sum / sum.
    return top.detach() + table[-1].log(), (table[:-1] / table[-1]).movedim(0, -1)


def attend_pooled(
    x: Float[Tensor, "queries width"],
    weight: Float[Tensor, "width heads_dim"],
    bias: Float[Tensor, " heads_dim"],
    projection: Float[Tensor, "features dim"],
    logs: Float[Tensor, "heads features"],
    means: Float[Tensor, "heads features out"],
    direct: Float[Tensor, "width out"],
) -> Float[Tensor, "queries out"]:
    r"""The sum of all heads at each query, equation 3 of the reference."""
    inputs = (x, weight, bias, projection, logs, means, direct)
    if use_chunks(*inputs):
        return _autograd.apply_function(ChunkedAttention, *inputs)
    return attend_pooled_reference(*inputs)


def performer_attention(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch key dim"],
    value: Float[Tensor, "*batch key values"],
    projection: Float[Tensor, "features dim"],
    mask: Bool[Tensor, "*#batch key"] | None = None,
    *,
    is_causal: bool = False,
    group: Group | None = None,
) -> Float[Tensor, "*batch query values"]:
    r"""Softmax attention with the exponential replaced by random features, in linear time and memory.

    It is computed as two softmaxes, which is the quotient above with nothing left out,

    .. math:: \sum_f \mathrm{softmax}_f(\ell_f(q_i) + L_f) \sum_j \mathrm{softmax}_j(\ell_f(k_j))\, v_j, \qquad
        L_f = \log \sum_j e^{\ell_f(k_j)},

    so that no feature is zero at all keys, however large the logits are. One maximum over the features of all keys
    would not be enough: where queries and keys have opposite directions it leaves 0/0. A row without a key is zero.
    With a group the keys and values are a part of all. With ``is_causal`` there are as many queries as keys, and each
    attends to those up to its own place (:mod:`~holonomy.ops.performer.causal`).
    """
    if key.shape[-2] == 0 and group is None:
        return numerics.zeros_of((*query.shape[:-1], value.shape[-1]), value, query, key)
    if is_causal:
        return _causal(query, key, value, projection, mask)
    root = root_of_scale(query)
    if mask is not None:
        key, value = key.masked_fill(mask[..., None], 0.0), value.masked_fill(mask[..., None], 0.0)
    # At least float32: the error of the logarithm is the relative error of a feature.
    projection = projection.to(torch.promote_types(projection.dtype, torch.float32))
    of_query = log_features(query * root, projection, of_query=True)
    # Keys in the last axis: both sums over them run along memory.
    of_key = log_features(key * root, projection).mT.contiguous()
    if group is not None:
        return _attend_all(of_query, of_key, value, mask, group)
    if mask is not None:
        # A row whose keys are all masked attends to all of them, and their values are zero: softmax of -inf is nan.
        hidden = mask & ~mask.all(-1, keepdim=True)
        of_key = of_key.masked_fill(hidden[..., None, :], -math.inf)
    total = of_key.logsumexp(-1)[..., None, :]
    averages = of_key.softmax(-1).to(value.dtype) @ value
    return (of_query + total).softmax(-1).to(value.dtype) @ averages


def _causal(query: Tensor, key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention among all rows, in chunks where they are many."""
    start = PerformerState.empty(value, projection)
    if not use_chunked(value, value.shape[-2]):
        return performer_attention_after(query, key, value, projection, mask, start)[0]

    def attend(
        state: PerformerState, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, projection: Tensor
    ) -> tuple[Tensor, PerformerState]:
        hidden = None if hidden is None else hidden.squeeze(-1)
        return performer_attention_after(query, key, value, projection, hidden, state)

    column = None if mask is None else mask[..., None]
    return recomputed_parts(attend, _CAUSAL_ROWS, start, query, key, value, column, maps=(projection,))


def _attend_all(of_query: Tensor, of_key: Tensor, value: Tensor, mask: Tensor | None, group: Group) -> Tensor:
    """The quotient, of keys that are a part of all; sums are relative to the largest logarithm of each feature."""
    lowest = torch.finfo(of_key.dtype).min / 2
    if mask is not None:
        of_key = of_key.masked_fill(mask[..., None, :], -math.inf)
    top = functional.pad(of_key.detach(), (0, 1), value=lowest).amax(-1, keepdim=True)
    wide = functional.pad(value.to(of_key.dtype), (0, 1), value=1.0)
    sums, top = _parts.scaled_total((of_key - top).exp() @ wide, top, group)
    averages, mass = sums.tensor_split([-1], -1)
    some = mass > 0
    logs = (torch.where(some, mass, 1.0).log() + top).mT
    return ((of_query + logs).softmax(-1) @ numerics.safe_div(averages, torch.where(some, mass, 0.0))).to(value.dtype)
