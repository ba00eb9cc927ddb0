"""Theorem RC holds on whatever is drawn and is sharp; the printed theorems break where they are said to."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holonomy.layers import SimplicialAttention
from holonomy.theory.attention.masked_collapse import centre_radius, dobrushin, masked_collapse, printed_masked_collapse
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
from holonomy.theory.attention.projections import NotCoveredError, Projections, attend, attention_heads
from holonomy.theory.attention.rank_collapse import FORMS, collapse_bound, collapse_step, measure_collapse
from holonomy.theory.attention.sizes import diameter
from holonomy.theory.claims.search import draw_input, draw_layer, draw_mask
from holonomy.theory.claims.verdict import Draws
from tests.theory.strategies import SEEDS, drawn

SLACK = 1 + 1e-9


def above_rounding(y):
    return 1e-12 * (1 + y.abs().max().item())


@pytest.mark.parametrize("form", FORMS)
@given(seed=SEEDS)
def test_theorem_rc_holds(form, seed):
    layer, x, _ = drawn(seed)
    y = attend(x, layer)
    assert diameter(y) <= collapse_step(layer, x, form).item() * SLACK + above_rounding(y)


@given(SEEDS)
def test_each_form_is_weaker_than_the_one_before(seed):
    layer, x, _ = drawn(seed)
    bounds = [collapse_step(layer, x, form).item() for form in FORMS]
    assert all(a <= b * SLACK + 1e-12 for a, b in pairwise(bounds))


@given(SEEDS)
def test_theorem_rc_holds_under_one_mask_for_all(seed):
    layer, x, mask = drawn(seed)
    shared = mask[:1].expand(mask.shape)
    y = attend(x, layer, shared)
    for form in FORMS:
        assert diameter(y) <= collapse_step(layer, x, form, shared).item() * SLACK + above_rounding(y)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("form", ["product", "determinant"])
def test_theorem_rc_on_our_layers(order, form):
    layer = SimplicialAttention(8, 2, order=order, form=form).double()
    x = torch.randn(4, 8).double()
    for bound in FORMS:
        assert measure_collapse([layer], x)[0] <= collapse_bound([layer], x, form=bound)[0]


def test_tokens_that_see_different_simplexes_are_not_covered():
    layer = nn.MultiheadAttention(2, 1).double()
    causal = torch.ones(3, 3).tril().bool()
    with pytest.raises(NotCoveredError):
        collapse_bound([layer], torch.randn(3, 2).double(), mask=causal)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("width", [0.1, 1.0, 1.5])
def test_pair_and_product_are_attained(order, width):
    layer = Projections(torch.ones(order + 1, 1, 1, 1).double(), torch.ones(order, 1, 1, 1).double())
    x = torch.tensor([[width], [-width]]).double()
    for form in ("pair", "product"):
        torch.testing.assert_close(collapse_step(layer, x, form), diameter(attend(x, layer)))


def test_cubic_is_attained_for_ordinary_attention_as_tokens_meet():
    layer = Projections(torch.ones(2, 1, 1, 1).double(), torch.ones(1, 1, 1, 1).double())
    x = torch.tensor([[0.001], [-0.001]]).double()
    torch.testing.assert_close(collapse_step(layer, x, "cubic"), diameter(attend(x, layer)), rtol=1e-5, atol=0)


def test_telescoped_diameters_are_bounds_too(monkeypatch):
    draws = Draws(2)
    for _ in range(20):
        layer, x = draw_layer(draws, 3, 3), draw_input(draws, 4, 3)
        exact = collapse_step(layer, x, "product")
        monkeypatch.setattr("holonomy.theory.attention.rank_collapse._LIMIT", 1)
        assert exact <= collapse_step(layer, x, "product") * SLACK
        monkeypatch.undo()


@given(st.integers(0, 10**6))
def test_weights_can_be_iterated(seed):
    draws = Draws(seed)
    order, features = draws.integer(1, 3), draws.integer(1, 3)
    stack = [draw_layer(draws, order, features, heads=2, plain=False) for _ in range(3)]
    x = draw_input(draws, 3, features)
    size, y = 0.0, x
    for layer in stack:
        y = attend(y, layer)
        size = max(size, y.abs().max().item())
    for form in FORMS:
        for measured, bound in zip(measure_collapse(stack, x), collapse_bound(stack, x, form=form), strict=True):
            assert measured <= bound * SLACK + 1e-10 * (1 + size)


@pytest.mark.parametrize("order", [2, 3, 4, 16])
def test_the_constant_needs_its_square(order):
    """s N / 4 is broken by one token against many; s N^2 / 4 is not."""
    ratios = []
    for copies, scale in ((1303, 0.35676), (6882, 0.293517), (100, 0.5), (10**6, 0.2)):
        measured, bound = outnumbered_tokens(order, copies, scale, 6.0, 5.0)
        ratios.append(measured / bound)
    assert max(ratios) <= order
    if order == 2:
        assert max(ratios) > 1.04


def test_outnumbered_tokens_are_a_layer():
    layer = Projections(torch.ones(3, 1, 1, 1).double(), torch.ones(2, 1, 1, 1).double(), scale=0.3)
    x = torch.tensor([[2.0], *[[1.5]] * 9]).double()
    torch.testing.assert_close(diameter(attend(x, layer)).item(), outnumbered_tokens(2, 9, 0.3, 2.0, 1.5)[0])


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6))
def test_residuals_are_bounded_from_both_sides(n, d, seed):
    x = Draws(seed).normal(n, d)
    lower, (upper, u) = residual_lower(x), residual_upper(x)
    tried = torch.stack([mixed_norm(x - Draws(s).normal(d)) for s in range(20)])
    assert lower <= upper * SLACK
    assert (lower <= tried * SLACK).all()
    torch.testing.assert_close(mixed_norm(x - u), upper)


def test_the_mixed_norm_is_no_norm():
    a = torch.zeros(4, 4)
    a[0] = 1
    assert mixed_norm(a + a.T) > mixed_norm(a) + mixed_norm(a.T)


@given(SEEDS)
def test_theorem_3_1_holds_for_toys(seed):
    layer, x, _ = drawn(seed, plain=True)
    y = attend(x, layer)
    assert residual_lower(y) <= printed_collapse(x, layer) * SLACK + above_rounding(y)
    (pair,) = printed_depth(x, [layer])
    assert math.isclose(pair[1], printed_collapse(x, layer).item(), rel_tol=1e-6, abs_tol=1e-300) or layer.order > 1


def test_theorem_3_1_fails_from_4098_tokens_on():
    assert split_queries(4096)[0] < split_queries(4096)[1]
    for n in (4098, 20_000):
        measured, bound = split_queries(n)
        assert bound < measured
        assert math.isclose(measured / bound, math.sqrt(n) / 64, rel_tol=1e-3)


def test_split_queries_are_a_layer():
    """The lean form against the layer that it stands for, with a second column that float64 can resolve."""
    n, eps, a, gap, delta = 16, 1.0, 2.0**-7, 60.0, 1.0
    b, xi = a * math.sqrt(n / 2), gap * math.sqrt(n) / (2 * eps * delta**2)
    sign = torch.tensor([1.0, -1.0] * (n // 2)).double()
    pair, split = torch.zeros(n).double(), torch.zeros(n).double()
    pair[:2], split[0], split[1] = 1.0, 1.0, -1.0
    x = eps * torch.eye(n).double() + xi * pair
    queries = torch.stack([a * sign, delta * pair], 1)
    keys = torch.stack([b * split, delta * pair], 1)
    layer = Projections(torch.stack([queries, keys])[:, None], split[:, None].expand(n, n)[None, None], scale=n**-0.5)
    y = attend(x, layer)
    torch.testing.assert_close(residual_lower(y).item(), split_queries(n, delta=delta)[0], rtol=1e-3, atol=0)
    norms = [mixed_norm(w) for w in (queries, keys, layer.values[0, 0])]
    bound = 4 / n * (2 * max(norms[:2])) ** 2 * 2 * norms[2] * eps**3
    torch.testing.assert_close(bound.item(), split_queries(n, delta=delta)[1])


@given(SEEDS)
def test_lemmas_a1_and_a2_are_identities(seed):
    layer, x, _ = drawn(seed, plain=True)
    u = residual_upper(x)[1]
    logits = linear_logits(x, u, layer)
    weights = logits.softmax(-1)
    y = weights @ attention_heads(x, layer).products
    assert diameter(y).max() <= 1e-11 * (1 + y.abs().max())
    near = u + 1e-5 * (x - u)  # what is left of the logits is of second order
    exact = layer.scale * (near @ layer.keys)[0] @ attention_heads(near, layer).kappa.mT
    assert (exact - linear_logits(near, u, layer)).abs().max() <= 1e-8 * (1 + exact.abs().max())


def test_printed_theorems_refuse_what_they_do_not_cover():
    layer = draw_layer(Draws(), 1, 2, plain=False)
    with pytest.raises(NotCoveredError):
        printed_collapse(torch.ones(2, 2).double(), layer)
    for wrong in (replace(layer, skip=True), draw_layer(Draws(), 2, 2), draw_layer(Draws(), 1, 2, heads=2)):
        with pytest.raises(NotCoveredError):
            masked_collapse([wrong], torch.ones(2, 2).double())


@given(st.integers(0, 10**6))
def test_masked_collapse_of_ordinary_attention(seed):
    draws = Draws(seed)
    n, features = draws.integer(1, 6), draws.integer(1, 4)
    x, mask = draw_input(draws, n, features), draw_mask(draws, n, 1)
    stack = [draw_layer(draws, 1, features) for _ in range(5)]
    for measured, bound in masked_collapse(stack, x, mask):
        assert measured <= bound * SLACK + 1e-10 * (1 + x.abs().max())
    small = [replace(p, values=p.values / mixed_norm(p.values).amax().clamp(min=1)) for p in stack]
    for measured, bound in printed_masked_collapse(small, x, mask):
        assert math.isnan(bound) is (centre_radius(mask) is None)
        assert math.isnan(bound) or measured <= bound * SLACK + 1e-10 * (1 + x.abs().max())


def test_dobrushin_is_attained():
    weights = torch.tensor([[0.7, 0.3], [0.2, 0.8]])
    x = torch.tensor([[1.0], [0.0]])
    torch.testing.assert_close(diameter(weights @ x), dobrushin(weights) * diameter(x))


@pytest.mark.parametrize(("edges", "radius"), [([(1, 0), (2, 1), (3, 2)], 3), ([(1, 0), (2, 0), (3, 0)], 1)])
def test_radius_from_a_centre(edges, radius):
    mask = torch.zeros(4, 4, dtype=torch.bool)
    for query, key in edges:
        mask[query, key] = True
    assert centre_radius(mask) is None, "the centre does not see itself"
    mask[0, 0] = True
    assert centre_radius(mask) == radius


def test_masked_attention_of_higher_order_need_not_collapse():
    layer = Projections(torch.ones(3, 1, 1, 1), torch.ones(2, 1, 1, 1))
    mask = torch.zeros(2, 2, 2, dtype=torch.bool)
    mask[0, 0, 0] = mask[1, 0, 1] = True
    x = torch.tensor([[1.0], [0.0]])
    assert torch.equal(attend(x, layer, mask), x)


def test_float32_agrees():
    draws = Draws(5)
    for _ in range(20):
        layer, x = draw_layer(draws, 2, 3), draw_input(draws, 4, 3)
        for form in FORMS:
            narrow = collapse_step(layer.to(torch.float32), x.float(), form)
            torch.testing.assert_close(narrow.double(), collapse_step(layer, x, form), rtol=1e-3, atol=1e-6)


def test_one_token_and_nobody():
    layer = Projections(torch.ones(3, 1, 2, 2), torch.ones(2, 1, 2, 2))
    assert collapse_bound([layer], torch.ones(1, 2), form="pair") == [0.0]
    nobody = torch.zeros(2, 2, 2, dtype=torch.bool)
    assert collapse_bound([layer], torch.ones(2, 2), form="pair", mask=nobody) == [0.0]


def test_equal_tokens_stay_equal_beyond_the_dtype():
    layers = [Projections(torch.ones(3, 1, 2, 2), 3 * torch.ones(2, 1, 2, 2))] * 12
    for tokens in (1, 4):
        for form in ("chain", "weights", "cubic"):
            assert collapse_bound(layers, torch.ones(tokens, 2), form=form) == [0.0] * 12
        for form in ("pair", "product"):
            bounds = collapse_bound(layers, torch.ones(tokens, 2), form=form)
            assert [bounds[0], bounds[-1]] == [0.0, math.inf]


@pytest.mark.parametrize("form", ["chain", *FORMS])
@pytest.mark.parametrize("size", [0.0, 1.0])
def test_what_overflows_is_infinite(form, size):
    layer = Projections(size * torch.ones(3, 1, 2, 2), torch.ones(2, 1, 2, 2))
    x = torch.tensor([[1e160, 0.0], [0.0, 1e160], [1.0, 1.0]], dtype=torch.float64)
    assert collapse_bound([layer], x, form=form) == [math.inf]


def test_rows_of_zeros_are_not_stochastic():
    """Dobrushin's bound of equal tokens is zero, where a query that sees nothing gets zero and others the token."""
    layer, mask = Projections(torch.ones(2, 1, 1, 1), torch.ones(1, 1, 1, 1)), torch.tensor([[True, False]] * 2)
    mask[1] = False
    for measure in (masked_collapse, printed_masked_collapse):
        with pytest.raises(NotCoveredError, match=r"^mask must leave every query a key"):
            measure([layer], torch.ones(2, 1), mask)
