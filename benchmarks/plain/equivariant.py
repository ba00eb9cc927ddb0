"""Equivariant linear maps in the forms that are written down: HOT eq. 1 over its basis, and an IGN layer's operations.

Weights are ``(bell(k + l), d, d')`` in the basis of exact equality patterns, as HOT eq. 1 has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy.layers import set_partitions

__all__ = ["basis_tensors", "diagrams", "ign_layer", "over_basis"]


def basis_tensors(order: int, nodes: int) -> Tensor:
    """All ``bell(order)`` basis tensors of HOT eq. 2, as ``n ** order`` zeros and ones each."""
    i = torch.arange(nodes)
    grid = torch.stack(torch.meshgrid(*[i] * order, indexing="ij"))
    exact = []
    for pattern in set_partitions(order):
        fits = torch.ones([nodes] * order, dtype=torch.bool)
        for a in range(order):
            for b in range(a):
                fits &= (grid[a] == grid[b]) == (pattern[a] == pattern[b])
        exact.append(fits)
    return torch.stack(exact).float()


def over_basis(x: Tensor, weight: Tensor, basis: Tensor) -> Tensor:
    """HOT eq. 1 as printed, without bias: k = l, ``x`` is ``(n, .., n, d)`` and ``basis`` ``(bell, n, .., n)``."""
    order, nodes = x.ndim - 1, x.shape[0]
    flat = basis.reshape(-1, nodes**order, nodes**order)
    summed = torch.einsum("pij,id->pjd", flat, x.reshape(nodes**order, -1))
    return torch.einsum("pjd,pde->je", summed, weight).reshape(*x.shape[:-1], -1)


def diagrams(weight: Tensor) -> Tensor:
    """The weights of 2 -> 2 for sums over coarser patterns, too: what is added up where patterns nest."""
    patterns = set_partitions(4)
    # A class of "at least these equalities" is the sum of the exact classes at or above it.
    above = [
        [all(q[a] == q[b] for a in range(4) for b in range(a) if p[a] == p[b]) for q in patterns] for p in patterns
    ]
    return torch.linalg.solve(torch.tensor(above).to(weight).mT, weight.flatten(1)).view_as(weight)


def ign_layer(x: Tensor, weight: Tensor) -> Tensor:
    """Invariant graph networks, 2 -> 2: 15 operations, each brought to ``(n, n, d)``, stacked, and one product.

    Maron et al., ICLR 2019, appendix A. The operations are in the order of ``set_partitions(4)``; sums are shared.
    """
    nodes, width = x.shape[0], x.shape[-1]
    diagonal = x.diagonal().mT
    rows, columns = x.sum(1), x.sum(0)
    trace, total = diagonal.sum(0), rows.sum(0)
    shape = (nodes, nodes, width)

    def onto_diagonal(entries: Tensor) -> Tensor:
        return torch.diag_embed(entries.expand(nodes, width).mT).movedim(0, -1)

    operations = (
        onto_diagonal(diagonal),
        diagonal[:, None].expand(shape),
        diagonal[None].expand(shape),
        onto_diagonal(trace),
        trace.expand(shape),
        onto_diagonal(rows),
        x,
        rows[:, None].expand(shape),
        x.transpose(0, 1),
        onto_diagonal(columns),
        columns[:, None].expand(shape),
        rows[None].expand(shape),
        columns[None].expand(shape),
        onto_diagonal(total),
        total.expand(shape),
    )
    return torch.einsum("pijd,pde->ije", torch.stack(operations), diagrams(weight))
