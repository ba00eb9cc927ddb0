"""HGCN as the chain of its convolutions: where activations stand, and what is no number."""

from __future__ import annotations

import pytest
import torch

from holonomy.layers import HGATConv, HGCNConv, LGCNConv
from holonomy.manifolds import Lorentz
from holonomy.models import HGCN, Hypformer

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


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("model", [*KINDS, "hypformer"])
def test_infinite_features_make_no_finite_result(model, bad):
    """The exponential map saturates: what is infinite would come out as a point far away."""
    made = HGCN(3, 4, 2, conv=model) if model in KINDS else Hypformer(3, 4, 2, graph_encoder=None, attention="softmax")
    x = torch.randn(4, 3)
    x[0, 1] = bad
    assert not made(x, EDGES)[0].isfinite().any()


@pytest.mark.parametrize("conv", KINDS.values())
def test_infinite_points_make_no_finite_result(conv):
    manifold = Lorentz(-1.0)
    x = manifold.lift(torch.randn(4, 3))
    x[0, 1] = float("inf")
    y = conv(3, 4, manifold)(x, EDGES)
    assert not y[0].isfinite().any()
    assert y[2:].isfinite().all()
