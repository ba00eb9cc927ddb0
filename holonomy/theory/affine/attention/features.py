r"""The feature map of linear attention, :math:`\phi(e) = |e| / |e^p| \; e^p`, of affine forms (Hypformer eq. 19): L7.

Two enclosures are made and, problem by problem, the one with smaller remainders is kept.

**By direction**, where e has a positive length: :math:`u = e/|e|` by L3 and L5, then :math:`u^p` by L1,
:math:`u^p/|u^p|` by L3 and L5, and times :math:`|e|` by L2. The length of e is at least that of the least entries, and
at least that at the centre less what moves entries that may be positive. As |u| is one, :math:`|u^p|` is at least
:math:`k^{(1-p)/2}`, k the number of entries that may be positive (means of powers): of the two divisors only the
first, which is of degree one in e, may come near zero.

**By its angle**, everywhere: with :math:`\alpha` the angle below, :math:`\phi(e)` is in :math:`\cos\alpha\; e +
\sin\alpha\, |e|\, \mathrm{Ball}`.

*Proof.* :math:`\phi(e)` is as long as e. Let both be one, and :math:`\beta` the angle between them. If it is at most
:math:`\alpha`, then :math:`|\phi(e) - \cos\alpha\, e|^2 = 1 - 2 \cos\alpha \cos\beta + \cos^2\alpha \le \sin^2\alpha`.

The angle between e and :math:`e^p` is largest for some e of length one. Where entries are positive its cosine
:math:`\sum e_i^{p+1} / |e^p|` is stationary on the sphere, :math:`a e_i^p - b e_i^{2p-1} = \lambda e_i`: a quadratic
equation for :math:`e_i^{p-1}`, so that at most two values occur, their quotient :math:`r \le 1`. Let the less occur n
times as often as the other. In the plane of the two sets of entries e has the slope :math:`\sqrt n\, r`, and
:math:`e^p` has :math:`\sqrt n\, r^p`: the angle is :math:`\arctan(\sqrt n\, r) - \arctan(\sqrt n\, r^p)`. Its
tangent, :math:`(r - r^p) / (n^{-1/2} + n^{1/2} r^{p+1})`, increases with n up to :math:`n = r^{-p-1}`, and is there
:math:`(r^{(1-p)/2} - r^{(p-1)/2}) / 2`, less where r is larger. So the largest angle of k entries has n = k - 1:

.. math:: \alpha = \max_{0 \le r \le 1}\; \arctan(\sqrt{k-1}\, r) - \arctan(\sqrt{k-1}\, r^p) .

Both terms increase with r: on a part of the interval the difference is at most that of opposite ends. QED
"""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Float
from holonomy.layers import HypLinearAttention
from holonomy.theory.affine.arithmetic.entrywise import positive_power
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, select
from holonomy.theory.affine.arithmetic.lengths import length
from holonomy.theory.affine.arithmetic.products import at_least, quotient, scale
from holonomy.theory.affine.points import Scaled, transformed

# Parts of the interval in which the largest angle is looked for.
_PARTS = 2**12


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
    by_direction = scale(size, quotient(powered, length(powered), low))
    unbounded = form.noise.failed & ~before
    form.noise.failed = before
    angle = largest_angle(entries, power)
    apart = angle.sin() * (center + moved) * (1 + ROUNDING)
    by_angle = (positive * angle.cos()).with_ball(torch.diag_embed(apart * live))
    better = ~unbounded & (by_direction.reach(rest=True) <= by_angle.reach(rest=True))
    return by_direction if bool(better.all()) else select(better, by_direction, by_angle)


def largest_angle(entries: Float[Tensor, "*batch 1"], power: float) -> Float[Tensor, "*batch 1"]:
    """At most the angle between a vector with so many positive entries and its power."""
    counts, place = entries.unique(return_inverse=True)
    slope, share = numerics.root((counts - 1).clamp(min=0))[:, None], torch.linspace(0, 1, _PARTS + 1).double().square()
    found = (slope * share[1:]).atan() - (slope * share[:-1] ** power).atan()
    return (found.amax(-1) + ROUNDING)[place]
