r"""Enclosures of softmax averages of points when queries, keys and values move: L11.

Softmax does not see a common term of its logits, and a midpoint no common factor of its weights. So with the logits
:math:`\lambda_j`, their centres :math:`\lambda_j^0`, and :math:`p = \mathrm{softmax}(\lambda^0)`, the average is the
midpoint of

.. math:: T = \sum_j p_j e^{u_j} v_j, \qquad u_j = \lambda_j - \lambda_j^0 - \sum_l p_l (\lambda_l - \lambda_l^0) .

**L11.** :math:`\sum_j p_j e^{u_j} \ge 1`, so the Lorentz norm of T is at least :math:`1/\sqrt c`.

*Proof.* :math:`\sum_j p_j u_j = 0` and Jensen's inequality; then the reversed triangle inequality. QED
So nothing is divided by the sum of weights, and the average is enclosed in every ball. What all logits have in common
has cancelled in u before anything is bounded, with sign.

The logits are convex functions of :math:`a_j = -c \langle q, k_j\rangle - 1 \ge 0` (L1): :math:`-s\, d^2`,
:math:`-s\, d`, and the linear one. With :math:`a_j = a_j^0 + \hat k_j \cdot dq + \hat q \cdot dk_j + \hat{dq} \cdot
dk_j`, the last within the product of lengths, :math:`u_j` is linear in dq and in the first group up to an interval, and
so is :math:`e^{u_j}` (L1 again). In T the terms that are linear in dq are one linear map of the query's form; intervals
and second balls of all tokens are summed by L10.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.ops.softmax_attention import Similarity
from holonomy.theory.affine.arithmetic.ellipsoids import Threat, TokenForms, weighted, with_bounded, with_first
from holonomy.theory.affine.arithmetic.entrywise import angle, chord, half_way
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, constant
from holonomy.theory.affine.arithmetic.lengths import lorentz_norm
from holonomy.theory.affine.arithmetic.products import quotient

# Beyond, exp is no number of float64 any more.
_STEEPEST = 300.0
# Where the squared Lorentzian distance is held, in float64.
_FARTHEST = 0.5 * torch.finfo(torch.float64).eps ** -0.5
# Rapidities have no derivative where points coincide.
_NEAREST = torch.finfo(torch.float64).tiny

Logits = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def softmax_average(
    query: Form, keys: TokenForms, values: TokenForms, similarity: Similarity, root: Tensor | float, threat: Threat
) -> Form:
    """The space parts of midpoints of points ``values`` by how near the ``keys`` are; ``root`` is that of c."""
    flip = torch.ones_like(keys.center[0]).index_fill(0, torch.tensor([0]), -1.0) * -(root * root)
    signed, turned = keys.center * flip, query.center * flip
    argument = query.center @ signed.T - 1
    slack = ROUNDING * (query.center.abs() @ signed.abs().T + 1)
    by_key = torch.einsum("qe,mef->qmf", turned, keys.first)
    own = by_key.new_zeros(*argument.shape, by_key.shape[-1]).index_add(1, keys.which, by_key)
    loose = torch.einsum("qe,meg->qmg", turned, keys.rest).norm(dim=-1) * (1 + ROUNDING)
    private = (root * root * query.reach()[:, None] * keys.reach + slack).index_add(1, keys.which, loose)
    moved = _support(query, signed[None], own, threat) + private

    if similarity == "lorentz_squared":
        # Farther out the layer compares points as if they lay nearer.
        farthest = (keys.center.norm(dim=-1) + keys.reach).amax()
        query.noise.fail(~(torch.maximum(query.center.norm(dim=-1) + query.reach(), farthest) < _FARTHEST))

    # The logits: steep a + shift, within half.
    function, slope = _logits(similarity, root, query.center.shape[-1] - 1)
    start = function(argument.clamp(min=0))
    lower, upper = (argument - moved).clamp(min=0), (argument + moved).clamp(min=0)
    steep, shift, half = chord(lower, upper, function, slope, half_way)
    half = half + steep.abs() * (private + slack) + 4 * ROUNDING * start.abs()
    shift = shift + steep * argument - start
    share = start.softmax(-1)

    # u, its mean taken off; what is private to all logits in their mean is one interval for all.
    along = steep[..., None] * signed
    along = along - torch.einsum("qn,qne->qe", share, along)[:, None]
    tilted = steep[..., None] * own
    private, others = (share * half).sum(-1, keepdim=True), 0.0
    if threat == "node":
        tilted = tilted - torch.einsum("qn,qnf->qf", share, tilted)[:, None]
    else:
        others = (share * tilted.norm(dim=-1)).sum(-1, keepdim=True)
    middle = shift - (share * shift).sum(-1, keepdim=True)
    radius = _support(query, along, tilted, threat) + others + half + private
    bad = ~((middle.abs() + radius).amax(-1) < _STEEPEST)
    query.noise.fail(bad)
    middle, radius = (part.masked_fill(bad[:, None], 0.0) for part in (middle, radius))
    growth, offset, loss = chord(
        middle - radius, middle + radius, torch.exp, torch.exp, lambda secant, _, __: secant.log()
    )

    at, lean = share * (offset + growth * middle), share * growth
    total = _total(query, values, lean[..., None] * along, at)
    mean = lean @ values.center
    # A logit moves the weight of its token, and through the mean of logits all weights.
    lead = (lean * steep)[..., None] * values.center - (share * steep)[..., None] * mean[:, None]
    images = lead[:, keys.which, :, None] * by_key[:, :, None] + at[:, values.which, None, None] * values.first
    total = with_first(total, images, threat)
    total = total.with_ball(mean[..., None] * (private * (1 + ROUNDING))[..., None])
    total = total.with_ball(weighted(share * loss + lean * half, values.center[None, ..., None]))
    strayed = (share * (growth * radius + loss))[:, values.which]
    total = total.with_ball(weighted(at[:, values.which].abs() + strayed, values.rest[None]))
    total = with_bounded(total, strayed, values.first[None], threat)
    floor = (1 - ROUNDING) / root
    norm = lorentz_norm(total[:1], total[1:], floor)
    return quotient(total[1:], norm * root, floor * root)


def _support(query: Form, along: Tensor, own: Tensor, threat: Threat) -> Tensor:
    """How far each number ``along . dq + own . d`` is from zero at most, ``(query, token)``."""
    by_query = along @ query.gradient
    if threat == "node" and by_query.shape[-1]:
        total = (by_query + own).norm(dim=-1)
    else:
        total = by_query.norm(dim=-1) + own.norm(dim=-1)
    for group, columns in query.parts():
        part = along @ columns
        total = total + (part.norm(dim=-1) if group.ball else part.abs().sum(-1))
    return (total + (along.abs() @ query.box[..., None]).squeeze(-1)) * (1 + ROUNDING)


def _total(query: Form, values: TokenForms, along: Tensor, at: Tensor) -> Form:
    """The centre, and what is linear in the query."""
    weight = values.center.mT @ along
    middle = at @ values.center - (weight @ query.center[..., None]).squeeze(-1)
    return query.linear(weight) + constant(query.noise, middle)


def _logits(similarity: Similarity, root: Tensor | float, channels: int) -> Logits:
    """The logit and its slope, as a function of the hyperbolic cosine less one."""
    scale = channels**-0.5
    if similarity == "lorentz_squared":
        slope = -2 * scale / root**2
        return lambda a: slope * a, lambda a: slope * torch.ones_like(a)
    if similarity == "geodesic_squared":
        size = scale / root**2
        return lambda a: -size * angle(a).square(), lambda a: -2 * size / numerics.sinhc(angle(a))
    size = scale / root
    return lambda a: -size * angle(a), lambda a: -size * (a * (a + 2)).clamp(min=_NEAREST).rsqrt()
