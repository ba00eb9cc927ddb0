r"""Where the keys of kernel attention are counted from.

Softmax attention does not see a vector that all keys of a query have in common. Random features do: the relative
variance of :math:`\sum_f \phi_f(q) \phi_f(k)` grows like :math:`e^{|q + k|^2}` (Performer, Choromanski et al. 2021,
lemma 2). The keys of a graph are therefore counted from the mean of keys and queries together, after which
:math:`q + k` has the mean zero: what is approximated stays, and the variance is that of what differs.

The means are those of the entries of each pattern, mapped as keys and queries are. They do not depend on the tuples
that are asked for, nor on other graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from holonomy._shapes import Bool, Float
from holonomy.layers.equivariant.basis.orbits import Orbit, number_of_blocks
from holonomy.layers.equivariant.basis.partitions import Partition
from holonomy.layers.equivariant.higher_order import dense as dense_attention
from holonomy.layers.equivariant.higher_order.maps import Classes, Maps, by_class
from holonomy.layers.equivariant.linear import dense, sparse
from holonomy.structures import Hyperedges

# The squares of keys that are further away would cost single precision its digits.
_FARTHEST = 8.0


def of_dense(
    x: Float[Tensor, "..."], patterns: Sequence[Partition], present: Bool[Tensor, "..."] | None
) -> dict[Partition, Tensor]:
    """The mean entry of each pattern, zero where there is none."""
    means: dict[Partition, Tensor] = {}
    for pattern in patterns:
        blocks = number_of_blocks(pattern)
        # The entries of exactly this pattern: its diagonal, where its blocks are different nodes.
        here = dense_attention.different(x.shape[-2], blocks, x.device)
        if present is not None:
            here = here & dense.diagonal(present[..., None], pattern).squeeze(-1)
        nodes = tuple(range(-blocks - 1, -1))
        weight = here[..., None].to(x.dtype)
        total = (dense.diagonal(x, pattern) * weight).sum(nodes)
        means[pattern] = total / weight.sum(nodes).clamp_min(1)
    return means


def of_hyperedges(x: Hyperedges, patterns: Sequence[Partition]) -> dict[Partition, Tensor]:
    """The same of hyperedges."""
    means: dict[Partition, Tensor] = {}

    def find(pattern: Partition) -> Tensor:
        return sparse.in_pattern(x.indices, pattern, exactly=True).nonzero()[:, 0]

    for pattern in patterns:
        rows = x.plan.computed(("exactly", pattern), partial(find, pattern))
        graphs = x.graphs[rows]
        total = x.values.new_zeros(x.num_graphs, x.values.shape[1])
        total = total.index_add(0, graphs, x.values.index_select(0, rows))
        count = torch.bincount(graphs, minlength=x.num_graphs).clamp_min(1)
        means[pattern] = total / count[:, None].to(total.dtype)
    return means


def of_classes(
    classes: Classes, maps: Maps, means: dict[Partition, Float[Tensor, "*graphs dim"]]
) -> dict[Orbit, Float[Tensor, "*graphs width"]]:
    """What is subtracted from the keys of each class: their own mean and that of the queries."""
    entry = {p: _mean_entries(classes, means, p) for p in classes.read}
    # Maps are linear: the mean of keys is the key of the mean entry. Keys have no bias, queries have.
    keys = by_class({p: entry[p] @ weight for p, weight in maps.keys.items()}, classes.by_input)
    queries = {p: entry[p] @ weight + bias for p, (weight, bias) in maps.queries.items()}
    # Choromanski et al. 2021, lemma 2: counted from mean key + mean query, q + k has the mean zero.
    found = by_class(queries, classes.by_output)
    return {
        orbit: key + _shortened(found[orbit].unflatten(-1, (maps.heads, -1))).flatten(-2) for orbit, key in keys.items()
    }


def _mean_entries(classes: Classes, means: dict[Partition, Tensor], pattern: Partition) -> Tensor:
    """The entries of a tuple, as they are on average; a one where a tuple has no nodes."""
    parts = [means[read] for read in classes.read[pattern]]
    return torch.cat(parts, -1) if parts else torch.ones_like(means[classes.entries[0]][..., :1])


def _shortened(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Vectors longer than the farthest mean shortened to that length."""
    return x * (_FARTHEST * x.square().sum(-1, keepdim=True).clamp_min(_FARTHEST**2).rsqrt())
