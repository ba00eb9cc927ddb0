"""Layers: hyperbolic ones, permutation-equivariant ones, and graph encoders to run beside them."""

from holonomy.layers.equivariant import EquivariantLinear, bell, moebius_matrix, set_partitions, zeta_matrix
from holonomy.layers.graph import GCN, Propagation
from holonomy.layers.hyperbolic import (
    HRC,
    HTC,
    ExpMapHTC,
    FullyLorentzLinear,
    HypActivation,
    HypBatchNorm,
    HypConcat,
    HypDropout,
    HypLayerNorm,
    HypLinearAttention,
    HypMLR,
    HypPositionalEncoding,
    HypPrototypes,
    HypResidual,
    HypSoftmaxAttention,
    TangentLinear,
)

__all__ = [
    "GCN",
    "HRC",
    "HTC",
    "EquivariantLinear",
    "ExpMapHTC",
    "FullyLorentzLinear",
    "HypActivation",
    "HypBatchNorm",
    "HypConcat",
    "HypDropout",
    "HypLayerNorm",
    "HypLinearAttention",
    "HypMLR",
    "HypPositionalEncoding",
    "HypPrototypes",
    "HypResidual",
    "HypSoftmaxAttention",
    "Propagation",
    "TangentLinear",
    "bell",
    "moebius_matrix",
    "set_partitions",
    "zeta_matrix",
]
