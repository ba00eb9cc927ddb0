"""Equivariant linear maps between tensors of any orders, dense and on hyperedges."""
