"""Random features: their law, softmax attention in the mean, and logits and masks at their ends."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from holonomy.ops.performer import log_features, orthogonal_projection, performer_attention
from tests.reference.tokens import kernel_attention


def heads(device, dtype=torch.float64, nodes=6, dim=5, values=3):
    widths = (dim, dim, values)
    return tuple(torch.randn(2, 3, nodes, width, device=device, dtype=dtype) for width in widths)


def test_rows_are_orthogonal_in_blocks_and_normal_in_length(device):
    generator = torch.Generator(device).manual_seed(3)
    w = orthogonal_projection(4000, 4, generator=generator, dtype=torch.float64)
    gram = w.reshape(-1, 4, 4) @ w.reshape(-1, 4, 4).mT
    assert torch.allclose(gram, torch.diag_embed(gram.diagonal(dim1=1, dim2=2)), atol=1e-12)
    assert (w.mT @ w / 4000 - torch.eye(4, device=device)).abs().max() < 0.1
    assert abs(w.square().sum(-1).var().item() / 8 - 1) < 0.15  # the variance of chi squared with 4 degrees


def test_projection_repeats_with_its_seed_in_every_dtype(device):
    def draw(dtype):
        return orthogonal_projection(7, 5, generator=torch.Generator(device).manual_seed(1), dtype=dtype)

    assert draw(torch.float32).shape == (7, 5)
    assert torch.equal(draw(torch.float32), draw(torch.float64).float())
    torch.manual_seed(5)
    first = orthogonal_projection(7, 5, device=device)
    torch.manual_seed(5)
    assert torch.equal(first, orthogonal_projection(7, 5, device=device))


def test_features_multiply_to_the_exponential_in_the_mean(device):
    x, y = torch.randn(2, 6, 4, device=device, dtype=torch.float64) / 2
    w = orthogonal_projection(200_000, 4, device=device, dtype=torch.float64)
    found = (log_features(x, w) + log_features(y, w)).exp().sum(-1)
    assert ((found - (x * y).sum(-1).exp()) / found).abs().max() < 0.05


def test_approaches_softmax_attention(device):
    q, k, v = heads(device)
    q, k = q / 2, k / 2
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    error = [
        (performer_attention(q, k, v, orthogonal_projection(f, 5, device=device, dtype=q.dtype)) - exact).norm().item()
        for f in (20, 20_000)
    ]
    assert error[1] < error[0] / 8
    assert error[1] < 0.02 * exact.norm().item()


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 1e6])
def test_the_length_of_a_query_costs_no_digits(size, device):
    """Queries far away in a direction that no feature sees, in single precision as in double."""
    w = orthogonal_projection(3, 5, device=device, dtype=torch.float64).float()
    blind = torch.linalg.svd(w.double()).Vh[3].float()
    q, k, v = (x.float() for x in heads(device))
    q = q + size * blind * torch.randn(2, 3, 6, 1, device=device)
    # Of the direction itself no more is left than the rounding of its entries.
    rounding = 4 * torch.finfo(torch.float32).eps * max(size, 8.0)
    exact = performer_attention(q.double(), k.double(), v.double(), w.double())
    torch.testing.assert_close(performer_attention(q, k, v, w).double(), exact, rtol=0, atol=rounding)


@pytest.mark.parametrize("features", [1, 3, 12])
def test_values_and_gradients_agree_with_the_loops(features, device):
    leaves = [x.requires_grad_() for x in heads(device)]
    w = orthogonal_projection(features, 5, device=device, dtype=torch.float64)
    mask = torch.rand(2, 1, 6, device=device) < 0.4
    mask[1] = True
    ours = performer_attention(*leaves, w, mask)
    theirs = torch.stack([
        torch.stack([kernel_attention(q[h], k[h], v[h], w, m[0], 1 / math.sqrt(5)) for h in range(3)])
        for q, k, v, m in zip(*leaves, mask, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(ours, theirs)
    assert not ours[1].any()
    generic = torch.cos(torch.arange(ours.numel(), device=device, dtype=ours.dtype)).reshape(ours.shape)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, generic), torch.autograd.grad(theirs, leaves, generic), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
def test_large_logits_stay_averages_with_finite_gradients(size, device, dtype):
    """Queries and keys of opposite directions, where one maximum for all keys leaves nothing of any of them."""
    direction = torch.randn(1, 8, device=device, dtype=dtype)
    direction = direction / direction.norm() * size**0.5 * 8**0.25
    query = torch.cat([direction, -direction, torch.zeros_like(direction)]).requires_grad_()
    key = torch.cat([direction, -direction, 0.5 * direction]).requires_grad_()
    value = torch.randn(3, 4, device=device, dtype=dtype)
    w = orthogonal_projection(16, 8, device=device, dtype=dtype)
    result = performer_attention(query, key, value, w)
    assert result.isfinite().all()
    assert (result <= value.amax(0) + 1e-5).all()
    assert (result >= value.amin(0) - 1e-5).all()
    for grad in torch.autograd.grad(result.square().sum(), [query, key]):
        assert grad.isfinite().all()


@pytest.mark.parametrize("filling", [1e30, math.inf, math.nan])
def test_padding_has_no_effect(filling, device, dtype):
    q, k, v = heads(device, dtype)
    w = orthogonal_projection(9, 5, device=device, dtype=dtype)
    mask = torch.zeros(2, 1, 6, dtype=torch.bool, device=device)
    mask[1, :, 4:] = True
    spoiled = [copy.copy(x.masked_fill(mask[..., None], filling)).requires_grad_() for x in (k, v)]
    result = performer_attention(q, *spoiled, w, mask)
    # The shorter graph alone: the same numbers, not only finite ones.
    alone = performer_attention(q[1:], k[1:, :, :4], v[1:, :, :4], w)
    torch.testing.assert_close(result[1:], alone)
    for grad in torch.autograd.grad(result.sum(), spoiled):
        assert grad.isfinite().all()
        assert not grad[1, :, 4:].any()


def test_no_key_at_all_gives_zeros(device, dtype):
    q, k, v = heads(device, dtype)
    w = orthogonal_projection(9, 5, device=device, dtype=dtype)
    none = performer_attention(q, k[..., :0, :], v[..., :0, :], w)
    assert none.shape == v.shape
    assert not none.any()
    mask = torch.ones(2, 1, 6, dtype=torch.bool, device=device)
    assert not performer_attention(q, k, v, w, mask).any()


def test_the_result_does_not_depend_on_batch_mates(device, dtype):
    q, k, v = heads(device, dtype)
    w = orthogonal_projection(9, 5, device=device, dtype=dtype)
    loud = k.clone()
    loud[0] *= 100
    torch.testing.assert_close(performer_attention(q, loud, v, w)[1], performer_attention(q, k, v, w)[1])


def test_bfloat16_autocast_keeps_the_logarithms(device):
    q, k, v = heads(device, torch.float32)
    w = orthogonal_projection(9, 5, device=device)
    exact = performer_attention(q * 5, k, v, w)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        near = performer_attention(q * 5, k, v, w)
    assert ((near - exact).norm() / exact.norm()).item() < 0.02
    half = performer_attention(*(x.bfloat16() for x in (q * 5, k, v)), w.bfloat16())
    assert half.dtype == torch.bfloat16
    wide = performer_attention(*(x.bfloat16().float() for x in (q * 5, k, v)), w.bfloat16().float())
    assert ((half.float() - wide).norm() / wide.norm()).item() < 0.02
