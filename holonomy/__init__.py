"""Geometric deep learning on PyTorch.

Lorentz manifolds with learnable curvature, hyperbolic transformer layers built on them, and
Riemannian optimization. The curvature ``kappa`` is the sectional curvature and negative; points of
dimension ``d`` are ambient vectors ``(..., d + 1)``, time first.
"""

from __future__ import annotations

__version__ = "0.1.0"
