"""Layers that commute with every permutation of the nodes, of any order."""

from holonomy.layers.equivariant.linear import EquivariantLinear
from holonomy.layers.equivariant.partitions import bell, moebius_matrix, set_partitions, zeta_matrix

__all__ = ["EquivariantLinear", "bell", "moebius_matrix", "set_partitions", "zeta_matrix"]
