"""Quadratic forms of a vector by loops over pairs of its entries."""

from __future__ import annotations

import math
from collections.abc import Sequence


def squares(d: Sequence[float]) -> list[float]:
    """Products of entries i <= j in lexicographic order, those of different entries times the root of two."""
    return [d[i] * d[j] * (1.0 if i == j else math.sqrt(2)) for i in range(len(d)) for j in range(i, len(d))]


def value(matrix: Sequence[Sequence[float]], d: Sequence[float]) -> float:
    """d'Hd."""
    return math.fsum(matrix[i][j] * d[i] * d[j] for i in range(len(d)) for j in range(len(d)))
