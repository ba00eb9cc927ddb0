"""Printed statements beside the theorems: lemmas of proofs, remarks, complexities, and what is more expressive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from holonomy.layers import (
    EquivariantLinear,
    HigherOrderEncoderLayer,
    HypLinearAttention,
    HypSoftmaxAttention,
    bell,
    set_partitions,
)
from holonomy.layers.equivariant.basis.partitions import canonical
from holonomy.manifolds import Lorentz
from holonomy.structures import Hyperedges
from holonomy.theory.attention.lipschitz import plus_bound, printed_lipschitz
from holonomy.theory.attention.measured import jacobian_norm
from holonomy.theory.attention.projections import Projections, as_function
from holonomy.theory.attention.sizes import spectral
from holonomy.theory.claims.search import Comparison, draw_layer, on_a_line, search
from holonomy.theory.claims.separation import missed, seeded
from holonomy.theory.claims.statements.higher_order import dense, growth
from holonomy.theory.claims.statements.lipschitz import stretch_through
from holonomy.theory.claims.verdict import Claims, Draws, Trial, rounding
from holonomy.theory.expressivity.colouring import PAIRS, graph_pair, separated

CLAIMS = Claims()  #: claims of several families

_LARGEST = 1.256  # up to which oscillation of E the entrywise inequality of Lemma A.3 is stated


def _entrywise(p: Tensor, e: Tensor) -> Iterator[Trial]:
    """Lemma A.3 for one row: the largest and the least share of P over that of P~."""
    oscillation = (e.amax() - e.amin()).item()
    # P~ is the softmax of A - E, P that of A.
    share = (p.log() + e).softmax(0) / p
    yield Trial(share.amax().item(), 1 + 2 * oscillation)
    yield Trial(1 - oscillation, share.amin().item())


def _sharpest_a3(draws: Draws) -> Iterator[Trial]:
    """A rare key that gains the most, at the largest oscillation, and one that loses a little."""
    for first, second in ((_LARGEST, 0.0), (0.0, 0.01)):
        e = draws.normal(1).new_tensor([first, second])
        yield from _entrywise(e.new_tensor([1 / 10_000, 1 - 1 / 10_000]), e)


@CLAIMS.add("collapse.lemma_a3", "Simplicial Lemma A.3", sharpest=_sharpest_a3, rounds=60)
def _lemma_a3(draws: Draws, _: int) -> Iterator[Trial]:
    """(1 - D) P~ <= P <= (1 + 2 D) P~ entrywise, D the oscillation of a row of E, at most 1.256."""
    size = draws.integer(2, 8)
    e = draws.normal(size)
    e = e * (draws.uniform(0.01, _LARGEST) / (e.amax() - e.amin()))
    yield from _entrywise((3 * draws.normal(size)).softmax(0), e)


def _compare_c1(x: Tensor, layer: Projections) -> Comparison:
    order, value, radius = layer.order, spectral(layer.values).amax(), x.norm(dim=1).amax()
    measured = stretch_through(x, layer, "values")
    return Comparison(measured, order * value**order * radius ** (order - 1), torch.zeros_like(measured))


def _ones(draws: Draws, order: int, *tokens: float) -> tuple[Projections, Tensor]:
    return on_a_line(draws, [1.0] * (order + 1), *tokens)


def _alone(draws: Draws) -> Iterator[Trial]:
    for order in (1, 2, 3):
        layer, x = _ones(draws, order, 0.7)
        yield from _compare_c1(x, layer).trials({"N": float(order)})


CLAIMS.add(
    "lipschitz.lemma_c1",
    "Simplicial Lemma C.1",
    statement="The derivative through the values is at most N V^N R^{N-1}",
    axis="N",
    sharpest=_alone,
    compare=_compare_c1,
    batches=1,
    plain=True,
)(search)


def _stretch(layer: Projections, x: Tensor) -> float:
    return jacobian_norm(as_function(layer), x, steps=30)[0]


@CLAIMS.add("lipschitz.not_global", "Simplicial section 3.3", axis="radius")
def _not_global(draws: Draws) -> Iterator[Trial]:
    """Not globally Lipschitz: on the ball of radius R the stretch is (2 R^2 / 3)^N at least."""
    # Tokens R, -R and 0: the query of the third sees all tuples alike, and a step of it tells them apart.
    for order in (1, 2, 3):
        for radius in (3.0, 10.0, 30.0):
            layer, x = _ones(draws, order, radius, -radius, 0.0)
            at = {"N": float(order), "radius": radius}
            yield Trial((2 * radius**2 / 3) ** order, _stretch(layer, x), at=at)


def _sharpest_vanishing(draws: Draws) -> Iterator[Trial]:
    """Equal tokens: the derivative of a power."""
    for order in (2, 3):
        layer, x = _ones(draws, order, *[0.01] * 3)
        yield Trial(_stretch(layer, x), 1.001 * order * 0.01 ** (order - 1), at={"N": float(order), "radius": 0.01})


@CLAIMS.add("lipschitz.vanishing", "Simplicial section 3.3", axis="radius", sharpest=_sharpest_vanishing, rounds=5)
def _vanishing(draws: Draws, _: int) -> Iterator[Trial]:
    """As R -> 0 the stretch of N >= 2 vanishes like N prod|W_V| R^{N-1}, that of N = 1 stays |W_V|."""
    # At X = 0 ordinary attention is the mean of its values; higher orders are below N prod|W_V| R^{N-1} and vanish.
    layer = draw_layer(draws, 1, 3)
    mean = _stretch(layer, torch.zeros(4, 3, **draws.factory_kwargs))
    yield Trial(spectral(layer.values).item(), mean, at={"N": 1.0})
    for order in (2, 3):
        for radius in (0.1, 0.01, 0.001):
            layer, x = draw_layer(draws, order, 3), draws.normal(4, 3)
            x = radius * x / x.norm(dim=1).amax()
            # What goes through the weights is of order R^2 beside 1, logits of R^3 and more.
            room = 1 + 1000 * radius**2
            allowed = room * order * spectral(layer.values).prod().item() * radius ** (order - 1)
            yield Trial(_stretch(layer, x), allowed, at={"N": float(order), "radius": radius})


@CLAIMS.add("lipschitz.tokens", "Simplicial section 3.3")
def _tokens(draws: Draws) -> Iterator[Trial]:
    """The exponent of n does not depend on N: 3/2 in the printed bound, 1/2 in L+."""
    # The exponent of n between n and 4 n, of the printed bound and of L+ at large logits, against that of N = 1.
    layers = [_ones(draws, order, 1.0)[0] for order in (1, 2, 3)]
    slopes = {
        name: [math.log(bound(layer, 5.0, 40_000) / bound(layer, 5.0, 10_000), 4) for layer in layers]
        for name, bound in (("printed", printed_lipschitz), ("L+", plus_bound))
    }
    for (name, found), exponent in zip(slopes.items(), (1.5, 0.5), strict=True):
        for order, slope in enumerate(found, 1):
            note = f"{name} grows as n^{slope:.3g} at N = {order}"
            yield Trial(abs(slope - exponent), 0.01, at={"N": float(order)}, note=note)


@CLAIMS.add("hot.proposition_1", "HOT Proposition 1", "equal")
def _proposition_1(draws: Draws) -> Iterator[Trial]:
    """Where output indices repeat, L_{k->l} is a map of as many indices as are different."""
    # Fitted, then tried on a new input.
    nodes = 5
    for k, to in ((1, 2), (2, 2), (2, 1)):
        large = EquivariantLinear(k, to, 1, 1, bias=False, **draws.factory_kwargs)
        for pattern in set_partitions(to):
            unique = max(pattern) + 1
            small = EquivariantLinear(k, unique, 1, 1, bias=False, **draws.factory_kwargs)
            at = list(itertools.permutations(range(nodes), unique))
            first = torch.tensor(at).T
            whole = tuple(first[block] for block in pattern)
            with torch.no_grad():
                large.weight.copy_(draws.normal(*large.weight.shape))
                seen = [draws.normal(*[nodes] * k, 1) for _ in range(3)]
                columns = [_columns(small, x, tuple(first)) for x in seen]
                wanted = [large(x)[whole].flatten() for x in seen]
                fit = torch.linalg.pinv(torch.cat(columns[:2])) @ torch.cat(wanted[:2])
            off = (columns[2] @ fit - wanted[2]).abs().amax().item()
            floor = rounding(draws.dtype) * nodes**k * (1 + fit.abs().amax().item())
            yield Trial(off, floor, note=f"{k} -> {to}, {unique} different indices")


def _columns(layer: EquivariantLinear, x: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """What each class of a map makes of an input."""
    found: list[Tensor] = []
    for kind in range(layer.weight.shape[0]):
        layer.weight.zero_()
        layer.weight[kind] = 1
        found.append(layer(x)[at].flatten())
    return torch.stack(found, 1)


def _by_diagonal(x: Tensor, order: int, order_out: int) -> Tensor:
    """The classes whose inputs all equal the first output index: a diagonal, which is read as it lies."""
    for _ in range(order - 1):
        x = x.diagonal(dim1=0, dim2=1).movedim(-1, 0)
    nodes = x.shape[0]
    return x.reshape(nodes, *[1] * (order_out - 1), -1).expand(*[nodes] * order_out, -1).clone()


@CLAIMS.add("hot.proposition_2", "HOT Proposition 2")
def _proposition_2(draws: Draws) -> Iterator[Trial]:
    """Lightweight L_{k->l} grows no faster than n^l."""
    # Of the classes of a diagonal: no more operations than n^l, and that they are classes of L_{k -> l}.
    for k, to in ((1, 1), (1, 2), (2, 1), (2, 2)):
        yield growth(partial(_by_diagonal, order=k, order_out=to), k, dense, 4, to, f"{k} -> {to}")
        layer = EquivariantLinear(k, to, 2, 2, bias=False, **draws.factory_kwargs)
        x = draws.normal(*[4] * k, 2)
        with torch.no_grad():
            kept = [float(set(p[:k]) == {p[k]}) for p in set_partitions(k + to)]
            layer.weight.copy_(x.new_tensor(kept)[:, None, None] * torch.eye(2).to(x))
            off = (layer(x) - _by_diagonal(x, k, to)).abs().amax().item()
        yield Trial(off, rounding(draws.dtype), note=f"{k} -> {to}: the classes of a diagonal")


@CLAIMS.add("hyperbolic.linear_time", "Hypformer section 4.5")
def _hypformer(_: Draws) -> Iterator[Trial]:
    """Linear attention takes O(N) operations."""
    # Operations of linear attention over the number of points; of softmax attention they grow as its square.
    manifold = Lorentz(-1.0)

    def points(order: int, nodes: int) -> Tensor:
        return manifold.lift(dense(order, nodes))

    yield growth(HypLinearAttention(4, 1, manifold), 1, points, 4, 1, "linear attention")
    softmax = growth(HypSoftmaxAttention(4, 1, manifold), 1, points, 4, 2, "softmax attention")
    yield Trial(softmax.bound, softmax.measured, note=softmax.note)


@CLAIMS.add("hot.opposite", "HOT Theorem 2, the opposite")
def _opposite(draws: Draws) -> Iterator[Trial]:
    """Two encoders of order 2 compute what two steps of messages cannot."""
    # A path of nine: two encoders of order 2 bring its far end to the first node, two steps of messages do not.
    i = torch.arange(8)
    edge_index = torch.cat([torch.stack([i, i + 1]), torch.stack([i + 1, i])], 1).to(draws.device)
    encoders = [
        seeded(HigherOrderEncoderLayer(2, 2, 4, 1, 4, kernel="performer", **draws.factory_kwargs), draws)
        for _ in range(2)
    ]
    weights = draws.normal(2, 4, 4)
    x = draws.normal(9, 4)
    moved = x.clone()
    moved[8] = draws.normal(4)
    with torch.no_grad():
        far = [_encoded(encoders, given, edge_index) for given in (x, moved)]
    near = [_passed(weights, given, edge_index) for given in (x, moved)]
    scale = rounding(draws.dtype)
    yield Trial(scale, (far[0] - far[1]).abs().amax().item(), note="two encoders see the far end of a path of nine")
    yield Trial((near[0] - near[1]).abs().amax().item(), scale, note="two steps of messages do not")


def _encoded(layers: list[nn.Module], x: Tensor, edge_index: Tensor) -> Tensor:
    graph = Hyperedges.from_graph(x, edge_index, x.new_zeros(edge_index.shape[1], 0))
    for layer in layers:
        graph = cast("Hyperedges", layer(graph))
    return graph.values[(graph.indices == 0).all(1)]


def _passed(weights: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
    receiver, sender = edge_index
    for weight in weights:
        x = (x + torch.zeros_like(x).index_add(0, receiver, x[sender])).matmul(weight).sin()
    return x[0]


@CLAIMS.add("hot.corollary_1", "HOT Corollary 1", expected=False)
def _corollary_1(draws: Draws) -> Iterator[Trial]:
    """Order 2 separates graphs that no message passing separates."""
    pairs = [name for name in PAIRS[:-1] if not separated(*graph_pair(name), 1)]
    yield from missed(draws, "hot_2", 2, pairs, "{}: not separated by colour refinement, and not by order 2")


Partition = tuple[int, ...]


def _split(partition: Partition) -> tuple[Partition, Partition, list[bool]]:
    """The classes of both halves, and which entries of them are equal."""
    first, second = partition[: len(partition) // 2], partition[len(partition) // 2 :]
    return canonical(first), canonical(second), [a == b for a in first for b in second]


def _separation(partition: Partition, indices: list[Partition]) -> int:
    """How many i are in the class of the first half and go with no j, or the other way round."""
    first, _, _ = _split(partition)
    going = {i for i in indices if any(canonical((*i, *j)) == partition for j in indices)}
    return len(going ^ {i for i in indices if canonical(i) == first})


def _breakdown(partition: Partition, indices: list[Partition]) -> int:
    """For how many pairs the two conditions are not the class."""
    return sum(
        (_split((*i, *j)) == _split(partition)) != (canonical((*i, *j)) == partition)
        for i, j in itertools.product(indices, indices)
    )


def _scoring(partition: Partition, indices: list[Partition]) -> int:
    """For how many pairs the score is the largest off the class, or nearer to it than min(1, eps), or less on it."""
    first, second, equal = _split(partition)
    epsilon = 1 - math.cos(2 * math.pi / bell(len(first))) if len(first) > 1 else 1.0
    most, wrong = 2.0 + sum(equal), 0
    for i, j in itertools.product(indices, indices):
        here, there, met = _split((*i, *j))
        score = 2 - epsilon * ((here != first) + (there != second))
        score += sum((1 if wanted else -1) for wanted, found in zip(equal, met, strict=True) if found)
        inside = canonical((*i, *j)) == partition
        wrong += score != most if inside else score > most - 0.999 * min(1.0, epsilon)
    return wrong


@CLAIMS.add(
    "tokens.lemma_2",
    "TokenGT Lemma 2",
    statement="The i of a class of pairs (i, j) are a class, where there are as many nodes as it has blocks",
    wrong=_separation,
)
@CLAIMS.add(
    "tokens.lemma_3",
    "TokenGT Lemma 3",
    statement="(i, j) is in a class if and only if i and j are in its halves and the same entries are equal",
    wrong=_breakdown,
)
@CLAIMS.add(
    "tokens.scoring",
    "TokenGT Property 1",
    statement="The scoring function is largest on the class alone, elsewhere lower by min(1, eps) at least",
    wrong=_scoring,
)
def _classes(_: Draws, wrong: Callable[[Partition, list[Partition]], int]) -> Iterator[Trial]:
    """What is wrong with every class of pairs of multi-indices, of as many nodes as it has blocks at the most."""
    for order in (1, 2):
        indices = list(itertools.product(range(2 * order), repeat=order))
        for partition in set_partitions(2 * order):
            yield Trial(float(wrong(partition, indices)), 0.0, at={"k": float(order)}, note=f"class {partition}")


@CLAIMS.add("colouring.csa", "CSA sections 3, 4")
def _csa(draws: Draws) -> Iterator[Trial]:
    """Chromatic attention with walks separates pairs that colour refinement does not, and folklore 2-WL does."""
    pairs = {name: graph_pair(name) for name in PAIRS[:-1]}
    wanted = [name for name, pair in pairs.items() if not separated(*pair, 1) and separated(*pair, 2)]
    yield from missed(draws, "cgt", 3, wanted, "{}: not separated")
