"""Models, each readable alone."""

from holonomy.models.hypformer import Hypformer, HypformerBlock
from holonomy.models.tokengt import TokenGT

__all__ = ["Hypformer", "HypformerBlock", "TokenGT"]
