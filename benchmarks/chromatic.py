"""Chromatic attention against its arithmetic written out; encodings against PyTorch Geometric's; padding."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import AddRandomWalkPE

from benchmarks.case import Case, Contenders, Figure, Line, stepped
from benchmarks.plain import chromatic as plain
from holonomy.layers import random_walk_node_encoding
from holonomy.ops.chromatic_attention import chromatic_attention
from holonomy.structures import batches_by_size

__all__ = ["CASES"]

NODES, CHANNELS, HEADS = 32, 64, 4
Edges = Literal["biases", "features"]


def attention(graphs: int, device: torch.device, *, edges: Edges) -> Contenders:
    """Edges as biases and values, or as features under two linear maps, which is what a layer has."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        # Small: the clamp of the usual arithmetic is not to matter.
        return (0.3 * torch.randn(*shape, generator=draw)).to(device).requires_grad_()

    of_nodes = [random(graphs, NODES, CHANNELS) for _ in range(3)]
    first = random(graphs, NODES, NODES, CHANNELS)
    maps = {} if edges == "biases" else {f"{name}_map": random(CHANNELS, CHANNELS) for name in ("bias", "value")}
    of_edges = [first, random(*first.shape)] if edges == "biases" else [first, first]
    leaves = list({id(x): x for x in (*of_nodes, *of_edges, *maps.values())}.values())
    mask = torch.ones(graphs, NODES, dtype=torch.bool, device=device)

    def of(function, mask: Tensor | None):
        return stepped(lambda: function(*of_nodes, *of_edges, mask, heads=HEADS, **maps), leaves)

    return {
        "as usual": of(plain.usual, mask),
        "lean": of(plain.lean, mask),
        "ours": of(chromatic_attention, None),
    }


def encodings(nodes: int, device: torch.device) -> Contenders:
    """Walks back to each node, p = 16, on a random graph with as many edges a node as Cora."""
    draw = torch.Generator().manual_seed(0)
    one_way = torch.randint(nodes, (2, 2 * nodes), generator=draw)
    one_way = one_way[:, one_way[0] != one_way[1]]
    edge_index = torch.cat([one_way, one_way.flip(0)], 1).unique(dim=1).to(device)
    data = Data(edge_index=edge_index, num_nodes=nodes)
    return {
        "PyTorch Geometric": lambda: [AddRandomWalkPE(16)(data.clone()).random_walk_pe],
        "ours": lambda: [random_walk_node_encoding(edge_index, nodes, 16)],
    }


def padding(graphs: int, device: torch.device, *, by_size: bool) -> float:
    """Work with padding over work without, on ten thousand sizes distributed like molecules."""
    del device
    draw = torch.Generator().manual_seed(0)
    sizes = (23.2 + 4.5 * torch.randn(10_000, generator=draw)).round().clamp(9, 37).long()
    random = list(torch.randperm(10_000, generator=draw).split(graphs))
    batches = batches_by_size(sizes, graphs) if by_size else random
    return sum(len(batch) * int(sizes[batch].max()) ** 2 for batch in batches) / int(sizes.square().sum())


def case(edges: Edges, title: str, *more: Figure) -> Case:
    return Case(
        name=f"chromatic-{edges}",
        title=f"chromatic attention, graphs of {NODES} nodes, {CHANNELS} channels, {title}, forward and backward",
        unit="graphs",
        sizes=(128,),
        contenders=partial(attention, edges=edges),
        lines=(
            Line("ours", "as usual", {128: "<= 0.40"}),
            Line("ours", "lean"),
            Line("ours", "as usual", {128: "<= 0.25"}, of="workspace"),
            Line("ours", "lean", {128: "<= 0.25"}, of="workspace"),
            *more,
        ),
        equal=(("as usual", "lean", "ours"),),
        small=2,
    )


CASES = (
    case(
        "biases",
        "edges as biases and values",
        Figure("padding over exact, batches by size", partial(padding, by_size=True), {128: "<= 1.05"}),
        Figure("padding over exact, random batches", partial(padding, by_size=False)),
    ),
    case("features", "edges as features"),
    Case(
        name="random-walks",
        title="random walks back to each node, 16 steps, a graph of Cora's density",
        unit="nodes",
        sizes=(2708,),
        contenders=encodings,
        lines=(Line("PyTorch Geometric", "ours", {2708: ">= 10"}),),
        equal=(("PyTorch Geometric", "ours"),),
    ),
)
