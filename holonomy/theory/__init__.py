"""The papers' claims, measured: statement, assumptions, bound, and a verdict that one can act on.

:func:`verify` measures all of them, ``python -m holonomy.theory`` writes a report, and each claim has functions for
one's own layer and data.
"""

from __future__ import annotations

from holonomy.theory.assertion import BoundViolatedError, assert_lipschitz
from holonomy.theory.certificate import Certificate, certify
from holonomy.theory.distances import DistanceScaling, distance_scaling
from holonomy.theory.hyperbolic_attention import hyperbolic_collapse_bound
from holonomy.theory.hyperbolic_heads import attend_linear, attend_softmax
from holonomy.theory.hyperbolic_layers import follow_transformation
from holonomy.theory.hyperbolic_refinements import follow_refinement
from holonomy.theory.lipschitz import lipschitz_bound
from holonomy.theory.local import local_lipschitz
from holonomy.theory.measured import measure_lipschitz
from holonomy.theory.projections import NotCoveredError, Projections
from holonomy.theory.rank_collapse import collapse_bound, measure_collapse
from holonomy.theory.stretching import measure_stretch, stretch
from holonomy.theory.tokens_basis import basis_approximation_error
from holonomy.theory.verdict import Claim, Draws, Trial, Verdict, judge
from holonomy.theory.verify import CLAIMS, select, verify

__all__ = [
    "CLAIMS",
    "BoundViolatedError",
    "Certificate",
    "Claim",
    "DistanceScaling",
    "Draws",
    "NotCoveredError",
    "Projections",
    "Trial",
    "Verdict",
    "assert_lipschitz",
    "attend_linear",
    "attend_softmax",
    "basis_approximation_error",
    "certify",
    "collapse_bound",
    "distance_scaling",
    "follow_refinement",
    "follow_transformation",
    "hyperbolic_collapse_bound",
    "judge",
    "lipschitz_bound",
    "local_lipschitz",
    "measure_collapse",
    "measure_lipschitz",
    "measure_stretch",
    "select",
    "stretch",
    "verify",
]
