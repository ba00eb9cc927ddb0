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
    """Every partition of m positions, ``bell(m)`` restricted growth strings in lexicographic order.

    An m that is no integer is a TypeError, a negative one a ValueError.

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
    """Count the partitions of m positions: the Bell number. A negative m is a ValueError.

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


# Arrays: a tensor that is kept would be on the default device of whoever asked first, which may be "meta".
@lru_cache(maxsize=32)
def _lattice(m: int) -> tuple[Any, Any]:
    """Which partitions refine which, and the inverse of that, whose entries are integers."""
    strings = np.array(set_partitions(m))
    together = (strings[:, :, None] == strings[:, None, :]).reshape(len(strings), -1).astype(np.int64)
    # A partition refines another that has no two positions apart which it has together.
    zeta = (together @ (1 - together).T == 0).astype(np.int64)
    return zeta, np.linalg.inv(zeta).round().astype(np.int64)


def zeta_matrix(m: int) -> Int64[Tensor, "bell bell"]:
    r"""The matrix Z of the refinement order of m positions: :math:`D^\pi = \sum_\sigma Z_{\pi\sigma} B^\sigma`.

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

    >>> moebius_matrix(2)
    tensor([[ 1,  0],
            [-1,  1]])
    """
    return torch.from_numpy(_lattice(checks.nonnegative_int("m", m))[1].copy())
