"""Scores of predictions, scikit-learn's: F1, accuracy balanced over classes, area under the ROC curve, precision."""

from __future__ import annotations

from sklearn import metrics
from torch import Tensor


def f1_scores(predicted: Tensor, truth: Tensor, classes: int) -> tuple[float, float]:
    """Return micro and macro F1 of single labels (n,); a class that neither occurs nor is predicted counts as zero."""
    each = {"labels": range(classes), "zero_division": 0.0}
    pair = truth.cpu(), predicted.cpu()
    return metrics.f1_score(*pair, average="micro", **each), metrics.f1_score(*pair, average="macro", **each)


def balanced_accuracy(predicted: Tensor, truth: Tensor) -> float:
    """Return the share of right answers (n,) within each class, averaged over the classes that occur."""
    return metrics.recall_score(truth.cpu(), predicted.cpu(), labels=truth.unique().cpu(), average="macro")


def detection(predicted: Tensor, truth: Tensor) -> dict[str, float]:
    """Return accuracy, precision, recall and F1 of the true class; boolean tensors of one shape."""
    pair = truth.flatten().cpu(), predicted.flatten().cpu()
    names = ("precision", "recall", "f1")
    found = metrics.precision_recall_fscore_support(*pair, average="binary", zero_division=0.0)
    return {"accuracy": metrics.accuracy_score(*pair), **dict(zip(names, found, strict=False))}


def best_f1(score: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the largest F1 that a threshold reaches, and the threshold; ``score >= threshold`` is positive."""
    precision, recall, thresholds = metrics.precision_recall_curve(truth.cpu(), score.double().cpu())
    total = precision + recall
    f1 = (2 * precision * recall / total.clip(min=1e-300))[:-1]
    return float(f1.max()), float(thresholds[f1.argmax()])


def roc_auc(score: Tensor, truth: Tensor) -> float:
    """Return the chance that a positive has a higher score than a negative, a tie counting one half."""
    return metrics.roc_auc_score(truth.cpu(), score.double().cpu())


def average_precision(score: Tensor, truth: Tensor) -> float:
    """Return the sum over thresholds of precision times the growth of recall; ties share a threshold."""
    return metrics.average_precision_score(truth.cpu(), score.double().cpu())
