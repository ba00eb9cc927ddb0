"""The baselines against loops over nodes and neighbours, and as functions of graphs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data.graph_sets import random_molecules
from experiments.models.message_passing import (
    GATLayer,
    GCNLayer,
    GINLayer,
    GPSLayer,
    MessagePassing,
    SAGELayer,
    neighbour_softmax,
    readout,
)

KINDS = ("gcn", "gin", "sage", "gat", "gps", "mlp")


@pytest.fixture(params=[0, 3], ids=["bare", "edges"])
def graph(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    width = request.param
    edge_index = torch.tensor([[0, 1, 1, 2, 3, 0], [1, 0, 2, 1, 0, 3]])
    return torch.randn(5, 4), edge_index, torch.randn(6, width) if width else None


def neighbours(edge_index: Tensor, node: int) -> list[tuple[int, int]]:
    """Sources of the edges that end at a node, with the edges' places."""
    return [(int(source), place) for place, (source, target) in enumerate(edge_index.T) if target == node]


def test_gcn_in_loops(graph: tuple[Tensor, Tensor, Tensor | None]) -> None:
    x, edge_index, edge_attr = graph
    layer = GCNLayer(4, 0 if edge_attr is None else 3)
    degree = [1 + len(neighbours(edge_index, node)) for node in range(5)]
    wanted = torch.zeros(5, 4)
    for i in range(5):
        for j, place in [*neighbours(edge_index, i), (i, -1)]:
            message = layer.node(x[j])
            if edge_attr is not None:
                message = torch.relu(message + (layer.edge(edge_attr[place]) if place >= 0 else 0))
            wanted[i] += message / (degree[i] * degree[j]) ** 0.5
    assert torch.allclose(layer(x, edge_index, edge_attr), wanted, atol=1e-6)


def test_gin_in_loops(graph: tuple[Tensor, Tensor, Tensor | None]) -> None:
    x, edge_index, edge_attr = graph
    layer = GINLayer(4, 0 if edge_attr is None else 3).eval()
    nn.init.constant_(layer.eps, 0.3)
    total = torch.zeros(5, 4)
    for i in range(5):
        total[i] = 1.3 * x[i]
        for j, place in neighbours(edge_index, i):
            total[i] += x[j] if edge_attr is None else torch.relu(x[j] + layer.edge(edge_attr[place]))
    assert torch.allclose(layer(x, edge_index, edge_attr), layer.mlp(total), atol=1e-6)


def test_gps_in_loops(graph: tuple[Tensor, Tensor, Tensor | None]) -> None:
    """Nodes 0 to 2 and 3 to 4 are two graphs: attention stays within each, messages follow the edges."""
    x, edge_index, edge_attr = graph
    layer = GPSLayer(4, 0 if edge_attr is None else 3, heads=2, feedforward=6).eval()
    for norm in layer.norms:
        nn.init.normal_(norm.bias)
    batch, every = torch.tensor([0, 0, 0, 1, 1]), layer.all
    q, k, v = (part.unflatten(1, (2, 2)) for part in (x @ every.in_proj_weight.T + every.in_proj_bias).split(4, dim=1))
    attended = torch.zeros(5, 2, 2)
    for i, head in itertools.product(range(5), range(2)):
        mates = [j for j in range(5) if batch[j] == batch[i]]
        weights = torch.stack([(q[i, head] @ k[j, head] / 2**0.5).exp() for j in mates])
        attended[i, head] = sum(w * v[j, head] for w, j in zip(weights, mates, strict=True)) / weights.sum()
    near, wide = layer.norms
    wanted = layer.mlp(near(x + layer.near(x, edge_index, edge_attr)) + wide(x + every.out_proj(attended.flatten(1))))
    assert torch.allclose(layer(x, edge_index, edge_attr, batch), wanted, atol=1e-6)


def test_sage_in_loops(graph: tuple[Tensor, Tensor, Tensor | None]) -> None:
    x, edge_index, edge_attr = graph
    layer = SAGELayer(4, 0 if edge_attr is None else 3)
    edge = layer.edge or nn.Identity()
    for i, found in enumerate(layer(x, edge_index, edge_attr)):
        near = [
            x[j] if edge_attr is None else torch.relu(x[j] + edge(edge_attr[place]))
            for j, place in neighbours(edge_index, i)
        ]
        wanted = layer.own(x[i]) + (layer.near(sum(near) / len(near)) if near else 0)
        torch.testing.assert_close(found, wanted)


def test_gat_in_loops(graph: tuple[Tensor, Tensor, Tensor | None]) -> None:
    x, edge_index, edge_attr = graph
    layer = GATLayer(4, 0 if edge_attr is None else 3, heads=2)
    h, (to, start, *along) = layer.node(x), layer.reads
    wanted = torch.zeros(5, 4)
    for i in range(5):
        for head in range(2):
            part = slice(2 * head, 2 * head + 2)
            logits, values = [], []
            for j, place in [*neighbours(edge_index, i), (i, -1)]:
                logit, value = h[i, part] @ to[head] + h[j, part] @ start[head], h[j, part]
                if edge_attr is not None and place >= 0:
                    e = layer.edge(edge_attr[place])[part]
                    logit, value = logit + e @ along[0][head], value + e
                logits.append(functional.leaky_relu(logit, 0.2))
                values.append(value)
            wanted[i, part] = torch.stack(logits).softmax(0) @ torch.stack(values)
    assert torch.allclose(layer(x, edge_index, edge_attr), wanted, atol=1e-6)


def test_softmax_over_neighbours_bears_large_logits() -> None:
    logit = torch.tensor([[1e4], [1e4 - 1], [-1e4]])
    share = neighbour_softmax(logit, torch.tensor([0, 0, 1]), 3)
    assert torch.allclose(share[:, 0], torch.tensor([0.7311, 0.2689, 1.0]), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["node", "graph"])
def test_a_graph_does_not_see_its_batch_mates_nor_the_order_of_nodes(kind: str, level: str) -> None:
    torch.manual_seed(1)
    graphs = random_molecules(4, seed=0)
    model = MessagePassing(kind, 4, 8, 3, layers=2, edge_features=3, level=level, heads=2).eval()
    whole = graphs.take(torch.arange(4))
    together = model(**whole.inputs())
    for number in range(4):
        alone = graphs.take(torch.tensor([number]))
        shown = together[number] if level == "graph" else together[whole.batch == number]
        assert torch.allclose(model(**alone.inputs()).squeeze(0), shown, atol=1e-5)
    order = torch.randperm(len(whole.x))
    place = order.argsort()
    moved = model(whole.x[order], place[whole.edge_index], whole.batch[order], edge_attr=whole.edge_attr)
    assert torch.allclose(moved, together if level == "graph" else together[order], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_mlp_is_blind_to_bonds(kind: str) -> None:
    torch.manual_seed(2)
    part = random_molecules(3, seed=1).take(torch.arange(3))
    model = MessagePassing(kind, 4, 8, 1, layers=2, edge_features=3, heads=2).eval()
    other = model(part.x, part.edge_index, part.batch, edge_attr=part.edge_attr.flip(1))
    assert torch.allclose(model(**part.inputs()), other, atol=1e-6) == (kind == "mlp")


def test_every_parameter_is_trained() -> None:
    part = random_molecules(6, seed=3).take(torch.arange(6))
    for kind, width in itertools.product(KINDS, (0, 3)):
        model = MessagePassing(kind, 4, 8, 1, layers=2, edge_features=width, heads=2)
        model(
            part.x, part.edge_index, part.batch, edge_attr=part.edge_attr if width else None
        ).square().sum().backward()
        assert [name for name, value in model.named_parameters() if value.grad is None] == []
    with pytest.raises(ValueError, match="features must be a multiple of heads=3, got 8"):
        GATLayer(8, 0, 3)


# GPS pads graphs to the size of the largest, which no meta tensor says.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gps"])
def test_tensors_are_made_where_the_features_are(kind: str, graph: tuple[Tensor, Tensor, Tensor | None]) -> None:
    x, edge_index, edge_attr = (None if part is None else part.to("meta") for part in graph)
    network = MessagePassing(kind, 4, 8, 3, layers=2, edge_features=0 if graph[2] is None else 3).to("meta")
    assert network(x, edge_index, edge_attr=edge_attr).device.type == "meta"


def test_a_graph_without_nodes_reads_zeros() -> None:
    x = 10 * torch.arange(6.0).reshape(3, 2)
    assert readout(x, torch.tensor([0, 2, 2])).tolist() == [[0, 1, 0, 10], [0, 0, 0, 0], [6, 8, 30, 40]]
    assert readout(x[:0], None).tolist() == [[0, 0, 0, 0]]
