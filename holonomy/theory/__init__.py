"""The papers' claims, measured: statement, assumptions, bound, and a verdict that one can act on.

:func:`verify` measures all of them, ``python -m holonomy.theory`` writes a report, and each claim has functions for
one's own layer and data.
"""

from __future__ import annotations

from holonomy.theory.affine.certificate import NodeCertificate, certified_accuracy, certified_radius, certify_node
from holonomy.theory.affine.training import margin_bounds
from holonomy.theory.attention.lipschitz import lipschitz_bound
from holonomy.theory.attention.local import local_lipschitz
from holonomy.theory.attention.measured import measure_lipschitz
from holonomy.theory.attention.projections import NotCoveredError, Projections
from holonomy.theory.attention.rank_collapse import collapse_bound, measure_collapse
from holonomy.theory.certificates.assertion import BoundViolatedError, assert_lipschitz
from holonomy.theory.certificates.certificate import Certificate, certify
from holonomy.theory.certificates.constants.softmax_attention import hyperbolic_collapse_bound
from holonomy.theory.certificates.distances import DistanceScaling, distance_scaling
from holonomy.theory.certificates.heads import attend_linear, attend_softmax
from holonomy.theory.certificates.layers import follow_transformation
from holonomy.theory.certificates.refinements import follow_refinement
from holonomy.theory.certificates.stretching import measure_stretch, stretch
from holonomy.theory.claims.verdict import Claim, Draws, Trial, Verdict, judge
from holonomy.theory.claims.verify import CLAIMS, select, verify
from holonomy.theory.expressivity.tokens_basis import basis_approximation_error

__all__ = [
    "CLAIMS",
    "BoundViolatedError",
    "Certificate",
    "Claim",
    "DistanceScaling",
    "Draws",
    "NodeCertificate",
    "NotCoveredError",
    "Projections",
    "Trial",
    "Verdict",
    "assert_lipschitz",
    "attend_linear",
    "attend_softmax",
    "basis_approximation_error",
    "certified_accuracy",
    "certified_radius",
    "certify",
    "certify_node",
    "collapse_bound",
    "distance_scaling",
    "follow_refinement",
    "follow_transformation",
    "hyperbolic_collapse_bound",
    "judge",
    "lipschitz_bound",
    "local_lipschitz",
    "margin_bounds",
    "measure_collapse",
    "measure_lipschitz",
    "measure_stretch",
    "select",
    "stretch",
    "verify",
]
