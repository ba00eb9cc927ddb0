"""Hyperbolic space: curvature, the hyperboloid, Geoopt's manifold over it, its charts, and learned points."""

from holonomy.manifolds.curvature import Curvature
from holonomy.manifolds.lorentz import Lorentz
from holonomy.manifolds.points import LorentzEmbedding, LorentzPoints

__all__ = ["Curvature", "Lorentz", "LorentzEmbedding", "LorentzPoints"]
