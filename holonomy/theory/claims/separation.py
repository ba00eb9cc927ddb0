r"""Which models separate which graphs: random weights on the classic pairs, beside the exact colourings.

A model separates two graphs where its outputs differ by more than 5e-7 of their size, and those of a graph and a
renumbered copy of it do not. All is computed in float64: the question is about exact functions. Nodes have the constant
feature 1, so that nothing but the structure tells. Each model stands beside the colouring that bounds it, where there
is one:

=========================  =============================================================================================
``gcn``                    colour refinement
``ign_1``                  sees no edge: separates nothing of as many nodes
``ign_2``, ``hot_2``       oblivious 2-WL, which is colour refinement; with the entries of the adjacency as features
``ign_3``                  oblivious 3-WL, which is folklore 2-WL
``tokengt``                without identifiers, a set of tokens of two types: colour refinement is far above it
``tokengt_identifiers``    none: with identifiers it is not invariant, and renumbered copies come out different, too
``cgt``                    random walks and shortest paths of pairs: folklore 2-WL
``cgt_rings``              none: chordless cycles are seen by no fixed k
=========================  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float
from holonomy.layers import GCN, orthogonal_identifiers
from holonomy.models import ChromaticGraphTransformer, HigherOrderTransformer, InvariantGraphNetwork, TokenGT
from holonomy.theory.claims.verdict import Draws, Trial
from holonomy.theory.expressivity.colouring import PAIRS, WLForm, graph_pair

# Walks and rings as long as the shortest cycle in which a pair differs, and identifiers for the largest graph.
_LONGEST, _NODES = 9, 40
# The sine is nonlinear wherever sums lie, and means keep them small: few random networks are needed.
_IGN = partial(InvariantGraphNetwork, 1, 5, 2, normalise="counts", activation=torch.sin)
_TOKENGT = partial(TokenGT, 1, 8, 2, layers=2, heads=2)
_CGT = partial(ChromaticGraphTransformer, 1, 8, 2, layers=2, heads=2, steps=_LONGEST, norm="layer")
# How each model is made, and the colouring that it is known not to exceed.
_MODELS: dict[str, tuple[partial[nn.Module], tuple[int, WLForm] | None]] = {
    "gcn": (partial(GCN, 1, 8, 2, layers=3), (1, "folklore")),
    "ign_1": (partial(_IGN, orders=(1, 1, 0)), (1, "folklore")),
    "ign_2": (partial(_IGN, orders=(2, 2, 2, 0), edge_features=1), (2, "oblivious")),
    "ign_3": (partial(_IGN, orders=(2, 3, 3, 3, 3, 0), edge_features=1), (3, "oblivious")),
    "hot_2": (
        partial(HigherOrderTransformer, 1, 4, 2, orders=(2, 2, 2, 0), heads=2, edge_features=1),
        (2, "oblivious"),
    ),
    "tokengt": (partial(_TOKENGT, identifiers=None), (1, "folklore")),
    "tokengt_identifiers": (partial(_TOKENGT, identifiers="orthogonal", identifier_dim=_NODES), None),
    "cgt": (partial(_CGT, limit=3), (2, "folklore")),
    "cgt_rings": (partial(_CGT, substructures="added"), None),
}

MODELS = tuple(_MODELS)  #: names of the models


@dataclass(frozen=True)
class Separation:
    """What a model makes of two graphs."""

    between: float  # the difference of their outputs, relative to their size
    copies: float  # that of the first graph and a renumbered copy
    threshold: float  # above which a difference is more than rounding

    @property
    def invariant(self) -> bool:
        """Whether renumbered copies come out equal."""
        return self.copies <= self.threshold

    @property
    def separates(self) -> bool:
        """Whether the model tells the graphs, and not merely their numberings, apart."""
        return self.invariant and self.between > self.threshold


def bounded_by(name: str) -> tuple[int, WLForm] | None:
    """Name the colouring that a model is known not to exceed."""
    return _MODELS[checks.one_of("name", name, MODELS)][1]


def seeded(module: nn.Module, draws: Draws) -> nn.Module:
    """Draw all parameters of a module from the numbers of a claim."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * draws.normal(*parameter.shape))
        for part in module.modules():
            if isinstance(part, nn.LayerNorm | nn.BatchNorm1d):
                part.weight.add_(1)
    return module.eval()


def _dense(graph: Tensor, like: Tensor) -> Tensor:
    """One channel for nodes, on the diagonal, and one for edges."""
    return torch.stack([torch.eye(graph.shape[0]).to(like), graph.to(like)], -1)


def random_model(name: str, draws: Draws) -> Callable[[Bool[Tensor, "n n"]], Float[Tensor, " out"]]:
    """Make a model with random weights, as a function of an adjacency."""
    checks.one_of("name", name, MODELS)
    like = torch.zeros((), dtype=torch.float64, device=draws.device)
    model = seeded(_MODELS[name][0]().to(like.device, like.dtype), draws)
    identifiers = orthogonal_identifiers(_NODES, _NODES, generator=draws.generator, dtype=like.dtype).to(like.device)

    def output(graph: Tensor) -> Tensor:
        nodes = graph.shape[0]
        graph = graph.to(like.device)
        x, edge_index = like.new_ones(nodes, 1), graph.nonzero().T
        if isinstance(model, InvariantGraphNetwork | HigherOrderTransformer):
            return model.tensor(x if model.orders[0] == 1 else _dense(graph, like))
        if isinstance(model, TokenGT):
            return model(x, edge_index, identifiers=None if name == "tokengt" else identifiers[:nodes])[0]
        if isinstance(model, ChromaticGraphTransformer):
            return model(x, edge_index, **model.encode(edge_index, nodes, max_ring=_LONGEST, dtype=like.dtype))[0]
        return cast("Tensor", model(x, edge_index)).sum(0)

    return torch.no_grad()(output)


def separation(
    model: Callable[[Bool[Tensor, "n n"]], Float[Tensor, " out"]],
    first: Bool[Tensor, "n n"],
    second: Bool[Tensor, "n n"],
    order: Float[Tensor, " n"],
) -> Separation:
    """Compare a model's outputs on two graphs, and on a graph and its copy."""
    one, two = model(first), model(second)
    moved = order.argsort().cpu()
    copy = model(first[moved][:, moved])
    size = torch.stack([one, two, copy]).abs().amax().item() or 1.0
    between, copies = ((one - other).abs().amax().item() / size for other in (two, copy))
    return Separation(between, copies, torch.finfo(one.dtype).eps ** 0.4)


def missed(draws: Draws, name: str, count: int, pairs: Iterable[str], note: str) -> Iterator[Trial]:
    """1 for each pair that none of some draws of a model's weights separates, noted with the pair in place of {}."""
    models = [random_model(name, draws) for _ in range(count)]
    for pair in pairs:
        graphs = graph_pair(pair)
        order = draws.normal(graphs[0].shape[0])
        seen = any(separation(model, *graphs, order).separates for model in models)
        yield Trial(float(not seen), 0.0, note="" if seen else note.format(pair))


def separation_table(draws: Draws, *, pairs: tuple[str, ...] = PAIRS[:-1]) -> dict[str, dict[str, str]]:
    """Which models separate which pairs, for one draw of their weights."""
    table: dict[str, dict[str, str]] = {}
    for name in MODELS:
        model = random_model(name, draws)
        table[name] = {}
        for pair in pairs:
            first, second = graph_pair(pair)
            found = separation(model, first, second, draws.normal(first.shape[0]))
            table[name][pair] = ("yes" if found.separates else "no") if found.invariant else "not invariant"
    return table
