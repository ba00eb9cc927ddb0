r"""Which nodes of a graph share a substructure: rings, and any set of patterns (CSA section 3.4, definition 3.1).

Nodes i and j are related, :math:`i \approx j`, if a subgraph that looks like one of the given structures contains both.
The relation is symmetric, not transitive, and reflexive only at nodes that lie in such a subgraph. Graphs are
``edge_index`` ``(2, m)`` int64 among n nodes; another shape, and a node that is not there, is a ValueError. They are
taken as undirected, whether one direction of an edge is listed or both; self-loops and repetitions do not count.
Searched on the CPU, once for a data set; in the worst case the number of subgraphs grows exponentially.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

from holonomy import checks
from holonomy._autograd import as_array
from holonomy._shapes import Bool, Int


def ring_membership(edge_index: Int[Tensor, "2 edges"], n: int, max_length: int) -> Bool[Tensor, "n n"]:
    """Which nodes share a ring, a cycle without chords, of at most ``max_length`` nodes: ``(n, n)``.

    The paper takes lengths up to 18 for ZINC and 6 for OGB. Chemists' rings (a smallest set of them) are fewer in
    cages: hand ``mol.GetRingInfo().AtomRings()`` of RDKit to :func:`membership` for those. A triangle with a tail:

    >>> ring_membership(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]]), 4, 6).long()
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 0],
            [0, 0, 0, 0]])
    """
    return membership(chordless_cycles(edge_index, n, max_length), n).to(edge_index.device)


def substructure_membership(
    edge_index: Int[Tensor, "2 edges"], n: int, patterns: Sequence[Int[Tensor, "2 _"]], *, induced: bool = False
) -> Bool[Tensor, "n n"]:
    """Which nodes share a subgraph that is isomorphic to one of the patterns, ``(n, n)``: CSA definition 3.1, eq. 13.

    A pattern is the edges ``(2, k)`` of a structure, its nodes numbered from zero without a gap. An ``induced``
    subgraph has no further edge among its nodes; rings are the induced cycles.

    >>> path = torch.tensor([[0, 1], [1, 2]])
    >>> substructure_membership(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4, [path])[0]
    tensor([ True,  True,  True, False])
    """
    checks.flags(induced=induced)
    graph = _neighbours(edge_index, n)
    found: set[frozenset[int]] = set()
    for pattern in checks.sequence("patterns", patterns, "edge lists", Tensor):
        checks.integers("patterns", pattern)
        size = int(pattern.max()) + 1 if pattern.numel() else 0
        found.update(_embeddings(_neighbours(pattern, size, "patterns"), graph, induced=induced))
    return membership(found, n).to(edge_index.device)


def membership(groups: Iterable[Iterable[int]], n: int) -> Bool[Tensor, "n n"]:
    """Which nodes share one of the given groups, such as the rings that RDKit finds: ``(n, n)``.

    A group that names a node that is not there is a ValueError.

    >>> membership([(0, 1), (2,)], 3).long()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]])
    """
    checks.nonnegative_int("n", n)
    together = torch.zeros(n, n, dtype=torch.bool, device="cpu")
    for group in checks.sequence("groups", groups, "collections of nodes"):
        members = checks.sequence("groups", group, "collections of nodes", SupportsIndex)
        nodes = torch.tensor(members, dtype=torch.int64, device="cpu")
        checks.codes("groups", nodes, n, "n")
        together[nodes[:, None], nodes] = True
    return together


def chordless_cycles(edge_index: Int[Tensor, "2 edges"], n: int, max_length: int) -> list[tuple[int, ...]]:
    """Every cycle without a chord, of 3 to ``max_length`` nodes, once.

    Its nodes begin with the smallest, in the direction of its smaller neighbour.

    >>> chordless_cycles(torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]), 4, 4)
    [(0, 1, 2), (0, 2, 3)]
    """
    checks.positive_int("max_length", max_length)
    graph = _neighbours(edge_index, n)
    return sorted(cycle for start in range(n) for cycle in _cycles_from(start, graph, max_length))


def _cycles_from(start: int, graph: list[set[int]], max_length: int) -> Iterator[tuple[int, ...]]:
    """Grow chordless paths of nodes above ``start`` that end when they touch it again."""
    above = [v for v in sorted(graph[start]) if v > start]
    # A path that cannot come back within the length is given up: this keeps long limits cheap.
    back = _distances(start, graph, max_length)
    stack: list[tuple[int, ...]] = [(start, v) for v in reversed(above)]
    while stack:
        path = stack.pop()
        for v in sorted(graph[path[-1]], reverse=True):
            if v <= start or len(path) + back.get(v, max_length) > max_length or not graph[v].isdisjoint(path[1:-1]):
                continue
            if v in graph[start]:
                if v > path[1]:  # each cycle in one of its two directions
                    yield (*path, v)
            else:
                stack.append((*path, v))


def _distances(start: int, graph: list[set[int]], limit: int) -> dict[int, int]:
    distance, front = {start: 0}, [start]
    while front:
        ahead = [(u, v) for u in front if distance[u] < limit for v in graph[u] if v > start]
        front = []
        for u, v in ahead:
            if v not in distance:
                distance[v] = distance[u] + 1
                front.append(v)
    return distance


def _embeddings(pattern: list[set[int]], graph: list[set[int]], *, induced: bool) -> Iterator[frozenset[int]]:
    """Yield the images of a pattern, its nodes laid down one after the other beside those that are there."""
    order = _connected_order(pattern)
    stack: list[tuple[int, ...]] = [()]
    while stack:
        image = stack.pop()
        if len(image) == len(order):
            yield frozenset(image)
            continue
        node = order[len(image)]
        joined = [v for u, v in zip(order, image, strict=False) if u in pattern[node]]
        apart = [v for u, v in zip(order, image, strict=False) if u not in pattern[node]] if induced else []
        candidates = set.intersection(*(graph[v] for v in joined)) if joined else set(range(len(graph)))
        stack.extend(
            (*image, v) for v in candidates if v not in image and not any(v in graph[other] for other in apart)
        )


def _connected_order(pattern: list[set[int]]) -> list[int]:
    """Nodes such that each has a neighbour before it where its component has begun."""
    order: list[int] = []
    rest = set(range(len(pattern)))
    while rest:
        touching = {v for v in rest if not pattern[v].isdisjoint(order)}
        # The one with most neighbours behind it has fewest candidates.
        node = max(sorted(touching or rest), key=lambda v: (len(pattern[v].intersection(order)), len(pattern[v])))
        order.append(node)
        rest.remove(node)
    return order


def _neighbours(edge_index: Tensor, n: int, name: str = "edge_index") -> list[set[int]]:
    checks.edges(edge_index, n, name=name)
    graph: list[set[int]] = [set() for _ in range(n)]
    for u, v in as_array(edge_index).T.tolist():
        if u != v:
            graph[u].add(v)
            graph[v].add(u)
    return graph
