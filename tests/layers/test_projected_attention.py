"""Linear attention in parts: the same numbers as its definition, whatever the size, the mask and the radius."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from holonomy.layers import HypLinearAttention
from holonomy.manifolds import Lorentz
from holonomy.ops.linear_attention import linear_attention_block, linear_attention_block_reference
from holonomy.ops.linear_attention.reference import product
from tests.laws.laws import assert_near, cotangent

D = torch.float64
HEADS, DIM = 2, 6
NAMES = ("result", "x", "weight", "bias", "residual weight", "residual bias", "curvature")


def problem(*batch, dtype=D, radius=1.0, masked=False, lifted=True, device=None):
    torch.manual_seed(math.prod(batch))
    x = torch.randn(*batch, DIM + 1) * radius
    mask = torch.rand(batch) < 0.3 if masked else None
    if masked:
        x = x.masked_fill(mask[..., None], 0.0)
    maps = (torch.randn(3 * DIM, DIM + 1), torch.randn(3 * DIM), torch.randn(DIM, DIM), torch.randn(DIM))
    curvature = (torch.tensor([-0.7]),) if lifted else ()
    leaves = [t.to(device, dtype).requires_grad_() for t in (x, *maps, *curvature)]
    return leaves, None if mask is None else mask.to(device)


def attend(leaves, mask, *, power=2.0, rows=None):
    """In parts where rows are given, else by definition."""
    curvature = leaves[5] if len(leaves) > 5 else None
    if rows is None:
        return linear_attention_block_reference(*leaves[:5], curvature, mask, heads=HEADS, power=power)
    module = sys.modules[linear_attention_block.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "use_chunked", lambda *_: True)
        patch.setattr(module, "rows_of_chunk", lambda *_: rows)
        return linear_attention_block(*leaves[:5], curvature, mask, heads=HEADS, power=power)


def with_gradients(leaves, mask, **options):
    out = attend(leaves, mask, **options)
    return out, *torch.autograd.grad(out, leaves, cotangent(out))


@pytest.mark.parametrize("nodes", [1, 7, 1023, 1025, 2049])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_give_what_the_definition_gives(nodes, masked, dtype, device):
    for batch, power, lifted in (((nodes,), 2.0, True), ((2, nodes), 1.0, True), ((nodes,), 3.0, False)):
        leaves, mask = problem(*batch, dtype=dtype, masked=masked, lifted=lifted, device=device)
        expected = with_gradients(leaves, mask, power=power)
        got = with_gradients(leaves, mask, power=power, rows=1024)
        for name, ours, theirs in zip(NAMES, got, expected, strict=False):
            assert ours.dtype == dtype
            assert_near(ours, theirs, 1e-11 if dtype == D else 2e-4, name)


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_the_length_of_a_part_has_no_effect(rows):
    leaves, mask = problem(3, 11, masked=True)
    for ours, theirs in zip(
        with_gradients(leaves, mask, rows=rows), with_gradients(leaves, mask, rows=11), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("power", [1.0, 2.0, 2.5])
def test_gradients_by_finite_differences(power):
    leaves, mask = problem(2, 5, masked=True)
    assert torch.autograd.gradcheck(lambda *given: attend(given, mask, power=power, rows=2), leaves, fast_mode=True)


def test_second_derivatives_are_those_of_the_definition():
    leaves, mask = problem(6)
    assert torch.autograd.gradgradcheck(lambda *given: attend(given, mask, rows=4), leaves, fast_mode=True)


@pytest.mark.parametrize("radius", [0.0, 1e-30, 1e-10, 1e4, 1e18, 1e24, 1e33])
def test_any_radius_gives_finite_points_and_gradients(radius):
    leaves, mask = problem(9, dtype=torch.float32, radius=radius)
    out = attend(leaves, mask, rows=4)
    manifold = Lorentz(-0.7)
    torch.testing.assert_close(out[:, :1], manifold.time(out), rtol=1e-6, atol=0)
    for grad in torch.autograd.grad((out / out[:, :1].detach()).sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("rows", [None, 2])
def test_rows_and_maps_of_any_small_size_give_finite_gradients(rows):
    """Down to the smallest number that there is, where the feature map divides by what is shorter than its inverse."""
    for seed in range(40):
        torch.manual_seed(seed)
        power = (1.0, 2.0, 3.0, 7.5)[seed % 4]
        leaves, _ = problem(7, dtype=torch.float32, lifted=False)
        with torch.no_grad():
            leaves[0] *= (10.0 ** (49 * torch.rand(7, 1, dtype=D) - 44)).float()
            leaves[1] *= 10.0 ** -torch.tensor([0.0, 0.0, 10.0, 20.0])[torch.randint(4, (3 * DIM, 1))]
            leaves[2] *= (1.0, 1e-20, 1e-42)[seed % 3]
            leaves[4] *= (1.0, 1e-20, 1e-42)[seed // 3 % 3]
        out = attend(leaves, None, power=power, rows=rows)
        for name, grad in zip(NAMES[1:], torch.autograd.grad(out.sum(), leaves), strict=False):
            assert grad.isfinite().all(), (seed, name)


@pytest.mark.parametrize("growing", [True, False])
def test_keys_of_all_sizes_keep_the_digits_of_the_definition(growing):
    """Sums are scaled by the largest key so far; gradients of small queries are all cancellation."""
    leaves, _ = problem(8, dtype=torch.float32)
    sizes = torch.logspace(-10, 25, 8)[:, None]
    leaves[0] = (leaves[0].detach() * (sizes if growing else sizes.flip(0))).requires_grad_()
    exact = with_gradients([t.detach().double().requires_grad_() for t in leaves], None)
    plain, ours = with_gradients(leaves, None), with_gradients(leaves, None, rows=2)
    for name, x, y, z in zip(NAMES, ours, plain, exact, strict=True):
        error, allowed = ((t.double() - z).norm() / z.norm() for t in (x, y))
        assert error <= 10 * allowed + 1e-6, name


def test_dead_queries_keys_and_padding_get_zero_average_and_finite_gradients():
    leaves, _ = problem(4, masked=False)
    with torch.no_grad():
        leaves[2][:] = -1e3  # no projection is positive
    out, *gradients = with_gradients(leaves, None, rows=3)
    torch.testing.assert_close(out[:, 1:], leaves[4].expand(4, -1))
    assert all((grad == 0).all() for grad in gradients[:3])
    everywhere = torch.ones(4, dtype=torch.bool)
    leaves[0] = torch.zeros_like(leaves[0], requires_grad=True)
    out, *gradients = with_gradients(leaves, everywhere, rows=3)
    assert (out[:, 1:] == 0).all()
    assert all((grad == 0).all() for grad in gradients[:5])


def test_the_layer_takes_parts_where_nodes_are_many():
    manifold, hidden, after = (Lorentz(k, learnable=True, dtype=D) for k in (-1.0, -0.5, -2.0))
    layer = HypLinearAttention(DIM, HEADS, manifold, after, manifold_hidden=hidden, dtype=D)
    x = manifold.lift(torch.randn(4, 3000, DIM, dtype=D)).detach()
    mask = torch.rand(4, 3000) < 0.2
    chosen = []
    kept = torch.autograd.graph.saved_tensors_hooks(lambda t: chosen.append(t.numel()) or t, lambda t: t)
    with kept:
        many = layer(x, mask)
    # Nothing as large as a projection is kept: input, result, mask, and the input without padding.
    assert sum(size >= 4 * 3000 * DIM for size in chosen) <= 2
    few = torch.cat([layer(x[:, :1500], mask[:, :1500]), layer(x[:, 1500:], mask[:, 1500:])], 1)
    assert not torch.allclose(many, few)  # other keys
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holonomy.ops.lorentz.lifted._FEWEST_ROWS", 10_000)
        plain = layer(x, mask)
    leaves = list(layer.parameters())
    for name, ours, theirs in zip(
        [name for name, _ in layer.named_parameters()],
        torch.autograd.grad(many, leaves, cotangent(many)),
        torch.autograd.grad(plain, leaves, cotangent(plain)),
        strict=True,
    ):
        assert_near(ours, theirs, 1e-11, name)


def test_a_product_leaves_the_gradient_of_keys_in_their_order_in_memory():
    """Else all that follows walks through it column by column."""
    key, value = torch.rand(2, 7, 3, requires_grad=True), torch.rand(2, 7, 4, requires_grad=True)
    given = torch.randn(2, 3, 4)
    found = torch.autograd.grad(product(key.mT, value), (key, value), given)
    expected = torch.autograd.grad(key.mT @ value, (key, value), given)
    assert found[0].is_contiguous()
    for name, ours, theirs in zip(("key", "value"), found, expected, strict=True):
        assert_near(ours, theirs, 1e-6, name)


def test_autocast_takes_the_definition():
    layer = HypLinearAttention(DIM, HEADS, Lorentz())
    x = Lorentz().lift(torch.randn(2500, DIM))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x)
    assert_near(result, layer(x), 0.2, "result")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_that_are_asked_for_under_autocast_are_those_of_the_forward_pass(is_causal, create_graph):
    """The layer stands outside of autocast, the call of backward inside: it was an error of dtypes, or lost digits."""
    layer = HypLinearAttention(DIM, HEADS, Lorentz())
    x = Lorentz().lift(torch.randn(2500, DIM)).requires_grad_()
    leaves, each = [x, *(weight for weight in layer.parameters() if weight.requires_grad)], []
    for inside in (False, True):
        loss = layer(x, is_causal=is_causal)[:, 1:].sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            each.append(torch.autograd.grad(loss, leaves, create_graph=create_graph))
    for inside, outside in zip(*each, strict=True):
        torch.testing.assert_close(inside, outside, rtol=1e-6, atol=1e-6)
