"""Geometric deep learning on PyTorch.

Lorentz manifolds with learnable curvature, hyperbolic transformer layers built on them, and
Riemannian optimization. The curvature ``kappa`` is the sectional curvature and negative; points of
dimension ``d`` are ambient vectors ``(..., d + 1)``, time first.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # Geoopt scripts functions when it is imported, of which PyTorch 2.14 warns each user.
    warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
    from holonomy.manifolds import Lorentz, LorentzEmbedding
    from holonomy.models import Hypformer
    from holonomy.optim import RiemannianAdam

__version__ = "0.1.0"

__all__ = ["Hypformer", "Lorentz", "LorentzEmbedding", "RiemannianAdam", "__version__"]
