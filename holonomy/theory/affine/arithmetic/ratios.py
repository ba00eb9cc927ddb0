r"""Forms over positive forms, and margins of a linear decoder without a division: L17.

The divisor of a LayerNorm is positive, and what follows the first one of a block is positively homogeneous: it becomes
the scale of the points that follow (L6), up to the logarithm. There
:math:`y = Y/N`, and :math:`a \cdot \log_o(y) = a \cdot Y/\varphi` with :math:`\varphi = N \psi(k |Y|/N) > 0`,
:math:`\psi(x) = x/\operatorname{arsinh}(x)`.

**L17.** Let m be :math:`a \cdot Y/\varphi + G`.

1. For each number t, :math:`m \ge t` where :math:`a \cdot Y + (G - t)\, \varphi \ge 0`. If the left is at least
   :math:`\eta`, then :math:`m \ge t + \eta/\varphi`.
2. :math:`\psi` increases; it is convex up to a turn :math:`x^*`, and concave beyond;
   :math:`\operatorname{arsinh}(x^*)` is between 1.6 and 1.61. For :math:`s = \psi'(p)` and all x in [l, u],
   :math:`\psi(x) - s x` is at least the lesser of its values at p and u if :math:`p \le x^*`, and at most the larger
   of its values at p and l if :math:`p \ge x^*`.
3. If :math:`s x + i` is below :math:`\psi(x)` at all values of :math:`k |Y|/N`, then :math:`s k |Y| + i N` is below
   :math:`\varphi`; and likewise above.

*Proof.* 1: m - t is the left over :math:`\varphi`. 2: From :math:`\psi = \sinh\theta/\theta`, :math:`\psi' = (\theta -
\tanh\theta)/\theta^2` and :math:`\psi'' = D/(\theta^3 \cosh\theta)`, :math:`D = \theta \tanh^2\theta - 2\theta + 2
\tanh\theta`. :math:`D' = \tanh\theta\, (2\theta - \sinh(2\theta)/2)/\cosh^2\theta` changes its sign once, from plus
to minus, and D(0) = 0: so D does as well, between 1.6 and 1.61. Let p be before the turn. Up to the turn the
difference is convex, and least at p. Beyond it is concave: at least the lesser of its values at the turn and at u. The
other side is the same, backwards. 3: times N. QED

Where a quotient has remainders that grow without bound as N may come near zero, :math:`\varphi` has not: lengths are
convex, so that their linear parts are lower bounds (L3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from holonomy._shapes import Float
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form
from holonomy.theory.affine.arithmetic.lengths import length
from holonomy.theory.affine.arithmetic.products import quotient
from holonomy.theory.affine.arithmetic.squares import bounds

# Angles up to which the function is convex, and from which on it is concave.
_TURN = 1.6, 1.61
# Below this angle the derivative is its series.
_SERIES = 2.0**-6
# Points whose tangents are tried.
_TANGENTS = 9


@dataclass(frozen=True)
class Ratio:
    """A form over a positive one of one entry, which is never below ``floor``."""

    over: Form
    under: Form
    floor: Float[Tensor, "problem 1"]

    def form(self) -> Form:
        """The quotient (L5)."""
        return quotient(self.over, self.under, self.floor)

    def stretched(self, k: Tensor, longest: Tensor) -> tuple[Form, Form]:
        r""":math:`\varphi` of L17 from below and from above, for a quotient of length ``longest`` at most."""
        size = length(self.over)
        middle = size.center / torch.where(self.under.center > 0, self.under.center, 1.0)
        low, high = bounds(size + self.under * (-middle))
        least = torch.maximum(bounds(self.under)[0], self.floor)
        lower = (middle * (1 - ROUNDING) + (low / least).clamp(max=0) * (1 + ROUNDING)).clamp(min=0)
        upper = (middle + (high / least).clamp(min=0)) * (1 + 4 * ROUNDING)
        lines = lines_of_stretch(*(k * torch.minimum(end, longest) for end in (lower, upper)))
        below, above = (size * (slope * k) + self.under * shift for slope, shift in lines)
        return below, above


def lines_of_stretch(lower: Tensor, upper: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    r"""L17.2: slopes and intercepts of lines below and above :math:`x/\operatorname{arsinh}(x)` on [lower, upper]."""
    # Where no chord is, that of some tangents which is closest in the middle.
    middle, share = (lower + upper) / 2, torch.linspace(0, 1, _TANGENTS, dtype=lower.dtype)
    before, after = (torch.full_like(lower, math.sinh(turn)) for turn in _TURN)
    slope = ((stretch(upper) - stretch(lower)) / torch.where(upper > lower, upper - lower, 1.0)).clamp(0, 1)
    chord = slope, stretch(lower) - slope * lower

    def tangent(start: Tensor, stop: Tensor, end: Tensor, sign: int) -> tuple[Tensor, Tensor]:
        at = start[..., None] + (stop - start)[..., None] * share
        slopes = _rate(at)
        there, far = stretch(at) - slopes * at, stretch(end)[..., None] - slopes * end[..., None]
        shifts = torch.minimum(there, far) if sign > 0 else torch.maximum(there, far)
        best = (sign * (slopes * middle[..., None] + shifts)).argmax(-1, keepdim=True)
        return slopes.gather(-1, best).squeeze(-1), shifts.gather(-1, best).squeeze(-1)

    low = tangent(lower.minimum(before), middle.minimum(before), upper, 1)
    high = tangent(middle.maximum(after), upper.maximum(after), lower, -1)
    found = list[tuple[Tensor, Tensor]]()
    for line, straight, sign in ((low, lower >= after, -1), (high, upper <= before, 1)):
        a, b = (torch.where(straight, x, y) for x, y in zip(chord, line, strict=True))
        found.append((a, b + sign * ROUNDING * (stretch(upper) + a * upper)))
    return found[0], found[1]


def _rate(x: Tensor) -> Tensor:
    r""":math:`\psi'`."""
    theta = x.asinh()
    safe = torch.where(theta > _SERIES, theta, 1.0)
    return torch.where(theta > _SERIES, (safe - safe.tanh()) / safe.square(), theta / 3 - 2 * theta.pow(3) / 15)


def stretch(x: Tensor) -> Tensor:
    r""":math:`x/\operatorname{arsinh}(x)`."""
    return torch.where(x > 0, x / torch.where(x > 0, x, 1.0).asinh(), 1.0)
