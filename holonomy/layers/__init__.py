"""Hyperbolic layers, permutation-equivariant layers and graph encoders."""

from holonomy.layers.chromatic.attention import ChromaticAttention, EdgeProjection
from holonomy.layers.chromatic.encoder import ChromaticEncoderLayer, NodeBatchNorm
from holonomy.layers.chromatic.pairs import EdgeTypeEncoder, PairEncoder, RandomWalkEncoder, ShortestPathEncoder
from holonomy.layers.encodings import (
    category_product,
    edge_categories,
    random_walk_encoding,
    random_walk_node_encoding,
    shortest_path_encoding,
)
from holonomy.layers.equivariant.basis.partitions import bell, moebius_matrix, set_partitions, zeta_matrix
from holonomy.layers.equivariant.higher_order.attention import HigherOrderAttention
from holonomy.layers.equivariant.higher_order.encoder import HigherOrderEncoderLayer
from holonomy.layers.equivariant.linear.layer import EquivariantLinear
from holonomy.layers.graph import GCN, Propagation
from holonomy.layers.hyperbolic.attention.linear import HypLinearAttention
from holonomy.layers.hyperbolic.attention.simplicial import HypSimplicialAttention
from holonomy.layers.hyperbolic.attention.softmax import HypSoftmaxAttention
from holonomy.layers.hyperbolic.classifier import HypMLR, HypPrototypes
from holonomy.layers.hyperbolic.convolution import HGATConv, HGCNConv, LGCNConv
from holonomy.layers.hyperbolic.hyperplanes import LorentzPLFC
from holonomy.layers.hyperbolic.linear import HTC, ExpMapHTC, FullyLorentzLinear, TangentLinear
from holonomy.layers.hyperbolic.links import EntailmentCones, FermiDiracDecoder
from holonomy.layers.hyperbolic.midpoint import HypPositionalEncoding, HypResidual
from holonomy.layers.hyperbolic.norms import HypBatchNorm, HypLayerNorm, HypRMSNorm
from holonomy.layers.hyperbolic.refinement import HRC, HypActivation, HypConcat, HypDropout
from holonomy.layers.node_encoders import DegreeNodeEncoder, LaplacianNodeEncoder, RandomWalkNodeEncoder
from holonomy.layers.products import ProductAttention, ProductLinear
from holonomy.layers.simplicial.attention import SimplicialAttention
from holonomy.layers.simplicial.encoder import SimplicialEncoderLayer
from holonomy.layers.simplicial.routers import ExpertChoice, PathRouter
from holonomy.layers.substructures import chordless_cycles, membership, ring_membership, substructure_membership
from holonomy.layers.tokens.attention import TokenAttention
from holonomy.layers.tokens.encoder import TokenEncoderLayer
from holonomy.layers.tokens.identifiers import (
    laplacian_identifiers,
    near_orthogonal_identifiers,
    orthogonal_identifiers,
    perturb_identifiers,
)
from holonomy.layers.tokens.tokenizer import GraphTokenizer, HyperedgeTokenizer, basis_residual
from holonomy.layers.virtual_node import VirtualNode
from holonomy.ops.simplicial_attention import simplicial_attention
from holonomy.ops.simplicial_attention.paths import simplicial_path_attention

__all__ = [
    "GCN",
    "HRC",
    "HTC",
    "ChromaticAttention",
    "ChromaticEncoderLayer",
    "DegreeNodeEncoder",
    "EdgeProjection",
    "EdgeTypeEncoder",
    "EntailmentCones",
    "EquivariantLinear",
    "ExpMapHTC",
    "ExpertChoice",
    "FermiDiracDecoder",
    "FullyLorentzLinear",
    "GraphTokenizer",
    "HGATConv",
    "HGCNConv",
    "HigherOrderAttention",
    "HigherOrderEncoderLayer",
    "HypActivation",
    "HypBatchNorm",
    "HypConcat",
    "HypDropout",
    "HypLayerNorm",
    "HypLinearAttention",
    "HypMLR",
    "HypPositionalEncoding",
    "HypPrototypes",
    "HypRMSNorm",
    "HypResidual",
    "HypSimplicialAttention",
    "HypSoftmaxAttention",
    "HyperedgeTokenizer",
    "LGCNConv",
    "LaplacianNodeEncoder",
    "LorentzPLFC",
    "NodeBatchNorm",
    "PairEncoder",
    "PathRouter",
    "ProductAttention",
    "ProductLinear",
    "Propagation",
    "RandomWalkEncoder",
    "RandomWalkNodeEncoder",
    "ShortestPathEncoder",
    "SimplicialAttention",
    "SimplicialEncoderLayer",
    "TangentLinear",
    "TokenAttention",
    "TokenEncoderLayer",
    "VirtualNode",
    "basis_residual",
    "bell",
    "category_product",
    "chordless_cycles",
    "edge_categories",
    "laplacian_identifiers",
    "membership",
    "moebius_matrix",
    "near_orthogonal_identifiers",
    "orthogonal_identifiers",
    "perturb_identifiers",
    "random_walk_encoding",
    "random_walk_node_encoding",
    "ring_membership",
    "set_partitions",
    "shortest_path_encoding",
    "simplicial_attention",
    "simplicial_path_attention",
    "substructure_membership",
    "zeta_matrix",
]
