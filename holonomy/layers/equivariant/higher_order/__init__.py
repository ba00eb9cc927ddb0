"""Higher-order attention and its encoder layer, dense and on hyperedges."""
