r"""Simplicial attention with all logits stored (Simplicial algorithm 2).

With features :math:`f_{qh} = \sum_r l^r_q * r^r_h` of a query and a first key, :math:`t` of a tuple of other keys, and
values :math:`u_h` of the first key, :math:`w_t` of the others (their entrywise product),

.. math::

    \ell_{qht} &= f_{qh} \cdot t_t &\quad (1) \\
    m_q &= \log \textstyle\sum_{ht} e^{\ell_{qht}} &\quad (2) \\
    o_q &= \textstyle\sum_h u_h * \sum_t e^{\ell_{qht} - m_q} w_t &\quad (3)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from holonomy.ops.simplicial_attention.logits import Form, first_key_terms, other_keys_features
from holonomy.ops.simplicial_attention.simplexes import Simplexes, Tile


class Factors(NamedTuple):
    """Of logits ``(left[:, :, :, None] * right[:, :, None]).sum(0) @ other.mT`` and values ``value * other_value``."""

    left: Tensor  # (terms, batch, queries, features), the scale included
    right: Tensor  # (terms, batch, first_keys, features)
    other: Tensor  # (batch, others, features)
    value: Tensor  # (batch, first_keys, channels)
    other_value: Tensor  # (batch, others, channels)


def factors_of(
    keys: Sequence[Tensor], values: Sequence[Tensor], simplexes: Simplexes, *, form: Form, scale: float
) -> Factors:
    """The factors of first keys and of tuples of other keys."""
    order, batch = simplexes.order, simplexes.batch
    keys = [key.expand(*batch, -1, -1).flatten(0, -3) if batch else key[None] for key in keys]
    values = [value.expand(*batch, -1, -1).flatten(0, -3) if batch else value[None] for value in values]
    terms = first_key_terms(keys[0] * scale, keys[1], order=order, form=form)
    if order == 1:
        # The one first key is a dummy, and the keys are the others.
        left = torch.cat([term for term, _ in terms], -1)
        other = torch.cat([term for _, term in terms], -1)
        return Factors(
            left[None], torch.ones_like(left[None, :, :1]), other, torch.ones_like(values[0][:, :1]), values[0]
        )
    other = other_keys_features(_crossed(keys[2:]), order=order, form=form).flatten(1, -2)
    other_value = reduce(torch.mul, _crossed(values[1:])).flatten(1, -2)
    if simplexes.order_of_others is not None:
        other, other_value = other[:, simplexes.order_of_others], other_value[:, simplexes.order_of_others]
    left, right = (torch.stack(sides) for sides in zip(*terms, strict=True))
    return Factors(left, right, other, values[0], other_value)


def factors_within(f: Factors, tile: Tile) -> Factors:
    """Those of the keys in a tile of all queries: a window leaves few of those that lie before the first query."""
    first_keys, others = tile.first_keys, tile.others
    return Factors(
        f.left, f.right[:, :, first_keys], f.other[:, others], f.value[:, first_keys], f.other_value[:, others]
    )


def _crossed(factors: Sequence[Tensor]) -> list[Tensor]:
    """Each ``(batch, n_m, d)`` on an axis of its own, so that they broadcast to the list of all tuples."""
    batch, channels = factors[0].shape[0], factors[0].shape[-1]
    several = len(factors)
    return [
        factor.reshape(batch, *(factor.shape[1] if axis == own else 1 for axis in range(several)), channels)
        for own, factor in enumerate(factors)
    ]


def simplex_weights(f: Factors, there: Tensor | None = None, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weights ``(batch, queries, first_keys, others)`` of equation 3, and the log masses of equation 2."""
    features = (f.left[:, :, :, None] * f.right[:, :, None]).sum(0)
    shape = (*features.shape[:-1], f.other.shape[1])
    logits = rows_times(features, f.other.mT)
    if bias is not None:
        # Masked as well: the gradient of softmax at a row of -inf is nan.
        logits, listed = logits + bias, ~bias.isneginf()
        there = listed if there is None else there & listed
    if there is not None:
        logits = logits.masked_fill(~there, -torch.inf)
    logits = logits.flatten(2)
    if there is None:
        return logits.softmax(-1).reshape(shape), logits.logsumexp(-1)
    none = logits.isneginf().all(-1)  # the gradients of a row of -inf are nan; its weights are zero
    mass = logits.masked_fill(none[..., None], 0.0).logsumexp(-1)
    weights = (logits - mass[..., None]).exp()
    return weights.reshape(shape), mass.masked_fill(none, -torch.inf)


def simplicial_attention_reference(
    f: Factors, there: Tensor | None = None, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The averages and the log masses of algorithm 2, with all logits stored."""
    weights, mass = simplex_weights(f, there, bias=bias)
    return (rows_times(weights, f.other_value) * f.value[:, None]).sum(2), mass


def rows_times(rows: Tensor, matrix: Tensor) -> Tensor:
    """``(batch, queries, first_keys, x) @ (batch, x, y)``."""
    return (rows.flatten(1, 2) @ matrix).unflatten(1, rows.shape[1:3])
