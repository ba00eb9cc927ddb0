"""Layers between hyperboloids: linear maps, refinements, midpoints, attention, classifiers."""

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

__all__ = [
    "HRC",
    "HTC",
    "EntailmentCones",
    "ExpMapHTC",
    "FermiDiracDecoder",
    "FullyLorentzLinear",
    "HGATConv",
    "HGCNConv",
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
    "LGCNConv",
    "LorentzPLFC",
    "TangentLinear",
]
