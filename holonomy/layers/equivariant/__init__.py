"""Layers that commute with every permutation of the nodes, between tensors of any orders."""
