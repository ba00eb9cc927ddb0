"""Riemannian optimizers."""

from holonomy.optim.adam import RiemannianAdam
from holonomy.optim.sgd import RiemannianSGD

__all__ = ["RiemannianAdam", "RiemannianSGD"]
