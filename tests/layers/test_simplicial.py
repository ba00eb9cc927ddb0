"""Simplicial attention: any order against the loops, tiles, masks, turned positions, mixtures, paths and choices."""

from __future__ import annotations

import math
import re
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from holonomy import _autograd
from holonomy.layers import (
    ExpertChoice,
    PathRouter,
    SimplicialAttention,
    SimplicialEncoderLayer,
    simplicial_attention,
    simplicial_path_attention,
)
from holonomy.ops import simplicial_attention as kernel
from holonomy.ops.simplicial_attention import paths
from holonomy.ops.simplicial_attention.logits import chunks, rotary
from holonomy.ops.simplicial_attention.paths import best_neighbours, path_mask
from holonomy.ops.simplicial_attention.reference import factors_of
from holonomy.ops.simplicial_attention.simplexes import list_simplexes
from tests.reference.simplicial import attention as by_loops
from tests.reference.simplicial import best_steps, determinant, marked, near

FORMS = ["product", "determinant"]


def drawn(order: int, *shape: int, device: torch.device, dtype: torch.dtype = torch.float64, values: int = 3):
    keys = [torch.randn(*shape, dtype=dtype, device=device, requires_grad=True) for _ in range(order + 1)]
    mixed = [torch.randn(*shape[:-1], values, dtype=dtype, device=device, requires_grad=True) for _ in range(order)]
    return keys, mixed


def with_gradients(result: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype, device=result.device).reshape(result.shape)
    # A query in no simplex gets a constant, which has no graph.
    loss = (result * weights).sum() + 0 * sum(x.sum() for x in tensors)
    found = torch.autograd.grad(loss, tensors, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, found, strict=True)]


def assert_same(ours, theirs, tensors, rtol=1e-9):
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)
    pairs = zip(with_gradients(ours, tensors), with_gradients(theirs, tensors), strict=True)
    for index, (mine, wanted) in enumerate(pairs):
        torch.testing.assert_close(mine, wanted, rtol=rtol, atol=10 * rtol, msg=lambda m, i=index: f"input {i}: {m}")


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@settings(max_examples=6)
def test_any_masks_and_any_tiles_against_the_loops(order, form, data, device):
    nodes = data.draw(st.integers(1, 4 if order == 3 else 6))
    causal, lower_orders = data.draw(st.booleans()), data.draw(st.booleans())
    window = data.draw(st.one_of(st.none(), st.integers(1, 3), st.tuples(*[st.integers(1, 4)] * order)))
    tile = data.draw(st.one_of(st.none(), st.sampled_from([1, 7, nodes**order])))
    keys, values = drawn(order, nodes, 5, device=device)
    pairs = torch.rand(nodes, nodes, device=device) > 0.3 if data.draw(st.booleans()) else None
    mask = None
    if not lower_orders and data.draw(st.booleans()):
        mask = torch.rand(*(nodes,) * (order + 1), device=device) > 0.3

    def takes(i, simplex):
        seen = all((k <= i or not causal) and (pairs is None or bool(pairs[i, k])) for k in simplex)
        seen = seen and near(window, i, simplex)
        return seen and (mask is None or bool(mask[(i, *simplex)]))

    ours = simplicial_attention(
        keys,
        values,
        mask=mask,
        pair_mask=pairs,
        causal=causal,
        window=window,
        form=form,
        lower_orders=lower_orders,
        tile=tile,
    )
    theirs = by_loops(keys, values, takes, form=form, lower_orders=lower_orders)
    assert_same(ours, theirs, keys + values)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_the_tile_has_no_effect_on_a_batch(order, causal, device, dtype):
    keys, values = drawn(order, 2, 3, 7, 8, device=device, dtype=dtype)
    padding = torch.zeros(2, 1, 1, 7, dtype=torch.bool, device=device)
    padding[1, ..., 4:] = True
    whole = simplicial_attention(keys, values, pair_mask=~padding, causal=causal)
    for tile in (1, 49, 100, 1000):
        ours = simplicial_attention(keys, values, pair_mask=~padding, causal=causal, tile=tile)
        assert_same(ours, whole, keys + values, rtol=1e-4 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("channels", [128, 129])
def test_kernels_compute_up_to_128_channels(channels, monkeypatch):
    """Where they run at all: the sizes of their tiles are powers of two, of which no larger one fits."""
    monkeypatch.setattr(kernel, "supports_triton", lambda *tensors: True)
    simplexes = list_simplexes((4, 4, 4), torch.Size([]), torch.device("cpu"))
    for keys, values in ((channels, 2), (2, channels)):
        given = [torch.zeros(4, keys) for _ in range(3)], [torch.zeros(4, values) for _ in range(2)]
        factors = factors_of(*given, simplexes, form="product", scale=1.0)
        assert kernel._supports_triton(factors, simplexes) == (channels == 128)


def test_keys_of_several_lengths(device):
    keys = [torch.randn(n, 4, dtype=torch.float64, device=device, requires_grad=True) for n in (2, 3, 5)]
    values = [torch.randn(n, 2, dtype=torch.float64, device=device, requires_grad=True) for n in (3, 5)]
    for tile in (None, 4):
        assert_same(simplicial_attention(keys, values, tile=tile), by_loops(keys, values), keys + values)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_batches_of_queries_keys_and_values_broadcast(order, causal, device):
    """One query for all, keys of each batch, values of each head: as if each were repeated."""
    whole = torch.Size([2, 3])
    some = [torch.Size([]), torch.Size([2, 1]), torch.Size([3])]
    keys = [torch.randn(*some[m], 5, 4, dtype=torch.float64, device=device) for m in range(order + 1)]
    values = [torch.randn(*some[-1], 5, 2, dtype=torch.float64, device=device) for _ in range(order)]
    mask = None if causal else torch.rand(*whole, *[5] * (order + 1), device=device) > 0.4
    ours = simplicial_attention(keys, values, mask=mask, causal=causal)
    repeated = [[x.expand(*whole, -1, -1) for x in xs] for xs in (keys, values)]
    torch.testing.assert_close(ours, simplicial_attention(*repeated, mask=mask, causal=causal))


def test_masks_broadcast_over_batch_and_heads(device):
    keys, values = drawn(2, 2, 3, 4, 6, device=device)
    mask = torch.rand(2, 1, 4, 4, 4, device=device) > 0.4
    for tile in (None, 5):
        ours = simplicial_attention(keys, values, mask=mask, tile=tile)
        for b in range(2):
            for h in range(3):
                one = simplicial_attention([k[b, h] for k in keys], [v[b, h] for v in values], mask=mask[b, 0])
                torch.testing.assert_close(ours[b, h], one)


def test_order_one_is_scaled_dot_product_attention(device, dtype):
    keys, values = drawn(1, 2, 9, 8, device=device, dtype=dtype)
    expected = functional.scaled_dot_product_attention(keys[0], keys[1], values[0])
    torch.testing.assert_close(simplicial_attention(keys, values), expected)
    expected = functional.scaled_dot_product_attention(keys[0], keys[1], values[0], is_causal=True)
    torch.testing.assert_close(simplicial_attention(keys, values, causal=True), expected)
    expected = functional.scaled_dot_product_attention(keys[0], keys[1], values[0], scale=0.2)
    torch.testing.assert_close(simplicial_attention(keys, values, scale=0.2), expected)


def test_order_two_determinants_are_triple_products(device):
    keys, values = drawn(2, 4, 6, device=device)
    logits = torch.zeros(4, 4, 4, dtype=torch.float64, device=device)
    for part in (slice(0, 3), slice(3, 6)):
        cross = torch.linalg.cross(keys[1][:, None, part], keys[2][None, :, part])
        logits = logits + torch.einsum("ia,jka->ijk", keys[0][:, part], cross)
    weights = (logits / math.sqrt(6)).flatten(1).softmax(-1).unflatten(1, (4, 4))
    expected = torch.einsum("ijk,jc,kc->ic", weights, *values)
    torch.testing.assert_close(simplicial_attention(keys, values, form="determinant"), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_query_in_no_simplex_gives_zero(form, device, dtype):
    keys, values = drawn(2, 4, 6, device=device, dtype=dtype)
    pairs = torch.ones(4, 4, dtype=torch.bool, device=device)
    pairs[2] = False
    for tile in (None, 3):
        result = simplicial_attention(keys, values, pair_mask=pairs, form=form, tile=tile)
        assert torch.equal(result[2], torch.zeros_like(result[2]))
        for grad in with_gradients(result, keys + values):
            assert grad.isfinite().all()


@pytest.mark.parametrize("tile", [None, 3])
@pytest.mark.parametrize("size", [1e4, 1e12, 1e30])
def test_large_entries_stay_finite(size, tile, device, dtype):
    keys, values = drawn(2, 4, 6, device=device, dtype=dtype)
    result = simplicial_attention([size * key for key in keys], [size * value for value in values], tile=tile)
    assert result.isfinite().all()
    if size == 1e4:  # what fits is not touched
        wide = simplicial_attention([size * key.double() for key in keys], [size * value.double() for value in values])
        torch.testing.assert_close(result.double(), wide, rtol=1e-2, atol=1e-2 * wide.abs().max().item())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_large_entries_of_a_graph_do_not_change_another(order, form, device, dtype):
    keys, values = drawn(order, 2, 4, 8, device=device, dtype=dtype)
    large = [torch.stack([x[0], 1e30 * x[1]]) for x in (*keys, *values)]
    steps = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2]], device=device)
    for attend in (simplicial_attention, partial(simplicial_path_attention, neighbours=steps)):
        result = attend(large[: order + 1], large[order + 1 :], form=form)
        assert result.isfinite().all()
        torch.testing.assert_close(result[0], attend(keys, values, form=form)[0])


def test_a_large_query_does_not_change_those_of_other_tokens(device):
    keys, values = drawn(2, 4, 8, device=device, dtype=torch.float32)
    large = torch.cat([keys[0][:3], 1e38 * keys[0][3:]])
    result = simplicial_attention([large, *keys[1:]], values)
    torch.testing.assert_close(result[:3], simplicial_attention(keys, values)[:3])


def test_large_channels_of_float16_do_not_change_the_scale(device):
    keys, values = drawn(1, 4, 64, device=device, dtype=torch.float16)
    query, key = (x.detach().index_fill(-1, torch.tensor(at, device=device), 60.0) for at, x in enumerate(keys))
    wide = simplicial_attention([query.double(), key.double()], [values[0].double()])
    torch.testing.assert_close(simplicial_attention([query, key], values).double(), wide, rtol=2e-2, atol=2e-2)


def test_logits_of_ten_thousand_pick_the_largest(device, dtype):
    keys, values = drawn(2, 5, 4, device=device, dtype=dtype)
    big = [1e4 * keys[0], keys[1], keys[2]]
    logits = torch.einsum("id,jd,kd->ijk", *big).flatten(1)
    best = logits.argmax(1)
    expected = values[0][best // 5] * values[1][best % 5]
    for tile in (None, 10):
        torch.testing.assert_close(simplicial_attention(big, values, tile=tile), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1.0, 2.0**6, 2.0**20])
@pytest.mark.parametrize(("order", "nodes", "tile"), [(1, 40, None), (2, 24, None), (2, 24, 2**10), (3, 9, 2**12)])
def test_gradients_of_large_logits_are_those_of_float64(order, nodes, tile, size, device):
    """Of whole numbers, whose logits are exact: many are equal, and the others have all weight or none."""
    keys, values = drawn(order, 2, nodes, 8, device=device, dtype=torch.float32, values=8)
    keys, weights = [size * key.detach().round() for key in keys], torch.randn(2, nodes, 8, device=device)

    def of(dtype, tile=None):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (*keys, *values)]
        result = simplicial_attention(inputs[: order + 1], inputs[order + 1 :], tile=tile, scale=1.0)
        return torch.autograd.grad((result * weights.to(dtype)).sum(), inputs)

    for ours, exact in zip(of(torch.float32, tile), of(torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())


@pytest.mark.parametrize("size", [1e8, 1e12, 1e18])
def test_pairs_far_apart_leave_no_gradient(size, device):
    """One key has all weight; weights that are computed again from logits that are rounded otherwise are infinite."""
    keys, values = drawn(1, 2, 300, 8, device=device, dtype=torch.float32, values=8)
    result = simplicial_attention([size**0.5 * key for key in keys], values)
    for grad in torch.autograd.grad(result.square().sum(), keys):
        assert grad.abs().max() <= 1e-3


@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradcheck_of_tiles(order, device):
    keys, values = drawn(order, 2, 3, 4, device=device)
    for form in FORMS:
        assert torch.autograd.gradcheck(
            lambda *x, form=form: simplicial_attention(
                x[: order + 1], x[order + 1 :], form=form, tile=5, causal=True, lower_orders=True
            ),
            (*keys, *values),
            fast_mode=True,
        )


def test_second_derivatives_are_right_or_refused(device):
    keys, values = drawn(2, 3, 3, device=device)
    result = simplicial_attention(keys, values)
    assert torch.autograd.gradgradcheck(lambda *x: simplicial_attention(x[:3], x[3:]), (*keys, *values))
    result = simplicial_attention(keys, values, tile=4)
    (first,) = torch.autograd.grad(result.sum(), keys[0], create_graph=True)
    with pytest.raises(RuntimeError, match="in tiles has no second derivative"):
        first.square().sum().backward()


def test_forward_mode_and_transformations_take_all_logits_at_once(device):
    keys, values = (tuple(x.detach() for x in some) for some in drawn(2, 2, 9, 4, device=device))
    whole, tiled = (lambda *x, t=t: simplicial_attention(x[:3], x[3:], tile=t) for t in (None, 30))
    along = tuple(torch.randn_like(x) for x in (*keys, *values))
    for of in (
        lambda f: torch.func.jvp(f, (*keys, *values), along)[1],
        lambda f: torch.func.jacrev(f)(*keys, *values),
        lambda f: torch.func.vmap(f)(*keys, *values),
    ):
        torch.testing.assert_close(of(tiled), of(whole))


@pytest.mark.usefixtures("without_decorators")
def test_tiles_compile_without_a_graph_break(device):
    shape = {"dtype": torch.float64, "device": device, "requires_grad": True}
    tensors = [torch.randn(2, 3, 4, **shape) for _ in range(5)]
    torch.compiler.reset()
    compiled = torch.compile(simplicial_attention, fullgraph=True, backend="aot_eager")
    both = [f(tensors[:3], tensors[3:], tile=10, causal=True) for f in (simplicial_attention, compiled)]
    torch.testing.assert_close(*both)
    for ours, theirs in zip(*(torch.autograd.grad(result.sin().sum(), tensors) for result in both), strict=True):
        torch.testing.assert_close(ours, theirs)


# Positions.


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_determinants_are_unchanged_by_a_common_rotation(order, device):
    size = order + 1
    keys, values = drawn(order, 4, 2 * size, device=device)
    rotation = torch.linalg.qr(torch.randn(2, size, size, dtype=torch.float64, device=device))[0]
    rotation[torch.linalg.det(rotation) < 0, 0] *= -1
    turned = [torch.einsum("cab,ncb->nca", rotation, key.unflatten(-1, (2, size))).flatten(-2) for key in keys]
    ours = simplicial_attention(turned, values, form="determinant")
    torch.testing.assert_close(ours, simplicial_attention(keys, values, form="determinant"))
    rotation[:, 0] *= -1  # a reflection changes the sign of every logit
    mirrored = [torch.einsum("cab,ncb->nca", rotation, key.unflatten(-1, (2, size))).flatten(-2) for key in keys]
    opposite = simplicial_attention([-keys[0], *keys[1:]], values, form="determinant")
    torch.testing.assert_close(simplicial_attention(mirrored, values, form="determinant"), opposite)


@pytest.mark.parametrize("order", [1, 2, 3])
@given(shift=st.integers(-50, 50))
@settings(max_examples=5)
def test_turned_logits_depend_on_relative_positions_only(order, shift, device):
    size = order + 1
    keys, _ = drawn(order, 5, 3 * size, device=device)
    at = torch.randperm(100, device=device)[:5]

    def logits(offset):
        turned = [rotary(key, at + offset, size=size) for key in keys]
        index = torch.cartesian_prod(*(torch.arange(5),) * size)
        columns = [[key[i] for key, i in zip(turned, row, strict=True)] for row in index.tolist()]
        return torch.stack(
            [
                sum(determinant([x[c * size : (c + 1) * size] for x in vectors]) for c in range(3))
                for vectors in columns[:40]
            ]
        )

    torch.testing.assert_close(logits(shift), logits(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_million_tokens_later_turns_are_as_exact(size, device, dtype):
    """Inner products of turned vectors: those of their distance, wherever they stand."""
    x, at = torch.randn(6, 4 * size, device=device, dtype=dtype), torch.tensor([0, 1, 5, 9, 40, 41], device=device)
    near, far = (rotary(x, at + offset, size=size) for offset in (0, 10**6))
    torch.testing.assert_close(far @ far.mT, near @ near.mT, rtol=1e-5, atol=1e-5)


def test_every_plane_of_a_chunk_turns_and_the_odd_one_out_stays(device):
    """Each chunk of five has two planes and an axis, each plane its own angle."""
    x, base = torch.randn(3, 11, device=device, dtype=torch.float64), 10000.0
    expected = x.clone()
    for place in range(3):
        for plane, first in enumerate((0, 2, 5, 7)):
            angle = place * base ** (-plane / 4)
            a, b = x[place, first : first + 2].tolist()
            expected[place, first] = a * math.cos(angle) - b * math.sin(angle)
            expected[place, first + 1] = a * math.sin(angle) + b * math.cos(angle)
    torch.testing.assert_close(rotary(x, size=5), expected)


@pytest.mark.usefixtures("without_shape_checks")
def test_keys_of_other_lengths_do_not_go_with_a_mask_of_pairs(device):
    keys, values = drawn(2, 4, 2, device=device)
    keys[2], values[1] = keys[2][:3], values[1][:3]
    with pytest.raises(ValueError, match=r"^keys must have equally many nodes with causal, window or pair_mask"):
        simplicial_attention(keys, values, pair_mask=torch.ones(4, 4, dtype=torch.bool, device=device))


@pytest.mark.parametrize("form", ["product", "determinant"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_fewer_queries_are_the_last_of_the_keys(order, form, device):
    """By place, in one tile or many, with the gradients of the keys that they see."""
    keys, values = drawn(order, 7, 4 if form == "product" else 8, device=device)
    options = ({"causal": True}, {"causal": True, "window": 2}, {"window": 3}, {"causal": True, "lower_orders": True})
    for how, tile, last in product(options, (None, 20), (1, 3)):
        leaves = [x.detach().requires_grad_() for x in (*keys, *values)]
        whole = simplicial_attention(leaves[: order + 1], leaves[order + 1 :], form=form, **how)[..., -last:, :]
        some = [leaves[0][..., -last:, :], *leaves[1 : order + 1]]
        ours = simplicial_attention(some, leaves[order + 1 :], form=form, tile=tile, **how)
        torch.testing.assert_close(ours, whole)
        generic = torch.cos(torch.arange(ours.numel(), device=device, dtype=ours.dtype)).reshape(ours.shape)
        for a, b in zip(
            torch.autograd.grad(ours, leaves, generic), torch.autograd.grad(whole, leaves, generic), strict=True
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("without_shape_checks")
def test_more_queries_than_keys_have_no_places(device):
    keys, values = drawn(2, 4, 2, device=device)
    with pytest.raises(ValueError, match=r"^keys must have at most as many queries as keys with causal or window"):
        simplicial_attention(
            [keys[0], *(k[..., :3, :] for k in keys[1:])], [v[..., :3, :] for v in values], causal=True
        )


def test_inner_products_of_many_large_channels_do_not_overflow(device):
    keys, values = drawn(2, 1, 256, device=device, dtype=torch.float32)
    large = [torch.full_like(key, 1e38) for key in keys]
    torch.testing.assert_close(simplicial_attention(large, values, scale=1.0), values[0] * values[1])


def test_pairwise_turns_break_the_property_for_triples(device):
    """The usual 2 x 2 rotations move determinants of three vectors under a shift."""
    keys, values = drawn(2, 5, 12, device=device)
    at = torch.arange(5, device=device)

    def result(offset):
        return simplicial_attention([rotary(k, at + offset, size=2) for k in keys], values, form="determinant")

    assert (result(20) - result(0)).abs().max() > 0.05


def test_a_layer_with_positions_is_shift_invariant_and_not_without(device):
    layer = SimplicialAttention(12, 2, order=2, form="determinant", rope=True, dtype=torch.float64, device=device)
    x = torch.randn(5, 12, dtype=torch.float64, device=device)
    at = torch.arange(5, device=device)
    torch.testing.assert_close(layer(x, positions=at + 17), layer(x))
    assert (layer(x, positions=2 * at) - layer(x)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="positions must be None without rope"):
        SimplicialAttention(4, 1, device=device)(torch.ones(5, 4, device=device), positions=at)


def test_chunks_of_a_determinant():
    assert [chunks(12, order) for order in (1, 2, 3)] == [6, 4, 3]
    assert chunks(7, 2) == 2
    with pytest.raises(ValueError, match="at least N \\+ 1 = 4 channels"):
        chunks(3, 3)


# Lower orders.


def test_orders_without_a_tuple_leave_the_lower_ones(device):
    keys = [torch.randn(n, 4, device=device) for n in (3, 5, 0, 2)]
    values = [torch.randn(n, 2, device=device) for n in (5, 0, 2)]
    ours = simplicial_attention(keys, values, lower_orders=True)
    torch.testing.assert_close(ours, simplicial_attention(keys[:2], values[:1]))


def test_lower_orders_are_ones_in_the_last_keys_and_values(device):
    """Appendix F.1: a row of ones in K2 and V2 puts pairs and triples into one softmax."""
    keys, values = drawn(2, 5, 4, device=device)
    ours = simplicial_attention(keys, values, lower_orders=True)
    extended = [
        torch.cat([keys[2], torch.ones_like(keys[2][:1])]),
        torch.cat([values[1], torch.ones_like(values[1][:1])]),
    ]
    theirs = simplicial_attention([*keys[:2], extended[0]], [values[0], extended[1]])
    assert_same(ours, theirs, keys + values)


def test_ones_give_the_lower_order_exactly(device):
    keys, values = drawn(1, 5, 4, device=device)
    ones = torch.ones_like(keys[0]), torch.ones_like(values[0])
    triples = simplicial_attention([*keys, ones[0]], [*values, ones[1]])
    torch.testing.assert_close(triples, simplicial_attention(keys, values))


# Structure.


def test_causality_by_gradients(device):
    for options in ({"order": 2}, {"order": 3}, {"order": 2, "lower_orders": True}, {"order": 1}):
        layer = SimplicialAttention(8, 2, causal=True, dtype=torch.float64, device=device, **options)
        x = torch.randn(6, 8, dtype=torch.float64, device=device, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(x)[2].sum(), x)
        assert torch.equal(grad[3:], torch.zeros_like(grad[3:]))
        assert (grad[:3].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("order", [1, 2])
def test_bfloat16_inputs(order, device):
    keys, values = drawn(order, 6, 8, device=device, dtype=torch.bfloat16)
    result = simplicial_attention(keys, values)
    wide = simplicial_attention([k.double() for k in keys], [v.double() for v in values])
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), wide, rtol=2e-2, atol=2e-2)


def test_initial_variance_is_kept(device):
    for order in (1, 2, 3):
        layer = SimplicialAttention(64, 4, order=order, device=device)
        keys, values = layer.projected(torch.randn(200, 64, device=device))
        for x in (*keys, *values):
            assert 0.8 < x.var().item() < 1.25


# Paths.


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("nodes", "tile"), [(3, 2**21), (14, 2**21), (14, 100)])
def test_paths_are_dense_attention_under_the_path_mask(order, form, nodes, tile, device):
    """Few nodes: no path is gathered. Many: in one block, or in several."""
    keys, values = drawn(order, 2, 1, nodes, 4, device=device, values=2)
    steps = torch.randint(-1, nodes, (2, 1, nodes, 2), device=device)  # with repeated and absent ones, and loops
    steps[0, 0, 1] = -1  # a token from which no path starts
    ours = simplicial_path_attention(keys, values, steps, form=form, tile=tile)
    theirs = simplicial_attention(keys, values, mask=path_mask(steps, order), form=form)
    assert_same(ours, theirs, keys + values)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("batch", "shape", "tile"), [((2, 3, 2), (2, 1, 1), 2**21), ((2, 3), (1, 1), 500), ((), (), 500)]
)
def test_paths_by_their_last_step_are_those_one_by_one(order, form, batch, shape, tile, device, monkeypatch):
    """Steps of their own for some batch axes, shared along others, which scores may tell apart."""
    nodes, k = 31, 3
    keys, values = drawn(order, *batch, nodes, 5, device=device, values=2)
    steps = torch.randint(-1, nodes, (*shape, nodes, k), device=device)
    steps[..., 5:, 0] = 7  # one node to which most paths come, several groups of them
    scores = torch.randn(*batch[1:], nodes, k, dtype=torch.float64, device=device, requires_grad=True)
    run = partial(simplicial_path_attention, keys, values, steps, form=form, scores=scores, tile=tile)
    monkeypatch.setattr(paths, "GATHERED", 1)  # for groups of any size
    ours = run()
    monkeypatch.setattr(_autograd, "supports_custom_backward", lambda *_: False)
    assert_same(ours, run(), [*keys, *values, scores])


def test_paths_are_grouped_where_they_are_many(monkeypatch):
    """Where they gather more than a k-th of a tile: 20 nodes of 9 paths of 7 numbers."""
    calls, grouped = [], paths.grouped_paths
    monkeypatch.setattr(paths, "grouped_paths", lambda *x, **named: calls.append(1) or grouped(*x, **named))
    keys, values = drawn(2, 20, 5, device=torch.device("cpu"), values=2)
    attend = partial(simplicial_path_attention, keys, values, torch.randint(20, (20, 3)))
    few = attend(tile=3 * 20 * 9 * 7)
    assert not calls
    assert_same(attend(tile=3 * 20 * 9 * 7 - 1), few, [*keys, *values])
    assert calls


@pytest.mark.parametrize("gathered", [1, 2**21])
def test_paths_are_differentiated_twice(gathered, device, monkeypatch):
    monkeypatch.setattr(paths, "GATHERED", gathered)
    keys, values = drawn(2, 5, 1, device=device, values=1)
    steps = torch.randint(5, (5, 2), device=device)
    assert torch.autograd.gradgradcheck(
        lambda *x: simplicial_path_attention(x[:3], x[3:], steps), (*keys, *values), nondet_tol=0.0
    )


def test_the_path_mask_is_what_the_loops_say(device):
    steps = torch.randint(-1, 4, (4, 2), device=device)
    mask = path_mask(steps, 2)
    for i in range(4):
        for j in range(4):
            for k in range(4):
                assert bool(mask[i, j, k]) == marked(steps, i, (j, k))


def test_scores_are_biases_of_steps(device):
    keys, values = drawn(2, 4, 5, device=device)
    steps = torch.tensor([[0, 1], [1, 2], [0, 3], [3, -1]], device=device)
    scores = torch.randn(4, 2, dtype=torch.float64, device=device, requires_grad=True)
    table = {(i, j): scores[i, s] for i, row in enumerate(steps.tolist()) for s, j in enumerate(row)}

    def bias(i, simplex):
        return table[i, simplex[0]] + table[simplex]

    theirs = by_loops(keys, values, lambda i, simplex: marked(steps, i, simplex), bias=bias)
    assert_same(simplicial_path_attention(keys, values, steps, scores=scores), theirs, [*keys, *values, scores])


@given(data=st.data())
@settings(max_examples=20)
def test_the_best_steps_with_ties_to_the_first(data, device):
    nodes, heads = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 3))
    k, causal = data.draw(st.integers(1, 9)), data.draw(st.booleans())
    # Small integers: many ties.
    query, key = (torch.randint(-1, 2, (heads, nodes, 2), device=device).double() for _ in range(2))
    gate = torch.randint(-1, 2, (nodes, heads), device=device).double()
    hidden = torch.rand(nodes, device=device) < 0.3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holonomy.ops.simplicial_attention.paths.TILE", data.draw(st.sampled_from([1, 10, 1000])))
        ours = best_neighbours(query, key, gate, k, causal=causal, key_padding_mask=hidden)
    expected = best_steps(query, key, gate, k, causal=causal, hidden=hidden)
    assert [[j for j in row if j >= 0] for row in ours.tolist()] == expected
    assert ours.shape == (nodes, k)


def test_scores_of_a_router_change_nothing_and_carry_a_gradient(device):
    layer = SimplicialAttention(8, 2, dtype=torch.float64, device=device)
    router = PathRouter(8, 2, 3, causal=True, dtype=torch.float64, device=device)
    x = torch.randn(6, 8, dtype=torch.float64, device=device)
    keys, values = layer.projected(x)
    steps, scores = router(x, keys[0], keys[1])
    assert torch.equal(layer.along_paths(keys, values, steps, scores), layer.along_paths(keys, values, steps))
    result = layer.along_paths(keys, values, steps, scores)
    (grad,) = torch.autograd.grad(result.square().sum(), router.gate.weight)
    assert grad.abs().max() > 0
    x_grad = x.clone().requires_grad_()
    keys, values = layer.projected(x_grad)
    result = layer.along_paths(keys, values, *router(x_grad, keys[0], keys[1]))
    (grad,) = torch.autograd.grad(result[2].sum(), x_grad)
    assert torch.equal(grad[3:], torch.zeros_like(grad[3:]))


# Expert choice.


def test_only_the_chosen_tokens_change_and_the_router_learns(device):
    choice = ExpertChoice(8, 2, SimplicialAttention(8, 2, device=device), device=device)
    x = torch.randn(3, 6, 8, device=device)
    changed = (choice(x) != x).any(-1)
    scores = (x @ choice.router.weight[0]).detach()
    for row, score in zip(changed, scores, strict=True):
        assert set(row.nonzero().flatten().tolist()) == set(score.topk(2).indices.tolist())
    (grad,) = torch.autograd.grad(choice(x).square().sum(), choice.router.weight)
    assert grad.abs().max() > 0


def test_equal_scores_choose_the_first_tokens(device):
    choice = ExpertChoice(4, 2, SimplicialAttention(4, 1, device=device), device=device)
    x = torch.ones(5, 4, device=device)
    assert (choice(x) != x).any(-1).tolist() == [True, True, False, False, False]


def test_padding_is_never_chosen_before_a_token(device):
    choice = ExpertChoice(4, 3, SimplicialAttention(4, 1, device=device), device=device)
    x = torch.randn(1, 5, 4, device=device)
    padding = torch.tensor([[False, False, True, True, True]], device=device)
    short = choice(x[:, :2])
    torch.testing.assert_close(choice(x, padding)[:, :2], short)


# Validation.


@pytest.mark.usefixtures("without_shape_checks")
def test_wrong_arguments_get_one_sentence(device):
    keys, values = drawn(2, 4, 6, device=device)
    by_window, steps = SimplicialAttention(8, 2, window=2), torch.zeros(3, 1, dtype=torch.int64)
    for call, sentence in (
        (lambda: simplicial_attention(keys[:2], values), "keys must be one more than values"),
        (lambda: simplicial_attention([*keys[:2], keys[2][:, :4]], values), "keys must have equal channels"),
        (lambda: simplicial_attention(keys, [values[0], values[1][:2]]), "values must have shape"),
        (lambda: simplicial_attention(keys, values, form="sum"), "form must be one of"),
        (lambda: simplicial_attention(keys, values, window=0), "window must be a positive integer"),
        (lambda: simplicial_attention(keys, values, window=(1, 2, 3)), "window must be one number or N = 2"),
        (lambda: simplicial_attention(keys, values, tile=0), "tile must be a positive integer"),
        (
            lambda: simplicial_attention(
                [keys[0].expand(3, *keys[0].shape), *keys[1:]], [v.expand(2, *v.shape) for v in values]
            ),
            "keys and values must have batch axes that broadcast, got \\(3,\\) and \\(2,\\)",
        ),
        (lambda: SimplicialAttention(8, 2, window=(1, 2, 3)), "window must be one number or N = 2"),
        (lambda: by_window.along_paths(*by_window.projected(torch.ones(3, 8)), steps), "window must be None"),
        (lambda: SimplicialAttention(8, 3), "features must be a multiple of heads"),
        (lambda: SimplicialAttention(8, 2, rope=True), "rope must be False with form 'product'"),
        (lambda: SimplicialAttention(4, 2, form="determinant"), "at least N \\+ 1 = 3 channels"),
        (lambda: SimplicialEncoderLayer(8, 2, steps=2, lower_orders=True), "steps must be None"),
        (lambda: SimplicialEncoderLayer(8, 2, capacity=2, causal=True), "capacity must be None"),
        (lambda: SimplicialEncoderLayer(8, 2, steps=2)(torch.randn(3, 8)), "previous must be"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    mask = torch.ones(4, 4, 4, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="mask must be None with lower_orders"):
        simplicial_attention(keys, values, mask=mask, lower_orders=True)
    with pytest.raises(TypeError, match="keys and values must have one dtype"):
        simplicial_attention([keys[0].float(), *keys[1:]], [value.double() for value in values])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_no_tokens_and_no_steps_at_all(order, device):
    keys, values = drawn(order, 0, 6, device=device)
    assert simplicial_attention(keys, values).shape == (0, 3)
    none = torch.zeros(0, 2, dtype=torch.int64, device=device)
    assert simplicial_path_attention(keys, values, none).shape == (0, 3)
    keys, values = drawn(order, 4, 6, device=device)
    x, gate = torch.zeros(2, 0, 6, device=device), torch.zeros(0, 2, device=device)
    assert best_neighbours(x, x, gate, 3).shape == (0, 3)
    nowhere = torch.zeros(4, 0, dtype=torch.int64, device=device)
    assert torch.equal(simplicial_path_attention(keys, values, nowhere), torch.zeros_like(values[0]))


def test_what_is_held_is_of_order_n_for_triples():
    """Logits are held a tile at a time, and a tile is at most TILE or what one query and one first key need."""
    listed = kernel.list_simplexes((512, 512, 512), torch.Size([4]), torch.device("cpu"))
    for block in kernel.tiles(listed, kernel.TILE):
        for tile in block:
            entries = tile.batch.stop - tile.batch.start
            rows, columns, others = (part.stop - part.start for part in (tile.queries, tile.first_keys, tile.others))
            assert entries * rows * columns * others <= kernel.TILE


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(("causal", "window"), [(False, 4), (True, (3, 5, 2)), (True, None)])
def test_tiles_hold_all_that_is_allowed_and_little_else(order, causal, window):
    """Each tile's own mask, put in place, is the whole mask; and a window's tiles grow with n, not with its power."""
    window = window[:order] if isinstance(window, tuple) else window
    window = kernel.check_window(window, order)
    n = 24 if order == 3 else 64
    listed = kernel.list_simplexes((n,) * (order + 1), torch.Size(), torch.device("cpu"), causal=causal, window=window)
    found = torch.zeros(n, listed.first_keys, listed.others, dtype=torch.bool)
    looked_at = 0
    for block in kernel.tiles(listed, 64):
        for tile in block:
            part = kernel.allowed(listed, tile)
            found[tile.queries, tile.first_keys, tile.others] = part[0]
            looked_at += found[tile.queries, tile.first_keys, tile.others].numel()
    whole = next(kernel.tiles(listed, n ** (order + 1)))
    assert torch.equal(found, kernel.allowed(listed, whole[0])[0].expand_as(found))
    if window is not None:
        assert looked_at <= n * 13**order


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("name", "shape", "symbols"),
    [
        ("mask", (5, 5), "(*batch, tokens, keys, .., keys) = (2, 5, 5, 5)"),
        ("mask", (2, 5, 5, 4), "(*batch, tokens, keys, .., keys) = (2, 5, 5, 5)"),
        ("mask", (3, 5, 5, 5), "(*batch, tokens, keys, .., keys) = (2, 5, 5, 5)"),
        ("pair_mask", (5,), "(*batch, tokens, keys) = (2, 5, 5)"),
        ("pair_mask", (2, 5, 4), "(*batch, tokens, keys) = (2, 5, 5)"),
        ("pair_mask", (3, 5, 5), "(*batch, tokens, keys) = (2, 5, 5)"),
    ],
)
def test_masks_that_do_not_fit_get_one_sentence(name, shape, symbols):
    """Some were refused by whatever function came to them first, some were broadcast into another batch."""
    layer, x = SimplicialAttention(4, 2, order=2), torch.randn(2, 5, 4)
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=rf"^{name} must broadcast to {re.escape(symbols)}, got {re.escape(str(shape))}"
    ):
        layer(x, **{name: mask})
    with pytest.raises(TypeError, match=rf"^{name} must be boolean, got torch.float32"):
        layer(x, **{name: mask.float()})
