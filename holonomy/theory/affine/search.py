"""The largest radius at which a certificate holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from holonomy.theory.affine.arithmetic.ellipsoids import Threat
from holonomy.theory.affine.enclosure import Enclosure, Known
from holonomy.theory.affine.mixtures import Margins

# The search for a radius ends where it is known to this factor, or after so many bounds.
_NARROW, _MOST = 1.05, 16
# The first step of the search and the longest: it is squared until the radius is between two.
_STEP, _LONGEST = 1.5, 4.0
# How far a denominator moves to first order, relative to its size, where the enclosure is mostly about to fail.
_STEEP = 0.4
# From so many tokens on, what follows the moving one has little weight in its average.
_MANY = 256


def largest_radii(
    enclosure: Enclosure, nodes: Tensor, target: Tensor, limit: float, threat: Threat = "node", *, cap: bool = True
) -> Tensor:
    """Bisection on a logarithmic scale, of each node by itself, from where the linear part or a denominator would fail.

    Where the cap alone proves some radius, the largest that it proves is looked for first, as its bounds cost less.
    """
    tiny = torch.finfo(torch.float64).eps ** 0.5
    guess, first = _guessed(enclosure, nodes, target, threat, tiny)
    enclosure.reuse = len(enclosure.x) >= _MANY
    low = torch.zeros_like(guess)
    both = enclosure.graph is not None and enclosure.model.encoder is not None
    if cap and both and not enclosure.one_by_one(threat):
        tried = partial(holds, enclosure, threat=threat, known="cap")
        some = tried(nodes, target, torch.full_like(guess, tiny)).nonzero().squeeze(1)
        low[some] = _bisected(tried, nodes[some], target[some], (low[some], first[some], guess[some]), limit)
        first = torch.maximum(first, low * _NARROW)
    return _bisected(partial(holds, enclosure, threat=threat, cap=cap), nodes, target, (low, first, guess), limit)


def _bisected(
    tried: Callable[[Tensor, Tensor, Tensor], Tensor],
    nodes: Tensor,
    target: Tensor,
    start: tuple[Tensor, Tensor, Tensor],
    limit: float,
) -> Tensor:
    """The largest radii found; ``start`` is what is known to hold, what is tried first, and where none would hold."""
    low, radius, guess = start
    tiny = torch.finfo(torch.float64).eps ** 0.5
    low, high, radius = low.clone(), torch.full_like(low, torch.inf), radius.clamp(max=limit)
    going, step = torch.arange(len(nodes))[low < limit], _STEP
    for _ in range(_MOST):
        if not len(going):
            break
        kept = tried(nodes[going], target[going], radius[going])
        low[going] = torch.where(kept, radius[going], low[going])
        high[going] = torch.where(kept, high[going], radius[going])
        open_above, open_below = torch.isinf(high), low == 0
        radius = torch.where(open_above, low * step, torch.where(open_below, high / step, (low * high).sqrt()))
        radius, step = radius.clamp(max=limit), min(step**2, _LONGEST)
        done = (high <= low * _NARROW) | (low >= limit) | (open_below & (high < guess * tiny))
        going = (~done).nonzero().squeeze(1)
    return low


def _guessed(enclosure: Enclosure, nodes: Tensor, target: Tensor, threat: Threat, tiny: float) -> tuple[Tensor, Tensor]:
    """Where the linear part would fail, and what to try first; by the size of features where a bound is too dear."""
    if enclosure.one_by_one(threat):
        size = enclosure.x[nodes].norm(dim=-1)
        guess = torch.where(size > 0, 0.1 * size, 0.1)
        return guess, guess / 2
    radius, own = torch.full((len(nodes),), tiny).double(), enclosure.logits[nodes]
    margins = (own.gather(1, target[:, None]) - own).scatter(1, target[:, None], torch.inf)
    found = enclosure.margins(nodes, nodes, radius, target, threat, enough=-torch.inf, known="first order")
    slopes = ((margins - found.affine) / tiny).clamp(min=tiny)
    guess = (margins / slopes).nan_to_num(torch.inf).amin(-1).clamp(min=tiny)
    steep = _STEEP * tiny / found.steepest.clamp(min=tiny)
    return guess, torch.minimum(guess / 1.2, steep)


def holds(
    enclosure: Enclosure,
    nodes: Tensor,
    target: Tensor,
    radius: Tensor,
    threat: Threat = "node",
    *,
    cap: bool = True,
    known: Known = "all",
) -> Tensor:
    """Whether each node keeps its class within its radius."""
    found: Margins = enclosure.margins(nodes, nodes, radius.double(), target, threat, enough=0.0, known=known)
    return ((found.best if cap else found.affine) > 0).all(-1)
