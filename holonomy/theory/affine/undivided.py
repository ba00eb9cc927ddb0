r"""The margins of a linear decoder times a positive number, so that nothing is divided.

As in :mod:`holonomy.theory.affine.mixtures` let

.. math:: m_\lambda = \lambda\, \frac{a \cdot Y}{\varphi} + (1 - \lambda)\, C + G, \qquad
    \varphi = \varphi_0\, (1 + \delta) > 0,

with a number :math:`\varphi_0 > 0`. For every number t,

.. math:: m_\lambda = t + \frac{\eta}{1 + \delta}, \qquad
    \eta = \lambda\, \frac{a \cdot Y}{\varphi_0} + (1 + \delta)(G + e), \qquad e = (1 - \lambda)\, C - t .

A lower bound of :math:`\eta` gives one of :math:`m_\lambda`: it is divided by the largest :math:`1 + \delta` if it is
positive, by the least if not (L17.1). With t = 0 nothing is lost of the sign of the margin. With t the margin at the
centre, nothing is lost to first order in the radius.

:math:`\delta` is known between two forms :math:`\delta_- \le \delta \le \delta_+` (L17.3), which are nowhere farther
apart than a number g. So :math:`\delta\, (G + e)` is at least each of

.. math:: \delta_-\, (G + e) - g \max(0, -(G + e)), \qquad \delta_+\, (G + e) - g \max(0, G + e) .

For each class the one that loses less is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor

from holonomy._shapes import Float, Int
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import Hypformer
from holonomy.theory.affine.arithmetic.backward import from_below, improved
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, Kink, constant
from holonomy.theory.affine.arithmetic.products import scale
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.arithmetic.ratios import Ratio
from holonomy.theory.affine.arithmetic.squares import bounds
from holonomy.theory.affine.cap import longest
from holonomy.theory.affine.points import root

# Where 1 + delta may be smaller than this, a bound of eta that is negative says nothing of the margin.
_LEAST = 2.0**-10


@dataclass(frozen=True)
class Term:
    r"""What is added to G to make :math:`\eta`, for one :math:`\lambda`: numbers, and a form but for the cap alone.

    ``shift`` is e, for the cap alone C.
    """

    share: float
    shift: Float[Tensor, "problem class"]
    number: Float[Tensor, "problem class"]
    form: Form | None = None


@dataclass(frozen=True)
class Undivided:
    r"""The enclosure of the transformer without its divisor, in units of :math:`\varphi_0`."""

    product: Form  # a . Y / phi_0, an entry for each class
    rises: tuple[Form, Form]  # delta_- and delta_+, of one entry
    bends: tuple[Form, Form]  # delta_- G and delta_+ G
    least: Float[Tensor, "problem 1"]  # a lower bound of 1 + delta
    most: Float[Tensor, "problem 1"]  # an upper one
    gap: Float[Tensor, "problem 1"]  # g

    @classmethod
    def of(cls, model: Hypformer, space: Ratio, rows: Float[Tensor, "problem class dim"], graph: Form) -> Undivided:
        """From the victim's point, the rows a, and G."""
        encoder = cast("HypformerEncoder", model.encoder)
        below, above = space.stretched(root(model.manifold_out), longest(encoder))
        unit = 1 / torch.where(below.center > 0, below.center, 1.0)
        minus_one = constant(graph.noise, -torch.ones_like(unit))
        rises = below * unit + minus_one, above * unit + minus_one
        least, most = 1 + bounds(rises[0])[0], 1 + bounds(rises[1])[1]
        return cls(
            space.over.linear(rows) * unit,
            rises,
            (scale(rises[0], graph), scale(rises[1], graph)),
            torch.maximum(least, space.floor * unit) * (1 - ROUNDING),
            most * (1 + ROUNDING),
            bounds(rises[1] - rises[0])[1].clamp(min=0) + ROUNDING * most,
        )

    def term(self, share: float, number: Tensor, graph: tuple[Tensor, Tensor]) -> Term:
        r"""The part of :math:`\eta` for a share :math:`\lambda` and numbers e, with bounds of G."""
        low, high = graph
        losses = self.gap * torch.relu(-low - number), self.gap * torch.relu(high + number)
        by_lower = (losses[0] <= losses[1]).to(number.dtype)
        parts = list[Form]()
        for rise, bend, chosen in zip(self.rises, self.bends, (by_lower, 1 - by_lower), strict=True):
            parts += [bend * chosen, rise.linear(number[..., None]) * chosen]
        bound = number - torch.minimum(*losses) * (1 + ROUNDING)
        return Term(share, number, bound, (self.product * share).plus(*parts))

    def within(self, problem: int, others: Tensor) -> OneProduct:
        """The part of some margins of one problem."""
        rises = self.rises[0].some(problem), self.rises[1].some(problem)
        kinks = [kink.some(problem) for kink in self.product.noise.kinks]
        return OneProduct(self.product.some(problem, others), rises, self.least[problem], kinks)

    def margins(
        self, eta: Float[Tensor, "share problem class"], start: Float[Tensor, "problem class"]
    ) -> Float[Tensor, "share problem class"]:
        r"""Lower bounds :math:`t + \eta/(1 + \delta)`, from those of :math:`\eta`."""
        known = torch.isfinite(eta) & ((eta > 0) | (self.least > _LEAST))
        safe = torch.where(known, eta, 0.0)
        change = safe / torch.where(safe < 0, self.least.clamp(min=_LEAST), self.most)
        value = start + change - ROUNDING * (start.abs() + change.abs())
        return torch.where(known, value, torch.where(eta == torch.inf, torch.inf, -torch.inf))


@dataclass(frozen=True)
class OneProduct:
    r"""Parts of :class:`Undivided` for some margins of one problem, where G is known from below better than by a form.

    **L17.4.** Let q, a function of d, be below G + e and above a number :math:`q_0`, and l a number below
    :math:`1 + \delta`. Then :math:`(1 + \delta)(G + e) \ge q_0 (1 + \delta_\pm) + l\, (q - q_0)`, with the lower sign
    where :math:`q_0 \ge 0`.

    *Proof.* :math:`(1 + \delta)(G + e) \ge (1 + \delta) q = q_0 (1 + \delta) + (1 + \delta)(q - q_0)`, as
    :math:`1 + \delta > 0`, and :math:`q \ge q_0`. QED The noise of :math:`q_0 \delta_\pm` meets that of
    :math:`a \cdot Y` with its sign.
    """

    product: Form
    rises: tuple[Form, Form]
    least: Float[Tensor, "1"]
    kinks: list[Kink]

    @cached_property
    def low(self) -> Float[Tensor, " other"]:
        """A lower bound of the product."""
        return bounds(self.product)[0][0]

    def eta(self, share: Float[Tensor, " row"], other: Int[Tensor, " row"], value: Quadratic) -> Quadratic:
        r""":math:`\eta` of these margins from below; ``value`` is G + e from below."""
        start = value.least()[0]
        parts = zip(self.rises, (start.clamp(min=0), start.clamp(max=0)), strict=True)
        product = self.product.some(0, other) * share
        form = product.plus(*(rise.linear(part[None, :, None]) for rise, part in parts))
        rest, nowhere = value.times(self.least.item()), value.gradient[:, None][:, :0]
        loss = rest.loss + ROUNDING * start.abs() * (2 + self.least)
        rest = replace(rest, center=rest.center + start * (1 - self.least), loss=loss * (1 + ROUNDING))
        return improved(partial(from_below, form, self.kinks), rest.plus, nowhere, enough=0.0, rounds=1).plus(rest)
