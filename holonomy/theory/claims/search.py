"""Random layers and inputs for claims about attention, many at once, and the climb towards the worst of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy.theory.attention.projections import Projections
from holonomy.theory.claims.verdict import Draws, Trial, rounding


class Comparison(NamedTuple):
    """A measured value and its bound, differentiable, and what rounding is relative to."""

    measured: Tensor  # the value
    bound: Tensor  # what is said of it
    size: Tensor  # of the numbers whose differences were taken; a value below 1000 eps times this is rounding

    def trials(self, at: Mapping[str, float], *, known: float = 1.0, note: str = "") -> Iterator[Trial]:
        """One for each row, or the one of a comparison without rows."""
        floor = rounding(self.measured.dtype) * self.size
        rows = zip(*(part.reshape(-1).tolist() for part in (self.measured, self.bound, floor)), strict=True)
        for measured, bound, low in rows:
            yield Trial(measured, bound, floor=low, at=at, known=known, note=note)


Compare = Callable[[Tensor, Projections], Comparison]
"""What a claim says of a layer at an input. It is run under ``torch.func.vmap``: no number is read back in it."""

Tensors = Mapping[str, Tensor]


def _sizes(draws: Draws, low: float, high: float, shape: Sequence[int]) -> Tensor:
    """Positive numbers of that shape, their logarithms uniform."""
    uniform = torch.rand(shape, generator=draws.generator, dtype=torch.float64)
    return (math.log(low) + (math.log(high) - math.log(low)) * uniform).exp().to(draws.device, draws.dtype)


def _layers(
    draws: Draws, batch: int, order: int, features: int, *, heads: int, channels: int, plain: bool
) -> dict[str, Tensor]:
    """Fields of :class:`Projections`, one layer in each row."""
    one = (batch, 1, 1, 1, 1)
    usual = features**-0.5
    drawn = {
        "keys": draws.normal(batch, order + 1, heads, features, channels) * usual * _sizes(draws, 0.1, 3.0, one),
        "values": draws.normal(batch, order, heads, features, channels) * usual * _sizes(draws, 0.1, 3.0, one),
    }
    if not plain:
        drawn["out"] = draws.normal(batch, heads * channels, features) * (heads * channels) ** -0.5
        drawn["key_bias"] = draws.normal(batch, order + 1, heads, channels) * 0.3
        drawn["value_bias"] = draws.normal(batch, order, heads, channels) * 0.3
        drawn["out_bias"] = draws.normal(batch, features)
    return drawn


def _inputs(draws: Draws, batch: int, tokens: int, features: int) -> Tensor:
    x = draws.normal(batch, tokens, features)
    kind = torch.randint(0, 3, (batch, 1, 1), generator=draws.generator).to(x.device)
    near = draws.normal(batch, 1, features) + _sizes(draws, 0.01, 1.0, (batch, 1, 1)) * x
    share = torch.randint(1, tokens + 1, (batch, 1, 1), generator=draws.generator).to(x.device)
    two = torch.where(torch.arange(tokens, device=x.device)[:, None] < share, x[:, :1], x[:, -1:])
    x = torch.where(kind == 0, x, torch.where(kind == 1, near, two))
    return x * _sizes(draws, 0.1, 3.0, (batch, 1, 1))


def draw_layer(
    draws: Draws, order: int, features: int, *, heads: int = 1, channels: int | None = None, plain: bool = True
) -> Projections:
    """Draw a layer whose matrices have sizes between 0.1 and 3 times the usual."""
    drawn = _layers(draws, 1, order, features, heads=heads, channels=channels or features, plain=plain)
    skip = not plain and draws.integer(0, 2) == 0
    first: dict[str, Any] = {name: rows[0] for name, rows in drawn.items()}
    return Projections(**first, skip=skip)


def on_a_line(draws: Draws, keys: Sequence[float], *tokens: float, value: float = 1.0) -> tuple[Projections, Tensor]:
    """Tokens on a line, and a layer whose matrices are numbers: one for the query and each key, one for all values."""
    x = draws.normal(1).new_tensor(tokens)[:, None]
    return Projections(x.new_tensor(keys)[:, None, None, None], x.new_full((len(keys) - 1, 1, 1, 1), value)), x


def draw_input(draws: Draws, tokens: int, features: int) -> Tensor:
    """Draw tokens, of sizes between 0.1 and 3, scattered, near each other, or at two places."""
    return _inputs(draws, 1, tokens, features)[0]


def draw_mask(draws: Draws, tokens: int, order: int) -> Tensor:
    """Draw a mask that leaves each simplex with an even chance and every query at least itself."""
    mask = draws.normal(*[tokens] * (order + 1)) > 0
    at = torch.arange(tokens, device=mask.device)
    mask[(at,) * (order + 1)] = True
    return mask


_TOKENS = {1: 6, 2: 5, 3: 4}


def search(
    draws: Draws,
    compare: Callable[..., Comparison],
    *,
    orders: Sequence[int] = (1, 2, 3),
    batches: int = 4,
    climbs: int = 5,
    plain: bool = False,
    masked: bool = False,
) -> Iterator[Trial]:
    """Compare on random layers and inputs, and on those that an ascent from some of them finds."""
    # A batch has one shape: n, d, heads, whether there is a skip connection; its rows differ in all else.
    root = math.sqrt(draws.budget)
    rows, tops = math.ceil(25 * root), math.ceil(climbs * root)
    for order in orders:
        for index in range(math.ceil(batches * root)):
            features, tokens = draws.integer(1, 5), draws.integer(2, _TOKENS.get(order, 3))
            heads = 1 if plain else draws.integer(1, 2)
            drawn = _layers(draws, rows, order, features, heads=heads, channels=features, plain=plain)
            x, skip = _inputs(draws, rows, tokens, features), not plain and draws.integer(0, 2) == 0
            at = {"N": float(order), "n": float(tokens)}
            here = partial(compare, mask=draw_mask(draws, tokens, order)) if masked else compare
            yield from compare_all(here, x, drawn, skip=skip).trials({**at, "climbed": 0.0})
            if climbs and index < (batches + 1) // 2:
                first = {name: values[:tops] for name, values in drawn.items()}
                yield from climb(here, x[:tops], first, skip=skip).trials({**at, "climbed": 1.0})


def compare_all(compare: Compare, x: Tensor, layers: Tensors, *, skip: bool = False) -> Comparison:
    """Compare row by row."""

    def row(x: Tensor, tensors: dict[str, Any]) -> Comparison:
        return compare(x, Projections(**tensors, skip=skip))

    return Comparison(*torch.func.vmap(row)(x, dict(layers)))


def climb(
    compare: Compare, x: Tensor, layers: Tensors, *, skip: bool = False, steps: int = 60, rate: float = 0.05
) -> Comparison:
    """Ascend the ratio of measured value to bound over the tokens and the layers' matrices, row by row."""
    starts = {"x": x, **{name: layers[name] for name in ("keys", "values", "out") if name in layers}}
    sizes = {name: start.detach().abs().mean().clamp(min=0.01) for name, start in starts.items()}
    moves = {name: torch.zeros_like(start, requires_grad=True) for name, start in starts.items()}
    optimizer = torch.optim.Adam(moves.values(), lr=rate)
    best = compare_all(compare, x, layers, skip=skip)
    for _ in range(steps):
        points = {name: start + sizes[name] * moves[name] for name, start in starts.items()}
        tokens = points.pop("x")
        found = compare_all(compare, tokens, {**layers, **points}, skip=skip)
        ratio = found.measured / found.bound
        best = _better(best, Comparison(*(part.detach() for part in found)))
        optimizer.zero_grad()
        # A row whose bound is infinite stops; singular values that are equal have no derivative.
        torch.where(ratio.isfinite(), -ratio, 0.0).sum().backward()
        for move in moves.values():
            if move.grad is not None:
                move.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    return best


def _better(best: Comparison, found: Comparison) -> Comparison:
    """Row by row the larger ratio, of those above rounding."""
    floor = rounding(found.measured.dtype) * found.size
    wins = (found.measured >= floor) & (found.measured * best.bound > best.measured * found.bound)
    return Comparison(*(torch.where(wins, new, old) for new, old in zip(found, best, strict=True)))
