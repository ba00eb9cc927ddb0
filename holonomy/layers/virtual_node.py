"""A learned node in each graph that is joined to all others, so that any two nodes are two steps apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Float, Int


class VirtualNode(nn.Module):
    r"""One more node in each graph, joined in both directions to all of its nodes (Gilmer et al. 2017, section 5.2).

    Its features are learned, and those of its edges if edges have features. In a model of graphs that follows, it
    exchanges messages with all nodes in every layer. It is called as models are and returns their arguments::

        graph = virtual(x, edge_index, batch)
        node_model(**graph)[: len(x)]  # of the nodes
        node_model(**graph)[len(x) :]  # of the virtual nodes, one a graph: Graphormer's readout (Ying et al. 2021, 3.2)

    A model that averages the nodes of a graph averages over the virtual node, too. A virtual node has as many
    neighbours as its graph has nodes, so use convolutions that average or normalise.

    Args:
        features: d, of a node.
        edge_features: attributes of an edge, 0 for none.
        edge_types: number of types of edges, for ``edge_attr`` of integers, 0 for none. The new edges have one type
            more, this number: the model that follows is made with ``edge_types + 1``.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if ``features`` is not positive, ``edge_features`` or ``edge_types`` is negative, or both are given.

    >>> graph = VirtualNode(4)(torch.randn(3, 4), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 0, 1]))
    >>> graph["batch"].tolist()  # nodes 3 and 4 are virtual
    [0, 0, 1, 0, 1]
    >>> graph["edge_index"].tolist()
    [[0, 1, 0, 1, 2, 3, 3, 4], [1, 0, 3, 3, 4, 0, 1, 2]]
    """

    def __init__(
        self,
        features: int,
        *,
        edge_features: int = 0,
        edge_types: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.features = checks.positive_int("features", features)
        self.edge_features = checks.nonnegative_int("edge_features", edge_features)
        self.edge_types = checks.nonnegative_int("edge_types", edge_types)
        if edge_features and edge_types:
            raise ValueError(f"edge_types must be 0 where edges have features in place of types, got {edge_types}.")
        self.node = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        # One kind of edge in both directions, the paper's "special edge type".
        self.edge = nn.Parameter(torch.empty(edge_features, device=device, dtype=dtype)) if edge_features else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the features anew."""
        for vector in self.parameters():
            nn.init.normal_(vector)

    def forward(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | Int[Tensor, " edges"] | None = None,
        num_graphs: int | None = None,
    ) -> dict[str, Tensor]:
        """The same graphs with their virtual nodes, as keyword arguments of a model.

        Args:
            x: node features ``(n, features)``.
            edge_index: ``(2, m)``, sources and targets.
            batch: the graph of each node ``(n,)``, numbered from zero; one graph if left out.
            edge_attr: edge features ``(m, edge_features)``, or types ``(m,)``, exactly where there are some.
            num_graphs: their number, where some at the end have no node; each of these gets its virtual node.

        Returns:
            ``"x"`` ``(n + graphs, features)``, the virtual nodes last; ``"edge_index"`` ``(2, m + 2 n)``, the new edges
            last, first those to virtual nodes, then those from them; ``"batch"`` and ``"edge_attr"`` where they came.

        Raises:
            ValueError: if shapes do not fit, or ``edge_attr`` is missing or comes for a module made without it.
        """
        self._check(x, edge_index, batch, edge_attr, num_graphs)
        n, graphs = len(x), checks.number_of_graphs(batch, num_graphs)
        nodes, virtual = torch.arange(n + graphs, device=x.device).split([n, graphs])
        own = virtual.expand(n) if batch is None else n + batch.long()
        to, back = torch.stack([nodes, own]), torch.stack([own, nodes])
        graph = {
            "x": torch.cat([x, self.node.to(x).expand(graphs, -1)]),
            "edge_index": torch.cat([edge_index, to, back], 1),
        }
        if batch is not None:
            graph["batch"] = torch.cat([batch, virtual - n])
        if edge_attr is not None:
            new = edge_attr.new_full((2 * n,), self.edge_types)
            if self.edge is not None:
                new = self.edge.to(edge_attr).expand(2 * n, -1)
            graph["edge_attr"] = torch.cat([edge_attr, new])
        return graph

    def _check(
        self, x: Tensor, edge_index: Tensor, batch: Tensor | None, edge_attr: Tensor | None, num_graphs: int | None
    ) -> None:
        checks.graph(x, edge_index, None if self.edge_types else edge_attr, batch)
        checks.only_with_batch(num_graphs, batch)
        checks.last_axis("x", x, self.features, "features", self)
        if (edge_attr is None) != (self.edge is None and not self.edge_types):
            wanted = f"given exactly if edge_features = {self.edge_features} or edge_types = {self.edge_types} is not 0"
            raise ValueError(f"edge_attr must be {wanted}, got {type(edge_attr).__name__}.")
        if edge_attr is not None and self.edge_types:
            checks.edge_types(edge_attr, self.edge_types, edge_index)
            if self.edge_types > torch.iinfo(edge_attr.dtype).max:
                held = f"of a dtype that holds edge_types = {self.edge_types}, the type of the new edges"
                raise TypeError(f"edge_attr must be {held}, got {edge_attr.dtype}.")
        elif edge_attr is not None:
            checks.last_axis("edge_attr", edge_attr, self.edge_features, "edge_features", self)

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return f"{self.features}, edge_features={self.edge_features}, edge_types={self.edge_types}"
