"""The largest radius at which a certificate holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from holonomy.theory.affine.arithmetic.ellipsoids import Threat
from holonomy.theory.affine.arithmetic.margins import Margins
from holonomy.theory.affine.enclosure import Enclosure, Known

# The search for a radius ends where it is known to this factor, or after so many bounds.
_NARROW, _MOST = 1.02, 20
# What a margin has lost grows about as such a power of the radius; the least, the first and the most that is taken.
_POWERS = (1.0, 2.0, 4.0)
# The longest step, and how far before a predicted root it stops: an error of that size costs no bound.
_LONGEST, _BEFORE = 4.0, 0.985
# What is divided by, at least: margins and slopes are as small as a decoder makes them.
_ZERO = torch.finfo(torch.float64).tiny
# Losses are taken to be at most so many margins: bounds that fail are much too large to follow.
_LOST = 4.0
# How far a denominator moves to first order, relative to its size, where the enclosure is mostly about to fail.
_STEEP = 0.7
# From so many tokens on, what follows the moving one has little weight in its average.
_MANY = 256


def largest_radii(
    enclosure: Enclosure, nodes: Tensor, target: Tensor, limit: float, threat: Threat = "node", *, cap: bool = True
) -> Tensor:
    """The root of each node's least margin, searched from where the linear part or a denominator would fail."""
    # Where the cap alone proves some radius, the largest that it proves is looked for first, as its bounds cost less.
    tiny = torch.finfo(torch.float64).eps ** 0.5
    guess, first = _guessed(enclosure, nodes, target, threat, tiny)
    enclosure.reuse = len(enclosure.x) >= _MANY
    low, own = torch.zeros_like(guess), enclosure.logits[nodes]
    start = (own.gather(1, target[:, None]) - own).scatter(1, target[:, None], torch.inf).amin(-1)
    both = enclosure.graph is not None and enclosure.model.encoder is not None
    if cap and both and threat == "node":
        tried = partial(least, enclosure, threat=threat, known="cap")
        value = tried(nodes, target, torch.full_like(guess, tiny))
        some = (value > 0).nonzero().squeeze(1)
        parts = (low[some], first[some], guess[some], value[some])
        low[some] = _largest(tried, nodes[some], target[some], parts, limit)
        first = torch.maximum(first, low * _NARROW)
    return _largest(partial(least, enclosure, threat=threat, cap=cap), nodes, target, (low, first, guess, start), limit)


def _largest(
    tried: Callable[[Tensor, Tensor, Tensor], Tensor],
    nodes: Tensor,
    target: Tensor,
    start: tuple[Tensor, Tensor, Tensor, Tensor],
    limit: float,
) -> Tensor:
    """The largest radii found; ``start`` is what holds, what is tried first, where none would hold, margins at 0."""
    # What margins have lost is followed on a scale of logarithms, between the radii that enclose the root or beyond.
    low, radius, guess, margin = start
    tiny = torch.finfo(torch.float64).eps ** 0.5
    low, high, radius = low.clone(), torch.full_like(low, torch.inf), radius.clamp(max=limit)
    # Logarithms of losses relative to the margin: at the two largest radii that hold, and at the least that does not.
    held, beyond, before = (torch.full_like(low, torch.nan) for _ in range(3))
    width = torch.full_like(low, torch.inf)
    power, going = torch.full_like(low, _POWERS[1]), torch.arange(len(nodes))[low < limit]
    for _ in range(_MOST):
        if not len(going):
            break
        value = tried(nodes[going], target[going], radius[going])
        loss = (1 - value / margin[going].clamp(min=_ZERO)).nan_to_num(0.0).clamp(min=tiny, max=_LOST).log()
        for i, kept, off in zip(going.tolist(), (value > 0).tolist(), loss.tolist(), strict=True):
            if kept:
                before[i] = (off - held[i]) / (radius[i] / low[i]).log()
                low[i], held[i] = radius[i], off
            else:
                high[i], beyond[i] = radius[i], off
        between = (beyond - held) / (high / low).log()
        power = torch.where(torch.isinf(high), before.clamp(_POWERS[0], _POWERS[2]), between).nan_to_num(_POWERS[1])
        radius = (low * (-held / power).exp() * _BEFORE).nan_to_num(0.0)
        radius = torch.maximum(torch.minimum(radius, high / _NARROW), low * _NARROW)
        # Where a bound bends sharply, predictions would come from one side only, a little nearer each time.
        width, wider = (high / low).log(), width
        halve = (high <= low * _NARROW**2) | (width.isfinite() & (width > wider / 2))
        radius = torch.where(halve, (low * high).sqrt(), torch.minimum(radius, low * _LONGEST))
        radius = torch.where(low == 0, high / _LONGEST, radius).clamp(max=limit)
        done = (high <= low * _NARROW) | (low >= limit) | ((low == 0) & (high < guess * tiny))
        going = (~done).nonzero().squeeze(1)
    return low


def _guessed(enclosure: Enclosure, nodes: Tensor, target: Tensor, threat: Threat, tiny: float) -> tuple[Tensor, Tensor]:
    """Where the linear part would fail, and what to try first; by the size of features where a bound is too dear."""
    if enclosure.one_by_one(threat):
        size = enclosure.x[nodes].norm(dim=-1)
        guess = torch.where(size > 0, 0.1 * size, 0.1)
        return guess, guess / 2
    own = enclosure.logits[nodes]
    radius = own.new_full((len(nodes),), tiny)
    margins = (own.gather(1, target[:, None]) - own).scatter(1, target[:, None], torch.inf)
    found = enclosure.margins(nodes, nodes, radius, target, threat, enough=-torch.inf, known="first order")
    slopes = ((margins - found.affine) / tiny).clamp(min=_ZERO)
    guess = (margins / slopes).nan_to_num(torch.inf).amin(-1).clamp(tiny, 1 / tiny)
    steep = _STEEP * tiny / found.steepest.clamp(min=tiny)
    return guess, torch.minimum(guess / 1.4, steep)


def holds(enclosure: Enclosure, nodes: Tensor, target: Tensor, radius: Tensor, threat: Threat = "node") -> Tensor:
    """Whether each node keeps its class within its radius."""
    return least(enclosure, nodes, target, radius, threat) > 0


def least(
    enclosure: Enclosure,
    nodes: Tensor,
    target: Tensor,
    radius: Tensor,
    threat: Threat = "node",
    *,
    cap: bool = True,
    known: Known = "all",
) -> Tensor:
    """A lower bound of each node's least margin within its radius; no better one is looked for than one above zero."""
    found: Margins = enclosure.margins(nodes, nodes, radius.double(), target, threat, enough=0.0, known=known)
    return (found.best if cap else found.affine).amin(-1)
