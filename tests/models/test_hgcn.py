"""HGCN as the chain of its convolutions: where activations stand."""

from __future__ import annotations

import pytest
import torch

from holonomy.layers import HGATConv, HGCNConv, LGCNConv
from holonomy.models import HGCN

D = torch.float64
EDGES = torch.tensor([[0, 1, 1, 2, 3, 2], [1, 0, 2, 1, 2, 3]])
KINDS = {"hgcn": HGCNConv, "hgat": HGATConv, "lgcn": LGCNConv}


@pytest.mark.parametrize("conv", KINDS)
def test_activations_stand_between_convolutions(conv):
    """Behind all but the last; where they come before the linear map, before all but the first."""
    model = HGCN(3, 4, conv=conv, layers=3, activation=torch.tanh, dtype=D)
    between = [None, torch.tanh, torch.tanh] if conv == "lgcn" else [torch.tanh, torch.tanh, None]
    x = torch.randn(4, 3, dtype=D)
    points = model.manifold_in.expmap0(torch.nn.functional.pad(x, (1, 0)))
    for width, layer, activation in zip((3, 4, 4), model.convolutions, between, strict=True):
        own = KINDS[conv](width, 4, layer.manifold_in, layer.manifold_out, activation=activation, dtype=D)
        own.load_state_dict(layer.state_dict())
        points = own(points, EDGES)
    torch.testing.assert_close(model(x, EDGES), points)
