"""Equivariant layers: against the forms that are written down, and the cost of a hyperedge as graphs grow."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.case import Case, Contenders, Growth, Line, stepped
from benchmarks.plain.equivariant import basis_tensors, ign_layer, over_basis
from holonomy.layers import EquivariantLinear, HigherOrderAttention
from holonomy.structures import Hyperedges

__all__ = ["CASES"]

FEATURES, HEADS, RANDOM = 32, 4, 16
# Basis tensors of n^4 entries each are a GiB at 64 nodes.
MOST_NODES_OVER_BASIS = 64


def linear(nodes: int, device: torch.device, *, order: int, width: int) -> Contenders:
    """The layer, the basis of HOT eq. 2, and for matrices the operations of an IGN layer; without biases."""
    torch.manual_seed(0)
    layer = EquivariantLinear(order, order, width, width, bias=False, device=device)
    x = torch.randn(*[nodes] * order, width).to(device).requires_grad_()
    leaves = (x, layer.weight)
    found = {"ours": stepped(lambda: layer(x), leaves)}
    if order == 2:
        found["IGN layer"] = stepped(lambda: ign_layer(x, layer.weight), leaves)
    if nodes <= MOST_NODES_OVER_BASIS:
        basis = basis_tensors(2 * order, nodes).to(device)
        found["over the basis"] = stepped(lambda: over_basis(x, layer.weight, basis), leaves)
    return found


def random_graph(edges: int, features: int, device: torch.device) -> Hyperedges:
    """Loops and three edges a node, about as many hyperedges as asked for."""
    nodes = edges // 4
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randint(nodes, (edges - nodes, 2), generator=draw)
    loops = torch.arange(nodes)[:, None].expand(nodes, 2)
    indices = torch.cat([loops, pairs[pairs[:, 0] != pairs[:, 1]]]).unique(dim=0)
    values = torch.randn(indices.shape[0], features, generator=draw)
    return Hyperedges(indices.to(device), values.to(device), nodes)


def attention(edges: int, device: torch.device, *, backward: bool) -> Contenders:
    """All 15 classes of 2 -> 2; what is planned for the hyperedges is planned in the warm-up."""
    graph = random_graph(edges, FEATURES, device)
    values = graph.values.requires_grad_(backward)
    found: Contenders = {}
    # Exact sums of a million hyperedges and their gradients take minutes a turn.
    for sums in ("decoupled", "coupled") if edges <= 100_000 or not backward else ("decoupled",):
        torch.manual_seed(0)
        layer = HigherOrderAttention(
            2, 2, FEATURES, HEADS, kernel="performer", sums=sums, random_features=RANDOM, device=device
        )
        layer.requires_grad_(backward)
        leaves = (values, *layer.parameters()) if backward else ()
        found[sums] = stepped(lambda layer=layer: layer(graph).values, leaves)
    return found


def grows(of: str, note: str = "") -> Growth:
    return Growth(of, "<= 1.15", {100_000: "<= 2"}, microseconds_per_unit="<= 10", note=note)


# The coupled sums are exact: what keys and queries share is multiplied out, in float64 where it is then taken away.
COUPLED = "decoupled sums are what the released code computes; exact ones cost float64 products at each shared node"

CASES = (
    Case(
        name="equivariant-matrices",
        title="EquivariantLinear 2 -> 2, 64 channels, forward and backward",
        unit="nodes",
        sizes=(16, 32, 64, 256),
        contenders=partial(linear, order=2, width=64),
        lines=(
            Line(
                "IGN layer",
                "ours",
                {64: ">= 12"},
                note="this IGN layer shares its sums; at 64 nodes it takes 19 of our two products alone, ours 3",
            ),
            Line("over the basis", "ours", {64: ">= 169"}),
            Line("ours", "IGN layer", {256: "<= 0.15"}, of="memory"),
        ),
        equal=(("over the basis", "IGN layer", "ours"),),
        small=16,
    ),
    Case(
        name="equivariant-triples",
        title=f"EquivariantLinear 3 -> 3, all 203 classes, {FEATURES} channels, forward and backward",
        unit="nodes",
        sizes=(4, 8),
        contenders=partial(linear, order=3, width=FEATURES),
        lines=(
            Line(
                "over the basis",
                "ours",
                {8: ">= 100"},
                note="the basis is one large product; of our time, a third is products, the rest hundreds of calls",
            ),
        ),
        equal=(("over the basis", "ours"),),
        small=4,
    ),
    Case(
        name="sparse-attention-forward",
        title=f"HigherOrderAttention 2 -> 2 by random features, 15 classes, {FEATURES} channels, forward",
        unit="hyperedges",
        sizes=(10_000, 100_000, 1_000_000),
        contenders=partial(attention, backward=False),
        lines=(grows("decoupled"), grows("coupled", COUPLED)),
    ),
    Case(
        name="sparse-attention",
        title=f"HigherOrderAttention 2 -> 2 by random features, 15 classes, {FEATURES} channels, forward and backward",
        unit="hyperedges",
        sizes=(10_000, 100_000, 1_000_000),
        contenders=partial(attention, backward=True),
        lines=(
            grows("decoupled", "products, gathers and scatter-adds alone take most of this time"),
            grows("coupled", COUPLED),
        ),
    ),
)
