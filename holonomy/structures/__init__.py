"""Sets, graphs and hypergraphs in the layouts that layers use, and the ways between them."""

from holonomy.structures.batching import batches_by_size, join_graphs
from holonomy.structures.graph import Graph, Neighbours, sort_edges
from holonomy.structures.hyperedges import Hyperedges, on_features
from holonomy.structures.padded import PaddedGraphs, joint
from holonomy.structures.plan import HyperedgePlan
from holonomy.structures.sampling import Subgraph, neighbour_batches, node_partitions

__all__ = [
    "Graph",
    "HyperedgePlan",
    "Hyperedges",
    "Neighbours",
    "PaddedGraphs",
    "Subgraph",
    "batches_by_size",
    "join_graphs",
    "joint",
    "neighbour_batches",
    "node_partitions",
    "on_features",
    "sort_edges",
]
