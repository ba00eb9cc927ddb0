r"""Radius, diameter and spectrum of a graph: Simplicial section 3.1.

Printed: :math:`\mathrm{rad} \le \mathrm{diam} \le 96 \log n / \lambda_2`, with a spectral value that the paper does not
name. It holds for the normalised Laplacian of a connected undirected graph; for the combinatorial one it fails (the
complete graph of 700 nodes). It does not cover directed graphs, such as causal masks. Chung, Faber and Manteuffel's
bound, by the eigenvalues of the combinatorial Laplacian, is tight.

Graphs are symmetric adjacency matrices ``(n, n)`` of one node at least, for the bounds of zeros and ones without loops;
others are a ValueError. Only :func:`hop_distances` takes directed ones.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from holonomy import checks, numerics
from holonomy._shapes import Float


def hop_distances(adjacency: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Count the steps of the shortest paths, infinite where there is none; of directed graphs from row to column."""
    checks.floating("adjacency", adjacency)
    if adjacency.ndim != 2 or adjacency.shape[0] != adjacency.shape[1]:
        raise ValueError(f"adjacency must have shape (n, n), got {tuple(adjacency.shape)}.")
    return torch.from_numpy(shortest_path(adjacency.numpy(force=True), unweighted=True)).to(adjacency)


def _undirected(adjacency: Tensor, *, simple: bool = False) -> Tensor:
    """An adjacency matrix, if it is one of an undirected graph, without loops and weights where it must be simple."""
    checks.floating("adjacency", adjacency)
    if adjacency.ndim != 2 or adjacency.shape[0] != adjacency.shape[1] or not adjacency.shape[0]:
        raise ValueError(f"adjacency must have shape (n, n), n at least 1, got {tuple(adjacency.shape)}.")
    wanted = {"symmetric": adjacency == adjacency.mT}
    if simple:
        wanted["zeros and ones"] = (adjacency == 0) | (adjacency == 1)
        wanted["zero on its diagonal"] = adjacency.diagonal() == 0
    for what, right in wanted.items():
        if not bool(right.all()):
            where = "at [" + ", ".join(str(i) for i in (~right).nonzero()[0].tolist()) + "]"
            raise ValueError(f"adjacency must be {what}, got something else {where}.")
    return adjacency


def radius_and_diameter(adjacency: Float[Tensor, "n n"]) -> tuple[float, float]:
    """Find the least and the greatest eccentricity of a node."""
    farthest = hop_distances(_undirected(adjacency)).amax(0)
    return farthest.min().item(), farthest.max().item()


def laplacian_spectrum(
    adjacency: Float[Tensor, "n n"], kind: Literal["combinatorial", "normalised"] = "normalised"
) -> Float[Tensor, " n"]:
    """Eigenvalues of :math:`D - A`, or of :math:`D^{-1/2} (D - A) D^{-1/2}`, in increasing order."""
    # An isolated node has the eigenvalue 0 in both, so that there are as many zeros as components.
    checks.one_of("kind", kind, ("combinatorial", "normalised"))
    # Eigenvalues are found in float32 at least.
    adjacency = _undirected(adjacency).to(torch.promote_types(adjacency.dtype, torch.float32))
    degree = adjacency.sum(1)
    laplacian = torch.diag(degree) - adjacency
    if kind == "normalised":
        root = numerics.safe_div(torch.ones_like(degree), degree.sqrt())
        laplacian = root[:, None] * laplacian * root
    return torch.linalg.eigvalsh(laplacian)


def spectral_diameter_bound(
    adjacency: Float[Tensor, "n n"], kind: Literal["combinatorial", "normalised"] = "normalised"
) -> float:
    r"""Evaluate the printed :math:`96 \log n / \lambda_2`, infinite where the graph is not connected."""
    second, _ = _second_and_last(laplacian_spectrum(_undirected(adjacency, simple=True), kind))
    return 96 * math.log(adjacency.shape[0]) / second if second > 0 else math.inf


def _second_and_last(values: Tensor) -> tuple[float, float]:
    """Two eigenvalues; the second is zero where rounding may have made it, and infinite of one node, which is alone."""
    if len(values) == 1:
        return math.inf, math.inf
    second, last = values[1].item(), values[-1].item()
    return (second if second > numerics.tolerance(values.dtype).rtol * last else 0.0), last


def chung_bound(adjacency: Float[Tensor, "n n"]) -> float:
    r"""Bound the diameter as Chung, Faber and Manteuffel (1994) do.

    .. math:: \left\lfloor \mathrm{arcosh}(n-1) \Big/ \mathrm{arcosh}\frac{\lambda_n + \lambda_2}{\lambda_n - \lambda_2}
        \right\rfloor + 1 ,

    infinite where the graph is not connected, and zero where it is one node.
    """
    second, last = _second_and_last(laplacian_spectrum(_undirected(adjacency, simple=True), "combinatorial"))
    if second in {0, math.inf}:
        return math.inf if second == 0 else 0.0
    slack = numerics.tolerance(adjacency.dtype).rtol
    if last - second <= slack * last:
        return 1.0
    quotient = math.acosh(adjacency.shape[0] - 1) / math.acosh((last + second) / (last - second))
    # A quotient that is an integer must not lose it to rounding.
    return math.floor(quotient * (1 + slack)) + 1.0
