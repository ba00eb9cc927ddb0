"""TokenGT: equivariance, batches, order of edges, degenerate graphs, random numbers, attention maps."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.layers import laplacian_identifiers
from holonomy.models import TokenGT

D = torch.float64
OPTIONS = st.fixed_dictionaries({
    "attention": st.sampled_from(["softmax", "performer"]),
    "level": st.sampled_from(["graph", "node"]),
    "basis_residual": st.booleans(),
    "identifiers": st.sampled_from(["laplacian", "orthogonal", "near_orthogonal"]),
    "seed": st.integers(0, 2**31),
})  # fmt: skip


def model(*, seed=0, dtype=D, device=None, **options):
    torch.manual_seed(seed)
    defaults = {"edge_features": 2, "layers": 2, "heads": 2, "identifier_dim": 4}
    return TokenGT(3, 8, 2, **(defaults | options), dtype=dtype, device=device).eval()


def graph(nodes, dtype=D, device=None):
    """Any directed graph, self-loops among its edges."""
    edges = torch.randperm(nodes * nodes)[: 2 * nodes]
    x, attr = torch.randn(nodes, 3, dtype=dtype), torch.randn(len(edges), 2, dtype=dtype)
    edge_index = torch.stack([edges // nodes, edges % nodes])
    identifiers = laplacian_identifiers(edge_index, nodes, 4, dtype=dtype)
    return tuple(t.to(device) for t in (x, edge_index, attr, identifiers))


@given(options=OPTIONS, nodes=st.integers(1, 6))
@settings(max_examples=12)
def test_permuting_the_nodes_permutes_the_result(options, nodes, dtype, device):
    """Identifiers are permuted along; the edges keep their order."""
    module = model(**options, dtype=dtype, device=device)
    x, edge_index, attr, p = graph(nodes, dtype, device)
    order = torch.randperm(nodes, device=device)
    expected = module(x, edge_index, edge_attr=attr, identifiers=p)
    result = module(x[order], order.argsort()[edge_index], edge_attr=attr, identifiers=p[order])
    torch.testing.assert_close(
        result, expected[order] if options["level"] == "node" else expected, rtol=1e-4, atol=1e-4
    )


@given(options=OPTIONS, nodes=st.integers(1, 6))
@settings(max_examples=12)
def test_the_order_of_the_edges_has_no_effect(options, nodes, dtype, device):
    module = model(**options, dtype=dtype, device=device)
    x, edge_index, attr, p = graph(nodes, dtype, device)
    order = torch.randperm(edge_index.shape[1], device=device)
    torch.testing.assert_close(
        module(x, edge_index[:, order], edge_attr=attr[order], identifiers=p),
        module(x, edge_index, edge_attr=attr, identifiers=p),
        rtol=1e-4,
        atol=1e-4,
    )


@given(options=OPTIONS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=12)
def test_a_graphs_result_does_not_depend_on_its_batch(options, sizes, dtype, device):
    """Nodes of all graphs are shuffled; a loud graph in the batch changes nothing either."""
    module = model(**options, dtype=dtype, device=device)
    graphs = [graph(size, dtype, device) for size in sizes]
    graphs[0][0].mul_(100)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    total, place = sum(sizes), torch.randperm(sum(sizes), device=device)
    edge_index = torch.cat([place[one[1] + start] for one, start in zip(graphs, starts, strict=True)], 1)
    owner = torch.cat([torch.full((size,), i) for i, size in enumerate(sizes)]).to(device)
    x, batch, p = torch.empty(total, 3, dtype=dtype), torch.empty(total, dtype=torch.int64), torch.empty(total, 4)
    x, batch, p = x.to(device), batch.to(device), p.to(device, dtype)
    x[place], batch[place] = torch.cat([one[0] for one in graphs]), owner
    p[place] = torch.cat([one[3] for one in graphs])
    result = module(x, edge_index, batch, edge_attr=torch.cat([one[2] for one in graphs]), identifiers=p)
    alone = torch.cat([module(*one[:2], edge_attr=one[2], identifiers=one[3]) for one in graphs])
    torch.testing.assert_close(result if options["level"] == "graph" else result[place], alone, rtol=1e-3, atol=1e-4)


def test_laplacian_ones_are_made_for_each_graph_of_a_batch():
    module = model(identifiers="laplacian")
    x, edge_index, attr, p = graph(5)
    two = (torch.cat([x, x]), torch.cat([edge_index, edge_index + 5], 1), torch.cat([attr, attr]))
    expected = module(x, edge_index, edge_attr=attr, identifiers=p)
    torch.testing.assert_close(module(x, edge_index, edge_attr=attr), expected)
    batch = torch.arange(10) // 5
    torch.testing.assert_close(module(*two[:2], batch, edge_attr=two[2]), expected.expand(2, -1))


@pytest.mark.parametrize("attention", ["softmax", "performer"])
@pytest.mark.parametrize("level", ["graph", "node"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_without_edges(nodes, level, attention, dtype):
    module = model(attention=attention, level=level, basis_residual=True, dtype=dtype)
    none, attr = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0, 2, dtype=dtype)
    x = torch.randn(nodes, 3, dtype=dtype)
    for batch in (None, torch.zeros(nodes, dtype=torch.int64)):
        result = module(x, none, batch, edge_attr=attr)
        assert result.shape == (1 if level == "graph" else nodes, 2)
        assert result.isfinite().all()
    assert sum(p.grad is not None for p in _backward(module, result)) > 10


def _backward(module, result):
    result.square().sum().backward()
    grads = list(module.parameters())
    assert all(p.grad is None or p.grad.isfinite().all() for p in grads)
    return grads


def test_without_features_the_graph_alone_tells(dtype):
    """No node features at all: a triangle and a path differ, a relabelled triangle does not."""
    module = TokenGT(0, 8, 2, layers=1, heads=2, identifier_dim=4, dtype=dtype).eval()
    triangle, path = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([[0, 1], [1, 2]])
    both = [torch.cat([e, e.flip(0)], 1) for e in (triangle, path)]
    first, second = (module(torch.zeros(3, 0, dtype=dtype), e) for e in both)
    assert not torch.allclose(first, second)


def test_random_identifiers_come_from_the_seeded_state():
    module = model(identifiers="orthogonal")
    x, edge_index, attr, _ = graph(5)
    inputs = {"x": x, "edge_index": edge_index, "edge_attr": attr}
    torch.manual_seed(1)
    first = module(**inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(module(**inputs), first, rtol=0, atol=0)
    assert not torch.equal(module(**inputs), first)


def test_state_holds_the_random_features():
    """A saved Performer computes the same elsewhere; a redrawn one does not."""
    first, second = model(attention="performer"), model(seed=1, attention="performer")
    x, edge_index, attr, p = graph(5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    expected = first(x, edge_index, edge_attr=attr, identifiers=p)
    torch.testing.assert_close(second(x, edge_index, edge_attr=attr, identifiers=p), expected, rtol=0, atol=0)
    second.redraw(torch.Generator().manual_seed(3))
    assert not torch.equal(second(x, edge_index, edge_attr=attr, identifiers=p), expected)
    projections = [layer.attention.projection for layer in second.layers]
    assert not torch.equal(*projections)


def test_stochastic_depth_grows_to_the_last_layer():
    rates = [layer.stochastic_depth for layer in model(layers=4, stochastic_depth=0.2).layers]
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2])


@pytest.mark.parametrize("attention", ["softmax", "performer"])
def test_maps_are_the_attention_of_the_forward_pass(attention):
    """The result is put together again from the maps, layer by layer."""
    module = model(attention=attention, basis_residual=False)
    one, two = graph(4), graph(2)
    x, attr, p = (torch.cat([a, b]) for a, b in zip((one[0], one[2], one[3]), (two[0], two[2], two[3]), strict=True))
    edge_index, batch = torch.cat([one[1], two[1] + 4], 1), torch.tensor([0, 0, 0, 0, 1, 1])
    p = p.flip(0)  # not those that the model makes
    tokens, maps = module.attention_maps(x, edge_index, batch, edge_attr=attr, identifiers=p)
    values = tokens.values
    for layer, weights in zip(module.layers, maps, strict=True):
        assert not weights[1, ..., tokens.padding[1]].any()
        mixer = layer.attention
        heads = mixer.value(layer.norm_attention(values)).unflatten(-1, (2, -1)).transpose(1, 2)
        values = values + mixer.out((weights @ heads).transpose(1, 2).flatten(2))
        values = values + layer.contract(layer.activation(layer.expand(layer.norm_feedforward(values))))
    expected = module(x, edge_index, batch, edge_attr=attr, identifiers=p)
    torch.testing.assert_close(module.head(module.norm(values[:, 0])), expected)


@pytest.mark.parametrize("attention", ["softmax", "performer"])
def test_logits_of_ten_thousand(attention, dtype):
    module = model(attention=attention, dtype=dtype)
    with torch.no_grad():
        for layer in module.layers:
            layer.attention.query.weight.mul_(100)
            layer.attention.key.weight.mul_(100)
    x, edge_index, attr, p = graph(6, dtype)
    result = module(x, edge_index, edge_attr=attr, identifiers=p)
    assert result.isfinite().all()
    result.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.usefixtures("without_shape_checks")
def test_the_level_is_one_of_three():
    with pytest.raises(ValueError, match=r"^level must be one of 'graph', 'node', 'edge', got 'pair'\.$"):
        model(level="pair")
