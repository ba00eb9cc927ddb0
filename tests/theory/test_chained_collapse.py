"""The form `chain` of Theorem RC holds, and the constant of the form `cubic` lies where it is said to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holonomy.layers import SimplicialAttention
from holonomy.theory.attention import chained_collapse
from holonomy.theory.attention.chained_collapse import (
    chain,
    climb_constant,
    crowded,
    cubic_constant,
    diagonal_simplexes,
    two_places,
)
from holonomy.theory.attention.projections import NotCoveredError, Projections, attend
from holonomy.theory.attention.rank_collapse import collapse_bound, collapse_step, measure_collapse
from holonomy.theory.attention.sizes import diameter
from tests.theory.strategies import SEEDS, drawn

pytestmark = pytest.mark.usefixtures("without_shape_checks")

SLACK = 1 + 1e-9


@given(SEEDS)
def test_chain_holds_and_is_below_the_form_of_weights(seed):
    layer, x, _ = drawn(seed)
    y = attend(x, layer)
    bound = collapse_step(layer, x, "chain").item()
    assert diameter(y) <= bound * SLACK + 1e-12 * (1 + y.abs().max().item())
    assert bound <= collapse_step(layer, x, "weights").item()


@given(SEEDS)
def test_chain_holds_under_a_mask_of_tokens(seed):
    layer, x, mask = drawn(seed)
    tokens = mask[(slice(None),) + (0,) * (mask.ndim - 1)]
    tokens[0] = True
    slots = [tokens.reshape(-1, *[1] * m) for m in range(layer.order)]
    simplexes = torch.ones((), dtype=torch.bool)
    for slot in slots:
        simplexes = simplexes & slot
    shared = simplexes.expand(mask.shape)
    y = attend(x, layer, shared)
    bound = collapse_step(layer, x, "chain", shared).item()
    assert diameter(y) <= bound * SLACK + 1e-12 * (1 + y.abs().max().item())


def test_chain_refuses_a_mask_of_simplexes():
    layer, x, mask = diagonal_simplexes(2, 5.0)
    with pytest.raises(NotCoveredError, match="tokens"):
        collapse_bound([layer], x, form="chain", mask=mask)


@given(st.integers(2, 12), st.floats(1e-3, 30.0))
def test_one_token_against_a_crowd_keeps_below_the_chain(order, z):
    """Weights that are exact, in the limit where the form is nearest."""
    z = torch.tensor(z, dtype=torch.float64)
    moved = two_places(order, z) * order**2 * z / 4
    assert moved <= torch.minimum(chain(order, z, z), order * torch.tanh(order * z / 4)) * SLACK


@given(st.integers(0, 10**6), st.integers(2, 3))
def test_chain_holds_for_any_weights_that_are_products_but_for_their_logits(seed, order):
    """The theorem's inside: functions of tuples that move by so much with one key, and laws from multilinear logits."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 3
    prior = torch.randn(order, tokens, generator=generator).double() * 2
    key = torch.rand(order, tokens, generator=generator).double()
    value = torch.rand(order, tokens, generator=generator).double()
    q = torch.rand(2, generator=generator).double() * 6

    def over_tuples(rows, combine):
        total = rows[0]
        for row in rows[1:]:
            total = combine(total[..., None], row)
        return total

    kappa, products = (over_tuples(rows, torch.mul) for rows in (key, value))
    log_prior = over_tuples(prior, torch.add)
    low, high = (((log_prior + size * kappa).flatten().softmax(0) @ products.flatten()) for size in q)
    apart = (key.amax(1) - key.amin(1)).amax().item()
    field = torch.tensor((q[1] - q[0]).abs().item() * apart)
    interaction = torch.tensor(q.amax().item() * apart**2)
    moves = (value.amax(1) - value.amin(1)).amax()
    assert (high - low).abs() <= moves * chain(order, field, interaction) * (1 + 1e-6)


def test_at_small_logits_the_constant_is_that_of_first_order():
    z = torch.tensor(1e-4, dtype=torch.float64)
    for order in (2, 3, 5):
        assert math.isclose(chain(order, z, z).item(), order * z.item() / 4, rel_tol=1e-3)


@pytest.mark.parametrize(("order", "upper"), [(1, 1.0), (2, 0.6831), (3, 0.7150), (16, 0.762)])
def test_the_constant_is_bracketed(order, upper):
    found = cubic_constant(order)
    assert 0.47 < found.lower < found.upper <= upper
    z = torch.linspace(0.001, 40 / order, 5003, dtype=torch.float64)
    exact = 4 / (order**2 * z) * torch.minimum(chain(order, z, z), order * torch.tanh(order * z / 4))
    assert exact.amax() <= found.upper <= exact.amax() * 1.002 + 1e-6


def test_crowds_come_near_the_limit():
    known = cubic_constant(2).lower
    reached = [crowded(2, copies) for copies in (1e3, 1e6, 1e30)]
    assert reached == sorted(reached)
    assert 0.97 * known < reached[-1] < known


def test_a_crowd_is_a_layer():
    """The share that is computed, measured on 60 tokens: of all gaps and scales one is the best on the grid."""
    layer = Projections(torch.ones(3, 1, 1, 1).double(), torch.ones(2, 1, 1, 1).double())
    shares = []
    for gap in (0.05, 0.1, 0.2):
        x = torch.tensor([[1.0], *[[1 - gap]] * 59]).double()
        for z in (0.3, 0.6, 1.2, 2.4):
            scaled = replace(layer, scale=z / gap**2)
            shares.append((diameter(attend(x, scaled)) / collapse_step(scaled, x, "cubic")).item())
    assert 0.4 < max(shares) <= crowded(2, 59.0) * 1.0001


def test_the_climb_finds_no_more_than_is_proved():
    for order in (1, 2):
        found = climb_constant(order, 2, 3, torch.Generator().manual_seed(0), starts=4, steps=60)
        assert 0.3 < found <= cubic_constant(order).upper


@pytest.mark.parametrize("order", [1, 2, 3])
def test_masks_of_simplexes_attain_the_cubic_form(order):
    layer, x, mask = diagonal_simplexes(order, 1000.0)
    share = (diameter(attend(x, layer, mask)) / collapse_step(layer, x, "cubic", mask)).item()
    assert 0.99 < share <= 1


def test_chain_on_our_layers_and_over_depth():
    torch.manual_seed(0)
    layers = [SimplicialAttention(8, 2, order=order).double() for order in (1, 2, 3)]
    x = torch.nn.functional.normalize(torch.randn(4, 8).double(), dim=1)
    bounds = collapse_bound(layers, x, form="chain")
    assert all(a <= b for a, b in zip(measure_collapse(layers, x), bounds, strict=True))
    assert bounds[-1] <= collapse_bound(layers, x)[-1]


def test_sizes_beyond_float_leave_the_other_form():
    big = Projections(1e200 * torch.ones(3, 1, 1, 1).double(), torch.ones(2, 1, 1, 1).double())
    x = torch.tensor([[1.0], [2.0]]).double()
    assert collapse_step(big, x, "chain") == collapse_step(big, x, "weights")


def test_the_lowest_of_the_lower_bounds():
    """The docstring's number for all N from 2 on: the lower bounds fall to N = 10 and rise from there."""
    lower = {order: cubic_constant(order).lower for order in (2, 9, 10, 11, 64)}
    assert min(lower, key=lower.__getitem__) == 10
    assert 0.477 <= lower[10] < 0.478
    docstring = str(chained_collapse.__doc__)
    assert r"0.477 \le c_N \le 0.762" in docstring
