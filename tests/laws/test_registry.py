"""Nothing public escapes the laws."""

from __future__ import annotations

from tests.cases import CASES, ELSEWHERE, public_classes
from tests.reference import REFERENCES


def test_every_public_class_is_registered():
    missing = set(public_classes()) - {case.kind for case in CASES} - ELSEWHERE
    assert not missing


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_layer_has_a_reference():
    without = {case.kind.__module__ for case in CASES if case.kind not in REFERENCES}
    # Learned points have a lookup and a scaling only; tests/manifolds and tests/models say what theirs is.
    assert not any(module.startswith("holonomy.layers") for module in without)
