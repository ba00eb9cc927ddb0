"""Layers that commute with every permutation of the nodes, of any order."""

from holonomy.layers.equivariant.attention import HigherOrderAttention
from holonomy.layers.equivariant.basis_residual import basis_residual
from holonomy.layers.equivariant.chromatic import ChromaticAttention, EdgeProjection
from holonomy.layers.equivariant.chromatic_encoder import ChromaticEncoderLayer, NodeBatchNorm
from holonomy.layers.equivariant.encoder import HigherOrderEncoderLayer
from holonomy.layers.equivariant.identifiers import (
    laplacian_identifiers,
    near_orthogonal_identifiers,
    orthogonal_identifiers,
    perturb_identifiers,
)
from holonomy.layers.equivariant.linear import EquivariantLinear
from holonomy.layers.equivariant.pairs import EdgeTypeEncoder, PairEncoder, RandomWalkEncoder, ShortestPathEncoder
from holonomy.layers.equivariant.partitions import bell, moebius_matrix, set_partitions, zeta_matrix
from holonomy.layers.equivariant.simplicial import ExpertChoice, PathRouter, SimplicialAttention
from holonomy.layers.equivariant.simplicial_encoder import SimplicialEncoderLayer
from holonomy.layers.equivariant.tokens import GraphTokenizer, HyperedgeTokenizer
from holonomy.layers.equivariant.transformer import TokenAttention, TokenEncoderLayer

__all__ = [
    "ChromaticAttention",
    "ChromaticEncoderLayer",
    "EdgeProjection",
    "EdgeTypeEncoder",
    "EquivariantLinear",
    "ExpertChoice",
    "GraphTokenizer",
    "HigherOrderAttention",
    "HigherOrderEncoderLayer",
    "HyperedgeTokenizer",
    "NodeBatchNorm",
    "PairEncoder",
    "PathRouter",
    "RandomWalkEncoder",
    "ShortestPathEncoder",
    "SimplicialAttention",
    "SimplicialEncoderLayer",
    "TokenAttention",
    "TokenEncoderLayer",
    "basis_residual",
    "bell",
    "laplacian_identifiers",
    "moebius_matrix",
    "near_orthogonal_identifiers",
    "orthogonal_identifiers",
    "perturb_identifiers",
    "set_partitions",
    "zeta_matrix",
]
