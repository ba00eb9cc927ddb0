r"""Chromatic graph transformer: every pair of nodes attends, in colours that the graph determines (CSA figure 1).

.. math:: h^{(0)} = \mathrm{NodeEncoder}(X, A), \quad E^{(0)} = \mathrm{EdgeEncoder}(E^{\mathrm{bond}}, A), \quad
    h^{(l+1)} = \mathrm{CSA}(h^{(l)}, E^{(0)})
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.layers.chromatic.attention import DropoutOver, EdgeProjection, Mode, ProjectedEdges
from holonomy.layers.chromatic.encoder import ChromaticEncoderLayer
from holonomy.layers.chromatic.pairs import PairEncoder, RandomWalkEncoder, check_encodings
from holonomy.layers.encodings import random_walk_encoding, shortest_path_encoding
from holonomy.layers.substructures import ring_membership
from holonomy.models.graph_pairs import GraphPairs, without_padding
from holonomy.ops.heads import head_count


class ChromaticGraphTransformer(nn.Module):
    r"""Encoders of nodes and pairs, layers of chromatic attention, and a decoder of graphs or nodes (CSA figure 1).

    The input of a node is a linear map of its features, concatenated with ``walk_features`` channels of its return
    probabilities of random walks. Pairs are encoded once, see :class:`~holonomy.layers.PairEncoder`. Each layer has
    linear maps of its own for them, or, with ``share_edges``, all layers share them: fewer parameters and less work,
    but two tensors of pairs times ``hidden_features`` channels are stored.

    Args:
        in_features: features of a node; one-hot vectors for types of nodes.
        hidden_features: width d of the layers.
        out_features: number of classes, or of regression targets.
        edge_types: number of types of edges; ``edge_attr`` holds them as integers. With one there is no ``edge_attr``.
        edge_features: features of an edge, where ``edge_attr`` holds numbers in place of types; 0 for none.
        steps: of the random walks of pairs (RWSE), 0 for none.
        limit: of the shortest paths of pairs (SPDE), 0 for none.
        substructures: ``"added"`` or ``"product"``: how rings, or another relation of CSA definition 3.1, come in.
        walk_features: channels of a node for its own walks, 0 for none.
        pair_features: width of each part of the encoding of a pair, ``hidden_features // 2`` if left out.
        layers: number of layers.
        heads: attention heads, a divisor of ``hidden_features``.
        feedforward: width between the two linear maps of a layer, ``2 * hidden_features`` if left out.
        mode: ``"chromatic"``, ``"mono"`` or ``"additive"``, see :class:`~holonomy.layers.ChromaticAttention`.
        edge_values: whether pairs join the messages (CSA eq. 7).
        share_edges: whether layers share the maps of pairs to biases and values (CSA appendix A).
        level: what a row of the result belongs to, ``"graph"`` or ``"node"``.
        pooling: the ``"mean"`` or the ``"sum"`` of the nodes of a graph; at the level of nodes there is none.
        norm: ``"batch"`` or ``"layer"``.
        dropout: probability that an entry of what a layer adds, or between its linear maps, is dropped.
        attention_dropout: probability that a part of the filters is dropped.
        dropout_over: which parts: ``"edges"``, ``"nodes"`` or ``"channels"``.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size, probability or choice is none of the allowed, or an option has no effect beside the
            others.

    A model that tells a ring of six from two triangles, encoded once:

    >>> from holonomy.structures import join_graphs
    >>> _ = torch.manual_seed(0)
    >>> six = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    >>> twice_three = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])
    >>> model = ChromaticGraphTransformer(1, 16, 2, steps=3, layers=2, heads=2, norm="layer")
    >>> graphs = []
    >>> for one_way in (six, twice_three):
    ...     edge_index = torch.cat([one_way, one_way.flip(0)], dim=1)
    ...     graphs.append({"x": torch.ones(6, 1), "edge_index": edge_index, **model.encode(edge_index, 6)})
    >>> batch, y = join_graphs(graphs), torch.tensor([0, 1])
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> for _ in range(40):
    ...     optimizer.zero_grad()
    ...     loss = nn.functional.cross_entropy(model(**batch), y)
    ...     loss.backward()
    ...     optimizer.step()
    >>> bool((model.eval()(**batch).argmax(-1) == y).all())
    True
    """

    node_walks: RandomWalkEncoder | None
    shared: EdgeProjection | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        edge_types: int = 1,
        edge_features: int = 0,
        steps: int = 0,
        limit: int = 0,
        substructures: Literal["added", "product"] | None = None,
        walk_features: int = 0,
        pair_features: int | None = None,
        layers: int = 4,
        heads: int = 4,
        feedforward: int | None = None,
        mode: Mode = "chromatic",
        edge_values: bool = True,
        share_edges: bool = False,
        level: Literal["graph", "node"] = "graph",
        pooling: Literal["mean", "sum"] = "mean",
        norm: Literal["batch", "layer"] = "batch",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        dropout_over: DropoutOver = "edges",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(edge_values=edge_values, share_edges=share_edges)
        checks.positive_int("layers", layers)
        self.in_features = checks.positive_int("in_features", in_features)
        head_count(hidden_features, heads, "hidden_features")
        checks.positive_int("out_features", out_features)
        checks.floating_dtype(dtype)
        checks.positive_int("edge_types", edge_types)
        for name, value in {"edge_features": edge_features, "steps": steps, "walk_features": walk_features}.items():
            checks.nonnegative_int(name, value)
        if pair_features is not None:
            checks.positive_int("pair_features", pair_features)
        self.level = checks.one_of("level", level, ("graph", "node"))
        self.pooling = checks.one_of("pooling", pooling, ("mean", "sum"))
        self.edge_types, self.steps, self.limit, self.substructures = edge_types, steps, limit, substructures
        if edge_features and edge_types != 1:
            raise ValueError(f"edge_types must be 1 where edges have features in place of types, got {edge_types}.")
        if walk_features and not (steps and 0 < walk_features < hidden_features):
            raise ValueError(
                f"walk_features must be 0, or with steps > 0 less than hidden_features = {hidden_features}, "
                f"got {walk_features}."
            )
        half = max(1, hidden_features // 2)
        self.nodes = nn.Linear(in_features, hidden_features - walk_features, device=device, dtype=dtype)
        self.node_walks = RandomWalkEncoder(steps, walk_features, device=device, dtype=dtype) if walk_features else None
        self.pairs = PairEncoder(
            half if pair_features is None else pair_features,
            edge_types=edge_types,
            edge_features=edge_features,
            steps=steps,
            limit=limit,
            substructures=substructures,
            device=device,
            dtype=dtype,
        )
        width = self.pairs.out_features
        self.shared = None
        if share_edges:
            self.shared = EdgeProjection(
                width, hidden_features, heads, mode=mode, edge_values=edge_values, device=device, dtype=dtype
            )
        self.layers = nn.ModuleList(
            ChromaticEncoderLayer(
                hidden_features,
                heads,
                None if share_edges else width,
                feedforward=feedforward,
                mode=mode,
                edge_values=edge_values,
                norm=norm,
                dropout=dropout,
                attention_dropout=attention_dropout,
                dropout_over=dropout_over,
                device=device,
                dtype=dtype,
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(
            nn.Linear(hidden_features, half, device=device, dtype=dtype),
            nn.ReLU(),
            nn.Linear(half, out_features, device=device, dtype=dtype),
        )

    def encode(
        self, edge_index: Int[Tensor, "2 edges"], n: int, *, max_ring: int = 18, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """What this model reads of a graph's structure, a row a pair: compute it once for a data set.

        Rows of several graphs are concatenated, by :func:`~holonomy.structures.join_graphs` or by PyTorch Geometric.
        For another relation than rings, put its matrix (n, n), flattened, in the place of ``"related"``.

        Args:
            edge_index: ``(2, m)``, each edge in both directions.
            n: number of nodes.
            max_ring: nodes of the largest ring, where the model has substructures.
            dtype: of the walks; that of the model if left out.

        Returns:
            Of ``"walks"`` ``(n * n, steps)``, ``"distances"`` ``(n * n,)`` and ``"related"`` ``(n * n,)`` those that
            the model has.
        """
        encodings: dict[str, Tensor] = {}
        dtype = next(self.parameters()).dtype if dtype is None else dtype
        if self.steps:
            encodings["walks"] = random_walk_encoding(edge_index, n, self.steps, dtype=dtype).flatten(0, 1)
        if self.limit:
            encodings["distances"] = shortest_path_encoding(edge_index, n, self.limit).flatten()
        if self.substructures is not None:
            encodings["related"] = ring_membership(edge_index, n, max_ring).flatten()
        return encodings

    def forward(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | Int[Tensor, " edges"] | None = None,
        walks: Float[Tensor, "pairs steps"] | None = None,
        distances: Int[Tensor, " pairs"] | None = None,
        related: Bool[Tensor, " pairs"] | None = None,
        edge_weight: Float[Tensor, " edges"] | None = None,
        num_graphs: int | None = None,
    ) -> Float[Tensor, "rows out"]:
        r"""Scores of every graph, or of every node.

        Args:
            x: node features ``(n, in_features)``.
            edge_index: ``(2, m)``, each edge in both directions. Of an edge that is listed twice the largest type
                counts, and features are summed; a self-loop takes the place of a node's relation to itself.
            batch: the graph of each node ``(n,)``, numbered from zero; one graph if left out. The nodes of a graph
                have the order that its encodings have.
            edge_attr: types of edges ``(m,)``, or their features ``(m, edge_features)``.
            walks: of :meth:`encode`, the graphs' rows one after the other.
            distances: of :meth:`encode`.
            related: of :meth:`encode`.
            edge_weight: is not read; a weight of an edge is one of its features.
            num_graphs: their number, where some at the end have no node.

        Returns:
            ``(graphs, out_features)``, or ``(n, out_features)`` at the level of nodes.

        Raises:
            ValueError: if a shape does not fit, or an argument is missing or unread.
        """
        checks.unread(self, "pass them as a column of edge_attr", edge_weight=edge_weight)
        graphs = self._laid_out(x, edge_index, edge_attr, batch, walks, distances, related, num_graphs)
        h = self._layers(graphs)
        if self.level == "graph":
            return self.head(self._pooled(h, graphs.mask))
        return self.head(h[0] if graphs.layout is None else graphs.layout.rows(h))

    def padded(
        self,
        nodes: Float[Tensor, "graphs n dim"],
        categories: Int[Tensor, "graphs n n"],
        mask: Bool[Tensor, "graphs n"] | None = None,
        *,
        walks: Float[Tensor, "graphs n n steps"] | None = None,
        distances: Int[Tensor, "graphs n n"] | None = None,
        related: Bool[Tensor, "graphs n n"] | None = None,
        attributes: Float[Tensor, "graphs n n dim_edge"] | None = None,
    ) -> Float[Tensor, "graphs *n out"]:
        """Map graphs that are laid out already; what padding holds has no effect.

        Args:
            nodes: ``(graphs, n, in_features)``.
            categories: ``(graphs, n, n)``, see :func:`~holonomy.layers.edge_categories`.
            mask: ``(graphs, n)``, ``True`` at nodes.
            walks: ``(graphs, n, n, steps)``.
            distances: ``(graphs, n, n)``.
            related: ``(graphs, n, n)``.
            attributes: ``(graphs, n, n, edge_features)``, zero where there is no edge.

        Returns:
            ``(graphs, out_features)``, or ``(graphs, n, out_features)`` at the level of nodes, zero at padding.

        Raises:
            ValueError: if a shape does not fit, or an argument is missing or unread.
        """
        checks.last_axis("nodes", nodes, self.in_features, "in_features", self.nodes)
        checks.shaped("nodes", nodes, (*nodes.shape[:1], *nodes.shape[-2:]), "(graphs, n, in_features) = ")
        if mask is not None:
            checks.node_mask(mask, nodes.shape[:2])
        pairs = (*nodes.shape[:2], nodes.shape[1])
        checks.shaped("categories", categories, pairs, "(graphs, n, n) = ")
        given = {"walks": walks, "distances": distances, "related": related, "attributes": attributes}
        check_encodings(self.pairs, pairs, **given)
        graphs = without_padding(GraphPairs(nodes, mask, categories, walks, distances, related, attributes))
        h = self._layers(graphs)
        if self.level == "graph":
            return self.head(self._pooled(h, mask))
        out = self.head(h)
        return out if mask is None else out.masked_fill(~mask[..., None], 0.0)

    def attention_maps(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | Int[Tensor, " edges"] | None = None,
        walks: Float[Tensor, "pairs steps"] | None = None,
        distances: Int[Tensor, " pairs"] | None = None,
        related: Bool[Tensor, " pairs"] | None = None,
    ) -> list[Tensor]:
        """The attention filters of every layer, as CSA figures 3 and 4 draw them; call it in evaluation mode.

        Arguments are those of :meth:`forward`. For each layer there is ``(graphs, n, n, hidden_features)``: node i
        attends to node j, in each channel a distribution over j.

        >>> model = ChromaticGraphTransformer(1, 8, 1, layers=3)
        >>> maps = model.attention_maps(torch.ones(2, 1), torch.tensor([[0, 1], [1, 0]]))
        >>> len(maps), maps[0].shape
        (3, torch.Size([1, 2, 2, 8]))
        """
        graphs = self._laid_out(x, edge_index, edge_attr, batch, walks, distances, related)
        h, edges = self._start(graphs)
        maps = list[Tensor]()
        for layer in self._encoder():
            maps.append(layer.attention.filters(h, edges, graphs.mask))
            h = layer(h, edges, graphs.mask)
        return maps

    def _encoder(self) -> list[ChromaticEncoderLayer]:
        return [cast("ChromaticEncoderLayer", layer) for layer in self.layers]

    def _start(self, graphs: GraphPairs) -> tuple[Tensor, Tensor | ProjectedEdges]:
        """h^(0), and E^(0) or what all layers make of it."""
        edges = self.pairs(graphs.categories, graphs.walks, graphs.distances, graphs.related, graphs.attributes)
        h = self.nodes(graphs.nodes)
        if self.node_walks is not None and graphs.walks is not None:
            # Walks from a node to itself say where it lies: the diagonal of CSA eq. 12.
            returns = graphs.walks.diagonal(dim1=1, dim2=2).transpose(1, 2)
            h = torch.cat([h, self.node_walks(returns)], -1)
        return h, edges if self.shared is None else self.shared(edges)

    def _layers(self, graphs: GraphPairs) -> Tensor:
        h, edges = self._start(graphs)
        for layer in self._encoder():
            h = layer(h, edges, graphs.mask)
        return h

    def _pooled(self, h: Tensor, mask: Tensor | None) -> Tensor:
        total = h.sum(1)  # padding is zero
        if self.pooling == "sum":
            return total
        count = h.new_full((1, 1), h.shape[1]) if mask is None else mask.sum(1, keepdim=True)
        return total / count.clamp(min=1)

    def _laid_out(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None,
        batch: Tensor | None,
        walks: Tensor | None,
        distances: Tensor | None,
        related: Tensor | None,
        num_graphs: int | None = None,
    ) -> GraphPairs:
        types, features = (None, edge_attr) if self.edge_types == 1 else (edge_attr, None)
        if self.edge_types == 1:
            checks.edge_attr(features, self.pairs.edges.edge_features)
        elif types is None:
            raise ValueError(f"edge_attr must have shape (edges,), in [0, edge_types = {self.edge_types}), got None.")
        if features is not None:
            checks.last_axis("edge_attr", features, self.pairs.edges.edge_features, "edge_features", self.nodes)
        checks.only_with_batch(num_graphs, batch)
        checks.graph(x, edge_index, features, batch)
        checks.last_axis("x", x, self.in_features, "in_features", self.nodes)
        if types is not None:
            checks.edge_types(types, self.edge_types, edge_index)
        # Encodings hold a row for each pair of nodes of one graph, n^2 of them.
        pairs = x.shape[0] ** 2
        if batch is not None and any(rows is not None for rows in (walks, distances, related)):
            pairs = int(torch.bincount(batch).square().sum())
        check_encodings(self.pairs, (pairs,), walks=walks, distances=distances, related=related)
        return GraphPairs.of(x, edge_index, types, features, batch, walks, distances, related, num_graphs)
