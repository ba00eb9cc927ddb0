"""Sequences: nothing looks ahead, a prefix is a pass of its own, and steps of any length are the pass over all."""

from __future__ import annotations

import inspect
import io
import math
from contextlib import nullcontext
from itertools import cycle

import pytest
import torch
from torch import nn

from holonomy.layers import HypResidual, attention
from holonomy.layers.simplicial import attention as simplicial
from holonomy.layers.tokens import attention as tokens
from holonomy.ops import masks
from holonomy.ops.performer import causal as by_features
from holonomy.ops.simplicial_attention import logits
from holonomy.ops.simplicial_attention import simplicial_attention as attend_simplexes
from tests.cases import ATTENTIONS, CASES
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


def chooses(case):
    """Whether a layer attends to tokens that it chooses among all."""
    return not {"steps", "capacity"}.isdisjoint(case.options)


def causal(case):
    return "is_causal" in keywords(case) and not chooses(case)


def takes(name):
    """Which cases of tokens alone take an argument beside them."""
    return lambda case: name in keywords(case) and len(node_axes(case)) == 1 and not chooses(case)


def above(module, x):
    """Points of whatever space parts, where the inputs are points, else the features themselves."""
    if hasattr(module, "manifold"):
        return module.manifold.lift(module.manifold.coordinates(x))
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
    """Which cases take a memory in place of their tokens, as nothing wraps them."""
    return takes("memory")(case) and isinstance(module_of(case), tuple(ATTENTIONS))


def keys_of(module, x):
    """Tokens as the attention of a block has them, which takes a memory as it is."""
    return getattr(module, "position", getattr(module, "norm_attention", lambda x: x))(x)


def attention_of(module):
    """The attention of a block, or the module itself."""
    return getattr(module, "attention", module)


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
    points = above(module, inputs[0])
    expected = module(points, *inputs[1:], is_causal=True)
    midpoints = any(isinstance(part, HypResidual) for part in module.modules())
    for seen in range(1, expected.shape[-2]):
        for factor in (-0.7, 0.0, 1e3, 1e18) if case.any_radius else (-0.7, 0.0, 3.0):
            later = above(module, factor * points[..., seen:, :])
            x = torch.cat([points[..., :seen, :], later], -2)
            ours = module(x, *inputs[1:], is_causal=True)[..., :seen, :]
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


@steps
def test_a_state_is_loaded_as_weights_are(case, device):
    """From a file that may run no code."""
    _, module, (x,) = build(case, device, torch.float64)
    expected, _ = module.step(x)
    torch.save(module.step(x[..., :3, :])[1], file := io.BytesIO())
    file.seek(0)
    last, _ = module.step(x[..., 3:, :], torch.load(file, weights_only=True))
    assert_near(last, expected[..., 3:, :], 1e-11, "last tokens")


@cases_where(lambda case: crossing(case) and not case.ordered)
@drawn_settings(2)
def test_its_own_tokens_as_memory_are_self_attention(case, drawn, device):
    _, module, (x,) = build(case, device, torch.float64, **drawn)
    assert_near(module(x, memory=keys_of(module, x)), module(x), 1e-11, "result")


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
    with pytest.raises(ValueError, match=r"^memory must have shape \(\*batch, n, (features|ambient)"):
        module(x, memory=x[..., 1:])
    with pytest.raises(ValueError, match=r"^memory must have the batch axes .* and dtype torch.float64 of x"):
        module(x, memory=x.float())


@cases_where(lambda case: crossing(case) and not case.ordered)
def test_no_memory_and_no_tokens(case, device):
    """Finite results for a memory without tokens, or of nothing but padding; none for no tokens."""
    _, module, (x,) = build(case, device, torch.float64)
    alone = module(x, memory=x[..., :0, :])
    assert alone.isfinite().all()
    hidden = torch.ones(x.shape[:-1], dtype=torch.bool, device=device)
    assert_near(module(x, hidden, memory=torch.full_like(x, torch.nan)), alone, 1e-12, "padding alone")
    none, memory = x[..., :0, :], keys_of(module, x)
    for result in (module(none), module(none, is_causal=True), module(none, memory=memory), module.step(none)[0]):
        assert result.shape == alone[..., :0, :].shape
    _, state = module.step(none)
    first, state = module.step(x, state)
    last, _ = module.step(none, state)
    assert_near(first, module(x, is_causal=True), 1e-11, "after no tokens")
    assert last.shape == none.shape[:-1] + last.shape[-1:]


@cases_where(lambda case: crossing(case) and not case.ordered)
def test_nan_in_a_memory_is_seen_at_every_token(case, device):
    _, module, (x,) = build(case, device, torch.float64)
    memory = x[..., :4, :].clone()
    memory[..., 1, -1] = torch.nan
    assert module(x, memory=memory).isnan().any(-1).all()


def sums(case):
    """Whether attention is by sums over keys, which have no mask of pairs."""
    return hasattr(attention_of(module_of(case)), "log_scale") or "performer" in case.options.values()


@cases_where(crossing)
@drawn_settings(1)
def test_masks_of_pairs_have_torchs_shapes_and_meaning(case, drawn, device):
    """Of any shape that torch takes, boolean or added to logits, and refused in the same words."""
    _, module, (x,) = build(case, device, torch.float64, **drawn)
    nodes, number = x.shape[-2], attention_of(module).heads
    later = torch.ones(nodes, nodes, dtype=torch.bool, device=device).triu(1)
    if sums(case):
        with pytest.raises(ValueError, match=r"^attn_mask must be None for linear attention"):
            module(x, attn_mask=later)
        return
    tuples = hasattr(attention_of(module), "order")  # whose logits are of no pairs
    several = above(module, torch.stack([x, 0.5 * x]))
    for inputs, shapes in (
        (x, ((nodes, nodes), (1, nodes, nodes), (number, nodes, nodes))),
        (several, ((nodes, nodes), (2, 1, nodes, nodes), (2, number, nodes, nodes), (2 * number, nodes, nodes))),
    ):
        expected = module(inputs, is_causal=True)
        for shape in shapes:
            mask = later.expand(shape)
            assert_near(module(inputs, attn_mask=mask), expected, 1e-11, f"mask of shape {shape}")
            numbers = torch.zeros(shape, dtype=torch.float64, device=device).masked_fill(mask, -math.inf)
            with pytest.raises(TypeError, match=r"^attn_mask must be boolean, True at") if tuples else nullcontext():
                assert_near(module(inputs, attn_mask=numbers), expected, 1e-11, f"numbers of shape {shape}")
    padding = torch.zeros(x.shape[:-1], dtype=torch.bool, device=device)
    padding[..., 0] = True
    ours = module(x, padding, attn_mask=later)
    assert_near(ours[~padding], module(x, padding, is_causal=True)[~padding], 1e-11, "beside padding")
    for shape in ((nodes,), (nodes + 1, nodes), (number + 1, nodes, nodes)):
        with pytest.raises(ValueError, match=r"^attn_mask must broadcast to \(\*batch, heads, nodes, keys\)"):
            module(x, attn_mask=torch.zeros(shape, dtype=torch.bool, device=device))
    with pytest.raises(TypeError, match=r"^attn_mask must be boolean"):
        module(x, attn_mask=later.long())


@cases_where(lambda case: crossing(case) and not sums(case) and not hasattr(attention_of(module_of(case)), "order"))
def test_the_lowest_numbers_of_a_wider_dtype_hide_pairs(case, device):
    """Where they hide all of a row its weights are alike: of float64 ones, and of float32 ones under autocast."""
    _, module, (x,) = build(case, device, torch.float32)
    for dtype, low in ((torch.float64, False), (torch.float32, True)):
        numbers = torch.zeros(x.shape[-2], x.shape[-2], dtype=dtype, device=device)
        numbers[1], numbers[2, 1:] = torch.finfo(dtype).min, torch.finfo(dtype).min
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            assert module(x, attn_mask=numbers).isfinite().all()
            weights = module.weights(x, attn_mask=numbers).float()
        assert_near(weights[..., 1, :], torch.full_like(weights[..., 1, :], 1 / x.shape[-2]), 1e-2, "all hidden")
        assert (weights[..., 2, 1:] == 0).all()


@cases_where(lambda case: crossing(case) and not sums(case) and not hasattr(attention_of(module_of(case)), "order"))
def test_nan_in_a_mask_is_not_hidden(case, device):
    """As in torch: the token of that row is nan, in the result and in the weights. A midpoint gave the origin."""
    _, module, (x,) = build(case, device, torch.float64)
    numbers = torch.zeros(x.shape[-2], x.shape[-2], dtype=x.dtype, device=device)
    numbers[1, 0] = torch.nan
    alone = torch.arange(x.shape[-2], device=device) == 1
    for result in (module(x, attn_mask=numbers), module.weights(x, attn_mask=numbers).amax(0)):
        assert torch.equal(result.isnan().any(-1), alone)


@cases_where(lambda case: crossing(case) and not case.ordered and not sums(case))
def test_a_token_that_may_attend_to_none_finds_what_no_memory_holds(case, device):
    _, module, (x,) = build(case, device, torch.float64)
    hidden = torch.zeros(x.shape[-2], x.shape[-2], dtype=torch.bool, device=device)
    hidden[1] = True
    leaves = [x.requires_grad_(), *(p for p in module.parameters() if p.requires_grad)]
    result = module(x, attn_mask=hidden)
    assert_near(result[1], module(x, memory=x[:0])[1], 1e-11, "result")
    assert_near(result[0], module(x)[0], 1e-11, "another token")
    grads = torch.autograd.grad(result, leaves, cotangent(result), allow_unused=True)
    assert all(grad.isfinite().all() for grad in grads if grad is not None)


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


def has_weights(case):
    """Which cases have the weights of single tuples of as many keys."""
    return hasattr(module_of(case), "weights") and not case.options.get("lower_orders", False)


@cases_where(lambda case: causal(case) and has_weights(case))
@drawn_settings(2)
def test_weights_sum_to_one_where_there_are_keys(case, drawn, device):
    _, module, inputs = build(case, device, torch.float64, **drawn)
    arguments = named(module, inputs)
    x, padding = arguments["x"], arguments.get("key_padding_mask")
    attention, nodes = attention_of(module), x.shape[-2]
    order = getattr(attention, "order", 1)
    later = torch.ones(nodes, nodes, dtype=torch.bool, device=device).triu(1)
    for is_causal in (False, True):
        weights = module.weights(*inputs, is_causal=is_causal)
        assert weights.shape == (*x.shape[:-2], attention.heads, nodes, *[nodes] * order)
        assert (weights >= 0).all()
        total = weights.flatten(-order).sum(-1)
        assert ((total == 0) | ((total - 1).abs() < 1e-12)).all()
        for axis in range(order):
            by_key = weights.movedim(axis - order, -1).flatten(-order, -2) if order > 1 else weights[..., None, :]
            if is_causal:
                assert (by_key.masked_select(later[:, None]) == 0).all()
            if padding is not None:
                assert (by_key.masked_select(padding[:, None, None, None]) == 0).all()
        if padding is not None:
            assert (total.masked_select(padding[:, None]) == 0).all()
        if not hasattr(attention, "log_scale"):  # of no matching feature
            there = total if padding is None else total.masked_select(~padding[:, None])
            assert (there > 0).all()


@cases_where(lambda case: crossing(case) and has_weights(case) and not case.ordered)
def test_weights_of_a_memory_have_its_columns(case, device):
    _, module, (x,) = build(case, device, torch.float64)
    attention = attention_of(module)
    order = getattr(attention, "order", 1)
    for keys in (0, 1, 3):
        weights = module.weights(x, memory=keys_of(module, x)[:keys])
        assert weights.shape == (attention.heads, len(x), *[keys] * order)
        total = weights.flatten(2).sum(-1)
        assert ((total == 0) | ((total - 1).abs() < 1e-12)).all()
        assert keys == 0 or hasattr(attention, "log_scale") or (total > 0).all()
    padding = torch.tensor([False, True, False], device=device)
    weights = module.weights(x, padding, memory=keys_of(module, x)[:3])
    assert (weights.select(-1, 1) == 0).all()


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_attention_has_one_interface(kind):
    """The arguments of torch.nn.MultiheadAttention, the memory, weights with the same, and a step with a state."""
    keywords = {"attn_mask": None, "is_causal": False, "memory": None}
    for method, first in (
        (kind.forward, ["self", "x", "key_padding_mask"]),
        (kind.weights, ["self", "x", "key_padding_mask"]),
        (kind.step, ["self", "x", "state", "key_padding_mask"]),
    ):
        signature = inspect.signature(method).parameters
        assert list(signature)[: len(first)] == first
        assert all(signature[name].default is None for name in first[2:])
        for name, default in keywords.items() if method is not kind.step else ():
            assert signature[name].kind is inspect.Parameter.KEYWORD_ONLY
            assert signature[name].default is default


def first_of(name, **options):
    """A case of tokens alone with these options."""
    return next(
        case
        for case in CASES
        if case.kind.__name__ == name and len(node_axes(case)) == 1 and options.items() <= case.options.items()
    )


def forgetful(query, key, value, projection, mask, state, **how):
    """Random features that begin anew at every step."""
    del state
    return by_features.performer_attention_after(
        query, key, value, projection, mask, by_features.PerformerState.empty(value, projection), **how
    )


def without_window(keys, values, **how):
    """Simplicial attention that forgets its window where there are earlier keys."""
    earlier = keys[0].shape[-2] < keys[1].shape[-2]
    return attend_simplexes(keys, values, **how | ({"window": None} if earlier else {}))


def from_the_start(x, _, *, size):
    """Rotations by places that begin anew at every step."""
    return logits.rotary(x, None, size=size)


OF_STEPS, OF_PADDING = test_steps_of_any_length_are_the_causal_pass, test_steps_with_padding_are_the_pass_with_padding
PLANTED = (
    ("TokenAttention", {"kernel": "softmax"}, masks, "later_keys", lambda *_: None, OF_STEPS),
    ("TokenAttention", {"kernel": "softmax"}, attention, "hidden_keys", lambda _: None, OF_PADDING),
    ("TokenAttention", {"kernel": "performer"}, tokens, "performer_attention_after", forgetful, OF_STEPS),
    ("SimplicialAttention", {"window": 2}, simplicial, "simplicial_attention", without_window, OF_STEPS),
    ("SimplicialAttention", {"rope": True, "order": 1}, simplicial, "rotary", from_the_start, OF_STEPS),
    ("HypSimplicialAttention", {"order": 2}, attention, "hidden_keys", lambda _: None, OF_PADDING),
    ("ProductAttention", {"heads": 2}, attention, "hidden_keys", lambda _: None, OF_PADDING),
)


@pytest.mark.parametrize(("name", "options", "where", "what", "wrong", "law"), PLANTED)
def test_planted_errors_are_noticed(name, options, where, what, wrong, law, monkeypatch, device):
    case, how = first_of(name, **options), {"drawn": {"draw": 1}, "device": device}
    how |= {"dtype": torch.float64} if law is OF_STEPS else {}
    law.hypothesis.inner_test(case, **how)
    monkeypatch.setattr(where, what, wrong)
    with pytest.raises(AssertionError):
        law.hypothesis.inner_test(case, **how)


@pytest.mark.slow
@pytest.mark.usefixtures("without_decorators")
@cases_where(lambda case: sequential(case) and case is next(filter(sequential, alike(case))))
def test_a_step_compiles_without_a_graph_break(case, device):
    _, module, (x,) = build(case, device, torch.float64, nodes=3)
    torch.compiler.reset()
    with torch.no_grad():  # which has one graph of a step, of whatever it continues
        expected = module(x, is_causal=True)
        module.step = torch.compile(module.step, fullgraph=True, backend="eager")
        assert_near(stepped(module, x, (1,)), expected, 1e-11, "result")
