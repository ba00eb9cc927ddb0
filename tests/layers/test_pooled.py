"""Linear attention of many heads over the same rows: chunks against the reference, and against loops."""

from __future__ import annotations

import math

import pytest
import torch

from holonomy.ops import performer
from holonomy.ops.performer import chunked
from holonomy.ops.performer.reference import attend_pooled_reference, pool_keys_reference


@pytest.fixture(params=[1, 4, 5, 100])
def inputs(request, device, monkeypatch):
    """Eleven rows of width five, two heads of dimension three with four features, in chunks of that many rows."""
    monkeypatch.setattr(chunked, "_CHUNK", request.param)
    monkeypatch.setattr(chunked, "_FEWEST_FEATURES", 1)
    shapes = {"x": (11, 5), "weight": (5, 6), "bias": (6,), "logs": (2, 4), "means": (2, 4, 3), "direct": (5, 3)}
    made = {n: torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for n, s in shapes.items()}
    return made | {"projection": torch.randn(4, 3, dtype=torch.float64, device=device)}


def exponents(x, projection):
    return x @ projection.mT - x.square().sum(-1, keepdim=True) / 2 - math.log(2)


def test_pooled_is_the_mean_by_each_feature(inputs):
    x, weight, bias, projection = (inputs[name] for name in ("x", "weight", "bias", "projection"))
    logs, means = performer.pool_keys(x, weight, bias, projection, 1, 4)
    for head in range(2):
        keys = x @ weight[:, 3 * head : 3 * head + 3] + bias[3 * head : 3 * head + 3]
        weights = exponents(keys, projection).exp()
        torch.testing.assert_close(logs[head], weights.sum(0).log())
        torch.testing.assert_close(means[head], weights.mT @ x[:, 1:4] / weights.sum(0)[:, None])


def test_attend_is_the_quotient_of_sums(inputs):
    x, weight, bias, projection = (inputs[name] for name in ("x", "weight", "bias", "projection"))
    logs, means, direct = (inputs[name] for name in ("logs", "means", "direct"))
    expected = x @ direct
    for head in range(2):
        query = x @ weight[:, 3 * head : 3 * head + 3] + bias[3 * head : 3 * head + 3]
        weights = (exponents(query, projection) + logs[head]).exp()
        expected = expected + weights @ means[head] / weights.sum(-1, keepdim=True)
    # The reference is what second derivatives are taken of.
    for form in (performer.attend_pooled, attend_pooled_reference):
        torch.testing.assert_close(form(x, weight, bias, projection, logs, means, direct), expected)


def test_gradients_of_both_orders(inputs):
    x, weight, bias, projection = (inputs[name] for name in ("x", "weight", "bias", "projection"))
    logs, means, direct = (inputs[name] for name in ("logs", "means", "direct"))

    def pooled(x, weight, bias):
        return performer.pool_keys(x, weight, bias, projection, 1, 4)

    def attend(x, weight, bias, logs, means, direct):
        return performer.attend_pooled(x, weight, bias, projection, logs, means, direct)

    leaves = (x, weight, bias, logs, means, direct)
    assert torch.autograd.gradcheck(pooled, (x, weight, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(pooled, (x, weight, bias), fast_mode=True)
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, leaves, fast_mode=True)


def test_the_projection_learns_where_it_is_asked_to(inputs):
    x, weight, bias, projection = (inputs[name] for name in ("x", "weight", "bias", "projection"))
    projection.requires_grad_()
    ours = performer.pool_keys(x, weight, bias, projection, 0, 2)[1].square().sum()
    top, table = pool_keys_reference(x, weight, bias, projection, 0, 2)
    plain = (table[:-1] / table[-1]).square().sum()
    torch.testing.assert_close(*(torch.autograd.grad(loss, projection)[0] for loss in (ours, plain)))
    assert top.shape == (2, 4)


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_large_logits(inputs, scale):
    x, weight, projection = (inputs[name].detach().float() for name in ("x", "weight", "projection"))
    x = (x * scale).requires_grad_()
    logs, means = performer.pool_keys(x, weight, weight[0] * 0, projection, 0, 5)
    result = performer.attend_pooled(x, weight, weight[0] * 0, projection, logs, means, weight[:, :5])
    assert result.isfinite().all()
    assert torch.autograd.grad(result.sum(), x)[0].isfinite().all()
    assert (means <= x[:, :5].detach().amax(0) * (1 + 1e-5)).all()
