"""Trees whose traits are inherited or acquired: what they promise, species by species."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.csgraph
import torch

from experiments.data.transfers import ACQUIRED, INHERITED, SOURCE, grown, hops, trees


@pytest.mark.parametrize("seed", range(3))
def test_every_trait_is_where_it_is_said_to_be(seed: int) -> None:
    size, sources, traits = 30, 5, 3
    drawn = trees(seed, 4, nodes=size, sources=sources, traits=traits)
    gene = drawn.x[:, 3 : 3 + sources].argmax(1)
    assert drawn.x.shape == (4 * size, 3 + sources + traits)
    assert torch.equal(drawn.x[:, :3].argmax(1), drawn.kind)
    for place in range(4 * size):
        mates = (drawn.batch == drawn.batch[place]) & (drawn.kind == SOURCE)
        beside = drawn.edge_index[1, drawn.edge_index[0] == place]
        near = beside[drawn.kind[beside] == SOURCE]
        if drawn.kind[place] == SOURCE:
            assert int((mates & (gene == gene[place])).sum()) == 1
            assert drawn.x[place, 3 + sources :].argmax() == drawn.y[place]
            continue
        # The answer does not stand in the question.
        assert drawn.x[place].sum() == 2
        origin = near if drawn.kind[place] == INHERITED else (mates & (gene == gene[place])).nonzero()[:, 0]
        assert drawn.y[origin].tolist() == [drawn.y[place]]
    assert {INHERITED, ACQUIRED} <= set(drawn.kind.tolist())


def test_trees_are_trees_and_stay_apart() -> None:
    drawn = trees(7, 3, nodes=20, sources=4)
    assert torch.equal(drawn.batch[drawn.edge_index[0]], drawn.batch[drawn.edge_index[1]])
    graph = scipy.sparse.csr_array((np.ones(drawn.edge_index.shape[1]), drawn.edge_index.numpy()), shape=(60, 60))
    assert scipy.sparse.csgraph.connected_components(graph)[0] == 3
    assert drawn.edge_index.shape[1] == 2 * 3 * 19


def test_hops_are_shortest_paths() -> None:
    parent = grown(np.random.default_rng(0), 25)
    graph = scipy.sparse.csr_array((np.ones(24), (parent[1:], np.arange(1, 25))), shape=(25, 25))
    wanted = scipy.sparse.csgraph.shortest_path(graph, directed=False)
    assert np.array_equal(hops(parent).numpy(), wanted)


def test_the_same_seed_gives_the_same_trees() -> None:
    first, again, other = trees(3, 2), trees(3, 2), trees(4, 2)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.y, other.y)
