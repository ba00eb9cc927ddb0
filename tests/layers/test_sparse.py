"""The kept transpose of sparse features: right gradients, sorted once, never stale, freed with the tensor."""

from __future__ import annotations

import gc

import pytest
import torch

from holonomy.layers import GCN, ExpMapHTC
from holonomy.manifolds import Lorentz
from holonomy.ops import csr

EDGES = torch.tensor([[0, 1, 4], [1, 0, 2]])


def table(layout):
    """Return five rows, one of them empty, with a column that is, and the same densely."""
    dense = torch.rand(5, 4, dtype=torch.float64) * torch.tensor(
        [[1, 0, 0, 1], [0, 1, 0, 0], [0] * 4, [1, 1, 0, 1], [0, 0, 0, 1]]
    )
    features = dense.to_sparse()
    return dense, csr.as_csr(features) if layout == torch.sparse_csr else features


def gradients(layer, *inputs):
    """Of all parameters, of a sum of squares."""
    return torch.autograd.grad(layer(*inputs).square().sum(), [p for p in layer.parameters() if p.requires_grad])


@pytest.fixture
def sorts(monkeypatch):
    """Count the sorts."""
    calls, plain = [], torch.argsort
    monkeypatch.setattr(torch, "argsort", lambda *args, **options: calls.append(1) or plain(*args, **options))
    return calls


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_gradients_are_those_of_dense_features_in_every_epoch(layout, sorts):
    dense, features = table(layout)
    layer = ExpMapHTC(4, 3, Lorentz(-0.5), dtype=torch.float64)
    for _ in range(3):
        for ours, theirs in zip(gradients(layer, features), gradients(layer, dense), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(sorts) == 1


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_dropped_entries_share_the_order(layout, sorts):
    _, features = table(layout)
    layer, edges = GCN(4, 3, 2, dropout=0.5, residual=True, dtype=torch.float64), EDGES.clone()
    seen = set()
    for seed in range(3):
        torch.manual_seed(seed)
        ours = gradients(layer, features, edges)
        torch.manual_seed(seed)
        for mine, other in zip(ours, gradients(layer, features.clone(), edges), strict=True):
            torch.testing.assert_close(mine, other)
        seen.add(ours[0].sum().item())
    assert len(seen) > 1
    graph = 2  # its edges by target and by source, in the first of six passes
    assert len(sorts) == graph + 1 + 3  # once for the features, once for each of their copies


@pytest.mark.parametrize("written", [lambda x: x, lambda x: torch.from_numpy(x.numpy())])  # which torch does not count
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_a_matrix_changed_in_place_is_read_anew(layout, written):
    dense, features = table(layout)
    layer = ExpMapHTC(4, 3, Lorentz(), dtype=torch.float64)
    gradients(layer, features)
    features.values().mul_(2)
    for ours, theirs in zip(gradients(layer, features), gradients(layer, 2 * dense), strict=True):
        torch.testing.assert_close(ours, theirs)
    # The first row's two entries move to columns 1 and 2.
    columns = features.col_indices() if layout == torch.sparse_csr else features.indices()[1]
    written(columns)[:2] = torch.tensor([1, 2])
    for ours, theirs in zip(gradients(layer, features), gradients(layer, features.to_dense()), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_nothing_outlives_the_features(layout):
    gc.collect()
    before = len(csr._known)
    _, features = table(layout)
    gradients(GCN(4, 3, 2, dropout=0.5, dtype=torch.float64), features, EDGES)
    gc.collect()
    assert len(csr._known) == before + 1
    del features
    assert len(csr._known) == before


def test_second_derivative():
    _, features = table(torch.sparse_csr)
    weight = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda w: csr.multiply(csr.as_csr(features), w).square(), (weight,))
