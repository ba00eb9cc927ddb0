"""Numbers of nodes and graphs in small integers mean what they mean in int64: bytes were masks, products wrapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from holonomy import layers
from holonomy.structures import Hyperedges

pytestmark = pytest.mark.usefixtures("without_shape_checks")
PAIRS = torch.stack([torch.arange(30), torch.arange(30).roll(7)], 1)
EDGES = Hyperedges(PAIRS, torch.randn(30, 3), 30)
TO = torch.stack([torch.arange(29), torch.arange(1, 30)], 1)
X = torch.randn(5, 4)
BATCH = torch.tensor([0, 1, 2, 3, 4])
CYCLE = torch.stack([torch.arange(5), torch.arange(5).roll(1)])


def perturbed(batch: Tensor) -> Tensor:
    return layers.perturb_identifiers(torch.ones(5, 4), batch=batch, generator=torch.Generator().manual_seed(0))


def tokens(indices: Tensor) -> Tensor:
    torch.manual_seed(0)
    return layers.HyperedgeTokenizer(2, 3, 8)(indices, EDGES.values, 30).values


def mapped(to: Tensor) -> Tensor:
    torch.manual_seed(0)
    return layers.EquivariantLinear(2, 2, 3, 4)(EDGES, to=to).values


def paths(neighbours: Tensor) -> Tensor:
    return layers.simplicial_path_attention([X, X, X], [X, X], neighbours)


def products(categories: Tensor) -> Tensor:
    return layers.category_product(categories, categories > 1)


def of_pairs(categories: Tensor) -> Tensor:
    torch.manual_seed(0)
    return layers.PairEncoder(8, edge_types=200)(categories)


def of_distances(distances: Tensor) -> Tensor:
    torch.manual_seed(0)
    return layers.ShortestPathEncoder(100, 8)(distances)


def convolved(edge_index: Tensor) -> Tensor:
    torch.manual_seed(0)
    return layers.GCN(4, 4, 4)(X, edge_index, torch.arange(5.0))


@pytest.mark.parametrize("small", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (perturbed, BATCH),
        (tokens, PAIRS),
        (mapped, TO),
        (paths, CYCLE.mT),
        (convolved, CYCLE),
        (products, torch.tensor([0, 1, 100])),
        (of_pairs, torch.tensor([[[1, 100], [100, 1]]])),
        (of_distances, torch.tensor([[0, 99], [101, 0]])),
    ],
)
def test_small_integers_are_numbers(function: Callable[[Tensor], Tensor], numbers: Tensor, small: torch.dtype) -> None:
    torch.testing.assert_close(function(numbers.to(small)), function(numbers), rtol=0.0, atol=0.0)


def test_pairs_of_many_nodes_in_int32_do_not_wrap() -> None:
    nodes = 70_000  # whose square is more than int32 holds
    ring = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)], 1)
    edges, layer = Hyperedges(ring, torch.randn(nodes, 1), nodes), layers.EquivariantLinear(2, 2, 1, 1)
    torch.testing.assert_close(layer(edges, to=ring.int()).values, layer(edges, to=ring).values)
    asked = edges.at(ring.int(), edges.values)
    torch.testing.assert_close(layer(asked, to=ring).values, layer(edges, to=ring).values)
