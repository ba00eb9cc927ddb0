r"""What a layer does to distances: Hypformer Propositions 4.1 and 4.2, and the naive change of curvature, eq. 8.

Proposition 4.2 says that HTC and HRC keep the order of distances. What is true is stronger and narrower: where the
function is an isometry of unit coordinates (the identity, an orthogonal map, the space part of a Lorentz boost), all
distances are multiplied by the same :math:`\sqrt{\kappa_1/\kappa_2}`; a general linear map, ReLU or LayerNorm changes
the order of many triples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holonomy import numerics
from holonomy.layers import HRC, HTC, HypActivation, HypLayerNorm
from holonomy.manifolds import Lorentz
from holonomy.theory.stretch import Ends, ends_of
from holonomy.theory.verdict import Claim, Draws, Trial

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["CLAIMS", "DistanceScaling", "boost", "distance_scaling", "flipped", "naive_change"]


@dataclass(frozen=True)
class DistanceScaling:
    """What a map does to the distances between points.

    Attributes:
        least: the smallest ratio of a distance after to before.
        largest: the largest.
        flipped: of all triples (i; j, k) whose distances d(i, j), d(i, k) differ, the share whose order changes.
        expected: the root of the ratio of curvatures, by which an isometry of unit coordinates scales.
        before: all distances before, ``(pairs)``, for a picture.
        after: all distances after.

    >>> m = Lorentz(-1.0)
    >>> distance_scaling(HRC(lambda s: s, m), m.lift(torch.randn(4, 2))).flipped
    0.0
    """

    least: float
    largest: float
    flipped: float
    expected: float
    before: Tensor
    after: Tensor


def distance_scaling(
    layer: Callable[[Tensor], Tensor], x: Float[Tensor, "n ambient"], *, ends: Ends | None = None
) -> DistanceScaling:
    """Measure ratios of distances before and after a map, and how many triples change their order.

    Args:
        layer: a map of points between hyperboloids.
        x: at least three points, ``(n, d + 1)``.
        ends: between which manifolds it maps; read off the layer if ``None``.

    Returns:
        The ratios and the share.

    Raises:
        ValueError: if there are fewer than three points, or an end is not a hyperboloid.

    >>> m, to = Lorentz(-1.0, dtype=torch.float64), Lorentz(-0.25, dtype=torch.float64)
    >>> x = m.lift(torch.randn(5, 3, dtype=torch.float64))
    >>> round(distance_scaling(HRC(torch.neg, m, to), x).largest, 6)  # sqrt(1 / 0.25)
    2.0
    """
    source, target = ends or ends_of(layer)
    if source is None or target is None:
        raise ValueError("layer must map between hyperboloids, got one with a Euclidean end.")
    if x.ndim != 2 or x.shape[0] < 3:
        raise ValueError(f"x must be (n, d + 1) with n at least 3, got {tuple(x.shape)}.")
    with torch.no_grad():
        y = layer(x)
        before, after = numerics.widen(source.cdist(x, x)), numerics.widen(target.cdist(y, y))
    pairs = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    first, second = before[pairs[0], pairs[1]], after[pairs[0], pairs[1]]
    ratio = numerics.safe_div(second, first)
    return DistanceScaling(
        ratio.amin().item(),
        ratio.amax().item(),
        flipped(before, after, numerics.tolerance(x.dtype).rtol),
        math.sqrt(source.curvature.item() / target.curvature.item()),
        first,
        second,
    )


def flipped(before: Float[Tensor, "n n"], after: Float[Tensor, "n n"], tolerance: float = 0.0) -> float:
    """The share of triples (i; j, k) whose order of distances d(i, j), d(i, k) changes.

    Args:
        before: distances.
        after: distances.
        tolerance: differences below it, relative to the distances, count as none, before and after.

    Returns:
        The share among the triples whose distances differ before.

    >>> near, far = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.zeros(2, 2)
    >>> flipped(near, far)
    0.0
    """

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

    Args:
        direction: v, the direction and the hyperbolic sine of the rapidity.

    Returns:
        W, ``(d, d + 1)``: :math:`W \eta W^\top = I`.

    >>> w = boost(torch.tensor([3.0, 4.0]))
    >>> torch.allclose(w[:, 1:] @ w[:, 1:].T - w[:, :1] @ w[:, :1].T, torch.eye(2), atol=1e-4)
    True
    """
    time = (1 + direction.square().sum()).sqrt()
    return torch.cat(
        [direction[:, None], torch.eye(len(direction)).to(direction) + torch.outer(direction, direction) / (1 + time)],
        1,
    )


def naive_change(x: Float[Tensor, "*batch ambient"], target: Lorentz) -> Float[Tensor, "*batch ambient"]:
    r"""The naive change of curvature, Hypformer eq. 8: the space part stays and time is made again.

    Args:
        x: points of any curvature.
        target: the manifold whose time they get.

    Returns:
        Points of ``target``.

    >>> naive_change(torch.tensor([1.0, 0.0]), Lorentz(-0.25))
    tensor([2., 0.])
    """
    return target.lift(target.space(x))


def _curvatures(draws: Draws) -> tuple[Lorentz, Lorentz]:
    first, second = (Lorentz(-draws.logarithmic(0.1, 10), dtype=draws.dtype, device=draws.device) for _ in range(2))
    return first, second


def _points(draws: Draws, manifold: Lorentz, count: int, features: int, radius: float = 2.0) -> Tensor:
    u = draws.normal(count, features) * (radius / features**0.5)
    return manifold.lift(u / (-manifold.curvature).sqrt())


def _closure(draws: Draws) -> Iterable[Trial]:
    """Off the hyperboloid by no more than the rounding of the squares that cancel."""
    for index in draws.rounds(200):
        source, target = _curvatures(draws)
        features = draws.integer(1, 8)
        x = _points(draws, source, 16, features, draws.logarithmic(0.01, 20))
        if index % 2:
            layer: nn.Module = HTC(features, features, source, target, dtype=draws.dtype, device=draws.device)
            with torch.no_grad():
                layer.get_parameter("weight").copy_(draws.normal(features, features + 1))
        else:
            layer = HRC(partial(nn.functional.linear, weight=draws.normal(features, features)), source, target)
        with torch.no_grad():
            y = layer(x)
        c = -target.curvature
        off = (c * (y[..., 1:].square().sum(-1) - y[..., 0].square()) + 1).abs()
        room = 8 * (features + 4) * torch.finfo(draws.dtype).eps * c * y[..., 0].square()
        worst = (off / room).argmax()
        yield Trial(off[worst].item(), room[worst].item())


def _isometries(draws: Draws) -> Iterable[Trial]:
    """The farthest that a ratio of distances is from the root of the ratio of curvatures, beside rounding."""
    for index in draws.rounds(150):
        source, target = _curvatures(draws)
        features = draws.integer(2, 6)
        x = _points(draws, source, 12, features)
        layer = _isometry(index % 3, draws, source, target, features)
        found = distance_scaling(layer, x)
        off = max(abs(found.least / found.expected - 1), abs(found.largest / found.expected - 1))
        yield Trial(off, numerics.tolerance(draws.dtype).rtol, at={"kind": index % 3})


def _isometry(kind: int, draws: Draws, source: Lorentz, target: Lorentz, features: int) -> nn.Module:
    """The identity, an orthogonal map, a boost."""
    if kind == 0:
        return HRC(nn.Identity(), source, target)
    if kind == 1:
        turn = torch.linalg.qr(draws.normal(features, features).double()).Q.to(draws.dtype)
        return HRC(partial(nn.functional.linear, weight=turn), source, target)
    layer = HTC(features, features, source, target, bias=False, dtype=draws.dtype, device=draws.device)
    with torch.no_grad():
        layer.weight.copy_(boost(0.5 * draws.normal(features)))
    return layer


def _general(draws: Draws) -> Iterable[Trial]:
    """Triples that change their order, beside none."""
    for index in draws.rounds(60):
        source, target = _curvatures(draws)
        features = draws.integer(2, 8)
        x = _points(draws, source, 16, features)
        layers: list[nn.Module] = [
            HTC(features, features, source, target, dtype=draws.dtype, device=draws.device),
            HypActivation(torch.relu, source, target),
            HypLayerNorm(features, source, target, elementwise_affine=False, device=draws.device, dtype=draws.dtype),
        ]
        layer = layers[index % 3]
        if isinstance(layer, HTC):
            with torch.no_grad():
                layer.weight.copy_(draws.normal(features, features + 1))
        share = distance_scaling(layer, x).flipped
        yield Trial(share, 0.0, at={"kind": index % 3}, note=f"{share:.1%} of the triples of 16 points change order")


def _naive(draws: Draws) -> Iterable[Trial]:
    """On a line, x = 1 is nearer to 0 than to 2.2 before, and nearer to 2.2 after."""
    source, target = (Lorentz(k, dtype=draws.dtype, device=draws.device) for k in (-1.0, -1 / 10_000))
    line = source.lift(torch.tensor([[1.0], [0.0], [2.2]], dtype=draws.dtype, device=draws.device))
    moved = naive_change(line, target)
    (_, low, high), (_, after_low, after_high) = source.cdist(line, line)[0], target.cdist(moved, moved)[0]
    # The claim: the ratio stays on the same side of one.
    inverted = (low / high > 1) != (after_low / after_high > 1)
    note = f"from 1 to 0 and to 2.2: {low:.4f} > {high:.4f} before, {after_low:.4f} < {after_high:.4f} after"
    yield Trial(float(inverted), 0.0, note=note)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "distances.closure",
        "Hypformer Prop. 4.1",
        "HTC and HRC send points of one hyperboloid to points of the other, to rounding.",
        _closure,
    ),
    Claim(
        "distances.isometries",
        "Hypformer Prop. 4.2",
        "The identity, orthogonal maps and boosts scale all distances by the root of the ratio of curvatures.",
        _isometries,
    ),
    Claim(
        "distances.general",
        "Hypformer Prop. 4.2, as printed",
        "HTC and HRC keep the order of distances, whatever the function.",
        _general,
        expected=False,
        note="linear maps, ReLU and LayerNorm change the order of triples",
    ),
    Claim(
        "distances.naive",
        "Hypformer eq. 8",
        "Keeping the space part and making time again keeps the order of distances.",
        _naive,
        expected=False,
    ),
)
"""Claims on distances and changes of curvature."""
