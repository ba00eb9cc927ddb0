"""Graphs and hypergraphs as tokens: identifiers, tokenizers and the encoder layer on tokens (TokenGT)."""

from holonomy.layers.tokens.attention import TokenAttention
from holonomy.layers.tokens.encoder import TokenEncoderLayer
from holonomy.layers.tokens.identifiers import (
    laplacian_identifiers,
    near_orthogonal_identifiers,
    orthogonal_identifiers,
    perturb_identifiers,
)
from holonomy.layers.tokens.tokenizer import GraphTokenizer, HyperedgeTokenizer, basis_residual

__all__ = [
    "GraphTokenizer",
    "HyperedgeTokenizer",
    "TokenAttention",
    "TokenEncoderLayer",
    "basis_residual",
    "laplacian_identifiers",
    "near_orthogonal_identifiers",
    "orthogonal_identifiers",
    "perturb_identifiers",
]
