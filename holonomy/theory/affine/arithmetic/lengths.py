r"""Lengths and Lorentz norms of affine forms by two exact identities: L3 and L4.

**L3.** Let :math:`\ell = y \cdot y_0 / |y_0|` linearise :math:`|y|` at :math:`y_0`, and P project onto the complement
of :math:`y_0`. Then

.. math:: |y| - \ell = \frac{dy^\top P\, dy}{|y| + \ell} \ge 0, \qquad dy = y - y_0 .

*Proof.* :math:`|y|^2 - \ell^2 = y^\top P y = dy^\top P\, dy`, as :math:`P y_0 = 0`; Cauchy-Schwarz gives the sign. QED
So the remainder is at most :math:`|P\,dy|^2` over the least :math:`|y| + \ell`, and, whatever that is, at most
:math:`2 |dy|`. Motion along :math:`y_0` costs nothing. The time coordinate :math:`\sqrt{|y|^2 - 1/\kappa}` is the
length of y with one more entry.

**L4.** For timelike Z = (T, Y), with :math:`L = \sqrt{T^2 - |Y|^2}`, a timelike u of norm one and
:math:`\ell = -\langle u, Z\rangle`,

.. math:: \ell - L = \frac{|Z_\perp|^2}{L + \ell} \ge 0 ,

:math:`Z_\perp` the part of Z that is Lorentz-orthogonal to u; its length is that of the space part of Z in the rest
frame of u, :math:`Y - u_s\, T + u_s (u_s \cdot Y)/(1 + u_t)`.

*Proof.* :math:`Z = \ell u + Z_\perp` and :math:`\langle Z, Z\rangle = -\ell^2 + |Z_\perp|^2`; the complement of a
timelike vector is spacelike. The boost to the rest frame keeps the form and sends u to (1, 0). QED
With :math:`u = Z_0/L_0` nothing but motion counts. A centre :math:`Z_0` need not be timelike, though Z is: then u has
the direction of its space part, and what :math:`Z_0` has across u counts, too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, apart, join, linear, reach, spread


def length(form: Form) -> Form:
    """L3: the length of a vector, a form of one entry."""
    center = form.center
    size = center.norm(dim=-1, keepdim=True)
    unit = center / torch.where(size > 0, size, 1.0)
    first = linear(form, unit[:, None])
    across = replace(
        form,
        columns=form.columns - unit[..., None] * (unit[:, None] @ form.columns),
        box=form.box * (1 + ROUNDING) + ROUNDING * form.columns.abs().sum(-1),
    )
    radius = spread(form)
    nearest = (center.abs() - radius).clamp(min=0).norm(dim=-1)
    denominator = nearest + (first.center - spread(first)).squeeze(-1)
    whole = reach(form)
    # The difference of |y| and its linearisation is 2-Lipschitz, and zero at the centre.
    far = 2 * whole
    near = reach(across).square() / torch.where(denominator > 0, denominator, 1.0)
    half = torch.where(denominator > 0, torch.minimum(near, far), far)[:, None] * ((1 + ROUNDING) / 2)
    return apart(first, half, half + ROUNDING * size)


def lorentz_norm(time: Form, space: Form, low: Tensor | float) -> Form:
    """L4: the Lorentz norm of a timelike vector that is known to be at least ``low`` > 0, a form of one entry."""
    t, y = time.center, space.center
    size = y.norm(dim=-1, keepdim=True)
    norm = numerics.root(((t - size) * (t + size)).clamp(min=0))
    norm = torch.maximum(norm, torch.as_tensor(low, dtype=norm.dtype))
    us = y / norm
    # t / norm where the centre is a vector of that norm; where it is not, u is of norm one all the same.
    ut = (1 + us.square().sum(-1, keepdim=True)).sqrt()
    both = join(time, space)
    first = linear(both, torch.cat([ut, -us], dim=-1)[:, None])
    eye = torch.eye(y.shape[-1], dtype=y.dtype)
    boost = torch.cat([-us[..., None], eye + us[..., None] * us[:, None] / (1 + ut)[..., None]], dim=-1)
    across = linear(both, boost)
    # Zero but for rounding where u is the centre over its norm.
    extra = across.center.norm(dim=-1)
    least = torch.as_tensor(low, dtype=norm.dtype) + torch.maximum(
        first.center - spread(first), torch.as_tensor(low, dtype=norm.dtype)
    )
    half = ((reach(across) + extra).square()[:, None] / least) * ((1 + ROUNDING) / 2)
    # The norm of u is one up to rounding of the squares of its entries.
    return apart(first, -half, half + ROUNDING * 2 * ut.square() * (first.center.abs() + spread(first)))
