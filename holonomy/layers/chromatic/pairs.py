r"""Encoders of pairs of nodes: what stands between i and j, as a vector (CSA sections 3.3 and 3.4).

Axes: ``(graphs, i, j)`` and ``(graphs, i, j, features)``. What they read is made by :mod:`holonomy.layers.encodings`
and :mod:`holonomy.layers.substructures`. Padding is not treated: results at padded pairs have no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.layers.encodings import category_product


class EdgeTypeEncoder(nn.Module):
    r"""A vector for each type of edge, for pairs without an edge and for a node with itself: CSA eq. 8.

    Args:
        edge_types: number of types of edges.
        features: of the result.
        edge_features: attributes of an edge, whose linear image is added to the vector of its type; 0 for none.
        product: whether types are multiplied by a relation of substructures (CSA section 3.4), as many vectors again.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: if a size is not allowed.

    >>> encoder = EdgeTypeEncoder(4, 8)
    >>> encoder(torch.tensor([[[1, 5], [5, 1]]])).shape  # edges of type 3 between two nodes
    torch.Size([1, 2, 2, 8])
    """

    attributes: nn.Linear | None

    def __init__(
        self,
        edge_types: int,
        features: int,
        *,
        edge_features: int = 0,
        product: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(product=product)
        checks.floating_dtype(dtype)
        checks.positive_int("features", features)
        # CSA eq. 8: no edge and the node itself are types, too.
        self.edge_types = checks.positive_int("edge_types", edge_types)
        count = edge_types + 2
        self.edge_features, self.product = checks.nonnegative_int("edge_features", edge_features), product
        self.types = nn.Embedding(2 * count if product else count, features, device=device, dtype=dtype)
        self.attributes = None
        if edge_features:
            self.attributes = nn.Linear(edge_features, features, bias=False, device=device, dtype=dtype)

    def forward(
        self,
        categories: Int[Tensor, "graphs n n"],
        related: Bool[Tensor, "graphs n n"] | None = None,
        attributes: Float[Tensor, "graphs n n edge_features"] | None = None,
    ) -> Float[Tensor, "graphs n n features"]:
        """Vectors ``(graphs, n, n, features)`` of the categories ``(graphs, n, n)`` of pairs.

        Categories are numbered as by :func:`~holonomy.layers.edge_categories`. ``related`` ``(graphs, n, n)`` goes with
        ``product``; ``attributes`` ``(graphs, n, n, edge_features)``, zero where there is no edge, with
        ``edge_features``. A missing argument, and one that has no use, is a ValueError.
        """
        checks.codes("categories", categories, self.edge_types + 2, "edge_types + 2")
        _check("related", related, categories.shape if self.product else None)
        _check("attributes", attributes, (*categories.shape, self.edge_features) if self.attributes else None)
        vectors = self.types(categories.long() if related is None else category_product(categories, related))
        if attributes is not None and self.attributes is not None:
            checks.last_axis("attributes", attributes, self.edge_features, "edge_features", self.attributes)
            vectors = vectors + self.attributes(attributes)
        return vectors


class RandomWalkEncoder(nn.Module):
    r"""Random walk structural encoding, CSA eq. 12: :math:`W [\mathrm{RW}^1_{ij}, \dots, \mathrm{RW}^p_{ij}]`.

    Args:
        steps: p.
        features: of the result.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: if a size is not positive.

    >>> RandomWalkEncoder(4, 8)(torch.rand(1, 3, 3, 4)).shape
    torch.Size([1, 3, 3, 8])
    """

    def __init__(
        self, steps: int, features: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.steps = checks.positive_int("steps", steps)
        checks.positive_int("features", features)
        self.walks = nn.Linear(steps, features, bias=False, device=device, dtype=dtype)

    def forward(self, walks: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch features"]:
        """Map walks ``(..., steps)``, of pairs or of nodes, to ``(..., features)``."""
        checks.last_axis("walks", walks, self.steps, "steps", self.walks)
        return self.walks(walks)


class ShortestPathEncoder(nn.Module):
    r"""Shortest path distance encoding, CSA eq. 11: a vector for each distance.

    A vector for a node with itself, one for each length up to the limit, one for what is further away or not reached.

    Args:
        limit: the longest path that is told apart.
        features: of the result.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: if a size is not positive.

    >>> ShortestPathEncoder(3, 8)(torch.tensor([[[0, 4], [4, 0]]])).shape
    torch.Size([1, 2, 2, 8])
    """

    def __init__(
        self, limit: int, features: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        checks.positive_int("features", features)
        self.limit = checks.positive_int("limit", limit)
        # Lengths 0 .. limit, and one vector for whatever is further.
        self.distances = nn.Embedding(limit + 2, features, device=device, dtype=dtype)

    def forward(self, distances: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch features"]:
        """Look up distances ``(...)`` of :func:`~holonomy.layers.shortest_path_encoding` with the same limit."""
        checks.codes("distances", distances, self.limit + 2, "limit + 2")
        return self.distances(distances.long())


class PairEncoder(nn.Module):
    r"""The edge features of a chromatic transformer: semantic and positional vectors side by side, CSA eq. 9.

    .. math:: E^{(0)}_{ij} = E^{\mathrm{bond}}_{ij} \,\Vert\, E^{\mathrm{RWSE}}_{ij} \,\Vert\, E^{\mathrm{SPDE}}_{ij}
        \;[ + \mathrm{Embed}(i \approx j) ]

    Args:
        features: of each part that is there; :attr:`out_features` is the width of all together.
        edge_types: number of types of edges.
        edge_features: attributes of an edge, 0 for none.
        steps: of random walks (CSA eq. 12), 0 for none.
        limit: of shortest paths (CSA eq. 11), 0 for none.
        substructures: how the relation of CSA definition 3.1 comes in (section 3.4): ``"added"`` as a vector of its
            own, ``"product"`` as further types of edges; None without one.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: if a size or choice is not allowed.

    >>> encoder = PairEncoder(8, edge_types=4, steps=3)
    >>> categories, walks = torch.ones(1, 2, 2, dtype=torch.int64), torch.rand(1, 2, 2, 3)
    >>> encoder(categories, walks).shape
    torch.Size([1, 2, 2, 16])
    """

    walks: RandomWalkEncoder | None
    distances: ShortestPathEncoder | None
    related: nn.Embedding | None

    def __init__(
        self,
        features: int,
        *,
        edge_types: int = 1,
        edge_features: int = 0,
        steps: int = 0,
        limit: int = 0,
        substructures: Literal["added", "product"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if substructures is not None:
            checks.one_of("substructures", substructures, ("added", "product"))
        checks.nonnegative_int("steps", steps)
        checks.nonnegative_int("limit", limit)
        added, product = substructures == "added", substructures == "product"
        self.edges = EdgeTypeEncoder(
            edge_types, features, edge_features=edge_features, product=product, device=device, dtype=dtype
        )
        self.walks = RandomWalkEncoder(steps, features, device=device, dtype=dtype) if steps else None
        self.distances = ShortestPathEncoder(limit, features, device=device, dtype=dtype) if limit else None
        self.out_features = features * (1 + (self.walks is not None) + (self.distances is not None))
        self.related = nn.Embedding(2, self.out_features, device=device, dtype=dtype) if added else None

    def forward(
        self,
        categories: Int[Tensor, "graphs n n"],
        walks: Float[Tensor, "graphs n n steps"] | None = None,
        distances: Int[Tensor, "graphs n n"] | None = None,
        related: Bool[Tensor, "graphs n n"] | None = None,
        attributes: Float[Tensor, "graphs n n edge_features"] | None = None,
    ) -> Float[Tensor, "graphs n n out_features"]:
        """Encode.

        Args:
            categories: ``(graphs, n, n)`` as :func:`~holonomy.layers.edge_categories` numbers them.
            walks: ``(graphs, n, n, steps)``, exactly where there are steps.
            distances: ``(graphs, n, n)``, exactly where there is a limit.
            related: ``(graphs, n, n)``, exactly where there are substructures.
            attributes: ``(graphs, n, n, edge_features)``, exactly where there are some.

        Returns:
            ``(graphs, n, n, out_features)``.

        Raises:
            ValueError: if an argument is missing, or one has no use.
        """
        checks.integers("categories", categories)
        given = {"walks": walks, "distances": distances, "related": related, "attributes": attributes}
        check_encodings(self, categories.shape, **given)
        # CSA eq. 9: semantic and positional vectors side by side, each in channels of its own.
        parts = [self.edges(categories, related if self.edges.product else None, attributes)]
        if self.walks is not None:
            parts.append(self.walks(walks))
        if self.distances is not None:
            parts.append(self.distances(distances))
        edges = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        # CSA section 3.4: the relation of substructures is added to all of them.
        if self.related is not None and related is not None:
            edges = edges + self.related(related.long())
        return edges


def check_encodings(encoder: PairEncoder, pairs: Sequence[int], **given: Tensor | None) -> None:
    """Refuse encodings that are missing, that have no use, or that do not have the axes of the pairs."""
    wanted = {
        "walks": None if encoder.walks is None else (*pairs, encoder.walks.steps),
        "distances": None if encoder.distances is None else pairs,
        "related": None if encoder.related is None and not encoder.edges.product else pairs,
        "attributes": None if encoder.edges.attributes is None else (*pairs, encoder.edges.edge_features),
    }
    for name, value in given.items():
        _check(name, value, wanted[name])


def _check(name: str, value: Tensor | None, shape: Sequence[int] | None) -> None:
    if (value is not None) != (shape is not None):
        advice = "; ChromaticGraphTransformer.encode computes it" if value is None else ""
        wanted = "given exactly if the encoder was made for it"
        raise ValueError(f"{name} must be {wanted}, got {type(value).__name__}{advice}.")
    if value is None or shape is None:
        return
    if name == "related":
        checks.boolean(name, value, shape, "related pairs")
    else:
        checks.shaped(name, value, shape)
