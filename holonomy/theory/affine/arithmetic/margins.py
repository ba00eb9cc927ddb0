"""Lower bounds of margins: what :class:`~holonomy.theory.affine.enclosure.Enclosure` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holonomy._shapes import Float
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form
from holonomy.theory.affine.arithmetic.squares import quadratic_of

# Taken off all bounds: norms are of squares, which underflow below 1e-154.
_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Margins:
    """Lower bounds of target logit minus each other logit; infinite at the target itself."""

    affine: Float[Tensor, "problem class"]  # from the enclosure alone; minus infinity where it has none
    cap: Float[Tensor, "problem class"]  # with the transformer replaced by its cap
    best: Float[Tensor, "problem class"]  # the largest that is known
    # For the least margin of each problem, how much each layer's remainders take from `affine`.
    layers: dict[str, Float[Tensor, " problem"]]
    steepest: Float[Tensor, " problem"]  # how far a denominator moves from its centre at most, relative to it

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
    def of(cls, form: Form, affine: Tensor, cap: Tensor, best: Tensor) -> Margins:
        """Bounds, and what the form of the margins says of its remainders."""
        return cls(affine - _LEAST, cap - _LEAST, best - _LEAST, _layers(form, affine), form.noise.steepest)


def bounded(
    form: Form, target: Tensor, failed: Tensor | None = None, number: Tensor | float = 0.0
) -> Float[Tensor, "problem class"]:
    """Lower bounds of forms of margins plus known numbers; minus infinity where there is none."""
    low = quadratic_of(form).least()[0] if form.noise.squares else form.center - form.spread()
    bound = low + number
    bound = bound - ROUNDING * (form.center.abs() + abs(number))
    unknown = ~torch.isfinite(bound)
    if failed is not None:
        unknown = unknown | failed[:, None]
    own = torch.nn.functional.one_hot(target, bound.shape[1]).bool()
    return bound.masked_fill(unknown, -torch.inf).masked_fill(own, torch.inf)


def _layers(form: Form, bound: Tensor) -> dict[str, Tensor]:
    """What the remainders of each layer take from the least margin."""
    worst = bound.argmin(-1)[:, None]
    found = {"input": form.gradient.norm(dim=-1).gather(1, worst).squeeze(1)}
    for group, part in form.parts():
        sizes = part.norm(dim=-1) if group.ball else part.abs().sum(-1)
        sizes = sizes.gather(1, worst).squeeze(1)
        found[group.owner] = found[group.owner] + sizes if group.owner in found else sizes
    found["rounding"] = form.box.gather(1, worst).squeeze(1)
    return found
