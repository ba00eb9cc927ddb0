"""The chromatic graph transformer on graphs as users hold them: batches, orders, padding, structure, training."""

from __future__ import annotations

import copy
import math

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from holonomy.layers import ChromaticEncoderLayer, NodeBatchNorm, edge_categories
from holonomy.models import ChromaticGraphTransformer
from holonomy.structures import join_graphs

D = torch.float64
EVERYTHING = {
    "edge_types": 3,
    "steps": 4,
    "limit": 3,
    "substructures": "product",
    "walk_features": 3,
    "layers": 2,
    "heads": 2,
    "dtype": D,
}


def both_ways(pairs):
    one = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    return torch.cat([one, one.flip(0)], 1)


def example(model, graph, features=5):
    """A networkx graph with random features and types, and what the model reads of its structure."""
    edges, n = both_ways(list(graph.edges)), len(graph)
    types = torch.randint(3, (graph.number_of_edges(),)).repeat(2)
    return {
        "x": torch.randn(n, features, dtype=D),
        "edge_index": edges,
        "edge_attr": types,
        **model.encode(edges, n),
    }


def examples(model):
    """Sizes 6, 1, 8 and 4: a ring, a single node, a random graph, no edges."""
    graphs = [nx.cycle_graph(6), nx.empty_graph(1), nx.gnm_random_graph(8, 12, seed=0), nx.empty_graph(4)]
    return [example(model, graph) for graph in graphs]


def shaken(model):
    """Running statistics that are not those of a new model, and a head of which no channel is dead."""
    nn.init.constant_(model.head[0].bias, 2.0)
    for module in model.modules():
        if isinstance(module, NodeBatchNorm):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


@pytest.mark.parametrize("level", ["graph", "node"])
@pytest.mark.parametrize("share", [False, True])
def test_a_graph_does_not_depend_on_its_batch_mates(level, share):
    model = shaken(ChromaticGraphTransformer(5, 8, 3, **EVERYTHING, level=level, share_edges=share))
    graphs = examples(model)
    together = model(**join_graphs(graphs))
    alone = torch.cat([model(**graph) for graph in graphs])
    torch.testing.assert_close(together, alone)
    # Graphs of one size take the way without a mask.
    torch.testing.assert_close(model(**join_graphs([graphs[2]] * 3)), torch.cat([model(**graphs[2])] * 3))


def test_nodes_of_the_graphs_of_a_batch_may_be_mixed():
    model = shaken(ChromaticGraphTransformer(5, 8, 3, **EVERYTHING, level="node"))
    joined = join_graphs(examples(model))
    n = len(joined["x"])
    # Within a graph the order stays, for its encodings have it.
    interleaved = torch.argsort(torch.cat([torch.arange(size) for size in (6, 1, 8, 4)]), stable=True)
    place = torch.empty_like(interleaved)
    place[interleaved] = torch.arange(n)
    mixed = joined | {
        "x": joined["x"][interleaved],
        "batch": joined["batch"][interleaved],
        "edge_index": place[joined["edge_index"]],
    }
    assert (mixed["batch"].diff() < 0).any()
    torch.testing.assert_close(model(**mixed), model(**joined)[interleaved])


@given(st.integers(0, 10**6))
def test_renumbering_the_nodes(seed):
    torch.manual_seed(seed)
    graph = nx.gnm_random_graph(7, 9, seed=seed)
    for level in ("graph", "node"):
        model = shaken(ChromaticGraphTransformer(5, 8, 3, **EVERYTHING, level=level))
        first = example(model, graph)
        order = torch.randperm(7)
        number = order.argsort()
        edges = number[first["edge_index"]]
        second = first | {"x": first["x"][order], "edge_index": edges, **model.encode(edges, 7, dtype=D)}
        ours, theirs = model(**second), model(**first)
        torch.testing.assert_close(ours, theirs if level == "graph" else theirs[order])


@pytest.mark.parametrize("level", ["graph", "node"])
@pytest.mark.parametrize("filling", [1e30, math.inf, math.nan])
def test_padding_has_no_effect_on_results_and_gradients(level, filling):
    model = shaken(ChromaticGraphTransformer(5, 8, 3, **EVERYTHING, level=level))
    graph = example(model, nx.gnm_random_graph(6, 9, seed=1))
    n = 6
    pairs = {name: graph[name].unflatten(0, (1, n, n)) for name in ("walks", "distances", "related")}
    pairs["categories"] = edge_categories(graph["edge_index"], n, graph["edge_attr"])[None]
    wider = {}
    for name, tensor in pairs.items():
        value = filling if tensor.is_floating_point() else True if tensor.dtype == torch.bool else 3
        wider[name] = torch.full((1, n + 2, n + 2, *tensor.shape[3:]), value, dtype=tensor.dtype)
        wider[name][:, :n, :n] = tensor
    nodes = torch.full((1, n + 2, 5), filling, dtype=D)
    nodes[:, :n] = graph["x"]
    mask = torch.arange(n + 2)[None] < n
    spoiled = model.padded(nodes, mask=mask, **wider)
    clean = model(**graph)
    torch.testing.assert_close(spoiled[0, :n] if level == "node" else spoiled, clean)
    assert not spoiled[0, n:].any() or level == "graph"
    every = list(model.parameters())
    ours = torch.autograd.grad(spoiled.sin().sum(), every, allow_unused=True)
    theirs = torch.autograd.grad(clean.sin().sum(), every, allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    assert model.train().padded(nodes, mask=mask, **wider).isfinite().all()


def test_shared_maps_are_one_layers_maps_for_all():
    own = shaken(ChromaticGraphTransformer(5, 8, 3, **EVERYTHING))
    shared = ChromaticGraphTransformer(5, 8, 3, **EVERYTHING, share_edges=True)
    state = own.state_dict()
    for name in ("bias.weight", "value.weight"):
        maps = state[f"layers.0.attention.edges.{name}"]
        state[f"layers.1.attention.edges.{name}"] = maps
        state[f"shared.{name}"] = maps
    own.load_state_dict(state | {}, strict=False)
    shared.load_state_dict({name: x for name, x in state.items() if ".attention.edges." not in name})
    batch = join_graphs(examples(own))
    torch.testing.assert_close(shared.eval()(**batch), own(**batch))


def test_pooling():
    mean, total = (shaken(ChromaticGraphTransformer(5, 8, 3, layers=1, pooling=p, dtype=D)) for p in ("mean", "sum"))
    total.load_state_dict(mean.state_dict())
    x, edges = torch.randn(3, 5, dtype=D), both_ways([(0, 1)])
    read = []
    for model in (mean, total):
        model.head[0].register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
        model(x, edges, batch=torch.tensor([0, 0, 2]))
    torch.testing.assert_close(read[1], read[0] * torch.tensor([[2.0], [1.0], [1.0]], dtype=D))
    assert not read[0][1].any()  # a number that no node bears is a graph without nodes


def test_attention_maps_are_distributions_over_the_nodes_of_a_graph():
    model = shaken(ChromaticGraphTransformer(5, 8, 3, **EVERYTHING, share_edges=True))
    graphs = examples(model)
    maps = model.attention_maps(**join_graphs(graphs))
    assert [tuple(one.shape) for one in maps] == [(4, 8, 8, 8)] * 2
    for number, graph in enumerate(graphs):
        n = len(graph["x"])
        for layer, alone in zip(maps, model.attention_maps(**graph), strict=True):
            torch.testing.assert_close(layer[number, :n, :n], alone[0])
            torch.testing.assert_close(alone.sum(2), torch.ones(1, n, 8, dtype=D))
            assert not layer[number, n:].any()
            assert not layer[number, :, n:].any()


def test_encodings_of_other_relations_take_the_place_of_rings():
    model = ChromaticGraphTransformer(5, 8, 3, **EVERYTHING | {"substructures": "added"})
    graph = example(model, nx.cycle_graph(5))
    assert graph["related"].all()
    assert not model.encode(graph["edge_index"], 5, max_ring=4)["related"].any()
    changed = model.eval()(**graph | {"related": torch.zeros(25, dtype=torch.bool)})
    assert not torch.allclose(changed, model(**graph))
    assert ChromaticGraphTransformer(5, 8, 3).encode(graph["edge_index"], 5) == {}


def test_batches_of_pytorch_geometric_are_taken_as_they_are():
    data = pytest.importorskip("torch_geometric.data", reason="the extra pyg is not installed")
    model = shaken(ChromaticGraphTransformer(5, 8, 3, **EVERYTHING))
    graphs = examples(model)
    batch = data.Batch.from_data_list([data.Data(**graph) for graph in graphs])
    joined = join_graphs(graphs)
    for name in joined:
        assert torch.equal(batch[name], joined[name])
    theirs = model(
        batch.x, batch.edge_index, batch.batch, edge_attr=batch.edge_attr,
        walks=batch.walks, distances=batch.distances, related=batch.related,
    )  # fmt: skip
    assert torch.equal(theirs, model(**joined))


def test_the_setting_of_zinc_has_the_papers_number_of_parameters():
    """CSA table 6: 350k, with 10 layers of 64 channels, 4 heads, RWSE-20, PE of 28, categorical rings, shared edges."""
    model = ChromaticGraphTransformer(
        28, 64, 1, edge_types=4, steps=20, substructures="product", walk_features=28, layers=10, share_edges=True
    )
    count = sum(p.numel() for p in model.parameters())
    assert abs(count - 350_000) < 0.03 * 350_000


def test_distances_that_no_message_passing_sees_in_one_layer_are_learned():
    """Which node is furthest from node 0, in paths of random length: one layer, by its shortest paths."""
    torch.manual_seed(0)
    model = ChromaticGraphTransformer(2, 16, 1, limit=8, layers=1, heads=2, level="node")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    graphs = []
    for n in range(3, 9):
        edges = both_ways([(i, i + 1) for i in range(n - 1)])
        start = functional.one_hot((torch.arange(n) != 0).long(), 2).float()
        distance = torch.arange(n, dtype=torch.float32)[:, None]
        graphs.append({"x": start, "edge_index": edges, "y": distance, **model.encode(edges, n)})
    batch = join_graphs(graphs)
    y = batch.pop("y")
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (model(**batch) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 3 < losses[0]


@pytest.mark.usefixtures("without_shape_checks")
def test_wrong_arguments_are_refused_in_a_sentence():
    x, edges = torch.zeros(3, 5), both_ways([(0, 1)])
    model = ChromaticGraphTransformer(5, 8, 1, edge_types=2, steps=2)
    walks = torch.zeros(9, 2)
    types = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"edge_attr must have shape \(edges,\), in \[0, edge_types = 2\), got None"):
        model(x, edges, walks=walks)
    with pytest.raises(TypeError, match=r"edge_attr must hold integers, got torch.float32"):
        model(x, edges, edge_attr=torch.zeros(2), walks=walks)
    with pytest.raises(ValueError, match="walks must be given exactly if the encoder was made for it, got NoneType"):
        model(x, edges, edge_attr=types)
    with pytest.raises(ValueError, match="related must be given exactly if the encoder was made for it, got Tensor"):
        model(x, edges, edge_attr=types, walks=walks, related=torch.zeros(9, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"walks must have shape \(5, 2\), got \(9, 2\)"):
        model(x, edges, torch.tensor([0, 0, 1]), edge_attr=types, walks=walks)
    with pytest.raises(ValueError, match=r"x must have shape \(..., in_features = 5\)"):
        model(x[:, :3], edges, edge_attr=types, walks=walks)
    for options, sentence in (
        ({"edge_features": 2, "edge_types": 3}, "edge_types must be 1 where edges have features"),
        ({"walk_features": 2}, "walk_features must be 0, or with steps > 0"),
        ({"walk_features": 8, "steps": 2}, "with steps > 0 less than hidden_features = 8, got 8"),
        ({"substructures": "cliques"}, "substructures must be one of 'added', 'product'"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"pooling": "max"}, "pooling must be one of"),
        ({"norm": "graph"}, "norm must be one of"),
        ({"level": "edge"}, "level must be one of"),
        ({"edge_features": -2}, "edge_features must be at least 0, got -2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ChromaticGraphTransformer(5, 8, 1, **options)


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("masked", [False, True])
def test_batch_norm_is_that_of_torch_on_the_nodes(masked, momentum):
    ours, theirs = NodeBatchNorm(6, eps=0.1, dtype=D), nn.BatchNorm1d(6, eps=0.1, dtype=D)
    # Set from outside, as torch's update_bn does.
    ours.momentum = theirs.momentum = momentum
    mask = torch.rand(4, 5) < 0.6 if masked else torch.ones(4, 5, dtype=torch.bool)
    for _ in range(3):
        x = (3 + torch.randn(4, 5, 6, dtype=D)).requires_grad_()
        filled = torch.where(mask[..., None], x, math.nan)
        out = ours(filled, mask if masked else None)
        expected = theirs(x[mask])
        torch.testing.assert_close(out[mask], expected)
        assert not out[~mask].any()
        weights = torch.randn_like(expected)
        (grad,) = torch.autograd.grad((out[mask] * weights).sum(), [x])
        (true,) = torch.autograd.grad((expected * weights).sum(), [x])
        torch.testing.assert_close(grad, true)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], buffer)
    torch.testing.assert_close(ours.eval()(x)[mask], theirs.eval()(x[mask]))


@pytest.mark.parametrize("value", [1e4 + 0.3, 1e5 + 0.3, 1e10])
@pytest.mark.parametrize("masked", [False, True])
def test_batch_norm_of_equal_numbers_is_the_shift(masked, value):
    """The mean was rounded, and what it was rounded by was the variance: 0.7 for 1000 nodes of 10000.3."""
    norm, mask = NodeBatchNorm(1), torch.arange(1000)[None] < 990 if masked else None
    assert not norm(torch.full((1, 1000, 1), value), mask).any()
    assert norm.running_var.item() == pytest.approx(0.9)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_gradients_of_a_batch_norm_are_those_of_float64(scale):
    x, weights, found = scale * torch.randn(2, 9, 4), torch.randn(2, 9, 4), []
    for kind in (torch.float32, D):
        norm, points = NodeBatchNorm(4, dtype=kind), x.to(kind).requires_grad_()
        found += torch.autograd.grad((norm(points) * weights).sum(), points)
    torch.testing.assert_close(found[0].to(D) * scale, found[1] * scale, rtol=1e-4, atol=1e-5 * min(1.0, scale))


@pytest.mark.parametrize("forgotten", [False, True])
def test_batch_norm_that_does_not_track_is_that_of_torch(forgotten):
    """As a second pass over a batch sets it, and adaptation at test time, which drops the statistics, too."""
    ours, theirs = NodeBatchNorm(6, dtype=D), nn.BatchNorm1d(6, dtype=D)
    x = 3 + torch.randn(4, 5, 6, dtype=D)
    for norm in (ours, theirs):
        norm(x if norm is ours else x.flatten(0, 1))
        norm.track_running_stats = False
        if forgotten:
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    for training in (True, False):
        ours.train(training)
        theirs.train(training)
        x = torch.randn(4, 5, 6, dtype=D)
        torch.testing.assert_close(ours(x).flatten(0, 1), theirs(x.flatten(0, 1)))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("nodes", [5, 6])
def test_norms_that_are_synchronised_between_processes_are_those_of_the_nodes(masked, nodes):
    """What torch puts in their place took the nodes for channels, where there are as many."""
    layer = ChromaticEncoderLayer(6, 2, 3, dtype=D)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer))
    x, edges = torch.randn(4, nodes, 6, dtype=D), torch.randn(4, nodes, nodes, 3, dtype=D)
    mask = torch.rand(4, nodes) < 0.6 if masked else None
    for training in (True, False):
        expected = layer.train(training)(x, edges, mask)
        torch.testing.assert_close(synchronised.train(training)(x, edges, mask), expected)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(synchronised.state_dict()[name], value)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_learns_no_statistics_of_nodes_that_are_not_there(momentum):
    """No node has no mean, and one has no variance: both were taken for zero."""
    norm = NodeBatchNorm(2, momentum=momentum, dtype=D)
    norm(torch.randn(4, 3, 2, dtype=D))
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    norm(torch.randn(2, 3, 2, dtype=D), torch.zeros(2, 3, dtype=torch.bool))
    norm(torch.randn(0, 3, 2, dtype=D))
    assert torch.equal(norm.running_mean, mean)
    norm(torch.full((1, 1, 2), 100.0, dtype=D))
    assert (norm.running_mean > mean + 1).all()
    assert torch.equal(norm.running_var, variance)


def test_batch_norm_of_one_node_and_of_none():
    norm = NodeBatchNorm(2)
    x = torch.randn(1, 3, 2)
    one = norm(x, torch.tensor([[True, False, False]]))
    torch.testing.assert_close(one, torch.zeros(1, 3, 2))
    assert norm(x, torch.zeros(1, 3, dtype=torch.bool)).isfinite().all()
    assert norm.running_var.isfinite().all()
