"""A graph that is kept: the same sums as of its list of edges, sorted once."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from holonomy.layers import GCN, Propagation
from holonomy.models import Hypformer
from holonomy.ops import propagation
from holonomy.structures import Graph
from holonomy.structures import graph as structure

EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 0], [1, 0, 2, 1, 2, 0, 1]])


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 2**31))
def test_neighbours_of_each_node(nodes, edges, seed):
    edge_index = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(seed))
    held = Graph(edge_index, nodes)
    for (start, others), ends, by in ((held.incoming, 0, 1), (held.outgoing, 1, 0)):
        for node in range(nodes):
            expected = edge_index[ends][edge_index[by] == node]
            assert others[start[node] : start[node + 1]].tolist() == expected.tolist()
    assert sorted(held.edge_index.t().tolist()) == sorted(edge_index.t().tolist())


@pytest.mark.parametrize("kind", [GCN, Propagation])
def test_encoders_take_it_in_place_of_edge_index(kind, device):
    torch.manual_seed(0)
    encoder = kind(3, 5, 2).to(device, torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64, device=device, requires_grad=True)
    held = Graph(EDGES, 4).to(device)
    outputs = [encoder(x, edges) for edges in (held, EDGES.to(device))]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y.sin().sum(), [x, *encoder.parameters()]) for y in outputs]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def names_of(function):
    """The names of what torch computes. Not by a mode of torch, under which nothing is remembered."""
    with profile(activities=[ProfilerActivity.CPU]) as called:
        function()
    return [event.key for event in called.key_averages()]


@pytest.mark.parametrize("kind", [GCN, Propagation, Hypformer])
@pytest.mark.parametrize("kept", [True, False], ids=["graph", "edge_index"])
def test_nothing_is_sorted_in_a_pass(kind, kept):
    model, x = kind(3, 4, 2), torch.randn(4, 3, requires_grad=True)
    edges = EDGES.clone()
    assert any("sort" in name for name in names_of(lambda: model(x, edges).sum().backward()))
    if kept:
        edges = Graph(EDGES, 4)
    names = names_of(lambda: model(x, edges).sum().backward())
    assert any("sparse" in name or "mm" in name for name in names)
    assert [name for name in names if "sort" in name] == []


def test_hypformer_takes_it(device):
    torch.manual_seed(0)
    model = Hypformer(3, 4, 2, heads=2).to(device).eval()
    x, edges = torch.randn(4, 3, device=device), EDGES.to(device)
    torch.testing.assert_close(model(x, Graph(edges, 4)), model(x, edges))
    batch = torch.tensor([0, 0, 0, 1], device=device)
    with pytest.raises(ValueError, match="one graph"):
        model(x, Graph(edges, 4), batch)


@pytest.mark.usefixtures("without_decorators")
def test_compiled_it_gives_the_same(device):
    encoder, held = GCN(3, 5, 2).to(device), Graph(EDGES, 4).to(device)
    x = torch.randn(4, 3, device=device)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, held), encoder(x, held))


def test_edges_are_sorted_once_for_a_tensor_and_again_when_it_changes(monkeypatch):
    made, sort = [], structure._sorted
    monkeypatch.setattr(structure, "_sorted", lambda *arguments: made.append(1) or sort(*arguments))
    encoder, edges, x = GCN(3, 5, 2), EDGES.clone(), torch.randn(4, 3)
    first = [encoder(x, edges).detach() for _ in range(3)]
    assert len(made) == 2  # by target and by source
    torch.testing.assert_close(first[0], first[2], rtol=0, atol=0)
    edges[:, 0] = torch.tensor([3, 2])
    changed = encoder(x, edges).detach()
    assert len(made) == 4
    torch.testing.assert_close(changed, encoder(x, edges.clone()).detach(), rtol=0, atol=0)
    assert not torch.allclose(changed, first[0])


@pytest.mark.parametrize("write", [lambda x, y: x.numpy().__setitem__(..., y), lambda x, y: x.data.copy_(y)])
def test_edges_that_change_where_torch_does_not_count_are_sorted_again(write):
    encoder, edges, x = GCN(3, 5, 2), EDGES.clone(), torch.randn(4, 3)
    encoder(x, edges)
    write(edges, EDGES.flip(1) % 3)
    torch.testing.assert_close(encoder(x, edges), encoder(x, edges.clone()), rtol=0, atol=0)


def test_what_is_kept_dies_with_the_edges():
    known = len(propagation._known)
    edges = EDGES.clone()
    GCN(3, 5, 2)(torch.randn(4, 3), edges)
    assert len(propagation._known) == known + 1
    del edges
    gc.collect()
    assert len(propagation._known) == known


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_many_edges_are_counted_in_half_precision(half):
    """bfloat16 counts to 256, float16 to 2048."""
    graph = Graph(torch.tensor([[0] * 5000 + [1], [0] * 5001]), 2)
    for rounded, exact in zip(graph.normalised(half), graph.normalised(torch.float32), strict=True):
        torch.testing.assert_close(rounded[1], exact[1].to(half))


def test_copies_and_files():
    held = Graph(EDGES, 4)
    for other in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert torch.equal(other.edge_index, held.edge_index)


@pytest.mark.parametrize(
    ("edges", "nodes", "named"),
    [
        (torch.tensor([[0], [4]]), 4, "edge_index"),
        (torch.zeros(2, 1), 4, "edge_index"),
        (torch.zeros(3, 1, dtype=torch.int64), 4, "edge_index"),
        (EDGES, -1, "num_nodes"),
    ],
)
def test_refuses(edges, nodes, named):
    with pytest.raises((ValueError, TypeError), match=named):
        Graph(edges, nodes)


def test_refuses_features_of_other_nodes():
    with pytest.raises(ValueError, match="one row for each node"):
        GCN(3, 5, 2)(torch.randn(5, 3), Graph(EDGES, 4))
