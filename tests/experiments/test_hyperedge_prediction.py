"""Hyperedges: negatives are negatives, nothing held out is in the features, every model answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import hyperedge_prediction
from experiments.engine.options import RefusedError
from experiments.hyperedge_prediction import (
    MODELS,
    Settings,
    among,
    build,
    corrupted,
    generated,
    keys,
    load,
    main,
    prepare,
    triples_of,
    whole,
)

REAL = Path(__file__).parents[3] / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real data are not beside the repository")
WORDS = ["--hidden", "8", "--heads", "2", "--epochs", "1", "--seeds", "1", "--quiet"]


def rows(triples: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(triple) for triple in triples.tolist()}


def test_negatives_are_unknown_of_the_same_types_and_near_their_positives() -> None:
    train, _, types = generated()
    start = np.cumsum(types) - types
    positives, nodes = train + start, sum(types)
    known = np.sort(keys(positives, nodes))
    negatives = corrupted(positives, types, known, np.random.default_rng(0))
    assert negatives.shape == (5 * len(positives), 3)
    assert not np.isin(keys(negatives, nodes), known).any()
    assert (negatives >= start).all()
    assert (negatives < start + np.array(types)).all()
    changed = (negatives != np.repeat(positives, 5, axis=0)).sum(axis=1)
    # One place is kept in most of them: 6 of the 7 choices.
    assert set(changed.tolist()) == {1, 2, 3}
    assert (changed < 3).mean() > 0.7


def test_negatives_are_refused_where_every_triple_is_known() -> None:
    positives = np.stack(np.meshgrid([0, 1], [2, 3], [4]), axis=-1).reshape(-1, 3)
    known = np.sort(keys(np.concatenate([positives, positives]), 5))
    with pytest.raises(RefusedError, match="all of the 4 triples of these nodes are known"):
        corrupted(positives, (2, 2, 1), known, np.random.default_rng(0))
    left = corrupted(positives, (2, 2, 1), np.delete(known, [2, 3]), np.random.default_rng(0))
    assert {tuple(row) for row in left.tolist()} == {(0, 3, 4)}


def test_numbers_of_triples_give_them_back() -> None:
    triples = torch.cartesian_prod(*[torch.arange(5)] * 3)
    numbers = keys(triples, 5)
    assert numbers.tolist() == list(range(125))
    assert torch.equal(triples_of(numbers, 5), triples)
    assert np.array_equal(keys(triples.numpy(), 5), numbers.numpy())


def test_numbers_are_looked_up_among_sorted_ones_also_beyond_both_ends() -> None:
    numbers = np.array([[0, 3], [9, 12]])
    assert among(numbers, np.array([3, 4, 9])).tolist() == [[False, True], [True, False]]


def test_nothing_held_out_is_in_the_features_or_among_the_training_triples() -> None:
    data = load("tastes", None, Settings(), 0)
    train, val = rows(data.train), rows(data.val[data.val_truth])
    test = rows(data.test[data.test_truth])
    assert train
    assert not train & val
    assert not (train | val) & test
    wanted = torch.zeros(sum(data.types), sum(data.types))
    for triple in train:
        for a in triple:
            for b in triple:
                wanted[a, b] += a != b
    wanted /= wanted.sum(dim=1, keepdim=True).clamp(min=1)
    assert torch.allclose(data.features.to_dense(), wanted, atol=1e-6)
    for triples, truth, known in ((data.val, data.val_truth, train | val), (data.test, data.test_truth, train | test)):
        assert not rows(triples[~truth]) & (known | val)
        assert int((~truth).sum()) == 5 * int(truth.sum())


def test_test_rows_are_the_same_for_every_seed_and_validation_rows_are_not() -> None:
    first, second = (load("tastes", None, Settings(), seed) for seed in (0, 1))
    assert torch.equal(first.test, second.test)
    assert not torch.equal(first.val, second.val)
    assert len(first.train) + int(first.val_truth.sum()) == len(generated()[0])


def test_every_node_of_what_is_held_out_occurs_in_what_stays() -> None:
    # Half of the places are nodes of two triples only.
    rng = np.random.default_rng(0)
    triples = np.concatenate([rng.integers(0, 4, (40, 3)), np.repeat(np.arange(4, 24)[:, None], 3, axis=1)])
    triples[-20:, 2] = rng.integers(0, 4, 20)
    data = prepare(triples, triples[:2], (24, 24, 4), seed=1)
    stay, held = set(data.train.flatten().tolist()), set(data.val[data.val_truth].flatten().tolist())
    assert held <= stay
    assert int(data.val_truth.sum()) == 6


def test_without_a_triple_that_can_be_held_out_one_sentence_says_so() -> None:
    with pytest.raises(ValueError, match="no training triple can be held out"):
        prepare(np.array([[0, 0, 0], [1, 1, 1]]), np.array([[0, 1, 1]]), (2, 2, 2), seed=0)


def test_the_held_out_triples_come_back_to_learn_from_and_the_test_stays_as_it_is() -> None:
    data = load("tastes", None, Settings(), 0)
    every = whole(data)
    assert rows(every.train) == rows(data.train) | rows(data.val[data.val_truth])
    assert np.array_equal(every.known, np.sort(keys(every.train.numpy(), sum(data.types))))
    assert torch.equal(every.test, data.test)
    shared = every.features.to_dense()
    assert all(shared[a, b] > 0 for a, b, _ in rows(data.val[data.val_truth]))


def test_repeated_triples_count_once_in_training_and_as_often_as_they_occur_in_what_is_held_out() -> None:
    train = np.array([[0, 0, 0]] * 30 + [[1, 1, 1], [2, 2, 2], [1, 0, 2]])
    test = np.array([[0, 0, 0], [0, 0, 0], [2, 1, 0]])
    data = prepare(train, test, (3, 3, 3), seed=0)
    assert (0, 3, 6) in rows(data.train)
    assert len(data.train) == len(rows(data.train))
    held = data.val[data.val_truth]
    assert len(held) == 3
    assert (0, 3, 6) in rows(held)
    assert rows(data.train) | rows(held) == {(0, 3, 6), (1, 4, 7), (2, 5, 8), (1, 3, 8)}
    assert int(data.test_truth.sum()) == 3
    assert data.unseen[:3].tolist() == [False, False, True]
    # The negatives of a positive are counted with it.
    assert data.unseen[3:].tolist() == [False] * 10 + [True] * 5


@pytest.mark.parametrize(
    ("model", "given"), [*((model, {}) for model in MODELS), ("hot", {"sums": "coupled"}), ("hot", {"head": 0})]
)
def test_a_triple_is_scored_by_itself_wherever_it_stands(model: str, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    data = load("tastes", None, Settings(), 0)
    network = build(model, Settings(hidden=8, heads=2, **given), data).eval()
    triples = data.test[[3, 1, 3, 0]]
    with torch.no_grad():
        score = network(data.features, triples)
        assert score.shape == (4,)
        assert score[0] == score[2]
        assert torch.allclose(network(data.features, triples[1:2]), score[1:2], atol=1e-5)
        # The places of a triple are not alike.
        assert not torch.allclose(network(data.features, triples.flip(1)), score, atol=1e-5)


def test_the_command_line_answers_with_every_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "table.json").read_text())
    assert set(content["models"]) == set(MODELS)
    assert all(set(row["summary"]) == {"AUC", "AUPR"} for row in content["models"].values())
    assert "--data FOLDER" not in capsys.readouterr().err
    assert main([*WORDS, "--dataset", "gps", "--out", str(tmp_path)]) == 2
    assert "say where it lies with --data FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("number", [9, -1])
def test_a_file_that_does_not_fit_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    hyperedge_prediction._load.cache_clear()
    arrays = {
        "train": np.array([[0, number, 0]]),
        "test": np.zeros((1, 3), dtype=np.int64),
        "nums_type": np.array([3, 3, 3]),
    }
    np.savez(tmp_path / "hot_gps.npz", **arrays)
    assert main([*WORDS, "--dataset", "gps", "--data", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "train must hold triples of numbers from 0 on, below nums_type" in capsys.readouterr().err


@pytest.mark.parametrize("many", [2**21, 10**12, 2**63 - 1])
def test_triples_beyond_the_numbers_are_refused(tmp_path: Path, many: int) -> None:
    """Numpy was asked for memory by their number, and triples were numbered anew by numbers that wrapped."""
    np.savez(tmp_path / "hot_gps.npz", train=np.zeros((9, 3), int), test=np.zeros((1, 3), int), nums_type=[many, 3, 3])
    with pytest.raises(RefusedError, match=f"nums_type must sum up to less than 2097152, got {many + 6}"):
        hyperedge_prediction._load("gps", tmp_path, 0)


@needs_real
@pytest.mark.parametrize(
    ("dataset", "train", "test", "unseen"), [("gps", 1154, 282, 282), ("drug", 61713, 34352, 11327)]
)
def test_real_sets_have_the_sizes_their_page_gives(dataset: str, train: int, test: int, unseen: int) -> None:
    data = load(dataset, REAL, Settings(), 0)
    assert len(rows(data.train) | rows(data.val[data.val_truth])) == train
    assert int(data.test_truth.sum()) == test
    assert int((data.test_truth & data.unseen).sum()) == unseen
    hyperedge_prediction._load.cache_clear()
