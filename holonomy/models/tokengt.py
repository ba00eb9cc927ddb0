r"""TokenGT: a pure transformer on the nodes and edges of a graph (Kim et al., NeurIPS 2022, section 2, appendix A.3).

Nothing but the tokens' identifiers tells the transformer of the graph. The result is equivariant to permutations of
the nodes if their identifiers are permuted along, and does not depend on the order of the edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks
from holonomy._shapes import Float, Int
from holonomy.layers.tokens.encoder import TokenEncoderLayer
from holonomy.layers.tokens.tokenizer import GraphTokenizer, Identifiers, Tokens, basis_residual
from holonomy.models.levels import Level
from holonomy.ops.heads import head_count


class TokenGT(nn.Module):
    r"""Tokens, a pre-norm transformer encoder, and a linear head on ``[graph]`` or on the nodes (TokenGT section 2).

    ``torch.compile(fullgraph=True)`` supports single graphs with identifiers that are passed or random: the width of a
    padded batch depends on values of tensors, and eigenvectors are computed by SciPy.

    Args:
        in_features: features of a node, 0 for none.
        hidden_features: width d of a token.
        out_features: number of classes, or of regression targets.
        edge_features: features of an edge, 0 for none.
        layers: number of encoder layers.
        heads: attention heads, a divisor of ``hidden_features``.
        feedforward: width of the MLPs, ``4 * hidden_features`` if left out.
        identifiers: how node identifiers are made where none are handed in: ``"laplacian"`` eigenvectors of the
            lowest eigenvalues, ``"laplacian_both"``, half lowest and half highest, ``"orthogonal"`` or
            ``"near_orthogonal"``, drawn anew in each pass; None leaves them out.
        identifier_dim: :math:`d_p`, 16 if left out.
        type_features: :math:`d_e`, ``hidden_features`` if left out, 0 for no type identifiers.
        attention: ``"softmax"``, or ``"performer"``: linear in nodes and edges.
        random_features: of ``"performer"``, twice the width of a head if left out; :meth:`redraw` draws others.
        level: what a row of the result belongs to, ``"graph"``, ``"node"`` or ``"edge"``.
        basis_residual: add to each node the edges that leave it after every layer (appendix A.4, SEB).
        dropout: probability that an entry of the tokens, of what a layer adds, or of a hidden layer is dropped.
        attention_dropout: probability that a weight of softmax attention is dropped.
        stochastic_depth: probability that a graph passes by a branch of the last layer; it grows linearly to there.
        eigenvector_dropout: probability that a Laplacian eigenvector of a graph is dropped.
        activation: of the MLPs.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size, probability or choice is none of the allowed, or an option has no effect beside the
            others.

    A model that tells triangles from paths, by the graph alone:

    >>> _ = torch.manual_seed(0)
    >>> triangle, path = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([[3, 4], [4, 5]])
    >>> one_way = torch.cat([triangle, path], dim=1)
    >>> edge_index = torch.cat([one_way, one_way.flip(0)], dim=1)  # both directions, as in PyTorch Geometric
    >>> batch, y = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1])
    >>> model = TokenGT(1, 16, 2, layers=1, heads=2, identifier_dim=4)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> for _ in range(60):
    ...     optimizer.zero_grad()
    ...     loss = nn.functional.cross_entropy(model(torch.ones(6, 1), edge_index, batch=batch), y)
    ...     loss.backward()
    ...     optimizer.step()
    >>> bool((model.eval()(torch.ones(6, 1), edge_index, batch=batch).argmax(-1) == y).all())
    True
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        edge_features: int = 0,
        layers: int = 4,
        heads: int = 4,
        feedforward: int | None = None,
        identifiers: Identifiers | None = "laplacian",
        identifier_dim: int | None = None,
        type_features: int | None = None,
        attention: Literal["softmax", "performer"] = "softmax",
        random_features: int | None = None,
        level: Level = "graph",
        basis_residual: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        eigenvector_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(basis_residual=basis_residual)
        checks.positive_int("layers", layers)
        head_count(hidden_features, heads, "hidden_features")
        checks.positive_int("out_features", out_features)
        checks.in_range("stochastic_depth", stochastic_depth, 0.0, 1.0)
        self.level: Level = checks.one_of("level", level, ("graph", "node", "edge"))
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.basis_residual = basis_residual
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
        # Huang et al. 2016: layers are passed by the more often, the deeper they stand.
        self.layers = nn.ModuleList(
            TokenEncoderLayer(
                hidden_features,
                heads,
                feedforward=feedforward,
                attention=attention,
                random_features=random_features,
                dropout=dropout,
                attention_dropout=attention_dropout,
                stochastic_depth=stochastic_depth * (depth + 1) / layers,
                activation=activation,
                device=device,
                dtype=dtype,
            )
            for depth in range(layers)
        )
        self.norm = nn.LayerNorm(hidden_features, device=device, dtype=dtype)
        self.head = nn.Linear(hidden_features, out_features, device=device, dtype=dtype)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw other random features in every layer, from torch's seeded state by default; none for ``"softmax"``."""
        for layer in self._encoder():
            layer.attention.redraw(generator)

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
        """Scores of every graph, or of every node.

        Args:
            x: node features ``(n, in_features)``.
            edge_index: ``(2, m)``, each edge in both directions.
            batch: the graph of each node ``(n,)``, numbered from zero; one graph if left out.
            edge_attr: edge features ``(m, edge_features)``.
            edge_weight: is not read; a weight of an edge is one of its features.
            identifiers: node identifiers ``(n, identifier_dim)``; made anew in each pass if left out, so compute
                Laplacian ones once for a data set. In training they get random signs either way.
            num_graphs: their number, where some at the end have no node.

        Returns:
            ``(graphs, out_features)``, ``(n, out_features)`` at the level of nodes, or ``(m, out_features)`` of edges.

        Raises:
            ValueError: if a shape does not fit.
        """
        checks.unread(self, "pass them as a column of edge_attr", edge_weight=edge_weight)
        tokens = self.tokenizer(
            x, edge_index, batch, edge_attr=edge_attr, identifiers=identifiers, num_graphs=num_graphs
        )
        values = self._start(tokens)
        for layer in self._encoder():
            values = self._step(layer, values, tokens, batch)
        return self.head(self.norm(read_at(tokens, values, self.level)))

    def attention_maps(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        identifiers: Float[Tensor, "nodes dim_p"] | None = None,
    ) -> tuple[Tokens, list[Tensor]]:
        """The attention of every layer and head, as for the distances by head and depth of TokenGT figure 3.

        Arguments are those of :meth:`forward`. With the tokens, which say what rows and columns are, comes for each
        layer ``(graphs, heads, tokens, tokens)``.

        >>> model = TokenGT(1, 8, 1, layers=3, heads=2)
        >>> tokens, maps = model.attention_maps(torch.ones(2, 1), torch.tensor([[0, 1], [1, 0]]))
        >>> len(maps), maps[0].shape, tokens.indices.tolist()
        (3, torch.Size([1, 2, 5, 5]), [[0, 0], [1, 1], [0, 1], [1, 0]])
        """
        tokens = self.tokenizer(x, edge_index, batch, edge_attr=edge_attr, identifiers=identifiers)
        values, maps = self._start(tokens), list[Tensor]()
        for layer in self._encoder():
            maps.append(layer.weights(values, tokens.padding))
            values = self._step(layer, values, tokens, batch)
        return tokens, maps

    def _encoder(self) -> list[TokenEncoderLayer]:
        return [cast("TokenEncoderLayer", layer) for layer in self.layers]

    def _start(self, tokens: Tokens) -> Tensor:
        return functional.dropout(tokens.values, self.dropout, self.training)

    def _step(self, layer: TokenEncoderLayer, values: Tensor, tokens: Tokens, batch: Tensor | None) -> Tensor:
        values = layer(values, None if batch is None else tokens.padding)
        return basis_residual(values, tokens) if self.basis_residual else values


# Not a method of the tokens: dynamo of torch 2.13 cannot look one up on a tuple that it has made itself.
def read_at(tokens: Tokens, values: Float[Tensor, "graphs tokens dim"], level: Level) -> Float[Tensor, "rows dim"]:
    """What became of the tokens ``[graph]``, of nodes or of edges."""
    if level == "graph":
        return values[:, :1].flatten(0, 1)  # the first of each row; a batch of no graph has none, hence a slice
    nodes, edges = tokens.slots[: tokens.num_nodes], tokens.slots[tokens.num_nodes :]
    return values.flatten(0, 1)[nodes if level == "node" else edges]
