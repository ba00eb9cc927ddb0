"""Hyperbolic space: curvature, the hyperboloid, Geoopt's manifold over it, charts, learned points, distributions.

And its products with flat space and spheres.
"""

from holonomy.manifolds.curvature import Curvature
from holonomy.manifolds.distributions import WrappedNormal
from holonomy.manifolds.horospheres import busemann
from holonomy.manifolds.lorentz import Lorentz
from holonomy.manifolds.means import frechet_mean
from holonomy.manifolds.points import LorentzEmbedding, LorentzPoints
from holonomy.manifolds.principal import tangent_pca
from holonomy.manifolds.product import Product, ProductEmbedding
from holonomy.manifolds.sphere import Sphere

__all__ = [
    "Curvature",
    "Lorentz",
    "LorentzEmbedding",
    "LorentzPoints",
    "Product",
    "ProductEmbedding",
    "Sphere",
    "WrappedNormal",
    "busemann",
    "frechet_mean",
    "tangent_pca",
]
