"""Affine forms: enclosures of what a network computes on a ball of inputs, and certificates made of them."""
