r"""Margins of a model with a linear decoder: by the enclosure of its transformer, by its cap, and by mixtures of both.

Write the margin of the target against another class as

.. math:: m = \frac{a \cdot Y}{\varphi} + G .

The first term is the transformer's: a is the difference of two rows of the decoder, times the transformer's share; Y is
the enclosed space part of the victim's point before the last division, and :math:`\varphi` what it is divided by (L17).
G is what the graph encoder and the bias of the decoder give. The cap (L9) is a number C that the first term is never
below.

**Mixtures.** For every :math:`\lambda` from 0 to 1,

.. math:: m \ge m_\lambda = \lambda\, \frac{a \cdot Y}{\varphi} + (1 - \lambda)\, C + G .

The bound by the cap alone is that of :math:`\lambda = 0`, the bound by the enclosure alone that of 1. Between them the
linear parts of Y and G may cancel better. The largest bound of a few :math:`\lambda` is taken. How
:math:`m_\lambda` is bounded without a division, by a form :math:`\eta`, is in
:mod:`holonomy.theory.affine.undivided`.

**The graph encoder from below.** Where the largest bound is not enough, G is bounded once more, from below and for one
margin at a time (L15). What the divisor does to it is then known from below, too (L17.4), and the ReLUs of the
transformer are bounded on the side that counts (:mod:`holonomy.theory.affine.arithmetic.backward`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from holonomy._shapes import Bool, Float
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import Hypformer
from holonomy.theory.affine.arithmetic.backward import improved
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form
from holonomy.theory.affine.arithmetic.margins import Margins, bounded
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.arithmetic.ratios import Ratio
from holonomy.theory.affine.arithmetic.squares import bounds
from holonomy.theory.affine.cap import least_products
from holonomy.theory.affine.encoders.graph import Absent, GraphBranch
from holonomy.theory.affine.points import bias_of
from holonomy.theory.affine.undivided import OneProduct, Term, Undivided

# The lambdas that are tried: that of the cap alone comes first, that of the enclosure alone last.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Rounds in which lines and parabolas are chosen anew, where the ReLUs are enclosed better.
_ROUNDS = 3


@dataclass(frozen=True)
class Mixtures:
    """All that the margins of some problems are bounded from."""

    model: Hypformer  # whose decoder is linear
    branch: GraphBranch  # its graph encoder
    graph: Form  # G, an entry for each class
    cap: Float[Tensor, "problem class"]  # C
    transformer: Undivided | None  # its enclosure; without it nothing but the cap is known
    victim: Tensor  # whose margins they are
    target: Tensor  # the classes that are to stay

    @classmethod
    def of(
        cls,
        model: Hypformer,
        branch: GraphBranch | None,
        space: Ratio | None,
        graph: Form,
        asked: tuple[Tensor, Tensor],
    ) -> Mixtures:
        """From the victim's point, if it is enclosed, and G; ``asked`` are victims and targets."""
        victim, target = asked
        weight = cast("nn.Linear", model.decoder).weight.double()
        rows = (weight[target][:, None] - weight) * (1.0 if branch is None else 1 - model.graph_weight)
        cap = least_products(cast("HypformerEncoder", model.encoder), rows)
        transformer = None if space is None else Undivided.of(model, space, rows, graph)
        return cls(model, branch or Absent(victim, weight.shape[1]), graph, cap, transformer, victim, target)

    def margins(self, enough: float | None) -> Margins:
        """Bound them; those that are not above ``enough`` also by L15, none if that is None."""
        goal = torch.inf if enough is None else enough
        center = self.graph.center
        if self.transformer is not None:
            center = center + self.transformer.product.center
        start = torch.zeros_like(center) if goal > -torch.inf else center
        terms = self._terms(start)
        found = self._bounds(terms, start, goal, searched=enough is not None)
        if self.transformer is not None and not bool((found > goal).any(0).all()):
            terms = self._terms(center)
            # A sign is proved with t = 0 or not at all, mostly: the other t is for the size, without the longer way.
            found = torch.maximum(found, self._bounds(terms, center, goal, searched=enough == torch.inf))
        affine = bounded(self.graph, self.target, number=-torch.inf) if self.transformer is None else found[-1]
        return Margins.of(self._with_graph(terms[-1]), affine, found[0], found.amax(0))

    def _terms(self, start: Tensor) -> list[Term]:
        """One for each share; t is ``start``, and zero for the cap alone."""
        terms = [Term(0.0, self.cap, self.cap)]
        if self.transformer is not None:
            graph = bounds(self.graph)
            for share in _SHARES[1:]:
                number = (1 - share) * self.cap - start if share < 1 else -start
                terms.append(self.transformer.term(share, number, graph))
        return terms

    def _with_graph(self, term: Term) -> Form:
        """The form of eta, but for the numbers of the term."""
        return self.graph if term.form is None else self.graph + term.form

    def _bounds(
        self, terms: list[Term], start: Tensor, goal: float, *, searched: bool
    ) -> Float[Tensor, "share problem class"]:
        """Of each share, with G from its form and, where that is not above the goal, from below."""
        failed = self.graph.noise.failed
        eta = [
            bounded(self._with_graph(term), self.target, None if term.form is None else failed, term.number)
            for term in terms
        ]
        known = self._divided(torch.stack(eta), start)
        return torch.maximum(known, self._from_below(terms, known, start, goal)) if searched else known

    def _divided(self, eta: Float[Tensor, "share problem class"], start: Tensor) -> Tensor:
        """Lower bounds of margins from those of eta, which for the cap alone is the margin."""
        if self.transformer is None:
            return eta
        return torch.cat([eta[:1], self.transformer.margins(eta[1:], start)])

    def _from_below(
        self, terms: list[Term], known: Float[Tensor, "share problem class"], start: Tensor, goal: float
    ) -> Float[Tensor, "share problem class"]:
        """The margins with G from below (L15), where that may help beyond what is known."""
        eta, best = torch.full_like(known, -torch.inf), known.amax(0)
        limit = self._divided(self._limits(terms), start)
        worth = limit > (known if goal == torch.inf else known.clamp(min=goal))
        asked = (best <= goal) & (best < torch.inf) & worth.any(0)
        for i in asked.any(-1).nonzero().squeeze(1).tolist():
            others = asked[i].nonzero().squeeze(1)
            problem = OneProblem.of(self, terms, (i, others))
            eta[:, i, others] = problem.bounds(worth[:, i, others], self._goals(problem, start, goal))
        return self._divided(eta.nan_to_num(-torch.inf, -torch.inf, -torch.inf), start)

    def _limits(self, terms: list[Term]) -> Float[Tensor, "share problem class"]:
        """Eta where the perturbation is zero: no bound of G from below gives more."""
        decoder = cast("nn.Linear", self.model.decoder)
        given = self.branch.result[self.victim] @ decoder.weight.double().T
        logits = self.model.graph_weight * given + bias_of(decoder)
        nominal = logits.gather(1, self.target[:, None]) - logits
        found = [nominal + term.shift for term in terms]
        if self.transformer is not None:
            failed = self.graph.noise.failed[:, None]
            known = self.transformer.product.center.masked_fill(failed, -torch.inf)
            found[1:] = [value + term.share * known for value, term in zip(found[1:], terms[1:], strict=True)]
        return torch.stack(found)

    def _goals(self, problem: OneProblem, start: Tensor, goal: float) -> Float[Tensor, "share other"]:
        """What eta has to exceed for the margin to exceed the goal (L17.1)."""
        goals = torch.full_like(problem.added.center, goal)
        if self.transformer is not None:
            goals[1:] = (goal - start[problem.index]) * self.transformer.least[problem.index[0]]
        return goals


@dataclass(frozen=True)
class OneProblem:
    """Some margins of one problem, whose graph encoder is bounded from below."""

    index: tuple[int, Tensor]  # the problem, and the other classes
    # lower bounds of the graph encoder's part of G, for points where they are to be good (L15)
    below: partial[Quadratic]
    added: Quadratic  # to it before it is weighed, for each share and margin: the bias and a number
    product: OneProduct | None  # the transformer's part
    cap: Float[Tensor, " other"]  # C
    sharpen: partial[None]  # makes `below` better, if that is possible

    @classmethod
    def of(cls, mixtures: Mixtures, terms: list[Term], index: tuple[int, Tensor]) -> OneProblem:
        """Of all that is known, the part of some margins of a problem."""
        problem, others = index
        decoder, branch = cast("nn.Linear", mixtures.model.decoder), mixtures.branch
        weight, bias, target = decoder.weight.double(), bias_of(decoder), mixtures.target[problem]
        rows = (weight[target] - weight[others]) * mixtures.model.graph_weight
        one, other = bias[target], bias[others]
        shift = torch.stack([term.shift[index] for term in terms])
        zero = shift.new_zeros(*shift.shape, mixtures.graph.noise.groups[0].stop)
        added = Quadratic.linear(one - other + shift, zero, ROUNDING * (one.abs() + other.abs() + shift.abs()))
        transformer = mixtures.transformer
        product = None if transformer is None else transformer.within(problem, others)
        below, sharpen = partial(branch.below, problem, rows), partial(branch.sharpen, problem)
        return cls(index, below, added, product, mixtures.cap[index], sharpen)

    def bounds(
        self, worth: Bool[Tensor, "share other"], goals: Float[Tensor, "share other"]
    ) -> Float[Tensor, "share other"]:
        """Bounds of eta; ``worth`` is where they may help.

        Lines and parabolas of ReLUs are chosen for the graph encoder alone, for it and the whole enclosure, or both.
        Where this is not enough, the ReLUs are enclosed better, too.
        """
        found = self._bounds(worth, goals, 1)
        if bool((worth & ~(found > goals)).any()):
            self.sharpen()
            found = torch.maximum(found, self._bounds(worth, goals, _ROUNDS))
        return found

    def _capped(self, graph: Quadratic) -> Quadratic:
        """Margins with the cap alone, of the graph encoder from below."""
        return graph.plus(self.added[0])

    def _eta(self, product: OneProduct, share: Tensor, other: Tensor, graph: Quadratic) -> Quadratic:
        """Eta of some shares and margins from below, of the graph encoder from below."""
        weights = torch.tensor(_SHARES, dtype=self.cap.dtype)[share]
        return product.eta(weights, other, graph[other].plus(self.added[share, other]))

    def _bounds(self, worth: Tensor, goals: Tensor, rounds: int) -> Float[Tensor, "share other"]:
        """Bounds of eta."""
        graphs, product, last = list[Quadratic](), self.product, len(worth) - 1
        nowhere, every = self.added.gradient[0, :, None][:, :0], torch.arange(worth.shape[1])
        if bool(worth[: max(last, 1)].any()):
            graphs.append(improved(self.below, self._capped, nowhere, goals[0], rounds))
        share, other = (part + offset for part, offset in zip(worth[1:].nonzero(as_tuple=True), (1, 0), strict=True))
        if product is not None and len(share) and (not graphs or bool((product.low > self.cap).any())):
            whole = partial(self._eta, product, torch.full_like(every, last), every)
            graphs.append(improved(self.below, whole, nowhere, goals[last], rounds))
        found = torch.full_like(goals, -torch.inf)
        for graph in graphs:
            found[0] = torch.maximum(found[0], self._capped(graph).least()[0])
            if product is not None and len(share):
                value = self._eta(product, share, other, graph).least()[0]
                found[share, other] = torch.maximum(found[share, other], value)
        return found
