"""Layers: hyperbolic ones, and the Euclidean graph encoders that run beside them."""

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
]
