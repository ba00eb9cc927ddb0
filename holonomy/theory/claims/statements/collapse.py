"""Claims on rank collapse: Simplicial section 3.2 as printed, and Theorem RC in its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from holonomy.theory.attention.chained_collapse import (
    chain,
    climb_constant,
    crowded,
    cubic_constant,
    diagonal_simplexes,
    two_places,
)
from holonomy.theory.attention.masked_collapse import centre_radius, masked_collapse, printed_masked_collapse
from holonomy.theory.attention.printed_collapse import (
    linear_logits,
    mixed_norm,
    outnumbered_tokens,
    printed_collapse,
    printed_depth,
    residual_lower,
    residual_upper,
    split_queries,
)
from holonomy.theory.attention.projections import Projections, attend, attention_heads
from holonomy.theory.attention.rank_collapse import FORMS, CollapseForm, collapse_bound, collapse_step, measure_collapse
from holonomy.theory.attention.sizes import diameter
from holonomy.theory.claims.search import Comparison, draw_input, draw_layer, draw_mask, on_a_line, search
from holonomy.theory.claims.verdict import Claims, Draws, Trial, rounding

CLAIMS = Claims()  #: claims of the families ``collapse`` and ``masked``

_RC: dict[CollapseForm, str] = {
    "pair": "diam f <= tanh(max osc <s(q_i - q_j), kappa> / 4) diam T",
    "product": "diam f <= tanh(s diam(q) diam(kappa) / 4) diam T",
    "chain": "diam f <= L sum_j (1 + a_j) tanh((zeta + d_j) / 4), masks of tokens alone, from norms, R and diam X",
    "weights": "diam f <= tanh(s |W_K0| diam X (sum of diam kappa) / 4) min(diam T, 2 max T), from norms, R and diam X",
    "cubic": "diam f <= (s N^2 / 4) prod|W_K| prod|W_V| R^{2(N-1)} diam(X)^3",
}


def _compare(x: Tensor, layer: Projections, *, form: CollapseForm) -> Comparison:
    y = attend(x, layer)
    return Comparison(diameter(y), collapse_step(layer, x, form), y.detach().abs().amax())


def _opposites(draws: Draws, form: CollapseForm) -> Iterator[Trial]:
    """Two opposite tokens on a line, all weights 1: pair and product are exact there, cubic for N = 1 as they meet."""
    for order in (1, 2, 3):
        for width in (0.1, 0.5, 1.0, 1.5):
            layer, x = on_a_line(draws, [1.0] * (order + 1), width, -width)
            at = {"N": float(order), "n": 2.0, "width": width}
            yield from _compare(x, layer, form=form).trials(at)


for form in FORMS:
    CLAIMS.add(
        f"collapse.{form}",
        "Theorem RC",
        statement=_RC[form],
        axis="N",
        sharpest=partial(_opposites, form=form),
        compare=partial(_compare, form=form),
    )(search)


def _sharpest_chain(_: Draws) -> Iterator[Trial]:
    """The crowd at logits where each part of the form matters: its field alone, and what keys do to each other."""
    for order, interaction, known in ((2, 0.05, 0.99993), (2, 1.0, 0.97089), (3, 1.0, 0.89057)):
        z = torch.tensor(interaction, dtype=torch.float64)
        measured = two_places(order, z).item() * order**2 * interaction / 4
        at = {"order": float(order)}
        yield Trial(measured, chain(order, z, z).item(), at=at, known=known, note=f"z = {interaction:g}")


@CLAIMS.add("collapse.chain", "Theorem RC", statement=_RC["chain"], axis="N", sharpest=_sharpest_chain)
def _chain(draws: Draws) -> Iterator[Trial]:
    """Random layers and ascents, and one token against a crowd far out, where the form is nearest to its bound."""
    yield from search(draws, partial(_compare, form="chain"))
    yield from _opposites(draws, "chain")
    for order in (2, 3, 8):
        for _ in draws.rounds(20):
            z = torch.tensor(draws.logarithmic(0.01, 20.0 / order), dtype=torch.float64)
            measured = two_places(order, z) * order**2 * z / 4
            bound = torch.minimum(chain(order, z, z), order * torch.tanh(order * z / 4))
            # Numbers, not a layer's output: the claim's order stays within those that are drawn.
            yield Trial(measured.item(), bound.item(), at={"order": float(order)})


def _sharpest_constant(_: Draws) -> Iterator[Trial]:
    for order, known in ((1, 0.9998), (2, 0.9097), (3, 0.75292)):
        bracket = cubic_constant(order)
        note = "one token against a crowd, both far out"
        yield Trial(bracket.lower, bracket.upper, at={"order": float(order)}, known=known, note=note)


@CLAIMS.add("collapse.constant", "Theorem RC", "lower", axis="order", sharpest=_sharpest_constant)
def _constant(draws: Draws) -> Iterator[Trial]:
    """The form `cubic` holds with c_N s N^2 / 4, c_2 = 0.684 and c_3 = 0.715, where tokens alone are masked."""
    for order in (1, 2, 3):
        bracket = cubic_constant(order)
        at = {"order": float(order)}
        for copies in (1303.0, 10.0**6, 10.0**30):
            yield Trial(crowded(order, copies), bracket.upper, at=at)
        for _ in draws.rounds(1):
            found = climb_constant(order, draws.integer(1, 2), draws.integer(2, 3), draws.generator, starts=8, steps=60)
            yield Trial(found, bracket.upper, at=at)


@CLAIMS.add("collapse.constant_masked", "Theorem RC", axis="N")
def _diagonal(_: Draws) -> Iterator[Trial]:
    """Under a mask of simplexes for all queries the form `cubic` is within 0.99 of what is measured at every N."""
    for order in (1, 2, 3):
        layer, x, mask = diagonal_simplexes(order, 1000.0)
        reached = diameter(attend(x, layer, mask)).item()
        yield Trial(0.99 * collapse_step(layer, x, "cubic", mask).item(), reached, at={"N": float(order)})


def _sharpest_depth(draws: Draws) -> Iterator[Trial]:
    layers, x = _two_tokens(draws, 0.5, 1.0)
    pairs = zip(measure_collapse(layers, x), collapse_bound(layers, x), strict=True)
    yield from _by_depth(pairs, repeat(rounding(draws.dtype)), N=1, n=2)


@CLAIMS.add("collapse.depth", "Theorem RC", axis="depth", sharpest=_sharpest_depth, rounds=20)
def _depth(draws: Draws, _: int) -> Iterator[Trial]:
    """The form `weights`, iterated over a stack."""
    order, features, tokens = draws.integer(1, 3), draws.integer(1, 4), draws.integer(2, 4)
    plain = draws.integer(0, 1) == 0
    heads = 1 if plain else draws.integer(1, 2)
    layers = [draw_layer(draws, order, features, heads=heads, plain=plain) for _ in range(4)]
    x = draw_input(draws, tokens, features)
    pairs = zip(measure_collapse(layers, x), collapse_bound(layers, x), strict=True)
    yield from _by_depth(pairs, _floors(layers, x), N=order, n=tokens)


def _by_depth(
    pairs: Iterable[tuple[float, float]], floors: Iterable[float], *, known: float = 1.0, **at: float
) -> Iterator[Trial]:
    """A trial for each depth of a stack: the diameter or residual, its bound, and the floor of its rounding."""
    for depth, ((measured, bound), floor) in enumerate(zip(pairs, floors, strict=False), 1):
        # Products of values grow beyond what a dtype holds: of nan and infinity the theorem says nothing.
        met, place = math.isfinite(floor) and not math.isnan(bound), {**at, "depth": depth}
        yield Trial(measured, bound, met, floor, {name: float(x) for name, x in place.items()}, known=known)


def _floors(layers: list[Projections], x: Tensor) -> Iterator[float]:
    """What is rounding after each layer, relative to the largest number so far."""
    largest = 0.0
    for layer in layers:
        x = attend(x, layer)
        size = x.abs().amax().item()
        largest = max(largest, size) if math.isfinite(size) else math.inf
        yield rounding(x.dtype) * largest


@CLAIMS.add("collapse.decay", "Theorem RC", axis="depth")
def _decay(draws: Draws) -> Iterator[Trial]:
    """The same on equal layers, beside Corollary 3.2."""
    # One stack of equal layers whose tokens do approach each other, for the picture of decay over depth.
    one = torch.eye(2, **draws.factory_kwargs)
    for order in (1, 2, 3):
        layer = Projections(0.9 * one.expand(order + 1, 1, 2, 2), 0.9 * one.expand(order, 1, 2, 2))
        x = draws.normal(4, 2)
        x = x / x.norm(dim=1).amax()
        layers = [layer] * 5
        pairs = zip(measure_collapse(layers, x), collapse_bound(layers, x), strict=True)
        trials = _by_depth(pairs, _floors(layers, x), N=order)
        for trial, (_, printed) in zip(trials, printed_depth(x, layers), strict=True):
            yield replace(trial, at={**trial.at, "printed": printed})


@CLAIMS.add("collapse.theorem_3_1", "Simplicial Theorem 3.1", "lower", expected=False, axis="n")
def _printed(draws: Draws) -> Iterator[Trial]:
    """|res X'| <= (4 gamma / sqrt d) beta' |X|^{2(N-1)} |res X|^3."""

    def compare(x: Tensor, layer: Projections) -> Comparison:
        y = attend(x, layer)
        return Comparison(residual_lower(y), printed_collapse(x, layer), y.detach().abs().amax())

    yield from search(draws, compare, batches=2, plain=True)
    yield from _split()


def _split() -> Iterator[Trial]:
    for tokens in (4098, 10_000, 100_000):
        measured, bound = split_queries(tokens)
        note = f"ordinary attention, {tokens} tokens whose queries split evenly between two keys"
        yield Trial(measured, bound, at={"N": 1.0, "n": float(tokens)}, note=note)


@CLAIMS.add("collapse.corollary_3_2", "Simplicial Corollary 3.2", "lower", expected=False, axis="depth")
def _corollary(draws: Draws) -> Iterator[Trial]:
    """|res X_L| <= |res X|^{3^L} (4 gamma H beta max|X|^{2(N-1)} / sqrt d)^{(3^L - 1)/2}."""
    for _ in draws.rounds(10):
        order, features = draws.integer(1, 3), draws.integer(1, 3)
        tokens, heads = draws.integer(2, 3), draws.integer(1, 2)
        drawn = [draw_layer(draws, order, features, heads=heads, channels=features) for _ in range(3)]
        # Heads side by side are as many features again: the stack keeps one head unless it is the last.
        layers = [Projections(layer.keys[:, :1], layer.values[:, :1]) for layer in drawn[:-1]] + drawn[-1:]
        x = draw_input(draws, tokens, features)
        floors = (floor * features * tokens for floor in _floors(layers, x))
        yield from _by_depth(printed_depth(x, layers), floors, N=order)
    yield from _split()


@CLAIMS.add("collapse.lemma_a2", "Simplicial Lemmas A.1, A.2", "equal", axis="N")
def _lemma_a2(draws: Draws) -> Iterator[Trial]:
    """Attention under first-order logits is the same in every row."""
    for order in (1, 2, 3):
        for _ in draws.rounds(10):
            layer = draw_layer(draws, order, 3)
            x = draw_input(draws, 4, 3)
            logits = linear_logits(x, residual_upper(x)[1], layer)
            heads = attention_heads(x, layer)
            y = logits.softmax(-1) @ heads.products
            # A logit's rounding is relative to its own size, and moves the weights by as much.
            size = heads.products.abs().amax().item() * (1 + logits.abs().amax().item())
            yield Trial(diameter(y).amax().item(), rounding(draws.dtype) * size, at={"N": float(order)})


@CLAIMS.add("collapse.softmax", "Theorem RC", rounds=60)
def _softmax(draws: Draws, index: int) -> Iterator[Trial]:
    """A softmax row moves by at most 2 tanh(osc/4), in l1."""
    size, width = draws.integer(2, 8), draws.logarithmic(0.01, 20.0)
    a, change = draws.normal(size) * 3, draws.normal(size) * width
    if index % 3 == 0:  # mass split between the least and the largest change, evenly after half of it
        change = torch.where(torch.arange(size, device=change.device) % 2 == 0, width, -width).to(change)
        even = math.log(size // 2 / ((size + 1) // 2))
        a = torch.where(change > 0, even, 0.0) - change / 2
    moved = ((a + change).softmax(0) - a.softmax(0)).abs().sum()
    bound = 2 * torch.tanh((change.amax() - change.amin()) / 4)
    yield Trial(moved.item(), bound.item(), floor=rounding(draws.dtype))


@CLAIMS.add("collapse.half_constant", "certificates", expected=False)
def _half_constant(_: Draws) -> Iterator[Trial]:
    """The cubic form holds with s N / 4 for s N^2 / 4."""
    for order, copies, scale, token, crowd in ((2, 1303, 0.35676, 5.0, 4.0), (2, 6882, 0.293517, 6.0, 5.0)):
        measured, bound = outnumbered_tokens(order, copies, scale, token, crowd)
        note = f"one token {token:g} and {copies} tokens {crowd:g} in one dimension"
        yield Trial(measured, bound, at={"N": float(order)}, note=note)


@CLAIMS.add("collapse.per_query_mask", "Theorem RC", expected=False)
def _per_query(draws: Draws) -> Iterator[Trial]:
    """The product form holds under masks that differ between queries."""
    # Two tokens that see only themselves never approach each other, however small their logits.
    for order in (1, 2, 3):
        layer, x = on_a_line(draws, [1.0] * (order + 1), 1.5, 0.5)
        mask = torch.zeros([2] * (order + 1), dtype=torch.bool, device=x.device)
        mask[(0,) * (order + 1)] = mask[(1,) * (order + 1)] = True
        measured = diameter(attend(x, layer, mask)).item()
        note = "two tokens that see only themselves"
        yield Trial(measured, collapse_step(layer, x, "product").item(), at={"N": float(order)}, note=note)


def _masked_stack(draws: Draws, *, small: bool) -> tuple[list[Projections], Tensor, Tensor]:
    tokens, features = draws.integer(2, 6), draws.integer(1, 4)
    mask = draw_mask(draws, tokens, 1)
    layers = [draw_layer(draws, 1, features) for _ in range(6)]
    if small:
        layers = [Projections(p.keys, p.values / mixed_norm(p.values).amax().clamp(min=1)) for p in layers]
    return layers, draw_input(draws, tokens, features), mask


def _sharpest_34(draws: Draws) -> Iterator[Trial]:
    """The second of two tokens sees both alike: the range halves; the residual is it over the root of two."""
    layers, x = _two_tokens(draws, 0.0, 1.0)
    causal = torch.ones(2, 2, dtype=torch.bool, device=x.device).tril()
    yield from _by_depth(printed_masked_collapse(layers, x, causal), repeat(0.0), known=0.70711, N=1, radius=1)


@CLAIMS.add("masked.theorem_3_4", "Simplicial Theorem 3.4, N = 1", axis="depth", sharpest=_sharpest_34, rounds=30)
def _theorem_34(draws: Draws, _: int) -> Iterator[Trial]:
    """|res X_t|_F <= sqrt(n/2) |ranges|_2 (1 - eps^r)^{floor(t/r)}, |W_V|_{1,inf} <= 1."""
    layers, x, mask = _masked_stack(draws, small=True)
    floor = rounding(draws.dtype) * x.abs().amax().item()
    radius = centre_radius(mask) or math.nan
    yield from _by_depth(printed_masked_collapse(layers, x, mask), repeat(floor), N=1, radius=radius)


def _two_tokens(draws: Draws, key: float, value: float) -> tuple[list[Projections], Tensor]:
    """Three equal layers of ordinary attention, and two tokens on a line, whose diameter is all that there is."""
    layer, x = on_a_line(draws, (key, 1.0), 1.0, -1.0, value=value)
    return [layer] * 3, x


def _sharpest_dobrushin(draws: Draws) -> Iterator[Trial]:
    yield from _by_depth(masked_collapse(*_two_tokens(draws, 0.5, 0.7)), repeat(rounding(draws.dtype)), N=1)


@CLAIMS.add("masked.dobrushin", "Theorem RC", axis="depth", sharpest=_sharpest_dobrushin, rounds=30)
def _dobrushin(draws: Draws, _: int) -> Iterator[Trial]:
    """For N = 1, diam X_t <= tau(A_t..A_1) diam(X_0) prod|W_V|_2."""
    layers, x, mask = _masked_stack(draws, small=False)
    first = rounding(draws.dtype) * x.abs().amax().item()
    yield from _by_depth(masked_collapse(layers, x, mask), (max(first, f) for f in _floors(layers, x)), N=1)


@CLAIMS.add("masked.higher_orders", "Simplicial Theorem 3.4, N >= 2", "lower", expected=False, axis="depth")
def _higher_masked(draws: Draws) -> Iterator[Trial]:
    """Masked attention collapses at any N."""
    # The fixed point of N = 2 stays above any decay; here that of eps = 1/2, where the least weight is even 1.
    layer, x = on_a_line(draws, [1.0] * 3, 1.0, 0.0)
    mask = torch.zeros(2, 2, 2, dtype=torch.bool, device=x.device)
    mask[0, 0, 0] = mask[1, 0, 1] = True
    start = residual_upper(x)[0].item()
    for depth in range(1, 9):
        x = attend(x, layer, mask)
        note = "tokens 1 and 0 with simplexes (1; 1, 1) and (2; 1, 2) stay as they are"
        at = {"N": 2.0, "depth": float(depth)}
        yield Trial(residual_lower(x).item(), start * 0.5**depth, at=at, note=note)


@CLAIMS.add("masked.lemma_b1", "Simplicial Lemma B.1", expected=False)
def _lemma_b1(draws: Draws) -> Iterator[Trial]:
    """X_ij(t+T) <= rho eps^T m + (1 - rho eps^T) M for any W_V."""
    # With values that swap two channels a token leaves the range of its own channel.
    swap = draws.normal(1).new_tensor([[0.0, 1.0], [1.0, 0.0]])
    x = swap.new_tensor([[1.0, 2.0], [1.0, 2.0]])
    layer = Projections(torch.zeros_like(swap).expand(2, 1, 2, 2), swap.expand(1, 1, 2, 2))
    after = attend(x, layer)
    note = "W_V swaps two channels and X = [[1, 2], [1, 2]]"
    yield Trial(after[0, 0].item(), x[:, 0].amax().item(), at={"N": 1.0}, note=note)
