r"""Encoders of nodes: what the edges say of a node, added to its features before a model reads them.

An encoder is called ``(x, edge_index, batch)``, as models of graphs are, and returns features of the same shape, so
several may stand one after the other. Walks and eigenvectors are computed on the CPU, which takes longer than a layer:
``encode`` computes them once for a data set, and ``encoding=`` hands them in.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._autograd import eager
from holonomy._shapes import Float, Int
from holonomy.layers.encodings import random_walk_node_encoding
from holonomy.layers.tokens.identifiers import laplacian_identifiers, perturb_identifiers

# Standard deviation of the vectors of degrees at first, Graphormer's.
_STD = 0.02


class DegreeNodeEncoder(nn.Module):
    r"""A learned vector for each degree, the centrality encoding of Graphormer (Ying et al. 2021, eq. 5).

    .. math:: x_i + z^-_{\deg^-(i)} + z^+_{\deg^+(i)}

    with :math:`\deg^-` the number of edges that arrive at a node and :math:`\deg^+` of those that leave it. An edge
    that is listed twice counts twice, a self-loop once in each.

    Args:
        features: d.
        max_degree: the largest degree with a vector of its own; larger ones share it.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is not positive.

    >>> path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> added = DegreeNodeEncoder(4)(torch.zeros(3, 4), path)
    >>> torch.equal(added[0], added[2]), torch.equal(added[0], added[1])  # the two ends have one degree
    (True, False)
    """

    def __init__(
        self,
        features: int,
        *,
        max_degree: int = 64,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.features = checks.positive_int("features", features)
        self.max_degree = checks.positive_int("max_degree", max_degree)
        shape = (max_degree + 1, features)
        self.incoming = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.outgoing = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew."""
        for vectors in (self.incoming, self.outgoing):
            nn.init.normal_(vectors, std=_STD)

    def forward(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
    ) -> Float[Tensor, "nodes dim"]:
        """Node features ``(n, features)`` plus both vectors, by edges ``(2, m)``, sources and targets.

        ``batch`` is the graph of each node ``(n,)``; edges join nodes of one graph. Shapes that do not fit are a
        ValueError.
        """
        checks.graph(x, edge_index, batch=batch)
        checks.last_axis("x", x, self.features, "features", self)
        leaving, arriving = (self._degrees(end, x.shape[0]) for end in edge_index)
        return x + self.incoming[arriving] + self.outgoing[leaving]

    def _degrees(self, end: Tensor, nodes: int) -> Tensor:
        """How often each node is named, up to the largest degree."""
        end = end.long()
        return end.new_zeros(nodes).index_add(0, end, torch.ones_like(end)).clamp(max=self.max_degree)

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return f"{self.features}, max_degree={self.max_degree}"


class RandomWalkNodeEncoder(nn.Module):
    r"""A linear map of the probabilities to be back after 1 .. p steps: RWSE of GraphGPS (Dwivedi et al. 2022).

    .. math:: x_i + W\, (\mathrm{RW}_{ii}, \dots, \mathrm{RW}^p_{ii}) + b

    with the walk of :func:`~holonomy.layers.random_walk_node_encoding`.

    Args:
        features: d.
        steps: p.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is not positive.

    >>> encoder, edge = RandomWalkNodeEncoder(4, 3), torch.tensor([[0, 1], [1, 0]])
    >>> encoding = encoder.encode(edge, 2)
    >>> encoding[0].tolist()  # back after two steps, never after one or three
    [0.0, 1.0, 0.0]
    >>> x = torch.randn(2, 4)
    >>> torch.equal(encoder(x, edge), encoder(x, edge, encoding=encoding))
    True
    """

    def __init__(
        self, features: int, steps: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.features = checks.positive_int("features", features)
        self.steps = checks.positive_int("steps", steps)
        self.linear = nn.Linear(steps, features, device=device, dtype=dtype)

    def encode(self, edge_index: Int[Tensor, "2 edges"], n: int) -> Float[Tensor, "n steps"]:
        """The probabilities ``(n, steps)`` of one graph, or of several, by its edges ``(2, m)``."""
        dtype = next(self.parameters()).dtype
        return eager(random_walk_node_encoding)(edge_index, n, self.steps, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        encoding: Float[Tensor, "nodes steps"] | None = None,
    ) -> Float[Tensor, "nodes dim"]:
        """Node features ``(n, features)`` plus the map of the probabilities, by edges ``(2, m)``.

        ``batch`` is the graph of each node ``(n,)``; edges join nodes of one graph. ``encoding`` is what :meth:`encode`
        gave, computed here if left out. Shapes that do not fit are a ValueError.
        """
        _check(self, x, edge_index, batch, encoding, steps=self.steps)
        return x + self.linear(self.encode(edge_index, x.shape[0]) if encoding is None else encoding)


class LaplacianNodeEncoder(nn.Module):
    r"""A linear map of eigenvectors of the graph's Laplacian: LapPE (Dwivedi and Bresson 2021; GraphGPS).

    .. math:: x_i + W\, (s_1 v_{1,i}, \dots, s_p v_{p,i}) + b

    with the lowest eigenvectors of :func:`~holonomy.layers.laplacian_identifiers`, the constant one included, zeros
    where a graph has fewer than p. An eigenvector is defined up to its sign. So in training each eigenvector of each
    graph has a random sign :math:`s_k` in each pass, as with GraphGPS and :class:`~holonomy.layers.GraphTokenizer`; in
    evaluation the sign is that of ``laplacian_identifiers``. Several eigenvectors of one eigenvalue are defined up to
    an orthogonal matrix only, so that isomorphic graphs may have different results.

    Args:
        features: d.
        count: p, the number of eigenvectors.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is not positive.

    >>> encoder, path = LaplacianNodeEncoder(4, 2).eval(), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> encoding = encoder.encode(path, 3)
    >>> (encoding[0] * encoding[2]).sign().tolist()  # both ends: alike in the first eigenvector, opposed in the second
    [1.0, -1.0]
    >>> x = torch.randn(3, 4)
    >>> torch.equal(encoder(x, path), encoder(x, path, encoding=encoding))
    True
    """

    def __init__(
        self, features: int, count: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.features = checks.positive_int("features", features)
        self.count = checks.positive_int("count", count)
        self.linear = nn.Linear(count, features, device=device, dtype=dtype)

    def encode(
        self, edge_index: Int[Tensor, "2 edges"], n: int, batch: Int[Tensor, " n"] | None = None
    ) -> Float[Tensor, "n count"]:
        """The eigenvectors ``(n, count)``, with the signs of evaluation, by edges ``(2, m)``.

        ``batch`` is the graph of each node ``(n,)``; one graph if left out.
        """
        dtype = next(self.parameters()).dtype
        return laplacian_identifiers(edge_index, n, self.count, batch=batch, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        encoding: Float[Tensor, "nodes count"] | None = None,
    ) -> Float[Tensor, "nodes dim"]:
        """Node features ``(n, features)`` plus the map of the eigenvectors, by edges ``(2, m)``.

        ``batch`` is the graph of each node ``(n,)``, numbered from zero; one graph if left out. ``encoding`` is what
        :meth:`encode` gave for each graph, computed here if left out. Shapes that do not fit are a ValueError.
        """
        _check(self, x, edge_index, batch, encoding, count=self.count)
        encoding = self.encode(edge_index, x.shape[0], batch) if encoding is None else encoding
        if self.training:
            encoding = perturb_identifiers(encoding, batch=batch)
        return x + self.linear(encoding)


def _check(
    encoder: RandomWalkNodeEncoder | LaplacianNodeEncoder,
    x: Tensor,
    edge_index: Tensor,
    batch: Tensor | None,
    encoding: Tensor | None,
    **width: int,
) -> None:
    """Refuse a graph and an encoding that do not fit each other or the linear map, which reads ``width`` numbers."""
    checks.graph(x, edge_index, batch=batch)
    checks.last_axis("x", x, encoder.features, "features", encoder.linear)
    if encoding is not None:
        ((meaning, count),) = width.items()
        checks.shaped("encoding", encoding, (x.shape[0], count), f"(nodes, {meaning}) = ")
        checks.last_axis("encoding", encoding, count, meaning, encoder.linear)
        checks.on_device(x.device, encoding=encoding)
