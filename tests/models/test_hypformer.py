"""Hypformer as figure 4 draws it: what each option changes, and what must not matter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from holonomy.layers import GCN
from holonomy.models import HGCN, Hypformer
from holonomy.numerics import tolerance
from holonomy.optim import RiemannianAdam


@pytest.fixture
def features(generator):
    x = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    return x * (torch.rand(9, 6, generator=generator) < 0.4)


def ring(n):
    i = torch.arange(n)
    j = (i + 1) % n
    return torch.stack([torch.cat([i, j]), torch.cat([j, i])])


@pytest.fixture
def generator():
    torch.manual_seed(3)
    return torch.Generator().manual_seed(3)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, **tolerance(ours.dtype)._asdict())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_sparse_features_give_what_dense_ones_give(features, layout):
    model = Hypformer(6, 8, 3, dtype=torch.float64)
    sparse = features.to_sparse() if layout == torch.sparse_coo else features.to_sparse_csr()
    dense_result, sparse_result = model(features, ring(9)), model(sparse, ring(9))
    close(sparse_result, dense_result)
    of_dense = torch.autograd.grad(dense_result.square().sum(), list(model.parameters()))
    of_sparse = torch.autograd.grad(sparse_result.square().sum(), list(model.parameters()))
    for ours, theirs in zip(of_sparse, of_dense, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("decoder", ["linear", "mlr", "prototypes"])
def test_a_graph_does_not_see_its_batch_mates(features, attention, decoder):
    options = {"attention": attention, "decoder": decoder, "heads": 2, "level": "graph"}
    model = Hypformer(6, 8, 3, **options, dtype=torch.float64)
    # Interleaved graphs of 5 and 4 nodes.
    batch = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0])
    first, second = (batch == 0).nonzero()[:, 0], (batch == 1).nonzero()[:, 0]
    edges = torch.cat([first[ring(5)], second[ring(4)]], dim=1)
    together = model(features, edges, batch)
    alone = [
        model(features[nodes], ring(len(nodes)), torch.zeros(len(nodes), dtype=torch.int64))
        for nodes in (first, second)
    ]
    assert together.shape == (2, 3)
    close(together, torch.cat(alone))
    # Node level: the same embedding of a node, alone or in company.
    close(model.embed(features, edges, batch)[first], model.embed(features[first], ring(5), torch.zeros(5).long()))


def test_pooling_is_the_centroid(features):
    model = Hypformer(6, 8, 3, graph_encoder=None, level="graph", dtype=torch.float64)
    batch = torch.zeros(9, dtype=torch.int64)
    centre = model.manifold_out.centroid(model.embed(features, batch=batch))
    expected = model.decoder(model.manifold_out.logmap0(centre)[1:])
    close(model(features, batch=batch)[0], expected)


def test_the_weight_mixes_the_two_branches(features):
    models = [Hypformer(6, 8, 3, graph_weight=w, dtype=torch.float64) for w in (0.0, 0.25, 1.0)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    tangent = [m.manifold_out.logmap0(m.embed(features, ring(9))) for m in models]
    close(tangent[1], 0.75 * tangent[0] + 0.25 * tangent[2])
    assert (tangent[0] - tangent[2]).abs().max() > 0.01


def test_every_layer_has_a_curvature_of_its_own_that_moves(features):
    model = Hypformer(6, 8, 3, layers=2, dtype=torch.float64)
    before = {name: value.item() for name, value in model.curvatures().items()}
    assert list(before) == [
        "input",
        "block0",
        "block0.attention",
        "block0.feedforward",
        "block1",
        "block1.attention",
        "block1.feedforward",
        "output",
    ]
    assert set(before.values()) == {-1.0}
    optimizer = RiemannianAdam(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features, ring(9)), torch.arange(9) % 3).backward()
        optimizer.step()
    after = [value.item() for value in model.curvatures().values()]
    assert all(value < 0 and value != -1.0 for value in after)
    assert len(set(after)) == len(after)


@pytest.mark.parametrize("level", ["node", "graph"])
@pytest.mark.parametrize("decoder", ["linear", "mlr"])
def test_without_a_transformer_the_curvature_learns_where_it_matters(features, level, decoder):
    options = {"transformer": False, "level": level, "decoder": decoder, "dtype": torch.float64}
    models = [Hypformer(6, 8, 3, curvature=curvature, **options) for curvature in (-1.0, -0.1)]
    weights = {name: x for name, x in models[0].state_dict().items() if "curvature_parameter" not in name}
    models[1].load_state_dict(weights, strict=False)
    results = [model(features, ring(9)) for model in models]
    results[0].square().sum().backward()
    learns = all(p.requires_grad and p.grad.abs() > 1e-9 for p in models[0].manifold_out.parameters())
    assert learns == (not torch.allclose(*results, rtol=1e-9, atol=1e-12))


def test_a_fixed_curvature_stays_and_matters(features):
    models = [Hypformer(6, 8, 3, curvature=c, learnable_curvature=False, dtype=torch.float64) for c in (-1.0, -0.01)]
    state = {k: v for k, v in models[0].state_dict().items() if "curvature_parameter" not in k}
    models[1].load_state_dict(state, strict=False)
    assert not any(p.requires_grad for n, p in models[0].named_parameters() if n.endswith("log_ratio"))
    assert (models[0](features, ring(9)) - models[1](features, ring(9))).abs().max() > 1e-3


def test_without_graph_the_transformer_is_permutation_equivariant(features):
    model = Hypformer(6, 8, 3, graph_encoder=None, dtype=torch.float64)
    order = torch.randperm(9)
    close(model(features[order]), model(features)[order])


def test_any_encoder_drops_in(features):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 8, dtype=torch.float64)

        def forward(self, x, edge_index):
            summed = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
            return self.linear(summed)

    model = Hypformer(6, 8, 3, graph_encoder=Mean(), graph_weight=1.0, dtype=torch.float64)
    close(model(features, ring(9)), model.decoder(model.graph_encoder(features, ring(9))))


def test_a_convolution_of_pytorch_geometric_drops_in(features):
    nn_of_pyg = pytest.importorskip("torch_geometric.nn", reason="the extra pyg is not installed")
    encoder = nn_of_pyg.GCN(6, 8, num_layers=2).double()
    model = Hypformer(6, 8, 3, graph_encoder=encoder, dtype=torch.float64)
    model(features, ring(9)).sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())


def test_degenerate_graphs():
    model = Hypformer(6, 8, 3)
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    for x in (torch.zeros(1, 6), torch.zeros(4, 6), torch.ones(4, 6)):
        result = model(x, nothing)
        result.sum().backward()
        assert result.isfinite().all()
        close(result, result[:1].expand_as(result))
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_features_at_the_edge_of_float32():
    # sqrt|kappa| |x| = 78: cosh is 3.7e33, whose square is no float32.
    model = Hypformer(1, 4, 2, graph_encoder=None)
    result = model(torch.tensor([[78.0], [-78.0], [0.0]]))
    result.sum().backward()
    assert result.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((0, 8, 3), {}, "in_features must be a positive integer, got 0"),
        ((6, 8, 3), {"heads": 3}, "multiple of heads"),
        ((6, 8, 3), {"attention": "cosine"}, "attention must be one of 'linear', 'softmax', got 'cosine'"),
        ((6, 8, 3), {"decoder": "mean"}, "decoder must be one of"),
        ((6, 8, 3), {"graph_encoder": "gat"}, "graph_encoder must be one of 'gcn', got 'gat'"),
        ((6, 8, 3), {"graph_weight": 1.5}, r"graph_weight must lie in \[0.0, 1.0\], got 1.5"),
        ((6, 8, 3), {"dropout": -0.1}, "must lie in"),
        ((6, 8, 3), {"norm_eps": -1.0}, "eps must lie in"),
        ((6, 8, 3), {"attention": "linear", "similarity": "cosine"}, "similarity must be one of"),
        ((6, 8, 3), {"attention": "softmax", "average": "mean"}, "average must be one of"),
        ((6, 8, 3), {"similarity": "geodesic"}, "similarity must be left out with attention 'linear'"),
        ((6, 8, 3), {"attention": "softmax", "power": 3.0}, "power must be left out with attention 'softmax'"),
        (
            (6, 8, 3),
            {"attention": "softmax", "average": "midpoint"},
            "average must be left out",
        ),
        ((6, 8, 3), {"curvature": 1.0}, "curvature must be finite and negative, got 1.0"),
        ((6, 8, 3), {"transformer": False, "graph_encoder": None}, "graph_encoder must be a module or 'gcn'"),
    ],
)
def test_refused_at_construction(arguments, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Hypformer(*arguments, **options)


@pytest.mark.usefixtures("without_shape_checks")
def test_refused_at_the_door():
    model = Hypformer(6, 8, 3)
    with pytest.raises(TypeError, match="x must be a floating-point tensor"):
        model(torch.zeros(4, 6, dtype=torch.int64), ring(4))
    with pytest.raises(ValueError, match=r"edge_index must have shape \(2, edges\)"):
        model(torch.zeros(4, 6), ring(4).T)
    with pytest.raises(TypeError, match="activation must be callable"):
        Hypformer(6, 8, 3, activation="relu")
    with pytest.raises(ValueError, match="edge_index must be given"):
        model(torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., in_features = 6\), got \(4, 5\)"):
        model(torch.zeros(4, 5), ring(4))
    with pytest.raises(ValueError, match=r"batch must have shape \(n = 4,\), got \(3,\)"):
        model(torch.zeros(4, 6), ring(4), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("batch", [None, torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])])
def test_another_module_may_stand_in_the_place_of_the_decoder(features, batch):
    """Whatever its class, it reads what the decoder read that the model was made with."""
    edges = ring(9) if batch is None else ring(3)
    level = "node" if batch is None else "graph"
    model = Hypformer(6, 8, 3, level=level, dtype=torch.float64)
    expected = model(features, edges, batch)
    linear, model.decoder = model.decoder, nn.Identity()
    close(linear(model(features, edges, batch)), expected)
    model = Hypformer(6, 8, 3, decoder="mlr", level=level, dtype=torch.float64)
    model.decoder = nn.Identity()
    assert model.manifold_out.check_point_on_manifold(model(features, edges, batch))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("width", [1, 5])
def test_a_graph_encoder_of_another_width_is_refused(features, width):
    """One channel was added to all of them."""
    model = Hypformer(6, 8, 3, graph_encoder=GCN(6, 8, width, dtype=torch.float64), dtype=torch.float64)
    sentence = rf"^graph_encoder must give \(nodes, hidden_features\) = \(9, 8\), got \(9, {width}\)\.$"
    with pytest.raises(ValueError, match=sentence):
        model(features, ring(9))
    model.graph_encoder.forward = lambda *_: None
    with pytest.raises(TypeError, match=r"^graph_encoder\(x, edge_index\) must be a tensor, got NoneType\.$"):
        model(features, ring(9))


def test_weights_and_features_of_edges_reach_the_graph_encoder():
    class Encoder(nn.Module):
        def forward(self, x, edge_index, edge_attr=None, edge_weight=None):
            given = torch.zeros(x.shape[0], 8) if edge_attr is None else edge_attr.sum() + torch.zeros(x.shape[0], 8)
            return given if edge_weight is None else given + edge_weight.sum()

    model, x, edges = Hypformer(6, 8, 3, layers=1), torch.randn(9, 6), ring(9)
    weight = torch.rand(edges.shape[1])
    assert not torch.allclose(model(x, edges, edge_weight=weight), model(x, edges))
    close(model(x, edges, edge_weight=torch.ones_like(weight)), model(x, edges))
    model.graph_encoder = Encoder()
    together = model.embed(x, edges, edge_weight=weight, edge_attr=weight[:, None])
    close(together, model.embed(x, edges, edge_weight=2 * weight))
    for without in (Hypformer(6, 8, 3, layers=1, graph_encoder=None), model):
        with pytest.raises(ValueError, match=r"^edge_weight must be None without a graph encoder and its edge_index"):
            without(x, None if without is model else edges, edge_weight=weight)
    with pytest.raises(ValueError, match=r"^edge_attr must be None with GCN, which reads no features of edges"):
        Hypformer(6, 8, 3, layers=1)(x, edges, edge_attr=weight[:, None])


@pytest.mark.parametrize("lr", [3.0, 30.0, 1e3])
@pytest.mark.parametrize("build", [Hypformer, partial(HGCN, conv="lgcn")])
def test_steps_of_any_usual_length_leave_losses_finite(build, lr):
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = build(4, 8, 3), torch.randn(6, 4)
        optimizer = RiemannianAdam(model.parameters(), lr=lr)
        for _ in range(8):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x, ring(6)), torch.arange(6) % 3)
            loss.backward()
            assert loss.isfinite()
            assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
            optimizer.step()


def test_points_at_the_end_of_the_range_leave_gradients_of_weights_finite(features):
    """Points grow like the exponential of the tangent vectors, gradients of weights like that times the features."""
    model, far = Hypformer(6, 4, 3, decoder="mlr"), []
    for reach in range(300, 700, 25):
        weights = [x for name, x in model.graph_encoder.named_parameters() if name.endswith("weight")]
        for weight in weights:
            nn.init.constant_(weight, (reach * 1e-9) ** (1 / len(weights)))
        points = model.embed(features.float() * 1e8, ring(9))
        far.append(points.detach().abs().max().item())
        assert all(x.isfinite().all() for x in torch.autograd.grad(points.sum(), weights)), far
    assert min(far) < 1e25
    assert max(far) > 1e37


@pytest.mark.parametrize("options", [{}, {"average": "midpoint"}, {"attention": "softmax"}])
def test_maps_are_the_weights_of_the_nodes_of_each_graph(features, options):
    torch.manual_seed(0)
    model = Hypformer(6, 8, 3, layers=3, heads=2, **options, dtype=torch.float64).eval()
    batch = torch.tensor([0, 0, 0, 0, 1, 1, 3, 3, 3])  # the third graph has no node
    expected = []
    for block in model.encoder.blocks:
        block.attention.register_forward_pre_hook(
            lambda layer, args, how: expected.append(layer.weights(*args, **how)), with_kwargs=True
        )
    model.embed(features, edge_index=ring(4), batch=batch)
    maps = model.attention_maps(features, ring(4), batch)
    assert [each.shape for each in maps] == [(4, 2, 4, 4)] * 3
    for ours, theirs in zip(maps, expected[:3], strict=True):
        assert torch.equal(ours, theirs)
        for graph, nodes in enumerate((4, 2, 0, 3)):
            total = ours[graph, :, :nodes, :nodes].sum(-1)
            assert ((total == 0) | ((total - 1).abs() < 1e-12)).all()
            assert ours[graph].sum().item() == pytest.approx(total.sum().item())
    alone = model.attention_maps(features[:4])
    for ours, theirs in zip(alone, maps, strict=True):
        torch.testing.assert_close(ours[0], theirs[0])
