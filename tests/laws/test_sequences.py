"""Sequences: nothing looks ahead, a prefix is a pass of its own, and steps of any length are the pass over all."""

from __future__ import annotations

import inspect
from itertools import cycle

import pytest
import torch
from torch import nn

from holonomy.layers import HypResidual
from tests.cases import CASES
from tests.laws.laws import (
    assert_near,
    build,
    cases_where,
    cotangent,
    drawn_settings,
    module_of,
    named,
    node_axes,
)

pytestmark = pytest.mark.usefixtures("without_shape_checks")  # tests/laws/test_values.py runs with them


def keywords(case):
    """The names of the arguments of ``forward``."""
    return inspect.signature(module_of(case).forward).parameters.keys()


def causal(case):
    return "is_causal" in keywords(case)


def takes(name):
    """Which cases of tokens alone take an argument beside them."""
    return lambda case: name in keywords(case) and len(node_axes(case)) == 1


def above(module, x):
    """Points of whatever space parts, where the inputs are points, else the features themselves."""
    return module.manifold_in.lift(x[..., 1:]) if hasattr(module, "manifold_in") else x


def changed(state, change):
    """A state whose tensors are changed alike."""
    if isinstance(state, torch.Tensor):
        return change(state)
    parts = [changed(part, change) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def sequential(case):
    """Which cases of tokens alone go step by step."""
    return takes("is_causal")(case) and hasattr(module_of(case), "step")


def crossing(case):
    """Which cases take a memory in place of their tokens: points, where the tokens are points."""
    return takes("memory")(case) and hasattr(module_of(case), "manifold_in")


def turned(case):
    """Which cases tell places apart by rotations alone."""
    return case.options.get("rope", False) and {"x", "key_padding_mask"} <= keywords(case)


def alike(case):
    """The cases of a class."""
    return (other for other in CASES if other.kind is case.kind)


steps = cases_where(sequential)


@cases_where(causal)
@drawn_settings(2, most_nodes=6)
def test_no_token_sees_later_ones(case, drawn, device, dtype):
    """Not by a digit; by rounding in midpoints, and where tokens lie far out, as formulas are chosen for all rows."""
    _, module, inputs = build(case, device, dtype, **drawn)
    expected = module(*inputs, is_causal=True)
    midpoints = any(isinstance(part, HypResidual) for part in module.modules())
    for seen in range(1, expected.shape[-2]):
        for factor in (-0.7, 0.0, 1e3, 1e18) if case.any_radius else (-0.7, 0.0, 3.0):
            x = inputs[0].clone()
            x[..., seen:, :] *= factor
            ours = module(above(module, x), *inputs[1:], is_causal=True)[..., :seen, :]
            if factor < 1 and not midpoints:
                assert torch.equal(ours, expected[..., :seen, :])
            assert_near(ours, expected[..., :seen, :], 1e-3 if dtype == torch.float32 else 1e-9, "seen")


@cases_where(takes("is_causal"))
@drawn_settings(2, most_nodes=6)
def test_a_prefix_is_a_pass_of_its_own(case, drawn, device):
    _, module, (x,) = build(case, device, torch.float64, **drawn)
    expected = module(x, is_causal=True)
    for seen in range(1, x.shape[-2]):
        assert_near(module(x[..., :seen, :], is_causal=True), expected[..., :seen, :], 1e-10, f"{seen} tokens")


def stepped(
    module: nn.Module, x: torch.Tensor, sizes: tuple[int, ...], padding: torch.Tensor | None = None
) -> torch.Tensor:
    """A sequence in steps of sizes that repeat; a step without padding has no mask."""
    state, found, done, lengths = None, [], 0, cycle(sizes)
    while done < x.shape[-2]:
        size = next(lengths)
        mask = None if padding is None else padding[..., done : done + size]
        mask = () if mask is None or not mask.any() else (mask,)
        out, state = module.step(x[..., done : done + size, :], state, *mask)
        found.append(out)
        done += size
    return torch.cat(found, -2)


@steps
@drawn_settings(2)
def test_steps_of_any_length_are_the_causal_pass(case, drawn, device, dtype):
    """In values and in every gradient."""
    _, module, (x,) = build(case, device, dtype, **drawn)
    leaves = {name: p for name, p in module.named_parameters() if p.requires_grad}
    x.requires_grad_()
    expected = module(x, is_causal=True)
    grads = torch.autograd.grad(expected, (x, *leaves.values()), cotangent(expected), allow_unused=True)
    allowed = 1e-9 if dtype == torch.float64 else 2e-3
    largest = max(grad.norm().item() for grad in grads if grad is not None)
    for sizes in ((1,), (2, 1, 3)):
        ours = stepped(module, x, sizes)
        assert ours.dtype == dtype
        assert_near(ours, expected, 1e-11 if dtype == torch.float64 else 2e-4, f"steps of {sizes}")
        found = torch.autograd.grad(ours, (x, *leaves.values()), cotangent(ours), allow_unused=True)
        for name, grad, theirs in zip(("x", *leaves), found, grads, strict=True):
            assert (grad is None) == (theirs is None), name
            if grad is not None:
                assert_near(grad, theirs, allowed, name, floor=0.05 * largest)


@steps
@drawn_settings(1)
def test_steps_with_padding_are_the_pass_with_padding(case, drawn, device):
    """Prompts of several lengths, with what is no point at padding before and between tokens."""
    _, module, (x,) = build(case, device, torch.float64, **drawn)
    padding = torch.zeros(x.shape[:-1], dtype=torch.bool, device=device)
    padding[..., 0] = padding.view(-1, x.shape[-2])[-1, 2:3] = True
    x = x.masked_fill(padding[..., None], torch.nan)
    expected = module(x, padding, is_causal=True)
    for sizes in ((1,), (2, 1, 3)):
        ours = stepped(module, x, sizes, padding)
        assert_near(ours[~padding], expected[~padding], 1e-11, f"steps of {sizes}")
        assert ours.isfinite().all()


@steps
def test_a_state_of_another_batch_is_refused(case, device):
    _, module, (x,) = build(case, device, torch.float64)
    more = torch.stack([x, x])
    _, state = module.step(more)
    with pytest.raises(ValueError, match=r"^state must have"):
        module.step(x, state)
    with pytest.raises(TypeError, match=r"^state must be what step returned"):
        module.step(x, torch.zeros(3))
    token = x[..., :1, :]
    narrow = changed(module.step(token)[1], lambda part: part.float() if part.is_floating_point() else part)
    with pytest.raises(TypeError, match=r"^state must have \w+ of torch.float64 for this x, got torch.float32"):
        module.step(token, narrow)


@steps
def test_the_state_of_some_sequences_continues_those(case, device):
    """As a search among several continuations needs it."""
    _, module, (x,) = build(case, device, torch.float64)
    batch = above(module, torch.stack([x, x.flip(-2), 0.5 * x]))
    chosen = torch.tensor([2, 0, 2, 1])
    expected = module(batch[chosen], is_causal=True)
    _, state = module.step(batch[..., :3, :])
    # Every tensor of a state has the batch first.
    last, _ = module.step(batch[chosen][..., 3:, :], changed(state, lambda part: part[chosen]))
    assert_near(last, expected[..., 3:, :], 1e-11, "last tokens")


@cases_where(lambda case: crossing(case) and not case.ordered)
@drawn_settings(2)
def test_its_own_tokens_as_memory_are_self_attention(case, drawn, device):
    _, module, (x,) = build(case, device, torch.float64, **drawn)
    # A block moves tokens before they attend, and takes a memory as it is.
    memory = module.position(x) if hasattr(module, "position") else x
    assert_near(module(x, memory=memory), module(x), 1e-11, "result")


@cases_where(lambda case: crossing(case) and not case.ordered)
@drawn_settings(2)
def test_a_memory_has_no_order_and_its_padding_no_effect(case, drawn, device):
    _, module, (x,) = build(case, device, torch.float64, **drawn)
    memory = x.flip(-2)[..., :4, :].clone()
    expected = module(x, memory=memory)
    order = torch.randperm(memory.shape[-2])
    assert_near(module(x, memory=memory[..., order, :]), expected, 1e-11, "another order")
    more = torch.cat([memory, torch.full_like(memory[..., :2, :], torch.nan)], -2)
    padding = torch.zeros(more.shape[:-1], dtype=torch.bool)
    padding[..., -2:] = True
    assert_near(module(x, padding, memory=more), expected, 1e-11, "with padding")
    rows = torch.randperm(x.shape[-2])
    assert_near(module(x[..., rows, :], memory=memory), expected[..., rows, :], 1e-11, "other queries")


@cases_where(crossing)
def test_what_does_not_go_with_a_memory_is_refused(case, device):
    _, module, (x,) = build(case, device, torch.float64)
    with pytest.raises(ValueError, match=r"^is_causal must be False with memory"):
        module(x, memory=x, is_causal=True)
    with pytest.raises(ValueError, match=r"^memory must have the batch axes"):
        module(x, memory=torch.stack([x, x]))
    with pytest.raises(ValueError, match=r"^memory must have shape \(\*batch, n, features"):
        module(x, memory=x[..., 1:])


@cases_where(turned)
@drawn_settings(2)
def test_rotations_know_differences_of_places_only(case, drawn, device):
    """Sequences that begin later, after padding, give the same; far from the start, too; another order does not."""
    _, module, (x, *padding) = build(case, device, torch.float64, **drawn)
    hidden = padding[0] if padding else torch.zeros(x.shape[:-1], dtype=torch.bool, device=device)
    expected = module(x, hidden)
    for more in (1, 2, 500):
        before = x[..., :1, :].expand(*x.shape[:-2], more, -1)
        late = torch.cat([before, x], -2)
        mask = nn.functional.pad(hidden, (more, 0), value=True)
        ours = module(late, mask)[..., more:, :]
        assert_near(ours.masked_fill(hidden[..., None], 0), expected.masked_fill(hidden[..., None], 0), 1e-9, f"{more}")
    backwards = module(x.flip(-2), hidden.flip(-1)).flip(-2)
    assert (backwards - expected).norm() > 1e-6 * expected.norm()


@cases_where(lambda case: causal(case) and hasattr(module_of(case), "weights"))
@drawn_settings(2)
def test_weights_sum_to_one_where_there_are_keys(case, drawn, device):
    _, module, inputs = build(case, device, torch.float64, **drawn)
    arguments = named(module, inputs)
    x, padding = arguments["x"], arguments.get("key_padding_mask")
    for is_causal in (False, True):
        weights = module.weights(*inputs, is_causal=is_causal)
        heads = getattr(module, "attention", module).heads
        assert weights.shape == (*x.shape[:-2], heads, x.shape[-2], x.shape[-2])
        assert (weights >= 0).all()
        total = weights.sum(-1)
        assert ((total == 0) | ((total - 1).abs() < 1e-12)).all()
        if is_causal:
            assert torch.equal(weights, weights.tril())
        if padding is not None:
            assert (weights.masked_select(padding[:, None, None]) == 0).all()
            assert (weights.transpose(-2, -1).masked_select(padding[:, None, None]) == 0).all()


@pytest.mark.slow
@cases_where(lambda case: sequential(case) and case is next(filter(sequential, alike(case))))
def test_a_step_compiles_without_a_graph_break(case, device):
    _, module, (x,) = build(case, device, torch.float64, nodes=3)
    torch.compiler.reset()
    with torch.no_grad():  # which has one graph of a step, of whatever it continues
        expected = module(x, is_causal=True)
        module.step = torch.compile(module.step, fullgraph=True, backend="eager")
        assert_near(stepped(module, x, (1,)), expected, 1e-11, "result")
