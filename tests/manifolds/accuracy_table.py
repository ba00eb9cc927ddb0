"""The worst relative error of every manifold function and gradient: one line each, with where.

``python -m tests.manifolds.accuracy_table``; ``--dtype float64`` for the other dtype, ``--thin 1``
for the whole grid (minutes), ``--only dist`` for one function.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator

import torch

from tests.manifolds import accuracy


def every_error(kappa: float, dtype: torch.dtype, thin: int, only: str | None) -> Iterator[accuracy.Error]:
    for name in accuracy.OPERATIONS:
        if only in (None, name):
            yield from accuracy.errors(name, kappa, dtype, thin=thin)
    if only in (None, "cdist"):
        yield from accuracy.cdist_errors(kappa, dtype)
    if only in (None, "centroid") and dtype == torch.float32:
        yield from accuracy.centroid_errors(kappa, dtype)
    for name in ("from_poincare", "from_klein"):
        if only in (None, name):
            yield from accuracy.ball_errors(name, kappa, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--thin", type=int, default=11)
    parser.add_argument("--only")
    options = parser.parse_args()
    worst: dict[str, dict[float, accuracy.Error]] = defaultdict(dict)
    for kappa in accuracy.KAPPAS:
        dtype = getattr(torch, options.dtype)
        for error in every_error(kappa, dtype, options.thin, options.only):
            best = worst[error.quantity].get(kappa)
            if best is None or error.error > best.error:
                worst[error.quantity][kappa] = error
    lines = [f"{options.dtype}: worst relative error, and where"]
    for quantity, columns in worst.items():
        for kappa, error in columns.items():
            lines.append(f"{quantity:24} kappa={kappa:<6g} {error.error:8.1e}  {error.row}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
