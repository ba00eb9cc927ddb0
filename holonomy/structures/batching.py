"""Many graphs as one: joined, and chosen so that their sizes are alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import SupportsIndex

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Int


def join_graphs(graphs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several graphs as one, as PyTorch Geometric batches them: what models take.

    Args:
        graphs: each has ``"x"`` with a row a node, ``"edge_index"`` with its own numbers of nodes, and whatever else
            the first one has; it is concatenated along its first axis, numbers are stacked.

    Returns:
        The same names, ``"edge_index"`` renumbered as int64, and ``"batch"``, the graph of each node.

    Raises:
        TypeError: if a graph is no mapping, or holds something else than tensors.
        ValueError: if there is no graph, the first one has a ``"batch"``, one lacks what the first one has or has it in
            another shape, edges have more features or weights or fewer, or an edge (on a CPU) names a node that its
            graph does not have.

    >>> edge = torch.tensor([[0, 1], [1, 0]])
    >>> batch = join_graphs([{"x": torch.ones(2, 1), "edge_index": edge}] * 2)
    >>> batch["edge_index"].tolist(), batch["batch"].tolist()
    ([[0, 1, 2, 3], [1, 0, 3, 2]], [0, 0, 1, 1])
    """
    graphs = checks.sequence("graphs", graphs, "mappings with 'x'", Mapping)
    if not graphs:
        raise ValueError("graphs must be at least one, got none.")
    if "batch" in graphs[0]:
        raise ValueError(
            f"graphs must have no 'batch', which is the result's graph of each node, got one with {list(graphs[0])}."
        )
    for number, graph in enumerate(graphs):
        if not {"x", *graphs[0]} <= graph.keys():
            first = list(graphs[0])
            raise ValueError(
                f"graphs must be mappings with 'x' and what the first one has, {first}, got one with {list(graph)}."
            )
        for name, first in graphs[0].items():
            checks.tensor(name, graph[name])
            if graph[name].ndim != first.ndim or (graph[name].shape[1:] != first.shape[1:] and name != "edge_index"):
                shapes = f"{tuple(first.shape)} in graphs[0] and {tuple(graph[name].shape)} in graphs[{number}]"
                raise ValueError(f"{name} must have one shape in all graphs but for its first axis, got {shapes}.")
        if graph["x"].ndim == 0:
            raise ValueError("x must have a row a node, got shape ().")
        for name in ("edge_attr", "edge_weight"):
            if {name, "edge_index"} <= graphs[0].keys() and graph[name].shape[:1] != graph["edge_index"].shape[1:]:
                wanted = tuple(graph["edge_index"].shape[1:])
                came = tuple(graph[name].shape)
                raise ValueError(f"{name} of graphs[{number}] must have one row an edge, {wanted}, got {came}.")
    sizes = [graph["x"].shape[0] for graph in graphs]
    joined: dict[str, Tensor] = {}
    for name, first in graphs[0].items():
        every = [graph[name] for graph in graphs]
        if name == "edge_index":
            joined[name] = _renumbered(every, sizes)
        else:
            joined[name] = torch.cat(every) if first.ndim else torch.stack(every)
    each = torch.tensor(sizes, device=joined["x"].device)
    joined["batch"] = torch.arange(len(graphs), device=each.device).repeat_interleave(each)
    return joined


def _renumbered(every: list[Tensor], sizes: list[int]) -> Tensor:
    """The edges of graphs of these sizes, as edges of one graph."""
    for number, (edges, size) in enumerate(zip(every, sizes, strict=True)):
        # Renumbered, it would be an edge to a node of another graph.
        if checks.costs_nothing_to_read(edges):
            checks.edges(edges, size, name=f"edge_index of graphs[{number}]")
    starts = accumulate(sizes[:-1], initial=0)
    return torch.cat([edges.long() + start for edges, start in zip(every, starts, strict=True)], 1)


def batches_by_size(
    sizes: Sequence[int] | Int[Tensor, " graphs"],
    batch_size: int,
    *,
    padding: float = 1.05,
    generator: torch.Generator | None = None,
) -> list[Int[Tensor, " batch"]]:
    r"""Batches of graphs of similar sizes, for layers whose work is the square of the largest one of a batch.

    Graphs are ordered by size plus a random number, and cut into batches, which come in random order. The random
    number has the widest range, of those that halve the largest size, for which the work of all batches with their
    padding, :math:`\sum_b |b|\, n_{\max}^2`, is at most ``padding`` times that without, :math:`\sum n^2`: what the
    bound allows goes into mixing. Where there are so few graphs that even those of nearest size go over it, batches
    end earlier.

    Args:
        sizes: number of nodes of each graph.
        batch_size: most graphs of a batch.
        padding: the bound, at least 1; infinity for batches without regard to size.
        generator: source of the random numbers, torch's seeded state if left out.

    Returns:
        The numbers of the graphs of each batch.

    Raises:
        ValueError: if ``batch_size`` is not positive or ``padding`` is less than 1.

    >>> sorted(sorted(batch.tolist()) for batch in batches_by_size([5, 9, 5, 9], 2))
    [[0, 2], [1, 3]]
    """
    checks.positive_int("batch_size", batch_size)
    checks.in_range("padding", padding, 1.0, math.inf)
    checks.generator(generator)
    if not isinstance(sizes, Tensor):
        sizes = torch.tensor(checks.sequence("sizes", sizes, "integers", SupportsIndex), device="cpu")
    if sizes.ndim != 1:
        raise ValueError(f"sizes must have shape (graphs,), got {tuple(sizes.shape)}.")
    if len(sizes) == 0:
        return []
    sizes = sizes.cpu()
    checks.integers("sizes", sizes)
    if int(sizes.min()) < 0:
        raise ValueError(f"sizes must be at least 0, got {int(sizes.min())}.")
    sizes = sizes.long()  # squares leave the range of small integers
    device = None if generator is None else generator.device
    noise = torch.rand(len(sizes), generator=generator, device=device, dtype=torch.float64).cpu()
    if padding == math.inf:
        sizes = torch.ones_like(sizes)
    limit, spread = padding * float(sizes.square().sum()), float(sizes.max())
    batches = _by_size(sizes, noise * spread, batch_size)
    while _padded_work(sizes, batches) > limit and spread >= 1:
        # Half of the mixing, until the padding that it costs is within the bound.
        spread /= 2
        batches = _by_size(sizes, noise * spread, batch_size)
    if _padded_work(sizes, batches) > limit:
        batches = [part for batch in batches for part in _divided(sizes, batch, padding)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator, device=device).tolist()]


def _by_size(sizes: Tensor, noise: Tensor, batch_size: int) -> list[Tensor]:
    return list((sizes + noise).argsort().split(batch_size))


def _padded_work(sizes: Tensor, batches: list[Tensor]) -> float:
    return float(sum(len(batch) * int(sizes[batch].max()) ** 2 for batch in batches))


def _divided(sizes: Tensor, batch: Tensor, padding: float) -> list[Tensor]:
    """Parts of an ascending batch, of which none goes over the bound."""
    cuts, count, exact = [0], 0, 0
    for place, size in enumerate(sizes[batch].tolist()):
        count, exact = count + 1, exact + size**2
        if count * size**2 > padding * exact:
            cuts.append(place)
            count, exact = 1, size**2
    return [batch[start:end] for start, end in zip(cuts, [*cuts[1:], len(batch)], strict=True)]
