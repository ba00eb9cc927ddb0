"""The largest radius at which a certificate holds."""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy.theory.affine.arithmetic.ellipsoids import Threat
from holonomy.theory.affine.enclosure import Enclosure, Margins

# The search for a radius ends where it is known to this factor, or after so many bounds.
_NARROW, _MOST = 1.05, 16
# From so many tokens on, what follows the moving one has little weight in its average.
_MANY = 256


def largest_radii(
    enclosure: Enclosure, nodes: Tensor, target: Tensor, limit: float, threat: Threat = "node", *, cap: bool = True
) -> Tensor:
    """Bisection on a logarithmic scale, of each node by itself, from the radius at which the linear part would fail."""
    tiny = torch.finfo(torch.float64).eps ** 0.5
    guess = _guessed(enclosure, nodes, target, threat, tiny).clamp(min=tiny, max=limit)
    enclosure.reuse = len(enclosure.x) >= _MANY
    low, high = torch.zeros_like(guess), torch.full_like(guess, torch.inf)
    radius = (guess / 2).clamp(max=limit)
    going = torch.arange(len(nodes))
    for _ in range(_MOST):
        kept = holds(enclosure, nodes[going], target[going], radius[going], threat, cap=cap)
        low[going] = torch.where(kept, radius[going], low[going])
        high[going] = torch.where(kept, high[going], radius[going])
        open_above, open_below = torch.isinf(high), low == 0
        radius = torch.where(open_above, low * 2, torch.where(open_below, high / 2, (low * high).sqrt()))
        radius = radius.clamp(max=limit)
        done = (high <= low * _NARROW) | (low >= limit) | (open_below & (high < guess * tiny))
        going = (~done).nonzero().squeeze(1)
        if not len(going):
            break
    return low


def _guessed(enclosure: Enclosure, nodes: Tensor, target: Tensor, threat: Threat, tiny: float) -> Tensor:
    """Where the linear part would fail; a tenth of the features where a bound is too dear to ask."""
    if enclosure.one_by_one(threat):
        size = enclosure.x[nodes].norm(dim=-1)
        return torch.where(size > 0, 0.1 * size, 0.1)
    radius, own = torch.full((len(nodes),), tiny).double(), enclosure.logits[nodes]
    margins = (own.gather(1, target[:, None]) - own).scatter(1, target[:, None], torch.inf)
    found = enclosure.margins(nodes, nodes, radius, target, threat, enough=-torch.inf)
    slopes = ((margins - found.affine) / tiny).clamp(min=tiny)
    return (margins / slopes).nan_to_num(torch.inf).amin(-1)


def holds(
    enclosure: Enclosure,
    nodes: Tensor,
    target: Tensor,
    radius: Tensor,
    threat: Threat = "node",
    *,
    cap: bool = True,
) -> Tensor:
    """Whether each node keeps its class within its radius."""
    found: Margins = enclosure.margins(nodes, nodes, radius.double(), target, threat, enough=0.0)
    return ((found.best if cap else found.affine) > 0).all(-1)
