r"""Products and quotients of affine forms: L2 and L5.

Write a form as :math:`c + G d + \omega`, d the perturbation, :math:`|d| \le 1`, and :math:`\omega` everything else.

**L2.** For every vector g, :math:`\{(g \cdot d)\, d : |d| \le 1\} \subseteq g/2 + (|g|/2)\, \mathrm{Ball}`.

*Proof.* With d = t v, |v| = 1: :math:`(g \cdot v) v = g/2 + (2 (g \cdot v) v - g)/2`, and
:math:`2 (g \cdot v) v - g` is a reflection of g, so of its length. Times :math:`t^2 \le 1` it stays in this ball, which
contains 0. QED

So a scalar :math:`h = h_0 + g \cdot d + \rho`, :math:`|\rho| \le R`, times a vector :math:`w = w_0 + G d + \omega`,
:math:`|\omega_k| \le o_k`, lies in

.. math:: h_0 w + w_0 (h - h_0) + G g / 2 + (|g|/2 + R)\, G\,\mathrm{Ball} + (|g| + R)\,[-o, o] .

**Inner products.** :math:`(G d) \cdot (H d)` lies between the least eigenvalue of the symmetric part of
:math:`G^\top H`, or 0 if that is less, and the largest, or 0. What remains is at most the product of lengths.

**L5.** :math:`y / N = y_0/N_0 + (1/N)\,(y - (y_0/N_0) N)`. The bracket has centre zero, and what y and N have in common
has cancelled in it. Then L1 for 1/N, and L2.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from holonomy._shapes import Float
from holonomy.theory.affine.arithmetic.entrywise import inverse
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, constant, eigenvalues, largest_singular_value
from holonomy.theory.affine.arithmetic.squares import products, rest_of, with_squares


def scale(scalar: Form, vector: Form) -> Form:
    """L2: a form of one entry times a form; with squares L16."""
    (shift, rest), (shifts, rests) = rest_of(scalar), rest_of(vector)
    h, w = scalar.center + shift, vector.center + shifts
    first = (vector * h).plus(scalar.linear(w[..., None]), constant(scalar.noise, -h * w))
    g, matrix = scalar.gradient, vector.gradient
    length, center, ball = g.norm(dim=-1), torch.zeros_like(w), rest
    if g.shape[-1] and matrix.shape[-1]:
        if scalar.noise.squares:
            first = with_squares(first, products(g, matrix), length * matrix.norm(dim=-1))
        else:
            center, ball = (matrix @ g.mT).squeeze(-1) / 2, length / 2 + rest
    if matrix.shape[-1]:
        first = first.with_ball(matrix * (ball * (1 + ROUNDING))[..., None])
    return first.apart(center, rests * (length + rest) * (1 + ROUNDING))


def inner(one: Form, other: Form) -> Form:
    """The inner product of two forms, a form of one entry."""
    (shift, rest), (other_shift, other_rest) = rest_of(one), rest_of(other)
    a, b = one.center + shift, other.center + other_shift
    product = (a * b).sum(-1, keepdim=True)
    first = one.linear(b[:, None]).plus(other.linear(a[:, None]), constant(one.noise, -product))
    first = first.with_box(ROUNDING * (a * b).abs().sum(-1, keepdim=True))
    ga, gb = one.gradient, other.gradient
    low = high = torch.zeros_like(a[:, 0])
    if ga.shape[-1] and gb.shape[-1] and one.noise.squares:
        first = _with_inner(first, ga, gb)
    elif ga.shape[-1] and gb.shape[-1]:
        both = ga.mT @ gb
        values = eigenvalues((both + both.mT) / 2)
        slack = ROUNDING * ga.norm(dim=(-2, -1)) * gb.norm(dim=(-2, -1))
        low = (values[:, 0] - slack).clamp(max=0)
        high = (values[:, -1] + slack).clamp(min=0)
    far, near = _rest_length(one, shift, rest), _rest_length(other, other_shift, other_rest)
    lengths = (largest_singular_value(ga) + far) * near + far * largest_singular_value(gb)
    entries = ((ga.norm(dim=-1) + rest) * other_rest + rest * gb.norm(dim=-1)).sum(-1)
    rest = torch.minimum(lengths, entries) * (1 + ROUNDING)
    return first.apart(((low + high) / 2)[:, None], ((high - low) / 2 + rest)[:, None])


def squared_length(form: Form) -> Form:
    r""":math:`|y|^2 = |y_0|^2 + 2 y_0 \cdot dy + |dy|^2`, the last between 0 and the square of the reach.

    With squares :math:`dy = G d + \omega`, and :math:`2 (G d) \cdot \omega + |\omega|^2` is what remains.
    """
    shift, rest = rest_of(form)
    center, gradient = form.center + shift, form.gradient
    square = center.square().sum(-1, keepdim=True)
    first = form.linear(2 * center[:, None]) + constant(form.noise, -square)
    first = first.with_box(ROUNDING * square)
    if not form.noise.squares or not gradient.shape[-1]:
        half = form.reach().square()[:, None] / 2
        return first.apart(half, half * (1 + ROUNDING))
    far = _rest_length(form, shift, rest)
    across = torch.minimum(largest_singular_value(gradient) * far, (gradient.norm(dim=-1) * rest).sum(-1))
    half = far.square()[:, None] / 2
    return _with_inner(first, gradient, gradient).apart(half, (2 * across[:, None] + half) * (1 + ROUNDING))


def _rest_length(form: Form, shift: Tensor, rest: Tensor) -> Float[Tensor, " problem"]:
    """How long at most what is left of the vector without its shifted centre and its gradient is."""
    return torch.minimum(rest.norm(dim=-1), form.reach(rest=True) + shift.norm(dim=-1)) * (1 + ROUNDING)


def _with_inner(first: Form, one: Tensor, other: Tensor) -> Form:
    r"""The form of one entry plus :math:`(A d) \cdot (B d)`."""
    size = (one.norm(dim=-1) * other.norm(dim=-1)).sum(-1, keepdim=True)
    return with_squares(first, products(one, other).sum(-2, keepdim=True), size)


# Bounds that are smaller than this part of the centre are taken for zero: their inverses overflow.
_LEAST = 2.0**-20


def at_least(form: Form, bound: Float[Tensor, "problem 1"]) -> Float[Tensor, "problem 1"]:
    """A lower bound of a positive number that a form of such a size makes, less rounding; zero where it is tiny."""
    return torch.where(bound > _LEAST * form.center.norm(dim=-1, keepdim=True), bound * (1 - ROUNDING), 0.0)


def quotient(vector: Form, scalar: Form, low: Tensor | float = -torch.inf) -> Form:
    """L5: a form over a form of one entry, whose value is known to be at least ``low``."""
    ratio = vector.center / torch.where(scalar.center > 0, scalar.center, 1.0)
    difference = vector + scalar.linear(-ratio[..., None])
    # Its centre is zero but for rounding, which the box holds.
    difference = replace(difference, center=torch.zeros_like(ratio), box=difference.box + 2 * difference.center.abs())
    return constant(vector.noise, ratio) + scale(inverse(scalar, low), difference)
