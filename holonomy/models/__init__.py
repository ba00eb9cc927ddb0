"""Models, each readable alone."""

from holonomy.layers.hyperbolic.block import HypformerBlock
from holonomy.models.chromatic_graph_transformer import ChromaticGraphTransformer
from holonomy.models.hgcn import HGCN
from holonomy.models.higher_order_transformer import HigherOrderTransformer
from holonomy.models.hyp_tokengt import HypTokenGT
from holonomy.models.hyp_transformer import HypTransformer
from holonomy.models.hypformer import Hypformer
from holonomy.models.invariant_graph_network import InvariantGraphNetwork
from holonomy.models.simplicial_transformer import SimplicialTransformer
from holonomy.models.tokengt import TokenGT

__all__ = [
    "HGCN",
    "ChromaticGraphTransformer",
    "HigherOrderTransformer",
    "HypTokenGT",
    "HypTransformer",
    "Hypformer",
    "HypformerBlock",
    "InvariantGraphNetwork",
    "SimplicialTransformer",
    "TokenGT",
]
