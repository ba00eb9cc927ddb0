r"""Graphs and hypergraphs as tokens: ``[X, P_i1, .., P_ik, E_gamma(i)]`` for each entry (TokenGT section 2, 3.3).

X are features, P the node identifiers of :mod:`holonomy.layers.tokens.identifiers`, and E the trainable type
identifiers, one for each of the bell(k) equality patterns of k indices, in the order of ``set_partitions(k)``. A
graph is the case k = 2: node v is the entry (v, v) of the first pattern, edge (u, v) an entry of the second; a
self-loop is an edge token, features and all, whose type is that of its pattern (v, v), the nodes' type.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.layers.equivariant.basis.partitions import bell, pattern_codes, set_partitions
from holonomy.layers.equivariant.basis.recomputed import RecomputedBuffers
from holonomy.layers.tokens.identifiers import (
    laplacian_identifiers,
    near_orthogonal_identifiers,
    orthogonal_identifiers,
    perturb_identifiers,
)
from holonomy.structures import PaddedGraphs
from holonomy.structures.plan import check_nodes

Identifiers = Literal["laplacian", "laplacian_both", "orthogonal", "near_orthogonal"]
"""How node identifiers are made where none are handed in: Laplacian eigenvectors (lowest, or half lowest and half
highest, where there are more nodes than channels), or random ones, drawn anew in each forward pass."""

_RANDOM = ("orthogonal", "near_orthogonal")
_IDENTIFIER_DIM = 16


class Tokens(NamedTuple):
    """The tokens of several graphs, one graph a row: ``[graph]`` first, then the listed ones, then padding."""

    values: Float[Tensor, "graphs tokens features"]  #: ``(graphs, tokens, features)``, zero at padding
    #: a ``key_padding_mask`` ``(graphs, tokens)``, ``True`` where there is no token
    padding: Bool[Tensor, "graphs tokens"]
    #: ``(listed, k)``, the nodes of each listed token, in the order in which they came
    indices: Int[Tensor, "listed order"]
    slots: Int[Tensor, " listed"]  #: ``(listed,)``, the place of each in the flattened first two axes
    num_nodes: int = 0  #: how many of the listed ones, at their beginning, are the nodes of a graph in their order

    def rows(self, values: Float[Tensor, "graphs tokens dim"]) -> Float[Tensor, "listed dim"]:
        """The tokens' vectors as rows in the order in which they came; nodes are the first ``num_nodes``."""
        return values.flatten(0, 1)[self.slots]


class TokenEmbedding(RecomputedBuffers):
    """What node and type identifiers add to a token: their rows of :math:`w^{in}` in TokenGT section 2."""

    pattern_codes: Tensor

    def __init__(
        self,
        order: int,
        features: int,
        *,
        identifier_dim: int,
        type_features: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.order = checks.positive_int("order", order)
        checks.positive_int("features", features)
        width = checks.nonnegative_int("type_features", features if type_features is None else type_features)
        checks.nonnegative_int("identifier_dim", identifier_dim)
        self.of_identifiers = _block(order * identifier_dim, features, order, 1, device, dtype)
        self.of_types: nn.Linear | None = None
        if width:
            # Rows of length one, as identifiers are.
            self.type_identifiers = nn.Parameter(
                torch.randn(bell(order), width, device=device, dtype=dtype) / width**0.5
            )
            self.of_types = _block(width, features, order, 1, device, dtype)
            # Made here, for the partitions are cached and torch.compile warns of caches.
            self.register_buffer("pattern_codes", self._recomputed()["pattern_codes"].to(device), persistent=False)

    def _recomputed(self) -> dict[str, Tensor]:
        return {"pattern_codes": pattern_codes(torch.tensor(set_partitions(self.order)))}

    def reset_parameters(self) -> None:
        """Draw everything anew."""
        for linear in (self.of_identifiers, self.of_types):
            if linear is not None:
                _draw(linear, self.order, 1)
        if self.of_types is not None:
            nn.init.normal_(self.type_identifiers, std=self.type_identifiers.shape[1] ** -0.5)

    def forward(
        self,
        projected: Float[Tensor, "listed features"],
        indices: Int[Tensor, "listed order"],
        identifiers: Float[Tensor, "nodes dim"] | None,
    ) -> Float[Tensor, "listed features"]:
        """Add identifiers to projected features."""
        if self.of_identifiers is not None and identifiers is not None:
            projected = projected + self.of_identifiers(identifiers[indices].flatten(1))
        if self.of_types is not None:
            types = (pattern_codes(indices)[:, None] > self.pattern_codes).sum(1)  # ascending, one a pattern
            of_types = self.of_types(self.type_identifiers)
            # In float32 at least: its gradient is a sum over all tokens, and bfloat16 counts to 256.
            wide = of_types.to(torch.promote_types(of_types.dtype, torch.float32))
            projected = projected + wide[types].to(of_types.dtype)
        return projected


class _Tokenizer(nn.Module):
    """What both tokenizers share: identifiers, the embedding, the ``[graph]`` token and the padded layout."""

    def __init__(
        self,
        order: int,
        features: int,
        identifiers: Identifiers | None,
        identifier_dim: int | None,
        type_features: int | None,
        eigenvector_dropout: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if identifiers is None and identifier_dim is not None:
            raise ValueError(f"identifier_dim must be None when identifiers is None, got {identifier_dim}.")
        self.eigenvector_dropout = checks.in_range("eigenvector_dropout", eigenvector_dropout, 0.0, 1.0)
        if eigenvector_dropout > 0 and identifiers in {None, *_RANDOM}:
            raise ValueError(
                f"eigenvector_dropout must be 0 when identifiers are {identifiers!r}, got {eigenvector_dropout}."
            )
        self.identifiers = identifiers
        self.identifier_dim = 0
        if identifiers is not None:
            width = _IDENTIFIER_DIM if identifier_dim is None else identifier_dim
            self.identifier_dim = checks.positive_int("identifier_dim", width)
        self.embedding = TokenEmbedding(
            order, features, identifier_dim=self.identifier_dim, type_features=type_features, device=device, dtype=dtype
        )
        self.graph_token = nn.Parameter(torch.randn(features, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Draw everything anew."""
        self.embedding.reset_parameters()
        nn.init.normal_(self.graph_token)
        for of_features in self.children():
            if isinstance(of_features, nn.Linear):
                _draw(of_features, self.embedding.order, of_features.in_features)

    def _identifiers_of(
        self, given: Tensor | None, nodes: int, batch: Tensor | None, edge_index: Tensor | None
    ) -> Tensor | None:
        """Those that are given, or new ones; eigenvectors are perturbed in training."""
        if self.identifiers is None:
            if given is not None:
                raise ValueError(f"identifiers must be None for a tokenizer without, got {type(given).__name__}.")
            return None
        like, dim = self.graph_token, self.identifier_dim
        if given is not None:
            checks.shaped("identifiers", given, (nodes, dim), "(nodes, identifier_dim) = ")
            checks.last_axis("identifiers", given, dim, "identifier_dim", self.embedding.of_identifiers)
            made = given
        elif self.identifiers == "near_orthogonal":
            made = near_orthogonal_identifiers(nodes, dim, device=like.device, dtype=like.dtype)
        elif self.identifiers == "orthogonal" or edge_index is None:
            made = orthogonal_identifiers(nodes, dim, batch=batch, device=like.device, dtype=like.dtype)
        else:
            which = "both" if self.identifiers == "laplacian_both" else "lowest"
            made = laplacian_identifiers(edge_index, nodes, dim, which=which, batch=batch, dtype=like.dtype)
        if self.training and self.identifiers not in _RANDOM:
            return perturb_identifiers(made, batch=batch, dropout=self.eigenvector_dropout)
        return made

    def _projected(self, linear: nn.Linear | None, features: Tensor | None, listed: int) -> Tensor:
        """Rows of :math:`w^{in}` times features, zero where there are none."""
        return self.graph_token.new_zeros(listed, len(self.graph_token)) if linear is None else linear(features)

    def _laid_out(
        self, rows: Tensor, indices: Tensor, batch: Tensor | None, nodes: int, num_graphs: int | None = None
    ) -> Tokens:
        """``[graph]`` before the rows of each graph, padding behind them; ``batch`` is that of the nodes."""
        listed = rows.shape[0]
        if batch is None:
            values = torch.cat([self.graph_token[None], rows])[None]
            slots = torch.arange(1, listed + 1, device=rows.device)
            return Tokens(values, torch.zeros_like(values[..., 0], dtype=torch.bool), indices, slots, nodes)
        graphs = checks.number_of_graphs(batch, num_graphs)
        first = torch.arange(graphs, device=batch.device)
        every = torch.cat([self.graph_token.expand(graphs, -1), rows])
        padded = PaddedGraphs.of(every, torch.cat([first, batch[indices[:, 0]]]))
        return Tokens(padded.values, padded.padding, indices, padded.slots[graphs:], nodes)


class GraphTokenizer(_Tokenizer):
    r"""Sparse graphs as tokens: ``[X_v, P_v, P_v, E_V]`` a node, ``[X_uv, P_u, P_v, E_E]`` an edge (TokenGT section 2).

    Each is mapped to ``features`` channels by :math:`w^{in}`, and a trainable ``[graph]`` token stands in front of
    those of each graph. Edges are taken as they are listed: in both directions, for an undirected graph. A self-loop
    is an edge token with the type identifier of nodes. Laplacian identifiers get random signs in training.

    :math:`w^{in}` is initialised for features with a mean square of about one, so that features, identifiers and types
    contribute equally. One-hot vectors of d classes are shorter by a factor of :math:`\sqrt d`: multiply them by
    :math:`\sqrt d`.

    Args:
        in_features: features of a node, 0 for none.
        features: width d of a token.
        edge_features: features of an edge, 0 for none.
        identifiers: how node identifiers are made where none are handed in, see :data:`Identifiers`; None leaves them
            out of the tokens.
        identifier_dim: :math:`d_p`, 16 if left out.
        type_features: :math:`d_e`, the width of the type identifiers: d if left out, 0 for none.
        eigenvector_dropout: probability that an eigenvector of a graph is dropped in training.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size or choice is not allowed, or an option has no effect beside the others.

    >>> tokenizer = GraphTokenizer(3, 8, edge_features=2)
    >>> path = torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]])
    >>> tokens = tokenizer(torch.ones(5, 3), path, torch.tensor([0, 0, 0, 1, 1]), edge_attr=torch.ones(6, 2))
    >>> tokens.values.shape, tokens.padding.sum(1).tolist()
    (torch.Size([2, 8, 8]), [0, 3])
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        edge_features: int = 0,
        identifiers: Identifiers | None = "laplacian",
        identifier_dim: int | None = None,
        type_features: int | None = None,
        eigenvector_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.floating_dtype(dtype)
        if identifiers is not None:
            checks.one_of("identifiers", identifiers, ("laplacian", "laplacian_both", *_RANDOM))
        super().__init__(2, features, identifiers, identifier_dim, type_features, eigenvector_dropout, device, dtype)
        self.in_features = checks.nonnegative_int("in_features", in_features)
        self.edge_features = checks.nonnegative_int("edge_features", edge_features)
        self.of_nodes = _block(in_features, features, 2, in_features, device, dtype)
        self.of_edges = _block(edge_features, features, 2, edge_features, device, dtype)

    def forward(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        identifiers: Float[Tensor, "nodes dim_p"] | None = None,
        num_graphs: int | None = None,
    ) -> Tokens:
        """Lay the tokens of graphs out.

        Args:
            x: node features ``(n, in_features)``.
            edge_index: ``(2, m)``, sources and targets.
            batch: the graph of each node ``(n,)``, numbered from zero; one graph if left out.
            edge_attr: edge features ``(m, edge_features)``.
            identifiers: node identifiers ``(n, identifier_dim)``; made here if left out.
            num_graphs: their number, where some at the end have no node.

        Returns:
            Tokens, listed as nodes and then edges.

        Raises:
            ValueError: if a shape does not fit.
        """
        checks.graph(x, edge_index, batch=batch)
        checks.only_with_batch(num_graphs, batch)
        nodes = x.shape[0]
        checks.last_axis("x", x, self.in_features, "in_features", self.of_nodes)
        checks.edge_attr(edge_attr, self.edge_features)
        if edge_attr is not None:
            wanted = (edge_index.shape[1], self.edge_features)
            checks.shaped("edge_attr", edge_attr, wanted, "(edges, edge_features) = ")
            checks.last_axis("edge_attr", edge_attr, self.edge_features, "edge_features", self.of_edges)
        identifiers = self._identifiers_of(identifiers, nodes, batch, edge_index)
        loops = torch.arange(nodes, device=edge_index.device)
        indices = torch.cat([loops[:, None].expand(nodes, 2), edge_index.mT])
        projected = (
            self._projected(self.of_nodes, x, nodes),
            self._projected(self.of_edges, edge_attr, edge_index.shape[1]),
        )
        rows = self.embedding(torch.cat(projected), indices, identifiers)
        return self._laid_out(rows, indices, batch, nodes, num_graphs)


class HyperedgeTokenizer(_Tokenizer):
    r"""Hypergraphs as tokens: ``[X_i, P_i1, .., P_ik, E_gamma(i)]`` a hyperedge of order k (TokenGT section 3.3).

    The type identifier is that of the hyperedge's equality pattern, one of bell(k). Node features are hyperedges
    (v, .., v).

    Args:
        order: k.
        in_features: features of a hyperedge, 0 for none.
        features: width d of a token.
        identifiers: ``"orthogonal"`` or ``"near_orthogonal"``, drawn anew in each pass where none are handed in; None
            leaves them out of the tokens.
        identifier_dim: :math:`d_p`, 16 if left out.
        type_features: :math:`d_e`, the width of the type identifiers: d if left out, 0 for none.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size or choice is not allowed, or an option has no effect beside the others.

    >>> tokenizer = HyperedgeTokenizer(3, 2, 8)
    >>> tokenizer(torch.tensor([[0, 1, 2], [2, 2, 0]]), torch.ones(2, 2), 3).values.shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        order: int,
        in_features: int,
        features: int,
        *,
        identifiers: Literal["orthogonal", "near_orthogonal"] | None = "orthogonal",
        identifier_dim: int | None = None,
        type_features: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.floating_dtype(dtype)
        if identifiers is not None:
            checks.one_of("identifiers", identifiers, _RANDOM)
        super().__init__(order, features, identifiers, identifier_dim, type_features, 0.0, device, dtype)
        self.order = order
        self.in_features = checks.nonnegative_int("in_features", in_features)
        self.of_hyperedges = _block(in_features, features, order, in_features, device, dtype)

    def forward(
        self,
        indices: Int[Tensor, "edges order"],
        values: Float[Tensor, "edges dim"],
        num_nodes: int,
        batch: Int[Tensor, " nodes"] | None = None,
        identifiers: Float[Tensor, "nodes dim_p"] | None = None,
    ) -> Tokens:
        """Lay the tokens of hypergraphs out.

        Args:
            indices: ``(m, k)`` nodes of each hyperedge.
            values: ``(m, in_features)``.
            num_nodes: n.
            batch: the graph of each node ``(n,)``, numbered from zero; one graph if left out.
            identifiers: node identifiers ``(n, identifier_dim)``; drawn here if left out.

        Returns:
            Tokens, listed as the hyperedges.

        Raises:
            TypeError: if indices are no integers.
            ValueError: if a shape does not fit, a node is not there, or a hyperedge joins two graphs.
        """
        checks.nonnegative_int("num_nodes", num_nodes)
        checks.codes("indices", indices, num_nodes, "num_nodes")
        if indices.ndim != 2 or indices.shape[1] != self.order:
            raise ValueError(f"indices must have shape (edges, order = {self.order}), got {tuple(indices.shape)}.")
        checks.shaped("values", values, (indices.shape[0], self.in_features), "(edges, in_features) = ")
        checks.last_axis("values", values, self.in_features, "in_features", self.of_hyperedges)
        checks.on_device(values.device, indices=indices)
        indices = indices.long()  # of bytes torch makes a mask, of other small integers no index
        if batch is not None:
            checks.membership(batch, num_nodes)
            if checks.costs_nothing_to_read(indices):
                check_nodes("indices", indices, num_nodes, batch)
        identifiers = self._identifiers_of(identifiers, num_nodes, batch, None)
        rows = self._projected(self.of_hyperedges, values, indices.shape[0])
        return self._laid_out(self.embedding(rows, indices, identifiers), indices, batch, 0)


def basis_residual(
    values: Float[Tensor, "graphs tokens features"], tokens: Tokens
) -> Float[Tensor, "graphs tokens features"]:
    r"""Add to each node the edges that leave it: :math:`X_{ii} \mapsto X_{ii} + \sum_{j \ne i} X_{ij}`, TokenGT A.4.

    ``values`` ``(graphs, tokens, features)`` are what the tokens have become, ``tokens`` their layout, from
    :class:`~holonomy.layers.GraphTokenizer`. Edges, self-loops among them, and ``[graph]`` stay as they are. Linear in
    the edges. Values of other tokens, or tokens of hyperedges, are a ValueError.

    >>> indices = torch.tensor([[0, 0], [1, 1], [0, 1]])
    >>> layout = Tokens(torch.zeros(1, 4, 1), torch.zeros(1, 4) > 0, indices, torch.tensor([1, 2, 3]), 2)
    >>> basis_residual(torch.tensor([[[9.0], [1.0], [2.0], [5.0]]]), layout).flatten()
    tensor([9., 6., 2., 5.])
    """
    if tokens.num_nodes == 0 and tokens.indices.shape[0] > 0:
        raise ValueError("tokens must be those of a GraphTokenizer, nodes first, got tokens of hyperedges.")
    checks.shaped("values", values, (*tokens.padding.shape, values.shape[-1]), "(graphs, tokens, features) = ")
    edges = tokens.indices[tokens.num_nodes :]
    source, target = edges.unbind(1)
    flat = values.flatten(0, 1)
    leaving = flat[tokens.slots[tokens.num_nodes :]] * (source != target)[:, None]
    return flat.index_add(0, tokens.slots[source], leaving).unflatten(0, values.shape[:2])


def _block(
    width: int, features: int, order: int, square: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Linear | None:
    """The columns of :math:`w^{in}` for one part of a token, of vectors of squared length ``square``; None for none."""
    if width == 0:
        return None
    linear = nn.Linear(width, features, bias=False, device=device, dtype=dtype)
    _draw(linear, order, square)
    return linear


def _draw(linear: nn.Linear, order: int, square: int) -> None:
    """Draw weights of variance ``1 / ((k + 2) square)``, with which the k + 2 parts of a token sum to variance one."""
    nn.init.normal_(linear.weight, std=((order + 2) * square) ** -0.5)
