"""The transformer of sequences: what positions do, how far they go, and that it learns what order means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holonomy.layers import HypMLR
from holonomy.manifolds import Lorentz
from holonomy.models import HypTransformer
from holonomy.optim import RiemannianAdam

D = torch.float64


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_only_positions_tell_places_apart(attention):
    x, order = torch.randn(5, 3, dtype=D), torch.randperm(5)
    without = HypTransformer(3, 6, attention=attention, dtype=D)
    torch.testing.assert_close(without(x[order]), without(x)[order])
    model = HypTransformer(3, 6, attention=attention, max_tokens=7, dtype=D)
    alike = model(x[:1].expand(5, -1))
    assert not torch.allclose(alike[0], alike[1])
    with torch.no_grad():
        model.positions.unit.copy_(model.positions.unit[:1].clone().expand_as(model.positions.unit))
    torch.testing.assert_close(model(x[order]), model(x)[order])


def test_places_take_the_part_of_positions_of_tokens():
    assert not [name for name in HypTransformer(3, 4, max_tokens=5).state_dict() if ".position." in name]
    assert [name for name in HypTransformer(3, 4).state_dict() if ".position." in name]


@pytest.mark.parametrize("features", [4, 64, 512])
def test_places_start_as_far_out_as_tokens_in_every_dimension(features):
    places = HypTransformer(3, features, max_tokens=400, dtype=D).positions.unit[:, 1:]
    assert 0.45 < places.square().mean().sqrt() < 0.65


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_more_tokens_than_places_are_refused(attention):
    model = HypTransformer(3, 6, attention=attention, max_tokens=4)
    assert model(torch.randn(2, 4, 3)).shape == (2, 4, 7)
    with pytest.raises(ValueError, match=r"^x must have at most max_tokens = 4 tokens, got 5"):
        model(torch.randn(2, 5, 3))
    _, state = model.step(torch.randn(2, 3, 3))
    _, state = model.step(torch.randn(2, 1, 3), state)
    with pytest.raises(ValueError, match=r"^positions of x, after those of the state, must lie in \[0, max_tokens"):
        model.step(torch.randn(2, 1, 3), state)
    with pytest.raises(TypeError, match=r"^state must be what step returned, a tuple of 2"):
        model.step(torch.randn(2, 1, 3), state[:1])
    with pytest.raises(TypeError, match=r"^max_tokens must be a positive integer"):
        HypTransformer(3, 6, max_tokens=2.5)


def test_curvatures_are_named_by_where_they_lie():
    names = HypTransformer(3, 4, layers=1, learnable_curvature=False).curvatures()
    assert sorted(names) == ["block0", "block0.attention", "block0.feedforward", "input", "output"]


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_maps_are_the_weights_of_the_attention_of_every_block_in_its_place(attention):
    torch.manual_seed(0)
    model = HypTransformer(3, 6, layers=3, heads=2, attention=attention, max_tokens=7, dtype=D).eval()
    x, padding = torch.randn(2, 5, 3, dtype=D), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = []
    for block in model.encoder.blocks:
        block.attention.register_forward_pre_hook(
            lambda layer, args, how: expected.append(layer.weights(*args, **how)), with_kwargs=True
        )
    model(x, padding, is_causal=True)
    maps = model.attention_maps(x, padding, is_causal=True)
    for ours, theirs in zip(maps, expected[:3], strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, ours.tril())
        assert (ours[1, :, :, 3:] == 0).all()


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_maps_of_a_decoder_are_those_among_its_tokens_then_those_to_the_memory(attention):
    torch.manual_seed(0)
    there = Lorentz(-0.4, dtype=D)
    model = HypTransformer(3, 6, layers=3, heads=2, attention=attention, manifold_memory=there, dtype=D).eval()
    x, memory = torch.randn(2, 5, 3, dtype=D), there.lift(torch.randn(2, 4, 6, dtype=D))
    given = {"is_causal": True, "memory": memory}
    given["memory_key_padding_mask"] = torch.tensor([[False] * 4, [True, False, False, True]])
    found = []
    for kind in ("attention", "cross_attention"):
        for block in model.encoder.blocks:
            getattr(block, kind).register_forward_pre_hook(
                lambda layer, args, how: found.append((layer, layer.weights(*args, **how))), with_kwargs=True
            )
    model(x, **given)
    expected = dict(found)
    layers = [getattr(block, kind) for kind in ("attention", "cross_attention") for block in model.encoder.blocks]
    maps = model.attention_maps(x, **given)
    assert [each.shape for each in maps] == [(2, 2, 5, 5)] * 3 + [(2, 2, 5, 4)] * 3
    torch.testing.assert_close(model.curvatures()["memory"], there.curvature)
    for ours, layer in zip(maps, layers, strict=True):
        torch.testing.assert_close(ours, expected[layer])
    for ours in maps[3:]:
        assert not ours[1, ..., [0, 3]].any()
        total = ours.sum(-1)
        assert ((total == 0) | ((total - 1).abs() < 1e-12)).all()


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_it_learns_which_token_comes_next(attention):
    """Of a word whose letters are followed by others at each place: only what came before tells."""
    torch.manual_seed(0)
    word = torch.tensor([0, 1, 0, 2, 0, 3, 1, 1])
    letters = nn.functional.one_hot(word, 4).float()
    model = HypTransformer(4, 16, layers=1, heads=2, attention=attention, max_tokens=8)
    decoder = HypMLR(16, 4, model.manifold_out)
    optimizer = RiemannianAdam(nn.ModuleList([model, decoder]).parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        scores = decoder(model(letters, is_causal=True))[:-1]
        nn.functional.cross_entropy(scores, word[1:]).backward()
        optimizer.step()
    with torch.no_grad():
        points, state = model.step(letters[:1])
        found = []
        for _ in word[1:]:
            found.append(decoder(points).argmax(-1))
            points, state = model.step(nn.functional.one_hot(found[-1], 4).float(), state)
    assert torch.cat(found).tolist() == word[1:].tolist()


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_memory_is_read_at_the_first_step_and_another_takes_its_place(attention):
    torch.manual_seed(0)
    there = Lorentz(-0.7, dtype=D)
    model = HypTransformer(3, 6, layers=2, heads=2, attention=attention, manifold_memory=there, dtype=D).eval()
    x = torch.randn(2, 5, 3, dtype=D)
    first, other = (there.lift(torch.randn(2, n, 6, dtype=D)) for n in (4, 3))
    mask = torch.tensor([[False] * 4, [True, False, False, True]])
    before, state = model.step(x[:, :2], memory=first, memory_key_padding_mask=mask)
    maps = [part for block in model.encoder.blocks for part in (block.cross_attention.key, block.cross_attention.value)]
    hooks = [part.register_forward_hook(lambda *_: pytest.fail("the memory is projected again")) for part in maps[::2]]
    after, _ = model.step(x[:, 2:], state)
    for hook in hooks:
        hook.remove()
    expected = model(x, is_causal=True, memory=first, memory_key_padding_mask=mask)
    torch.testing.assert_close(torch.cat([before, after], 1), expected)
    changed, _ = model.step(x[:, 2:], state, memory=other)
    # What the tokens before found in the first memory is in the state, in the second block's keys and values.
    single = HypTransformer(3, 6, layers=1, heads=2, attention=attention, manifold_memory=there, dtype=D).eval()
    _, state = single.step(x[:, :2], memory=first)
    torch.testing.assert_close(
        single.step(x[:, 2:], state, memory=other)[0], single(x, is_causal=True, memory=other)[:, 2:]
    )
    assert (changed - after).norm() > 1e-3
    with pytest.raises(ValueError, match=r"^memory_key_padding_mask must be None without memory"):
        model.step(x[:, 2:], state * 2, memory_key_padding_mask=mask)
    with pytest.raises(ValueError, match=r"^memory must be given exactly if there is a manifold_memory, got NoneType"):
        model.step(x)
    with pytest.raises(TypeError, match=r"^state must be what step returned, a DecoderState, got"):
        model.step(x[:, 2:], tuple(each.own for each in state) * 2, memory=first)
    # Without its tokens the sequence began anew, at the first place, and nothing said so.
    for part in ("own", "memory"):
        with pytest.raises(TypeError, match=r"^state must be what step returned, got a DecoderState in which a part"):
            model.step(x[:, 2:], tuple(each._replace(**{part: None}) for each in state) * 2)


@pytest.mark.parametrize("seed", [19, 27])
def test_tokens_of_middling_reach_are_not_held_in_float16(seed):
    """A token at rapidity 4.6 was drawn back to 3.5, a share of float16's range, and came out wrong by 0.8."""
    torch.manual_seed(seed)
    model, x = HypTransformer(8, 16, heads=2, attention="softmax").eval().to(D), torch.randn(3, 10, 8).to(D)
    expected = model(x)
    assert model.encoder.points(x)[..., 0].max() > 40
    torch.testing.assert_close(model.half()(x.half()).to(D), expected, rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("without_decorators")  # which refuse symbols
@pytest.mark.parametrize(("attention", "is_causal"), [("linear", False), ("softmax", True)])
def test_an_exported_model_takes_sequences_of_other_lengths(attention, is_causal):
    model, x = HypTransformer(3, 8, layers=1, heads=2, attention=attention, max_tokens=20).eval(), torch.randn(2, 6, 3)
    sizes = {"x": {1: torch.export.Dim("tokens", min=2, max=20)}, "is_causal": None}
    program = torch.export.export(model, (x,), {"is_causal": is_causal}, dynamic_shapes=sizes)
    longer = torch.randn(2, 13, 3)
    torch.testing.assert_close(program.module()(longer, is_causal=is_causal), model(longer, is_causal=is_causal))
