"""Padding and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holonomy.structures import PaddedGraphs


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_rows_come_back_and_every_graph_holds_its_own_nodes(numbers):
    batch = torch.tensor(numbers)
    x = torch.arange(float(len(numbers)))[:, None] + 1
    graphs = PaddedGraphs.of(x, batch)
    assert torch.equal(graphs.rows(graphs.values), x)
    assert graphs.values.shape[0] == max(numbers) + 1
    for number, (row, padding) in enumerate(zip(graphs.values, graphs.padding, strict=True)):
        assert row[~padding].tolist() == x[batch == number].tolist()
        assert not row[padding].any()


def test_graphs_may_be_compared():
    """Dataclasses compare their fields; of tensors torch knew no truth value."""
    graphs, other = (PaddedGraphs.of(torch.ones(3, 2), torch.tensor([0, 1, 0])) for _ in range(2))
    assert graphs in [other, graphs]


@pytest.mark.usefixtures("without_shape_checks")
def test_a_row_a_node_is_wanted():
    for x in (torch.ones(3), torch.ones(3, 2, 2)):
        with pytest.raises(ValueError, match=r"x must have shape \(n, features\), got \(3"):
            PaddedGraphs.of(x, torch.tensor([0, 0, 1]))


def test_the_gradient_goes_to_the_rows():
    x = torch.randn(5, 3, requires_grad=True)
    weights = torch.randn(2, 3, 3)
    graphs = PaddedGraphs.of(x, torch.tensor([1, 0, 1, 1, 0]))
    (graphs.values * weights).sum().backward()
    assert torch.equal(x.grad, graphs.rows(weights))


@pytest.mark.usefixtures("without_shape_checks")
def test_rows_of_another_layout_are_refused():
    graphs = PaddedGraphs.of(torch.ones(3, 1), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match=r"values must have shape \(graphs, nodes, ...\) = \(2, 2\), got \(4, 1\)"):
        graphs.rows(torch.ones(4, 1))
