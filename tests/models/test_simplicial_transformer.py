"""The simplicial transformer: torch's own at order 1, causal, masked by pairs, routed, and refused with a sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holonomy.models import SimplicialTransformer

D = torch.float64


def model(*, device=None, **options):
    torch.manual_seed(0)
    return SimplicialTransformer(12, 2, **options, dtype=D, device=device).eval()


def twin_of_torch(orders, device):
    """The same weights in torch's encoder, whose projections have biases of zero here."""
    ours = model(orders=orders, feedforward=20, device=device)
    layer = nn.TransformerEncoderLayer(
        12, 2, 20, 0.0, "gelu", batch_first=True, norm_first=True, dtype=D, device=device
    )
    theirs = nn.TransformerEncoder(
        layer, len(orders), nn.LayerNorm(12, dtype=D, device=device), enable_nested_tensor=False
    )
    with torch.no_grad():
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            other.self_attn.in_proj_weight.copy_(torch.cat([mine.attention.key.weight, mine.attention.value.weight]))
            other.self_attn.in_proj_bias.zero_()
            other.self_attn.out_proj.load_state_dict(mine.attention.out.state_dict())
            other.linear1.load_state_dict(mine.expand.state_dict())
            other.linear2.load_state_dict(mine.contract.state_dict())
            other.norm1.load_state_dict(mine.norm_attention.state_dict())
            other.norm2.load_state_dict(mine.norm_feedforward.state_dict())
    return ours, theirs.train()  # torch's inference path is another kernel; without dropout training is the same


@pytest.mark.parametrize("masked", [False, True])
def test_order_one_is_torchs_encoder_with_the_same_calls(masked, device):
    ours, theirs = twin_of_torch((1, 1), device)
    x = torch.randn(3, 6, 12, dtype=D, device=device)
    mask = torch.rand(6, 6, device=device) < 0.3 if masked else None
    padding = None
    if masked:
        mask.fill_diagonal_(fill_value=False)
        padding = torch.zeros(3, 6, dtype=torch.bool, device=device)
        padding[1, 4:] = True
        mask[:, 0] = False  # every query keeps a key: torch gives nan where none is left
    expected = theirs(x, mask=mask, src_key_padding_mask=padding)
    result = ours(x, mask=mask, src_key_padding_mask=padding)
    there = slice(None) if padding is None else ~padding
    torch.testing.assert_close(result[there], expected[there])


def test_torchs_call_of_a_causal_encoder_works(device):
    ours, theirs = twin_of_torch((1, 1), device)
    x = torch.randn(3, 6, 12, dtype=D, device=device)
    later = torch.ones(6, 6, dtype=torch.bool, device=device).triu(1)
    expected = theirs(x, mask=later, is_causal=True)
    torch.testing.assert_close(ours(x, mask=later, is_causal=True), expected)
    torch.testing.assert_close(ours(x, is_causal=True), expected)  # torch needs the mask
    triples = model(orders=(1, 2), device=device)
    torch.testing.assert_close(triples(x, is_causal=True), triples(x, mask=later))
    assert torch.equal(triples(x, is_causal=True), model(orders=(1, 2), causal=True, device=device)(x))
    for options in ({"orders": (1, 2), "steps": 2}, {"orders": (2, 1), "capacity": 3}):
        with pytest.raises(ValueError, match=r"^is_causal must be False with steps or capacity"):
            model(device=device, **options)(x, is_causal=True)


@pytest.mark.parametrize(
    "options",
    [
        {"orders": (1, 2)},
        {"orders": (1, 2), "rope": True},
        {"orders": (2, 2), "form": "determinant", "rope": True},
        {"orders": (1, 2), "lower_orders": True},
        {"orders": (1, 2, 3), "steps": 2},
    ],
    ids=str,
)
def test_the_future_has_no_effect(options, device):
    module = model(causal=True, device=device, **options)
    x = torch.randn(2, 6, 12, dtype=D, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x)[:, 2].sin().sum(), x)
    assert torch.equal(grad[:, 3:], torch.zeros_like(grad[:, 3:]))
    torch.testing.assert_close(module(x[:, :4]), module(x)[:, :4])


@pytest.mark.parametrize(
    "options", [{"orders": (1, 2)}, {"orders": (1, 2), "steps": 2}, {"orders": (2,), "capacity": 3}], ids=str
)
def test_batch_mates_and_padding_have_no_effect(options, device):
    module = model(device=device, **options)
    long, short = (torch.randn(1, n, 12, dtype=D, device=device) for n in (7, 4))
    both = torch.cat([long, nn.functional.pad(short, (0, 0, 0, 3), value=torch.nan)])
    padding = torch.zeros(2, 7, dtype=torch.bool, device=device)
    padding[1, 4:] = True
    result = module(both, src_key_padding_mask=padding)
    torch.testing.assert_close(result[:1], module(long))
    torch.testing.assert_close(result[1:, :4], module(short))
    assert result.isfinite().all()


def test_a_mask_of_pairs_keeps_tokens_apart(device):
    """Two components of a graph: a simplex needs every key to be a neighbour of its query."""
    module = model(orders=(2, 2), device=device)
    x = torch.randn(7, 12, dtype=D, device=device)
    part = torch.tensor([0, 1, 0, 1, 1, 0, 0], device=device)
    apart = part[:, None] != part
    result = module(x, apart)
    for component in (part == 0, part == 1):
        torch.testing.assert_close(result[component], module(x[component]))


def test_without_positions_it_is_a_function_of_sets_and_with_them_it_is_not(device):
    x, order = torch.randn(6, 12, dtype=D, device=device), torch.tensor([3, 0, 5, 1, 4, 2], device=device)
    module = model(orders=(1, 2), device=device)
    torch.testing.assert_close(module(x[order]), module(x)[order])
    module = model(orders=(1, 2), rope=True, device=device)
    assert (module(x[order]) - module(x)[order]).abs().max() > 1e-3


@pytest.mark.usefixtures("without_shape_checks")
def test_options_without_effect_are_refused():
    for options, sentence in (
        ({"orders": ()}, "orders must name at least one layer"),
        ({"orders": (1, 0)}, "orders must be a positive integer"),
        ({"orders": (1, 1), "steps": 2}, "orders must have a layer of order 2"),
        ({"orders": (2, 2), "steps": 2}, "orders must begin with 1"),
        ({"orders": (2,), "rope": True}, "rope must be False where no layer"),
        ({"orders": (2,), "capacity": 2, "causal": True}, "capacity must be None"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(**options)
    with pytest.raises(TypeError, match="mask must be boolean"):
        model()(torch.randn(3, 12, dtype=D), torch.zeros(3, 3))
    x = torch.randn(2, 3, 12, dtype=D)
    for given, sentence in (
        ((x[..., :11],), r"^src must have shape \(\*batch, n, features = 12\), got \(2, 3, 11\)\.$"),
        ((x, None, torch.zeros(3, 2).bool()), r"^src_key_padding_mask must have shape .*3, 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model()(*given)
