"""The least lightweight map: an entry is mapped by itself, in dense tensors and in hyperedges."""

from __future__ import annotations

import pytest
import torch

from holonomy.layers import EquivariantLinear
from holonomy.layers.equivariant.linear.entrywise import Entrywise, lightweight
from holonomy.structures import Hyperedges, joint


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_every_entry_is_mapped_by_itself(order, device):
    torch.manual_seed(0)
    layer = Entrywise(order, 3, 4, device=device, dtype=torch.float64)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, *[4] * order, 3, dtype=torch.float64, device=device)
    wanted = x @ layer.weight + layer.bias
    assert torch.equal(layer(x), wanted)
    mask = torch.tensor([[True] * 4, [True, False, True, False]], device=device)
    if order:
        here = joint(mask, order)[..., None]
        torch.testing.assert_close(layer(x.masked_fill(~here, torch.nan), mask), wanted.masked_fill(~here, 0))
        edges = Hyperedges.from_dense(x, mask)
        torch.testing.assert_close(layer(edges).values, edges.values @ layer.weight + layer.bias)


def test_results_keep_their_size_where_a_set_of_nodes_has_one_hyperedge():
    """Of the 27 entries that a lightweight map between triples may read, one is there."""
    torch.manual_seed(0)
    triples = torch.combinations(torch.arange(30), 3)
    edges = Hyperedges(triples, torch.randn(len(triples), 64), 30)
    size = {kind: lightweight(3, 64, 64, entrywise=kind)(edges).values.std() for kind in (True, False)}
    assert 0.9 < size[True] < 1.1
    assert size[False] < 0.3


def test_of_nodes_there_is_one_lightweight_map():
    ours, every = (lightweight(1, 3, 4, entrywise=kind) for kind in (True, False))
    assert isinstance(every, EquivariantLinear)
    with torch.no_grad():
        every.weight.copy_(ours.weight[None])
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(ours(x), every(x))


@pytest.mark.usefixtures("without_shape_checks")
def test_wrong_arguments_get_one_sentence():
    with pytest.raises(ValueError, match="order must be at least 0, got -1"):
        Entrywise(-1, 3, 4)
    with pytest.raises(ValueError, match=r"x must have shape \(\*batch, nodes, nodes, features = 3\), got \(2, 3, 3\)"):
        Entrywise(2, 3, 4)(torch.zeros(2, 3, 3))
    edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 3), 2)
    with pytest.raises(ValueError, match="mask must be None for hyperedges"):
        Entrywise(2, 3, 4)(edges, torch.ones(2, dtype=torch.bool))
