"""What annotations of certificates say is what comes: other tests of them run without these checks, for speed."""

from __future__ import annotations

import pytest
import torch

from holonomy.layers import GCN
from holonomy.models import Hypformer
from holonomy.theory import certify_node


@pytest.mark.parametrize("radius", [0.05, 0.5])
def test_annotations_hold_from_the_features_to_the_margins(radius: float) -> None:
    torch.manual_seed(0)
    encoder = GCN(3, 6, 4, layers=3, residual=True)
    model = Hypformer(3, 4, 3, layers=1, graph_encoder=encoder).double().eval()
    x, edge_index = torch.randn(6, 3).double(), torch.randint(6, (2, 12))
    assert certify_node(model, x, edge_index, 0, radius).margins.isfinite().sum() >= 2
