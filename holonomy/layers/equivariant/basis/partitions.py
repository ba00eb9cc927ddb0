r"""Set partitions: the equality patterns of multi-indices, and the lattice that relates the two bases.

A partition of positions 0 .. m-1 is written as its restricted growth string: the block of each position, blocks
numbered in the order in which they appear. ``(0, 1, 0)`` says "the first and the third index are equal, the second is
another". Two bases of the equivariant maps belong to a partition :math:`\pi` of the :math:`k + l` positions of
:math:`(\mathbf i, \mathbf j)`:

* the orthogonal one of the papers, :math:`B^\pi_{\mathbf i\mathbf j} = 1` where exactly the indices of one block are
  equal (HOT eq. 2),
* the diagram one, :math:`D^\pi_{\mathbf i\mathbf j} = 1` where at least those are, which is what sums compute.

With :math:`Z_{\pi\sigma} = 1` where :math:`\pi` refines :math:`\sigma`, :math:`D = Z B` and :math:`B = Z^{-1} D`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Int, Int64

Partition = tuple[int, ...]  #: a restricted growth string


def set_partitions(m: int) -> tuple[Partition, ...]:
    """Every partition of m positions, as restricted growth strings in lexicographic order.

    Args:
        m: number of positions, at least 0.

    Returns:
        ``bell(m)`` strings.

    Raises:
        TypeError: if m is no integer.
        ValueError: if m is negative.

    >>> set_partitions(3)
    ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2))
    """
    return _set_partitions(checks.nonnegative_int("m", m))


@lru_cache(maxsize=32)
def _set_partitions(m: int) -> tuple[Partition, ...]:
    strings: list[Partition] = [()]
    for _ in range(m):
        strings = [(*string, block) for string in strings for block in range(max(string, default=-1) + 2)]
    return tuple(strings)


def bell(m: int) -> int:
    """Count the partitions of m positions: the Bell number.

    Args:
        m: number of positions, at least 0.

    Returns:
        1, 1, 2, 5, 15, 52, 203, ...

    Raises:
        ValueError: if m is negative.

    >>> [bell(m) for m in range(7)]
    [1, 1, 2, 5, 15, 52, 203]
    """
    checks.nonnegative_int("m", m)
    numbers = [1]
    for size in range(m):
        # B_{m+1} = sum_k C(m, k) B_k, by the k elements outside the block of the last one.
        numbers.append(sum(math.comb(size, chosen) * numbers[chosen] for chosen in range(size + 1)))
    return numbers[m]


def canonical(labels: tuple[int, ...]) -> Partition:
    """Renumber labels in the order in which they appear."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(label, len(numbers)) for label in labels)


def pattern_codes(tuples: Int[Tensor, "tuples length"]) -> Int[Tensor, " tuples"]:
    """A number for the equality pattern of each multi-index, which increases in the order of :func:`set_partitions`."""
    # One digit a pair of positions, 1 where they differ; the first position at which two strings differ is decisive.
    second, first = torch.tril_indices(tuples.shape[1], tuples.shape[1], -1, device=tuples.device)
    digits = 2 ** torch.arange(len(first) - 1, -1, -1, device=tuples.device)
    return ((tuples[:, first] != tuples[:, second]) * digits).sum(1)


def equality_classes(tuples: Int[Tensor, "tuples length"]) -> Int[Tensor, " tuples"]:
    """The equality pattern of each multi-index, by its number among the set partitions."""
    every = torch.tensor(set_partitions(tuples.shape[1]), device=tuples.device)
    return torch.searchsorted(pattern_codes(every), pattern_codes(tuples))


def refines(fine: Partition, coarse: Partition) -> bool:
    """Whether every block of the first lies in a block of the second."""
    return len(set(zip(fine, coarse, strict=True))) == len(set(fine))


# Arrays: a tensor that is kept would be on the default device of whoever asked first, which may be "meta".
@lru_cache(maxsize=32)
def _lattice(m: int) -> tuple[Any, Any]:
    partitions = set_partitions(m)
    zeta = np.zeros((len(partitions), len(partitions)), dtype=np.int64)
    moebius = np.zeros_like(zeta)
    for row, fine in enumerate(partitions):
        for column, coarse in enumerate(partitions):
            if refines(fine, coarse):
                zeta[row, column] = 1
                # mu(fine, coarse) = prod over coarse blocks of (-1)^(b - 1) (b - 1)!, b the fine blocks within.
                merged = [big for _, big in set(zip(fine, coarse, strict=True))]
                sizes = [merged.count(big) for big in set(coarse)]
                moebius[row, column] = math.prod((-1) ** (size - 1) * math.factorial(size - 1) for size in sizes)
    return zeta, moebius


def zeta_matrix(m: int) -> Int64[Tensor, "bell bell"]:
    r"""The matrix Z of the refinement order: :math:`D^\pi = \sum_\sigma Z_{\pi\sigma} B^\sigma`.

    Args:
        m: number of positions.

    Returns:
        Ones where the row's partition refines the column's, in the order of :func:`set_partitions`.

    >>> zeta_matrix(2)
    tensor([[1, 0],
            [1, 1]])
    """
    return torch.from_numpy(_lattice(checks.nonnegative_int("m", m))[0].copy())


def moebius_matrix(m: int) -> Int64[Tensor, "bell bell"]:
    r"""The inverse of :func:`zeta_matrix`: :math:`B^\pi = \sum_\sigma M_{\pi\sigma} D^\sigma`.

    Where :math:`\pi` refines :math:`\sigma`, M is the product over the blocks of :math:`\sigma` of
    :math:`(-1)^{b-1} (b-1)!`, b the number of blocks of :math:`\pi` inside.

    Args:
        m: number of positions.

    Returns:
        Integers, in the order of :func:`set_partitions`.

    >>> moebius_matrix(2)
    tensor([[ 1,  0],
            [-1,  1]])
    """
    return torch.from_numpy(_lattice(checks.nonnegative_int("m", m))[1].copy())
