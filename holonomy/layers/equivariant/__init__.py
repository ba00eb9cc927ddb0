"""Layers that commute with every permutation of the nodes, between tensors of any orders."""

from holonomy.layers.equivariant.basis.partitions import bell, moebius_matrix, set_partitions, zeta_matrix
from holonomy.layers.equivariant.higher_order.attention import HigherOrderAttention
from holonomy.layers.equivariant.higher_order.encoder import HigherOrderEncoderLayer
from holonomy.layers.equivariant.linear.layer import EquivariantLinear

__all__ = [
    "EquivariantLinear",
    "HigherOrderAttention",
    "HigherOrderEncoderLayer",
    "bell",
    "moebius_matrix",
    "set_partitions",
    "zeta_matrix",
]
