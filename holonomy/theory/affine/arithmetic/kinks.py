r"""ReLUs of the transformer from below, once it is known on which side each of them counts: L15 for affine forms.

:func:`~holonomy.theory.affine.arithmetic.entrywise.positive_power` writes
:math:`\mathrm{ReLU}(y) = s y + q x^2 + m + h e` with a symbol :math:`|e| \le 1`. In a later form that has
:math:`a h e`, the symbol costs :math:`|a| h`. It is a known function of y, though, and L15 bounds it from below,

.. math:: a h e \ge a\, [(s' - s)\, y + (q' - q)\, x^2 + m' - m] ,

with any line or parabola :math:`s', q', m'` of L15 on the side that the sign of a asks for.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from holonomy._shapes import Float
from holonomy.theory.affine.arithmetic.backward import Units
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, Kink
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.arithmetic.squares import quadratic_of


def from_below(form: Form, kinks: list[Kink], bad: Float[Tensor, "row point first"]) -> Quadratic:
    """The entries of one problem from below; lines are chosen for some points d, without any all symbols stay."""
    if not bad.shape[1]:
        return quadratic_of(form)[0]
    matrix = bad.new_zeros(len(bad), bad.shape[-1], bad.shape[-1])
    loss = ROUNDING * form.center[0].abs()
    for kink in reversed(kinks):
        stop = kink.start + kink.half.shape[1]
        if form.columns.shape[-1] < stop:
            continue
        before, part, after = form.columns[0].split([kink.start, stop - kink.start, form.columns.shape[-1] - stop], -1)
        units = Units(kink.center[0], kink.form.gradient[0], kink.rest[0])
        a = torch.where(kink.half > 0, part / torch.where(kink.half > 0, kink.half, 1.0), 0.0)
        s, q, m = units.lines(a, bad)
        slope, bend, shift = s - kink.slope, q - kink.bend, m - kink.middle
        # About what it gives on these d, beside what the symbol takes.
        mean, square = units.moments(bad)
        given = a * (slope * (units.center + mean) + bend * square + shift) - (a * slope).abs() * units.rest
        a = torch.where(given > -part.abs(), a, 0.0)
        columns = torch.cat([before, torch.where(a == 0, part, 0.0), after], -1)
        size = a.abs() * (m.abs() + kink.middle.abs() + (q + kink.bend) * units.reached.square())
        loss = loss + ROUNDING * (part.abs() + size).sum(-1)
        form = replace(form, center=form.center + (a * shift).sum(-1), columns=columns[None])
        form = form + kink.form.linear((a * slope)[None])
        matrix = matrix + torch.einsum("ru,ui,uj->rij", a * bend, units.gradient, units.gradient)
    found = quadratic_of(form)[0]
    return replace(found, matrix=found.matrix + matrix, loss=(found.loss + loss) * (1 + ROUNDING))
