"""Bag-of-words features times weights, forward and backward: the transpose kept with the matrix, and rebuilt each time.

A matrix of pubmed's size with random entries. The plain product of torch, ours of the same tensor in every turn, and
the two layers that read such features, of the same tensor and of a fresh one, take turns in one process. Time is the
thread's own.

    python -m benchmarks.sparse_gradient [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.rounds import Ratio, interleaved, report
from holonomy import Lorentz
from holonomy.layers import ExpMapHTC, Propagation
from holonomy.layers.kernels.sparse import as_csr, multiply

ROWS, COLUMNS, ENTRIES, WIDTH = 19_717, 500, 988_031, 32


def bag_of_words() -> Tensor:
    draw = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randint(most, (ENTRIES,), generator=draw) for most in (ROWS, COLUMNS)])
    return as_csr(torch.sparse_coo_tensor(indices, torch.rand(ENTRIES, generator=draw), (ROWS, COLUMNS)))


def contenders() -> dict[str, Callable[[], None]]:
    features = bag_of_words()
    weight = torch.randn(COLUMNS, WIDTH, requires_grad=True)
    gradient = torch.randn(ROWS, WIDTH)
    first = ExpMapHTC(COLUMNS, WIDTH, Lorentz(-1.0))
    graph = Propagation(COLUMNS, WIDTH, 3)
    edges = torch.randint(ROWS, (2, 88_648), generator=torch.Generator().manual_seed(1))
    return {
        "product, torch": lambda: torch.sparse.mm(features, weight).backward(gradient),
        "product, kept": lambda: multiply(as_csr(features), weight).backward(gradient),
        "ExpMapHTC, rebuilt": lambda: first(features.detach()).sum().backward(),
        "ExpMapHTC, kept": lambda: first(features).sum().backward(),
        "Propagation, rebuilt": lambda: graph(features.detach(), edges).sum().backward(),
        "Propagation, kept": lambda: graph(features, edges).sum().backward(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write the ratios there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    taken = interleaved(contenders(), options.rounds)
    ratios = [
        Ratio("product, torch", "product, kept"),
        Ratio("ExpMapHTC, rebuilt", "ExpMapHTC, kept"),
        Ratio("Propagation, rebuilt", "Propagation, kept"),
    ]
    report({"features": f"{ROWS} x {COLUMNS}, {ENTRIES} entries"}, taken, ratios, options.json)


if __name__ == "__main__":
    main()
