r"""Enclosures of linear attention where queries, keys and values of all tokens move: L12.

The average does not see a factor of the query, so the weights at the centre are taken to sum to one. With
:math:`w_j = q \cdot k_j` and Z the average at the centre,

.. math:: \bar v = Z + \frac{\sum_j w_j (v_j - Z)}{\sum_j w_j} ,

where the numerator is zero at the centre. In it

.. math:: (q \cdot k_j)(v_j - Z) = (q \cdot k_j^0)(v_j^0 - Z) + (q_0 \cdot dk_j)(v_j^0 - Z) + w_j^0\, dv_j
    + (dq \cdot dk_j)(v_j^0 - Z) + (w_j - w_j^0)\, dv_j .

The first term is linear in q: summed over j one matrix. The next two are linear in what moves the tokens. The last two
are of second order: :math:`v_j^0 - Z` and :math:`dv_j` times numbers of which only bounds are known, from
:math:`|w_j - w_j^0| \le |dq \cdot k_j^0| + |q_0 \cdot dk_j| + |dq \cdot dk_j|`, a product with dq being bounded by
lengths and, as many entries of q are zero, entry by entry. Balls of all tokens are summed by L10, and the quotient is
L5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy._shapes import Float
from holonomy.theory.affine.arithmetic.ellipsoids import Threat, TokenForms, weighted, with_bounded, with_first
from holonomy.theory.affine.arithmetic.entrywise import inverse
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, constant, select
from holonomy.theory.affine.arithmetic.lengths import lorentz_norm
from holonomy.theory.affine.arithmetic.products import quotient, scale


def linear_average(
    query: Form, keys: TokenForms, values: TokenForms, root: Tensor | float | None, threat: Threat
) -> Form:
    """Averages of values with weights q . k, or their midpoints where the root of c is given; zero where q is."""
    noise = query.noise
    # Of tokens that have failed it is nan, and not zero.
    most = keys.center.sum(0).abs() + keys.first.norm(dim=-1).sum(0) + keys.rest.norm(dim=-1).sum(0)
    silent = ((query.center + query.spread() <= 0) | (most <= 0)).all(-1)
    mass = query.center @ keys.center.sum(0)
    noise.fail(~silent & ~(mass > 0))
    query = query * (1 / torch.where(mass > 0, mass, 1.0))[:, None]
    weight = query.center @ keys.center.T
    middle = weight @ values.center
    offset = values.center - middle[:, None]

    by_key = torch.einsum("qk,mkf->qmf", query.center, keys.first)
    loose = torch.einsum("qk,mkg->qmg", query.center, keys.rest).norm(dim=-1) * (1 + ROUNDING)
    shared = _products(query, keys.first.norm(dim=-1), keys.stretch[keys.which])
    private = _products(query, keys.rest.norm(dim=-1), keys.loose[keys.which]) + loose
    strayed = _products(query, keys.center[keys.which].abs(), keys.center[keys.which].norm(dim=-1))
    strayed = strayed + by_key.norm(dim=-1) * (1 + ROUNDING) + shared + private
    # Linear in the query, and zero at the centre but for rounding.
    top = query.linear(offset.mT @ keys.center)
    top = Form(noise, torch.zeros_like(top.center), top.columns, top.box).with_box(2 * top.center.abs())
    images = offset[:, keys.which, :, None] * by_key[:, :, None]
    # Keys and values move together.
    images = images + weight[:, values.which, None, None] * values.first
    top = with_first(top, images, threat)
    offset = offset[:, keys.which, :, None]
    top = with_bounded(top.with_ball(weighted(private, offset)), shared, offset, threat)
    top = top.with_ball(weighted(weight[:, values.which].abs() + strayed, values.rest[None]))
    top = with_bounded(top, strayed, values.first[None], threat)

    bottom = query.linear(keys.center.sum(0)[None])
    bottom = with_first(bottom, by_key[:, :, None], threat)
    shared = shared.norm(dim=-1) if threat == "frobenius" else shared.sum(-1)
    bottom = bottom.with_box((private.sum(-1) + shared)[:, None] * (1 + ROUNDING))
    bottom = select(silent, constant(noise, torch.ones_like(bottom.center)), bottom)
    average = constant(noise, middle) + scale(inverse(bottom), top)
    if root is not None:
        # The mean of points has a Lorentz norm of 1/k at least.
        norm = lorentz_norm(average[:1], average[1:], (1 - ROUNDING) / root)
        average = quotient(average[1:], norm * root, 1 - ROUNDING)
    return select(silent, constant(noise, torch.zeros_like(average.center)), average)


def _products(query: Form, entries: Float[Tensor, "token entry"], lengths: Float[Tensor, " token"]) -> Tensor:
    """The product of what moves the query with vectors of such entries and lengths, at most ``(query, token)``."""
    by_entry = query.spread() @ entries.T
    return torch.minimum(by_entry, query.reach()[:, None] * lengths) * (1 + ROUNDING)
