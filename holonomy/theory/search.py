"""Random layers and inputs for claims about attention, and the climb towards the worst of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from holonomy.theory.projections import Projections
from holonomy.theory.verdict import Draws, Trial

__all__ = ["Compare", "Comparison", "climb", "draw_input", "draw_layer", "draw_mask", "search"]


class Comparison(NamedTuple):
    """A measured value and its bound, differentiable, and what rounding is relative to.

    Attributes:
        measured: the value.
        bound: what is said of it.
        size: of the numbers whose differences were taken; a value below 1000 eps times this is rounding.

    >>> Comparison(torch.tensor(1.0), torch.tensor(2.0)).size
    0.0
    """

    measured: Tensor
    bound: Tensor
    size: float = 0.0


Compare = Callable[[Tensor, Projections], Comparison]
"""What a claim says of a layer at an input."""


def draw_layer(
    draws: Draws, order: int, features: int, *, heads: int = 1, channels: int | None = None, plain: bool = True
) -> Projections:
    """Draw a layer whose matrices have sizes between 0.1 and 3 times the usual.

    Args:
        draws: random numbers.
        order: N.
        features: d.
        heads: how many.
        channels: of a head; as many as features if left out.
        plain: no biases and no output matrix; otherwise both, and sometimes a skip connection.

    Returns:
        Its projections.

    >>> draw_layer(Draws(), 2, 3).keys.shape
    torch.Size([3, 1, 3, 3])
    """
    size = channels or features
    usual = features**-0.5
    keys = draws.normal(order + 1, heads, features, size) * usual * draws.logarithmic(0.1, 3.0)
    values = draws.normal(order, heads, features, size) * usual * draws.logarithmic(0.1, 3.0)
    if plain:
        return Projections(keys, values)
    return Projections(
        keys,
        values,
        draws.normal(heads * size, features) * (heads * size) ** -0.5,
        key_bias=draws.normal(order + 1, heads, size) * 0.3,
        value_bias=draws.normal(order, heads, size) * 0.3,
        out_bias=draws.normal(features),
        skip=draws.integer(0, 2) == 0,
    )


def draw_input(draws: Draws, tokens: int, features: int) -> Tensor:
    """Draw tokens, of sizes between 0.1 and 3, scattered, near each other, or at two places.

    Args:
        draws: random numbers.
        tokens: n.
        features: d.

    Returns:
        ``(n, d)``.

    >>> draw_input(Draws(), 4, 2).shape
    torch.Size([4, 2])
    """
    x, kind = draws.normal(tokens, features), draws.integer(0, 2)
    if kind == 1:
        x = draws.normal(features) + draws.logarithmic(0.01, 1.0) * x
    elif kind == 2:
        x = torch.where(torch.arange(tokens, device=x.device)[:, None] < draws.integer(1, tokens), x[:1], x[-1:])
    return x * draws.logarithmic(0.1, 3.0)


def draw_mask(draws: Draws, tokens: int, order: int) -> Tensor:
    """Draw a mask that leaves each simplex with an even chance and every query at least itself.

    Args:
        draws: random numbers.
        tokens: n.
        order: N.

    Returns:
        ``(n, ..., n)``, N+1 axes.

    >>> draw_mask(Draws(), 3, 2).shape
    torch.Size([3, 3, 3])
    """
    mask = draws.normal(*[tokens] * (order + 1)) > 0
    at = torch.arange(tokens, device=mask.device)
    mask[(at,) * (order + 1)] = True
    return mask


_TOKENS = {1: 6, 2: 5, 3: 4}


def search(
    draws: Draws,
    compare: Compare,
    *,
    orders: Sequence[int] = (1, 2, 3),
    count: int = 20,
    climbs: int = 2,
    plain: bool = False,
    channels: int | None = None,
    features: int | None = None,
) -> Iterator[Trial]:
    """Compare on random layers and inputs, and on those that an ascent from some of them finds.

    Args:
        draws: random numbers and budget.
        compare: the claim.
        orders: which N.
        count: random trials for each N at budget 1.
        climbs: ascents for each N at budget 1.
        plain: layers of one head without biases and output matrix.
        channels: of a head; as many as features if left out.
        features: d; up to five if left out.

    Yields:
        A trial each, ``at`` saying N, n and whether it was climbed to.

    >>> def compare(x: Tensor, layer: Projections) -> Comparison:
    ...     return Comparison(x.norm(), x.norm() * 2)
    >>> len(list(search(Draws(), compare, count=3, climbs=1)))
    12
    """
    for order in orders:
        for index in draws.rounds(count):
            # Climb from the first few, after their random trial: the count of climbs grows with the budget too.
            climbing = index < len(draws.rounds(climbs)) if climbs else False
            width = features or draws.integer(1, 5)
            tokens = draws.integer(2, _TOKENS.get(order, 3))
            heads = 1 if plain else draws.integer(1, 2)
            layer = draw_layer(draws, order, width, heads=heads, channels=channels, plain=plain)
            x = draw_input(draws, tokens, width)
            yield _trial(compare(x, layer), order, tokens, climbed=False)
            if climbing:
                yield _trial(climb(compare, x, layer), order, tokens, climbed=True)


def _trial(found: Comparison, order: int, tokens: int, *, climbed: bool) -> Trial:
    measured, bound = found.measured.item(), found.bound.item()
    floor = 1000 * torch.finfo(found.measured.dtype).eps * found.size
    at = {"N": float(order), "n": float(tokens), "climbed": float(climbed)}
    return Trial(measured, bound, floor=floor, at=at)


def climb(compare: Compare, x: Tensor, layer: Projections, *, steps: int = 60, rate: float = 0.05) -> Comparison:
    """Ascend the ratio of measured value to bound over the tokens and the layer's matrices.

    Args:
        compare: the claim.
        x: where to start.
        layer: with which layer to start.
        steps: of Adam.
        rate: its step size, as a share of the size of each matrix.

    Returns:
        The comparison of the largest ratio on the way.

    >>> def compare(x: Tensor, layer: Projections) -> Comparison:
    ...     return Comparison(x.sin().amax(), torch.ones(()))
    >>> layer = Projections(torch.ones(2, 1, 1, 1), torch.ones(1, 1, 1, 1))
    >>> climb(compare, torch.zeros(1, 1), layer, rate=1.0).measured > 0.99
    tensor(True)
    """
    names = [name for name in ("keys", "values", "out") if getattr(layer, name) is not None]
    starts = [x, *[getattr(layer, name) for name in names]]
    sizes = [max(start.abs().mean().item(), 0.01) for start in starts]
    moves = [torch.zeros_like(start, requires_grad=True) for start in starts]
    optimizer = torch.optim.Adam(moves, lr=rate)
    best: Comparison | None = None
    best_ratio = -math.inf
    for _ in range(steps):
        point, *matrices = [start + size * move for start, size, move in zip(starts, sizes, moves, strict=True)]
        found = compare(point, replace(layer, **dict(zip(names, matrices, strict=True))))
        ratio = found.measured / found.bound
        above = found.measured.item() >= 1000 * torch.finfo(x.dtype).eps * found.size
        if best is None or (above and ratio.item() > best_ratio):
            best, best_ratio = Comparison(found.measured.detach(), found.bound.detach(), found.size), ratio.item()
        if not bool(ratio.isfinite()) or not ratio.requires_grad:
            break
        optimizer.zero_grad()
        (-ratio).backward()
        for move in moves:
            if move.grad is not None:  # singular values that meet have no derivative
                move.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    return best if best is not None else compare(x, layer)
