"""HigherOrderTransformer and InvariantGraphNetwork as users call them: graphs, sets, hyperedges, dense tensors."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.layers import EquivariantLinear, HigherOrderAttention, HigherOrderEncoderLayer
from holonomy.layers.equivariant.linear.entrywise import Entrywise
from holonomy.models import HigherOrderTransformer, InvariantGraphNetwork
from holonomy.structures import Hyperedges

KINDS = (
    (HigherOrderTransformer, {"heads": 2}),
    (HigherOrderTransformer, {"heads": 2, "kernel": "performer"}),
    (HigherOrderTransformer, {"heads": 2, "kernel": "performer", "sums": "decoupled", "local": True}),
    (InvariantGraphNetwork, {}),
    (InvariantGraphNetwork, {"normalise": "counts"}),
)
every_kind = pytest.mark.parametrize(
    ("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", str(value))
)


@pytest.mark.parametrize("kind", [HigherOrderTransformer, InvariantGraphNetwork])
def test_every_lightweight_map_is_entrywise_where_that_is_asked(kind):
    for entrywise in (False, True):
        model = kind(3, 8, 2, entrywise=entrywise)
        made = sum(isinstance(part, Entrywise) for part in model.modules())
        assert made == entrywise * (2 if kind is InvariantGraphNetwork else 6)


def graph(nodes, edges, device, generator_seed=0):
    """A random directed graph without duplicates: node features, edge_index, edge attributes."""
    torch.manual_seed(generator_seed)
    pairs = torch.randint(nodes, (edges, 2), device=device)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]].unique(dim=0)
    kind = {"dtype": torch.float64, "device": device}
    return torch.randn(nodes, 3, **kind), pairs.t(), torch.randn(pairs.shape[0], 2, **kind)


def rows(result):
    """The features of a result, sorted by index tuple where it is hyperedges."""
    if isinstance(result, Hyperedges):
        return result.values[torch.argsort(result.indices[:, 0] * result.num_nodes + result.indices[:, 1])]
    return result


def build(kind, options, orders, device, **more):
    return kind(3, 8, 2, orders=orders, **options, **more, device=device, dtype=torch.float64).eval()


@every_kind
@pytest.mark.parametrize("orders", [(2, 2, 0), (2, 2, 1), (2, 1, 2)], ids=str)
@given(seed=st.integers(0, 50))
@settings(max_examples=2)
def test_renaming_nodes_and_reordering_edges(kind, options, orders, seed, device):
    """Nodes renamed and edges shuffled: a graph's vector stays, a node's and an edge's row goes along."""
    x, edge_index, edge_attr = graph(5, 9, device, seed)
    torch.manual_seed(seed)
    model = build(kind, options, orders, device, edge_features=2)
    name = torch.randperm(5, device=device)
    shuffle = torch.randperm(edge_index.shape[1], device=device)
    renamed = torch.empty_like(x).index_copy(0, name, x)
    result = model(x, edge_index, edge_attr=edge_attr)
    other = model(renamed, name[edge_index][:, shuffle], edge_attr=edge_attr[shuffle])
    if orders[-1] == 0:
        torch.testing.assert_close(other, result)
    elif orders[-1] == 1:
        torch.testing.assert_close(other[name], result)
    else:
        back = other.at(torch.argsort(name)[other.indices], other.values)
        torch.testing.assert_close(rows(back), rows(result))


@pytest.mark.parametrize("kind", [HigherOrderTransformer, InvariantGraphNetwork])
def test_the_level_says_the_last_order(kind):
    for last, level in enumerate(("graph", "node", "edge")):
        assert kind(3, 8, 2, level=level).orders == kind(3, 8, 2, level=level, orders=(2, 2, last)).orders
        assert kind(3, 8, 2, orders=(2, 1, last)).level == (None if level == "edge" else level)
    assert kind(3, 8, 2).orders == (2, 2, 0)
    assert kind(3, 8, 2).level == "graph"
    with pytest.raises(ValueError, match=r"^orders must end with 1 at the level 'node', got \(2, 2, 0\)\.$"):
        kind(3, 8, 2, level="node", orders=(2, 2, 0))
    with pytest.raises(ValueError, match=r"^orders must begin with 2 at the level 'edge', got \(1, 2\)\.$"):
        kind(3, 8, 2, level="edge", orders=(1, 2))


def test_rows_of_edges_are_theirs_where_32_bits_do_not_number_all_pairs():
    model = InvariantGraphNetwork(1, 4, 1, level="edge", dtype=torch.float64).eval()
    edges = torch.tensor([[49_998, 3, 49_999, 7], [49_999, 7, 49_998, 3]])
    x = torch.arange(50_000, dtype=torch.float64)[:, None] / 50_000
    torch.testing.assert_close(model(x, edges.int()), model(x, edges))
    assert not torch.allclose(model(x, edges)[0], model(x, edges)[1])


@every_kind
@pytest.mark.parametrize("last", [0, 1, 2])
def test_graphs_of_a_batch_do_not_meet(kind, options, last, device):
    model = build(kind, options, (2, 2, last), device, edge_features=2)
    one, two = graph(4, 7, device), graph(6, 11, device, 1)
    batch = torch.tensor([0] * 4 + [1] * 6, device=device)
    edge_index, edge_attr = torch.cat([one[1], two[1] + 4], 1), torch.cat([one[2], two[2]])
    both = model(torch.cat([one[0], two[0]]), edge_index, batch, edge_attr=edge_attr)
    alone = [rows(model(*each[:2], edge_attr=each[2])) for each in (one, two)]
    torch.testing.assert_close(rows(both), torch.cat(alone))


@every_kind
@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 0), (2, 0), (2, 1), (2, 2), (1, 2)])
def test_sparse_equals_dense_on_the_complete_hypergraph(kind, options, first, last, device):
    model = build(kind, options, (first, first, last), device)
    x = torch.randn(2, *[4] * first, 3, dtype=torch.float64, device=device)
    mask = torch.ones(2, 4, dtype=torch.bool, device=device)
    mask[1, 3] = False
    edges = Hyperedges.from_dense(x, mask)
    dense = model.tensor(x, mask)
    if last == 0:
        torch.testing.assert_close(model(edges), dense)
        return
    whole = Hyperedges.from_dense(dense, mask)
    result = model(edges) if last == 1 or first == last else model(edges, to=whole.indices)
    torch.testing.assert_close(rows(result), rows(whole) if last == 2 else whole.values)


@every_kind
def test_one_node_no_edges(kind, options, device):
    model = build(kind, options, (2, 2, 0), device)
    none = torch.zeros(2, 0, dtype=torch.int64, device=device)
    x = torch.randn(1, 3, dtype=torch.float64, device=device)
    assert model(x, none).isfinite().all()
    three = model(x.expand(3, 3), none, batch=torch.arange(3, device=device))
    torch.testing.assert_close(three, model(x, none).expand(3, 2))


@every_kind
@pytest.mark.parametrize("orders", [(2, 2, 0), (2, 1, 2), (2, 3, 1)], ids=str)
def test_bfloat16_autocast_on_sparse_graphs(kind, options, orders, device):
    model = build(kind, options, orders, device).float()
    x, edge_index, _ = graph(6, 9, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        rough = rows(model(x.float(), edge_index))
    exact = rows(model(x.float(), edge_index))
    assert (rough.float() - exact).norm() < 0.15 * exact.norm()
    rough.float().sum().backward()


def test_candidate_hyperedges_are_scored_alone(device):
    """A set in, chosen triples out: the score of a triple does not depend on which others are asked for."""
    model = build(HigherOrderTransformer, {"heads": 2, "kernel": "performer"}, (1, 1, 3), device)
    x = torch.randn(6, 3, dtype=torch.float64, device=device)
    triples = torch.tensor([[0, 1, 2], [3, 1, 5], [2, 2, 4]], device=device)
    several = model(x, to=triples)
    assert several.indices is triples
    torch.testing.assert_close(model(x, to=triples[1:2].clone()).values, several.values[1:2])


@every_kind
def test_hyperedges_at_the_level_of_edges_have_a_row_each(kind, options, device):
    """They came back as hyperedges."""
    for orders in ((2, 2, 2), (2, 1, 2)):
        model = build(kind, options, orders, device)
        edges = Hyperedges(torch.tensor([[3, 1], [0, 1], [2, 2]]), torch.randn(3, 3, dtype=torch.float64), 4)
        expected, model.level = model(edges).values, "edge"
        torch.testing.assert_close(model(edges), expected)


@every_kind
@pytest.mark.parametrize("orders", [(1, 3), (1, 3, 3)])
def test_tuples_that_are_asked_for_twice_count_once(kind, options, orders, device):
    model = build(kind, options, orders, device)
    x = torch.randn(6, 3, dtype=torch.float64, device=device)
    triples = torch.tensor([[5, 1, 2], [3, 1, 5], [0, 2, 4], [3, 1, 5], [5, 1, 2]], device=device)
    once = model(x, to=triples[:3].clone()).values
    for _ in range(2):  # the second time what was planned of the tuples is there
        result = model(x, to=triples)
        assert result.indices is triples
        torch.testing.assert_close(result.values, once[[0, 1, 2, 1, 0]])


@pytest.mark.parametrize(
    "layer",
    [
        HigherOrderAttention(1, 2, 4, 2),
        HigherOrderAttention(1, 2, 4, 2, kernel="performer"),
        HigherOrderAttention(1, 2, 4, 2, kernel="performer", sums="decoupled"),
        EquivariantLinear(1, 2, 4, 4),
        HigherOrderEncoderLayer(1, 2, 4, 2, 8),
        HigherOrderEncoderLayer(1, 2, 4, 2, 8, entrywise=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_counts_a_tuple_that_is_asked_for_twice_once(layer):
    """The encoder layer refused it, whose feed-forward would count it twice."""
    nodes, pairs = Hyperedges(torch.tensor([[0], [1]]), torch.randn(2, 4), 2), torch.tensor([[1, 0], [0, 1], [1, 0]])
    result = layer(nodes, to=pairs)
    assert result.indices is pairs
    torch.testing.assert_close(result.values, layer(nodes, to=pairs[:2].clone()).values[[0, 1, 0]])


@every_kind
def test_asked_tuples_are_those_of_every_layer_of_the_last_order(kind, options, device):
    """They were not heard where the last layer stays at its order."""
    x = torch.randn(1, 4, 3, dtype=torch.float64, device=device)
    pairs = torch.cartesian_prod(*[torch.arange(4, device=device)] * 2)
    for orders in ((1, 2, 2), (1, 1, 2, 2, 2)):
        model = build(kind, options, orders, device)
        result = model(x[0], to=pairs)
        assert torch.equal(result.indices, pairs)
        torch.testing.assert_close(result.values, model.tensor(x).flatten(0, 2))


@every_kind
@pytest.mark.parametrize("orders", [(2, 2), (2, 2, 2), (2, 1), (2, 2, 0)], ids=str)
def test_tuples_that_nobody_would_read_are_refused(kind, options, orders, device):
    model, (x, edge_index, _) = build(kind, options, orders, device), graph(5, 6, device)
    to = torch.zeros(1, orders[-1], dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="to must be None"):
        model(x, edge_index, to=to)


def test_local_layers_see_no_further_than_their_neighbours(device):
    """Two layers without the global classes on a chain: a node does not feel one ten steps away; with them it does."""
    i = torch.arange(11, device=device)
    chain = torch.stack([torch.cat([i, i + 1]), torch.cat([i + 1, i])])
    for local in (True, False):
        torch.manual_seed(0)
        model = build(HigherOrderTransformer, {"heads": 2, "local": local}, (2, 2, 2, 1), device)
        x = torch.randn(12, 3, dtype=torch.float64, device=device, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x, chain)[0].sum(), [x])
        assert bool(grad[11].any()) != local
        assert grad[1].any()


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("kernel", ["softmax", "performer"])
def test_random_features_are_redrawn_in_every_layer(kernel, device):
    model = HigherOrderTransformer(3, 8, 2, orders=(1, 2, 0), heads=2, kernel=kernel).to(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.redraw(torch.Generator(device).manual_seed(1))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != name.endswith("projection"), name


@pytest.mark.usefixtures("without_shape_checks")
def test_wrong_arguments_get_one_sentence():
    with pytest.raises(ValueError, match=r"orders must be at least two, of which only the last may be 0, got \(2,\)"):
        HigherOrderTransformer(3, 8, 2, orders=(2,))
    with pytest.raises(TypeError, match=r"orders must be a sequence of integers, got '20'"):
        HigherOrderTransformer(3, 8, 2, orders="20")
    with pytest.raises(ValueError, match=r"^hidden_features must be a multiple of heads, got 8 and 3\.$"):
        HigherOrderTransformer(3, 8, 2, heads=3)
    HigherOrderTransformer(3, 8, 2, heads=3, query_features=2, value_features=2)
    with pytest.raises(ValueError, match="edge_features must be 0 unless the first order is 2"):
        InvariantGraphNetwork(3, 8, 2, orders=(1, 0), edge_features=2)
    model = InvariantGraphNetwork(3, 8, 2, edge_features=2)
    with pytest.raises(ValueError, match=r"edge_attr must have shape \(edges, edge_features = 2\), got None"):
        model(torch.ones(2, 3), torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match="edge_index must be given exactly if the first order is 2"):
        model(torch.ones(2, 3))
    edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 5), 2)
    with pytest.raises(ValueError, match="edge_index, edge_attr, batch and num_graphs must be None where x is hyper"):
        model(edges, torch.tensor([[0], [1]]))


@pytest.mark.usefixtures("without_decorators")
def test_compiling_logs_no_wrong_call():
    """torch cannot trace the default of ``max``, and says so in a line for each compilation."""
    logged, handler, logger = [], logging.Handler(logging.WARNING), logging.getLogger("torch._dynamo")
    handler.emit = logged.append
    logger.addHandler(handler)
    model = InvariantGraphNetwork(3, 4, 2, level="node")
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend="eager")(torch.ones(3, 3), torch.tensor([[0, 1], [1, 0]]))
    logger.removeHandler(handler)
    assert not [record for record in logged if "incorrect arg count" in record.getMessage()]
