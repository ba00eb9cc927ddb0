"""Pieces of a graph that fit one step: random parts of its nodes, and sampled neighbourhoods of some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Int
from holonomy.structures.graph import Graph, Neighbours, incoming_of
from holonomy.structures.padded import place_in_run


class Subgraph(NamedTuple):
    """Some nodes of a graph and edges among them, as PyTorch Geometric's loaders batch them.

    >>> part = Subgraph(torch.tensor([7, 3]), torch.tensor([[1], [0]]), 1)
    >>> part.nodes[part.edge_index].tolist()  # the edge from node 3 to node 7, of which the batch is
    [[3], [7]]
    """

    nodes: Int[Tensor, " nodes"]  #: their numbers in the graph ``(n,)``; ``x[nodes]`` are their features
    edge_index: Int[Tensor, "2 edges"]  #: ``(2, m)``, places among ``nodes``, sources first
    batch_size: int  #: how many of the first nodes the batch is of; a loss reads their results


def node_partitions(
    edge_index: Int[Tensor, "2 edges"], num_nodes: int, parts: int, *, generator: torch.Generator | None = None
) -> Iterator[Subgraph]:
    """The nodes in random parts of one size, each with the edges within it: the protocol of Hypformer's large graphs.

    An epoch is one call: every node is in one part, and of the edges a share of about ``1 / parts`` is in any. Only
    edges are read, so that parts can be made of a graph whose features do not fit in memory.

    Args:
        edge_index: ``(2, m)``.
        num_nodes: n.
        parts: their number, from 1 to n.
        generator: source of the random numbers, torch's seeded state if left out.

    Yields:
        The parts; ``batch_size`` is the number of all its nodes.

    Raises:
        ValueError: if there are more parts than nodes, or ``edge_index`` names a node that is not there.

    >>> ring = torch.stack([torch.arange(6), torch.arange(6).roll(1)])
    >>> parts = list(node_partitions(ring, 6, 2))
    >>> sorted(torch.cat([part.nodes for part in parts]).tolist()), parts[0].batch_size
    ([0, 1, 2, 3, 4, 5], 3)
    """
    checks.edges(edge_index, checks.positive_int("num_nodes", num_nodes))
    checks.generator(generator)
    if not 1 <= checks.positive_int("parts", parts) <= num_nodes:
        raise ValueError(f"parts must be at most the number of nodes, {num_nodes}, got {parts}.")
    device = edge_index.device if generator is None else generator.device
    order = torch.randperm(num_nodes, generator=generator, device=device).to(edge_index.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(num_nodes, device=order.device)
    starts = torch.arange(parts + 1, device=order.device) * num_nodes // parts
    source, target = place[edge_index.long()].contiguous()
    part = torch.bucketize(source, starts[1:], right=True)
    within = part == torch.bucketize(target, starts[1:], right=True)
    source, target, part = source[within], target[within], part[within]
    by_part = part.argsort(stable=True)
    counts = part.bincount(minlength=parts).tolist()
    ends = starts.tolist()
    for i, edges in enumerate(torch.stack([source, target])[:, by_part].split(counts, 1)):
        yield Subgraph(order[ends[i] : ends[i + 1]], edges - ends[i], ends[i + 1] - ends[i])


def neighbour_batches(
    graph: Graph | Neighbours,
    seeds: Int[Tensor, " seeds"],
    sizes: Sequence[int],
    batch_size: int,
    *,
    generator: torch.Generator | None = None,
) -> Iterator[Subgraph]:
    """Nodes in random batches, each with sampled neighbours, neighbours of those, and so on (GraphSAGE, algorithm 2).

    The neighbours of a node are the sources of its edges and are drawn without replacement; a node that is drawn again
    occurs once. Edges lead from drawn nodes to the nodes that they were drawn for.

    Args:
        graph: on the CPU; its incoming edges alone, as :func:`sort_edges` makes them, where not all of it fits in
            memory.
        seeds: numbers of nodes, each once: an epoch goes through all of them, and has no batch without any.
        sizes: how many neighbours in each step away from the seeds.
        batch_size: seeds of a batch; the last one has what is left.
        generator: source of the random numbers, on the CPU; torch's seeded state if left out.

    Yields:
        The batches, seeds first.

    Raises:
        ValueError: if a size is not positive, or seeds are no list of nodes of the graph, each once.

    >>> graph = Graph(torch.tensor([[1, 2, 3, 0], [0, 0, 0, 1]]), 4)
    >>> batch = next(neighbour_batches(graph, torch.tensor([0]), [2], 1))
    >>> batch.nodes[0].item(), len(batch.nodes), batch.edge_index[1].tolist(), batch.batch_size
    (0, 3, [0, 0], 1)
    """
    incoming = incoming_of(graph)
    num_nodes = len(incoming.start) - 1
    checks.codes("seeds", seeds, num_nodes, "num_nodes")
    if seeds.ndim != 1:
        raise ValueError(f"seeds must have shape (seeds,), got {tuple(seeds.shape)}.")
    if len(seeds.unique()) < len(seeds):
        raise ValueError(f"seeds must name each node once, got {len(seeds)} of {len(seeds.unique())} nodes.")
    checks.positive_int("batch_size", batch_size)
    checks.generator(generator)
    counts = [checks.positive_int("sizes", size) for size in checks.sequence("sizes", sizes, "integers")]
    place = torch.full((num_nodes,), -1)
    if not len(seeds):
        return  # torch's split makes one part of nothing
    for batch in seeds[torch.randperm(len(seeds), generator=generator)].long().split(batch_size):
        nodes, edges = _neighbourhood(incoming, batch, counts, place, generator)
        place[nodes] = -1
        yield Subgraph(nodes, edges, len(batch))


def _neighbourhood(
    incoming: Neighbours, nodes: Tensor, sizes: list[int], place: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """All nodes within these steps, and the edges that were drawn; ``place`` is where a node stands, or -1."""
    place[nodes] = torch.arange(len(nodes))
    newest, found = nodes, [torch.empty(2, 0, dtype=torch.int64)]
    for size in sizes:
        source, target = _drawn(incoming, newest, size, generator)
        newest = source[place[source] < 0].unique()
        place[newest] = torch.arange(len(nodes), len(nodes) + len(newest))
        nodes = torch.cat([nodes, newest])
        found.append(torch.stack([place[source], place[target]]))
    return nodes, torch.cat(found, 1)


def _drawn(incoming: Neighbours, nodes: Tensor, size: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """At most so many edges to each node: those of the smallest of random numbers."""
    first, end = incoming.start[nodes].long(), incoming.start[nodes + 1].long()
    degree = end - first
    row = torch.arange(len(nodes)).repeat_interleave(degree)
    each = place_in_run(row, degree)
    # Rows are in order, and stay so: within each the edges are shuffled.
    order = (row + torch.rand(len(row), generator=generator, dtype=torch.float64) / 2).argsort()
    kept = order[each < size]
    return incoming.node[first[row[kept]] + each[kept]].long(), nodes[row[kept]]
