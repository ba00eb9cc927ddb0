"""Trees along which traits are inherited, or acquired from far away: a question for two kinds of layers at once.

Each tree is a small graph. Some of its species are sources: their trait is seen, and each carries a gene of its own.
Of the others, some say that they inherited their trait; it is that of the only source next to them. The rest say that
they acquired it with a gene; it is that of the source of this gene, wherever in the tree it is. Which source has which
gene and which trait is drawn anew for every tree, so that nothing can be learned by heart.

An inherited trait is one hop away, where a graph convolution looks. An acquired one is as far as two species are, and
a convolution that reaches it has averaged all other sources, too: the bottleneck of Alon and Yahav (2021). Attention
finds it by the gene, in one step at any distance.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

SOURCE, INHERITED, ACQUIRED = range(3)


@dataclasses.dataclass(frozen=True)
class Trees:
    """Trees of equal size, side by side as one graph.

    Attributes:
        x: features (n, 3 + genes + traits): which kind of species, which gene it carries, the trait of a source.
        edge_index: edges (2, m), in both directions.
        batch: the tree of each species, (n,).
        kind: ``SOURCE``, ``INHERITED`` or ``ACQUIRED``, (n,).
        y: the trait of every species, (n,).
    """

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    kind: Tensor
    y: Tensor

    @property
    def asked(self) -> Tensor:
        """Which species have to be classified, (n,)."""
        return self.kind != SOURCE


def grown(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """Return the parent of each node of a random tree, -1 at the root, node 0; a parent has a smaller number."""
    drawn = [int(rng.integers(max(0, (node - 1) // 3), (node - 1) // 2 + 1)) for node in range(1, nodes)]
    return np.array([-1, *drawn])


def hops(parent: np.ndarray) -> Tensor:
    """Return the number of edges between any two nodes of a tree, (n, n)."""
    found = torch.zeros(len(parent), len(parent))
    for node in range(1, len(parent)):
        found[node, :node] = found[:node, node] = found[parent[node], :node] + 1
    return found


def tree(rng: np.random.Generator, nodes: int, sources: int, traits: int) -> tuple[np.ndarray, ...]:
    """Draw one tree: kinds, genes, traits and parents, (n,) each."""
    parent = grown(rng, nodes)
    places = rng.permutation(nodes)[:sources]
    kind, gene = np.full(nodes, ACQUIRED), rng.integers(0, sources, nodes)
    kind[places], gene[places] = SOURCE, rng.permutation(sources)
    trait = np.zeros(nodes, dtype=np.int64)
    trait[places] = rng.integers(0, traits, sources)
    for node in np.flatnonzero(kind != SOURCE):
        beside = [other for other in (*np.flatnonzero(parent == node), parent[node]) if other in places]
        inherits = len(beside) == 1 and rng.random() < 0.6
        kind[node] = INHERITED if inherits else ACQUIRED
        trait[node] = trait[beside[0]] if inherits else trait[places[gene[places] == gene[node]][0]]
    return kind, gene, trait, parent


def trees(seed: int, count: int, *, nodes: int = 48, sources: int = 8, traits: int = 4) -> Trees:
    """Draw some trees.

    Args:
        seed: of the random numbers.
        count: number of trees.
        nodes: of each tree.
        sources: of each tree, and kinds of genes.
        traits: number of classes.
    """
    rng = np.random.default_rng(seed)
    drawn = [tree(rng, nodes, sources, traits) for _ in range(count)]
    kind, gene, trait = (torch.from_numpy(np.concatenate(part)) for part in list(zip(*drawn, strict=True))[:3])
    one_hot = torch.nn.functional.one_hot
    seen = one_hot(trait, traits) * (kind == SOURCE)[:, None]
    x = torch.cat([one_hot(kind, 3), one_hot(gene, sources), seen], dim=1).float()
    child = torch.arange(nodes * count).reshape(count, nodes)[:, 1:].flatten()
    parent = torch.from_numpy(np.concatenate([part[3][1:] + nodes * i for i, part in enumerate(drawn)]))
    edges = torch.stack([child, parent])
    batch = torch.arange(count).repeat_interleave(nodes)
    return Trees(x, torch.cat([edges, edges.flip(0)], dim=1), batch, kind, trait)
