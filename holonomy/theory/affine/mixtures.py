"""Lower bounds of margins from the enclosure of a transformer, from its cap, and from mixtures of both.

A bound by the enclosure and one by the cap (:mod:`holonomy.theory.affine.cap`) are both bounds, and so is every mixture
of them, whose linear parts may cancel better: the largest of a few is taken. Where these are not enough, the graph
encoder is bounded once more, from below (L15).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import Hypformer
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, linear, plus, remainders, spread, times
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.arithmetic.squares import quadratic_of
from holonomy.theory.affine.backward import improved
from holonomy.theory.affine.cap import least_products
from holonomy.theory.affine.graph import GraphBranch
from holonomy.theory.affine.points import bias_of

if TYPE_CHECKING:
    from jaxtyping import Float

# Shares of the enclosure.
_MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)


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
    """What margins of a linear decoder are bounded from: forms, the cap's bounds, victims and targets.

    ``graph`` is what the graph encoder and the bias give, ``whole`` what the transformer does.
    """

    model: Hypformer
    branch: GraphBranch | None
    graph: Form
    whole: Form
    cap: Float[Tensor, "problem class"]
    victim: Tensor
    target: Tensor

    @classmethod
    def of(
        cls, model: Hypformer, branch: GraphBranch | None, transformer: Form, graph: Form, ends: tuple[Tensor, Tensor]
    ) -> Mixed:
        """From the transformer's share of the tangent vector, and the margins without it, of victims and targets."""
        victim, target = ends
        weight = cast("nn.Linear", model.decoder).weight.double()
        rows = weight[target][:, None] - weight
        share = 1.0 if branch is None else 1 - model.graph_weight
        cap = least_products(cast("HypformerEncoder", model.encoder), rows * share)
        return cls(model, branch, graph, linear(transformer, rows), cap, victim, target)

    def margins(self, enough: float | None) -> Margins:
        """Bound them; from below those that are not above ``enough`` yet, none if that is None."""
        failed, found = self.whole.noise.failed, list[Tensor]()
        for mixture in _MIXTURES:
            form = plus(self.graph, times(self.whole, mixture)) if mixture else self.graph
            extra = (1 - mixture) * self.cap if mixture < 1 else 0.0
            found.append(bounded(form, self.target, failed & (mixture > 0), extra))
        bounds = torch.stack(found)
        if self.branch is not None and enough is not None:
            bounds = torch.maximum(bounds, self._from_below(self.branch, bounds, enough))
        return Margins.of(plus(self.graph, self.whole), bounds[-1], bounds[0], bounds.amax(0))

    def _from_below(
        self, branch: GraphBranch, known: Float[Tensor, "mixture problem class"], enough: float
    ) -> Float[Tensor, "mixture problem class"]:
        """The same mixtures with the graph encoder from below (L15), where that may help beyond what is known."""
        found, top = torch.full_like(known, -torch.inf), known.amax(0)
        worth = self._most(branch) > (known if enough == torch.inf else known.clamp(min=enough))
        low = (top <= enough) & (top < torch.inf) & worth.any(0)
        for i in low.any(-1).nonzero().squeeze(1).tolist():
            others = low[i].nonzero().squeeze(1)
            found[:, i, others] = self._of_problem(branch, i, others, worth[:, i, others], enough)
        return found.nan_to_num(-torch.inf, -torch.inf, -torch.inf)

    def _most(self, branch: GraphBranch) -> Float[Tensor, "mixture problem class"]:
        """What mixtures give where the perturbation is zero: no bound of the graph encoder from below gives more."""
        decoder = cast("nn.Linear", self.model.decoder)
        logits = self.model.graph_weight * (branch.result[self.victim] @ decoder.weight.double().T) + bias_of(decoder)
        start = self.whole.center - remainders(self.whole)
        start = start.masked_fill(self.whole.noise.failed[:, None], -torch.inf)
        share = torch.tensor(_MIXTURES).double()[:, None, None]
        most = torch.where(share > 0, share * start, 0.0) + torch.where(share < 1, (1 - share) * self.cap, 0.0)
        return logits.gather(1, self.target[:, None]) - logits + most

    def _of_problem(
        self, branch: GraphBranch, problem: int, others: Tensor, worth: Tensor, enough: float
    ) -> Float[Tensor, "mixture other"]:
        """Lines and parabolas of ReLUs are chosen for the graph encoder alone, with the whole enclosure, or both."""
        decoder, target, cap = cast("nn.Linear", self.model.decoder), self.target[problem], self.cap[problem, others]
        weight, bias = decoder.weight.double(), bias_of(decoder)
        rest = quadratic_of(self.whole)[problem, others]
        size = bias[target].abs() + bias[others].abs()
        alone = Quadratic.linear(bias[target] - bias[others], torch.zeros_like(rest.gradient), ROUNDING * size)
        bound = partial(branch.below, problem, (weight[target] - weight[others]) * self.model.graph_weight)
        parts, known = list[Quadratic](), bool(worth[1:].any())
        if bool(worth[:-1].any()):
            parts.append(improved(bound, alone, enough - cap))
        if known and (not parts or bool((rest.least()[0] > cap).any())):
            parts.append(improved(bound, alone.plus(rest), torch.full_like(cap, enough)))
        found = torch.full((len(_MIXTURES), len(others)), -torch.inf).double()
        for i, mixture in enumerate(_MIXTURES if known else _MIXTURES[:1]):
            share = alone.plus(rest.times(mixture)) if mixture else alone
            value = torch.stack([part.plus(share).least()[0] for part in parts]).amax(0)
            extra = (1 - mixture) * cap if mixture < 1 else torch.zeros_like(cap)
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
