"""GCN and weightless propagation: the matrix they multiply with, its transpose, sparse features."""

from __future__ import annotations

import pytest
import torch

from holonomy.layers import GCN, Propagation
from holonomy.ops.csr import as_csr
from holonomy.ops.propagation import normalised_edges, propagation
from holonomy.structures import Graph

D = torch.float64


def random_edges(nodes: int, edges: int) -> torch.Tensor:
    return torch.randint(0, nodes, (2, edges))


def matrix(edge_index: torch.Tensor, nodes: int) -> torch.Tensor:
    dense = torch.zeros(nodes, nodes, dtype=D)
    for source, target in edge_index.t().tolist():
        if source != target:
            dense[target, source] += 1
    dense += torch.eye(nodes, dtype=D)
    degree = dense.sum(1)
    return dense / (degree[:, None] * degree).sqrt()


@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (1, 3), (4, 0), (7, 5), (7, 40)])
def test_propagation_is_the_matrix_and_its_gradient_the_transpose(nodes, edges):
    """Directed, with self-loops, repeated edges and isolated nodes."""
    edge_index = random_edges(nodes, edges)
    x = torch.randn(nodes, 3, dtype=D, requires_grad=True)
    direction = torch.randn(nodes, 3, dtype=D)
    y = propagation(edge_index, nodes, D)(x)
    torch.testing.assert_close(y, matrix(edge_index, nodes) @ x)
    (gradient,) = torch.autograd.grad((y * direction).sum(), x)
    torch.testing.assert_close(gradient, matrix(edge_index, nodes).T @ direction)


@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (1, 3), (4, 0), (7, 5), (7, 40)])
def test_propagation_with_weights_is_the_matrix_with_gradients_for_both(nodes, edges):
    """A listed self-loop keeps its weight; a node whose weights sum to nothing gives and takes nothing."""
    edge_index = random_edges(nodes, edges)
    weight = torch.rand(edge_index.shape[1], dtype=D).add(0.1).requires_grad_()
    x = torch.randn(nodes, 3, dtype=D, requires_grad=True)
    listed, dense = set(), torch.zeros(nodes, nodes, dtype=D)
    for (source, target), entry in zip(edge_index.t().tolist(), weight.tolist(), strict=True):
        dense[target, source] += entry
        listed |= {source} if source == target else set()
    for node in set(range(nodes)) - listed:
        dense[node, node] = 1
    degree = dense.sum(1)
    expected = dense / (degree[:, None] * degree).sqrt() @ x
    torch.testing.assert_close(propagation(edge_index, nodes, D, weight)(x), expected)
    assert torch.autograd.gradcheck(lambda x, weight: propagation(edge_index, nodes, D, weight)(x), (x, weight))


def test_weights_that_cancel_leave_a_node_out():
    pair, weight = torch.tensor([[0, 1, 2, 1], [1, 0, 1, 2]]), torch.tensor([0.5, -1.0, 0.5, 1.0], requires_grad=True)
    result = propagation(pair, 3, torch.float32, weight)(torch.ones(3, 1))
    assert result[0].item() == 0
    assert result.isfinite().all()
    (gradient,) = torch.autograd.grad(result.sum(), weight)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("build", [GCN, Propagation])
@pytest.mark.usefixtures("without_shape_checks")
def test_weights_of_one_are_no_weights_and_wrong_ones_get_one_sentence(build):
    edge_index, layer = random_edges(7, 20), build(4, 8, 3, dtype=D).eval()
    x, ones = torch.randn(7, 4, dtype=D), torch.ones(20, dtype=D)
    distinct = edge_index[:, edge_index[0] != edge_index[1]]
    torch.testing.assert_close(layer(x, distinct, ones[: distinct.shape[1]]), layer(x, distinct))
    with pytest.raises(ValueError, match=r"^edge_weight must have shape \(edges,\) = \(20,\), got \(19,\)"):
        layer(x, edge_index, ones[1:])
    with pytest.raises(TypeError, match=r"^edge_weight must be a floating-point tensor, got torch\.int64"):
        layer(x, edge_index, ones.long())
    with pytest.raises(ValueError, match=r"^edge_weight must be None beside a Graph"):
        layer(x, Graph(edge_index, 7), ones)


def test_the_form_that_is_compiled_is_the_same(monkeypatch):
    edge_index, x = random_edges(9, 30), torch.randn(9, 4, dtype=D, requires_grad=True)
    layer = GCN(4, 8, 3, dtype=D)
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda now=compiling: now)
        y = layer(x, edge_index)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiling", [False, True])
def test_a_node_of_many_neighbours_in_half_precision(half, compiling, monkeypatch):
    """One by one, bfloat16 counts to 256 and no further."""
    leaves = torch.arange(1, 4000)
    star = torch.stack([leaves, torch.zeros_like(leaves)])
    star = torch.cat([star, star.flip(0)], 1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x = torch.rand(4000, 1)
    narrow = propagation(star, 4000, half)(x.to(half))
    torch.testing.assert_close(narrow.float(), propagation(star, 4000, torch.float32)(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("build", [GCN, Propagation])
def test_the_form_that_is_compiled_takes_autocast(build, monkeypatch):
    layer, edge_index, x = build(4, 8, 3), random_edges(9, 30), torch.randn(9, 4)
    expected = layer(x, edge_index)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x, edge_index)
    torch.testing.assert_close(result.float(), expected, rtol=5e-2, atol=5e-2)


def test_weights_of_a_path():
    path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    source, target, weight = normalised_edges(path, 3, D)
    dense = torch.zeros(3, 3, dtype=D).index_put((target, source), weight)
    a, b = 1 / 2, 6**-0.5
    expected = torch.tensor([[a, b, 0], [b, 1 / 3, b], [0, b, a]], dtype=D)
    torch.testing.assert_close(dense, expected)


def test_a_self_loop_counts_once_and_an_edge_as_often_as_it_is_listed():
    x = torch.eye(2, dtype=D)
    one = propagation(torch.tensor([[0, 0, 0], [0, 0, 1]]), 2, D)(x)
    torch.testing.assert_close(one, propagation(torch.tensor([[0], [1]]), 2, D)(x))
    twice = propagation(torch.tensor([[0, 0], [1, 1]]), 2, D)(x)
    torch.testing.assert_close(twice[1], torch.tensor([2 / 3**0.5, 1 / 3], dtype=D))


def test_propagation_without_gradients_is_the_same():
    edge_index, x = random_edges(9, 30), torch.randn(9, 4)
    layer = GCN(4, 8, 3)
    with torch.no_grad():
        quiet = layer(x, edge_index)
    torch.testing.assert_close(quiet, layer(x, edge_index).detach(), rtol=0, atol=0)


def test_a_propagation_made_without_gradients_has_the_right_one():
    """Its way back was that of a symmetric matrix."""
    edge_index, x = random_edges(9, 30), torch.randn(9, 4, dtype=D, requires_grad=True)
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            made = propagation(edge_index, 9, D)
        (gradient,) = torch.autograd.grad(made(x).sum(), x)
        torch.testing.assert_close(gradient, matrix(edge_index, 9).sum(0)[:, None].expand(9, 4))


def test_enough_steps_solve_the_linear_system():
    """Z = alpha (I - (1 - alpha) A)^-1 H."""
    edge_index = random_edges(6, 8)
    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    layer = Propagation(4, 8, 3, steps=200, teleport=0.2, dtype=D)
    x = torch.randn(6, 4, dtype=D)
    start = layer.second(torch.relu(layer.first(x)))
    system = torch.eye(6, dtype=D) - 0.8 * matrix(edge_index, 6)
    torch.testing.assert_close(layer(x, edge_index), 0.2 * torch.linalg.solve(system, start))


def test_full_teleport_is_the_network_alone():
    layer = Propagation(4, 8, 3, teleport=1.0)
    x = torch.randn(6, 4)
    torch.testing.assert_close(layer(x, random_edges(6, 8)), layer.second(torch.relu(layer.first(x))))


def test_residual_adds_the_input():
    layer = GCN(4, 4, 4, layers=3, residual=True)
    for module in layer.convolutions:
        module.weight.data.zero_()
    layer.skips[0].weight.data.copy_(torch.eye(4))
    x = torch.rand(6, 4)
    torch.testing.assert_close(layer(x, random_edges(6, 8)), x)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: GCN(12, 5, 3, layers=3),
        lambda: GCN(12, 12, 12, residual=True),
        lambda: GCN(12, 5, 3, layers=1),
        lambda: Propagation(12, 5, 3),
    ],
    ids=["gcn", "residual", "one layer", "propagation"],
)
def test_sparse_features_give_the_same_result_and_gradients(build, layout):
    layer, edge_index = build(), random_edges(9, 30)
    dense = (torch.rand(9, 12) < 0.2) * torch.rand(9, 12)
    table = as_csr(dense.to_sparse()) if layout == "csr" else dense.to_sparse()
    results = []
    for x in (dense, table):
        y = layer(x, edge_index)
        results.append([y, *torch.autograd.grad(y.square().sum(), tuple(layer.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["dense", "coo", "csr"])
@pytest.mark.parametrize("build", [GCN, Propagation])
def test_half_precision_is_that_of_the_numbers(build, layout, half):
    """Torch has no sparse products of half numbers on a CPU: a model in bfloat16 stopped there."""
    layer, edge_index = build(12, 5, 3), random_edges(9, 30)
    x = (torch.rand(9, 12) < 0.2) * torch.rand(9, 12)
    expected = layer(x, edge_index)
    narrow = x.to(half)
    table = narrow if layout == "dense" else narrow.to_sparse() if layout == "coo" else narrow.to_sparse_csr()
    result = layer.to(half)(table, edge_index)
    assert result.dtype == half
    result.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    torch.testing.assert_close(result.float(), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("build", [GCN, Propagation])
def test_dropout_acts_in_training_only(build):
    layer = build(12, 8, 3, dropout=0.5)
    x, edge_index = torch.rand(9, 12), random_edges(9, 30)
    for features in (x, x.to_sparse()):
        layer.train()
        assert not torch.allclose(layer(features, edge_index), layer(features, edge_index))
        layer.eval()
        assert torch.equal(layer(features, edge_index), layer(features, edge_index))
    with pytest.raises(ValueError, match="dropout"):
        build(12, 8, 3, dropout=2.0)


def test_sparse_dropout_has_the_law_of_dense_dropout():
    layer = GCN(1, 4, 1, layers=1, dropout=0.25)
    layer.convolutions[0].weight.data.fill_(1.0)
    x = torch.cat([torch.ones(3000, 1), torch.zeros(1000, 1)])
    y = layer(x.to_sparse(), torch.zeros(2, 0, dtype=torch.int64))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert abs(y[:3000].mean().item() - 1) < 0.05
    assert (y[3000:] == 0).all()


@pytest.mark.parametrize("layer", [GCN(4, 8, 3, residual=True), Propagation(4, 8, 3)], ids=["GCN", "Propagation"])
def test_a_linear_map_is_called_and_not_only_read(layer):
    """Hooks fire, and what is put in its place, an adapter beside it or a quantized one, takes effect."""
    called = []
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    for module in linears:
        module.register_forward_hook(lambda module, *_: called.append(module))
    layer(torch.randn(5, 4), random_edges(5, 8))
    assert set(called) == set(linears)
