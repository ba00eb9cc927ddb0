"""Chromatic attention: its special cases, the parts it is computed in, padding, dropout, dtypes, large logits."""

from __future__ import annotations

import copy
import math
import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from holonomy.layers import (
    ChromaticAttention,
    ChromaticEncoderLayer,
    EdgeProjection,
    random_walk_encoding,
    shortest_path_encoding,
)
from holonomy.layers.chromatic.attention import ProjectedEdges
from holonomy.ops.chromatic_attention import chromatic_attention, chromatic_attention_reference, chromatic_filters
from tests.reference.chromatic import graphit, graphormer

D = torch.float64
RING = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
RING = torch.cat([RING, RING.flip(0), torch.tensor([[0, 2], [2, 0]])], 1)
MODES = ("chromatic", "mono", "additive")


def randn(*shape, dtype=D):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def problem(mode, maps, values, *, graphs=3, nodes=5, channels=6, heads=2, features=4, dtype=D):
    """Tensors of a kernel call: nodes, edges, and what is named."""
    biases = heads if mode == "mono" else channels
    nodes_of = [randn(graphs, nodes, channels, dtype=dtype) for _ in range(3)]
    named = {"heads": heads, "activation": functional.silu if mode == "additive" else None}
    if maps is None:
        bias = randn(graphs, nodes, nodes, biases, dtype=dtype)
        value = randn(graphs, nodes, nodes, channels, dtype=dtype) if values else None
    else:
        bias = randn(graphs, nodes, nodes, features, dtype=dtype)
        value = (
            (bias if maps == "one tensor" else randn(graphs, nodes, nodes, features, dtype=dtype)) if values else None
        )
        named["bias_map"] = randn(biases, features, dtype=dtype)
        named["value_map"] = randn(channels, features, dtype=dtype) if values else None
    return [*nodes_of, bias, value], named


def in_chunks(entries, *tensors, **named):
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules[chromatic_attention.__module__]
        patch.setattr(module, "_entries", lambda _: entries)
        patch.setattr(module, "_FEWEST_ENTRIES", 1)
        return chromatic_attention(*tensors, **named)


def leaves_of(tensors, named):
    every = [*tensors, named.get("bias_map"), named.get("value_map")]
    return list({id(x): x for x in every if x is not None}.values())


MASK = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("maps", [None, "one tensor", "two tensors"])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
@pytest.mark.parametrize("chunk", [1, 70, 151, 400, 10**6])
def test_chunks_give_the_reference_and_its_gradients(mode, maps, values, mask, chunk):
    tensors, named = problem(mode, maps, values)
    for keep in (None, torch.rand(3, 5, 5, dtype=D), torch.rand(3, 1, 5, dtype=D)):
        plain = chromatic_attention_reference(*tensors, mask, **named, keep=keep)
        fast = in_chunks(chunk, *tensors, mask, **named, keep=keep)
        torch.testing.assert_close(fast, plain)
        every, grad = leaves_of(tensors, named), torch.randn_like(plain)
        ours, theirs = torch.autograd.grad(fast, every, grad), torch.autograd.grad(plain, every, grad)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("graphs", "chunked"), [(63, False), (64, True)])
def test_chunks_are_used_where_pairs_are_many(graphs, chunked):
    """From 2**16 pairs times channels on: 64 graphs of 8 nodes with 16 channels."""
    tensors, named = problem("chromatic", None, values=True, graphs=graphs, nodes=8, channels=16)
    out = chromatic_attention(*tensors, **named)
    assert ("ChunkedAttention" in out.grad_fn.name()) == chunked
    torch.testing.assert_close(out, chromatic_attention_reference(*tensors, **named))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_gradients(mode):
    tensors, named = problem(mode, "one tensor", True, graphs=2, nodes=3)
    every = leaves_of(tensors, named)

    def function(q, k, v, edges, bias_map, value_map):
        given = named | {"bias_map": bias_map, "value_map": value_map}
        return in_chunks(20, q, k, v, edges, edges, MASK[:2, :3], **given)

    assert torch.autograd.gradcheck(function, every)
    assert torch.autograd.gradgradcheck(function, every, fast_mode=True)


def test_gradients_that_nobody_wants_are_not_computed():
    tensors, named = problem("chromatic", "one tensor", True)
    edges = tensors[3].detach()
    out = in_chunks(70, *tensors[:3], edges, edges, **named)
    assert out.grad_fn.next_functions[3][0] is None
    out.sum().backward()
    assert named["bias_map"].grad is not None
    assert edges.grad is None


@pytest.mark.parametrize("values", [True, False])
def test_bias_that_is_constant_within_a_head_is_the_mono_form(values):
    """CSA below eq. 6: the formulations are equivalent if E is piecewise constant on the channels of each head."""
    mono = ChromaticAttention(6, 2, 4, mode="mono", edge_values=values, dtype=D)
    chromatic = ChromaticAttention(6, 2, 4, edge_values=values, dtype=D)
    state = mono.state_dict()
    state["edges.bias.weight"] = state["edges.bias.weight"].repeat_interleave(3, 0)
    chromatic.load_state_dict(state)
    x, edges = randn(3, 5, 6), randn(3, 5, 5, 4)
    torch.testing.assert_close(chromatic(x, edges, MASK), mono(x, edges, MASK))
    torch.testing.assert_close(chromatic.filters(x, edges, MASK), mono.filters(x, edges, MASK))


def test_as_many_heads_as_channels_are_the_mono_form():
    """CSA table 8: when h = d the colour and monochrome versions are the same."""
    mono, chromatic = (ChromaticAttention(6, 6, 4, mode=mode, dtype=D) for mode in ("mono", "chromatic"))
    chromatic.load_state_dict(mono.state_dict())
    x, edges = randn(2, 5, 6), randn(2, 5, 5, 4)
    torch.testing.assert_close(chromatic(x, edges), mono(x, edges))


def heads_of(x, heads):
    return [part.squeeze(-2) for part in x.unflatten(-1, (heads, -1)).split(1, -2)]


def test_mono_with_shortest_paths_is_graphormer():
    distance = shortest_path_encoding(RING, 6, 2)
    q, k, v = (randn(1, 6, 4) for _ in range(3))
    table = randn(4, 2)  # a scalar for each distance 0, 1, 2, and beyond, and each head
    ours = chromatic_attention(q, k, v, table[distance][None], heads=2)[0]
    theirs = [graphormer(*parts, distance, table[:, h]) for h, parts in
              enumerate(zip(*(heads_of(x[0], 2) for x in (q, k, v)), strict=True))]  # fmt: skip
    torch.testing.assert_close(ours, torch.cat(theirs, -1))
    layer = ChromaticAttention(4, 2, 4, mode="mono", edge_values=False, dtype=D)
    one_hot = functional.one_hot(distance, 4).to(D)[None]
    torch.testing.assert_close(
        layer.filters(q, one_hot),
        chromatic_filters(layer.query(q), layer.key(q), layer.edges.bias.weight.t()[distance][None], heads=2),
    )


def test_mono_with_the_logarithm_of_a_kernel_is_graphit():
    walks = random_walk_encoding(RING, 6, 2, dtype=D)
    kernel = 0.2 * torch.eye(6, dtype=D) + walks.sum(-1)  # zero between some nodes: their logarithm is -inf
    assert (kernel == 0).any()
    q, k, v = (randn(1, 6, 4) for _ in range(3))
    bias = kernel.log()[None, ..., None].expand(1, 6, 6, 2)
    ours = chromatic_attention(q, k, v, bias, heads=2)[0]
    theirs = [graphit(*parts, kernel) for parts in zip(*(heads_of(x[0], 2) for x in (q, k, v)), strict=True)]
    torch.testing.assert_close(ours, torch.cat(theirs, -1))
    per_channel = kernel.log()[None, ..., None].expand(1, 6, 6, 4)
    torch.testing.assert_close(chromatic_attention(q, k, v, per_channel, heads=2)[0], ours)


@pytest.mark.parametrize("mode", ["chromatic", "mono"])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_a_node_whose_pairs_are_all_forbidden_gets_zeros(mode, values, mask):
    """As with the logarithm of the walks of an isolated node."""
    tensors, named = problem(mode, None, values)
    with torch.no_grad():
        tensors[3][0, 2] = -math.inf  # one node to all
        tensors[3][1, 0, :, 0] = -math.inf  # in one channel or head
        tensors[3][1, 2, 3] = -math.inf  # one pair
    results = []
    for function in (chromatic_attention_reference, partial(in_chunks, 70)):
        out = function(*tensors, mask, **named)
        every = leaves_of(tensors, named)
        results.append((out, *torch.autograd.grad(out.sin().sum(), every)))
    for ours, theirs in zip(*results, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs)
    assert not results[0][0][0, 2].any()
    assert results[0][0][0, 1].all()
    assert not results[0][0][1, 0, 0].any()
    assert not chromatic_filters(*tensors[:2], tensors[3], mask, heads=2)[0, 2].any()


@pytest.mark.parametrize("mode", ["chromatic", "mono"])
def test_without_edges_it_is_scaled_dot_product_attention(mode):
    layer = ChromaticAttention(6, 2, 0, mode=mode, dtype=D)
    x = randn(3, 5, 6)
    q, k, v = (f(x).unflatten(-1, (2, 3)).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    expected = layer.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x), expected)
    # And so it is with edges that say nothing, through the parts.
    with_edges = ChromaticAttention(6, 2, 4, mode=mode, dtype=D)
    with_edges.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(with_edges(x, x.new_zeros(3, 5, 5, 4)), expected)


def test_the_query_cancels_in_the_additive_form_as_printed():
    """exp(Q_i + K_j + E_ij) over its sum: W_Q has no effect and no gradient; with an activation it has."""
    torch.manual_seed(1)
    x, edges = randn(2, 5, 6), randn(2, 5, 5, 4)
    for activation, matters in ((lambda u: u, False), (functional.silu, True), (torch.tanh, True)):
        layer = ChromaticAttention(6, 2, 4, mode="additive", activation=activation, dtype=D)
        before = layer(x, edges)
        (grad,) = torch.autograd.grad(before.square().sum(), [layer.query.weight])
        assert (grad.abs().max() > 1e-3) == matters
        assert (grad.abs().max() < 1e-12) != matters
        with torch.no_grad():
            layer.query.weight.add_(torch.randn(6, 6, dtype=D))
        assert torch.allclose(layer(x, edges), before) != matters


@pytest.mark.parametrize("maps", [None, "two tensors"])
@pytest.mark.parametrize("name", ["relu_", "tanh_", "celu_"])
def test_an_activation_may_work_in_place(name, maps):
    """The backward pass reads what it was applied to, which forwards nothing else does."""
    tensors, named = problem("additive", maps, values=True)
    leaves, found = leaves_of(tensors, named), []
    for activation in (getattr(torch, name), getattr(torch, name[:-1])):
        out = in_chunks(70, *tensors, MASK, **named | {"activation": activation})
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*found)


def test_the_number_of_heads_has_no_effect_on_the_additive_form():
    one, three = (ChromaticAttention(6, heads, 4, mode="additive", dtype=D) for heads in (1, 3))
    three.load_state_dict(one.state_dict())
    x, edges = randn(2, 5, 6), randn(2, 5, 5, 4)
    torch.testing.assert_close(one(x, edges), three(x, edges))


@pytest.mark.parametrize("mode", MODES)
@given(order=st.permutations(range(5)))
def test_permuting_nodes_and_pairs_permutes_the_result(mode, order):
    layer = ChromaticAttention(6, 2, 4, mode=mode, dtype=D)
    x, edges, order = torch.randn(3, 5, 6, dtype=D), torch.randn(3, 5, 5, 4, dtype=D), torch.tensor(order)
    permuted = layer(x[:, order], edges[:, order][:, :, order], MASK[:, order])
    torch.testing.assert_close(permuted, layer(x, edges, MASK)[:, order])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("filling", [1e30, math.inf, math.nan])
def test_padding_has_no_effect(mode, values, filling):
    layer = ChromaticAttention(6, 2, 4, mode=mode, edge_values=values, dtype=D)
    pairs = MASK[:, :, None] & MASK[:, None, :]
    results = []
    for value in (0.0, filling):
        x = torch.randn(3, 5, 6, dtype=D, generator=torch.Generator().manual_seed(0))
        edges = torch.randn(3, 5, 5, 4, dtype=D, generator=torch.Generator().manual_seed(1))
        x, edges = x.masked_fill(~MASK[..., None], value), edges.masked_fill(~pairs[..., None], value)
        x, edges = x.requires_grad_(), edges.requires_grad_()
        out = layer(x, edges, MASK)
        grads = torch.autograd.grad(out.sin().sum(), [x, edges, *layer.parameters()])
        filters = layer.filters(x, edges, MASK)
        read = [x, edges, layer.query.weight, layer.edges.bias.weight]
        results.append((out, *grads, *torch.autograd.grad(filters.sin().sum(), read), filters))
    for clean, spoiled in zip(*results, strict=True):
        assert torch.equal(clean, spoiled)
    out, of_x, of_edges, filters = results[1][0], results[1][1], results[1][2], results[1][-1]
    for tensor, allowed in ((out, MASK), (of_x, MASK), (of_edges, pairs), (filters, pairs)):
        assert not tensor[~allowed].any()
        assert tensor[allowed].any()
    torch.testing.assert_close(filters.sum(2)[MASK], torch.ones(8, 6, dtype=D))


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_does_not_depend_on_its_batch_mates(mode):
    layer = ChromaticAttention(6, 2, 4, mode=mode, dtype=D)
    x, edges = randn(3, 5, 6), randn(3, 5, 5, 4)
    together = layer(x, edges, MASK)
    nodes = MASK[1].nonzero()[:, 0]
    alone = layer(x[1:2, nodes], edges[1:2, nodes][:, :, nodes])
    torch.testing.assert_close(together[1, nodes], alone[0])


@pytest.mark.parametrize("mode", MODES)
def test_projected_edges_give_the_same(mode):
    own = ChromaticAttention(6, 2, 4, mode=mode, dtype=D)
    shared = ChromaticAttention(6, 2, None, mode=mode, dtype=D)
    shared.load_state_dict({k: v for k, v in own.state_dict().items() if not k.startswith("edges")})
    x, edges = randn(3, 5, 6), randn(3, 5, 5, 4)
    torch.testing.assert_close(shared(x, own.edges(edges), MASK), own(x, edges, MASK))
    torch.testing.assert_close(shared.filters(x, own.edges(edges), MASK), own.filters(x, edges, MASK))


class Adapter(torch.nn.Module):
    """A linear map with another beside it, as adapters are: whoever reads its weight misses what it adds."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.more = linear, torch.nn.Linear(linear.in_features, linear.out_features, dtype=D)

    @property
    def weight(self):
        return self.linear.weight

    def forward(self, x):
        return self.linear(x) + self.more(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("values", [True, False])
def test_maps_of_edges_are_called_where_something_stands_in_their_place(mode, values):
    layer = ChromaticAttention(8, 2, 3, mode=mode, edge_values=values, dtype=D)
    x, edges = randn(3, 5, 8), randn(3, 5, 5, 3)
    spoiled = edges.detach().masked_fill(~(MASK[:, None] & MASK[:, :, None])[..., None], math.nan)
    expected = layer(x, edges, MASK)
    maps = [module for module in layer.edges.children() if module is not None]
    for name, linear in list(layer.edges.named_children()):
        setattr(layer.edges, name, Adapter(linear))
    for adapter in layer.edges.children():
        torch.nn.init.zeros_(adapter.more.weight)
        torch.nn.init.zeros_(adapter.more.bias)
    torch.testing.assert_close(layer(x, spoiled, MASK), expected)
    layer(x, spoiled, MASK).square().sum().backward()
    for adapter in layer.edges.children():
        assert adapter.more.weight.grad.isfinite().all()
        assert adapter.more.weight.grad.any()
    called = []
    for linear in maps:
        linear.register_forward_hook(lambda module, *_: called.append(module))
    plain = ChromaticAttention(8, 2, 3, mode=mode, edge_values=values, dtype=D)
    plain.edges = EdgeProjection(3, 8, 2, mode=mode, edge_values=values, dtype=D)
    for name, linear in zip(dict(layer.edges.named_children()), maps, strict=True):
        setattr(plain.edges, name, linear)
    plain(x, edges)
    assert called == maps


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_large_logits_stay_right(mode, kind):
    """A bias of 1e4 chooses its key; one node attends to itself."""
    layer = ChromaticAttention(6, 2, 6, mode=mode, dtype=kind)
    with torch.no_grad():
        layer.edges.bias.weight.fill_(0.0)[:, 0] = 1.0
    edges = torch.zeros(1, 4, 4, 6, dtype=kind)
    edges[0, torch.arange(4), (torch.arange(4) + 1) % 4, 0] = 1e4
    x = torch.randn(1, 4, 6, dtype=kind, requires_grad=True)
    expected = functional.one_hot((torch.arange(4) + 1) % 4, 4).float()
    torch.testing.assert_close(layer.filters(x, edges)[0].float(), expected[..., None].expand(4, 4, 6))
    messages = layer.value(x)[:, None] + layer.edges.value(edges)
    chosen = messages[0, torch.arange(4), (torch.arange(4) + 1) % 4]
    # bfloat16 has two digits of messages of 1e4, of which others may cancel.
    allowed = 200.0 if kind == torch.bfloat16 else 0.02
    torch.testing.assert_close(layer(x, edges)[0], layer.out(chosen), rtol=0.02, atol=allowed)
    layer(x, edges).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    single = torch.zeros(1, 1, 1, 6, dtype=kind)
    torch.testing.assert_close(layer(x[:, :1], single), layer.out(layer.value(x[:, :1])))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_graphs_and_no_nodes(shape):
    layer = ChromaticAttention(6, 2, 3)
    edges = torch.zeros(shape[0], shape[1], shape[1], 3)
    assert layer(torch.zeros(*shape, 6), edges).shape == (*shape, 6)
    assert layer(torch.zeros(*shape, 6), edges, torch.ones(*shape, dtype=torch.bool)).shape == (*shape, 6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("values", [True, False])
def test_bfloat16_is_near_float64(mode, values):
    layer = ChromaticAttention(32, 4, 8, mode=mode, edge_values=values)
    x, edges = torch.randn(4, 10, 32), torch.randn(4, 10, 10, 8)
    wide = copy.deepcopy(layer).double()(x.double(), edges.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(x.requires_grad_(), edges.requires_grad_())
    narrow = copy.deepcopy(layer).bfloat16()(x.bfloat16(), edges.bfloat16())
    for result in (mixed, narrow):
        assert result.dtype == torch.bfloat16
        assert (result.double() - wide).norm() < 0.02 * wide.norm()
    mixed.float().square().sum().backward()
    assert edges.grad.dtype == torch.float32
    assert edges.grad.isfinite().all()


@pytest.mark.parametrize("over", ["edges", "nodes", "channels"])
def test_dropout_silences_pairs_nodes_or_channels(over):
    """The values are the unit vectors, so that the result shows which filters are left."""
    torch.manual_seed(2)
    layer = ChromaticAttention(6, 2, 3, edge_values=False, dropout=0.4, dropout_over=over, dtype=D)
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(6))
        layer.out.bias.zero_()
        layer.value.weight.copy_(torch.eye(6))
    edges = torch.randn(50, 4, 4, 3, dtype=D)
    x = torch.randn(50, 4, 6, dtype=D)
    kept = layer.eval()(x, edges)
    dropped = layer.train()(x, edges)
    filters = layer.filters(x, edges)
    if over == "channels":
        ratio = dropped / kept
        assert torch.equal(ratio.round(decimals=6).unique(), torch.tensor([0.0, round(1 / 0.6, 6)], dtype=D))
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
        return
    # Six channels of a row are linear in the four factors of its keys: solve for them.
    messages = (filters * x[:, None]).transpose(2, 3)  # graphs, i, channels, j
    factors = torch.linalg.lstsq(messages, dropped[..., None]).solution[..., 0]
    values = factors.round(decimals=5).unique()
    assert torch.equal(values.abs(), torch.tensor([0.0, round(1 / 0.6, 5)], dtype=D))
    assert abs((factors < 0.5).double().mean() - 0.4) < 0.1
    same_for_all = (factors - factors[:, :1]).abs().max() < 1e-6
    assert same_for_all == (over == "nodes")


def test_the_mean_of_dropout_is_no_dropout():
    layer = ChromaticAttention(6, 2, 3, dropout=0.3, dtype=D)
    x, edges = torch.randn(1, 5, 6, dtype=D), torch.randn(1, 5, 5, 3, dtype=D)
    drawn = layer(x.expand(4000, -1, -1), edges.expand(4000, -1, -1, -1))
    torch.testing.assert_close(drawn.mean(0), layer.eval()(x, edges)[0], rtol=0.05, atol=0.02)


@pytest.mark.usefixtures("without_shape_checks")
def test_wrong_arguments_are_refused_in_a_sentence():
    x, edges = torch.zeros(2, 5, 6), torch.zeros(2, 5, 5, 4)
    layer = ChromaticAttention(6, 2, 4)
    with pytest.raises(ValueError, match=r"x must have shape \(..., features = 6\), got \(2, 5, 4\)"):
        layer(torch.zeros(2, 5, 4), edges)
    with pytest.raises(ValueError, match=r"edges must have shape .* = \(2, 5, 5, 4\), got \(2, 5, 5, 3\)"):
        layer(x, torch.zeros(2, 5, 5, 3))
    for either in (ChromaticAttention(8, 2, 0), ChromaticEncoderLayer(8, 2, 0)):
        with pytest.raises(TypeError, match=r"mask must be boolean, True at nodes, got torch\.float32"):
            either(torch.zeros(2, 5, 8), None, torch.ones(2, 5))
        with pytest.raises(ValueError, match=r"mask must have shape \(2, 5\), got \(5, 5\)"):
            either(torch.zeros(2, 5, 8), None, torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="edges must be given exactly if edge_features is not 0, which is 4 here"):
        layer(x)
    with pytest.raises(ValueError, match="edges must be given exactly if edge_features is not 0, which is 0 here"):
        ChromaticAttention(6, 2, 0)(x, edges)
    with pytest.raises(ValueError, match="edges must be a tensor where edge_features is given, here 4"):
        layer(x, ProjectedEdges(edges, edges))
    with pytest.raises(ValueError, match="edges must be projected with values exactly if edge_values is True"):
        ChromaticAttention(6, 2, None)(x, ProjectedEdges(edges, None))
    with pytest.raises(ValueError, match="edges must be projected by an EdgeProjection where edge_features is None"):
        ChromaticAttention(6, 2, None)(x)
    for options, sentence in (
        ({"heads": 4}, "features must be a multiple of heads, got 6 and 4"),
        ({"mode": "sepia"}, "mode must be one of 'chromatic', 'mono', 'additive', got 'sepia'"),
        ({"edge_features": -1}, "edge_features must be at least 0, got -1"),
        ({"dropout": 1.5}, r"dropout must lie in \[0.0, 1.0\], got 1.5"),
        ({"dropout_over": "graphs"}, "dropout_over must be one of 'edges', 'nodes', 'channels', got 'graphs'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ChromaticAttention(**{"features": 6, "heads": 2, "edge_features": 4} | options)
    with pytest.raises(ValueError, match="edge_features must be a positive integer, got 0"):
        EdgeProjection(0, 6, 2)
    with pytest.raises(ValueError, match="activation must be left out with mode 'mono', where it has no effect"):
        ChromaticAttention(6, 2, 4, mode="mono", activation=torch.tanh)
    for make in (
        lambda given: ChromaticAttention(6, 2, 4, mode="additive", activation=given),
        lambda given: ChromaticEncoderLayer(6, 2, 4, activation=given),
    ):
        with pytest.raises(TypeError, match="activation must be callable, got the class ReLU"):
            make(torch.nn.ReLU)


@pytest.mark.parametrize("nodes", [1, 5])
def test_filters_that_are_dropped_are_dropped_without_edges_too(nodes):
    (q, k, v), keep = torch.randn(3, 2, 5, 4, dtype=D), torch.rand(2, nodes, 5, dtype=D)
    for function in (chromatic_attention_reference, partial(in_chunks, 70)):
        expected = function(q, k, v, q.new_zeros(2, 5, 5, 4), heads=2, keep=keep)
        torch.testing.assert_close(function(q, k, v, heads=2, keep=keep), expected)
