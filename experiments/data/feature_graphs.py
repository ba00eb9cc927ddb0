"""Rows of features with labels and no graph, joined to their nearest neighbours: the setting of Hypformer's table 3.

There mini-ImageNet and 20News are joined so. ``digits`` are scikit-learn's handwritten digits; ``topics`` are generated
texts of ten groups under three subjects, as counts of words weighted by their rarity.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from experiments.engine.options import RefusedError

NEIGHBOURS = ("k5", "k10", "k15", "k20")


def neighbour_graph(x: Tensor, k: int) -> Tensor:
    """Join each row of (n, d) to its ``k`` nearest others by Euclidean distance: (2, m), each edge in both directions.

    Raises:
        ValueError: if there are no ``k`` others.
    """
    n = len(x)
    if not 1 <= k < n:
        raise RefusedError(f"k must lie between 1 and the {n - 1} other rows, got {k}")
    # From differences. scikit-learn's brute force subtracts squares, which loses rows that are nearly equal; its trees
    # choose others among equally near rows, of which the digits have some, and so would change the recorded graphs.
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    near = distances.topk(k, dim=1, largest=False).indices
    joined = torch.zeros(n, n, dtype=torch.bool).scatter_(1, near, value=True)
    return (joined | joined.T).nonzero().T.contiguous()


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's images (1797, 64), pixels from 0 to 16, and their labels."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415
    except ImportError:
        raise RefusedError("the digits come with scikit-learn: pip install 'holonomy[examples]'") from None
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float(), torch.from_numpy(labels)


def topics(
    documents: int = 2000, *, groups: int = 10, subjects: int = 3, vocabulary: int = 500, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw texts, and return their weighted counts (documents, vocabulary), rows of length one, and their groups.

    A word is common to all with probability 0.75, one of the subject's with 0.15, and of the group's with 0.1; words
    of each kind have probabilities of a Dirichlet distribution, and a text has about 60 words.
    """
    rng = np.random.default_rng(seed)
    common, *others = rng.dirichlet(np.full(vocabulary, 0.1), size=1 + subjects + groups)
    of_subject, of_group = np.stack(others[:subjects]), np.stack(others[subjects:])
    group = rng.integers(groups, size=documents)
    words = 0.75 * common + 0.15 * of_subject[group % subjects] + 0.1 * of_group[group]
    # A probability that is not exactly summed to one is refused.
    words /= words.sum(axis=1, keepdims=True)
    counts = rng.multinomial(1 + rng.poisson(60, size=documents), words)
    weighted = counts * np.log(documents / np.maximum(1, (counts > 0).sum(axis=0)))
    x = torch.from_numpy(weighted).float()
    return torch.nn.functional.normalize(x, dim=1), torch.from_numpy(group)


@functools.lru_cache(maxsize=2)
def joined(name: str, protocol: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, labels and the graph of nearest neighbours of a dataset, such as ``("digits", "k10")``."""
    x, y = digits() if name == "digits" else topics()
    x = x / x.max() if name == "digits" else x
    return x, y, neighbour_graph(x, int(protocol.removeprefix("k")))
