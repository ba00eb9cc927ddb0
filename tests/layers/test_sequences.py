"""Causal attention in chunks, masks of pairs as torch has them, and weights: against formulas of all pairs."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from holonomy.layers import HypLinearAttention, HypSoftmaxAttention
from holonomy.manifolds import Lorentz
from holonomy.ops.heads import merge_heads, split_heads
from holonomy.ops.linear_attention import linear_attention_block, linear_attention_block_reference
from holonomy.ops.linear_attention.causal import causal_linear_attention, linear_attention_weights
from holonomy.ops.linear_attention.reference import linear_attention, power_features
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
    return linear_attention_block(*leaves, mask, heads=HEADS, power=power, is_causal=True, rows=rows)


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
@pytest.mark.usefixtures("without_shape_checks")
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
@pytest.mark.parametrize("fewest", [1, 2**30])
def test_masks_have_torchs_shapes_and_meaning(similarity, fewest, monkeypatch):
    """Of any shape that torch takes, boolean or added to logits; and the causal one is is_causal."""
    monkeypatch.setattr("holonomy.ops.softmax_attention._FEWEST_PAIRS", fewest)
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
