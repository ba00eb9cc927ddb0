"""N-simplicial attention as layers: projections, routers and an encoder layer (Simplicial)."""

from holonomy.layers.simplicial.attention import SimplicialAttention
from holonomy.layers.simplicial.encoder import SimplicialEncoderLayer
from holonomy.layers.simplicial.routers import ExpertChoice, PathRouter

__all__ = ["ExpertChoice", "PathRouter", "SimplicialAttention", "SimplicialEncoderLayer"]
