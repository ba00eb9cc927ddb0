"""The sum over neighbours of a GCN: edges sorted once or in every pass, and torch's own product of sorted edges."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.case import Case, Contenders, Line, Step
from holonomy.ops.csr import csr as sorted_csr
from holonomy.ops.csr import row_pointer
from holonomy.ops.propagation import normalised_edges, propagation
from holonomy.structures import Graph

__all__ = ["CASES"]

DEGREE, WIDTH = 10, 64
SIZES = 10_000, 100_000


def csr(row: Tensor, column: Tensor, weight: Tensor, nodes: int) -> Tensor:
    order = row.argsort(stable=True)
    return sorted_csr(row_pointer(row, nodes), column[order], weight[order], (nodes, nodes))


def contenders(nodes: int, device: torch.device) -> Contenders:
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(nodes, (2, DEGREE * nodes), generator=draw).to(device)
    x, gradient = torch.randn(2, nodes, WIDTH, generator=draw).to(device)
    x.requires_grad_()
    source, target, weight = normalised_edges(edges, nodes, x.dtype)
    there, back = csr(target, source, weight, nodes), csr(source, target, weight, nodes)
    graph = Graph(edges, nodes)

    def ours(held) -> Step:
        return lambda: list(torch.autograd.grad(propagation(held(), nodes, x.dtype)(x), [x], gradient))

    def torch_alone() -> list[Tensor]:
        torch.sparse.mm(there, x.detach())
        return [torch.sparse.mm(back, gradient)]

    return {
        "torch, sorted": torch_alone,
        "Graph": ours(lambda: graph),
        "edge_index, kept": ours(lambda: edges),
        "edge_index, new": ours(edges.clone),
    }


CASES = (
    Case(
        name="propagation",
        title=f"one propagation, {DEGREE} edges a node, {WIDTH} channels, float32, forward and backward",
        unit="nodes",
        sizes=SIZES,
        contenders=contenders,
        lines=(
            Line("Graph", "torch, sorted", dict.fromkeys(SIZES, "<= 1.1")),
            Line("edge_index, kept", "torch, sorted", dict.fromkeys(SIZES, "<= 1.1")),
            Line("edge_index, new", "torch, sorted"),
        ),
        equal=(("torch, sorted", "Graph"), ("Graph", "edge_index, kept"), ("Graph", "edge_index, new")),
    ),
)
