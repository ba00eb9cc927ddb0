"""Chromatic self-attention, its encoder layer, and the encoders of pairs of nodes (CSA)."""
