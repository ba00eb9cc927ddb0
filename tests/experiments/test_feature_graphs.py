"""Graphs of nearest neighbours: who is joined, what the rows are, and that a model can be asked about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import table
from experiments.data import datasets, feature_graphs
from experiments.data.feature_graphs import neighbour_graph, topics


@pytest.mark.parametrize("k", [1, 3])
def test_two_rows_are_joined_where_one_is_among_the_nearest_of_the_other(k: int) -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = set()
    for i in range(9):
        others = sorted((j for j in range(9) if j != i), key=lambda j, i=i: float((x[i] - x[j]).norm()))
        for j in others[:k]:
            wanted |= {(i, j), (j, i)}
    found = [tuple(pair) for pair in neighbour_graph(x, k).T.tolist()]
    assert len(found) == len(set(found))
    assert set(found) == wanted


def test_equal_rows_are_joined_and_no_row_to_itself() -> None:
    edges = neighbour_graph(torch.zeros(4, 2), 3)
    assert edges.shape == (2, 12)
    assert (edges[0] != edges[1]).all()
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"k must lie between 1 and the 3 other rows, got {k}"):
            neighbour_graph(torch.zeros(4, 2), k)


def test_topics_are_weighted_counts_of_which_a_subject_says_less_than_a_group() -> None:
    x, y = topics(1200, vocabulary=200)
    assert x.shape == (1200, 200)
    assert (x >= 0).all()
    torch.testing.assert_close(x.norm(dim=1), torch.ones(1200))
    means = torch.stack([x[y == group].mean(dim=0) for group in range(10)])
    alike = torch.nn.functional.cosine_similarity(means[:, None], means[None], dim=2)
    subject = torch.arange(10) % 3
    same, own = subject[:, None] == subject, torch.eye(10, dtype=torch.bool)
    assert alike[same & ~own].mean() > alike[~same].mean() + 0.02
    assert alike[~own].max() < 0.99
    again = topics(1200, vocabulary=200)
    assert torch.equal(again[0], x)
    assert torch.equal(again[1], y)


@pytest.mark.parametrize(("name", "sizes"), [("digits", (1797, 64)), ("topics", (2000, 500))])
def test_more_neighbours_are_more_edges_and_a_seed_is_a_split(name: str, sizes: tuple[int, int]) -> None:
    few, many, other = (datasets.load(name, protocol=p, seed=s) for p, s in (("k5", 0), ("k20", 0), ("k5", 1)))
    assert tuple(few.x.shape) == sizes
    assert few.num_classes == 10
    assert 5 * sizes[0] <= few.edge_index.shape[1] <= 10 * sizes[0]
    pairs = [{tuple(pair) for pair in data.edge_index.T.tolist()} for data in (few, many)]
    assert pairs[0] < pairs[1]
    assert sorted(torch.cat([few.train, few.val, few.test]).tolist()) == list(range(sizes[0]))
    assert not torch.equal(few.train, other.train)


def test_a_table_of_a_graph_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_graphs, "topics", lambda: topics(90, vocabulary=20))
    feature_graphs.joined.cache_clear()
    words = ["--dataset", "topics", "--protocol", "k5", "--models", "hypformer", "gat", "sgformer", "--seeds", "1"]
    small = ["--hidden", "8", "--feedforward", "8", "--graph-hidden", "8", "--epochs", "2", "--grid", "lr=0.01"]
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path), "--quiet", "--ablations", "no-graph"]
    assert table.main([*words, *small, *folders]) == 0
    feature_graphs.joined.cache_clear()
    content = json.loads((tmp_path / "topics-k5.json").read_text())
    assert set(content["models"]) == {"hypformer", "gat", "sgformer"}
    assert set(content["ablations"]) == {"no-graph"}
