"""Riemannian optimizers."""

from holonomy.optim.adam import RiemannianAdam

__all__ = ["RiemannianAdam"]
