"""These pages run as a user runs them: the suite's own checks of shapes cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture(autouse=True)
def without_shape_checks() -> Iterator[None]:
    """Switch the checks off for the length of a page."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
