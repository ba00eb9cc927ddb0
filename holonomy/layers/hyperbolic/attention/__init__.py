"""Attention between points of the hyperboloid: linear (Hypformer eqs. 14-19), softmax (eqs. 3-5), simplicial."""

from holonomy.layers.hyperbolic.attention.linear import HypLinearAttention
from holonomy.layers.hyperbolic.attention.simplicial import HypSimplicialAttention
from holonomy.layers.hyperbolic.attention.softmax import HypSoftmaxAttention

__all__ = ["HypLinearAttention", "HypSimplicialAttention", "HypSoftmaxAttention"]
