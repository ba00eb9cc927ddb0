"""N-simplicial attention as layers: projections, routers and an encoder layer (Simplicial)."""

from holonomy.layers.simplicial.attention import ExpertChoice, PathRouter, SimplicialAttention
from holonomy.layers.simplicial.encoder import SimplicialEncoderLayer

__all__ = ["ExpertChoice", "PathRouter", "SimplicialAttention", "SimplicialEncoderLayer"]
