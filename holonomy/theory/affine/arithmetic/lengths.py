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
the direction of its space part, and what :math:`Z_0` has across u counts, too. As :math:`L^2 = \ell^2 - |Z_\perp|^2`,
L is at least :math:`\sqrt{\ell^2 - |Z_\perp|^2}` for the least :math:`\ell` and the longest :math:`Z_\perp`.

With squares (L16) the fraction is :math:`|P\,dy|^2`, whose part that is quadratic in d is exact, times the middle of
the range of one over its denominator; the remainder is of third order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, join, select
from holonomy.theory.affine.arithmetic.products import squared_length
from holonomy.theory.affine.arithmetic.squares import bounds, rest_of


def length(form: Form) -> Form:
    """L3: the length of a vector, a form of one entry."""
    shift, rest = rest_of(form)
    center, radius = form.center + shift, (form.gradient.norm(dim=-1) + rest) * (1 + ROUNDING)
    size = center.norm(dim=-1, keepdim=True)
    unit = center / torch.where(size > 0, size, 1.0)
    first = form.linear(unit[:, None])
    across = form.linear(torch.eye(center.shape[-1], dtype=center.dtype) - unit[..., None] * unit[:, None])
    low, high = bounds(first)
    # The length is at least its linear part, too.
    least = torch.maximum((center.abs() - radius).clamp(min=0).norm(dim=-1, keepdim=True), low) + low
    most = (center.abs() + radius).norm(dim=-1, keepdim=True) + high
    # The difference of |y| and its linear part is 2-Lipschitz.
    given, whole = form.center.norm(dim=-1, keepdim=True), form.reach()[:, None]
    far = 2 * whole + (given - first.center).clamp(min=0)
    return _with_square(first, across, (least, most), 1, far, ROUNDING * (size + given + whole))


def lorentz_norm(time: Form, space: Form, low: Tensor | float) -> Form:
    """L4: the Lorentz norm of a timelike vector that is known to be at least ``low`` > 0, a form of one entry."""
    t, y = (part.center + rest_of(part)[0] for part in (time, space))
    size, floor = y.norm(dim=-1, keepdim=True), torch.as_tensor(low, dtype=y.dtype)
    norm = torch.maximum(numerics.root(((t - size) * (t + size)).clamp(min=0)), floor)
    us = y / norm
    # t / norm where the centre is a vector of that norm; where it is not, u is of norm one all the same.
    ut = (1 + us.square().sum(-1, keepdim=True)).sqrt()
    both = join(time, space)
    first = both.linear(torch.cat([ut, -us], dim=-1)[:, None])
    eye = torch.eye(y.shape[-1], dtype=y.dtype)
    boost = torch.cat([-us[..., None], eye + us[..., None] * us[:, None] / (1 + ut)[..., None]], dim=-1)
    across = both.linear(boost)
    lower, upper = bounds(first)
    lower = torch.maximum(lower, floor)
    # The norm's square is that of the linear part less that of the part across.
    far = across.reach()[:, None] + across.center.norm(dim=-1, keepdim=True)
    least = torch.maximum(numerics.root(((lower - far) * (lower + far)).clamp(min=0)) * (1 - ROUNDING), floor)
    # The norm of u is one up to rounding of the squares of its entries.
    loss = ROUNDING * 2 * ut.square() * (first.center.abs() + first.spread())
    return _with_square(first, across, (lower + least, 2 * upper), -1, (upper - floor).clamp(min=0), loss)


def _with_square(
    first: Form, across: Form, divisor: tuple[Tensor, Tensor], sign: int, far: Tensor | float, loss: Tensor
) -> Form:
    """The form plus or minus a squared length over a number that is bounded; that is known to be at most ``far``."""
    least, most = divisor
    known = least > 0
    least = torch.where(known, least, 1.0)
    whole = (across.reach() + across.center.norm(dim=-1))[:, None]
    far = torch.as_tensor(far, dtype=whole.dtype)
    half = torch.where(known, torch.minimum(whole.square() / least, far), far) * ((1 + ROUNDING) / 2)
    plain = first.apart(sign * half, half + loss)
    if not first.noise.squares:
        return plain
    square, most = squared_length(across), torch.maximum(most, least)
    middle, off = (1 / least + 1 / most) / 2, (1 / least - 1 / most) / 2
    extra = (off * (1 + ROUNDING) + ROUNDING * middle) * torch.stack(bounds(square)).abs().amax(0)
    curved = (first + square * (sign * middle)).apart(torch.zeros_like(loss), extra + loss)
    better = known & (extra + middle * square.remainders() < half)
    return select(better.squeeze(1), curved, plain)
