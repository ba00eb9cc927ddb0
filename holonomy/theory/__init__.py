"""The papers' claims, measured: statement, assumptions, bound, and a verdict that one can act on.

:func:`verify` measures all of them, ``python -m holonomy.theory`` writes a report, and each claim has functions for
one's own layer and data.
"""

from __future__ import annotations

from holonomy.theory.verdict import Claim, Draws, Trial, Verdict, judge
from holonomy.theory.verify import CLAIMS, select, verify

__all__ = ["CLAIMS", "Claim", "Draws", "Trial", "Verdict", "judge", "select", "verify"]
