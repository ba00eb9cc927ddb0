"""Lower bounds of margins from the enclosure of a transformer, from its cap, and from mixtures of both.

A bound by the enclosure and one by the cap (:mod:`holonomy.theory.affine.cap`) are both bounds, and so is every mixture
of them, whose linear parts may cancel better: the largest of a few is taken. The enclosure is not divided by what the
last LayerNorm and the logarithm divide by, as the sign of a margin does not depend on it (L17). Where all this is not
enough, the graph encoder is bounded once more, from below (L15).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import Hypformer
from holonomy.theory.affine.arithmetic.forms import (
    ROUNDING,
    Form,
    constant,
    linear,
    plus,
    remainders,
    spread,
    times,
)
from holonomy.theory.affine.arithmetic.products import scale
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.arithmetic.ratios import Ratio
from holonomy.theory.affine.arithmetic.squares import bounds, quadratic_of
from holonomy.theory.affine.backward import improved
from holonomy.theory.affine.cap import least_products, longest
from holonomy.theory.affine.graph import GraphBranch
from holonomy.theory.affine.points import bias_of, root

if TYPE_CHECKING:
    from jaxtyping import Float

# Shares of the enclosure.
_MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Where a divisor may be so small relative to its centre, a margin that is below a number has no bound.
_LEAST = 2.0**-10


@dataclass(frozen=True)
class Margins:
    """Lower bounds of target logit minus each other logit; infinite at the target itself.

    Attributes:
        affine: from the enclosure alone; minus infinity where it has none.
        cap: with the transformer replaced by its cap.
        best: the largest that is known.
        layers: for the least margin of each problem, how much each layer's remainders take from ``affine``.
        steepest: how far a denominator moves from its centre at most, relative to it.
    """

    affine: Float[Tensor, "problem class"]
    cap: Float[Tensor, "problem class"]
    best: Float[Tensor, "problem class"]
    layers: dict[str, Float[Tensor, " problem"]]
    steepest: Float[Tensor, " problem"]

    @classmethod
    def together(cls, each: list[Margins]) -> Margins:
        """Problems one after the other."""
        names = dict.fromkeys(name for one in each for name in one.layers)
        affine, cap, best, steepest = (
            torch.cat([getattr(one, part) for one in each]) for part in ("affine", "cap", "best", "steepest")
        )
        zero = affine.new_zeros(1)
        layers = {name: torch.cat([one.layers.get(name, zero) for one in each]) for name in names}
        return cls(affine, cap, best, layers, steepest)

    @classmethod
    def of(cls, found: Form, affine: Tensor, cap: Tensor, best: Tensor) -> Margins:
        """Bounds, and what the form of the margins says of its remainders."""
        return cls(affine, cap, best, _shares(found, affine), found.noise.steepest)


@dataclass(frozen=True)
class Mixed:
    r"""What margins of a linear decoder are bounded from: forms, the cap's bounds, victims and targets.

    ``graph`` is what the graph encoder and the bias give, ``cap`` what the transformer gives at least. In units of a
    number :math:`\varphi_0` (L17), ``forms`` are :math:`a \cdot Y`, :math:`\varphi - \varphi_0` from below and from
    above, and their products with ``graph``; ``ends`` bound :math:`\varphi` and how far these are apart. Without them
    nothing but the cap is known.
    """

    model: Hypformer
    branch: GraphBranch | None
    graph: Form
    cap: Float[Tensor, "problem class"]
    victim: Tensor
    target: Tensor
    forms: tuple[Form, tuple[Form, Form], tuple[Form, Form]] | None = None
    ends: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls,
        model: Hypformer,
        branch: GraphBranch | None,
        space: Ratio | None,
        graph: Form,
        asked: tuple[Tensor, Tensor],
    ) -> Mixed:
        """From the victim's point and the margins without it, of victims and targets."""
        victim, target = asked
        weight = cast("nn.Linear", model.decoder).weight.double()
        share = 1.0 if branch is None else 1 - model.graph_weight
        rows = (weight[target][:, None] - weight) * share
        encoder = cast("HypformerEncoder", model.encoder)
        cap = least_products(encoder, rows)
        if space is None:
            return cls(model, branch, graph, cap, victim, target)
        below, above = space.stretched(root(model.manifold_out), longest(encoder))
        size = 1 / torch.where(below.center > 0, below.center, 1.0)
        one = constant(graph.noise, -torch.ones_like(size))
        rises = plus(times(below, size), one), plus(times(above, size), one)
        forms = times(linear(space.over, rows), size), rises, (scale(rises[0], graph), scale(rises[1], graph))
        least, most = 1 + bounds(rises[0])[0], 1 + bounds(rises[1])[1]
        gap, least = (most - least) * (1 + ROUNDING), torch.maximum(least, space.floor * size) * (1 - ROUNDING)
        ends = least, most * (1 + ROUNDING), gap
        return cls(model, branch, graph, cap, victim, target, forms, ends)

    def margins(self, enough: float | None) -> Margins:
        """Bound them; from below those that are not above ``enough`` yet, none if that is None."""
        enough, searched = torch.inf if enough is None else enough, enough is not None
        # Margins are compared with zero, for their signs, and with their centre, for first order in the radius.
        center = (self.graph if self.forms is None else plus(self.graph, self.forms[0])).center
        start = torch.zeros_like(center) if enough > -torch.inf else center
        bounds = self._bounds(start, enough, searched=searched)
        if self.forms is not None and not bool((bounds > enough).any(0).all()):
            start = center
            bounds = torch.maximum(bounds, self._bounds(center, enough, searched=searched))
        whole = self._parts(start)[-1][0]
        return Margins.of(
            self.graph if whole is None else plus(self.graph, whole), bounds[-1], bounds[0], bounds.amax(0)
        )

    def _parts(self, start: Tensor) -> list[tuple[Form | None, Tensor]]:
        """What mixtures add to the graph encoder: the cap, and by L17.1, less ``start``, others; forms and numbers."""
        parts: list[tuple[Form | None, Tensor]] = [(None, self.cap)]
        low, high = bounds(self.graph)
        for mixture in _MIXTURES[1:]:
            extra = (1 - mixture) * self.cap - start if mixture < 1 else -start
            if self.forms is None or self.ends is None:
                parts.append((None, torch.full_like(extra, -torch.inf)))
                continue
            top, (rise, other), (bend, turn) = self.forms
            below, above = (bend, linear(rise, extra[..., None])), (turn, linear(other, extra[..., None]))
            # What is multiplied with a positive number is taken from below.
            gap = self.ends[2]
            losses = gap * torch.relu(-low - extra), gap * torch.relu(high + extra)
            some = (losses[0] <= losses[1]).to(gap.dtype)
            chosen = [times(part, some) for part in below] + [times(part, 1 - some) for part in above]
            loss = torch.minimum(*losses)
            parts.append((plus(times(top, mixture), *chosen), extra - loss * (1 + ROUNDING)))
        return parts

    def _bounds(self, start: Tensor, enough: float, *, searched: bool) -> Float[Tensor, "mixture problem class"]:
        """By the cap, and by mixtures with numbers that margins are compared with."""
        failed, parts, found = self.graph.noise.failed, self._parts(start), list[Tensor]()
        for whole, extra in parts:
            form = self.graph if whole is None else plus(self.graph, whole)
            found.append(bounded(form, self.target, None if whole is None else failed, extra))
        known = self._undone(torch.stack(found), start)
        if self.branch is None or not searched:
            return known
        return torch.maximum(known, self._undone(self._from_below(self.branch, parts, known, start, enough), start))

    def _undone(self, low: Float[Tensor, "mixture problem class"], start: Tensor) -> Tensor:
        """Lower bounds of margins, from those by L17.1."""
        if self.ends is None:
            return low
        known = torch.isfinite(low[1:]) & ((low[1:] > 0) | (self.ends[0] > _LEAST))
        safe = torch.where(known, low[1:], 0.0)
        change = safe / torch.where(safe < 0, self.ends[0].clamp(min=_LEAST), self.ends[1])
        value = start + change - ROUNDING * (start.abs() + change.abs())
        unknown = torch.where(low[1:] == torch.inf, torch.inf, -torch.inf)
        return torch.cat([low[:1], torch.where(known, value, unknown)])

    def _from_below(
        self,
        branch: GraphBranch,
        parts: list[tuple[Form | None, Tensor]],
        known: Float[Tensor, "mixture problem class"],
        start: Tensor,
        enough: float,
    ) -> Float[Tensor, "mixture problem class"]:
        """The same mixtures with the graph encoder from below (L15), where that may help beyond what is known."""
        found, top = torch.full_like(known, -torch.inf), known.amax(0)
        most = self._undone(self._most(branch, parts), start)
        worth = most > (known if enough == torch.inf else known.clamp(min=enough))
        low = (top <= enough) & (top < torch.inf) & worth.any(0)
        for i in low.any(-1).nonzero().squeeze(1).tolist():
            others = low[i].nonzero().squeeze(1)
            found[:, i, others] = self._of_problem(branch, parts, (i, others), worth[:, i, others], start, enough)
        return found.nan_to_num(-torch.inf, -torch.inf, -torch.inf)

    def _most(self, branch: GraphBranch, parts: list[tuple[Form | None, Tensor]]) -> Tensor:
        """What mixtures give where the perturbation is zero: no bound of the graph encoder from below gives more."""
        decoder = cast("nn.Linear", self.model.decoder)
        logits = self.model.graph_weight * (branch.result[self.victim] @ decoder.weight.double().T) + bias_of(decoder)
        found, failed = list[Tensor](), self.graph.noise.failed[:, None]
        for whole, extra in parts:
            value = extra if whole is None else extra + whole.center - remainders(whole)
            found.append(value if whole is None else value.masked_fill(failed, -torch.inf))
        return logits.gather(1, self.target[:, None]) - logits + torch.stack(found)

    def _of_problem(
        self,
        branch: GraphBranch,
        parts: list[tuple[Form | None, Tensor]],
        asked: tuple[int, Tensor],
        worth: Tensor,
        start: Tensor,
        enough: float,
    ) -> Float[Tensor, "mixture other"]:
        """Lines and parabolas of ReLUs are chosen for the graph encoder alone, with the whole enclosure, or both."""
        problem, others = asked
        decoder, target = cast("nn.Linear", self.model.decoder), self.target[problem]
        weight, bias = decoder.weight.double(), bias_of(decoder)
        size, cap = bias[target].abs() + bias[others].abs(), self.cap[problem, others]
        rows = (weight[target] - weight[others]) * self.model.graph_weight
        zero = rows.new_zeros(len(others), self.graph.noise.groups[0].stop)
        alone = Quadratic.linear(bias[target] - bias[others], zero, ROUNDING * size)
        wholes = [None if whole is None else quadratic_of(whole)[problem, others] for whole, _ in parts]
        rests = [alone if whole is None else alone.plus(whole) for whole in wholes]
        extras = torch.stack([extra[problem, others] for _, extra in parts])
        # By L17.1 a margin is above enough where the rest is above this.
        goals = torch.full_like(extras, enough)
        if self.ends is not None:
            goals[1:] = (enough - start[problem, others]) * self.ends[0][problem]
        goals = goals - extras
        bound = partial(branch.below, problem, rows)
        lines = list[Quadratic]()
        if bool(worth[:-1].any()):
            lines.append(improved(bound, rests[0], goals[0]))
        whole = wholes[-1]
        if bool(worth[1:].any()) and whole is not None and (not lines or bool((whole.least()[0] > cap).any())):
            lines.append(improved(bound, rests[-1], goals[-1]))
        found = torch.full((len(parts), len(others)), -torch.inf).double()
        for i, (rest, extra) in enumerate(zip(rests, extras, strict=True)):
            if lines and (i == 0 or bool(worth[1:].any())):
                value = torch.stack([line.plus(rest).least()[0] for line in lines]).amax(0)
                found[i] = value + extra - ROUNDING * (value.abs() + extra.abs())
        return found


def bounded(
    form: Form, target: Tensor, failed: Tensor | None = None, extra: Tensor | float = 0.0
) -> Float[Tensor, "problem class"]:
    """Lower bounds of forms of margins plus known numbers; minus infinity where there is none."""
    low = quadratic_of(form).least()[0] if form.noise.squares else form.center - spread(form)
    bound = low + extra
    bound = bound - ROUNDING * (form.center.abs() + abs(extra))
    unknown = ~torch.isfinite(bound)
    if failed is not None:
        unknown = unknown | failed[:, None]
    own = torch.nn.functional.one_hot(target, bound.shape[1]).bool()
    return bound.masked_fill(unknown, -torch.inf).masked_fill(own, torch.inf)


def _shares(form: Form, bound: Tensor) -> dict[str, Tensor]:
    """What each owner's symbols take from the least margin."""
    worst = bound.argmin(-1)[:, None]
    found = {"input": form.gradient.norm(dim=-1).gather(1, worst).squeeze(1)}
    for group in form.groups():
        part = form.columns[..., group.start : group.stop]
        sizes = part.norm(dim=-1) if group.ball else part.abs().sum(-1)
        sizes = sizes.gather(1, worst).squeeze(1)
        found[group.owner] = found[group.owner] + sizes if group.owner in found else sizes
    found["rounding"] = form.box.gather(1, worst).squeeze(1)
    return found
