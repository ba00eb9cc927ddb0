"""Scores against their definitions, counted pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from experiments.engine.scores import average_precision, best_f1, detection, f1_scores, roc_auc


def drawn(seed: int, *, n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that there are ties.
    score = torch.randint(6, (n,), generator=generator).float() / 3
    return score, torch.rand(n, generator=generator) < 0.3 + 0.2 * score


@pytest.mark.parametrize("seed", range(5))
def test_auc_is_the_share_of_pairs_in_order(seed: int) -> None:
    score, truth = drawn(seed)
    pairs = [(a > b) + 0.5 * (a == b) for a in score[truth].tolist() for b in score[~truth].tolist()]
    assert roc_auc(score, truth) == pytest.approx(sum(pairs) / len(pairs))


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_walks_down_the_thresholds(seed: int) -> None:
    score, truth = drawn(seed)
    total, recall = 0.0, 0.0
    for level in sorted(set(score.tolist()), reverse=True):
        said = score >= level
        now = float((said & truth).sum() / truth.sum())
        total += (now - recall) * float((said & truth).sum() / said.sum())
        recall = now
    assert average_precision(score, truth) == pytest.approx(total)


@pytest.mark.parametrize("seed", range(5))
def test_best_f1_is_the_best_of_all_thresholds(seed: int) -> None:
    score, truth = drawn(seed)
    each = {level: detection(score >= level, truth)["f1"] for level in set(score.tolist())}
    value, level = best_f1(score, truth)
    assert value == pytest.approx(max(each.values()))
    assert detection(score >= level, truth)["f1"] == pytest.approx(value)


def test_scores_of_a_perfect_and_of_a_blind_ranking() -> None:
    truth = torch.tensor([True, False, True, False])
    assert roc_auc(truth.float(), truth) == average_precision(truth.float(), truth) == best_f1(truth.float(), truth)[0]
    assert roc_auc(truth.float(), truth) == 1.0
    assert roc_auc(torch.zeros(4), truth) == average_precision(torch.zeros(4), truth) == 0.5


def test_f1_of_classes() -> None:
    truth, said = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 0])
    micro, macro = f1_scores(said, truth, 2)
    assert micro == pytest.approx(3 / 5)
    assert macro == pytest.approx((2 * 2 / (2 * 2 + 2) + 2 / (2 + 2)) / 2)
    # One answer for everybody, two classes of one size.
    assert f1_scores(torch.zeros(6, dtype=torch.int64), torch.arange(6) % 2, 2) == pytest.approx((1 / 2, 1 / 3))
    # A third class that neither occurs nor is said counts as zero.
    assert f1_scores(said, truth, 3)[1] == pytest.approx(macro * 2 / 3)


def test_detection_counts() -> None:
    truth, said = torch.tensor([True, True, False, False, False]), torch.tensor([True, False, True, False, True])
    found = detection(said, truth)
    assert found == pytest.approx({"accuracy": 2 / 5, "precision": 1 / 3, "recall": 1 / 2, "f1": 2 / 5})
    nothing = torch.zeros(5, dtype=torch.bool)
    assert detection(nothing, nothing) == {"accuracy": 1.0, "precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert not any(math.isnan(value) for value in detection(nothing, truth).values())
