"""Chromatic self-attention, its encoder layer, and the encoders of pairs of nodes (CSA)."""

from holonomy.layers.chromatic.attention import ChromaticAttention, EdgeProjection
from holonomy.layers.chromatic.encoder import ChromaticEncoderLayer, NodeBatchNorm
from holonomy.layers.chromatic.pairs import EdgeTypeEncoder, PairEncoder, RandomWalkEncoder, ShortestPathEncoder

__all__ = [
    "ChromaticAttention",
    "ChromaticEncoderLayer",
    "EdgeProjection",
    "EdgeTypeEncoder",
    "NodeBatchNorm",
    "PairEncoder",
    "RandomWalkEncoder",
    "ShortestPathEncoder",
]
