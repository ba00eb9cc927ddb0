"""Tokens that repeat: which they are, and that paths of distinct steps do not see how often."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.layers import PathRouter, SimplicialAttention, SimplicialEncoderLayer, simplicial_attention
from holonomy.models import SimplicialTransformer
from holonomy.ops.simplicial_attention.paths import find_duplicates


@given(data=st.data())
@settings(max_examples=30)
def test_copies_are_what_the_loops_say(data, device, dtype):
    tokens, features = data.draw(st.integers(0, 8)), data.draw(st.integers(1, 3))
    # Small integers: many copies, and many tokens with the same entries in another order.
    x = torch.randint(-1, 2, (2, tokens, features), device=device).to(dtype)
    hidden = torch.rand(2, tokens, device=device) < 0.3 if data.draw(st.booleans()) else None
    found = find_duplicates(x, hidden)
    assert found.shape == (2, tokens)
    for b in range(2):
        there = [i for i in range(tokens) if hidden is None or not hidden[b, i]]
        for j in range(tokens):
            earlier = [i for i in there if i < j and x[b, i].tolist() == x[b, j].tolist()]
            assert bool(found[b, j]) == (j in there and bool(earlier))


def test_rounding_does_not_part_copies(device, dtype):
    x = torch.randn(1, 6, device=device, dtype=dtype)
    near = x * (1 + 4 * torch.finfo(dtype).eps)
    far = x * (1 + 100 * torch.finfo(dtype).eps)
    assert find_duplicates(torch.cat([x, near])).tolist() == [False, True]
    assert find_duplicates(torch.cat([x, far])).tolist() == [False, False]


@pytest.mark.parametrize("causal", [False, True])
def test_more_copies_change_nothing(causal, device):
    """Neither the answers to the tokens that were there, nor the gradient of the gate; a copy is answered the same."""
    layer = SimplicialAttention(8, 2, dtype=torch.float64, device=device)
    router = PathRouter(8, 2, 3, causal=causal, distinct=True, dtype=torch.float64, device=device)
    x = torch.randn(5, 8, dtype=torch.float64, device=device)
    of = torch.tensor([2, 4, 2, 0], device=device)

    def answers(tokens):
        keys, values = layer.projected(tokens)
        steps, scores = router(tokens, keys[0], keys[1])
        result = layer.along_paths(keys, values, steps, scores)
        (grad,) = torch.autograd.grad(result[:5].square().sum(), router.gate.weight)
        return steps, result, grad

    (steps, few, grad), (longer, many, same) = answers(x), answers(torch.cat([x, x[of]]))
    assert torch.equal(longer[:5], steps)
    assert longer.max() < 5
    torch.testing.assert_close(many[:5], few)
    torch.testing.assert_close(same, grad)
    if not causal:
        torch.testing.assert_close(many[5:], few[of])


def test_steps_enough_for_all_that_differ_are_attention_to_the_set(device):
    """k = 3 steps from each of 7 tokens of 3 kinds: the dense attention to one token of each kind."""
    layer = SimplicialAttention(8, 2, dtype=torch.float64, device=device)
    router = PathRouter(8, 2, 3, distinct=True, dtype=torch.float64, device=device)
    kinds = torch.randn(3, 8, dtype=torch.float64, device=device)
    x = kinds[torch.tensor([1, 1, 0, 2, 1, 0, 0], device=device)]
    keys, values = layer.projected(x)
    ours = layer.along_paths(keys, values, *router(x, keys[0], keys[1]))
    (first, *rest), values = layer.projected(x)
    once = [0, 2, 3]
    mixed = simplicial_attention([first, *(key[:, once] for key in rest)], [value[:, once] for value in values])
    torch.testing.assert_close(ours, layer.out(mixed.transpose(0, 1).flatten(1)))


def test_distinct_steps_want_steps():
    for make in (SimplicialEncoderLayer, SimplicialTransformer):
        with pytest.raises(ValueError, match="distinct must be False without steps"):
            make(8, 2, distinct=True)
