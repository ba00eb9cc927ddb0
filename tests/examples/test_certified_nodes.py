"""The attack of the example: copies of a graph, and a half-space whose radii are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.certified_nodes import attacked, moved, tree
from holonomy import Hypformer


def test_copies_side_by_side_are_the_graph_with_one_node_moved() -> None:
    torch.manual_seed(0)
    x, edges, y = tree(12, 0)
    model, change = Hypformer(8, 4, 4, layers=1, level="node").eval(), torch.randn(2, 8)
    for node, one, found in zip((3, 7), change, moved(model, (x, edges, y), torch.tensor([3, 7]), change), strict=True):
        torch.testing.assert_close(found, model(x.index_add(0, torch.tensor([node]), one[None]), edges)[node])


class Sign(nn.Module):
    """The class 0 where the first feature is positive, else 1."""

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.stack([x[:, 0], -x[:, 0], x[:, 0] - 9, x[:, 0] - 9], -1)


def test_an_attack_on_a_half_space_reaches_the_border() -> None:
    torch.manual_seed(0)
    x = torch.zeros(3, 8)
    x[:, 0] = torch.tensor([0.5, 5.0, 5.0])
    data = x, torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 0, 1])
    nodes = torch.arange(3)
    assert attacked(Sign(), data, nodes, 0.4) == pytest.approx(2 / 3)
    assert attacked(Sign(), data, nodes, 0.6) == pytest.approx(1 / 3)
