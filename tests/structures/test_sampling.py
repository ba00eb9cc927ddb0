"""Parts of a graph and sampled neighbourhoods: every node and edge that should be there, and none other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holonomy.distributed import propagate_rows
from holonomy.models import Hypformer
from holonomy.ops.propagation import propagation
from holonomy.structures import Graph, neighbour_batches, node_partitions, sort_edges


def graph_of(nodes, edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(nodes, (2, edges), generator=generator)


def pairs(edge_index):
    return sorted(map(tuple, edge_index.T.tolist()))


@pytest.mark.parametrize("parts", [1, 3, 20])
def test_parts_have_every_node_once_and_all_edges_within_them(parts):
    edge_index = graph_of(20, 90)
    found = list(node_partitions(edge_index, 20, parts))
    assert len(found) == parts
    assert sorted(torch.cat([part.nodes for part in found]).tolist()) == list(range(20))
    for part in found:
        assert part.batch_size == len(part.nodes) in {20 // parts, 20 // parts + 1}
        inside = torch.isin(edge_index, part.nodes).all(0)
        assert pairs(part.nodes[part.edge_index]) == pairs(edge_index[:, inside])


@pytest.mark.parametrize("kind", [torch.int8, torch.int16, torch.int32])
def test_parts_of_edges_of_few_bits(kind):
    edge_index, seeded = graph_of(20, 90), torch.Generator()
    parts = (
        node_partitions(edges, 20, 3, generator=seeded.manual_seed(0)) for edges in (edge_index, edge_index.to(kind))
    )
    for expected, found in zip(*map(list, parts), strict=True):
        assert torch.equal(found.nodes, expected.nodes)
        assert torch.equal(found.edge_index, expected.edge_index)


def test_parts_of_a_transposed_list_come_without_a_warning():
    pairs = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    (part,) = node_partitions(pairs.T, 4, 1)
    assert sorted(part.nodes[part.edge_index].T.tolist()) == pairs.tolist()


def test_a_batch_has_its_seeds_first_and_as_many_neighbours_as_asked():
    edge_index = graph_of(60, 400)
    graph, seeds = Graph(edge_index, 60), torch.arange(0, 60, 2)
    seen = []
    listed = pairs(edge_index)
    degrees = edge_index[1].bincount(minlength=60)
    for batch in neighbour_batches(graph, seeds, [3, 2], 7):
        seen += batch.nodes[: batch.batch_size].tolist()
        assert batch.nodes.unique().numel() == len(batch.nodes)
        drawn = batch.nodes[batch.edge_index]
        remaining = list(listed)
        for pair in pairs(drawn):  # without replacement: no edge more often than it is listed
            remaining.remove(pair)
        counts = batch.edge_index[1].bincount(minlength=len(batch.nodes))
        first = degrees[batch.nodes[: batch.batch_size]].clamp(max=3)
        assert torch.equal(counts[: batch.batch_size], first)
        assert (counts[batch.batch_size :] <= 2).all()
    assert sorted(seen) == seeds.tolist()


@pytest.mark.usefixtures("without_shape_checks")
def test_numbers_of_neighbours_may_be_of_numpy():
    [batch] = neighbour_batches(Graph(graph_of(5, 9), 5), torch.tensor([1]), np.array([2, 1]), 1)
    assert batch.batch_size == 1


def test_no_seeds_make_no_batch():
    """As an empty set with torch's DataLoader; there was one batch, without a node."""
    assert not list(neighbour_batches(Graph(graph_of(5, 9), 5), torch.empty(0, dtype=torch.int64), [2], 3))


def test_neighbours_are_drawn_evenly():
    star = torch.stack([torch.arange(1, 11), torch.zeros(10, dtype=torch.int64)])
    graph, counts = Graph(star, 11), torch.zeros(11)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3000):
        (batch,) = neighbour_batches(graph, torch.tensor([0]), [3], 1, generator=generator)
        counts[batch.nodes[1:]] += 1
    # A binomial number, 900 +- 25: five deviations.
    assert counts[1:].sub(900).abs().max() < 125


def test_all_neighbours_give_the_result_of_the_whole_graph():
    edge_index = graph_of(30, 100)
    graph, x = Graph(edge_index, 30), torch.randn(30, 4, dtype=torch.float64)
    # In-degrees of the last nodes are not whole: the mean over neighbours of one step reads none of them.
    for batch in neighbour_batches(graph, torch.arange(30), [100], 8):
        mine = torch.zeros(len(batch.nodes), 4, dtype=torch.float64)
        mine.index_add_(0, batch.edge_index[1], x[batch.nodes][batch.edge_index[0]])
        whole = torch.zeros(30, 4, dtype=torch.float64).index_add_(0, edge_index[1], x[edge_index[0]])
        torch.testing.assert_close(mine[: batch.batch_size], whole[batch.nodes[: batch.batch_size]])


def test_what_does_not_fit_is_refused():
    edge_index = graph_of(5, 9)
    with pytest.raises(ValueError, match="parts must be at most the number of nodes, 5, got 6"):
        list(node_partitions(edge_index, 5, 6))
    with pytest.raises(ValueError, match="seeds"):
        list(neighbour_batches(Graph(edge_index, 5), torch.tensor([5]), [2], 1))
    with pytest.raises(ValueError, match="sizes"):
        list(neighbour_batches(Graph(edge_index, 5), torch.tensor([1]), [0], 1))


def test_parts_and_batches_are_those_of_pytorch_geometric():
    pyg = pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed")
    edge_index, x = graph_of(40, 200), torch.randn(40, 3)
    for part in node_partitions(edge_index, 40, 3):
        theirs, _ = pyg.utils.subgraph(part.nodes, edge_index, relabel_nodes=True, num_nodes=40)
        assert pairs(part.edge_index) == pairs(theirs)
    model = Hypformer(3, 4, 2)
    data = pyg.data.Data(x=x, edge_index=edge_index, n=torch.arange(40))
    for batch in pyg.loader.RandomNodeLoader(data, num_parts=3):
        scores = model(batch.x, batch.edge_index)
        inside = torch.isin(edge_index, batch.n).all(0)
        assert scores.shape == (len(batch.n), 2)
        assert pairs(batch.n[batch.edge_index]) == pairs(edge_index[:, inside])


@pytest.mark.parametrize("entries", [1, 7, 10**6])
@pytest.mark.parametrize("kind", ["tensor", "memory map"])
def test_propagation_in_pieces_is_the_product(entries, kind, tmp_path):
    edge_index = graph_of(40, 150)  # with loops and repeated edges
    graph, x = Graph(edge_index, 40), torch.randn(40, 3, dtype=torch.float64)
    wanted = propagation(graph, 40, x.dtype)(x)
    if kind == "tensor":
        out = torch.empty_like(x)
        propagate_rows(graph, x, out, entries=entries)
    else:
        np.save(tmp_path / "x.npy", x.numpy())
        source = np.load(tmp_path / "x.npy", mmap_mode="r")
        out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", x.numpy().dtype, (40, 3))
        propagate_rows(graph, source, out, entries=entries)
        out = torch.tensor(out)
    torch.testing.assert_close(out, wanted)


def test_propagation_of_what_does_not_fit_is_refused():
    graph, x = Graph(graph_of(5, 9), 5), torch.randn(5, 2)
    for out in (x, x[:], x.numpy()):
        with pytest.raises(ValueError, match="out must share no memory with x, which is read until the end"):
            propagate_rows(graph, x, out)
    with pytest.raises(TypeError, match=r"out must hold floating-point numbers, got torch\.int64"):
        propagate_rows(graph, x, torch.empty(5, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="x must be a tensor or a NumPy array, got list"):
        propagate_rows(graph, x.tolist(), x)
    both = torch.randn(5, 4, dtype=torch.bfloat16)
    propagate_rows(graph, both[:, :2], both[:, 2:])  # beside each other
    with pytest.raises(ValueError, match=r"out must have shape \(nodes, features\) = \(5, 2\), got \(5, 3\)"):
        propagate_rows(graph, x, torch.empty(5, 3))


def test_degrees_that_float16_does_not_hold_are_those_of_float32():
    star = torch.stack([torch.arange(70_001), torch.zeros(70_001, dtype=torch.int64)])
    graph, x = Graph(star, 70_001), torch.rand(70_001, 2)
    half, single = torch.empty(70_001, 2, dtype=torch.float16), torch.empty(70_001, 2)
    propagate_rows(graph, x.half(), half), propagate_rows(graph, x, single)
    torch.testing.assert_close(half.float(), single, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("entries", [1, 7, 10**6])
@pytest.mark.parametrize("edge_index", [graph_of(40, 150), graph_of(3, 0), torch.full((2, 50), 2)])
def test_edges_sorted_on_disk_are_those_of_a_graph(entries, edge_index, tmp_path):
    nodes, edges = int(edge_index.max()) + 3 if edge_index.numel() else 3, edge_index.shape[1]
    graph, x = Graph(edge_index, nodes), torch.randn(nodes, 3)
    np.save(tmp_path / "edges.npy", edge_index.numpy())
    out = np.lib.format.open_memmap(tmp_path / "sources.npy", "w+", np.int32, (edges,))
    incoming = sort_edges(np.load(tmp_path / "edges.npy", mmap_mode="r"), nodes, out, entries=entries)
    assert torch.equal(incoming.start, graph.incoming.start.long())
    assert torch.equal(incoming.node, graph.incoming.node.int())
    assert np.array_equal(np.load(tmp_path / "sources.npy"), graph.incoming.node.numpy())
    found, wanted = torch.empty_like(x), torch.empty_like(x)
    propagate_rows(incoming, x, found, entries=entries), propagate_rows(graph, x, wanted)
    torch.testing.assert_close(found, wanted)
    batches = (
        neighbour_batches(g, torch.arange(nodes), [2, 2], 4, generator=torch.Generator().manual_seed(0))
        for g in (incoming, graph)
    )
    for ours, theirs in zip(*batches, strict=True):
        assert torch.equal(ours.nodes, theirs.nodes)
        assert torch.equal(ours.edge_index, theirs.edge_index)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64, np.int16, np.int32, np.int64])
def test_edges_of_any_integers_are_sorted(kind):
    edges = graph_of(40, 150)
    sources = np.empty(150, kind if kind in (np.uint8, np.int16) else np.int32)
    incoming, expected = sort_edges(edges.numpy().astype(kind), 40, sources, entries=7), Graph(edges, 40).incoming
    assert torch.equal(incoming.start, expected.start.long())
    assert np.array_equal(sources, expected.node.numpy())


def test_edges_that_do_not_fit_are_refused():
    edges = graph_of(5, 9)
    with pytest.raises(ValueError, match=r"out must have shape \(edges,\) = \(9,\), got \(8,\)"):
        sort_edges(edges, 5, torch.empty(8, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"edge_index must have shape \(2, edges\), got \(9,\)"):
        sort_edges(edges[0], 5, torch.empty(9, dtype=torch.int32))
    with pytest.raises(ValueError, match="edge_index"):
        sort_edges(edges, int(edges.max()), torch.empty(9, dtype=torch.int32))
    with pytest.raises(TypeError, match="edge_index"):
        sort_edges(edges.float(), 5, torch.empty(9, dtype=torch.int32))
    for dtype, nodes in ((torch.float32, 5), (torch.int8, 129), (torch.bool, 5), (torch.uint16, 5)):
        with pytest.raises(TypeError, match=f"out must hold integers up to num_nodes - 1 = {nodes - 1}, got {dtype}"):
            sort_edges(edges, nodes, torch.empty(9, dtype=dtype))
    fixed = np.empty(9, np.int32)
    fixed.setflags(write=False)
    with pytest.raises(ValueError, match="out must be writable, got a read-only array"):
        sort_edges(edges, 5, fixed)
    for shared in (edges[0], edges[1].numpy(), edges.flatten()[::2]):
        with pytest.raises(ValueError, match="out must share no memory with edge_index"):
            sort_edges(edges, 5, shared)
    with pytest.raises(TypeError, match="edge_index must be a tensor or a NumPy array, got list"):
        sort_edges(edges.tolist(), 5, torch.empty(9, dtype=torch.int32))
    with pytest.raises(TypeError, match="out must be a tensor or a NumPy array, got list"):
        sort_edges(edges, 5, [0] * 9)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ([[0, 1]], r"seeds must have shape \(seeds,\), got \(1, 2\)"),
        ([0, 1, 0], "seeds must name each node once, got 3 of 2 nodes"),
        ([7], r"seeds must lie in \[0, num_nodes = 5\), got 7"),
    ],
)
def test_seeds_that_are_no_list_of_nodes_are_refused(seeds, said):
    with pytest.raises(ValueError, match=said):
        next(neighbour_batches(Graph(graph_of(5, 9), 5), torch.tensor(seeds), [2], 1))
