r"""What can be known of the classes in a generated graph: the accuracy of Bayes' rule that knows the model.

A node i of class c has features :math:`N(\mu_c, I)`. A neighbour j is of class c' with weight
:math:`K_{c'c} = (1 - a) + a\, [c' = c] / w_c`, a the share of edges that look for their own class and :math:`w_c` the
share of all edge ends that class c has; the number of edges of a node tells nothing. What a neighbour says is
:math:`\log \sum_{c'} p_j(c') K_{c'c}`, with :math:`p_j` what j knows without i: belief propagation. After t rounds it
is Bayes' rule on all that lies within t edges, exact where that is a tree; the loops of graphs of less than 10^4 nodes
mislead it. Labels that a rule is given would tell more: with those of all neighbours :math:`p_j` is certain, and what
that finds bounds every rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from experiments.data.large_graphs import ALIKE, CLASSES, TEST, About

ROUNDS, LEAST = 30, 10_000


def reverse_of(edges: Tensor, nodes: int) -> Tensor:
    """The place of the other direction of each edge."""
    source, target = edges.long()
    found = torch.empty_like(source)
    found[(source * nodes + target).argsort()] = (target * nodes + source).argsort()
    return found


def heard(known: Tensor, ends: Tensor) -> Tensor:
    """What a neighbour says of each class that knows its own class so far."""
    return (known * (ALIKE / ends)).add_(1 - ALIKE).log_()


def beliefs(own: Tensor, edges: Tensor, ends: Tensor) -> Iterator[Tensor]:
    """Logarithms of what is known of each node, up to a constant: from what lies within 1, 2, 3, ... edges."""
    (source, target), other = edges, reverse_of(edges, len(own))
    known = own[source].softmax(1)
    while True:
        messages = heard(known, ends)
        found = own.index_add(0, target, messages)
        yield found
        known = (found[source] - messages[other]).softmax(1)


def best_accuracies(folder: Path) -> dict[str, float]:
    """The share of test nodes that Bayes' rule finds: from features, within some edges, with neighbours' labels."""
    about = About.read(folder)
    read = {name: torch.from_numpy(np.array(about.mapped(folder, name, "r"))) for name in ("labels", "split", "edges")}
    label, test, edges = read["labels"][:, 0].long(), read["split"] == TEST, read["edges"]
    edges = edges[:, edges[0] != edges[1]]
    ends = torch.bincount(label[edges[0].long()], minlength=CLASSES) / edges.shape[1]
    means = torch.from_numpy(np.load(folder / "means.npy")).float()
    x = torch.from_numpy(np.array(about.mapped(folder, "features0", "r")))
    own = x @ means.T - means.square().sum(1) / 2

    def share(scores: Tensor) -> float:
        return (scores.argmax(1) == label)[test].double().mean().item()

    found, last = {"features": share(own)}, own
    for step, belief in zip(range(1, ROUNDS + 1), beliefs(own, edges, ends), strict=False):
        if step <= 2:
            found[f"within {step}"] = share(belief)
        changed = (belief.argmax(1) != last.argmax(1)).double().mean()
        last = belief
        if changed < 1e-4:
            break
    certain = functional.one_hot(label, CLASSES).float()[edges[0]]
    labelled = own.index_add(0, edges[1], heard(certain, ends))
    return found | {"graph": share(last), "labels of neighbours": share(labelled)}
