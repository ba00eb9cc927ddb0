r"""What a layer does to distances: Hypformer Propositions 4.1 and 4.2, and the naive change of curvature, eq. 8.

Proposition 4.2 says that HTC and HRC keep the order of distances. What is true is stronger and narrower: where the
function is an isometry of unit coordinates (the identity, an orthogonal map, the space part of a Lorentz boost), all
distances are multiplied by the same :math:`\sqrt{\kappa_1/\kappa_2}`; a general linear map, ReLU or LayerNorm changes
the order of many triples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holonomy import checks, numerics
from holonomy._shapes import Float
from holonomy.manifolds import Lorentz
from holonomy.theory.certificates.stretching import Ends, ends_of


@dataclass(frozen=True)
class DistanceScaling:
    """What a map does to the distances between points.

    >>> from holonomy.layers import HRC
    >>> m = Lorentz(-1.0)
    >>> distance_scaling(HRC(lambda s: s, m), m.lift(torch.randn(4, 2))).flipped
    0.0
    """

    least: float  #: the smallest ratio of a distance after to before
    largest: float  #: the largest
    flipped: float  #: of all triples (i; j, k) whose distances d(i, j), d(i, k) differ, the share whose order changes
    expected: float  #: the root of the ratio of curvatures, by which an isometry of unit coordinates scales
    before: Tensor  #: all distances before, ``(pairs)``, for a picture
    after: Tensor  #: all distances after


def distance_scaling(
    layer: Callable[[Tensor], Tensor], x: Float[Tensor, "n ambient"], *, ends: Ends | None = None
) -> DistanceScaling:
    """Measure ratios of distances before and after a map, and how many triples change their order.

    ``layer`` maps points between hyperboloids, the ``ends``, read off the layer if left out; ``x`` are at least three
    points ``(n, d + 1)``. Pairs at distance zero have no ratio. Fewer points, points that all are one, numbers that are
    not finite, or an end that is no hyperboloid, are a ValueError.

    >>> from holonomy.layers import HRC
    >>> m, to = Lorentz(-1.0, dtype=torch.float64), Lorentz(-0.25, dtype=torch.float64)
    >>> x = m.lift(torch.randn(5, 3, dtype=torch.float64))
    >>> round(distance_scaling(HRC(torch.neg, m, to), x).largest, 6)  # sqrt(1 / 0.25)
    2.0
    """
    source, target = ends or ends_of(layer)
    if source is None or target is None:
        raise ValueError("layer must map between hyperboloids, got one with a Euclidean end.")
    checks.matrix("x", x, "n", "d + 1")
    if x.shape[0] < 3:
        raise ValueError(f"x must be (n, d + 1) with n at least 3, got {tuple(x.shape)}.")
    checks.finite("x", x)
    with torch.no_grad():
        y = layer(x)
        checks.finite("layer(x)", y)
        before, after = numerics.widen(source.cdist(x, x)), numerics.widen(target.cdist(y, y))
    pairs = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    first, second = before[pairs[0], pairs[1]], after[pairs[0], pairs[1]]
    if not bool((first > 0).any()):
        raise ValueError("x must hold two points apart, got one point only.")
    ratio = (second / first)[first > 0]
    changed = flipped(before, after, numerics.tolerance(x.dtype).rtol)
    expected = math.sqrt(source.curvature.item() / target.curvature.item())
    return DistanceScaling(ratio.amin().item(), ratio.amax().item(), changed, expected, first, second)


def flipped(before: Float[Tensor, "n n"], after: Float[Tensor, "n n"], tolerance: float = 0.0) -> float:
    """The share of triples (i; j, k) whose order of distances d(i, j), d(i, k) changes."""

    def order(distances: Tensor) -> Tensor:
        a, b = distances[:, :, None], distances[:, None, :]
        return torch.where((a - b).abs() > tolerance * (a + b), torch.sign(a - b), 0.0)

    n = before.shape[0]
    other = ~torch.eye(n, dtype=torch.bool, device=before.device)
    counted = (other[:, :, None] & other[:, None, :] & torch.triu(other)[None]) & (order(before) != 0)
    total = counted.sum().item()
    return ((order(before) * order(after) < 0) & counted).sum().item() / total if total else 0.0


def boost(direction: Float[Tensor, " d"]) -> Float[Tensor, "d ambient"]:
    r"""The space rows of a Lorentz boost: weights with which HTC is an isometry without bias.

    .. math:: W = \big( v,\; I + (\sqrt{1 + |v|^2} - 1)\, \hat v \hat v^\top \big)
    """
    time = (1 + direction.square().sum()).sqrt()
    turned = torch.eye(len(direction)).to(direction) + torch.outer(direction, direction) / (1 + time)
    return torch.cat([direction[:, None], turned], 1)


def naive_change(x: Float[Tensor, "*batch ambient"], target: Lorentz) -> Float[Tensor, "*batch ambient"]:
    """The naive change of curvature, Hypformer eq. 8: the space part stays and time is made again."""
    return target.lift(target.space(x))
