r"""Hypformer: a transformer whose every layer lies in hyperbolic space (Yang et al., KDD 2024, section 4.6, figure 4).

Points are ambient ``(..., d+1)``, time first. Curvatures are negative and, by default, learned: one for the input,
one between blocks, and two inside each block (attention and feed-forward).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._parts import Group
from holonomy._shapes import Float, Int
from holonomy.layers import GCN, Propagation
from holonomy.layers.hyperbolic.block import Norm
from holonomy.layers.hyperbolic.classifier import decoder_of
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.layers.hyperbolic.refinement import from_tangent
from holonomy.manifolds import Lorentz
from holonomy.models.levels import centroids, level_of
from holonomy.ops.heads import head_count
from holonomy.ops.linear_attention.reference import Average
from holonomy.ops.propagation import check_graph
from holonomy.ops.softmax_attention import Similarity
from holonomy.structures import Graph, PaddedGraphs


class Hypformer(nn.Module):
    r"""Hypformer, with an optional graph encoder in parallel (section 4.6, figure 4).

    Node features are mapped into hyperbolic space by the exponential map at the origin, then by HTC; blocks of linear
    (or softmax) attention follow, each layer with a curvature of its own. A graph neural network runs in parallel on
    the same features; both results are mixed in the tangent space at the origin,

    .. math:: z = (1 - w) \log_o(x) + w\, g, \qquad w = \text{graph\_weight},

    and decoded. Train it with :class:`holonomy.optim.RiemannianAdam`; without prototypes all parameters are Euclidean
    and any optimizer of torch will do.

    Args:
        in_features: number of features of a node.
        hidden_features: dimension of the hyperbolic spaces, and of the graph encoder's output.
        out_features: number of classes, or of regression targets.
        layers: number of blocks.
        heads: attention heads per block, a divisor of ``hidden_features``.
        feedforward: hidden dimension of each feed-forward; ``4 * hidden_features`` if left out.
        attention: ``"linear"``, at a cost linear in the nodes, or ``"softmax"``.
        similarity: what softmax attention compares, see :class:`~holonomy.layers.HypSoftmaxAttention`.
        power: the sharpening exponent p of linear attention (eq. 19).
        average: of linear attention: ``"space"`` parts as printed, or the ``"midpoint"``.
        dropout: probability of dropping a space coordinate, after the first HTC and in the blocks.
        output_dropout: the same, on the transformer's output before it is mixed with the graph encoder's.
        activation: a function of space parts, after the first HTC and in the feed-forwards.
        norm: ``"layer"`` or ``"rms"``, see :class:`~holonomy.layers.HypLayerNorm` and
            :class:`~holonomy.layers.HypRMSNorm`.
        norm_eps: added to the variance or mean square by the norms.
        curvature: the initial curvature of every manifold.
        learnable_curvature: whether the curvatures receive gradients.
        transformer: ``False`` leaves the graph encoder alone, for comparison; what shapes blocks is not read then.
        graph_encoder: any module called as ``(x, edge_index)``, with ``edge_weight=`` or ``edge_attr=`` where they are
            given, that gives ``(n, hidden_features)``: a convolution of PyTorch Geometric, say; ``"gcn"`` for a
            :class:`~holonomy.layers.GCN` of two layers; ``None`` for no graph at all.
        graph_weight: the weight w of the graph encoder, where there is a transformer beside it.
        level: what a row of the result belongs to, ``"node"`` (the default) or ``"graph"``. A model made without it and
            called with ``batch`` returns graphs in this release, with a FutureWarning.
        decoder: ``"linear"`` on the logarithm at the origin, ``"mlr"`` for hyperbolic multinomial logistic regression,
            or ``"prototypes"``: one learned point a class.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        TypeError: if an argument is of another type than it says.
        ValueError: if a size, probability, weight or choice is none of the allowed, if an option of the other attention
            is given, or if both branches are left out.

    A model that learns to tell the two ends of a path apart:

    >>> from holonomy.optim import RiemannianAdam
    >>> _ = torch.manual_seed(0)
    >>> path = torch.stack([torch.arange(9), torch.arange(1, 10)])
    >>> edge_index = torch.cat([path, path.flip(0)], dim=1)  # both directions, as in PyTorch Geometric
    >>> x, y = torch.randn(10, 4), (torch.arange(10) >= 5).long()
    >>> model = Hypformer(4, 8, 2, layers=1)
    >>> optimizer = RiemannianAdam(model.parameters(), lr=0.02)
    >>> for _ in range(60):
    ...     optimizer.zero_grad()
    ...     loss = nn.functional.cross_entropy(model(x, edge_index), y)
    ...     loss.backward()
    ...     optimizer.step()
    >>> bool((model(x, edge_index).argmax(-1) == y).all())
    True
    >>> sorted(model.curvatures())
    ['block0', 'block0.attention', 'block0.feedforward', 'input', 'output']
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        layers: int = 2,
        heads: int = 1,
        feedforward: int | None = None,
        attention: Literal["linear", "softmax"] = "linear",
        similarity: Similarity = "geodesic_squared",
        power: float = 2.0,
        average: Average = "space",
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        norm: Norm = "layer",
        norm_eps: float = numerics.LAYER_NORM_EPS,
        curvature: float = -1.0,
        learnable_curvature: bool = True,
        transformer: bool = True,
        graph_encoder: nn.Module | Literal["gcn"] | None = "gcn",
        graph_weight: float = 0.5,
        level: Literal["graph", "node"] | None = None,
        decoder: Literal["linear", "mlr", "prototypes"] = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(learnable_curvature=learnable_curvature, transformer=transformer)
        self.in_features = checks.positive_int("in_features", in_features)
        head_count(hidden_features, heads if transformer else 1, "hidden_features")
        self.hidden_features = hidden_features
        checks.positive_int("out_features", out_features)
        checks.positive_int("layers", layers)
        checks.in_range("output_dropout", output_dropout, 0.0, 1.0)
        checks.one_of("decoder", decoder, ("linear", "mlr", "prototypes"))
        if level is not None:
            checks.one_of("level", level, ("graph", "node"))
        self.level: Literal["graph", "node"] | None = level
        if isinstance(graph_encoder, str):
            checks.one_of("graph_encoder", graph_encoder, ("gcn",))
            graph_encoder = GCN(
                in_features, hidden_features, hidden_features, dropout=dropout, device=device, dtype=dtype
            )
        if not (graph_encoder is None or isinstance(graph_encoder, nn.Module)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"graph_encoder must be a module, 'gcn' or None, got {graph_encoder!r}.")
        if graph_encoder is None and not transformer:
            raise ValueError("graph_encoder must be a module or 'gcn' when transformer is False, got None.")
        self.graph_weight = checks.in_range("graph_weight", graph_weight, 0.0, 1.0)
        self.graph_encoder = graph_encoder

        # With neither a transformer, midpoints of graphs nor a hyperbolic decoder nothing would move this curvature.
        moved = learnable_curvature and (transformer or level == "graph" or decoder != "linear")
        self.manifold_out = Lorentz(curvature, learnable=moved, device=device, dtype=dtype)
        # Where it is left out it takes no memory and no random numbers, and wrong options are refused all the same.
        encoder = HypformerEncoder(
            in_features,
            hidden_features,
            self.manifold_out,
            layers=layers,
            heads=heads,
            feedforward=feedforward,
            attention=attention,
            similarity=similarity,
            power=power,
            average=average,
            dropout=dropout,
            output_dropout=output_dropout,
            activation=activation,
            norm=norm,
            norm_eps=norm_eps,
            curvature=curvature,
            learnable_curvature=learnable_curvature,
            device=device if transformer else "meta",
            dtype=dtype,
        )
        self.encoder = encoder if transformer else None
        # Kept apart from the decoder's class, so that another module may stand in its place.
        self.decodes_points = decoder != "linear"
        self.decoder = decoder_of(decoder, hidden_features, out_features, self.manifold_out, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        edge_index: Int[Tensor, "2 edges"] | Graph | None = None,
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        edge_weight: Float[Tensor, " edges"] | None = None,
        num_graphs: int | None = None,
        group: Group | None = None,
    ) -> Float[Tensor, "rows out"]:
        """Scores of every node, or of every graph.

        Args:
            x: node features ``(n, in_features)``; sparse ones, CSR or COO, are multiplied sparsely.
            edge_index: ``(2, m)``, each edge in both directions, or a :class:`~holonomy.structures.Graph` that
                ``graph_encoder`` takes; read by it only.
            batch: the graph of each node ``(n,)``, numbered from zero; one graph if left out. Nodes attend within
                their graph.
            edge_attr: edge features ``(m, edge_features)``, for a ``graph_encoder`` that takes them.
            edge_weight: ``(m,)``, for a ``graph_encoder`` that takes them, as :class:`~holonomy.layers.GCN` does, of
                either sign.
            num_graphs: their number, where some at the end have no node.
            group: processes that share the nodes of one graph, of which ``x`` are those of this one. It takes linear
                attention and no graph encoder, as edges join the nodes of different processes: give features that were
                propagated before, by :func:`holonomy.distributed.propagate_rows`.

        Returns:
            ``(n, out_features)``, or ``(graphs, out_features)`` at the level of graphs, each decoded at the Lorentzian
            centroid of its nodes.

        Raises:
            ValueError: if there is a graph encoder and no ``edge_index``, if ``x`` has another number of features, or
                if there is a ``group`` beside softmax attention, a graph encoder or ``batch``.
        """
        checks.only_with_batch(num_graphs, batch)
        mixed = self._mix(x, edge_index, batch, edge_attr, edge_weight, group)
        if level_of(self, self.level, batch) == "graph":
            mixed = self._at_origin(
                centroids(self._points(mixed), self.manifold_out, batch, num_graphs)
                if group is None
                else self.manifold_out.centroid(self._points(mixed), group=group)[None]
            )
        elif num_graphs is not None:
            checks.number_of_graphs(batch, num_graphs)
        return self.decoder(self._points(mixed) if self.decodes_points else mixed)

    def embed(
        self,
        x: Tensor,
        edge_index: Int[Tensor, "2 edges"] | Graph | None = None,
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        edge_weight: Float[Tensor, " edges"] | None = None,
        group: Group | None = None,
    ) -> Float[Tensor, "nodes ambient"]:
        """What the decoder reads of each node: points ``(n, hidden_features + 1)`` of ``manifold_out``.

        Arguments are those of :meth:`forward`; nodes attend within their graph.

        >>> model = Hypformer(3, 4, 2, graph_encoder=None)
        >>> model.embed(torch.zeros(5, 3)).shape
        torch.Size([5, 5])
        """
        return self._points(self._mix(x, edge_index, batch, edge_attr, edge_weight, group))

    def attention_maps(
        self,
        x: Tensor,
        edge_index: Int[Tensor, "2 edges"] | Graph | None = None,
        batch: Int[Tensor, " nodes"] | None = None,
    ) -> list[Tensor]:
        """The attention of every block and head; call it in evaluation mode.

        Arguments are those of :meth:`forward`. For each block there is ``(graphs, heads, n, n)``, n the nodes of the
        largest graph, in the order of ``x``: node i attends to node j. Rows sum to one, or are zero where a node
        attends to none and beyond the nodes of a graph. It is a ValueError if there is no transformer, or if there were
        more than 2**30 weights.

        >>> model = Hypformer(3, 8, 2, heads=2).eval()
        >>> maps = model.attention_maps(torch.randn(5, 3), batch=torch.tensor([0, 0, 0, 1, 1]))
        >>> len(maps), maps[0].shape
        (2, torch.Size([2, 2, 3, 3]))
        """
        checks.nodes(x, batch)
        checks.last_axis("x", x, self.in_features, "in_features", sparse=True)
        if edge_index is not None:
            check_graph(x, edge_index, batch, None)
        if self.encoder is None:
            raise ValueError("transformer must be True for attention maps, got a model of the graph encoder alone.")
        points = self.encoder.points(x)
        if batch is None:
            return self.encoder.attention_maps(points[None])
        graphs = PaddedGraphs.of(points, batch)
        return self.encoder.attention_maps(graphs.values, graphs.padding)

    def curvatures(self) -> dict[str, Float[Tensor, " 1"]]:
        """The curvature of each manifold, by where it lies.

        ``"input"``, then for each block ``"block0"`` (its input and residuals), ``"block0.attention"``,
        ``"block0.feedforward"``, ..., then ``"output"``.
        """
        named = {} if self.encoder is None else self.encoder.curvatures()
        return named | {"output": self.manifold_out.curvature}

    def _points(self, tangent: Float[Tensor, "... dim"]) -> Float[Tensor, "... ambient"]:
        return from_tangent(tangent, self.manifold_out)

    def _at_origin(self, x: Float[Tensor, "... ambient"]) -> Float[Tensor, "... dim"]:
        return self.manifold_out.space(self.manifold_out.logmap0(x))

    @staticmethod
    def _encoded(encoder: HypformerEncoder, x: Tensor, batch: Tensor | None, group: Group | None) -> Tensor:
        if batch is None:
            return encoder(encoder.points(x), group=group)
        graphs = PaddedGraphs.of(encoder.points(x), batch)
        return graphs.rows(encoder(graphs.values, graphs.padding))

    def _mix(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None,
        batch: Tensor | None,
        edge_attr: Tensor | None,
        edge_weight: Tensor | None,
        group: Group | None,
    ) -> Float[Tensor, "nodes dim"]:
        """Both branches in the tangent space at the origin."""
        checks.last_axis("x", x, self.in_features, "in_features", sparse=True)
        of_edges = {"edge_attr": edge_attr, "edge_weight": edge_weight}
        of_edges = {name: value for name, value in of_edges.items() if value is not None}
        if of_edges and (edge_index is None or self.graph_encoder is None):
            raise ValueError(f"{next(iter(of_edges))} must be None without a graph encoder and its edge_index.")
        if isinstance(self.graph_encoder, (GCN, Propagation)):
            checks.unread(self.graph_encoder, "pass a graph_encoder that does", edge_attr=edge_attr)
        if edge_index is not None:
            check_graph(x, edge_index, batch, edge_weight)
        if group is not None:
            self._refuse_sharded(batch)
        branches: list[Tensor] = []
        if self.encoder is not None:
            branches.append(self._at_origin(self._encoded(self.encoder, x, batch, group)))
        if self.graph_encoder is not None:
            if edge_index is None:
                raise ValueError("edge_index must be given, for the model has a graph encoder; got None.")
            encoded = self.graph_encoder(x, edge_index, **of_edges)
            checks.floating("graph_encoder(x, edge_index)", encoded)
            wanted = (x.shape[0], self.hidden_features)
            if encoded.shape != wanted:
                raise ValueError(
                    f"graph_encoder must give (nodes, hidden_features) = {wanted}, got {tuple(encoded.shape)}."
                )
            branches.append(encoded)
        return branches[0] if len(branches) == 1 else torch.lerp(branches[0], branches[1], self.graph_weight)

    def _refuse_sharded(self, batch: Tensor | None) -> None:
        """What nodes on several processes are not taken with."""
        if self.graph_encoder is not None:
            raise ValueError(
                "group must be None beside a graph encoder, whose edges join nodes of different processes; make the "
                f"model with graph_encoder=None and propagate the features before, got {type(self.graph_encoder)}."
            )
        if batch is not None:
            raise ValueError("batch must be None with group: processes share the nodes of one graph, got several.")
