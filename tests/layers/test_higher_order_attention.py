"""Higher-order attention: every pair of orders against loops, dense against sparse, large logits, empty rows."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from holonomy.layers import EquivariantLinear, HigherOrderAttention, HigherOrderEncoderLayer
from holonomy.layers.equivariant.basis.orbits import extensions, orbits
from holonomy.layers.equivariant.higher_order.sparse import _log_features
from holonomy.ops.segments import block_sum, contract, outer_sum
from holonomy.structures import Hyperedges, joint
from tests.layers.test_equivariant_linear import permuted
from tests.reference.equivariant import higher_order_attention

ORDERS = list(itertools.product(range(1, 4), range(4)))
every_order = pytest.mark.parametrize(("order_in", "order_out"), ORDERS, ids=str)
FORMS = ({"kernel": "softmax"}, {"kernel": "performer"}, {"kernel": "performer", "sums": "decoupled"})
every_form = pytest.mark.parametrize("form", FORMS, ids=["softmax", "coupled", "decoupled"])
# However few hyperedges there are, what is done at once for all classes of many.
AT_ONCE = tuple(form | {"together_from": 0} for form in FORMS[1:])
every_sparse_form = pytest.mark.parametrize(
    "form", FORMS + AT_ONCE, ids=["softmax", "coupled", "decoupled", "coupled at once", "decoupled at once"]
)


def attention_of(order_in, order_out, device, dtype=torch.float64, *, together_from=512, **options):
    options = {"query_features": 3, "value_features": 2} | options
    layer = HigherOrderAttention(order_in, order_out, 4, 2, **options, device=device, dtype=dtype)
    layer.together_from = together_from
    return layer


@every_order
@every_form
def test_every_pair_of_orders_agrees_with_the_loops(order_in, order_out, form, device):
    """Brute force over all multi-indices, with padding and with entries that are not there."""
    layer = attention_of(order_in, order_out, device, **form)
    nodes = 4 if order_in + order_out < 5 else 3
    x = torch.randn(1, *[nodes] * order_in, 4, dtype=torch.float64, device=device)
    mask = torch.ones(1, nodes, dtype=torch.bool, device=device)
    support = torch.rand(1, *[nodes] * order_in, device=device) < 0.7
    torch.testing.assert_close(layer(x), higher_order_attention(layer, x), rtol=1e-8, atol=1e-8)
    mask[0, 1] = False
    ours = layer(x, mask, support=support)
    torch.testing.assert_close(ours, higher_order_attention(layer, x, mask, support), rtol=1e-8, atol=1e-8)


@every_order
@every_sparse_form
@pytest.mark.parametrize(("share", "local"), [(0.4, True), (0.7, False)])
def test_sparse_equals_dense_with_the_support(order_in, order_out, form, share, local, device):
    """Where there is no hyperedge at all: test_one_node_no_edges_and_no_hyperedges."""
    layer = attention_of(order_in, order_out, device, local=local and order_out > 0, **form)
    nodes = 4 if order_in + order_out < 5 else 3
    mask = torch.ones(2, nodes, dtype=torch.bool, device=device)
    mask[1, -1] = False
    support = joint(mask, order_in) & (torch.rand(2, *[nodes] * order_in, device=device) < share)
    x = torch.randn(2, *[nodes] * order_in, 4, dtype=torch.float64, device=device)
    whole = Hyperedges.from_dense(x, mask)
    here = Hyperedges.from_dense(support[..., None].double(), mask).values[:, 0] > 0
    shuffle = torch.randperm(int(here.sum())).to(device)
    edges = Hyperedges(whole.indices[here][shuffle], whole.values[here][shuffle], whole.num_nodes, whole.batch, 2)
    to = Hyperedges.from_dense(x.new_zeros(2, *[nodes] * order_out, 1), mask).indices if order_out else None
    sparse, dense = layer(edges, to=to), layer(x, mask, support=support)
    ours = sparse.to_dense()[0] if order_out else sparse.values
    torch.testing.assert_close(ours, dense, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("order_in", "order_out"), [(1, 2), (2, 2), (2, 0), (3, 1)], ids=str)
@every_sparse_form
def test_sparse_gradients_equal_dense_ones(order_in, order_out, form, device):
    layer = attention_of(order_in, order_out, device, **form)
    x = torch.randn(1, *[3] * order_in, 4, dtype=torch.float64, device=device, requires_grad=True)
    edges = Hyperedges.from_dense(x)
    to = Hyperedges.from_dense(x.new_zeros(1, *[3] * order_out, 1)).indices if order_out else None
    sparse, dense = layer(edges, to=to).values, layer(x)
    factor = torch.randn_like(sparse)
    named = dict(layer.named_parameters()) | {"x": x}
    ours = torch.autograd.grad((sparse * factor).sum(), list(named.values()), allow_unused=True)
    theirs = torch.autograd.grad((dense.reshape(sparse.shape) * factor).sum(), list(named.values()), allow_unused=True)
    for name, one, other in zip(named, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@every_order
@every_form
def test_permuting_the_nodes_permutes_the_result(order_in, order_out, form, device):
    layer = attention_of(order_in, order_out, device, **form)
    x = torch.randn(1, *[3] * order_in, 4, dtype=torch.float64, device=device)
    permutation = torch.tensor([1, 2, 0], device=device)
    ours = layer(permuted(x, order_in, permutation))
    torch.testing.assert_close(ours, permuted(layer(x), order_out, permutation), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("scale", [1e2, 1e4])
@pytest.mark.parametrize(("order_in", "order_out"), [(1, 1), (2, 2), (2, 0)], ids=str)
@every_sparse_form
def test_large_logits_stay_finite(order_in, order_out, form, scale, device, dtype):
    layer = attention_of(order_in, order_out, device, dtype, **form)
    x = torch.randn(2, *[4] * order_in, 4, dtype=dtype, device=device) * scale
    x.requires_grad_()
    for result in (layer(x), layer(Hyperedges.from_dense(x)).values):
        assert result.isfinite().all()
        for grad in torch.autograd.grad(result.square().mean().sqrt(), [x, *layer.parameters()], allow_unused=True):
            assert grad is None or grad.isfinite().all()


def test_features_of_long_queries_keep_their_digits(device):
    """What all features of a query share would drown their differences, and is left out."""
    graphs, query, key = torch.zeros(5, dtype=torch.int64, device=device), *torch.randn(2, 5, 1, 4, device=device)
    alike = torch.randn(1, 4, device=device) + 1e-3 * torch.randn(6, 4, device=device)
    given = (3000 * query, key, alike)
    narrow, wide = (
        _log_features(graphs, graphs, 1, *(x.to(dtype) for x in given))[0].exp()
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(narrow.double(), wide, rtol=0.01, atol=1e-6)


def test_each_row_subtracts_its_own_maximum(device):
    """At logits of 1e4 in one row, another row keeps its weights: a global maximum would make them uniform or zero."""
    layer = attention_of(1, 1, device, torch.float32, query_features=1)
    x = torch.randn(1, 5, 4, device=device)
    with torch.no_grad():
        layer.query["order0"].weight.mul_(0.1)
    small = layer(x)
    loud = x.clone()
    loud[0, 0] *= 1e5
    shape_of_loud = layer(loud)
    reference = attention_of(1, 1, device, torch.float64, query_features=1)
    reference.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    torch.testing.assert_close(shape_of_loud.double(), reference(loud.double()), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(small.double(), reference(x.double()), rtol=1e-4, atol=1e-4)


@every_sparse_form
def test_a_graph_does_not_depend_on_its_batch_mates(form, device):
    layer = attention_of(2, 2, device, **form)
    one = Hyperedges.from_dense(torch.randn(1, 3, 3, 4, dtype=torch.float64, device=device))
    for scale in (1.0, 1e3):
        two = torch.randn(4, 4, 4, dtype=torch.float64, device=device) * scale
        mate = Hyperedges.from_dense(two[None])
        batch = torch.tensor([0] * 3 + [1] * 4, device=device)
        values = torch.cat([one.values, mate.values])
        both = Hyperedges(torch.cat([one.indices, mate.indices + 3]), values, 7, batch)
        torch.testing.assert_close(layer(both).values[:9], layer(one).values)
        torch.testing.assert_close(layer(both).values[9:], layer(mate).values)


@pytest.mark.parametrize(("order_in", "order_out"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)], ids=str)
@every_sparse_form
def test_nan_is_seen_in_every_entry(order_in, order_out, form, device):
    """Every entry attends to every other one; weights of nan were taken for weights of zero."""
    layer = attention_of(order_in, order_out, device, **form)
    x = torch.randn(1, *[4] * order_in, 4, dtype=torch.float64, device=device)
    x.view(-1, 4)[0, 0] = torch.nan
    for result in (layer(x), layer(Hyperedges.from_dense(x)).values):
        assert result.isnan().any(-1).all()


@pytest.mark.parametrize("filling", [1e30, float("inf"), float("nan")])
@every_form
def test_padding_has_no_effect(form, filling, device):
    mask = torch.tensor([[True, True, False, True]], device=device)
    kept = torch.tensor([0, 1, 3], device=device)
    for layer in (
        attention_of(2, 1, device, **form),
        HigherOrderEncoderLayer(2, 2, 4, 2, 5, **form, device=device, dtype=torch.float64),
    ):
        x = torch.randn(1, 4, 4, 4, dtype=torch.float64, device=device)
        result = layer(torch.where(joint(mask, 2)[..., None], x, filling), mask)
        torch.testing.assert_close(permuted(result, layer.order_out, kept), layer(permuted(x, 2, kept)))
        assert result.isfinite().all()


@every_sparse_form
def test_one_node_no_edges_and_no_hyperedges(form, device):
    x = torch.randn(1, 1, 1, 4, dtype=torch.float64, device=device)
    for order_out in range(4):
        layer = attention_of(2, order_out, device, **form)
        assert layer(x).isfinite().all()
        empty = Hyperedges(torch.zeros(0, 2, dtype=torch.int64, device=device), x.new_zeros(0, 4), 3, None, 2)
        to = torch.arange(2, device=device)[:, None].expand(2, order_out)
        result = layer(empty, to=to)
        assert result.values.shape == (2, 4)
        assert not result.values.any()


def test_coupled_and_decoupled_differ_where_classes_share_nodes(device):
    torch.manual_seed(3)
    coupled = attention_of(2, 2, device, kernel="performer")
    decoupled = attention_of(2, 2, device, kernel="performer", sums="decoupled")
    decoupled.load_state_dict(coupled.state_dict())
    x = torch.randn(1, 4, 4, 4, dtype=torch.float64, device=device)
    assert (coupled(x) - decoupled(x)).abs().max() > 0.01


def test_many_random_features_approach_softmax(device):
    torch.manual_seed(0)
    exact = attention_of(2, 1, device)
    x = torch.randn(1, 5, 5, 4, dtype=torch.float64, device=device) / 2
    errors = []
    for features in (16, 4096):
        rough = attention_of(2, 1, device, kernel="performer", random_features=features)
        rough.load_state_dict(exact.state_dict() | {"projection": rough.projection})
        errors.append((exact(x) - rough(x)).norm() / exact(x).norm())
    assert errors[1] < 0.05
    assert errors[1] < errors[0] / 2
    before = rough.projection.clone()
    rough.redraw(torch.Generator(device).manual_seed(5))
    assert not torch.equal(before, rough.projection)
    exact.redraw()  # has none


@pytest.mark.parametrize(("query_features", "wanted"), [(8, 64), (40, 80)])
def test_narrow_heads_have_random_features_enough(query_features, wanted, device):
    """With 16 for a width of 8, kernel attention stays six points behind softmax on small triangulations, not two."""
    layer = attention_of(1, 1, device, kernel="performer", query_features=query_features)
    assert layer.projection.shape == (wanted, query_features)


@pytest.mark.parametrize(("order_in", "order_out"), [(1, 1), (1, 2), (2, 1)], ids=str)
def test_what_all_entries_share_is_not_left_to_random_features(order_in, order_out, device):
    """Softmax attention does not see it in keys; features of keys and queries far from zero are hit or miss."""
    kind = {"dtype": torch.float64, "device": device}
    errors = {0: 0.0, 3: 0.0}
    for draw in range(8):
        torch.manual_seed(draw)
        exact = HigherOrderAttention(order_in, order_out, 16, 2, **kind)
        rough = HigherOrderAttention(order_in, order_out, 16, 2, kernel="performer", random_features=64, **kind)
        rough.load_state_dict(exact.state_dict() | {"projection": rough.projection})
        x, common = torch.randn(1, *[6] * order_in, 16, **kind), torch.randn(16, **kind)
        with torch.no_grad():
            for away in errors:
                wanted = exact(x + away * common)
                errors[away] += float((rough(x + away * common) - wanted).norm() / wanted.norm())
    # 0.04 .. 0.06 against 0.15 .. 0.30 of the size of the result; without a common centre both are 0.15 .. 0.35.
    assert errors[3] < errors[0] / 2


@pytest.mark.parametrize("pair", orbits(2, 2), ids=lambda pair: f"{pair.reads} to {pair.writes}")
def test_extensions_count_exactly_the_members_of_a_class(pair):
    """On all pairs of tuples of different nodes: the signed matchings add up to the indicator of the class."""
    nodes = 4
    for i in itertools.permutations(range(nodes), max(pair.reads.pattern) + 1):
        for j in itertools.permutations(range(nodes), max(pair.writes.pattern) + 1):
            shared = {(a, b) for a, node in enumerate(i) for b, other in enumerate(j) if node == other}
            wanted = set(zip(pair.reads.kept, pair.writes.places, strict=True))
            counted = sum(term.sign * (set(zip(term.kept, term.places, strict=True)) <= shared)
                          for term in extensions(pair))  # fmt: skip
            assert counted == (shared == wanted) or not wanted <= shared


def test_segment_sums_and_their_way_back(device, monkeypatch):
    monkeypatch.setattr("holonomy.ops.segments._CHUNK", 40)  # several chunks, the last one short
    kind = {"dtype": torch.float64, "device": device}
    a, b = torch.randn(11, 2, 3, **kind), torch.randn(11, 2, 4, **kind)
    slots = torch.randint(3, (11,), device=device)
    table = outer_sum(a, b, slots, 5)
    expected = torch.zeros(5, 2, 3, 4, **kind)
    for row, slot in enumerate(slots.tolist()):
        expected[slot] += a[row, :, :, None] * b[row, :, None, :]
    torch.testing.assert_close(table, expected)
    torch.testing.assert_close(contract(a, table, slots), torch.einsum("rha,rhab->rhb", a, table[slots]))
    a.requires_grad_(), b.requires_grad_(), table.requires_grad_()
    for size in (5, 1):
        where = slots.clamp_max(size - 1)
        assert torch.autograd.gradcheck(lambda a, b, w=where, n=size: outer_sum(a, b, w, n), (a, b))
        assert torch.autograd.gradgradcheck(lambda a, b, w=where, n=size: outer_sum(a, b, w, n), (a, b))
        assert torch.autograd.gradcheck(
            lambda a, t, w=where: contract(a, t, w), (a, table[:size].detach().requires_grad_())
        )


@pytest.mark.parametrize("width", [3, 4])
def test_block_sums_and_their_ways_back(width, device, monkeypatch):
    """Chunks of a block and of two, the last one short; more blocks than rows in each; a query in several blocks."""
    monkeypatch.setattr("holonomy.ops.segments._BLOCKS", 2 * 3 * width)
    kind = {"dtype": torch.float64, "device": device}
    q, k, v = (torch.randn(7, 2, size, **kind, requires_grad=True) for size in (3, 3, 4))
    query_rows, key_rows = torch.randint(6, (2, 5, width), device=device)
    mask = torch.rand(5, width, width, device=device) < 0.6
    expected = torch.zeros(7, 2, 4, **kind)
    for block, i, j in itertools.product(range(5), range(width), range(width)):
        if mask[block, i, j]:
            a, b = query_rows[block, i], key_rows[block, j]
            expected[a] += (q[a] * k[b]).sum(-1, keepdim=True).detach() * v[b].detach()

    def blocks(q, k, v):
        return block_sum(q, k, v, query_rows, key_rows, mask, torch.float64)

    torch.testing.assert_close(blocks(q, k, v), expected)
    single = block_sum(*(x.detach().float() for x in (q, k, v)), query_rows, key_rows, mask, torch.float32)
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.autograd.gradcheck(blocks, (q, k, v))
    assert torch.autograd.gradgradcheck(blocks, (q, k, v))


def test_block_sums_differentiate_twice_beside_a_constant():
    q, k, v = (torch.rand(6, 2, 3, dtype=torch.float64) for _ in range(3))
    rows, mask = torch.arange(6).view(2, 3), torch.ones(2, 3, 3, dtype=torch.bool)

    def blocks(q, k):
        return block_sum(q, k, v, rows, rows, mask, torch.float64)

    assert torch.autograd.gradgradcheck(blocks, (q.requires_grad_(), k.requires_grad_()))


@pytest.mark.parametrize("form", ["coupled", "decoupled"])
def test_heavy_nodes_and_many_chunks_change_nothing(form, device, monkeypatch):
    """A star, whose center has more edges than a block takes, beside a few light nodes."""
    leaves, nodes = 90, 100
    away = torch.stack([torch.zeros(leaves, dtype=torch.int64), torch.arange(1, leaves + 1)], 1)
    others = torch.randint(nodes, (60, 2))
    indices = torch.cat([away, away.flip(1), others]).unique(dim=0).to(device)
    edges = Hyperedges(indices, torch.randn(len(indices), 4, dtype=torch.float64, device=device), nodes)
    layer = attention_of(2, 2, device, kernel="performer", sums=form)
    edges.values.requires_grad_()
    leaves = [edges.values, *layer.parameters()]
    found = []
    monkeypatch.setattr("holonomy.ops.performer.chunked._FEWEST_FEATURES", 1)
    for together_from in (10**9, 0):
        layer.together_from = together_from
        for module, chunk in (("layers.equivariant.higher_order.sparse", 64), ("ops.performer.chunked", 50)):
            monkeypatch.setattr(f"holonomy.{module}._CHUNK", chunk)
        result = layer(edges).values
        found.append([result, *torch.autograd.grad(result.sin().sum(), leaves)])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("sums", ["coupled", "decoupled"])
def test_attention_is_linear_in_hyperedges(sums, device):
    """Nothing of the size of pairs is made: 30,000 hyperedges would have 9e8 of them."""
    edges = torch.randint(2000, (30000, 2), device=device).unique(dim=0)
    x = Hyperedges(edges, torch.randn(edges.shape[0], 4, device=device), 2000)
    layer = attention_of(2, 2, device, torch.float32, kernel="performer", sums=sums)
    result = layer(x).values
    assert result.isfinite().all()
    result.sum().backward()


@pytest.mark.parametrize("sums", ["coupled", "decoupled"])
@pytest.mark.parametrize("layout", ["dense", "sparse", "at once"])
@pytest.mark.parametrize(("order_in", "order_out"), [(1, 1), (2, 1), (2, 2)], ids=str)
def test_the_length_of_a_query_costs_no_digits(order_in, order_out, layout, sums, device):
    """Queries far away in a direction that no random feature sees: single precision does as well as nearby."""
    options = {"kernel": "performer", "sums": sums, "query_features": 5, "random_features": 3}
    layer = HigherOrderAttention(order_in, order_out, 8, 2, **options, device=device)
    blind = torch.linalg.svd(layer.projection.double()).Vh[4]
    with torch.no_grad():
        for query in layer.query.values():
            query.bias[0] += 1e3 * blind.float().repeat(query.bias.shape[1] // 5)
    layer.together_from = 0 if layout == "at once" else 2**30
    x = torch.randn(1, *[5] * order_in, 8, device=device)

    def result(layer, x):
        return layer(x) if layout == "dense" else layer(Hyperedges.from_dense(x)).values

    exact = result(copy.deepcopy(layer).double(), x.double())
    torch.testing.assert_close(result(layer, x).double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("order_in", "order_out"), [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("scale", [10.0, 30.0])
def test_differences_of_small_weights_have_gradients(order_in, order_out, scale, device):
    """A class with 1e-100 of the weights, which float64 holds: its features and their gradients are in float64, too."""
    layer = attention_of(order_in, order_out, device, torch.float32, kernel="performer", random_features=16)
    x = (scale * torch.randn(2, *[5] * order_in, 4, device=device)).requires_grad_()
    exact = copy.deepcopy(layer).double()(x.detach().double())
    result = layer(x)
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=0.02 * exact.abs().max().item())
    result.sum().backward()
    for gradient in (x.grad, *(parameter.grad for parameter in layer.parameters())):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kernel", ["softmax", "performer"])
@pytest.mark.parametrize(("order_in", "order_out"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (1, 3)], ids=str)
def test_graphs_without_nodes(order_in, order_out, kernel, device):
    layer = HigherOrderAttention(order_in, order_out, 8, 2, kernel=kernel, device=device)
    x = torch.zeros(3, *[0] * order_in, 8, device=device)
    for mask in (None, torch.zeros(3, 0, dtype=torch.bool, device=device)):
        assert torch.equal(layer(x, mask), torch.zeros(3, *[0] * order_out, 8, device=device))


@pytest.mark.parametrize("make", [
    lambda: EquivariantLinear(2, 2, 8, 8),
    lambda: HigherOrderAttention(2, 2, 8, 2),
    lambda: HigherOrderAttention(2, 2, 8, 2, kernel="performer"),
    lambda: HigherOrderAttention(2, 2, 8, 2, kernel="performer", sums="decoupled"),
])  # fmt: skip
@pytest.mark.parametrize("together", [0, 2**9])
@pytest.mark.usefixtures("without_shape_checks")
def test_tuples_of_the_result_have_nodes_that_are_there_of_one_graph(make, together):
    """A node of -1 is another one's number elsewhere: it must not be looked up."""
    layer = make()
    layer.together_from = together
    edges = Hyperedges(torch.tensor([[0, 1], [2, 2]]), torch.ones(2, 8), 4, torch.tensor([0, 0, 1, 1]))
    assert layer(edges, to=torch.tensor([[1, 0], [3, 2]])).values.shape == (2, 8)
    for _ in range(2):  # a refusal is not kept
        with pytest.raises(ValueError, match=r"^to must lie in \[0, num_nodes = 4\), got -1 \.\. 0\.$"):
            layer(edges, to=torch.tensor([[0, -1]]))
        with pytest.raises(ValueError, match=r"^to must lie in \[0, num_nodes = 4\), got 0 \.\. 4\.$"):
            layer(edges, to=torch.tensor([[0, 4]]))
        with pytest.raises(ValueError, match=r"^to must join nodes of one graph, got \(1, 2\) across two\.$"):
            layer(edges, to=torch.tensor([[0, 1], [1, 2]]))
        with pytest.raises(TypeError, match=r"^to must hold integers, got torch\.float32\.$"):
            layer(edges, to=torch.tensor([[0.0, 1.0]]))


@pytest.mark.usefixtures("without_shape_checks")
def test_wrong_arguments_get_one_sentence():
    with pytest.raises(ValueError, match="features must be a multiple of heads, got 8 and 3"):
        HigherOrderAttention(2, 1, 8, 3)
    with pytest.raises(ValueError, match="local must be False for order_out = 0"):
        HigherOrderAttention(2, 0, 8, 2, local=True)
    with pytest.raises(ValueError, match="random_features must be None for the softmax kernel, got 4"):
        HigherOrderAttention(2, 1, 8, 2, random_features=4)
    with pytest.raises(ValueError, match="kernel must be one of 'softmax', 'performer', got 'linear'"):
        HigherOrderAttention(2, 1, 8, 2, kernel="linear")
    with pytest.raises(ValueError, match="sums must be 'coupled' for the softmax kernel, got 'decoupled'"):
        HigherOrderAttention(2, 1, 8, 2, sums="decoupled")
    with pytest.raises(ValueError, match="query_features must be a positive integer, got 0"):
        HigherOrderAttention(2, 1, 8, 2, query_features=0)
    with pytest.raises(ValueError, match="order_out must be at least 0, got -1"):
        HigherOrderAttention(2, -1, 8, 2)
    layer, encoder = HigherOrderAttention(2, 1, 8, 2), HigherOrderEncoderLayer(2, 2, 8, 2, 8)
    edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 8), 2)
    with pytest.raises(ValueError, match="mask and support must be None for hyperedges"):
        layer(edges, torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match="support must be boolean, True at hyperedges"):
        layer(torch.zeros(1, 2, 2, 8), support=torch.ones(1, 2, 2))
    with pytest.raises(ValueError, match="support must have shape"):
        layer(torch.zeros(1, 2, 2, 8), support=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="to must be None for a dense tensor"):
        layer(torch.zeros(1, 2, 2, 8), to=torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="to must be None where the order stays the same"):
        encoder(edges, to=edges.indices)
