"""Bag-of-words features times weights: the transpose kept with the matrix, and rebuilt each time."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.case import Case, Contenders, Line, Step
from holonomy import Lorentz
from holonomy.layers import ExpMapHTC, Propagation
from holonomy.ops.csr import as_csr, multiply

__all__ = ["CASES"]

COLUMNS, ENTRIES_A_ROW, WIDTH = 500, 50, 32


def bag_of_words(rows: int, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    entries = ENTRIES_A_ROW * rows
    places = torch.stack([torch.randint(most, (entries,), generator=draw) for most in (rows, COLUMNS)])
    values = torch.rand(entries, generator=draw)
    return as_csr(torch.sparse_coo_tensor(places, values, (rows, COLUMNS), check_invariants=True).to(device))


def contenders(rows: int, device: torch.device) -> Contenders:
    """Torch's product, ours of the same tensor in every turn, and two layers, of the same tensor and of a fresh one."""
    torch.manual_seed(0)
    features = bag_of_words(rows, device)
    weight = torch.randn(COLUMNS, WIDTH, device=device, requires_grad=True)
    gradient = torch.randn(rows, WIDTH, device=device)
    first = ExpMapHTC(COLUMNS, WIDTH, Lorentz(-1.0, device=device), device=device)
    graph = Propagation(COLUMNS, WIDTH, 3, device=device)
    edges = torch.randint(rows, (2, 4 * rows), generator=torch.Generator().manual_seed(1)).to(device)

    def product(function) -> Step:
        return lambda: list(torch.autograd.grad(function(), [weight], gradient))

    def layer(module: torch.nn.Module, function) -> Step:
        return lambda: list(torch.autograd.grad(function().sum(), [p for p in module.parameters() if p.requires_grad]))

    return {
        "product, torch": product(lambda: torch.sparse.mm(features, weight)),
        "product, kept": product(lambda: multiply(as_csr(features), weight)),
        "ExpMapHTC, rebuilt": layer(first, lambda: first(features.detach())),
        "ExpMapHTC, kept": layer(first, lambda: first(features)),
        "Propagation, rebuilt": layer(graph, lambda: graph(features.detach(), edges)),
        "Propagation, kept": layer(graph, lambda: graph(features, edges)),
    }


CASES = (
    Case(
        name="sparse-gradient",
        title=f"gradients by weights of bag-of-words features, {ENTRIES_A_ROW} entries a row: pubmed",
        unit="rows",
        sizes=(19_717,),
        contenders=contenders,
        lines=tuple(
            Line(f"{name}, {slow}", f"{name}, kept")
            for name, slow in (("product", "torch"), ("ExpMapHTC", "rebuilt"), ("Propagation", "rebuilt"))
        ),
        equal=(
            ("product, torch", "product, kept"),
            ("ExpMapHTC, rebuilt", "ExpMapHTC, kept"),
            ("Propagation, rebuilt", "Propagation, kept"),
        ),
    ),
)
