"""Hyperedges: what they refuse, how they come from graphs and dense tensors and go back, and their projections."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from holonomy.layers import (
    EquivariantLinear,
    HigherOrderAttention,
    HyperedgeTokenizer,
    laplacian_identifiers,
    orthogonal_identifiers,
    perturb_identifiers,
)
from holonomy.structures import Graph, HyperedgePlan, Hyperedges, PaddedGraphs
from holonomy.structures.plan import _distinct


def test_duplicates_are_an_error():
    with pytest.raises(ValueError, match=r"indices must not list a hyperedge twice, got \(1, 0\) more than once"):
        Hyperedges(torch.tensor([[0, 1], [1, 0], [1, 0]]), torch.ones(3, 1), 2)


@pytest.mark.parametrize("num_nodes", [4, 2**33])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_tuples_are_sorted_and_told_apart_at_any_number_of_nodes(num_nodes, order):
    """Also where a tuple of nodes has no number of 63 bits."""
    rows = torch.randint(4, (50, order)) * (num_nodes // 4)
    distinct = _distinct(rows, num_nodes)
    assert torch.equal(distinct, rows.unique(dim=0))
    assert _distinct(rows[:0], num_nodes).shape == (0, order)
    assert _distinct(rows[:0], 0).shape == (0, order)


@pytest.mark.parametrize("make", [
    lambda batch: Hyperedges(torch.tensor([[0], [1]]), torch.ones(2, 1), 2, batch),
    lambda batch: Hyperedges.from_graph(torch.ones(2, 1), torch.tensor([[0], [1]]), batch=batch),
    lambda batch: PaddedGraphs.of(torch.ones(2, 1), batch),
    lambda batch: orthogonal_identifiers(2, 3, batch=batch),
    lambda batch: laplacian_identifiers(torch.zeros(2, 0, dtype=torch.int64), 2, 3, batch=batch),
    lambda batch: perturb_identifiers(torch.ones(2, 3), batch=batch),
    lambda batch: HyperedgeTokenizer(1, 1, 4)(torch.tensor([[0], [1]]), torch.ones(2, 1), 2, batch),
])  # fmt: skip
@pytest.mark.usefixtures("without_shape_checks")
def test_whatever_takes_a_batch_reads_it(make):
    make(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"^batch must have shape \(n = 2,\), got \(3,\)\.$"):
        make(torch.tensor([0, 0, 0]))
    with pytest.raises(ValueError, match=r"^batch must number graphs from 0 on, got -1\.$"):
        make(torch.tensor([0, -1]))
    with pytest.raises(TypeError, match=r"^batch must hold integers, got torch\.float32\.$"):
        make(torch.tensor([0.0, 1.0]))


def test_hyperedges_of_fewer_graphs_than_their_batch_numbers_are_an_error():
    with pytest.raises(ValueError, match=r"^num_graphs must be at least the 3 that batch numbers, got 2\.$"):
        Hyperedges(torch.tensor([[0]]), torch.ones(1, 1), 1, torch.tensor([2]), num_graphs=2)


def test_hyperedges_across_graphs_are_an_error():
    with pytest.raises(ValueError, match=r"indices must join nodes of one graph, got \(0, 2\) across two"):
        Hyperedges(torch.tensor([[0, 1], [0, 2]]), torch.ones(2, 1), 3, torch.tensor([0, 0, 1]))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.tensor([[0, 3]]), torch.ones(1, 1), 3), r"indices must lie in \[0, num_nodes = 3\), got 0 .. 3"),
        (
            (torch.tensor([[0, 1]]), torch.ones(2, 1), 3),
            r"values must have shape \(edges = 1, features\), got",
        ),
        (
            (torch.tensor([[0, 1]]), torch.ones(1, 1), 3, torch.tensor([0])),
            r"batch must have shape \(n = 3,\), got \(1,\)",
        ),
        ((torch.tensor([0, 1]), torch.ones(2, 1), 3), r"indices must have shape \(edges, order\), got \(2,\)"),
        ((torch.tensor([[0, 1]]), torch.ones(1), 3), r"values must have shape \(edges = 1, features\), got \(1,\)"),
        (
            (torch.tensor([[0], [1]]), torch.ones(2, 1), 2, torch.tensor([0, -1])),
            "batch must number graphs from 0 on, got -1",
        ),
        ((torch.zeros(3, 0, dtype=torch.int64), torch.ones(3, 1), 3), "indices of order 0 must have one row a graph"),
    ],
)
def test_what_does_not_fit_gets_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        Hyperedges(*arguments)
    with pytest.raises(TypeError, match=r"indices must be of dtype torch\.int64"):
        Hyperedges(torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(1, 1), 2)


@pytest.mark.usefixtures("without_shape_checks")
def test_dense_tensors_that_do_not_fit_get_one_sentence():
    for x in (torch.zeros(2, 3), torch.zeros(2, 3, 4, 1)):
        with pytest.raises(ValueError, match=r"x must have shape \(graphs, n, \.\., n, features\), got"):
            Hyperedges.from_dense(x)
    with pytest.raises(ValueError, match=r"mask must have shape \(graphs, n\) = \(2, 3\), got \(2, 4\)"):
        Hyperedges.from_dense(torch.zeros(2, 3, 3, 1), torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_dense_and_back(order, device):
    mask = torch.tensor([[True, True, True], [True, False, True]], device=device)
    x = torch.randn(2, *[3] * order, 2, device=device)
    edges = Hyperedges.from_dense(x, mask)
    assert edges.num_nodes == 5
    assert edges.indices.shape == (3**order + 2**order, order)
    back, present = edges.to_dense()
    assert present.tolist() == [[True] * 3, [True, True, False]]
    kept = torch.tensor([0, 2], device=device)
    expected = x[1]
    for axis in range(order):
        expected = expected.index_select(axis, kept)
    assert torch.equal(back[0], x[0])
    assert torch.equal(back[1][tuple([slice(2)] * order)], expected)
    assert Hyperedges.from_dense(x[:0]).to_dense()[0].shape == (0, *[0] * order, 2)


def test_a_graph_has_nodes_at_loops_and_edges_beside_them(device):
    x = torch.tensor([[1.0], [2.0]], device=device)
    edge_index = torch.tensor([[0, 1, 1], [1, 1, 0]], device=device)
    edges = Hyperedges.from_graph(x, edge_index, torch.tensor([[5.0], [7.0], [6.0]], device=device))
    dense = edges.to_dense()[0][0]
    assert dense[0, 0].tolist() == [1.0, 0.0]
    assert dense[1, 1].tolist() == [2.0, 7.0]  # the self-loop's attributes joined the node
    assert dense[0, 1].tolist() == [0.0, 5.0]
    assert dense[1, 0].tolist() == [0.0, 6.0]


def test_projection_takes_the_sides_of_triangles():
    triangle = Hyperedges(torch.tensor([[2, 0, 1]]), torch.ones(1, 1), 4)
    assert triangle.projected(2).tolist() == [[a, b] for a in range(3) for b in range(3)]
    assert triangle.projected(1).tolist() == [[0], [1], [2]]
    assert triangle.projected(0).shape == (1, 0)
    assert triangle.projected(3) is triangle.indices


def test_an_isolated_node_and_an_empty_graph_have_their_place():
    edges = Hyperedges(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 3), 2, torch.tensor([0, 2]), 4)
    assert edges.num_graphs == 4
    dense, mask = edges.to_dense()
    assert dense.shape == (4, 1, 1, 3)
    assert mask[:, 0].tolist() == [True, False, True, False]


def test_a_plan_is_kept_with_the_tuples_and_not_with_their_features():
    edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 1), 2)
    calls = []
    for values in (torch.ones(1, 1), torch.zeros(1, 2)):
        edges.with_values(values).plan.computed("key", lambda: calls.append(1))
    assert calls == [1]
    edges.at(torch.tensor([[1, 0]]), torch.ones(1, 1)).plan.computed("key", lambda: calls.append(2))
    assert calls == [1, 2]


@pytest.mark.usefixtures("without_shape_checks")
def test_a_plan_that_is_made_once_serves_any_features(device):
    plan = HyperedgePlan(torch.tensor([[0, 1], [1, 2], [2, 2]]), 3, torch.tensor([0, 0, 0])).to(device)
    layer = EquivariantLinear(2, 1, 4, 2, device=device)
    values = torch.randn(3, 4, device=device)
    edges = Hyperedges.of(plan, values)
    assert edges.plan is plan
    expected = layer(Hyperedges(plan.indices.clone(), values, 3))
    assert torch.equal(layer(edges).values, expected.values)
    assert layer(edges).plan is layer(edges.with_values(-values)).plan is plan.projected(1)
    with pytest.raises(ValueError, match=r"^values must have shape \(edges = 3, features\), got \(2, 4\)\.$"):
        Hyperedges.of(plan, values[:2])


def test_hyperedges_are_frozen():
    edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 1), 2)
    for name in ("indices", "values", "num_nodes", "batch", "num_graphs", "plan"):
        with pytest.raises(AttributeError):
            setattr(edges, name, getattr(edges, name))


def test_plans_find_one_another_by_their_tensors():
    plan = HyperedgePlan(torch.tensor([[0, 1]]), 3)
    nodes = plan.nodes
    assert nodes.indices.tolist() == [[0], [1], [2]]
    assert plan.at(nodes.indices) is nodes
    assert nodes.at(plan.indices) is plan.at(plan.indices) is plan
    nodes.indices.add_(0)
    assert plan.at(nodes.indices) is not nodes


@pytest.mark.parametrize("make", [
    lambda: EquivariantLinear(2, 1, 3, 3),
    lambda: HigherOrderAttention(2, 2, 6, 2),
    lambda: HigherOrderAttention(2, 2, 6, 2, kernel="performer"),
    lambda: HigherOrderAttention(2, 1, 6, 2, kernel="performer", sums="decoupled"),
])  # fmt: skip
@pytest.mark.parametrize("together", [0, 2**9])
def test_who_looks_first_in_inference_mode_can_train_after(make, together):
    layer = make()
    layer.together_from = together
    width = 3 if isinstance(layer, EquivariantLinear) else 6
    edges = Hyperedges(torch.tensor([[0, 1], [1, 0], [2, 2]]), torch.randn(3, width), 4)
    with torch.inference_mode():
        before = layer(edges).values
    values = edges.values.clone().requires_grad_()
    after = layer(edges.with_values(values)).values
    torch.testing.assert_close(after.detach(), before.clone())
    after.sum().backward()
    assert values.grad.isfinite().all()


@pytest.mark.parametrize("written", [lambda x: x, lambda x: torch.from_numpy(x.numpy())])  # which torch does not count
@pytest.mark.parametrize("name", ["indices", "batch"])
def test_tensors_that_change_are_refused(name, written):
    edges = Hyperedges(torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 3), 3, torch.tensor([0, 0, 0]))
    written(getattr(edges, name)).add_(1)
    for other in (edges, edges.with_values(torch.zeros(2, 3))):
        with pytest.raises(ValueError, match=r"^indices and batch must not change once hyperedges are made of them; "):
            EquivariantLinear(2, 1, 3, 3)(other)


@pytest.mark.parametrize("make", [
    lambda: Hyperedges.from_graph(torch.ones(2, 1), torch.tensor([[0], [1]]), batch=torch.tensor([0, 0])),
    lambda: Hyperedges.from_dense(torch.ones(1, 2, 2, 1)),
])  # fmt: skip
def test_hyperedges_made_in_inference_mode_keep_their_plans(make):
    with torch.inference_mode():
        edges = make()
        assert edges.plan.computed("key", lambda: 1) == edges.plan.computed("key", lambda: 2) == 1


def test_plans_are_freed_with_what_they_were_made_for():
    """Ever new tuples do not fill the memory, and what a batch planned goes with it, before garbage is collected."""
    plan = HyperedgePlan(torch.tensor([[0, 1]]), 2)
    layer = EquivariantLinear(2, 2, 3, 3)
    edges = Hyperedges.of(plan, torch.ones(1, 3))
    asked = [weakref.ref(layer(edges, to=torch.tensor([[0, 1]])).plan) for _ in range(100)]
    assert asked[0]() is None
    assert asked[-1]() is not None
    mixed = Hyperedges.of(plan, torch.ones(1, 6))
    for attention in (HigherOrderAttention(2, 2, 6, 2, kernel="performer"), HigherOrderAttention(2, 1, 6, 2)):
        mixed = attention(mixed)
    HigherOrderAttention(1, 2, 6, 2)(mixed, to=plan.indices)
    everywhere = [weakref.ref(plan), weakref.ref(plan.projected(1))]
    gc.disable()
    del plan, edges, mixed
    gc.enable()
    assert [found() for found in everywhere] == [None, None]


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copy_of_a_plan_starts_without_results(twin):
    edges = Hyperedges(torch.tensor([[0, 1], [2, 2]]), torch.randn(2, 1), 3)
    edges.plan.computed("where", lambda: "here")
    assert twin(edges.plan).computed("where", lambda: "there") == "there"
    assert edges.plan.computed("where", lambda: "there") == "here"
    other = twin(edges)
    for name in ("indices", "values", "batch"):
        assert torch.equal(getattr(other, name), getattr(edges, name))
    assert (other.num_nodes, other.num_graphs) == (3, 1)


def test_moving_plans_anew(device):
    edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 1), 2)
    edges.plan.computed("where", lambda: "here")
    moved = edges.to(device)
    assert moved.plan.computed("where", lambda: "there") == "there"
    assert moved.indices.device.type == moved.batch.device.type == device.type


def test_a_plan_of_other_nodes_is_made_anew():
    plan = HyperedgePlan(torch.tensor([[0, 1]]), 2)
    values, batch = torch.ones(1, 1), torch.zeros(5, dtype=torch.long)
    assert Hyperedges(plan.indices, values, 2, plan=plan).plan is plan
    assert Hyperedges(plan.indices, values, 5, plan=plan).num_nodes == 5
    assert Hyperedges(plan.indices, values, 5, batch, 3, plan=plan).num_graphs == 3
    assert Hyperedges(plan.indices, values, 2, num_graphs=3, plan=plan).num_graphs == 3


@pytest.mark.usefixtures("without_shape_checks")
def test_what_is_no_plan_is_refused():
    indices = torch.tensor([[0, 1]])
    for make in (lambda: Hyperedges(indices, torch.ones(1, 1), 2, plan="p"), lambda: Hyperedges.of("p", indices)):
        with pytest.raises(TypeError, match="plan must be a HyperedgePlan, got str"):
            make()


@pytest.mark.parametrize("twin", [copy.deepcopy, pickle.dumps, lambda plan: plan.to("cpu")])
def test_a_plan_whose_tensors_changed_has_no_copies(twin):
    plan = HyperedgePlan(torch.tensor([[0, 1]]), 2)
    plan.indices[0, 0] = 7
    with pytest.raises(ValueError, match="indices and batch must not change"):
        twin(plan)


def test_the_batch_lies_where_the_tuples_lie():
    with pytest.raises(ValueError, match="batch must be on the device cpu of the other arguments, got meta"):
        HyperedgePlan(torch.tensor([[0, 1]]), 2, torch.zeros(2, dtype=torch.long, device="meta"))


@pytest.mark.usefixtures("without_shape_checks")
def test_structures_move_to_devices_only():
    """A dtype would move nothing of their integers, and was taken without a word."""
    edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 1), 2)
    for held in (edges, edges.plan, Graph(torch.tensor([[0], [1]]), 2)):
        with pytest.raises(TypeError, match=r"^device must be a torch\.device or its name, got torch\.float64\.$"):
            held.to(torch.float64)
