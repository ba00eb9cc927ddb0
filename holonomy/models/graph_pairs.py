"""Graphs as models of pairs of nodes read them: from the lists that PyTorch Geometric holds to padded tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holonomy._shapes import Bool, Float, Int
from holonomy.structures import PaddedGraphs, joint


class GraphPairs(NamedTuple):
    """Nodes, and what is known of each pair of them, of several graphs."""

    nodes: Tensor  # (graphs, n, features)
    mask: Tensor | None  # (graphs, n), True at nodes; None where there is no padding
    categories: Tensor  # (graphs, n, n), see edge_categories
    walks: Tensor | None = None  # (graphs, n, n, steps)
    distances: Tensor | None = None  # (graphs, n, n)
    related: Tensor | None = None  # (graphs, n, n)
    attributes: Tensor | None = None  # (graphs, n, n, edge_features)
    layout: PaddedGraphs | None = None  # where rows of nodes went; None for one graph

    @staticmethod
    def of(
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        edge_type: Int[Tensor, " edges"] | None,
        edge_attr: Float[Tensor, "edges dim_edge"] | None,
        batch: Int[Tensor, " nodes"] | None,
        walks: Float[Tensor, "pairs steps"] | None = None,
        distances: Int[Tensor, " pairs"] | None = None,
        related: Bool[Tensor, " pairs"] | None = None,
        num_graphs: int | None = None,
    ) -> GraphPairs:
        """Lay graphs out, without a loop over them; the arguments were checked before."""
        rows = (walks, distances, related)
        if batch is None:
            layout, mask, nodes = None, None, x[None]
            slots = torch.arange(x.shape[0], device=x.device)
            square = (1, x.shape[0], x.shape[0])
            laid_out = tuple(None if r is None else r.unflatten(0, square) for r in rows)
        else:
            layout = PaddedGraphs.of(x, batch, num_graphs)
            nodes, slots = layout.values, layout.slots
            # Graphs of one size need no mask; this is known without asking the device.
            mask = None if slots.shape[0] == layout.padding.numel() else ~layout.padding
            laid_out = tuple(None if r is None else layout.pairs(r) for r in rows)
        shape = (nodes.shape[0], nodes.shape[1], nodes.shape[1])
        width = max(shape[1], 1)
        # Places in the flattened (graphs, n, n): the graph and node of the source, then the node of the target.
        source, target = slots[edge_index.long()]
        place = source * width + target % width
        types = torch.zeros_like(place) if edge_type is None else edge_type.long()
        # CSA eq. 8 of all graphs at once: 0 for no edge, 1 on the diagonal, 2 + type at edges, which stand above.
        empty = place.new_zeros(shape[0] * shape[1] * shape[2]).index_fill(0, slots * width + slots % width, 1)
        categories = empty.scatter_reduce(0, place, types + 2, "amax").unflatten(0, shape)
        attributes = None
        if edge_attr is not None:
            zeros = edge_attr.new_zeros(empty.shape[0], edge_attr.shape[1])
            attributes = zeros.index_add(0, place, edge_attr).unflatten(0, shape)
        walks, distances, related = laid_out
        return GraphPairs(nodes, mask, categories, walks, distances, related, attributes, layout)


# Not a method: dynamo of torch 2.13 cannot look one up on a tuple that it has made itself.
def without_padding(graphs: GraphPairs) -> GraphPairs:
    """Zeros in the place of whatever padding holds."""
    if graphs.mask is None:
        return graphs
    away = ~joint(graphs.mask, 2)
    # Not by `_replace`, which the compiler of torch 2.6 does not know.
    return GraphPairs(
        nodes=graphs.nodes.masked_fill(~graphs.mask[..., None], 0),
        mask=graphs.mask,
        categories=graphs.categories.masked_fill(away, 0),
        walks=_clean(graphs.walks, away),
        distances=_clean(graphs.distances, away),
        related=_clean(graphs.related, away),
        attributes=_clean(graphs.attributes, away),
        layout=graphs.layout,
    )


def _clean(pairs: Tensor | None, away: Tensor) -> Tensor | None:
    if pairs is None:
        return None
    return pairs.masked_fill(away if pairs.ndim == away.ndim else away[..., None], 0)
