"""The search for points that break a bound: it asks the model itself, finds none in a ball, some in a larger one."""

from __future__ import annotations

import pytest
import torch

from benchmarks import certified_soundness
from benchmarks.certified_soundness import FEATURES, NODES, OPTIONS, logits, measured, trained


def test_graphs_side_by_side_are_asked_as_each_by_itself() -> None:
    for options in (OPTIONS[0], OPTIONS[7]):
        model, x, edges = trained(options, 0)
        change = torch.randn(3, NODES, FEATURES).double()
        together = logits(model, x, edges, 5)(change)
        for one, found in zip(change, together, strict=True):
            torch.testing.assert_close(found, model(x + one, edges)[5])


def test_points_outside_the_ball_break_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified_soundness, "THREATS", ("node",))
    found = certified_soundness.summary([measured(OPTIONS[0], 0, 12)])
    assert (found["violations"], found["points"]) == (0, 4 * 6 * 12)
    kept = certified_soundness.kept
    monkeypatch.setattr(
        certified_soundness, "kept", lambda change, *ball, r=4.0: kept(change, *ball[:-1], r * ball[-1])
    )
    assert certified_soundness.summary([measured(OPTIONS[0], 0, 12)])["violations"] > 0
