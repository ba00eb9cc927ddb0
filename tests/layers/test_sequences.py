"""Causal attention in chunks, masks of pairs as torch has them, and weights: against formulas of all pairs."""

from __future__ import annotations

import math
import sys
from itertools import product

import pytest
import torch

from holonomy.layers import (
    HypLinearAttention,
    HypSimplicialAttention,
    HypSoftmaxAttention,
    SimplicialAttention,
    TokenAttention,
)
from holonomy.manifolds import Lorentz
from holonomy.ops.heads import merge_heads, split_heads
from holonomy.ops.linear_attention import linear_attention_block, linear_attention_block_reference
from holonomy.ops.linear_attention.causal import causal_linear_attention, linear_attention_weights
from holonomy.ops.linear_attention.reference import linear_attention, power_features
from holonomy.ops.performer import log_features, orthogonal_projection, performer_attention
from holonomy.ops.softmax_attention import SIMILARITIES, weighted_midpoint
from tests.laws.laws import assert_near, cotangent

D = torch.float64
HEADS, DIM = 2, 6
NAMES = ("x", "weight", "bias", "residual weight", "residual bias", "curvature")


def all_pairs(query, key, value, mask=None):
    """Eq. 16 with the sum over j <= i, by the matrix of all weights."""
    weights = (query @ key.mT).tril()
    if mask is not None:
        weights = weights.masked_fill(mask[..., None, :], 0.0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights @ value / torch.where(total > 0, total, 1.0), 0.0)


@pytest.mark.parametrize(("chunk", "chunks"), [(1, 1), (3, 2), (5, 64), (64, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_chunks_have_no_effect(chunk, chunks, masked, monkeypatch, device):
    monkeypatch.setattr("holonomy.ops.linear_attention.causal._CHUNK", chunk)
    monkeypatch.setattr("holonomy.ops.linear_attention.causal._CHUNKS", chunks)
    for rows in (1, 2, 7, 23):
        leaves = [torch.rand(2, 3, rows, width, dtype=D, device=device).requires_grad_() for width in (4, 4, 5)]
        mask = torch.rand(2, 1, rows, device=device) < 0.4 if masked else None
        found = []
        for form in (lambda *each: causal_linear_attention(*each)[0], all_pairs):
            out = form(*leaves, mask)
            found.append((out, *torch.autograd.grad(out, leaves, cotangent(out))))
        for ours, theirs in zip(*found, strict=True):
            assert_near(ours, theirs, 1e-11, f"{rows} rows", floor=1.0)  # a gradient of one key is rounding


@pytest.mark.parametrize("growing", [True, False])
def test_keys_of_all_sizes_keep_their_digits(growing):
    sizes = torch.logspace(-35, 37, 100)[:, None]
    query, key, value = (torch.rand(100, 4) for _ in range(3))
    key = key * (sizes if growing else sizes.flip(0))
    expected = all_pairs(query.double(), key.double(), value.double())
    assert_near(causal_linear_attention(query, key, value)[0], expected, 1e-6, "result")


def test_no_sum_of_large_keys_and_values_overflows(dtype):
    large = torch.finfo(dtype).max / 4
    query, key, value = (torch.full((200, 4), size, dtype=dtype) for size in (large, large, large))
    torch.testing.assert_close(causal_linear_attention(query, key, value)[0], value, rtol=1e-5, atol=0)


def test_gradients_of_keys_and_queries_of_any_size_are_finite():
    for seed in range(50):
        torch.manual_seed(seed)
        sizes = 10.0 ** (81 * torch.rand(3, 40, 1, dtype=D) - 44), 10.0 ** (-20 * torch.rand(3, 1, 4, dtype=D))
        x = (torch.rand(3, 40, 4) * sizes[0] * sizes[1]).clamp(max=1e20).float().requires_grad_()
        (grad,) = torch.autograd.grad(causal_linear_attention(*x)[0].sum(), x)
        assert grad.isfinite().all(), seed


def test_values_of_any_size_leave_gradients_finite_and_their_own_right():
    """The gradient of a query is a difference of products with values, each of which may overflow."""
    for seed in range(100):
        torch.manual_seed(seed)
        query, key, value = torch.randn(3, 3, 4)
        query, value = query.relu() * 10 ** (60 * torch.rand(()) - 30), value * 10 ** (36 * torch.rand(()))
        leaves = [x.requires_grad_() for x in (query, key.relu() * 10 ** torch.randn(3, 4).mul(6), value)]
        weights = linear_attention_weights(*leaves[:2])
        causal = linear_attention_weights(*leaves[:2], is_causal=True)
        for out, w in ((linear_attention(*leaves), weights), (causal_linear_attention(*leaves)[0], causal)):
            found = torch.autograd.grad(out, leaves, cotangent(out))
            assert all(g.isfinite().all() for g in found), seed
            torch.testing.assert_close(found[2], w.mT @ cotangent(out), rtol=1e-5, atol=1e-6)


def test_queries_before_the_first_matching_key_get_zero():
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    key = torch.tensor([[0.0, 2.0], [0.0, 1.0], [3.0, 0.0], [1.0, 1.0]], requires_grad=True)
    value = torch.tensor([[1.0], [4.0], [5.0], [7.0]], requires_grad=True)
    out, _ = causal_linear_attention(query, key, value)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, 2.0, 5.0, 0.0]))
    out.sum().backward()
    assert (query.grad[[0, 3]] == 0).all()
    assert all(x.grad.isfinite().all() for x in (query, key, value))


def block(*batch, dtype=D, masked=False):
    """The tensors of the whole block, and a mask."""
    torch.manual_seed(math.prod(batch))
    mask = torch.rand(batch) < 0.3 if masked else None
    x = torch.randn(*batch, DIM + 1)
    x = x if mask is None else x.masked_fill(mask[..., None], 0.0)
    maps = (torch.randn(3 * DIM, DIM + 1), torch.randn(3 * DIM), torch.randn(DIM, DIM), torch.randn(DIM))
    return [t.to(dtype).requires_grad_() for t in (x, *maps, torch.tensor([-0.7]))], mask


def attend(leaves, mask, *, power=2.0, rows=None):
    """In parts where rows are given, else by definition."""
    if rows is None:
        return linear_attention_block_reference(*leaves, mask, heads=HEADS, power=power, is_causal=True)
    module = sys.modules[linear_attention_block.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "use_chunked", lambda *_: True)
        patch.setattr(module, "_CAUSAL_ROWS", rows)
        return linear_attention_block(*leaves, mask, heads=HEADS, power=power, is_causal=True)


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_give_what_the_definition_gives(rows, masked, dtype):
    for power in (1.0, 2.5):
        leaves, mask = block(2, 11, dtype=dtype, masked=masked)
        found = []
        for how in (rows, None):
            out = attend(leaves, mask, power=power, rows=how)
            found.append((out, *torch.autograd.grad(out, leaves, cotangent(out))))
        for name, ours, theirs in zip(("result", *NAMES), *found, strict=True):
            assert_near(ours, theirs, 1e-11 if dtype == D else 2e-4, name)


def test_second_derivatives_are_those_of_the_definition():
    leaves, mask = block(6, masked=True)
    assert torch.autograd.gradgradcheck(lambda *given: attend(given, mask, rows=4), leaves, fast_mode=True)


def test_many_tokens_keep_nothing_that_is_as_large_as_a_projection():
    manifold = Lorentz(-0.7, learnable=True, dtype=D)
    layer = HypLinearAttention(DIM, HEADS, manifold, dtype=D)
    x = manifold.lift(torch.randn(2, 3000, DIM, dtype=D)).detach()
    mask = torch.rand(2, 3000) < 0.2
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        many = layer(x, mask, is_causal=True)
    assert sum(size >= 2 * 3000 * DIM for size in sizes) <= 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holonomy.ops.lorentz.lifted._FEWEST_ROWS", 10_000)
        plain = layer(x, mask, is_causal=True)
    leaves = dict(layer.named_parameters())
    found = (torch.autograd.grad(y, [*leaves.values()], cotangent(y)) for y in (many, plain))
    for name, ours, theirs in zip(leaves, *found, strict=True):
        assert_near(ours, theirs, 1e-10, name)


@pytest.mark.parametrize("kind", [HypLinearAttention, HypSoftmaxAttention])
def test_long_sequences_under_autocast(kind):
    """Sums over many tokens are not made in bfloat16, nor are those that steps carry."""
    manifold = Lorentz()
    layer, x = kind(8, 2, manifold), manifold.lift(torch.randn(400, 8))
    expected = layer(x, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(layer(x, is_causal=True), expected, 0.05, "result")
        found, state = [], None
        for part in x.split(100):
            out, state = layer.step(part, state)
            found.append(out)
    assert_near(torch.cat(found), expected, 0.05, "steps")


@pytest.mark.slow
@pytest.mark.usefixtures("without_decorators")
@pytest.mark.parametrize("nodes", [5, 100])
def test_causal_attention_compiles_without_a_graph_break(nodes):
    manifold = Lorentz(-0.7, dtype=D)
    layer, x = HypLinearAttention(DIM, HEADS, manifold, dtype=D), manifold.lift(torch.randn(nodes, DIM, dtype=D))
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = [y(x, is_causal=True) for y in (layer, compiled)]
    assert_near(*found, 1e-11, "result")
    leaves = [p for p in layer.parameters() if p.requires_grad]
    grads = (torch.autograd.grad(y, leaves, cotangent(y)) for y in found)
    for ours, theirs in zip(*grads, strict=True):
        assert_near(ours, theirs, 1e-9, "gradient")


# Masks of pairs.


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_masks_have_torchs_shapes_and_meaning(similarity):
    """Of any shape that torch takes, boolean or added to logits; and the causal one is is_causal."""
    manifold = Lorentz(-0.8, dtype=D)
    layer = HypSoftmaxAttention(6, 3, manifold, similarity=similarity, dtype=D)
    x = manifold.lift(torch.randn(2, 5, 6, dtype=D))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = layer(x, is_causal=True)
    shapes = ((5, 5), (3, 5, 5), (2, 3, 5, 5), (2, 1, 5, 5), (6, 5, 5))
    for shape, kind in product(shapes, (torch.bool, torch.float32, D)):
        mask = later.expand(shape)
        if kind != torch.bool:
            mask = torch.zeros(shape, dtype=kind).masked_fill(mask, -math.inf)
        torch.testing.assert_close(layer(x, attn_mask=mask), expected)
    torch.testing.assert_close(layer(x, attn_mask=later, is_causal=True), expected)
    padding = torch.tensor([[False] * 5, [True, False, False, False, True]])
    alone = layer(x[1:, 1:4], is_causal=True)
    torch.testing.assert_close(layer(x, padding, attn_mask=later)[1:, 1:4], alone)
    torch.testing.assert_close(layer(x, padding, is_causal=True)[1:, 1:4], alone)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_numbers_added_to_logits_have_gradients_and_hide_whole_rows(similarity):
    manifold = Lorentz(-0.8, dtype=D)
    layer = HypSoftmaxAttention(4, 2, manifold, similarity=similarity, dtype=D)
    x = manifold.lift(torch.randn(3, 4, dtype=D))
    added = torch.randn(3, 3, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(lambda mask: layer(x, attn_mask=mask), added)
    alone = torch.zeros(3, 3, dtype=D)
    alone[1] = -math.inf
    result = layer(x, attn_mask=alone)
    assert (result[1, 1:] == 0).all()
    assert result.isfinite().all()
    torch.testing.assert_close(result[0], layer(x)[0])
    torch.testing.assert_close(layer(x, attn_mask=alone + 7.0), result)  # softmax does not see a constant


@pytest.mark.usefixtures("without_shape_checks")
def test_masks_that_do_not_fit_get_one_sentence():
    m = Lorentz()
    x = m.lift(torch.randn(2, 5, 4))
    linear, softmax = HypLinearAttention(4, 2, m), HypSoftmaxAttention(4, 2, m)
    with pytest.raises(ValueError, match=r"^attn_mask must be None for linear attention"):
        linear(x, attn_mask=torch.zeros(5, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"^attn_mask must be boolean or floating-point, got torch.int64"):
        softmax(x, attn_mask=torch.zeros(5, 5, dtype=torch.int64))
    for shape in ((5,), (4, 5), (3, 5, 5), (2, 5, 4)):
        with pytest.raises(ValueError, match=r"^attn_mask must broadcast to \(\*batch, heads, nodes, keys\)"):
            softmax(x, attn_mask=torch.zeros(shape, dtype=torch.bool))


# Weights.


@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_are_what_values_are_averaged_with(is_causal):
    manifold, hidden = Lorentz(-0.8, dtype=D), Lorentz(-2.0, dtype=D)
    x, memory = manifold.lift(torch.randn(2, 5, 6, dtype=D)), manifold.lift(torch.randn(2, 4, 6, dtype=D))
    mask = torch.tensor([[False, False, True, False]] * 2)
    calls = ({"is_causal": is_causal}, {"memory": memory, "key_padding_mask": mask})
    for similarity, call in product(SIMILARITIES, calls):
        how = {"similarity": similarity, "rope": call is calls[0], "dtype": D}
        layer = HypSoftmaxAttention(6, 2, manifold, hidden, manifold_hidden=hidden, **how)
        value = split_heads(layer.value(call.get("memory", x))[..., 1:], 2)
        mixed = merge_heads(weighted_midpoint(value, layer.weights(x, **call), curvature=hidden.curvature))
        torch.testing.assert_close(layer(x, **call)[..., 1:], mixed)
    layer = HypLinearAttention(6, 2, manifold, hidden, manifold_hidden=hidden, dtype=D)
    for call in calls:
        spaces = (layer.value(points)[..., 1:].unflatten(-1, (2, 3)) for points in (call.get("memory", x), x))
        value, own = (power_features(space, 2.0).transpose(-3, -2) for space in spaces)
        mixed = merge_heads(layer.weights(x, **call) @ value) + layer.residual(merge_heads(own))
        torch.testing.assert_close(layer(x, **call)[..., 1:], mixed)


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"memory": 4}, {"padded": True}])
def test_weights_of_tuples_are_what_their_values_are_averaged_with(how):
    """At any order and in both forms, hyperbolic or not."""
    how, mask, n = dict(how), None, how.get("memory", 5)
    manifold = Lorentz(-0.8, dtype=D)
    x, memory = (torch.randn(2, nodes, 8, dtype=D) for nodes in (5, n))
    if how.pop("padded", False):
        mask = torch.tensor([[False] * 5, [False, False, True, False, True]])
    for order, form, kind in product(
        (1, 2, 3), ("product", "determinant"), (SimplicialAttention, HypSimplicialAttention)
    ):
        flat = kind is SimplicialAttention
        layer = kind(8, 2, *[] if flat else [manifold], order=order, form=form, dtype=D)
        lift = (lambda x: x) if flat else manifold.lift
        call = how | ({"memory": lift(memory)} if "memory" in how else {})
        keys = lift(memory) if "memory" in how else lift(x)
        keys = keys if mask is None else keys.masked_fill(mask[..., None], 0.0)
        values = layer.projected(keys)[1] if flat else [split_heads(htc(keys)[..., 1:], 2) for htc in layer.values]
        weights = layer.weights(lift(x), mask, **call)
        axes = "xyz"[:order]
        mixed = torch.einsum(f"bhi{axes},{','.join(f'bh{axis}d' for axis in axes)}->bhid", weights, *values)
        expected = layer(lift(x), mask, **call)
        ours = layer.out(merge_heads(mixed)) if flat else manifold.lift(merge_heads(mixed))
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


# Euclidean attention as torch has it.


def torchs(layer):
    """The same maps in torch's own module, whose keys have a bias."""
    theirs = torch.nn.MultiheadAttention(layer.features, layer.heads, batch_first=True, dtype=D)
    zero = torch.zeros(layer.features, dtype=D)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.query.weight, layer.key.weight, layer.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([layer.query.bias, zero, zero]))
    theirs.out_proj = layer.out
    return theirs


def test_tokens_attend_as_torchs_attention_lets_them():
    """With the same weights, masks and causality; and rows without a key, where torch has nan, are the bias."""
    layer = TokenAttention(6, 3, dtype=D)
    theirs, x, memory = torchs(layer), torch.randn(2, 5, 6, dtype=D), torch.randn(2, 4, 6, dtype=D)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    hidden = torch.rand(6, 5, 5) < 0.4
    hidden |= hidden.all(-1, keepdim=True)
    hidden[..., 0] = False
    added = torch.randn(6, 5, 5, dtype=D).masked_fill(hidden, -math.inf)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    some = torch.tensor([[False] * 4, [False, True, False, True]])
    for ours, call in (
        ({}, {}),
        ({"is_causal": True}, {"attn_mask": later, "is_causal": True}),
        ({"attn_mask": hidden}, {"attn_mask": hidden}),
        ({"attn_mask": added}, {"attn_mask": added}),
        ({"key_padding_mask": padding}, {"key_padding_mask": padding}),
        ({"key_padding_mask": padding, "is_causal": True}, {"key_padding_mask": padding, "attn_mask": later}),
        ({"key_padding_mask": padding, "attn_mask": hidden}, {"key_padding_mask": padding, "attn_mask": hidden}),
        ({"memory": memory}, {}),
        ({"memory": memory, "key_padding_mask": some}, {"key_padding_mask": some}),
    ):
        keys = ours.get("memory", x)
        expected, weights = theirs(x, keys, keys, **call, average_attn_weights=False)
        there = ~padding if ours.get("key_padding_mask") is padding else torch.ones(2, 5, dtype=torch.bool)
        torch.testing.assert_close(layer(x, **ours)[there], expected[there], rtol=1e-12, atol=1e-12)
        rows = (0, slice(None)), (1, slice(None), there[1])
        for row in rows:
            torch.testing.assert_close(layer.weights(x, **ours)[row], weights[row], rtol=1e-12, atol=1e-12)
    nothing = torch.ones(5, 5, dtype=torch.bool)
    assert torch.equal(layer(x, attn_mask=nothing), layer.out.bias.expand(2, 5, 6))


# Causal attention by random features.


def by_pairs(query, key, value, projection, mask=None):
    """The quotient of features, pair by pair."""
    root = query.shape[-1] ** -0.25
    of_query, of_key = log_features(query * root, projection, of_query=True), log_features(key * root, projection)
    pairs = (of_query[..., :, None, :] + of_key[..., None, :, :]).logsumexp(-1)
    hidden = torch.ones_like(pairs, dtype=torch.bool).triu(1)
    hidden = hidden if mask is None else hidden | mask[..., None, :]
    return pairs.masked_fill(hidden, torch.finfo(D).min).softmax(-1).masked_fill(hidden, 0.0) @ value


@pytest.mark.parametrize(("chunk", "chunks"), [(1, 1), (2, 3), (8, 1), (32, 64)])
@pytest.mark.parametrize("masked", [False, True])
def test_chunks_of_features_have_no_effect(chunk, chunks, masked, monkeypatch, device):
    """Nor does computing them again on the way back, some rows at a time."""
    monkeypatch.setattr("holonomy.ops.performer.causal._CHUNK", chunk)
    monkeypatch.setattr("holonomy.ops.performer.causal._CHUNKS", chunks)
    monkeypatch.setattr("holonomy.ops.performer._CAUSAL_ROWS", 5)
    projection = orthogonal_projection(7, 4, device=device, dtype=D)
    for rows, fewest in product((1, 2, 7, 23), (1, 10**6)):
        monkeypatch.setattr("holonomy.ops.lorentz.lifted._FEWEST_ROWS", fewest)
        leaves = [torch.randn(2, 3, rows, width, dtype=D, device=device).requires_grad_() for width in (4, 4, 5)]
        mask = torch.rand(2, 1, rows, device=device) < 0.4 if masked else None
        found = []
        for form in (lambda *each: performer_attention(*each, is_causal=True), by_pairs):
            out = form(*leaves, projection, mask)
            found.append((out, *torch.autograd.grad(out, leaves, cotangent(out))))
        for ours, theirs in zip(*found, strict=True):
            assert_near(ours, theirs, 1e-11, f"{rows} rows", floor=1.0)


def test_second_derivatives_of_recomputed_features(monkeypatch):
    monkeypatch.setattr("holonomy.ops.lorentz.lifted._FEWEST_ROWS", 1)
    monkeypatch.setattr("holonomy.ops.performer._CAUSAL_ROWS", 2)
    projection = orthogonal_projection(3, 2, dtype=D).requires_grad_()
    leaves = [torch.randn(5, 2, dtype=D).requires_grad_() for _ in range(3)]

    def attend(*each):
        return performer_attention(*each, is_causal=True)

    assert torch.autograd.gradcheck(attend, (*leaves, projection))
    assert torch.autograd.gradgradcheck(attend, (*leaves, projection), fast_mode=True)


def test_each_feature_needs_a_scale_of_its_own():
    """Opposite queries and keys with logits of 1e4, where one scale for all features leaves zero."""
    for dtype, size in product((torch.float32, D), (1.0, 1e2, 1e4)):
        direction = torch.randn(1, 8, dtype=dtype)
        direction = direction / direction.norm() * size**0.5 * 8**0.25
        query = torch.cat([direction, -direction] * 20).requires_grad_()
        key = torch.cat([-direction, direction, 0.5 * direction, 0 * direction] * 10).requires_grad_()
        value, projection = torch.randn(40, 3, dtype=dtype), orthogonal_projection(16, 8, dtype=dtype)
        result = performer_attention(query, key, value, projection, is_causal=True)
        wide = by_pairs(query.double(), key.double(), value.double(), projection.double())
        assert_near(result, wide, 2e-2 if dtype == torch.float32 else 1e-9, f"logits of {size:g}", floor=1.0)
        assert all(x.isfinite().all() for x in torch.autograd.grad(result.sum(), (query, key)))
    root = 8**-0.25
    of_query, of_key = log_features(query * root, projection, of_query=True), log_features(key * root, projection)
    alike, _ = causal_linear_attention(
        *((x - x.amax(-1, keepdim=True)).exp().float() for x in (of_query, of_key)), value.float()
    )
    torch.testing.assert_close(result[0], value[0])  # the one key before it
    assert (alike[0] == 0).all()


def test_many_tokens_keep_little_beside_their_projections():
    layer, x = TokenAttention(8, 2, kernel="performer", dtype=D), torch.randn(3000, 8, dtype=D)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        many = layer(x, is_causal=True)
    assert sum(sizes) <= 12 * 3000 * 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holonomy.ops.lorentz.lifted._FEWEST_ROWS", 10_000)
        plain = layer(x, is_causal=True)
    leaves = dict(layer.named_parameters())
    found = (torch.autograd.grad(y, [*leaves.values()], cotangent(y)) for y in (many, plain))
    for name, ours, theirs in zip(leaves, *found, strict=True):
        assert_near(ours, theirs, 1e-10, name)


@pytest.mark.usefixtures("without_shape_checks")
def test_states_of_another_device_or_kernel_are_refused_in_one_sentence():
    x = torch.randn(2, 3, 6)
    softmax, performer = TokenAttention(6, 2), TokenAttention(6, 2, kernel="performer")
    (_, cache), (_, sums) = softmax.step(x), performer.step(x)
    for layer, state, expected in ((softmax, sums, "KeyValueState"), (performer, cache, "PerformerState")):
        with pytest.raises(TypeError, match=rf"^state must be what step returned, a {expected}, got "):
            layer.step(x, state)
    for layer, state in ((softmax, cache), (performer, sums)):
        away = type(state)(*(part.to("meta") for part in state))
        with pytest.raises(ValueError, match=r"^state\.\w+ must be on the device cpu"):
            layer.step(x, away)
        with pytest.raises(ValueError, match=r"^state must have \w+ of shape"):
            TokenAttention(8, 2, kernel=layer.kernel).step(torch.randn(2, 3, 8), state)


def test_autocast_may_be_on_in_some_steps_only():
    manifold, x = Lorentz(), torch.randn(6, 12)
    flat = (
        *(TokenAttention(12, 2, kernel=kernel) for kernel in ("softmax", "performer")),
        *(SimplicialAttention(12, 2, order=order, lower_orders=order == 2) for order in (1, 2)),
    )
    for layer in (*flat, HypLinearAttention(12, 2, manifold), HypSoftmaxAttention(12, 2, manifold)):
        tokens = x if layer in flat else manifold.lift(x)
        expected = layer(tokens, is_causal=True)
        for first in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
                before, state = layer.step(tokens[:4])
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not first):
                after, _ = layer.step(tokens[4:], state)
            assert_near(torch.cat([before.float(), after.float()]), expected, 0.05, "steps")
