r"""The feature map of linear attention, :math:`\phi(e) = |e| / |e^p| \; e^p`, of affine forms (Hypformer eq. 19): L7.

Two enclosures are made and, problem by problem, the one of smaller reach is kept.

**By direction**, where e has a positive length: :math:`u = e/|e|` by L3 and L5, then :math:`u^p` by L1,
:math:`u^p/|u^p|` by L3 and L5, and times :math:`|e|` by L2. The length of e is at least that of the least entries, and
at least that at the centre less what moves entries that may be positive. As |u| is one, :math:`|u^p|` is at least
:math:`k^{(1-p)/2}`, k the number of entries that may be positive (means of powers): of the two divisors only the
first, which is of degree one in e, may come near zero.

**By its slope**, everywhere: :math:`\phi` is Lipschitz on the positive orthant with constant
:math:`p\, k^{(p-1)/(2p)}`, so :math:`\phi(e) \in \phi(e_0) + \mathrm{Lip}\,|e - e_0|\,\mathrm{Ball}`.

*Proof.* With :math:`u = e/|e|` and :math:`w = u^p/|u^p|`, the radial derivative is the unit vector w, and the
tangential one is :math:`p\, (I - w w^\top)\, \mathrm{diag}(w/u)`, orthogonal to w. So the Jacobian's norm is at most
:math:`\max(1, p \max_i w_i/u_i)`, as radial and tangential parts are orthogonal and go to orthogonal vectors.
:math:`w_i/u_i = u_i^{p-1} / |u^p|`, where :math:`|u^p| \ge k^{-(p-1)/2}` and :math:`|u^p| \ge u_i^p`: at most
:math:`\min(x^{p-1} k^{(p-1)/2}, 1/x) \le k^{(p-1)/(2p)}`, :math:`x = u_i`. The segment between two points of the
orthant stays in it, and ReLU is 1-Lipschitz. QED
"""

from __future__ import annotations

import torch

from holonomy.layers import HypLinearAttention
from holonomy.ops.linear_attention.reference import power_features
from holonomy.theory.affine.arithmetic.entrywise import positive_power
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, constant, select
from holonomy.theory.affine.arithmetic.lengths import length
from holonomy.theory.affine.arithmetic.products import at_least, quotient, scale
from holonomy.theory.affine.points import Scaled, transformed


def split(form: Form, heads: int) -> list[Form]:
    """The entries of each head."""
    size = form.center.shape[-1] // heads
    return [form[size * head : size * (head + 1)] for head in range(heads)]


def values_of(layer: HypLinearAttention, point: Scaled) -> list[Form]:
    """The values of each head, times the scale of the point."""
    shrunk = transformed(layer.value, point) * (-layer.log_scale.double()).exp()
    return [features(form, layer.power) for form in split(shrunk, layer.heads)]


def features(form: Form, power: float) -> Form:
    """Enclose the features of a vector, negative entries counting as zero."""
    positive = positive_power(form, 1.0)
    if power == 1:
        return positive
    before, lower = form.noise.failed, torch.relu(form.center - form.spread())
    # An entry that stays negative gives zero.
    live = (form.center + form.spread() > 0).to(lower.dtype)
    entries, moved = live.sum(-1, keepdim=True), (form * live).reach()[:, None] * (1 + ROUNDING)
    size, center = length(positive), torch.relu(form.center).norm(dim=-1, keepdim=True)
    least = torch.maximum(lower.norm(dim=-1, keepdim=True), center - moved)
    powered = positive_power(quotient(positive, size, at_least(positive, least)), power)
    low = entries.clamp(min=1) ** ((1 - power) / 2) * (1 - ROUNDING)
    parts = scale(size, quotient(powered, length(powered), low))
    unbounded = form.noise.failed & ~before
    form.noise.failed = before
    middle = constant(form.noise, power_features(form.center, power))
    radius = power * entries ** ((power - 1) / (2 * power)) * moved
    better = ~unbounded & (parts.reach() <= radius.squeeze(1))
    if bool(better.all()):
        return parts
    ball = middle.with_ball(torch.diag_embed(radius * live))
    return select(better, parts, ball)
