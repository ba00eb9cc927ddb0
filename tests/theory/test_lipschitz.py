"""Bounds of the Lipschitz constant hold on whatever is drawn, are sharp where they should be, and are measured well."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import torch
from hypothesis import given
from torch import nn

from holonomy.layers import SimplicialAttention
from holonomy.theory.attention.lipschitz import lipschitz_bound, radius_after
from holonomy.theory.attention.local import local_lipschitz
from holonomy.theory.attention.measured import jacobian_norm, measure_lipschitz
from holonomy.theory.attention.projections import NotCoveredError, Projections, as_function, attend
from holonomy.theory.claims.search import draw_input, draw_layer
from holonomy.theory.claims.statements.lipschitz import orthogonal_family, sharp_family
from holonomy.theory.claims.verdict import Draws
from tests.theory.strategies import SEEDS, drawn, jacobian_norm_by_svd

pytestmark = pytest.mark.usefixtures("without_shape_checks")

SLACK = 1 + 1e-9


def radius_of(x):
    return x.norm(dim=1).max().item()


@given(SEEDS)
def test_no_input_is_stretched_more_than_theorem_l_plus_says(seed):
    layer, x, mask = drawn(seed)
    truth = jacobian_norm_by_svd(as_function(layer), x)
    assert truth <= lipschitz_bound(layer, radius_of(x), tokens=x.shape[0]) * SLACK
    masked = jacobian_norm_by_svd(as_function(layer, mask), x)
    assert masked <= lipschitz_bound(layer, radius_of(x), mask=mask) * SLACK


@given(SEEDS)
def test_local_certificates_hold(seed):
    layer, x, mask = drawn(seed)
    for allowed in (None, mask):
        truth = jacobian_norm_by_svd(as_function(layer, allowed), x)
        for form in ("sums", "blocks"):
            assert truth <= local_lipschitz(layer, x, allowed, form=form).item() * SLACK


@given(SEEDS)
def test_printed_bounds_hold_and_theorem_3_7_is_weaker_than_l_plus(seed):
    layer, x, _ = drawn(seed, plain=True)
    n, radius = x.shape[0], radius_of(x)
    truth = jacobian_norm_by_svd(as_function(layer), x)
    printed = lipschitz_bound(layer, radius, tokens=n, theorem="Simplicial 3.7")
    assert truth <= printed * SLACK
    assert lipschitz_bound(layer, radius, tokens=n) <= printed * SLACK
    if layer.order == 1:
        assert truth <= lipschitz_bound(layer, radius, tokens=n, theorem="Castin") * SLACK


@pytest.mark.parametrize("form", ["product", "determinant"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_layers_of_ours_are_covered(form, causal, order):
    layer = SimplicialAttention(8, 2, order=order, form=form, causal=causal).double()
    bound = lipschitz_bound(layer, 1.0, tokens=3)
    found = measure_lipschitz(layer, 1.0, 3, starts=3, ascend=1, steps=20)
    assert 0 < found.value <= bound * SLACK
    assert found.x.norm(dim=1).max() <= 1 + 1e-12
    assert found.value <= local_lipschitz(layer, found.x).item() * SLACK
    torch.testing.assert_close(found.value, jacobian_norm_by_svd(as_function(layer), found.x))


def test_multihead_attention_is_covered():
    layer = nn.MultiheadAttention(6, 2).double().eval()
    found = measure_lipschitz(layer, 2.0, 4, starts=3, ascend=1, steps=20)
    assert found.value <= lipschitz_bound(layer, 2.0, tokens=4) * SLACK


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 5])
def test_l_plus_is_attained_where_logits_vanish(order, n):
    """Uniform attention of equal tokens: the mean of each slot, N of them."""
    layer = Projections(torch.zeros(order + 1, 1, 1, 1).double(), torch.ones(order, 1, 1, 1).double())
    x = torch.full((n, 1), 2.0).double()
    truth = jacobian_norm_by_svd(as_function(layer), x)
    assert math.isclose(truth, lipschitz_bound(layer, 2.0, tokens=n))
    assert math.isclose(truth, local_lipschitz(layer, x).item())


@pytest.mark.parametrize("n", [16, 128, 1024])
@pytest.mark.parametrize("logits", [0.01, 1.0, 10.0])
def test_l_plus_is_within_four_times_of_what_is_measured(n, logits):
    best = 0.0
    for alone in (1, n // 8, n // 2):
        layer, x = sharp_family(n, logits, alone=alone)
        best = max(best, jacobian_norm(as_function(layer), x, steps=6)[0])
    assert best <= lipschitz_bound(layer, 1.0, tokens=n) * SLACK
    assert lipschitz_bound(layer, 1.0, tokens=n) <= 4 * best


@pytest.mark.parametrize(("order", "n"), [(1, 64), (2, 32), (3, 12)])
@pytest.mark.parametrize("logits", [10.0, 100.0])
def test_l_plus_is_within_four_and_a_half_times_at_any_order(order, n, logits):
    layer, x = orthogonal_family(order, n, logits)
    found, _ = jacobian_norm(as_function(layer), x, steps=6)
    assert found <= lipschitz_bound(layer, 1.0, tokens=n) * SLACK
    assert lipschitz_bound(layer, 1.0, tokens=n) <= 4.5 * found


def test_local_certificate_is_within_a_tenth_in_the_median():
    draws, slack = Draws(3), []
    for _ in range(60):
        features, n = draws.integer(1, 6), draws.integer(2, 7)
        layer, x = draw_layer(draws, 1, features), draw_input(draws, n, features)
        truth = jacobian_norm_by_svd(as_function(layer), x)
        slack.append(local_lipschitz(layer, x, form="blocks").item() / truth)
    assert statistics.median(slack) <= 1.1


def test_iteration_against_all_singular_values():
    draws = Draws(0)
    for _ in range(60):
        order, features = draws.integer(1, 3), draws.integer(1, 5)
        layer = draw_layer(draws, order, features, heads=draws.integer(1, 2), plain=False)
        x = draw_input(draws, draws.integer(1, {1: 8, 2: 5, 3: 4}[order]), features)
        found, _ = jacobian_norm(as_function(layer), x)
        truth = jacobian_norm_by_svd(as_function(layer), x)
        assert 0.9999 * truth <= found <= truth * SLACK


def test_iteration_finds_a_small_gap_and_survives_a_bad_start():
    scale = torch.linspace(1, 1.01, 300).double()
    found, direction = jacobian_norm(lambda x: x * scale, torch.zeros(300).double())
    assert found >= 0.9999 * 1.01
    assert direction.abs().argmax() > 270
    start = torch.zeros(300).double()
    start[0] = 1.0
    assert jacobian_norm(lambda x: x * scale, torch.zeros(300).double(), start=start)[0] >= 1.0


def test_float32_measures_the_same():
    layer, x = sharp_family(16, 3.0)
    wide, _ = jacobian_norm(as_function(layer), x)
    narrow, _ = jacobian_norm(as_function(layer.to(torch.float32)), x.float())
    assert math.isclose(wide, narrow, rel_tol=1e-4)


def test_two_point_starts_find_what_random_ones_do_not():
    layer, _ = sharp_family(32, 5.0)
    assert measure_lipschitz(layer, 1.0, 32, ascend=2).value > lipschitz_bound(layer, 1.0, tokens=32) / 5


@given(SEEDS)
def test_stacks_have_the_product_of_their_bounds_on_the_balls_that_they_leave(seed):
    draws = Draws(seed)
    features, n = draws.integer(1, 3), draws.integer(1, 3)
    orders = [draws.integer(1, 3) for _ in range(2)]
    stack = [draw_layer(draws, order, features, heads=draws.integer(1, 2), plain=False) for order in orders]
    x = draw_input(draws, n, features)
    function = as_function(lambda z: attend(attend(z, stack[0]), stack[1]))
    truth = jacobian_norm_by_svd(function, x)
    radius = x.norm(dim=1).max().item()
    assert truth <= local_lipschitz(stack, x).item() * SLACK
    bound = lipschitz_bound(stack, radius, tokens=n)
    assert truth <= bound * SLACK
    after = radius_after(stack[0], radius)
    assert attend(x, stack[0]).norm(dim=1).max() <= after * SLACK
    second = lipschitz_bound(stack[1], after.item(), tokens=n)
    assert math.isclose(bound, lipschitz_bound(stack[0], radius, tokens=n) * second)


def test_a_sequential_of_attention_is_a_stack():
    layers = [SimplicialAttention(4, 2, order=order).double() for order in (1, 2)]
    model, x = nn.Sequential(*layers), torch.randn(3, 4).double()
    assert lipschitz_bound(model, 1.0, tokens=3) == lipschitz_bound(layers, 1.0, tokens=3)
    assert local_lipschitz(model, x) == local_lipschitz(layers, x)
    assert local_lipschitz(model, x, form="blocks") <= local_lipschitz(model, x)
    assert lipschitz_bound(model, tokens=3) == math.inf
    with pytest.raises(NotCoveredError, match="Frobenius"):
        lipschitz_bound(model, 1.0, tokens=3, metric="sup")
    with pytest.raises(NotCoveredError):
        lipschitz_bound(nn.Sequential(*layers, nn.Linear(4, 4)), 1.0, tokens=3)


def test_any_module_is_measured():
    """The fused kernels of torch's own layers have no forward mode."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double().eval()
    assert measure_lipschitz(layer, 1.0, 3, features=4, starts=2, ascend=1, steps=3).value > 0


@pytest.mark.parametrize("theorem", ["Simplicial 3.7", "Castin"])
def test_printed_bounds_refuse_what_they_do_not_cover(theorem):
    plain = Projections(torch.ones(2, 1, 2, 2), torch.ones(1, 1, 2, 2))
    mask = torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(NotCoveredError):
        lipschitz_bound(nn.MultiheadAttention(4, 2), 1.0, tokens=3, theorem=theorem)
    with pytest.raises(NotCoveredError):
        lipschitz_bound(plain, 1.0, mask=mask, theorem=theorem)
    with pytest.raises(NotCoveredError):
        lipschitz_bound(dataclasses.replace(plain, skip=True), 1.0, tokens=3, theorem=theorem)
    with pytest.raises(NotCoveredError):
        lipschitz_bound(dataclasses.replace(plain, scale=2.0), 1.0, tokens=3, theorem=theorem)


def test_castin_is_on_ordinary_attention():
    with pytest.raises(NotCoveredError):
        lipschitz_bound(Projections(torch.ones(3, 1, 2, 2), torch.ones(2, 1, 2, 2)), 1.0, tokens=3, theorem="Castin")


def test_edges():
    layer = nn.MultiheadAttention(4, 2)
    assert lipschitz_bound(layer, tokens=3) == math.inf
    with pytest.raises(ValueError, match="tokens must be given"):
        lipschitz_bound(layer, 1.0)
    for radius in (-1.0, math.nan):
        with pytest.raises(ValueError, match="radius must lie in"):
            lipschitz_bound(layer, radius, tokens=3)
    for tokens in (0, -3):
        with pytest.raises(ValueError, match="tokens must be a positive integer"):
            lipschitz_bound(layer, 1.0, tokens=tokens)
    with pytest.raises(NotCoveredError):
        lipschitz_bound(nn.MultiheadAttention(4, 2, add_zero_attn=True), 1.0, tokens=3)
    with pytest.raises(ValueError, match="features must be given"):
        measure_lipschitz(torch.tanh, 1.0, 2)
    with pytest.raises(ValueError, match="features must be those of the layer, 4, got 5"):
        measure_lipschitz(nn.MultiheadAttention(4, 2), 1.0, 2, features=5)
    for mask, named in ([[True]], "list"), (torch.ones(3, 3), "torch.float32"):
        with pytest.raises(TypeError, match=f"^mask must be .*, got {named}"):
            lipschitz_bound(layer, 1.0, mask=mask)
    with pytest.raises(ValueError, match=r"^mask must have shape .*, got \(\)"):
        lipschitz_bound(layer, 1.0, mask=torch.tensor(True))
    nobody = torch.zeros(3, 3, dtype=torch.bool)
    one = Projections(torch.ones(2, 1, 2, 2), torch.ones(1, 1, 2, 2))
    assert lipschitz_bound(one, 1e4, mask=nobody) >= 0
    assert local_lipschitz(one, torch.ones(3, 2), nobody) == 0
    assert math.isfinite(lipschitz_bound(one, 100.0, tokens=4))


@pytest.mark.parametrize("theorem", ["L+", "Simplicial 3.7", "Castin"])
@pytest.mark.parametrize("key", [0.0, 1.0])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_what_overflows_is_infinite(theorem, key, value):
    layer = Projections(key * torch.ones(2, 1, 2, 2), value * torch.ones(1, 1, 2, 2))
    for radius in (1e200, 1.7e308):
        bound = lipschitz_bound(layer, radius, tokens=3, theorem=theorem)
        assert bound == math.inf or (key == 0 and bound < 20) or (value == 0 and bound == 0)
        stack = lipschitz_bound([layer] * 2, radius, tokens=3, theorem=theorem)
        assert stack >= 0


@pytest.mark.parametrize("form", ["sums", "blocks"])
def test_inputs_beyond_the_dtype_have_an_infinite_bound(form):
    layer = Projections(torch.ones(3, 1, 2, 2), torch.ones(2, 1, 2, 2))
    assert local_lipschitz(layer, 1e200 * torch.ones(3, 2, dtype=torch.float64), form=form) == math.inf


def test_no_search_without_a_radius():
    with pytest.raises(ValueError, match=r"^radius must be finite and not negative, got inf"):
        measure_lipschitz(nn.MultiheadAttention(4, 2), math.inf, 3)


def test_a_stack_checks_its_arguments_even_where_it_is_empty():
    with pytest.raises(ValueError, match=r"^theorem must be"):
        lipschitz_bound([], 1.0, theorem="3.7")
    with pytest.raises(ValueError, match=r"^radius must lie in"):
        lipschitz_bound([], -1.0)
