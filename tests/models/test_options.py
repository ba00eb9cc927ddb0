"""What a newcomer gives a constructor, and no model should take: one sentence, and not at the first batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from holonomy import Lorentz
from holonomy.layers import GCN
from holonomy.models import (
    ChromaticGraphTransformer,
    HigherOrderTransformer,
    Hypformer,
    HypTokenGT,
    InvariantGraphNetwork,
    SimplicialTransformer,
    TokenGT,
)

MODELS = {
    "Hypformer": lambda **options: Hypformer(3, 8, 2, **options),
    "TokenGT": lambda **options: TokenGT(3, 8, 2, **options),
    "HypTokenGT": lambda **options: HypTokenGT(3, 8, 2, **options),
    "HOT": lambda **options: HigherOrderTransformer(3, 8, 2, **options),
    "IGN": lambda **options: InvariantGraphNetwork(3, 8, 2, **options),
    "CGT": lambda **options: ChromaticGraphTransformer(3, 8, 2, **options),
    "Simplicial": lambda **options: SimplicialTransformer(8, heads=2, **options),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("given", [True, "0.1", None])
@pytest.mark.usefixtures("without_shape_checks")
def test_a_probability_is_a_number(name, given):
    """``dropout=True`` dropped everything."""
    with pytest.raises(TypeError, match=rf"^dropout must be a number in \[0\.0, 1\.0\], got {given!r}\.$"):
        MODELS[name](dropout=given)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "CGT"])
@pytest.mark.parametrize(("given", "came"), [("gelu", "str"), (nn.GELU, "the class GELU")])
@pytest.mark.usefixtures("without_shape_checks")
def test_an_activation_is_a_function(name, given, came):
    with pytest.raises(TypeError, match=rf"^activation must be callable, got {came}\.$"):
        MODELS[name](activation=given)


@pytest.mark.parametrize("name", ["Hypformer", "HypTokenGT"])
@pytest.mark.parametrize("given", [nn.Parameter(torch.tensor(-1.0)), torch.tensor([-1.0, -2.0]), "-1", None, True])
@pytest.mark.usefixtures("without_shape_checks")
def test_a_curvature_is_a_number(name, given):
    """A parameter was read once and never learned."""
    with pytest.raises(TypeError, match=rf"^curvature must be a number, got {type(given).__name__}\.$"):
        MODELS[name](curvature=given)


def test_the_curvature_of_another_manifold_is_a_number():
    other = Lorentz(-0.5, learnable=True)
    assert Lorentz(other.curvature.detach()).curvature.item() == -0.5
    with pytest.raises(TypeError, match=r"^curvature must be a number, got Tensor\.$"):
        Lorentz(other.curvature)


@pytest.mark.parametrize("name", ["HOT", "IGN", "Simplicial"])
@pytest.mark.parametrize("given", [2, "220"])
@pytest.mark.usefixtures("without_shape_checks")
def test_orders_are_several(name, given):
    with pytest.raises(TypeError, match=rf"^orders must be a sequence of integers, got {given!r}\.$"):
        MODELS[name](orders=given)


@pytest.mark.usefixtures("without_shape_checks")
def test_sizes_may_be_numpy_integers_as_in_torch():
    """``labels.max() + 1`` of NumPy is the number of classes in many scripts."""
    model = Hypformer(np.int64(3), np.int32(8), np.int64(2), layers=np.int64(1))
    assert type(model.in_features) is int
    assert model(torch.randn(4, 3), torch.tensor([[0], [1]])).shape == (4, 2)
    with pytest.raises(TypeError, match=r"^out_features must be a positive integer, got (np\.True_|True) of type bool"):
        Hypformer(3, 8, np.True_)


@pytest.mark.parametrize("name", ["TokenGT", "HypTokenGT", "HOT", "IGN", "CGT"])
@pytest.mark.usefixtures("without_shape_checks")
def test_a_number_of_edge_features_is_an_integer(name):
    with pytest.raises(TypeError, match=r"^edge_features must be .* integer.*, got 3\.0 of type float\.$"):
        MODELS[name](edge_features=3.0)


@pytest.mark.parametrize("given", [GCN, True, torch.relu])
@pytest.mark.usefixtures("without_shape_checks")
def test_a_graph_encoder_is_a_module(given):
    with pytest.raises(TypeError, match=r"^graph_encoder must be a module, 'gcn' or None, got "):
        Hypformer(3, 8, 2, graph_encoder=given)
