"""Tokens and their transformer: layout, batches, order of edges, degenerate graphs, large logits, random depth."""

from __future__ import annotations

import math

import pytest
import torch

from holonomy.layers import (
    GraphTokenizer,
    HyperedgeTokenizer,
    TokenAttention,
    TokenEncoderLayer,
    basis_residual,
    orthogonal_identifiers,
    set_partitions,
)
from holonomy.layers.equivariant.basis.partitions import equality_classes
from holonomy.layers.tokens.encoder import stochastic_depth
from holonomy.layers.tokens.tokenizer import Tokens

D = torch.float64
# Two graphs, their nodes mixed, the second with a self-loop; a third without edges.
BATCH = torch.tensor([0, 1, 0, 0, 1, 2])
EDGES = torch.tensor([[0, 2, 2, 3, 1, 4, 4], [2, 0, 3, 2, 4, 1, 4]])


def batched(dtype=D):
    return torch.randn(6, 3, dtype=dtype), EDGES, torch.randn(7, 2, dtype=dtype), BATCH


def tokenizer(dtype=D, **options):
    options = {"edge_features": 2, "identifiers": "orthogonal", "identifier_dim": 4} | options
    return GraphTokenizer(3, 8, **options, dtype=dtype)


def test_each_part_of_a_token_is_drawn_with_the_same_variance():
    """A new tokenizer and one that is drawn again: k + 2 parts, each from a vector of squared length as said."""
    module = HyperedgeTokenizer(3, 60, 80, identifier_dim=20, type_features=90)
    for _ in range(2):
        for linear, square in (
            (module.of_hyperedges, 60),
            (module.embedding.of_identifiers, 1),
            (module.embedding.of_types, 1),
        ):
            assert linear.weight.std().item() == pytest.approx((5 * square) ** -0.5, rel=0.05)
        module.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_classes_follow_the_partitions(order):
    strings = torch.tensor(set_partitions(order))
    assert equality_classes(strings).tolist() == list(range(len(strings)))
    nodes = torch.randperm(50)[:order]
    assert equality_classes(nodes[strings]).tolist() == list(range(len(strings)))


def test_each_row_is_the_graph_alone():
    """A batch's row is the tokens of that graph by itself, then zeros; listed slots lead to them."""
    x, edges, attr, batch = batched()
    module, p = tokenizer(), torch.randn(6, 4, dtype=D)
    tokens = module(x, edges, batch, edge_attr=attr, identifiers=p)
    assert tokens.padding.tolist() == [
        [False] * 8,
        [False] * 6 + [True] * 2,
        [False] * 2 + [True] * 6,
    ]
    for graph in range(3):
        nodes = (batch == graph).nonzero()[:, 0]
        chosen = batch[edges[0]] == graph
        renumbered = torch.searchsorted(nodes, edges[:, chosen])
        alone = module(x[nodes], renumbered, edge_attr=attr[chosen], identifiers=p[nodes])
        torch.testing.assert_close(tokens.values[graph][~tokens.padding[graph]], alone.values[0])
        assert not tokens.values[graph][tokens.padding[graph]].any()
        assert not alone.padding.any()
        torch.testing.assert_close(tokens.rows(tokens.values)[:6][nodes], alone.rows(alone.values)[: len(nodes)])
    torch.testing.assert_close(tokens.rows(tokens.padding[..., None].float()), torch.zeros(13, 1))
    assert tokens.num_nodes == 6


def test_the_gradient_of_types_is_a_sum_over_more_tokens_than_bfloat16_counts():
    path, found = torch.stack([torch.arange(1999), torch.arange(1, 2000)]), []
    tokenizer = GraphTokenizer(0, 8, identifiers=None).bfloat16()
    for kind in (torch.bfloat16, D):
        values = tokenizer.to(kind)(torch.zeros(2000, 0, dtype=kind), path).values
        found += torch.autograd.grad(values.sum(), tokenizer.embedding.type_identifiers)
    torch.testing.assert_close(found[0].to(D), found[1], rtol=2e-2, atol=1e-2 * found[1].abs().max().item())


def test_a_self_loop_is_an_edge_of_the_nodes_type():
    module = tokenizer(identifier_dim=None, identifiers=None)
    loop = torch.tensor([[0, 0], [0, 1]])
    tokens = module(torch.zeros(2, 3, dtype=D), loop, edge_attr=torch.zeros(2, 2, dtype=D))
    graph, first, second, self_loop, edge = tokens.values[0]
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(self_loop, first)
    assert not torch.allclose(edge, first)
    assert not torch.allclose(graph, first)
    with_features = module(torch.zeros(2, 3, dtype=D), loop, edge_attr=torch.ones(2, 2, dtype=D))
    torch.testing.assert_close(with_features.values[0, 3] - self_loop, module.of_edges(torch.ones(2, dtype=D)))


def test_a_graph_is_the_hypergraph_of_order_two():
    graph, hyper = tokenizer(edge_features=3), HyperedgeTokenizer(2, 3, 8, identifier_dim=4, dtype=D)
    graph.of_edges.load_state_dict(graph.of_nodes.state_dict())
    state = {name.replace("of_nodes", "of_hyperedges"): value for name, value in graph.state_dict().items()}
    hyper.load_state_dict({name: value for name, value in state.items() if "of_edges" not in name})
    x, attr, p = torch.randn(6, 3, dtype=D), torch.randn(7, 3, dtype=D), torch.randn(6, 4, dtype=D)
    tokens = graph(x, EDGES, BATCH, edge_attr=attr, identifiers=p)
    theirs = hyper(tokens.indices, torch.cat([x, attr]), 6, BATCH, p)
    torch.testing.assert_close(theirs.values, tokens.values, rtol=0, atol=0)
    assert torch.equal(theirs.slots, tokens.slots)
    assert theirs.num_nodes == 0


@pytest.mark.usefixtures("without_shape_checks")
def test_each_hyperedge_has_a_row_of_values():
    """One hyperedge with two rows would be two tokens of one place."""
    module = HyperedgeTokenizer(3, 2, 8)
    with pytest.raises(ValueError, match=r"^values must have shape \(edges, in_features\) = \(1, 2\), got \(2, 2\)\.$"):
        module(torch.tensor([[0, 1, 2]]), torch.ones(2, 2), 3)
    for indices in (torch.tensor([0, 1, 2]), torch.tensor([[0, 1]])):
        with pytest.raises(ValueError, match=r"^indices must have shape \(edges, order = 3\), got \("):
            module(indices, torch.ones(1, 2), 3)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("identifiers", ["orthogonal", None])
def test_hyperedges_have_nodes_that_are_there(identifiers):
    """-1 was the last node."""
    module = HyperedgeTokenizer(2, 1, 4, identifiers=identifiers)
    for node in (-1, 3):
        with pytest.raises(ValueError, match=r"^indices must lie in \[0, num_nodes = 3\), got "):
            module(torch.tensor([[0, node]]), torch.ones(1, 1), 3)
    with pytest.raises(TypeError, match=r"^indices must hold integers, got torch\.float32"):
        module(torch.ones(1, 2), torch.ones(1, 1), 3)


def test_hypergraphs_without_hyperedges_keep_their_row():
    module = HyperedgeTokenizer(3, 1, 4)
    tokens = module(torch.tensor([[1, 1, 2]]), torch.ones(1, 1), 4, torch.tensor([0, 1, 1, 2]))
    assert tokens.padding.tolist() == [[False, True], [False, False], [False, True]]
    torch.testing.assert_close(tokens.values[2, 0], module.graph_token)


def test_laplacian_tokens_flip_signs_in_training_only():
    x, edges, attr, batch = batched()
    module = tokenizer(identifiers="laplacian", eigenvector_dropout=0.5)
    drawn = [module(x, edges, batch, edge_attr=attr).values for _ in range(2)]
    assert not torch.equal(*drawn)
    module.eval()
    torch.testing.assert_close(*(module(x, edges, batch, edge_attr=attr).values for _ in range(2)), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["laplacian", "laplacian_both", "orthogonal", "near_orthogonal"])
def test_drawn_identifiers_are_those_of_each_graph(kind):
    """Through the tokens of a batch: products of what identifiers add tell which tokens share a node."""
    x, edges, attr, batch = batched()
    torch.manual_seed(3)
    module = tokenizer(identifiers=kind, type_features=0).eval()
    torch.manual_seed(4)
    tokens = module(0 * x, edges, batch, edge_attr=0 * attr)
    rows = tokens.rows(tokens.values)
    back = torch.linalg.pinv(module.embedding.of_identifiers.weight)  # (8, 8): invertible
    recovered = (rows @ back.mT)[:6]
    torch.testing.assert_close(recovered[:, :4], recovered[:, 4:])
    p = recovered[:, :4]
    for graph in range(3):
        gram = p[batch == graph] @ p[batch == graph].mT
        if kind != "near_orthogonal":
            torch.testing.assert_close(gram, torch.eye(len(gram), dtype=D))
        torch.testing.assert_close(gram.diagonal(), torch.ones(len(gram), dtype=D))
    edge = (rows @ back.mT)[6:]
    torch.testing.assert_close(edge, torch.cat([p[edges[0]], p[edges[1]]], 1))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"identifiers": "sine"}, "^identifiers must be one of .*, got 'sine'"),
        ({"identifiers": None}, "^identifier_dim must be None when identifiers is None, got 4"),
        ({"eigenvector_dropout": 0.1}, "^eigenvector_dropout must be 0 when identifiers are 'orthogonal', got 0.1"),
        ({"identifier_dim": 0}, "^identifier_dim must be a positive integer, got 0"),
        ({"type_features": -1}, "^type_features must be at least 0, got -1"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tokenizer(**options)


@pytest.mark.usefixtures("without_shape_checks")
def test_the_door_says_what_does_not_fit():
    x, edges, attr, batch = batched()
    with pytest.raises(ValueError, match=r"edge_attr must have shape \(edges, edge_features = 2\), got None"):
        tokenizer()(x, edges, batch)
    with pytest.raises(
        ValueError, match=r"edge_attr must be None in what was made without edge_features, got \(7, 2\)"
    ):
        tokenizer(edge_features=0)(x, edges, batch, edge_attr=attr)
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., in_features = 3\), got \(6, 2\)"):
        tokenizer()(x[:, :2], edges, batch, edge_attr=attr)
    with pytest.raises(
        ValueError, match=r"identifiers must have shape \(nodes, identifier_dim\) = \(6, 4\), got \(6, 3\)"
    ):
        tokenizer()(x, edges, batch, edge_attr=attr, identifiers=x)
    without = tokenizer(identifiers=None, identifier_dim=None)
    with pytest.raises(ValueError, match=r"identifiers must be None for a tokenizer without, got Tensor"):
        without(x, edges, batch, edge_attr=attr, identifiers=x)


def test_basis_residual_against_a_loop():
    """X_ii + sum_{j != i} X_ij in a batch; loops, edges and [graph] stay."""
    x, edges, attr, batch = batched()
    tokens = tokenizer()(x, edges, batch, edge_attr=attr)
    values = torch.randn_like(tokens.values).requires_grad_()
    ours = basis_residual(values, tokens)
    rows = list(tokens.rows(values).unbind())
    expected = list(rows)
    for e, (u, v) in enumerate(edges.t().tolist()):
        if u != v:
            expected[u] = expected[u] + rows[6 + e]
    expected = values.flatten(0, 1).index_copy(0, tokens.slots, torch.stack(expected)).reshape(values.shape)
    torch.testing.assert_close(ours, expected)
    ours_grad, their_grad = (torch.autograd.grad(y.square().sum(), values)[0] for y in (ours, expected))
    torch.testing.assert_close(ours_grad, their_grad)


def test_basis_residual_without_edges_changes_nothing():
    layout = Tokens(torch.randn(1, 2, 3), torch.zeros(1, 2) > 0, torch.tensor([[0, 0]]), torch.tensor([1]), 1)
    assert torch.equal(basis_residual(layout.values, layout), layout.values)


# The transformer.


@pytest.mark.parametrize("kernel", ["softmax", "performer"])
def test_weights_are_what_attention_averages_with(kernel, dtype):
    module = TokenAttention(6, 2, kernel=kernel, dtype=dtype)
    x, mask = torch.randn(3, 5, 6, dtype=dtype), torch.zeros(3, 5) > 0
    mask[1, 3:], mask[2] = True, True
    weights = module.weights(x, mask)
    assert weights.shape == (3, 2, 5, 5)
    torch.testing.assert_close(weights.sum(-1), (~mask).to(dtype)[:, None].expand(3, 2, 5))
    assert not weights[1, ..., 3:].any()
    assert not weights[2].any()
    value = module.value(x.masked_fill(mask[..., None], 0.0)).unflatten(-1, (2, 3)).transpose(1, 2)
    torch.testing.assert_close(module.out((weights @ value).transpose(1, 2).flatten(2)), module(x, mask))
    unmasked = module.weights(x)
    torch.testing.assert_close(unmasked.sum(-1), torch.ones(3, 2, 5, dtype=dtype))


def test_without_types_no_query_tells_nodes_from_edges():
    """Logits are linear in [P_u, P_v]: a_ij a_ji = a_ii a_jj for any weights and identifiers (TokenGT table 1)."""
    both = torch.tensor([[0, 1], [1, 0]])
    ratios = []
    for width in (0, None):
        tokens = GraphTokenizer(0, 8, identifiers="orthogonal", type_features=width, dtype=D)(torch.zeros(2, 0), both)
        _, ii, jj, ij, ji = TokenAttention(8, 3, head_features=4, dtype=D).weights(tokens.values)[0].unbind(-1)
        ratios.append(ij * ji / (ii * jj))
    torch.testing.assert_close(ratios[0], torch.ones(3, 5, dtype=D))
    assert (ratios[1] - 1).abs().min() > 1e-3


@pytest.mark.parametrize("attention", ["softmax", "performer"])
@pytest.mark.parametrize("filling", [1e30, math.inf, math.nan])
def test_a_graph_of_nothing_but_padding_gives_no_nan(attention, filling, dtype):
    module = TokenEncoderLayer(6, 2, attention=attention, dtype=dtype)
    x, mask = torch.full((2, 3, 6), filling, dtype=dtype), torch.ones(2, 3) > 0
    x[0], mask[0] = torch.randn(3, 6, dtype=dtype), False
    x.requires_grad_()
    result = module(x, mask)
    torch.testing.assert_close(result[:1], module(x[:1]))
    assert result.isfinite().all()
    (grad,) = torch.autograd.grad(result.square().sum(), x)
    assert grad.isfinite().all()
    assert not grad[1].any()


@pytest.mark.parametrize("kernel", ["softmax", "performer"])
def test_logits_of_ten_thousand(kernel, dtype):
    """Finite averages and gradients, and for softmax the value of the one key that wins."""
    module = TokenAttention(4, 1, kernel=kernel, dtype=dtype)
    with torch.no_grad():
        for linear in (module.query, module.key):
            linear.weight.copy_(torch.eye(4) * 2e4**0.5)
        module.query.bias.zero_()
    x = torch.eye(4, dtype=dtype).requires_grad_()
    result = module(x)
    assert result.isfinite().all()
    if kernel == "softmax":
        torch.testing.assert_close(result, module.out(module.value(x)))
    for grad in torch.autograd.grad(result.square().sum(), [x, module.query.weight, module.key.weight]):
        assert grad.isfinite().all()


def test_performer_attention_approaches_softmax():
    torch.manual_seed(1)
    exact, kernel = (
        TokenAttention(8, 2, dtype=D),
        TokenAttention(8, 2, kernel="performer", random_features=8192, dtype=D),
    )
    kernel.load_state_dict(exact.state_dict() | {"projection": kernel.projection})
    x = torch.randn(2, 7, 8, dtype=D)
    assert (kernel(x) - exact(x)).norm() < 0.02 * exact(x).norm()
    before, first = kernel.projection.clone(), kernel(x)
    kernel.redraw(torch.Generator().manual_seed(0))
    assert not torch.equal(before, kernel.projection)
    assert not torch.equal(first, kernel(x))
    again = kernel.projection.clone()
    kernel.redraw(torch.Generator().manual_seed(0))
    assert torch.equal(again, kernel.projection)
    exact.redraw()
    assert exact.projection is None


def test_stochastic_depth_drops_whole_graphs():
    branch = torch.randn(5000, 2, 3, dtype=D)
    dropped = stochastic_depth(branch, 0.25, training=True)
    gone = (dropped == 0).flatten(1)
    assert torch.equal(gone.all(1), gone.any(1))
    assert abs(gone.all(1).double().mean() - 0.25) < 0.03
    kept = ~gone.all(1)
    torch.testing.assert_close(dropped[kept] * 0.75, branch[kept])
    assert torch.equal(stochastic_depth(branch, 0.25, training=False), branch)
    layer = TokenEncoderLayer(6, 2, stochastic_depth=1.0)
    x = torch.randn(2, 4, 6)
    assert torch.equal(layer(x), x)
    assert not torch.equal(layer.eval()(x), x)


def test_attention_dropout_drops_weights_in_training():
    module = TokenAttention(6, 2, dropout=0.9)
    x = torch.randn(4, 6)
    assert not torch.equal(module(x), module(x))
    module.eval()
    whole = TokenAttention(6, 2)
    whole.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), whole(x), rtol=0, atol=0)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenAttention(6, 4), "features must be a multiple of heads, got 6 and 4"),
        (lambda: TokenAttention(6, 2, kernel="cosine"), "kernel must be one of"),
        (lambda: TokenAttention(6, 2, random_features=4), "random_features must be None with kernel 'softmax', got 4"),
        (lambda: TokenAttention(6, 2, kernel="performer", dropout=0.1), "dropout must be 0 with kernel 'performer'"),
        (
            lambda: TokenEncoderLayer(6, 2, attention="performer", attention_dropout=0.1),
            "attention_dropout must be 0 with attention 'performer', got 0.1",
        ),
        (lambda: TokenEncoderLayer(6, 2, stochastic_depth=1.5), "stochastic_depth must lie in"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_orthogonal_identifiers_fill_a_batch_once():
    """The tokenizer's random identifiers come from torch's seeded state."""
    x, edges, attr, batch = batched()
    module = tokenizer()
    torch.manual_seed(9)
    first = module(x, edges, batch, edge_attr=attr).values
    torch.manual_seed(9)
    p = orthogonal_identifiers(6, 4, batch=batch, dtype=D)
    torch.testing.assert_close(module(x, edges, batch, edge_attr=attr, identifiers=p).values, first, rtol=0, atol=0)
