r"""Products of two coordinates of the perturbation, kept exactly: L16.

With d the first group, a *group of squares* has the columns of :math:`s(d)`, the products :math:`d_i d_j`, :math:`i \le
j`, those with :math:`i < j` times :math:`\sqrt 2`. So :math:`|s(d)| = |d|^2 \le 1`: a quadratic form :math:`d^\top H d`
is a row of columns of length :math:`|H|_F`, and an operation that knows nothing of squares takes the group for a ball.
Where there is such a group, the other operations add to it what is quadratic in d, and their remainders are of third
order.

**L16.** Let :math:`y = c + x + d^\top H d + \omega` with :math:`x = g \cdot d`, :math:`|d| \le 1` and
:math:`|\omega| \le \rho`.

1. y is in :math:`c + x + [\min(\lambda_1, 0) - \rho, \max(\lambda_n, 0) + \rho]`, :math:`\lambda_1 \le \dots \le
   \lambda_n` the eigenvalues of H: that is :math:`c' + x + w` with :math:`|x| \le |g|`, :math:`|w| \le \rho'`.
2. :math:`(g \cdot d)(h \cdot d) = d^\top H d` for the symmetric part H of :math:`g h^\top`.
3. For f convex on each of the cells that divide an interval around y, every s and every :math:`q \ge 0`,
   :math:`f(y) - s y - q x^2` is at most the largest and at least the least, over the cells, of :math:`\psi(t) - s t -
   q (t - c')^2` plus :math:`q\,[-2 |g| \rho', 2 |g| \rho' + \rho'^2]`, where for the upper bound :math:`\psi` is the
   chord of the cell, and for the lower one its tangent in the middle.

*Proof.* 1: :math:`d^\top H d \in |d|^2 [\lambda_1, \lambda_n]`. 2 is a matter of writing it out. 3: a convex function
is below its chord and above its tangents, and :math:`(y - c')^2 - x^2 = 2 x w + w^2`. QED
:math:`\psi(t) - s t - q (t - c')^2` is concave on a cell, so its least value is at an end and its largest at the vertex
or, where that is outside, at an end. Which s and q are taken costs tightness, never soundness: they are those of a
parabola that is about the best for f.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from holonomy._shapes import Float
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form
from holonomy.theory.affine.arithmetic.quadratics import Quadratic, between


@cache
def _pairs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    i, j = torch.triu_indices(size, size)
    return i, j, torch.full(i.shape, math.sqrt(0.5), dtype=torch.float64).masked_fill(i == j, 0.5)


def products(one: Float[Tensor, "*#batch first"], other: Float[Tensor, "*#batch first"]) -> Float[Tensor, "... pair"]:
    r"""The columns of :math:`(a \cdot d)(b \cdot d)`."""
    i, j, factor = _pairs(one.shape[-1])
    return (one[..., i] * other[..., j] + one[..., j] * other[..., i]) * factor


def symmetric(columns: Float[Tensor, "*batch pair"], size: int) -> Float[Tensor, "*batch first first"]:
    """The matrices of rows of columns."""
    i, j, factor = _pairs(size)
    half = columns * torch.where(i == j, 1.0, factor)
    found = columns.new_zeros(*columns.shape[:-1], size, size)
    found[..., i, j] = half
    found[..., j, i] = half
    return found


def with_squares(
    form: Form, columns: Float[Tensor, "problem entry pair"], size: Float[Tensor, "problem entry"]
) -> Form:
    """The form plus what is quadratic, of rounded terms of that size; its noise has a group of squares."""
    (group,) = form.noise.squares
    wide = torch.nn.functional.pad(form.columns, (0, max(group.stop - form.columns.shape[-1], 0)))
    old = wide[..., group.start : group.stop]
    loss = ROUNDING * (old.norm(dim=-1) + size)
    wide = torch.cat([wide[..., : group.start], old + columns, wide[..., group.stop :]], -1)
    return replace(form, columns=wide, box=(form.box + loss) * (1 + ROUNDING))


def matrix_of(form: Form) -> Float[Tensor, "problem entry first first"] | None:
    """The matrices of the form, if it has squares."""
    for group in form.noise.squares:
        if form.columns.shape[-1] >= group.stop:
            return symmetric(form.columns[..., group.start : group.stop], group.start)
    return None


def rest_of(form: Form) -> tuple[Float[Tensor, "problem entry"], Float[Tensor, "problem entry"]]:
    """L16.1: middle and half of an interval that holds all of an entry but its centre and its gradient."""
    matrix, noise = matrix_of(form), form.remainders()
    if matrix is None:
        return torch.zeros_like(noise), noise
    middle, half = between(matrix)
    # Others add the middle to the centre, which is rounded.
    half = half + noise + ROUNDING * (form.center.abs() + middle.abs())
    return middle, half * (1 + ROUNDING)


def bounds(form: Form) -> tuple[Float[Tensor, "problem entry"], Float[Tensor, "problem entry"]]:
    """A lower and an upper bound of each entry, the best that are known (L14)."""
    if matrix_of(form) is None:
        radius = form.spread()
        return form.center - radius, form.center + radius
    both = quadratic_of(form)
    sides = {name: torch.stack([part, part if name == "loss" else -part]) for name, part in vars(both).items()}
    below, above = Quadratic(**sides).least()[0]
    return below, -above


def quadratic_of(form: Form) -> Quadratic:
    """The entries from below: their remainders are a loss."""
    gradient = form.gradient
    if not gradient.shape[-1]:
        gradient = gradient.new_zeros(*form.center.shape, form.noise.groups[0].stop)
    found = Quadratic.linear(form.center, gradient, form.remainders())
    matrix = matrix_of(form)
    return found if matrix is None else replace(found, matrix=matrix)
