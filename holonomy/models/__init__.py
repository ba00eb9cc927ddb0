"""Models, each readable alone."""

from holonomy.models.hypformer import Hypformer, HypformerBlock

__all__ = ["Hypformer", "HypformerBlock"]
