"""Equivariant linear maps: bases, every pair of orders against loops, dense against sparse, orbits, initialisation."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.layers import EquivariantLinear, bell, moebius_matrix, set_partitions, zeta_matrix
from holonomy.layers.equivariant.basis import partitions
from holonomy.layers.equivariant.basis.orbits import groups, orbits
from holonomy.layers.equivariant.linear.sparse import pruned_plans
from holonomy.structures import Hyperedges, joint
from tests.reference.equivariant import equivariant_linear, pattern, patterns

ORDERS = list(itertools.product(range(4), repeat=2))
every_order = pytest.mark.parametrize(("order_in", "order_out"), ORDERS, ids=str)


def layer_of(order_in, order_out, device="cpu", dtype=torch.float64, **options):
    """A layer with no weight and no bias that is zero."""
    layer = EquivariantLinear(order_in, order_out, 2, 3, **options, device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def permuted(x, order, permutation, batch=1):
    """The tensor with its nodes renamed: entry i of the result is entry permutation[i] of the tensor."""
    for axis in range(order):
        x = x.index_select(batch + axis, permutation)
    return x


def test_partitions_are_the_equality_patterns_in_lexicographic_order():
    for m in range(6):
        assert list(set_partitions(m)) == patterns(m) or m == 0
        assert len(set_partitions(m)) == bell(m)
    assert set_partitions(0) == ((),)
    for count in (set_partitions, bell):
        with pytest.raises(ValueError, match=r"m must be at least 0, got -1\."):
            count(-1)


@pytest.mark.parametrize("m", range(7))
def test_moebius_inverts_zeta(m):
    assert torch.equal(zeta_matrix(m) @ moebius_matrix(m), torch.eye(bell(m), dtype=torch.int64))
    zeta_matrix(m).zero_()  # what is handed out is a copy
    assert zeta_matrix(m).diagonal().all()


@pytest.mark.parametrize("normalise", [None, "counts"])
def test_a_layer_without_memory_leaves_nothing_behind(normalise):
    """What is made on the meta device, by argument or by torch's default, has no effect on the layers after it."""
    partitions._lattice.cache_clear()  # as if it were the first layer of all
    with torch.device("meta"):
        assert EquivariantLinear(2, 1, 2, 3, normalise=normalise).conversion.is_meta
    assert EquivariantLinear(2, 1, 2, 3, normalise=normalise, device="meta").weight.is_meta
    assert layer_of(2, 1, normalise=normalise)(torch.ones(4, 4, 2, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("m", range(1, 5))
def test_zeta_turns_exact_patterns_into_diagrams(m, device):
    """On every multi-index: D^p = sum over q of Z_pq B^q, D^p being one where at least the indices of a block agree."""
    every = list(itertools.product(range(4), repeat=m))
    exact = torch.tensor([[pattern(i) == p for i in every] for p in set_partitions(m)])
    at_least = [[all(i[a] == i[b] for a in range(m) for b in range(m) if p[a] == p[b]) for i in every]
                for p in set_partitions(m)]  # fmt: skip
    assert torch.equal(zeta_matrix(m) @ exact.long(), torch.tensor(at_least).long())


def test_classes_share_sources():
    """203 classes of 3 -> 3 need 22 reduced tensors."""
    assert len(orbits(3, 3)) == 203
    assert sum(len(group.inputs) for group in groups(3, 3, tuple(range(203)))) == 22


@every_order
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"normalise": "counts", "bias": False}], ids=str)
def test_a_single_node_has_a_gradient(order_in, order_out, options, device):
    """Nothing is broadcast then: what is spread is what came, a view among others."""
    layer = layer_of(order_in, order_out, device, **options)
    x = torch.randn(2, *[1] * order_in, 2, dtype=torch.float64, device=device, requires_grad=True)
    mask = torch.ones(2, 1, dtype=torch.bool, device=device)
    layer(x, mask).sum().backward()
    # All classes and patterns that one node has meet in one entry.
    first = layer.weight[0].sum(1)
    torch.testing.assert_close(x.grad, first.expand_as(x))


@every_order
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"normalise": "counts", "bias": False}], ids=str)
def test_no_nodes_are_no_error(order_in, order_out, options, device):
    """An empty result is a view of what came, which must not be written to, unless it is copied."""
    layer = layer_of(order_in, order_out, device, **options)
    mask = torch.ones(2, 0, dtype=torch.bool, device=device)
    result = layer(torch.randn(2, *[0] * order_in, 2, dtype=torch.float64, device=device), mask)
    assert result.shape == (2, *[0] * order_out, layer.out_features)


@every_order
@pytest.mark.parametrize("options", [{}, {"lightweight": True}, {"normalise": "counts"}, {"bias": False}], ids=str)
def test_every_pair_of_orders_agrees_with_the_loops(order_in, order_out, options, device):
    if options.get("lightweight") and order_in and not order_out:
        return
    layer = layer_of(order_in, order_out, device, **options)
    for nodes in (1, 2, 3):
        x = torch.randn(2, *[nodes] * order_in, 2, dtype=torch.float64, device=device)
        mask = torch.ones(2, nodes, dtype=torch.bool, device=device)
        mask[1, -1] = False
        for present in (None, mask) if order_in else (mask,):
            if not order_in and order_out:
                continue  # the loops read the number of nodes off the input, which has none; see below
            ours, theirs = layer(x, present), equivariant_linear(layer, x, present)
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_map_from_order_zero_broadcasts(device):
    layer = layer_of(0, 2, device)
    mask = torch.tensor([[True, True, False]], device=device)
    x = torch.randn(1, 2, dtype=torch.float64, device=device)
    result = layer(x, mask)
    equal, other = x[0] @ layer.weight[0] + layer.bias[0], x[0] @ layer.weight[1] + layer.bias[1]
    torch.testing.assert_close(result[0, 0, 0], equal)
    torch.testing.assert_close(result[0, 0, 1], other)
    assert not result[0, 2].any()
    with pytest.raises(ValueError, match="mask must be given for a map from order 0"):
        layer(x)


@every_order
@given(nodes=st.sampled_from([4, 3, 2, 1]), seed=st.integers(0, 99), normalise=st.sampled_from([None, "counts"]))
@settings(max_examples=4)
def test_permuting_the_nodes_permutes_the_result(order_in, order_out, nodes, seed, normalise, device):
    if not order_in:
        return
    torch.manual_seed(seed)
    layer = layer_of(order_in, order_out, device, normalise=normalise)
    x = torch.randn(1, *[nodes] * order_in, 2, dtype=torch.float64, device=device)
    permutation = torch.randperm(nodes).to(device)
    ours = layer(permuted(x, order_in, permutation))
    torch.testing.assert_close(ours, permuted(layer(x), order_out, permutation), rtol=1e-9, atol=1e-9)


@every_order
@given(seed=st.integers(0, 99), share=st.sampled_from([0.3, 1.0, 0.0]), light=st.booleans())
@settings(max_examples=3)
def test_sparse_equals_dense_masked(order_in, order_out, seed, share, light, device, dtype):
    """Any hyperedges, in any order, loops anywhere; all tuples of the output that are asked for, and no others."""
    if not order_in or (light and not order_out):
        return
    torch.manual_seed(seed)
    layer = layer_of(order_in, order_out, device, dtype, lightweight=light)
    mask = torch.ones(2, 4, dtype=torch.bool, device=device)
    mask[1, 2:] = False
    present = joint(mask, order_in) & (torch.rand(2, *[4] * order_in, device=device) < share)
    x = torch.randn(2, *[4] * order_in, 2, dtype=dtype, device=device) * present[..., None]
    everything = Hyperedges.from_dense(x, mask)
    here = Hyperedges.from_dense(present[..., None].to(dtype), mask).values[:, 0] > 0
    order = torch.randperm(int(here.sum())).to(device)
    edges = Hyperedges(everything.indices[here][order], everything.values[here][order], 6, everything.batch, 2)
    dense = layer(x, mask)
    sparse = layer(edges)
    rows = sparse.indices.shape[0]
    assert rows == edges.projected(order_out).shape[0]
    if order_out:
        wanted = edges.at(sparse.indices, torch.ones(rows, 1, dtype=dtype, device=device)).to_dense()[0]
        dense, sparse_dense = dense * wanted, sparse.to_dense()[0]
    else:
        sparse_dense = sparse.values
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(sparse_dense, dense, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("options", [{}, {"lightweight": True}, {"normalise": "counts"}], ids=str)
def test_what_no_hyperedge_meets_is_left_out_of_the_work_and_nothing_else(order, options, device):
    """Ascending tuples of different nodes, asked for at some of themselves, turned ones, and ones nobody lists."""
    layer = layer_of(order, order, device, **options)
    listed = torch.combinations(torch.arange(5), order)[::2].to(device)
    values = torch.randn(len(listed), 2, dtype=torch.float64, device=device, requires_grad=True)
    edges = Hyperedges(listed, values, 5)
    asked = torch.cat([listed[1:], listed[:2].flip(1), torch.zeros_like(listed[:1]), listed[:1] * 0 + 4])
    sparse = layer(edges, to=asked).values
    dense = layer(edges.to_dense()[0])[0][tuple(asked.T)]
    torch.testing.assert_close(sparse, dense, rtol=1e-9, atol=1e-9)
    factor = torch.randn_like(sparse)
    ends = [values, *layer.parameters()]
    ours, theirs = (torch.autograd.grad((y * factor).sum(), ends, retain_graph=True) for y in (sparse, dense))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if options == {"lightweight": True}:
        size, sources, targets = 0, 0, 0
        for planned, left_in, left_out in pruned_plans(edges.plan, edges.plan, layer.groups):
            size, sources, targets = size + planned.size, sources + len(left_in), targets + len(left_out)
        assert (size, sources, targets) == (len(listed), 1, 1)


@every_order
def test_sparse_gradients_equal_dense_ones(order_in, order_out, device):
    if not order_in:
        return
    layer = layer_of(order_in, order_out, device, normalise="counts" if order_in == 2 else None)
    x = torch.randn(2, *[3] * order_in, 2, dtype=torch.float64, device=device, requires_grad=True)
    edges = Hyperedges.from_dense(x)
    all_tuples = Hyperedges.from_dense(x.new_zeros(2, *[3] * order_out, 1)).indices if order_out else None
    sparse, dense = layer(edges, to=all_tuples).values, layer(x)
    factor = torch.randn_like(sparse)
    ours = torch.autograd.grad((sparse * factor).sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad((dense.reshape(sparse.shape) * factor).sum(), [x, *layer.parameters()])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def number_of_orbits(nodes, order):
    """Burnside: the mean over all permutations of the number of multi-indices that they fix."""
    permutations = list(itertools.permutations(range(nodes)))
    return sum(sum(p[v] == v for v in range(nodes)) ** order for p in permutations) // len(permutations)


@pytest.mark.parametrize(("order_in", "order_out"), [(1, 1), (2, 1), (2, 2), (1, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_span_has_as_many_dimensions_as_there_are_orbits(order_in, order_out, nodes):
    """Burnside: 14, not 15, for 2 -> 2 at three nodes."""
    maps = []
    count = bell(order_in + order_out)
    basis = torch.eye(nodes**order_in, dtype=torch.float64).reshape(-1, *[nodes] * order_in, 1)
    layer = EquivariantLinear(order_in, order_out, 1, 1, bias=False, dtype=torch.float64)
    for index in range(count):
        with torch.no_grad():
            layer.weight.zero_()[index] = 1.0
            maps.append(layer(basis).flatten())
    assert torch.linalg.matrix_rank(torch.stack(maps)) == number_of_orbits(nodes, order_in + order_out)
    if (order_in, order_out, nodes) == (2, 2, 3):
        assert number_of_orbits(nodes, 4) == 14


def test_entries_and_sums_over_500_nodes_are_drawn_with_half_of_the_variance_each():
    assert torch.allclose(EquivariantLinear(1, 1, 64, 64).weight.var((1, 2)) * 64, torch.tensor([0.5, 0.001]), rtol=0.1)


@pytest.mark.parametrize("order_out", [1, 2])
@pytest.mark.parametrize("normalise", [None, "counts"])
def test_initialisation_keeps_the_variance_from_5_to_500_nodes(order_out, normalise, device):
    torch.manual_seed(0)
    layers = [EquivariantLinear(2, order_out, 16, 16, normalise=normalise, device=device) for _ in range(4)]
    for nodes in (5, 50, 500 if order_out == 1 else 200):
        x = torch.randn(1, nodes, nodes, 16, device=device)
        variance = sum(layer(x).var().item() for layer in layers) / 4
        assert 0.25 < variance < 2.5


@pytest.mark.parametrize("filling", [1e30, float("inf"), float("nan")])
@pytest.mark.parametrize(("order_in", "order_out"), [(1, 2), (2, 2), (2, 0), (3, 1)], ids=str)
def test_padding_has_no_effect(order_in, order_out, filling, device):
    layer = layer_of(order_in, order_out, device, normalise="counts" if order_in == 1 else None)
    mask = torch.tensor([[True, True, False, True]], device=device)
    x = torch.randn(1, *[4] * order_in, 2, dtype=torch.float64, device=device)
    spoiled = torch.where(joint(mask, order_in)[..., None], x, filling)
    kept = torch.tensor([0, 1, 3], device=device)
    alone = layer(permuted(x, order_in, kept))
    result = layer(spoiled, mask)
    torch.testing.assert_close(permuted(result, order_out, kept), alone)
    assert result.isfinite().all()


@pytest.mark.parametrize("order_out", [0, 1, 2])
def test_means_over_many_pairs_in_float16(order_out):
    """Their number is none of float16; the mean was zero."""
    layer = EquivariantLinear(2, order_out, 2, 3, normalise="counts")
    x = torch.randn(300, 300, 2)
    expected = layer(x)
    result = layer.half()(x.half())
    assert (result.float() - expected).norm() < 0.02 * expected.norm()


def test_graphs_of_a_batch_do_not_meet(device):
    """Each graph of a sparse batch alone gives the same rows."""
    layer = layer_of(2, 2, device, normalise="counts")
    one = Hyperedges.from_dense(torch.randn(1, 3, 3, 2, dtype=torch.float64, device=device))
    two = Hyperedges.from_dense(torch.randn(1, 4, 4, 2, dtype=torch.float64, device=device) * 1e3)
    batch = torch.tensor([0] * 3 + [1] * 4, device=device)
    both = Hyperedges(torch.cat([one.indices, two.indices + 3]), torch.cat([one.values, two.values]), 7, batch)
    torch.testing.assert_close(layer(both).values[:9], layer(one).values)
    torch.testing.assert_close(layer(both).values[9:], layer(two).values)


@pytest.mark.parametrize(("order_in", "order_out"), [(1, 0), (1, 2), (2, 1), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("lightweight", [False, True])
def test_the_way_back_is_that_of_the_plain_form(order_in, order_out, lightweight, device):
    """Gradients of both orders; the result may be changed in place, and without gradients of x there is none."""
    if lightweight and not order_out:
        return
    layer = EquivariantLinear(
        order_in, order_out, 2, 3, lightweight=lightweight, device=device, dtype=torch.float64
    )  # fmt: skip
    x = torch.randn(2, *[3] * order_in, 2, dtype=torch.float64, device=device, requires_grad=True)
    names = ("weight", "bias")

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)

    leaves = (x, *(getattr(layer, name) for name in names))
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    [expected] = torch.autograd.grad(layer(x).mul(2).square().sum(), layer.weight)
    torch.testing.assert_close(torch.autograd.grad(layer(x.detach()).mul_(2).square().sum(), layer.weight)[0], expected)


@every_order
@pytest.mark.parametrize("lightweight", [False, True])
@pytest.mark.parametrize("batch", [(), (2, 1)], ids=str)
def test_gradients_written_by_hand_are_those_of_the_definition(order_in, order_out, lightweight, batch, device):
    """Of every tensor by name, and of a result that is then changed in place."""
    if not order_in or (lightweight and not order_out):
        return
    layer = layer_of(order_in, order_out, device, lightweight=lightweight)
    x = torch.randn(*batch, *[3] * order_in, 2, dtype=torch.float64, device=device)
    leaves = {"x": x, **dict(layer.named_parameters())}

    def loss(leaves):
        parameters = {name: value for name, value in leaves.items() if name != "x"}
        return torch.func.functional_call(layer, parameters, leaves["x"]).mul_(2).sin().sum()

    expected = torch.func.grad(loss)({name: value.detach() for name, value in leaves.items()})  # takes the definition
    found = torch.autograd.grad(loss(leaves | {"x": x.requires_grad_()}), list(leaves.values()))
    for name, grad in zip(leaves, found, strict=True):
        torch.testing.assert_close(grad, expected[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.usefixtures("without_shape_checks")
def test_wrong_input_gets_one_sentence():
    layer = EquivariantLinear(2, 1, 3, 4)
    with pytest.raises(
        ValueError, match=r"x must have shape \(\*batch, nodes, nodes, features = 3\), got \(2, 5, 4, 3\)"
    ):
        layer(torch.zeros(2, 5, 4, 3))
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 5\), got \(5,\)"):
        layer(torch.zeros(2, 5, 5, 3), torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="to must be None for a dense tensor"):
        layer(torch.zeros(2, 5, 5, 3), to=torch.zeros(1, 1, dtype=torch.int64))
    edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 2), 2)
    with pytest.raises(ValueError, match="x must be hyperedges of order 2 with 3 features, got order 2 with 2"):
        layer(edges)
    with pytest.raises(ValueError, match="mask must be None for hyperedges"):
        layer(edges, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"to must have shape \(tuples, 1\), got \(1, 2\)"):
        layer(edges.with_values(torch.ones(1, 3)), to=torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="order_out must be at least 0, got -1"):
        EquivariantLinear(1, -1, 3, 4)
    with pytest.raises(TypeError, match=r"order_in must be an integer from 0 on, got 1\.0 of type float"):
        EquivariantLinear(1.0, 1, 3, 4)
    with pytest.raises(TypeError, match=r"mask must be boolean, True at nodes, got torch\.float32"):
        layer(torch.zeros(2, 5, 5, 3), torch.ones(2, 5))
    with pytest.raises(ValueError, match="lightweight must be False for a map to order 0"):
        EquivariantLinear(2, 0, 3, 4, lightweight=True)
    with pytest.raises(ValueError, match="normalise must be one of 'counts', got 'mean'"):
        EquivariantLinear(2, 0, 3, 4, normalise="mean")


def test_transformations_of_functions_take_the_plain_form():
    torch.manual_seed(0)
    layer, x = EquivariantLinear(2, 2, 3, 4), torch.randn(2, 4, 4, 3)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))
    out, along = torch.func.jvp(layer, (x,), (x,))
    torch.testing.assert_close(along, out - layer(torch.zeros_like(x)))


@pytest.mark.parametrize("orders", [(5, 5), (9, 0), (4, 5)])
def test_orders_whose_classes_fill_the_memory_are_refused(orders):
    with pytest.raises(
        ValueError, match=r"^order_in \+ order_out must be at most 8, got \d \+ \d, which has \d+ classes"
    ):
        EquivariantLinear(*orders, 1, 1)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("order_out", [0, 1])
def test_sums_of_more_terms_than_float16_counts(order_out, sparse):
    """In float16 throughout, and under its autocast."""
    layer = EquivariantLinear(2, order_out, 1, 2, normalise="counts").double()
    x = 1 + torch.rand(1, 300, 300, 1, dtype=torch.float64)

    def called(layer, x):
        return layer(Hyperedges.from_dense(x)).values.reshape(-1, 2) if sparse else layer(x).reshape(-1, 2)

    expected = called(layer, x)
    half = called(copy.deepcopy(layer).half(), x.half())
    with torch.autocast("cpu", dtype=torch.float16):
        mixed = called(copy.deepcopy(layer).float(), x.float())
    for result in (half, mixed):
        assert result.dtype == torch.float16
        torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=1e-2)


def test_gradients_of_means_in_float16():
    """They were nan: sums of 3,000 edges times gradients that only means have, in classes that have no weight."""
    hub, others, found = torch.zeros(1499, dtype=torch.int64), torch.arange(1, 1500), []
    edges = torch.stack([torch.cat([hub, others]), torch.cat([others, hub])], 1)
    layer, values = EquivariantLinear(2, 2, 3, 4, normalise="counts").half(), 1 + torch.rand(2998, 3).half()
    for kind in (torch.float16, torch.float64):
        result = layer.to(kind)(Hyperedges(edges, 8 * values.to(kind), 1500)).values
        found += torch.autograd.grad(result.sum(), layer.weight)
    assert (found[0].double() - found[1]).norm() < 1e-2 * found[1].norm()
