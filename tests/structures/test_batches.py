"""Graphs joined to a batch, pairs laid out, and batches of graphs of nearly one size."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holonomy.structures import PaddedGraphs, batches_by_size, join_graphs


def padded_work(sizes, batches):
    """Sum of b n_max^2 over sum of n^2."""
    return sum(len(b) * max(sizes[i] ** 2 for i in b.tolist()) for b in batches) / sum(n**2 for n in sizes)


def molecules(count):
    """Sizes as those of ZINC: 9 to 37 heavy atoms, about 23.2 of them with a deviation of 4.5."""
    drawn = 23.2 + 4.5 * torch.randn(count, generator=torch.Generator().manual_seed(0))
    return drawn.round().clamp(9, 37).long().tolist()


@pytest.mark.parametrize("batch_size", [32, 128])
@pytest.mark.parametrize("count", [300, 10_000])
def test_padding_costs_at_most_five_percent(batch_size, count):
    sizes = molecules(count)
    shuffled = torch.randperm(count).split(batch_size)
    assert padded_work(sizes, shuffled) > 1.5
    assert padded_work(sizes, batches_by_size(sizes, batch_size)) <= 1.05


def test_what_the_bound_allows_is_used_to_mix():
    """Full batches, each of several sizes; the tighter the bound, the fewer."""
    sizes = molecules(10_000)
    spreads = []
    for padding in (1.02, 1.05, 1.2, math.inf):
        batches = batches_by_size(sizes, 32, padding=padding)
        assert len(batches) == math.ceil(10_000 / 32)
        assert padded_work(sizes, batches) <= padding
        within = [torch.tensor(sizes)[batch].double().std().item() for batch in batches if len(batch) > 1]
        spreads.append(sum(within) / len(within))
    assert spreads == sorted(spreads)
    assert spreads[0] > 0.1
    assert spreads[-1] > 3


@given(
    st.lists(st.integers(0, 40), max_size=60),
    st.integers(1, 9),
    st.sampled_from([1.0, 1.05, 1.5, math.inf]),
    st.integers(0, 99),
)
def test_every_graph_is_in_one_batch(sizes, batch_size, padding, seed):
    batches = batches_by_size(
        torch.tensor(sizes, dtype=torch.int64), batch_size, padding=padding,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(sizes)))
    assert all(0 < len(batch) <= batch_size for batch in batches)
    if any(sizes):
        assert padded_work(sizes, batches) <= padding * (1 + 1e-12)


def test_a_seed_decides_the_batches():
    sizes = molecules(500)
    first, again, other = (
        [b.tolist() for b in batches_by_size(sizes, 16, generator=torch.Generator().manual_seed(seed))]
        for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other
    # Both who is with whom, and which batch comes first.
    assert sorted(map(sorted, first)) != sorted(map(sorted, other))
    assert [sizes[b[0]] for b in first] != sorted(sizes[b[0]] for b in first)


def test_without_a_bound_sizes_do_not_matter():
    """They drew larger graphs together."""
    one, other = (
        batches_by_size(sizes, 16, padding=math.inf, generator=torch.Generator().manual_seed(0))
        for sizes in (molecules(100), [1] * 100)
    )
    assert [batch.tolist() for batch in one] == [batch.tolist() for batch in other]


def test_sizes_may_be_small_integers():
    """Squares of sizes do not fit into eight bits."""
    sizes = torch.tensor([20, 30, 40] * 4)
    one, other = (
        batches_by_size(s, 4, generator=torch.Generator().manual_seed(0)) for s in (sizes, sizes.to(torch.int8))
    )
    assert [b.tolist() for b in one] == [b.tolist() for b in other]


@pytest.mark.usefixtures("without_shape_checks")
def test_no_graphs_cannot_be_joined():
    with pytest.raises(ValueError, match="graphs must be at least one, got none"):
        join_graphs([])
    with pytest.raises(TypeError, match=r"^x must be a tensor, got list\.$"):
        join_graphs([{"x": [[1.0]], "edge_index": torch.zeros(2, 0, dtype=torch.int64)}])


@pytest.mark.usefixtures("without_shape_checks")
def test_the_graph_that_does_not_fit_is_named():
    """Of a thousand graphs from files, "edge_index must name nodes in [0, n = 2)" says nothing."""
    edges = torch.tensor([[0, 1], [1, 0]])
    right = {"x": torch.ones(2, 1), "edge_index": edges}
    for wrong, message in (
        (edges + 1, "must name nodes in [0, n = 2), got 1 .. 2."),
        (edges * 0 + 5, "must name nodes in [0, n = 2), got 5."),
        (torch.cat([edges, edges])[:3], "must have shape (2, edges), got (3, 2)."),
        (edges.float(), "must hold integers, got torch.float32."),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^edge_index of graphs\\[1\\] {re.escape(message)}$"):
            join_graphs([right, right | {"edge_index": wrong}])
    shapes = re.escape("got (2, 1) in graphs[0] and (2, 3) in graphs[1].")
    with pytest.raises(ValueError, match=f"^x must have one shape in all graphs but for its first axis, {shapes}$"):
        join_graphs([right, right | {"x": torch.ones(2, 3)}])


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("name", ["y", "edge_attr", "edge_weight"])
def test_graphs_whose_numbers_do_not_go_with_theirs_are_not_joined(name):
    """Three weights of two edges and then one of two were those of four edges, each of another one."""
    edges, first, second = torch.tensor([[0, 1], [1, 0]]), torch.ones(3), torch.ones(1)
    graphs = [{"x": torch.ones(2, 1), "edge_index": edges, name: each} for each in (first, second)]
    if name != "y":
        with pytest.raises(
            ValueError, match=rf"^{name} of graphs\[0\] must have one row an edge, \(2,\), got \(3,\)\.$"
        ):
            join_graphs(graphs)
        return
    assert join_graphs(graphs)[name].shape == (4,)
    for each in (graphs, graphs[::-1]):
        graphs[0][name] = torch.tensor(1.0)
        with pytest.raises(ValueError, match=r"^y must have one shape in all graphs but for its first axis, got \("):
            join_graphs(each)
    with pytest.raises(ValueError, match=r"^x must have a row a node, got shape \(\)\.$"):
        join_graphs([{"x": torch.tensor(1.0)}])


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("graphs", "kind", "came"),
    [
        ({"x": torch.ones(9, 3)}, TypeError, "a sequence of mappings with 'x', got a dict"),
        ([torch.ones(9, 3)], TypeError, "a sequence of mappings with 'x', got a Tensor in it"),
        (
            [{"x": torch.ones(1, 1), "y": torch.ones(1)}, *[{"x": torch.ones(1, 1)}] * 500],
            ValueError,
            r"mappings with 'x' and what the first one has, \['x', 'y'\], got one with \['x'\]",
        ),
    ],
)
def test_what_came_in_place_of_graphs_is_said_in_one_line(graphs, kind, came):
    with pytest.raises(kind, match=rf"^graphs must be {came}\.$"):
        join_graphs(graphs)


def test_wrong_sizes_of_batches_are_refused():
    with pytest.raises(ValueError, match="batch_size must be a positive integer, got 0"):
        batches_by_size([3], 0)
    with pytest.raises(ValueError, match=r"padding must lie in \[1.0, inf\], got 0.9"):
        batches_by_size([3], 2, padding=0.9)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_pairs_stand_where_their_nodes_do(sizes):
    graphs = [torch.randn(n, n, 2) for n in sizes]
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    layout = PaddedGraphs.of(torch.ones(len(batch), 1), batch)
    padded = layout.pairs(torch.cat([graph.flatten(0, 1) for graph in graphs]))
    for number, graph in enumerate(graphs[: len(padded)]):
        n = len(graph)
        assert torch.equal(padded[number, :n, :n], graph)
        assert not padded[number, n:].any()
        assert not padded[number, :, n:].any()


def test_rows_that_are_no_pairs_are_refused():
    layout = PaddedGraphs.of(torch.ones(3, 1), torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match=r"rows must be one for each of the 5 pairs, got \(4,\)"):
        layout.pairs(torch.ones(4))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16])
def test_numbers_of_joined_graphs_may_be_larger_than_those_of_each(kind):
    path = torch.stack([torch.arange(99), torch.arange(1, 100)])
    joined = join_graphs([{"x": torch.ones(100, 1), "edge_index": path.to(kind)}] * 400)["edge_index"]
    assert torch.equal(joined.unflatten(1, (400, 99))[:, -1], path + 39900)


def test_joined_graphs_keep_their_edges_and_numbers():
    edge = torch.tensor([[0, 1], [1, 0]])
    graphs = [
        {"x": torch.zeros(2, 1), "edge_index": edge, "y": torch.tensor(1.0)},
        {"x": torch.ones(1, 1), "edge_index": edge[:, :0], "y": torch.tensor(2.0)},
        {"x": torch.ones(2, 1), "edge_index": edge, "y": torch.tensor(3.0)},
    ]
    joined = join_graphs(graphs)
    assert joined["edge_index"].tolist() == [[0, 1, 3, 4], [1, 0, 4, 3]]
    assert joined["batch"].tolist() == [0, 0, 1, 2, 2]
    assert joined["x"].shape == (5, 1)
    assert joined["y"].tolist() == [1.0, 2.0, 3.0]


def test_a_given_batch_is_refused_and_not_overwritten():
    graph = {"x": torch.ones(2, 1), "edge_index": torch.tensor([[0], [1]]), "batch": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match="graphs must have no 'batch', which is the result's graph of each node, got"):
        join_graphs([graph, graph])
