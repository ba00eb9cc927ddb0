r"""TokenGT's tokens in Hypformer's blocks: a hyperbolic transformer on the nodes and edges of a graph.

In neither paper. The tokens (TokenGT section 2) are tangent vectors at the origin of a first hyperboloid, the encoder
is Hypformer's (figure 4), and what is read of the ``[graph]`` token or of the nodes is decoded as there. It is
equivariant where TokenGT is: to permutations of the nodes with their identifiers, and to the order of the edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks, numerics
from holonomy._shapes import Float, Int
from holonomy.layers import GraphTokenizer
from holonomy.layers.hyperbolic.block import Norm
from holonomy.layers.hyperbolic.classifier import decoder_of
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.layers.tokens.tokenizer import Identifiers, Tokens
from holonomy.manifolds import Lorentz
from holonomy.models.levels import Level
from holonomy.models.tokengt import read_at
from holonomy.ops.heads import head_count
from holonomy.ops.linear_attention.reference import Average
from holonomy.ops.softmax_attention import Similarity


class HypTokenGT(nn.Module):
    r"""Tokens of a graph, Hypformer's blocks on them, and a decoder at ``[graph]`` or at the nodes.

    Every manifold has a curvature of its own, learned by default. Train it with
    :class:`holonomy.optim.RiemannianAdam`, or without prototypes with any optimizer of torch.

    Args:
        in_features: features of a node, 0 for none.
        hidden_features: width of a token and dimension of the hyperbolic spaces.
        out_features: number of classes, or of regression targets.
        edge_features: features of an edge, 0 for none.
        layers: number of blocks.
        heads: attention heads, a divisor of ``hidden_features``.
        feedforward: hidden dimension of each feed-forward, ``4 * hidden_features`` if left out.
        identifiers: how node identifiers are made, see :class:`~holonomy.models.TokenGT`.
        identifier_dim: their width, 16 if left out.
        type_features: width of the type identifiers, ``hidden_features`` if left out, 0 for none.
        attention: ``"linear"``, at a cost linear in nodes and edges, or ``"softmax"``.
        similarity: what softmax attention compares, see :class:`~holonomy.layers.HypSoftmaxAttention`.
        power: the sharpening exponent p of linear attention.
        average: of linear attention: ``"space"`` parts as printed, or the ``"midpoint"``.
        level: what a row of the result belongs to, ``"graph"``, ``"node"`` or ``"edge"``.
        dropout: probability of dropping an entry of a token, or a space coordinate in the blocks.
        eigenvector_dropout: probability that a Laplacian eigenvector of a graph is dropped.
        activation: a function of space parts, after the first HTC and in the feed-forwards.
        norm: ``"layer"`` or ``"rms"``, see :class:`~holonomy.layers.HypLayerNorm` and
            :class:`~holonomy.layers.HypRMSNorm`.
        norm_eps: added to the variance or mean square by the norms.
        curvature: the initial curvature of every manifold.
        learnable_curvature: whether the curvatures receive gradients.
        decoder: ``"linear"`` on the logarithm at the origin, ``"mlr"`` or ``"prototypes"`` on points.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size, probability or choice is none of the allowed, or an option has no effect beside the
            others.

    >>> model = HypTokenGT(3, 8, 2, heads=2, identifier_dim=4)
    >>> ring = torch.tensor([[0, 1, 2, 1, 2, 0], [1, 2, 0, 0, 1, 2]])
    >>> model(torch.randn(3, 3), ring).shape
    torch.Size([1, 2])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        edge_features: int = 0,
        layers: int = 2,
        heads: int = 1,
        feedforward: int | None = None,
        identifiers: Identifiers | None = "laplacian",
        identifier_dim: int | None = None,
        type_features: int | None = None,
        attention: Literal["linear", "softmax"] = "linear",
        similarity: Similarity = "geodesic_squared",
        power: float = 2.0,
        average: Average = "space",
        level: Level = "graph",
        dropout: float = 0.0,
        eigenvector_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        norm: Norm = "layer",
        norm_eps: float = numerics.LAYER_NORM_EPS,
        curvature: float = -1.0,
        learnable_curvature: bool = True,
        decoder: Literal["linear", "mlr", "prototypes"] = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(learnable_curvature=learnable_curvature)
        head_count(hidden_features, heads, "hidden_features")
        checks.positive_int("out_features", out_features)
        self.level: Level = checks.one_of("level", level, ("graph", "node", "edge"))
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.tokenizer = GraphTokenizer(
            in_features,
            hidden_features,
            edge_features=edge_features,
            identifiers=identifiers,
            identifier_dim=identifier_dim,
            type_features=type_features,
            eigenvector_dropout=eigenvector_dropout,
            device=device,
            dtype=dtype,
        )
        self.manifold_out = Lorentz(curvature, learnable=learnable_curvature, device=device, dtype=dtype)
        self.encoder = HypformerEncoder(
            hidden_features,
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
            activation=activation,
            norm=norm,
            norm_eps=norm_eps,
            curvature=curvature,
            learnable_curvature=learnable_curvature,
            device=device,
            dtype=dtype,
        )
        self.decodes_points = decoder != "linear"
        self.decoder = decoder_of(decoder, hidden_features, out_features, self.manifold_out, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        edge_weight: Float[Tensor, " edges"] | None = None,
        identifiers: Float[Tensor, "nodes dim_p"] | None = None,
        num_graphs: int | None = None,
    ) -> Float[Tensor, "rows out"]:
        """Scores of every graph, node or edge, ``(rows, out_features)``.

        Arguments, result and errors are those of :meth:`holonomy.models.TokenGT.forward`.
        """
        checks.unread(self, "pass them as a column of edge_attr", edge_weight=edge_weight)
        read = self.embed(x, edge_index, batch, edge_attr=edge_attr, identifiers=identifiers, num_graphs=num_graphs)
        return self.decoder(read if self.decodes_points else self.manifold_out.space(self.manifold_out.logmap0(read)))

    def embed(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        identifiers: Float[Tensor, "nodes dim_p"] | None = None,
        num_graphs: int | None = None,
    ) -> Float[Tensor, "rows ambient"]:
        """What the decoder reads of graphs, nodes or edges: points ``(rows, hidden_features + 1)`` of ``manifold_out``.

        Arguments are those of :meth:`forward`.
        """
        tokens = self.tokenizer(
            x, edge_index, batch, edge_attr=edge_attr, identifiers=identifiers, num_graphs=num_graphs
        )
        points = self.encoder(self._start(tokens), None if batch is None else tokens.padding)
        return read_at(tokens, points, self.level)

    def attention_maps(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        identifiers: Float[Tensor, "nodes dim_p"] | None = None,
    ) -> tuple[Tokens, list[Tensor]]:
        """The attention of every block and head; call it in evaluation mode.

        Arguments are those of :meth:`forward`. With the tokens, which say what rows and columns are, comes for each
        block ``(graphs, heads, tokens, tokens)``. More than 2**30 weights are a ValueError.

        >>> model = HypTokenGT(1, 8, 1, layers=3, heads=2).eval()
        >>> tokens, maps = model.attention_maps(torch.ones(2, 1), torch.tensor([[0, 1], [1, 0]]))
        >>> len(maps), maps[0].shape, tokens.indices.tolist()
        (3, torch.Size([1, 2, 5, 5]), [[0, 0], [1, 1], [0, 1], [1, 0]])
        """
        tokens = self.tokenizer(x, edge_index, batch, edge_attr=edge_attr, identifiers=identifiers)
        return tokens, self.encoder.attention_maps(self._start(tokens), tokens.padding)

    def _start(self, tokens: Tokens) -> Float[Tensor, "graphs tokens ambient"]:
        # Tokens are tangent vectors at the origin; the exponential map and HTC bring them to the first hyperboloid.
        return self.encoder.points(functional.dropout(tokens.values, self.dropout, self.training))

    def curvatures(self) -> dict[str, Float[Tensor, " 1"]]:
        """The curvature of each manifold, named as in :meth:`holonomy.models.Hypformer.curvatures`."""
        return self.encoder.curvatures() | {"output": self.manifold_out.curvature}
