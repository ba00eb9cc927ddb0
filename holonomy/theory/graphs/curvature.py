r"""Forman and balanced Forman curvature of graphs and of their line graphs: Simplicial appendix F.2.

The paper says "Forman-Ricci curvature" and means one of these, for an edge between u and v with t triangles:

============= ======================================================================================================
``plain``     :math:`4 - d_u - d_v`
``augmented`` :math:`4 - d_u - d_v + 3 t`
``balanced``  :math:`\frac{2}{d_u} + \frac{2}{d_v} - 2 + \frac{2t}{\max} + \frac{t}{\min} + \frac{|\square^u| +
              |\square^v|}{\gamma \max}`, zero at a leaf (Topping et al. 2022)
============= ======================================================================================================

max and min of the two degrees; :math:`\square^u` the other neighbours of u that close a four-cycle without diagonals
over the edge, :math:`\gamma` the most such cycles that one of them closes. Many graphs at once are given by their
incidence, ``(*batch, n, m)``: 1 where a node ends an edge, columns of zeros where a graph has fewer edges.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Float, Int

Forman = Literal["plain", "augmented", "balanced"]  #: which curvature

FORMANS: tuple[Forman, ...] = ("plain", "augmented", "balanced")


def incidence(edges: Int[Tensor, "2 m"], nodes: int, dtype: torch.dtype = torch.float64) -> Float[Tensor, "n m"]:
    """Write a graph by its incidence."""
    table = torch.zeros(nodes, edges.shape[1], dtype=dtype, device=edges.device)
    return table.scatter_(0, edges, 1.0)


def _without_diagonal(square: Tensor) -> Tensor:
    return square - torch.diag_embed(square.diagonal(dim1=-2, dim2=-1))


def edge_curvature(adjacency: Float[Tensor, "*batch n n"], form: Forman = "balanced") -> Float[Tensor, "*batch n n"]:
    """Curvature of every edge; adjacency matrices of integers or truths are taken, too."""
    checks.one_of("form", form, FORMANS)
    checks.tensor("adjacency", adjacency)
    if adjacency.dtype == torch.bool:
        adjacency = adjacency.long()
    degree = adjacency.sum(-1)
    ends = degree[..., :, None] + degree[..., None, :]
    if form == "plain":
        return adjacency * (4 - ends)
    triangles = adjacency @ adjacency
    if form == "augmented":
        return adjacency * (4 - ends + 3 * triangles)
    least = torch.minimum(degree[..., :, None], degree[..., None, :]).clamp(min=1)
    most = torch.maximum(degree[..., :, None], degree[..., None, :]).clamp(min=1)
    corners, cycles = _squares(adjacency)
    both, gamma = corners + corners.mT, torch.maximum(cycles, cycles.mT).clamp(min=1)
    value = 2 / least + 2 / most - 2 + 2 * triangles / most + triangles / least + both / (gamma * most)
    return torch.where((adjacency > 0) & (least > 1), value, 0.0)


def _squares(adjacency: Tensor) -> tuple[Tensor, Tensor]:
    """For (u, v): how many neighbours k of u close a four-cycle without diagonals, and the most that one closes."""
    outside = 1 - adjacency
    # paths k - w - v with w neither u nor its neighbour: the first sum counts w = u once.
    paths = torch.einsum("...kw,...vw,...uw->...uvk", adjacency, adjacency, outside)
    paths = paths - adjacency[..., :, None, :] * adjacency[..., :, :, None]
    apart = adjacency[..., :, None, :] * outside[..., None, :, :]  # k sees u and not v
    apart = apart * (1 - torch.eye(adjacency.shape[-1], dtype=adjacency.dtype, device=adjacency.device))
    cycles = paths * apart
    return (cycles > 0).sum(-1).to(adjacency.dtype), cycles.amax(-1)


class Shares(NamedTuple):
    """How a set of graphs compares with its line graphs."""

    mean: float  # share of the graphs whose line graph has the strictly larger mean curvature
    mean_weak: float  # larger or equal
    least: float  # share whose line graph has the strictly larger smallest curvature
    least_weak: float  # larger or equal
    graphs: int  # how many were compared: those in which two edges meet


def curvature_shares(graphs: Float[Tensor, "batch n m"], form: Forman = "balanced") -> Shares:
    """Compare the curvature of graphs with that of their line graphs, means and smallest values over edges."""
    graphs = graphs[(graphs.sum(-1) >= 2).any(-1)]
    if graphs.shape[0] == 0:
        return Shares(0.0, 0.0, 0.0, 0.0, 0)
    graph, line = _without_diagonal(graphs @ graphs.mT), _without_diagonal(graphs.mT @ graphs)
    (mean, least), (line_mean, line_least) = _mean_and_least(graph, form), _mean_and_least(line, form)
    # Means of few rational numbers that are equal may differ in their last digits.
    slack = 1000 * torch.finfo(graphs.dtype).eps
    pairs = ((mean, line_mean), (least, line_least))
    found = [((b - a > t * slack).double().mean().item()) for a, b in pairs for t in (1, -1)]
    return Shares(found[0], found[1], found[2], found[3], graphs.shape[0])


def _mean_and_least(adjacency: Tensor, form: Forman) -> tuple[Tensor, Tensor]:
    curvature, edge = edge_curvature(adjacency, form), adjacency > 0
    mean = curvature.sum((-2, -1)) / edge.sum((-2, -1))
    return mean, torch.where(edge, curvature, torch.inf).amin((-2, -1))
