r"""Margins of a graph encoder from below: each ReLU is bounded on the side that counts, by a line or a parabola: L15.

A value before a ReLU is :math:`z = c + x + \omega`: :math:`x = g \cdot d` is what the perturbation d gives to first
order, :math:`|x| \le \gamma = |g|`, and :math:`|\omega| \le \rho` all else; the enclosure of
:mod:`holonomy.theory.affine.encoders.graph` knows c, g and :math:`\rho`. Going backwards from a margin, each ReLU has a
coefficient a, and needs an upper bound where a < 0 and a lower one where a > 0, of the form :math:`s z + q x^2 + m`.
Then :math:`a s` is the coefficient of z, and :math:`a q\, g g^\top` a part of a quadratic form in d, whose least value
is L14. A line gives up most where a unit turns, whatever the others do; the parabolas of many units add up to a form
that no d makes extreme for all of them.

**L15.** For s in [0, 1]:

1. :math:`\mathrm{ReLU}(z) \le s z + q x^2 + m` for q > 0 and :math:`m = \max(s^2/(4q) - s (c - \rho),\; (1-s)^2/(4q) +
   (1-s)(c + \rho))`.
2. :math:`\mathrm{ReLU}(z) \ge s z + q x^2 + m` for :math:`q \ge 0` and m the least of :math:`\varphi(x) - q x^2` at
   :math:`x = \pm\gamma` and at :math:`-c \pm \rho` moved into :math:`[-\gamma, \gamma]`, where :math:`\varphi(x) =
   \max(0,\; (1-s)(c + x - \rho),\; -s (c + x + \rho))`.
3. Let quadratic functions :math:`u(d) \le z \le v(d)` come from going backwards from z itself. Then :math:`z - x` is in
   :math:`[\min_d (u(d) - g \cdot d),\; \max_d (v(d) - g \cdot d)]` as well as in :math:`[c - \rho, c + \rho]`: middle
   and half of what both have in common may take the place of c and :math:`\rho`. And z is in
   :math:`[l, h] = [\min_d u(d),\; \max_d v(d)]`: the ReLU is linear if this interval has no zero inside, and
   :math:`\mathrm{ReLU}(z) \le s z + \max(-s l,\; (1 - s) h)` if it has.

*Proof.* :math:`\mathrm{ReLU}(z) - s z = \max(-s z, (1-s) z) \ge 0`. 1: :math:`-s (c + x + \omega) - q x^2 \le -s (c -
\rho) + s^2/(4q)`, and likewise with 1-s. 2: the difference is at least :math:`\varphi(x) - q x^2`. :math:`\varphi` is
linear but at :math:`-c \pm \rho`, so between these points that is concave, and least at their ends. 3: z - x is in both
intervals, and z in the third, at every d of the ball; :math:`\mathrm{ReLU}(z) - s z` is convex, and largest at the ends
of an interval. QED

For q = 0 the upper bound is the chord (L1) of all that is known of z. All s and q are sound. They are chosen unit by
unit as those with the best mean on some d: first on all directions alike, then also on the worst d of the rounds
before.

**ReLUs of the transformer.** :func:`~holonomy.theory.affine.arithmetic.entrywise.positive_power` writes
:math:`\mathrm{ReLU}(y) = s y + q x^2 + m + h e` with a symbol :math:`|e| \le 1`. In a later form that has
:math:`a h e`, the symbol costs :math:`|a| h`. It is a known function of y, though, and L15 bounds it from below,

.. math:: a h e \ge a\, [(s' - s)\, y + (q' - q)\, x^2 + m' - m] ,

with any line or parabola :math:`s', q', m'` of L15 on the side that the sign of a asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from holonomy._shapes import Bool, Float, Int
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, Kink
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.arithmetic.squares import quadratic_of

# Curvatures that are tried, times the reach of x.
_BENDS = (0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5)
# Slopes of lower bounds that are tried beside those of both sides.
_SLOPES = (0.25, 0.5, 0.75)
# Mean square of x over that of its reach, before directions are known.
_SHARE = 0.3

# Candidates (s, q, m), axes (candidate, unit).
Lines = tuple[Tensor, Tensor, Tensor]


def above(c: Tensor, gamma: Tensor, rho: Tensor, between: tuple[Tensor, Tensor]) -> Lines:
    """Upper bounds of ReLUs: the chord between two numbers, and L15.1 with the s that touches both sides."""
    lower, upper = between
    chord = (upper / (upper - lower)).clamp(0, 1)
    q = c.new_tensor(_BENDS)[:, None] / torch.where(gamma > 0, gamma, 1.0)
    s = (0.5 + 2 * q * c / (1 + 4 * q * rho)).clamp(0, 1)
    m = torch.maximum(s * s / (4 * q) - s * (c - rho), (1 - s) ** 2 / (4 * q) + (1 - s) * (c + rho))
    top = torch.maximum(-chord * lower, (1 - chord) * upper)
    return torch.cat([chord[None], s]), torch.cat([torch.zeros_like(c)[None], q]), torch.cat([top[None], m])


def below(c: Tensor, gamma: Tensor, rho: Tensor) -> Lines:
    """Lower bounds of ReLUs by L15.2: some slopes with each curvature, and without."""
    lower, upper = c - gamma - rho, c + gamma + rho
    s = torch.stack(
        [(upper / (upper - lower)).clamp(0, 1), (c > 0).to(c.dtype), *(torch.full_like(c, s) for s in _SLOPES)]
    )
    q = c.new_tensor((0.0, *_BENDS))[:, None, None] / torch.where(gamma > 0, gamma, 1.0)
    ends = (-gamma, gamma, *(torch.maximum(torch.minimum(sign * rho - c, gamma), -gamma) for sign in (-1, 1)))
    m = torch.stack([
        torch.maximum((1 - s) * (c + x - rho), -s * (c + x + rho)).clamp(min=0) - q * x * x for x in ends
    ]).amin(0)  # fmt: skip
    parts = (part.expand_as(m).flatten(0, 1) for part in (s, q, m))
    slope, bend, least = parts
    return slope, bend, least


@dataclass(frozen=True)
class Units:
    """ReLUs one by one: c, g and the rest."""

    center: Float[Tensor, " unit"]
    gradient: Float[Tensor, "unit first"]
    rest: Float[Tensor, " unit"]
    # Numbers that z is known to be between, if something else says so than c, g and the rest.
    known: tuple[Float[Tensor, " unit"], Float[Tensor, " unit"]] | None = field(default=None, kw_only=True)

    @cached_property
    def reached(self) -> Float[Tensor, " unit"]:
        """The reach of x."""
        return self.gradient.norm(dim=-1) * (1 + ROUNDING)

    @cached_property
    def between(self) -> tuple[Float[Tensor, " unit"], Float[Tensor, " unit"]]:
        """The least and the largest z."""
        reach = self.reached + self.rest
        low, high = self.center - reach, self.center + reach
        return (low, high) if self.known is None else (low.fmax(self.known[0]), high.fmin(self.known[1]))

    @cached_property
    def _candidates(self) -> tuple[Lines, Lines]:
        parts = self.center, self.reached, self.rest
        loss = ROUNDING * (self.center.abs() + self.reached + self.rest)
        (s, q, m), (slope, bend, least) = above(*parts, self.between), below(*parts)
        return (s, q, m + loss), (slope, bend, least - loss)

    def lines(
        self, asked: Float[Tensor, "row unit"], bad: Float[Tensor, "#row point first"]
    ) -> tuple[Float[Tensor, "row unit"], Float[Tensor, "row unit"], Float[Tensor, "row unit"]]:
        """s, q and m for the side that each coefficient asks for; without points they are chosen for all rows alike."""
        mean, square = self.moments(bad if bad.shape[1] else bad[:1])

        def best(lines: Lines, sign: int) -> list[Tensor]:
            s, q, m = (part[:, None] for part in lines)
            chosen = (sign * (s * (self.center + mean) + q * square + m)).argmax(0)
            return [part.gather(0, chosen) for part in lines]

        upper, lower = self._candidates
        pairs = zip(best(lower, 1), best(upper, -1), strict=True)
        s, q, m = (torch.where(asked > 0, one, other) for one, other in pairs)
        return s, q, m

    def moments(
        self, bad: Float[Tensor, "row point first"]
    ) -> tuple[Float[Tensor, "row unit"], Float[Tensor, "row unit"]]:
        """Means of x and of its square over these points, and over all directions alike."""
        at = bad @ self.gradient.T
        count = at.shape[1] + 1
        return at.sum(1) / count, (at.square().sum(1) + _SHARE * self.reached.square()) / count


@dataclass(frozen=True)
class Switch(Units):
    """The ReLUs of a layer that may switch, which entries they are, and all values before them to order zero."""

    before: Float[Tensor, "row entry"]
    on: Bool[Tensor, "row entry"]
    entries: Int[Tensor, " unit"]

    @classmethod
    def of(
        cls,
        before: Float[Tensor, "row entry"],
        center: Float[Tensor, "row entry"],
        gradient: Float[Tensor, "row entry first"],
        rest: Float[Tensor, "row entry"],
    ) -> Switch:
        """Nominal values, and the parts of an enclosure of what they become."""
        rest = rest * (1 + ROUNDING) + ROUNDING * center.abs()
        radius = gradient.norm(dim=-1) * (1 + ROUNDING) + rest
        entries = (~(center.abs() >= radius)).flatten().nonzero().squeeze(1)  # also where they are nan
        c, g, r = (part.flatten(0, 1)[entries] for part in (center, gradient, rest))
        return cls(c, g, r, before, center > 0, entries)

    @cached_property
    def sizes(self) -> Float[Tensor, "row entry"]:
        """How large the numbers are that an entry's change is made of, also where the ReLUs are known better."""
        # A curvature times the square of the reach is at most half the reach, and so chosen, m is at most four times
        # the size of z.
        units = 5 * (self.center.abs() + self.reached + 2 * self.rest)
        return (2 * self.before.abs()).flatten().index_add(0, self.entries, units).view_as(self.before)

    def within(self, rest: Float[Tensor, "2 unit"], value: Float[Tensor, "2 unit"]) -> Switch:
        r"""The same where lower bounds of :math:`z - g \cdot d`, of z, and of their negatives, are known (L15.3)."""
        # A bound that is not known is nan.
        low, high = rest[0].fmax(self.center - self.rest), (-rest[1]).fmin(self.center + self.rest)
        center, half = (low + high) / 2, ((high - low) / 2).clamp(min=0)
        rest = half * (1 + ROUNDING) + ROUNDING * (low.abs() + high.abs())
        lowest, highest = value[0].fmax(self.between[0]), (-value[1]).fmin(self.between[1])
        some = ~((lowest >= 0) | (highest <= 0) | (center.abs() >= self.reached + rest))
        on = (lowest >= 0) | (center >= self.reached + rest)
        on = self.on.flatten().index_copy(0, self.entries, on).view_as(self.on)
        units, known = (center[some], self.gradient[some], rest[some]), (lowest[some], highest[some])
        return Switch(*units, self.before, on, self.entries[some], known=known)


def switched(
    switch: Switch, asked: Float[Tensor, "row node entry"], bad: Float[Tensor, "#row point first"]
) -> tuple[Quadratic, Float[Tensor, "row node entry"]]:
    """The change that ReLUs give to rows, from below, but for what is asked of the change of the values before them."""
    # Rounding is left to the caller, see :attr:`Switch.sizes`.
    a, before = asked.flatten(1), switch.before.flatten()
    some, g = a[:, switch.entries], switch.gradient
    s, q, m = switch.lines(some, bad)
    slope = switch.on.flatten().to(a.dtype).repeat(len(a), 1).index_copy(1, switch.entries, s)
    center = (a * (slope * before - torch.relu(before))).sum(-1) + (some * m).sum(-1)
    matrix = torch.einsum("ru,ui,uj->rij", some * q, g, g)
    found = Quadratic(center, g.new_zeros(len(a), g.shape[-1]), matrix, torch.zeros_like(center))
    return found, (a * slope).view_as(asked)


def improved(
    bound: Callable[[Tensor], Quadratic],
    whole: Callable[[Quadratic], Quadratic],
    bad: Float[Tensor, "row point first"],
    enough: Tensor | float = torch.inf,
    rounds: int = 3,
) -> Quadratic:
    """The best of some rounds of bounds for what is made of them, row by row; fewer if all are above ``enough``."""
    found = bound(bad)
    low, where = whole(found).least()
    for _ in range(rounds):
        if bool((low > enough).all()):
            break
        bad = torch.cat([bad, where[:, None]], 1)
        new = bound(bad)
        value, where = whole(new).least()
        found, low = found.where(value > low, new), torch.maximum(low, value)
    return found


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
