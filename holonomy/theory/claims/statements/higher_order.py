r"""Claims of HOT: Theorems 1 and 2 in both readings, and Properties 1 to 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, cast

import torch
from torch import Tensor

from holonomy.layers import EquivariantLinear, HigherOrderAttention, HigherOrderEncoderLayer, bell
from holonomy.models import HigherOrderTransformer
from holonomy.structures import Hyperedges
from holonomy.theory.claims.separation import seeded
from holonomy.theory.claims.statements.certified_nodes import ring
from holonomy.theory.claims.verdict import Claims, Draws, Trial, apart
from holonomy.theory.expressivity.higher_order import (
    attend_ones,
    chorded_cycle,
    degree,
    message_passing,
    operations,
    uniform_attention,
)

CLAIMS = Claims()  #: claims of the family ``hot``

_ORDERS = ((1, 1), (1, 2), (2, 1), (2, 2))


def _linear(draws: Draws, order: int, order_out: int, features: int) -> EquivariantLinear:
    made = EquivariantLinear(order, order_out, features, features, bias=False, **draws.factory_kwargs)
    return cast("EquivariantLinear", seeded(made, draws))


@CLAIMS.add("hot.theorem_1", "HOT Theorem 1", "equal", axis="n")
def _ones(draws: Draws) -> Iterator[Trial]:
    """Attention of ones is L_{k->l}, w_mu = sum_h w^V w^O."""
    for order, order_out in _ORDERS:
        for _ in draws.rounds(5):
            nodes, heads = draws.integer(2, 5), draws.integer(1, 3)
            value, out = (draws.normal(heads, bell(order + order_out), 3, 3) for _ in range(2))
            layer = _linear(draws, order, order_out, 3)
            with torch.no_grad():
                layer.weight.copy_((value @ out).sum(0))
                x = draws.normal(*[nodes] * order, 3)
                off, floor = apart(attend_ones(x, order, order_out, value, out), layer(x))
            yield Trial(off, floor, at={"n": float(nodes)})


@CLAIMS.add(
    "hot.theorem_1_one_n",
    "HOT Theorem 1 with eq. 12",
    "equal",
    statement="Normalised attention is L_{k->l} at the n whose class sizes the values hold",
    axis="n",
    elsewhere=False,
)
@CLAIMS.add(
    "hot.theorem_1_normalised",
    "HOT Theorem 1 with eq. 12, for all n",
    statement="Normalised attention is L_{k->l} for every n",
    expected=False,
    axis="n",
    elsewhere=True,
)
def _normalised(draws: Draws, *, elsewhere: bool) -> Iterator[Trial]:
    for order, order_out in _ORDERS:
        for nodes in (4, 5, 6):
            layer = _linear(draws, order, order_out, 3)
            attention = uniform_attention(layer, nodes)
            there = nodes + elsewhere
            x = draws.normal(*[there] * order, 3)
            with torch.no_grad():
                off, floor = apart(attention(x), layer(x))
            note = f"{order} -> {order_out}: values that fit n = {nodes}, at n = {there}, are off by {off:.2g}"
            yield Trial(off, floor, at={"n": float(nodes)}, note=note if elsewhere else "")


@CLAIMS.add("hot.theorem_2", "HOT Theorem 2", "equal", axis="n", rounds=12)
def _messages(draws: Draws, index: int) -> Iterator[Trial]:
    """Two sparse maps with attention one and an elementwise map between are message passing."""
    nodes = draws.integer(3, 9)
    one_way = (draws.normal(nodes, nodes) > 0).triu(1).nonzero().T
    edge_index = torch.cat([one_way, one_way.flip(0)], 1)
    if index == 0:
        edge_index, nodes = chorded_cycle().to(draws.device), 6
    x, e = draws.normal(nodes, 2), draws.normal(edge_index.shape[1], 2)
    first, second = draws.normal(6, 8), draws.normal(8, 3)

    def message(features: Tensor) -> Tensor:
        return torch.relu(features @ first) @ second

    receiver, sender = edge_index
    sent = message(torch.cat([x[receiver], x[sender], e], 1))
    wanted = x.new_zeros(nodes, 3).index_add(0, receiver, sent)
    yield Trial(*apart(message_passing(x, edge_index, e, message), wanted), at={"n": float(nodes)})


def _degrees(draws: Draws, kernel: Literal["softmax", "performer"]) -> Iterator[Trial]:
    """Whether nodes of degree 3 and 2 come out different where features are constant."""
    edge_index = chorded_cycle().to(draws.device)
    x = torch.ones(6, 1, **draws.factory_kwargs)
    e = torch.ones(14, 1, **draws.factory_kwargs)
    for _ in draws.rounds(5):
        made = HigherOrderTransformer(
            1, 8, 2, orders=(2, 2, 2, 1), heads=2, edge_features=1, kernel=kernel, **draws.factory_kwargs
        )
        made.redraw(draws.generator)
        with torch.no_grad():
            y = cast("Tensor", seeded(made, draws)(x, edge_index, edge_attr=e))
        off, floor = apart(y[:1], y[1:2])
        note = f"{kernel} on the six-cycle with a chord: nodes of degree 3 and 2 differ by {off:.1g}, which is rounding"
        yield Trial(float(off <= floor), 0.0, note=note if off <= floor else "")


for kernel in ("softmax", "performer"):
    CLAIMS.add(
        f"hot.theorem_2_{kernel}",
        "HOT Theorem 2 with eq. 18",
        statement=f"Normalised {kernel} attention sees degrees, as message passing does, where features are constant",
        expected=False,
        kernel=kernel,
    )(_degrees)


def _ring(_: int, nodes: int) -> Hyperedges:
    """A cycle with its loops: 3 n hyperedges of order 2, whatever the order asked for."""
    return Hyperedges.from_graph(torch.ones(nodes, 4), ring(nodes), torch.ones(2 * nodes, 0))


def dense(order: int, nodes: int) -> Tensor:
    """Ones on all multi-indices."""
    return torch.ones(*[nodes] * order, 4)


def growth(
    function: Callable[..., object],
    order: int,
    given: Callable[[int, int], object],
    least: int,
    exponent: int,
    note: str = "",
) -> Trial:
    """The degree of the operations of a function in the size of what it is given, beside the printed exponent."""

    def count(nodes: int) -> int:
        x = given(order, nodes)
        return operations(lambda: function(x))

    found = degree(count, least, exponent + 1)
    note = note or f"{type(function).__name__}, order {order}"
    return Trial(float(found), float(exponent), note=f"{note}: as {'m' if given is _ring else 'n'}^{found}")


@CLAIMS.add("hot.property_1", "HOT Property 1", note="degrees of counted operations, by differences")
def _property_1(_: Draws) -> Iterator[Trial]:
    """dense: L_{k->l} grows no faster than n^(k+l), Enc_{k->l} than n^max(k+l, 2k, 2l)."""
    for k, to in _ORDERS:
        yield growth(EquivariantLinear(k, to, 4, 4), k, dense, 3, k + to)
        yield growth(HigherOrderEncoderLayer(k, to, 4, 1, 4), k, dense, 3, max(k + to, 2 * k, 2 * to))


@CLAIMS.add("hot.property_2", "HOT Property 2", note="degrees of counted operations on rings, by differences")
def _property_2(_: Draws) -> Iterator[Trial]:
    """Sparse, 2 -> 2: the linear layer grows no faster than m, attention and encoder than m^2."""
    yield growth(EquivariantLinear(2, 2, 4, 4), 2, _ring, 8, 1)
    yield growth(HigherOrderEncoderLayer(2, 2, 4, 1, 4), 2, _ring, 8, 2)
    yield growth(HigherOrderAttention(2, 2, 4, 1), 2, _ring, 8, 2)


def _property_3(_: Draws, sums: Literal["decoupled", "coupled"]) -> Iterator[Trial]:
    for k, to in _ORDERS:
        encoder = HigherOrderEncoderLayer(k, to, 4, 1, 4, kernel="performer", sums=sums)
        yield growth(encoder, k, dense, 3, max(k, to))
    # Hyperedges go into blocks of 16: the count takes a step between 8 and 9 nodes, and between 16 and 17.
    yield growth(HigherOrderEncoderLayer(2, 2, 4, 1, 4, kernel="performer", sums=sums), 2, _ring, 9, 1)


for sums, more in (("decoupled", ""), ("coupled", ", without the approximation")):
    CLAIMS.add(
        f"hot.property_3_{sums}",
        "HOT Property 3" + more,
        statement=f"Kernel attention with {sums} sums: no faster than n^max(k, l) dense, m sparse",
        note="degrees of counted operations, by differences",
        sums=sums,
    )(_property_3)
