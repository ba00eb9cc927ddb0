"""TokenGT's tokens in Hypformer's blocks: equivariant where TokenGT is, on the manifold, every curvature learns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.models import Hypformer, HypTokenGT
from holonomy.optim import RiemannianAdam
from tests.models.test_tokengt import graph

D = torch.float64
OPTIONS = st.fixed_dictionaries({
    "attention": st.sampled_from(["linear", "softmax"]),
    "level": st.sampled_from(["graph", "node"]),
    "decoder": st.sampled_from(["linear", "mlr"]),
    "curvature": st.sampled_from([-0.1, -1.0, -10.0]),
})  # fmt: skip


def model(*, device=None, **options):
    torch.manual_seed(0)
    defaults = {"edge_features": 2, "layers": 2, "heads": 2, "identifier_dim": 4, "identifiers": "orthogonal"}
    return HypTokenGT(3, 8, 2, **(defaults | options), dtype=D, device=device).eval()


@given(options=OPTIONS, nodes=st.integers(1, 6))
@settings(max_examples=8)
def test_permuting_nodes_and_edges(options, nodes, device):
    module = model(**options, device=device)
    x, edge_index, attr, p = graph(nodes, D, device)
    order, edges = torch.randperm(nodes, device=device), torch.randperm(edge_index.shape[1], device=device)
    expected = module(x, edge_index, edge_attr=attr, identifiers=p)
    result = module(x[order], order.argsort()[edge_index][:, edges], edge_attr=attr[edges], identifiers=p[order])
    wanted = expected[order] if options["level"] == "node" else expected
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-8)


@given(options=OPTIONS)
@settings(max_examples=8)
def test_graphs_of_a_batch_do_not_meet_and_lie_on_the_manifold(options, device):
    module = model(**options, device=device)
    first, second = graph(4, D, device), graph(2, D, device)
    x, attr, p = (torch.cat([a, b]) for a, b in zip(first, second, strict=True) if a.is_floating_point())
    edge_index = torch.cat([first[1], second[1] + 4], dim=1)
    batch = torch.tensor([0] * 4 + [1] * 2, device=device)
    together = module.embed(x, edge_index, batch, edge_attr=attr, identifiers=p)
    alone = [module.embed(g[0], g[1], edge_attr=g[2], identifiers=g[3]) for g in (first, second)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(together[:, :1], module.manifold_out.time(together))


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_every_curvature_moves_under_riemannian_adam(attention, device):
    module = model(attention=attention, decoder="prototypes", level="node", device=device).train()
    x, edge_index, attr, p = graph(5, D, device)
    optimizer = RiemannianAdam(module.parameters(), lr=0.01)
    before = {name: kappa.item() for name, kappa in module.curvatures().items()}
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            module(x, edge_index, edge_attr=attr, identifiers=p), torch.ones(5).long()
        ).backward()
        optimizer.step()
    for name, kappa in module.curvatures().items():
        assert kappa.item() != before[name], name
        assert kappa.item() < 0


def test_one_node_and_no_edges(device):
    module = model(device=device)
    empty = torch.zeros(2, 0, dtype=torch.int64, device=device)
    x = torch.ones(1, 3, dtype=D, device=device)
    assert module(x, empty, edge_attr=torch.zeros(0, 2, dtype=D, device=device)).isfinite().all()


@pytest.mark.usefixtures("without_shape_checks")
def test_wrong_arguments_get_one_sentence():
    for options, sentence in (
        ({"level": "pair"}, "level must be one of"),
        ({"decoder": "tree"}, "decoder must be one of"),
        ({"layers": 0}, "layers must be a positive integer"),
        ({"heads": 3}, "features must be a multiple of heads"),
        ({"similarity": "geodesic"}, "similarity must be left out with attention 'linear'"),
        ({"attention": "softmax", "power": 3.0}, "power must be left out with attention 'softmax'"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            model(**options)


def test_another_module_may_stand_in_the_place_of_the_decoder():
    x, edge_index, attr, p = graph(5, D)
    module = model()
    expected = module(x, edge_index, edge_attr=attr, identifiers=p)
    linear, module.decoder = module.decoder, torch.nn.Identity()
    torch.testing.assert_close(linear(module(x, edge_index, edge_attr=attr, identifiers=p)), expected)


@pytest.mark.parametrize("kind", [HypTokenGT, Hypformer])
def test_the_linear_decoder_has_a_bias(kind):
    state = kind(3, 8, 2).decoder.state_dict()
    assert {name: tuple(x.shape) for name, x in state.items()} == {"weight": (2, 8), "bias": (2,)}


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_maps_are_the_weights_of_the_attention_of_every_block_in_its_place(attention):
    module, (x, edge_index, attr, p) = model(attention=attention), graph(6, D)
    kept = (edge_index < 4).all(0) | (edge_index >= 4).all(0)  # graphs of four nodes and of two
    given = {"edge_attr": attr[kept], "identifiers": p}
    given |= {"x": x, "edge_index": edge_index[:, kept], "batch": torch.tensor([0, 0, 0, 0, 1, 1])}
    expected = []
    for block in module.encoder.blocks:
        block.attention.register_forward_pre_hook(
            lambda layer, args, how: expected.append(layer.weights(*args, **how)), with_kwargs=True
        )
    module(**given)
    tokens, maps = module.attention_maps(**given)
    assert tokens.padding.any()
    for ours, theirs in zip(maps, expected[:2], strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.transpose(1, -1)[tokens.padding].any()
