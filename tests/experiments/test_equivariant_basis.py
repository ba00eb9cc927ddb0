"""The basis tensors against loops, the graphs, and the whole example at toy size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import equivariant_basis as example
from experiments.equivariant_basis import HEADS, ROWS, Settings, barabasi_albert, graph_of, l2, load, main, targets
from holonomy.layers import set_partitions

TOY = Settings(hidden=16, head_features=8, least=4, most=5, graphs=8, tests=2, batch=4, epochs=1)
QUICK = ["--quiet", "--threads", "1", "--seeds", "1", "--hidden", "16", "--head-features", "8", "--least", "4"]
QUICK += ["--most", "5", "--graphs", "8", "--tests", "2", "--batch", "4"]


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (12, 2), (12, 3), (200, 3)])
def test_every_new_node_joins_k_earlier_ones(n: int, k: int) -> None:
    edges = barabasi_albert(n, k, np.random.default_rng(0))
    assert edges.shape == (2, 2 * k * (n - k))
    pairs = {tuple(pair) for pair in edges.T.tolist()}
    assert len(pairs) == edges.shape[1]
    assert pairs == {(v, u) for u, v in pairs}
    earlier = [sum(1 for u, v in pairs if u == new and v < new) for new in range(n)]
    assert earlier == [0] * k + [k] * (n - k)


def test_attachment_is_preferential() -> None:
    """In a graph of 400 nodes the old ones have far more neighbours than the young ones."""
    degree = torch.bincount(barabasi_albert(400, 2, np.random.default_rng(1))[0])
    assert degree[:20].float().mean() > 4 * degree[-200:].float().mean()


@pytest.mark.parametrize("dense", [True, False])
def test_targets_against_a_loop(dense: bool) -> None:
    rng = np.random.default_rng(2)
    graphs = [graph_of(barabasi_albert(n, 2, rng), n, dense=dense, dim=4) for n in (5, 4)]
    found = targets(graphs)
    for graph, one in zip(graphs, found, strict=True):
        tokens = [(v, v) for v in range(graph.nodes)] + [tuple(pair) for pair in graph.pairs.T.tolist()]
        if dense:
            assert sorted(tokens) == [(u, v) for u in range(graph.nodes) for v in range(graph.nodes)]
        for head, pattern in enumerate(set_partitions(4)):
            for i, first in enumerate(tokens):
                hits = [
                    j
                    for j, second in enumerate(tokens)
                    if tuple(sorted(set(first + second), key=(first + second).index).index(v) for v in first + second)
                    == pattern
                ]
                row = torch.zeros(one.shape[-1])
                if hits:
                    row[[1 + j for j in hits]] = 1 / len(hits)
                else:
                    row[0] = 1.0
                torch.testing.assert_close(one[head, i], row)
        assert not one[:, len(tokens) :].any()


@pytest.mark.parametrize("model", list(ROWS))
def test_l2_is_zero_only_for_the_targets(model: str) -> None:
    """A perfect network has L2 zero, padding included; each model has a finite one, with gradients."""
    data = load("sparse", None, TOY, 0)
    wanted = targets(data.test)
    null = torch.zeros(*wanted.shape[:2], 1, wanted.shape[-1])
    assert l2(lambda _: torch.cat([null, wanted], 2), data.test).item() == 0
    network = example.build(model, TOY, data)
    value = l2(network, data.test)
    assert 0 < value.item() < 2 * wanted.shape[2]
    value.backward()
    used = [p for name, p in network.named_parameters() if not name.startswith(("attention.value", "attention.out"))]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in used)
    assert network(data.test).shape == (2, HEADS, wanted.shape[-1], wanted.shape[-1])


def test_identifiers_and_types_are_what_makes_it_learn() -> None:
    """A few seconds of training: with both, L2 falls far below what types alone reach at best."""
    results = {}
    for model in ("types", "lap-types"):
        torch.manual_seed(0)
        data = load("sparse", None, TOY, 0)
        network = example.build(model, TOY, data).train()
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            l2(network, data.train).backward()
            optimizer.step()
        results[model] = example.test(network.eval(), data)["train L2"]
    assert results["lap-types"] < 0.5 * results["types"]


@pytest.mark.parametrize("dataset", ["sparse", "dense"])
def test_the_command_line_leaves_numbers_and_pictures(dataset: str, tmp_path: Path) -> None:
    table = tmp_path / "kept" / "table.json"
    words = [
        *QUICK,
        "--dataset",
        dataset,
        "--models",
        "none",
        "random-first",
        "orf-types",
        "lap-types",
        "--epochs",
        "2",
    ]
    assert main([*words, "--out", str(tmp_path / "run"), "--json", str(table)]) == 0
    content = json.loads(table.read_text())
    assert list(content["models"]) == ["none", "random-first", "orf-types", "lap-types"]
    for row in content["models"].values():
        assert row["summary"]["test L2"]["mean"] == pytest.approx(-row["val"][0], rel=0.5)
    for picture in ("table.png", "training.png", "attention.png"):
        assert (tmp_path / "run" / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "2"], "--layers and --heads must be 1 and 15, got 2 and 15"),
        (["--heads", "4"], "--layers and --heads must be 1 and 15, got 1 and 4"),
        (["--least", "3"], "--least must lie in [4, --most = 5], got 3"),
        (["--data", "somewhere"], "--data must be left out"),
    ],
)
def test_what_cannot_be_done_is_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *words]) == 2
    assert message in capsys.readouterr().err
