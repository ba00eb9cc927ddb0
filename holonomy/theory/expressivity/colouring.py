r"""Weisfeiler-Leman colourings, computed exactly, and the classic pairs of graphs that they do or do not separate.

A colouring gives each k-tuple of nodes a number, at first by which of its nodes are equal and which are adjacent, and
refines it until nothing changes. With :math:`t[s \gets w]` for the tuple with w at position s:

* k = 1 is colour refinement: a node's colour, and the multiset of its neighbours' colours;
* ``"folklore"``, k >= 2: a tuple's colour and the multiset over w of :math:`(c(t[1 \gets w]), .., c(t[k \gets w]))`;
* ``"oblivious"``, k >= 2: a tuple's colour and, for each s, the multiset over w of :math:`c(t[s \gets w])`.

Folklore k-WL separates what oblivious (k+1)-WL does, and oblivious 2-WL what colour refinement does. "k-WL" in the
papers on invariant graph networks is the oblivious one.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Literal

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Bool, Int
from holonomy.theory.expressivity.tokens_basis import equality_patterns

WLForm = Literal["folklore", "oblivious"]  #: which refinement of tuples; the same for k = 1


def adjacency(edges: list[tuple[int, int]]) -> Bool[Tensor, "n n"]:
    """The symmetric matrix of a list of edges, one at least."""
    if not edges:
        raise ValueError("edges must be one at least, got none.")
    nodes = 1 + max(max(edge) for edge in edges)
    matrix = torch.zeros(nodes, nodes, dtype=torch.bool)
    u, v = torch.tensor(edges).T
    matrix[u, v] = matrix[v, u] = True
    return matrix


def _simple(name: str, graphs: Tensor, batch: tuple[str, ...] = ()) -> Tensor:
    """A graph or a batch of graphs, if they are symmetric matrices of truths."""
    checks.boolean(name, graphs, None, "neighbours")
    if graphs.ndim != 2 + len(batch) or graphs.shape[-1] != graphs.shape[-2]:
        raise ValueError(f"{name} must have shape ({', '.join([*batch, 'n', 'n'])}), got {tuple(graphs.shape)}.")
    if not torch.equal(graphs, graphs.mT):
        raise ValueError(f"{name} must be symmetric, got edges that go one way.")
    return graphs


def cfi_graph(base: Bool[Tensor, "n n"], *, twisted: bool = False) -> Bool[Tensor, "nodes nodes"]:
    """The graph of Cai, Fuerer and Immerman over a base graph.

    A base node becomes a node for each even subset of its edges, joined for each edge to the one of the edge's two
    nodes that says whether the edge is in the subset; with ``twisted`` one edge has them exchanged at one end. Over a
    connected base of treewidth t, folklore t-WL separates the two and folklore (t-1)-WL does not.
    """
    if not bool(_simple("base", base).any()):
        raise ValueError("base must have an edge, got none.")
    edges = [(int(u), int(v)) for u, v in base.triu(1).nonzero().tolist()]
    inner = [
        (node, frozenset(chosen))
        for node in range(base.shape[0])
        for incident in [[edge for edge in edges if node in edge]]
        for size in range(0, len(incident) + 1, 2)
        for chosen in combinations(incident, size)
    ]
    outer: dict[tuple[tuple[int, int], int, bool], int] = {
        end: len(inner) + number for number, end in enumerate(product(edges, (0, 1), (False, True)))
    }
    found = [
        (number, outer[e, e.index(node), e in chosen])
        for number, (node, chosen) in enumerate(inner)
        for e in edges
        if node in e
    ]
    twist = edges[0] if twisted else None
    found += [(outer[e, 0, says], outer[e, 1, says ^ (e == twist)]) for e in edges for says in (False, True)]
    return adjacency(found)


def _cycles(*lengths: int) -> list[tuple[int, int]]:
    edges: list[tuple[int, int]] = []
    start = 0
    for length in lengths:
        edges += [(start + i, start + (i + 1) % length) for i in range(length)]
        start += length
    return edges


PAIRS = ("path_star", "six_cycle", "decalin", "shrikhande", "cfi_k3", "cfi_k4")
"""Names of the pairs: a path and a star of four nodes, the six-cycle and two triangles, decalin and bicyclopentyl
(two rings that share an edge, or are joined by one), the Shrikhande graph and the rook's 4 x 4 graph, and the graphs of
Cai, Fuerer and Immerman over the complete graphs of three and four nodes."""


def graph_pair(name: str) -> tuple[Bool[Tensor, "n n"], Bool[Tensor, "n n"]]:
    """Two graphs that are not isomorphic."""
    checks.one_of("name", name, PAIRS)
    if name == "path_star":
        return adjacency([(0, 1), (1, 2), (2, 3)]), adjacency([(0, 1), (0, 2), (0, 3)])
    if name == "six_cycle":
        return adjacency(_cycles(6)), adjacency(_cycles(3, 3))
    if name == "decalin":
        return adjacency([*_cycles(10), (0, 5)]), adjacency([*_cycles(5, 5), (0, 5)])
    if name == "shrikhande":
        steps, cells = {(0, 1), (0, 3), (1, 0), (3, 0), (1, 1), (3, 3)}, list(product(range(4), repeat=2))
        shrikhande = [[((a - c) % 4, (b - d) % 4) in steps for c, d in cells] for a, b in cells]
        rook = [[(a == c) != (b == d) for c, d in cells] for a, b in cells]
        return torch.tensor(shrikhande), torch.tensor(rook)
    base = ~torch.eye(3 if name == "cfi_k3" else 4, dtype=torch.bool)
    return cfi_graph(base), cfi_graph(base, twisted=True)


def _atomic(graphs: Bool[Tensor, "graphs n n"], k: int) -> Int[Tensor, "graphs tuples"]:
    """Which nodes of a tuple are equal, and which are adjacent."""
    count, nodes = graphs.shape[:2]
    colours = equality_patterns(nodes, k).expand(count, -1)
    index = torch.arange(nodes**k)
    place = [index // nodes ** (k - 1 - s) % nodes for s in range(k)]
    for a, b in combinations(range(k), 2):
        colours = 2 * colours + graphs[:, place[a], place[b]]
    return colours


def _numbered(rows: Int[Tensor, "graphs tuples parts"]) -> Int[Tensor, "graphs tuples"]:
    """Equal rows get equal numbers, in all graphs."""
    number = torch.unique(rows.flatten(0, 1), dim=0, return_inverse=True)[1]
    return number.reshape(rows.shape[:2])


def stable_colours(
    graphs: Bool[Tensor, "graphs n n"], k: int, form: WLForm = "folklore"
) -> Int[Tensor, "graphs tuples"]:
    """Refine the colours of the k-tuples of graphs together until no colour splits."""
    checks.positive_int("k", k)
    checks.one_of("form", form, ("folklore", "oblivious"))
    count, nodes = _simple("graphs", graphs, ("graphs",)).shape[:2]
    if not graphs.numel():
        return torch.zeros(count, nodes**k, dtype=torch.int64)
    colours = _numbered(_atomic(graphs, k)[..., None])
    while True:
        many = int(colours.max()) + 1
        table = colours.reshape(count, *[nodes] * k)
        parts = [colours[..., None]]
        if k == 1:
            near = torch.where(graphs, colours[:, None, :], -1)
            parts.append(near.sort(-1).values)
        else:
            # Every tuple with its s-th node replaced by each w.
            moved = [
                table.movedim(1 + s, -1).unsqueeze(1 + s).expand(count, *[nodes] * (k + 1)).reshape(count, -1, nodes)
                for s in range(k)
            ]
            if form == "folklore":
                joint = moved[0]
                for other in moved[1:]:
                    # As few numbers as there are kinds, so that no product overflows.
                    joint = torch.unique(joint * many + other, return_inverse=True)[1]
                moved = [joint]
            parts += [part.sort(-1).values for part in moved]
        refined = _numbered(torch.cat(parts, -1))
        if int(refined.max()) + 1 == many:
            return refined
        colours = refined


def separated(first: Bool[Tensor, "n n"], second: Bool[Tensor, "m m"], k: int, form: WLForm = "folklore") -> bool:
    """Whether k-WL separates two graphs: their stable colourings have other numbers of some colour.

    Graphs with different numbers of nodes always are.
    """
    if _simple("first", first).shape != _simple("second", second).shape:
        return True
    colours = stable_colours(torch.stack([first, second]), k, form).sort(-1).values
    return not torch.equal(colours[0], colours[1])
