"""The attack on certified nodes goes through the model itself, and no certified ball holds what it finds."""

from __future__ import annotations

import torch

from benchmarks.certified_nodes import searched
from experiments.engine.attacks import own_logits, smallest_attack
from holonomy.layers import GCN
from holonomy.models import Hypformer
from holonomy.theory import certified_radius
from holonomy.theory.affine.enclosure import Enclosure


def test_attacks_stay_outside_certified_balls() -> None:
    torch.manual_seed(2)
    encoder = GCN(3, 5, 6, layers=3, residual=True)
    model = Hypformer(3, 6, 2, layers=1, heads=2, graph_encoder=encoder).double().eval()
    x, edges = torch.randn(6, 3).double(), torch.tensor([[0, 1, 1, 2, 2, 3, 4], [1, 0, 2, 1, 3, 2, 4]])
    enclosure, node = Enclosure(model, x, edges), 2
    logits, change = own_logits(enclosure, node), torch.randn(4, 3).double()
    for one, found in zip(change, logits(change), strict=True):
        moved = x.clone()
        moved[node] += one
        torch.testing.assert_close(found, model(moved, edges)[node])
    generator = torch.Generator().manual_seed(0)
    radius = certified_radius(model, x, edges, torch.tensor([node])).item()
    attack = smallest_attack(logits, 3, int(enclosure.logits[node].argmax()), 12, generator).norm()
    assert 0 < radius < attack
    found = searched(enclosure, logits, node, radius, 40, generator)
    assert (found["violations"], found["points"]) == (0, 40 + 19 * 4)
    assert found["change"] >= 1
    # To first order both changes are one.
    assert searched(enclosure, logits, node, 1e-5, 40, generator)["change"] < 1.01
