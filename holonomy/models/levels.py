"""The level of a model's result: whether a row belongs to a graph, a node or an edge."""

from __future__ import annotations

import warnings
from typing import Literal

from torch import Tensor, nn

from holonomy._shapes import Float, Int
from holonomy.manifolds import Lorentz
from holonomy.structures import PaddedGraphs

Level = Literal["graph", "node", "edge"]
ORDER: dict[Level, int] = {"graph": 0, "node": 1, "edge": 2}
"""The order of a tensor with a row for each graph, node or edge."""


def level_of(
    model: nn.Module, level: Literal["graph", "node"] | None, batch: Tensor | None
) -> Literal["graph", "node"]:
    """The level a model was made with; nodes if left out, but for one more release graphs where ``batch`` is given."""
    if level is None and batch is not None:
        warnings.warn(
            f"{type(model).__name__} was made without level and is called with batch: it returns a row for each graph, "
            "and will return one for each node in the next release; pass level='graph' or level='node' to it.",
            FutureWarning,
            stacklevel=5,  # the call of the module: torch has two frames between
        )
        return "graph"
    return "node" if level is None else level


def centroids(
    points: Float[Tensor, "nodes ambient"],
    manifold: Lorentz,
    batch: Int[Tensor, " nodes"] | None,
    num_graphs: int | None,
) -> Float[Tensor, "graphs ambient"]:
    """The Lorentzian centroid of the nodes of each graph; without ``batch`` no number is read, for the compiler."""
    if batch is None:
        return manifold.centroid(points[None])
    graphs = PaddedGraphs.of(points, batch, num_graphs)
    return manifold.centroid(graphs.values, (~graphs.padding).to(points.dtype))
