"""Sets, graphs and hypergraphs in the layouts that layers use, and the ways between them."""

from holonomy.structures.graph import Graph
from holonomy.structures.hyperedges import (
    Hyperedges,
    PaddedGraphs,
    batches_by_size,
    join_graphs,
    joint,
    on_features,
)

__all__ = ["Graph", "Hyperedges", "PaddedGraphs", "batches_by_size", "join_graphs", "joint", "on_features"]
