"""Scores of predictions: F1, accuracy balanced over classes, area under the ROC curve, average precision."""

from __future__ import annotations

import torch
from torch import Tensor


def f1_scores(predicted: Tensor, truth: Tensor, classes: int) -> tuple[float, float]:
    """Return micro and macro F1 of single labels (n,).

    Micro F1 counts over all classes together, which for single labels is the accuracy; macro F1 is the mean over
    the classes of 2 tp / (2 tp + fp + fn), 0 for a class that neither occurs nor is predicted.
    """
    counts = torch.bincount(truth * classes + predicted, minlength=classes**2).reshape(classes, classes).double()
    hit, total = counts.diagonal(), counts.sum(dim=0) + counts.sum(dim=1)
    each = 2 * hit / torch.where(total > 0, total, torch.ones_like(total))
    return float(hit.sum() / counts.sum()), float(each.mean())


def balanced_accuracy(predicted: Tensor, truth: Tensor, classes: int) -> float:
    """Return the share of right answers (n,) within each class, averaged over the classes that occur."""
    size = torch.bincount(truth, minlength=classes)
    right = torch.bincount(truth[predicted == truth], minlength=classes)
    return float((right[size > 0].double() / size[size > 0]).mean())


def detection(predicted: Tensor, truth: Tensor) -> dict[str, float]:
    """Return accuracy, precision, recall and F1 of the true class; boolean tensors of one shape."""
    both = int((predicted & truth).sum())
    said, real = int(predicted.sum()), int(truth.sum())
    return {
        "accuracy": float((predicted == truth).double().mean()),
        "precision": both / said if said else 0.0,
        "recall": both / real if real else 0.0,
        "f1": 2 * both / (said + real) if said + real else 0.0,
    }


def best_f1(score: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the largest F1 that a threshold reaches, and the threshold; ``score >= threshold`` is positive."""
    values, order = score.double().sort(descending=True, stable=True)
    hits = truth[order].double().cumsum(0)
    f1 = 2 * hits / (torch.arange(1, len(hits) + 1, device=hits.device) + truth.sum())
    # A threshold cannot part a tie.
    f1 = torch.where(_ends(values), f1, -1.0)
    best = int(f1.argmax())
    return float(f1[best]), float(values[best])


def _ends(values: Tensor) -> Tensor:
    """Tell which of the sorted values are the last of their ties."""
    return torch.cat([values[1:] != values[:-1], torch.ones_like(values[-1:], dtype=torch.bool)])


def roc_auc(score: Tensor, truth: Tensor) -> float:
    """Return the chance that a positive has a higher score than a negative, a tie counting one half.

    Args:
        score: (n,), larger is more positive.
        truth: (n,) boolean, both kinds present.

    Returns:
        The area under the ROC curve.
    """
    _, place, count = score.double().unique(return_inverse=True, return_counts=True)
    # The mean rank of each group of ties, from 1.
    rank = (count.cumsum(0) - (count - 1) / 2)[place]
    positives = int(truth.sum())
    above = float(rank[truth].sum()) - positives * (positives + 1) / 2
    return above / (positives * (len(truth) - positives))


def average_precision(score: Tensor, truth: Tensor) -> float:
    """Return the sum over thresholds of precision times the growth of recall; ties share a threshold."""
    values, order = score.double().sort(descending=True, stable=True)
    hits = truth[order].double().cumsum(0)
    last = _ends(values).nonzero().flatten()
    hits = hits[last]
    precision = hits / (last + 1)
    growth = torch.diff(hits, prepend=hits.new_zeros(1)) / truth.sum()
    return float((precision * growth).sum())
