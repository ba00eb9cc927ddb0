r"""The feature map of linear attention, :math:`\phi(e) = |e| / |e^p| \; e^p`, of affine forms (Hypformer eq. 19): L7.

Two enclosures are made and, problem by problem, the one of smaller reach is kept.

**By parts**, where some entry stays positive: :math:`e^p` and e by L1, lengths by L3, the direction
:math:`e^p/|e^p|` by L5, times :math:`|e|` by L2. The length is at least that of the least entries.

**By its slope**, everywhere: :math:`\phi` is Lipschitz on the positive orthant with constant
:math:`p\, k^{(p-1)/(2p)}`, k the number of entries; so
:math:`\phi(e) \in \phi(e_0) + \mathrm{Lip}\,|e - e_0|\,\mathrm{Ball}`.

*Proof.* With :math:`u = e/|e|` and :math:`w = u^p/|u^p|`, the radial derivative is the unit vector w, and the
tangential one is :math:`p\, (I - w w^\top)\, \mathrm{diag}(w/u)`, orthogonal to w. So the Jacobian's norm is at most
:math:`\max(1, p \max_i w_i/u_i)`, as radial and tangential parts are orthogonal and go to orthogonal vectors.
:math:`w_i/u_i = u_i^{p-1} / |u^p|`, where :math:`|u^p| \ge k^{-(p-1)/2}` and :math:`|u^p| \ge u_i^p`: at most
:math:`\min(x^{p-1} k^{(p-1)/2}, 1/x) \le k^{(p-1)/(2p)}`, :math:`x = u_i`. The segment between two points of the
orthant stays in it, and ReLU is 1-Lipschitz. QED
"""

from __future__ import annotations

import torch

from holonomy.ops.linear_attention.reference import power_features
from holonomy.theory.affine.arithmetic.entrywise import positive_power
from holonomy.theory.affine.arithmetic.forms import Form, constant, reach, select, spread, with_ball
from holonomy.theory.affine.arithmetic.lengths import length
from holonomy.theory.affine.arithmetic.products import at_least, quotient, scale


def features(form: Form, power: float) -> Form:
    """Enclose the features of a vector, negative entries counting as zero."""
    if power == 1:
        return positive_power(form, 1.0)
    positive, powered = positive_power(form, 1.0), positive_power(form, power)
    before = form.noise.failed
    least = torch.relu(form.center - spread(form)).pow(power).norm(dim=-1, keepdim=True)
    direction = quotient(powered, length(powered), at_least(powered, least))
    parts = scale(length(positive), direction)
    unbounded = form.noise.failed & ~before
    form.noise.forgive(before)
    entries = form.center.shape[-1]
    slope = power * entries ** ((power - 1) / (2 * power))
    middle = constant(form.noise, power_features(form.center, power))
    radius = slope * reach(form)
    # An entry that stays negative gives zero.
    live = form.center + spread(form) > 0
    radius = radius * live.any(-1)
    better = ~unbounded & (reach(parts) <= radius)
    if bool(better.all()):
        return parts
    ball = with_ball(middle, torch.diag_embed(radius[:, None] * live))
    return select(better, parts, ball)
