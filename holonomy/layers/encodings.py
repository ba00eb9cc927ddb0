"""Encodings of graph structure, for pairs of nodes and for nodes, from ``edge_index`` (CSA sections 3.3 and 3.4).

``edge_index`` is ``(2, m)`` int64, sources and targets among n nodes; another shape, and a node that is not there, is a
ValueError. Encodings are computed on the CPU, once for a data set, and come back on the device of ``edge_index``. Axis
0 of a pair encoding is the node i that attends, axis 1 the node j that it looks at; walks and paths lead from i to j
along the edges, from the first row of ``edge_index`` to the second. List both directions for an undirected graph.

A walk takes an edge that is listed twice twice as often. A self-loop is a step that stays, for walks; paths do not see
it. From an isolated node there is no step: its walks have probability zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import torch
from torch import Tensor

from holonomy import checks
from holonomy._autograd import as_array
from holonomy._shapes import Bool, Float, Int

# Up to here a power is a product of dense matrices: sparse ones take longer to set up than to multiply.
_DENSE_NODES = 128
# Starting nodes whose walks are followed at once: their distributions should fit the cache.
_BLOCK = 64


def random_walk_encoding(
    edge_index: Int[Tensor, "2 edges"], n: int, steps: int, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "n n steps"]:
    r"""The first powers of the random walk, :math:`[\mathrm{RW}^1_{ij}, \dots, \mathrm{RW}^p_{ij}]`, CSA eq. 10.

    :math:`\mathrm{RW} = D^{-1} A`, where A counts how often an edge is listed: entry (i, j, k - 1) of the result ``(n,
    n, steps)`` is the probability that k steps from i end at j. Powers are computed in float64, one product with the
    sparse matrix each.

    >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> random_walk_encoding(edge_index, 3, 2)[0]
    tensor([[0.0000, 0.5000],
            [1.0000, 0.0000],
            [0.0000, 0.5000]])
    """
    checks.positive_int("steps", steps)
    checks.floating_dtype(dtype)
    walk = _walk(edge_index, n)
    out = torch.empty(n, n, steps, dtype=dtype, device="cpu")
    for start in range(0, n, _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, n))
        powers = np.stack([ends.T for ends in _ends(walk, rows, steps)], -1)
        out[start : start + len(rows)].copy_(torch.from_numpy(powers))
    return out.to(edge_index.device)


def random_walk_node_encoding(
    edge_index: Int[Tensor, "2 edges"], n: int, steps: int, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "n steps"]:
    r"""Probabilities to be back after 1 .. p steps, :math:`\mathrm{RW}^k_{ii}`: the node form of RWSE (CSA 2.3).

    The diagonal ``(n, steps)`` of :func:`random_walk_encoding` without the matrix: a block of nodes at a time.

    >>> random_walk_node_encoding(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3, 2)
    tensor([[0.0000, 0.5000],
            [0.0000, 1.0000],
            [0.0000, 0.5000]])
    """
    checks.positive_int("steps", steps)
    checks.floating_dtype(dtype)
    checks.edges(edge_index, n)
    out = torch.empty(n, steps, dtype=dtype, device=edge_index.device)
    if edge_index.is_meta:
        return out
    walk = _walk(edge_index, n)
    back = np.empty((n, steps))
    for start in range(0, n, _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, n))
        for k, ends in enumerate(_ends(walk, rows, steps)):
            back[rows, k] = ends[rows, np.arange(len(rows))]
    return out.copy_(torch.from_numpy(back))


def shortest_path_encoding(edge_index: Int[Tensor, "2 edges"], n: int, limit: int) -> Int[Tensor, "n n"]:
    r"""Lengths :math:`\phi(i, j)` of shortest paths up to a limit, CSA eq. 11.

    ``(n, n)`` int64: 0 on the diagonal, 1 to ``limit``, and ``limit + 1`` where j is not reached within the limit.

    >>> shortest_path_encoding(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 4, 1)[0].tolist()
    [0, 1, 2, 2]
    """
    checks.positive_int("limit", limit)
    checks.edges(edge_index, n)
    adjacency = _adjacency(edge_index, n)
    if n == 0:
        return torch.zeros(0, 0, dtype=torch.int64, device=edge_index.device)
    length = scipy.sparse.csgraph.dijkstra(adjacency, directed=True, unweighted=True, limit=limit)
    return torch.from_numpy(np.minimum(length, limit + 1).astype(np.int64)).to(edge_index.device)


def edge_categories(
    edge_index: Int[Tensor, "2 edges"], n: int, edge_type: Int[Tensor, " edges"] | None = None
) -> Int[Tensor, "n n"]:
    """The relation of each pair of nodes as an integer ``(n, n)``: CSA eq. 8.

    0 says that there is no edge, 1 that the nodes are one (i = j), 2 + t that there is an edge of type t. A self-loop
    is an edge: it takes the place of the 1. Of an edge that is listed twice the largest type counts. ``edge_type``
    ``(m,)`` has integers from zero on, else it is a ValueError; all are zero if it is left out.

    >>> edge_categories(torch.tensor([[0, 1], [1, 0]]), 3, torch.tensor([4, 4]))
    tensor([[1, 6, 0],
            [6, 1, 0],
            [0, 0, 1]])
    """
    checks.edges(edge_index, n)
    source, target = edge_index.long()
    types = torch.zeros_like(source)
    if edge_type is not None:
        checks.integers("edge_type", edge_type)
        if edge_type.shape != source.shape or bool((edge_type < 0).any()):
            came = f"{tuple(edge_type.shape)} of {edge_type.dtype}"
            raise ValueError(f"edge_type must be an integer from zero on for each of {len(source)} edges, got {came}.")
        types = edge_type.long()
    empty = torch.eye(n, dtype=torch.int64, device=edge_index.device).flatten()
    return empty.scatter_reduce(0, source * n + target, types + 2, "amax").unflatten(0, (n, n))


def category_product(categories: Int[Tensor, "*shape"], related: Bool[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The Cartesian product of a category and a relation, CSA section 3.4: ``2 * categories + related``.

    Categories are those of :func:`edge_categories`, the relation is that of :func:`~holonomy.layers.ring_membership`.

    >>> category_product(torch.tensor([0, 1, 1]), torch.tensor([False, False, True]))
    tensor([0, 2, 3])
    """
    checks.integers("categories", categories)
    checks.boolean("related", related, categories.shape, "related pairs")
    return 2 * categories.long() + related.long()


def _adjacency(edge_index: Tensor, n: int) -> Any:
    source, target = as_array(edge_index)
    return scipy.sparse.csr_array((np.ones(len(source)), (source, target)), shape=(n, n))


def _walk(edge_index: Tensor, n: int) -> Any:
    """The transpose of RW, of which a product with distributions (n, starts) is one step of each."""
    checks.edges(edge_index, n)
    if n <= _DENSE_NODES:
        source, target = as_array(edge_index)
        walk = np.zeros((n, n))
        np.add.at(walk, (target, source), 1.0)
        return walk / np.maximum(walk.sum(0), 1.0)
    adjacency = _adjacency(edge_index, n)
    degree = np.maximum(adjacency.sum(1), 1.0)
    return scipy.sparse.csr_array((adjacency / degree[:, None]).T)


def _ends(walk: Any, rows: Any, steps: int) -> Any:
    """Yield where walks from each of ``rows`` are after 1 .. p steps: (n, rows) probabilities."""
    ends = np.zeros((walk.shape[0], len(rows)))
    ends[rows, np.arange(len(rows))] = 1.0
    for _ in range(steps):
        ends = walk @ ends
        yield ends
