"""The search for the largest radius whose margin is positive."""

from __future__ import annotations

import pytest
import torch

from holonomy.theory.affine import search


@pytest.mark.parametrize("first", [0.3, 5.0, 60.0])
@pytest.mark.parametrize("power", [1.0, 2.0, 8.0, 60.0])
def test_a_root_is_found_in_few_bounds_however_sharply_margins_bend(power, first):
    """As enclosures do that grow over a range: little is lost up to near the root, and far beyond it not much more."""
    tried = []

    def margin(_, __, radius):
        tried.extend(radius.tolist())
        return torch.maximum(1 - (radius / roots) ** power, -0.01 * (radius / roots))

    roots = torch.tensor([0.7], dtype=torch.float64)
    start = (torch.zeros(1), torch.tensor([first]), torch.tensor([10 * first]), torch.ones(1))
    found = search._largest(margin, torch.tensor([0]), torch.tensor([0]), tuple(x.double() for x in start), 100.0)
    assert 0.7 / search._NARROW <= float(found) <= 0.7
    assert len(tried) <= 15
