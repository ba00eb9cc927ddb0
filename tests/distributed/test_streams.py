"""Chunks one after the other give what one pass over all rows gives: results, and all gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from holonomy.distributed import stream, stream_backward
from holonomy.layers import HypBatchNorm
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer
from holonomy.optim import RiemannianAdam
from tests.distributed.processes import CASES, DIM, D, error, inputs_of
from tests.registry.case import shaken

SIZES = [9, 0, 1, 13]


@pytest.mark.parametrize("name", [name for name in CASES if name != "batch norm"])
def test_a_stream_is_one_pass(name):
    case = CASES[name]
    module = shaken(case.make())
    streamed = copy.deepcopy(module)
    x, *mask = inputs_of(case, sum(SIZES))
    whole = module(x, *mask)
    weights = torch.randn_like(whole)
    (whole * weights).sum().backward()
    kept = [weights / len(SIZES)] * len(SIZES) if case.pooled else weights.split(SIZES)
    chunks = list(zip(kept, *(each.split(SIZES) for each in (x, *mask)), strict=True))

    def loss(chunk, group):
        return (streamed(*chunk[1:], group=group) * chunk[0]).sum()

    found = list(stream(lambda chunk, group: streamed(*chunk[1:], group=group), chunks))
    assert error(found[0] if case.pooled else torch.cat(found), whole) <= 1e-12
    assert not found[0].requires_grad
    total = stream_backward(loss, chunks)
    assert error(total, (whole * weights).sum().detach()) <= 1e-12
    for (place, ours), theirs in zip(streamed.named_parameters(), module.parameters(), strict=True):
        if theirs.requires_grad:
            assert error(ours.grad, theirs.grad) <= 1e-12, place


def test_ten_steps_in_chunks_are_ten_steps_of_one_pass():
    whole = Hypformer(DIM, 4, 3, graph_encoder=None, dtype=D)
    streamed = copy.deepcopy(whole)
    x = torch.randn(20, DIM, dtype=D)
    optimizers = [RiemannianAdam(model.parameters(), lr=0.02) for model in (whole, streamed)]
    for _ in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole(x).square().sum().backward()
        stream_backward(lambda chunk, group: streamed(chunk, group=group).square().sum(), x.split(7))
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(streamed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_dropout_drops_the_same_in_every_pass():
    """The gradient is that of one function: with every weight moved along it, the loss falls as it says."""
    model = Hypformer(DIM, 4, 3, graph_encoder=None, dropout=0.5, dtype=D)
    chunks = torch.randn(20, DIM, dtype=D).split(7)

    def value():
        torch.manual_seed(1)
        model.zero_grad()
        return stream_backward(lambda x, group: model(x, group=group).square().sum(), chunks).item()

    value()
    grads = [p.grad.clone() for p in model.parameters()]
    step, ends = 1e-6, []
    for sign in (step, -2 * step):
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.add_(grad, alpha=sign)
        ends.append(value())
    square = sum(grad.square().sum().item() for grad in grads)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(square, rel=1e-4)


def test_random_numbers_outside_go_on():
    model, x = Hypformer(DIM, 4, 3, graph_encoder=None, dropout=0.5), torch.randn(6, DIM)
    first, second = (torch.cat(list(stream(lambda c, group: model(c, group=group), [x]))) for _ in range(2))
    assert not torch.equal(first, second)


def test_what_can_not_be_streamed_is_refused():
    layer = HypBatchNorm(3, Lorentz(-1.0))
    points = layer.manifold_in.lift(torch.randn(6, 3))
    with pytest.raises(ValueError, match="track_running_stats=False"):
        list(stream(lambda x, group: layer(x, group=group), points.split(2)))
    with pytest.raises(TypeError, match="chunks must be an iterable that gives the chunks anew"):
        stream_backward(lambda x, group: x.sum(), iter([points]))
    with pytest.raises(ValueError, match="chunks must be at least one"):
        stream_backward(lambda x, group: x.sum(), [])


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_added_to_those_that_are_there(training):
    model = Hypformer(DIM, 4, 3, graph_encoder=None, dtype=D).train(training)
    chunks = torch.randn(8, DIM, dtype=D).split(3)
    grads = []
    for _ in range(2):
        stream_backward(lambda x, group: model(x, group=group).sum(), chunks)
        grads.append(model.decoder.weight.grad.clone())
    torch.testing.assert_close(grads[1], 2 * grads[0])
