r"""Forms over positive forms, and margins of a linear decoder without a division: L17.

The divisor of a LayerNorm is positive, and what follows the first one of a block is positively homogeneous: it becomes
the scale of the points that follow (L6), up to the logarithm. There
:math:`y = Y/N`, and :math:`a \cdot \log_o(y) = a \cdot Y/\varphi` with :math:`\varphi = N \psi(k |Y|/N) > 0`,
:math:`\psi(x) = x/\operatorname{arsinh}(x)`.

**L17.** Let m be :math:`a \cdot Y/\varphi + G`.

1. For each number t, :math:`m \ge t` where :math:`a \cdot Y + (G - t)\, \varphi \ge 0`. If the left is at least
   :math:`\eta`, then :math:`m \ge t + \eta/\varphi`.
2. :math:`\psi` increases; it is convex up to :math:`\theta = \operatorname{arsinh}(x) = 1.6`, and concave from 1.61
   on. Everywhere :math:`|\psi''| \le 1`, so that on [l, u] it is within :math:`(u-l)^2/8` of its chord.
3. If :math:`s x + i` is below :math:`\psi(x)` at all values of :math:`k |Y|/N`, then :math:`s k |Y| + i N` is below
   :math:`\varphi`; and likewise above.

*Proof.* 1: m - t is the left over :math:`\varphi`. 2: From :math:`\psi = \sinh\theta/\theta`, :math:`\psi' = (\theta -
\tanh\theta)/\theta^2` and :math:`\psi'' = D/(\theta^3 \cosh\theta)`, :math:`D = \theta \tanh^2\theta - 2\theta + 2
\tanh\theta`. :math:`D' = \tanh\theta\, (2\theta - \sinh(2\theta)/2)/\cosh^2\theta` changes its sign once, from plus
to minus, and D(0) = 0: so D does as well, between 1.6 and 1.61. Both parts of :math:`D/\theta^3`, of opposite sign, are
at most one, as :math:`\theta - \theta^3/3 \le \tanh\theta \le \theta`. 3: times N. QED

Where a quotient has remainders that grow without bound as N may come near zero, :math:`\varphi` has not: lengths are
convex, so that their linear parts are lower bounds (L3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, plus, times
from holonomy.theory.affine.arithmetic.lengths import length
from holonomy.theory.affine.arithmetic.products import quotient
from holonomy.theory.affine.arithmetic.squares import bounds

if TYPE_CHECKING:
    from jaxtyping import Float

# Angles up to which the function is convex, and from which on it is concave.
_TURN = 1.6, 1.61


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
        low, high = bounds(plus(size, times(self.under, -middle)))
        least = torch.maximum(bounds(self.under)[0], self.floor)
        lower = (middle * (1 - ROUNDING) + (low / least).clamp(max=0) * (1 + ROUNDING)).clamp(min=0)
        upper = (middle + (high / least).clamp(min=0)) * (1 + 4 * ROUNDING)
        lines = lines_of_stretch(*(k * torch.minimum(end, longest) for end in (lower, upper)))
        below, above = (plus(times(size, slope * k), times(self.under, shift)) for slope, shift in lines)
        return below, above


def lines_of_stretch(lower: Tensor, upper: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    r"""L17.2: slopes and intercepts of lines below and above :math:`x/\operatorname{arsinh}(x)` on [lower, upper]."""
    wide, mid = upper - lower, (lower + upper) / 2
    first, last, theta = stretch(lower), stretch(upper), mid.asinh()
    chord = ((last - first) / torch.where(wide > 0, wide, 1.0)).clamp(0, 1)
    safe = torch.where(theta > _TURN[0] / 2, theta, 1.0)
    tangent = torch.where(theta > _TURN[0] / 2, (safe - safe.tanh()) / safe.square(), chord)
    concave, convex = lower.asinh() >= _TURN[1], (upper.asinh() <= _TURN[0]) & (theta > _TURN[0] / 2)
    half, flat = wide.square() / 8, (last - first) / 2
    slope, middle = torch.where(half < flat, chord, 0.0), torch.where(half < flat, first - chord * lower, first + flat)
    half, loss = torch.minimum(half, flat), ROUNDING * (last + (chord + tangent) * upper)
    touching, secant = (tangent, stretch(mid) - tangent * mid), (chord, first - chord * lower)

    def chosen(where: Tensor, other: Tensor, sign: int) -> tuple[Tensor, Tensor]:
        a, b = ((torch.where(other, y, x)) for x, y in zip((slope, middle + sign * half), touching, strict=True))
        a, b = (torch.where(where, y, x) for x, y in zip((a, b), secant, strict=True))
        return a, b + sign * loss

    return chosen(concave, convex, -1), chosen(convex, concave, 1)


def stretch(x: Tensor) -> Tensor:
    r""":math:`x/\operatorname{arsinh}(x)`."""
    return torch.where(x > 0, x / torch.where(x > 0, x, 1.0).asinh(), 1.0)
