"""Layers that are sharded one by one, as large models are: each is called, and says what it returns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from holonomy.models import HigherOrderTransformer, InvariantGraphNetwork, SimplicialTransformer, TokenGT

D = torch.float64
PATH = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
MODELS = {
    "HOT": (lambda: HigherOrderTransformer(3, 8, 2, heads=2, dtype=D), (torch.randn(4, 3, dtype=D), PATH)),
    "IGN": (lambda: InvariantGraphNetwork(3, 8, 2, dtype=D), (torch.randn(4, 3, dtype=D), PATH)),
    "TokenGT": (lambda: TokenGT(3, 8, 2, layers=2, heads=2, dtype=D), (torch.randn(4, 3, dtype=D), PATH)),
    "Simplicial": (lambda: SimplicialTransformer(8, heads=2, dtype=D), (torch.randn(2, 5, 8, dtype=D),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_sharded_one_by_one_have_the_same_gradients(name, mesh):
    """What the hooks of sharding look for in the result of a layer of hyperedges went in circles."""
    make, inputs = MODELS[name]
    model = make().eval()
    whole = copy.deepcopy(model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for each in (model, whole):
        each(*inputs).square().sum().backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
