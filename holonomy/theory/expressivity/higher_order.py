r"""Higher-order transformers: HOT Theorems 1 and 2 in both readings, and Properties 1 to 3 by counting.

Theorem 1 says that attention generalises the equivariant linear map. With every attention weight of a class 1 it is
that map (:func:`attend_ones`). With the normalisation of eq. 12 the weights are one over the size of the class, which
depends on n, so that values that make up for it (:func:`uniform_attention`) fit one n only.

Theorem 2 says that two sparse layers with kernel attention are any message passing. Unnormalised they are
(:func:`message_passing`); normalised they do not see a degree where features are constant: in :func:`chorded_cycle`
nodes of degree 3 and 2 come out equal.

Properties 1 to 3 are measured by :func:`operations`, which counts what a forward pass does, and :func:`degree`, the
degree of that count as a polynomial in the size, exact by differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from holonomy._shapes import Float, Int
from holonomy.layers import EquivariantLinear, HigherOrderAttention, set_partitions
from holonomy.structures import Hyperedges
from holonomy.theory.expressivity.tokens_basis import equality_patterns


def attend_ones(
    x: Float[Tensor, "*axes features"],
    order: int,
    order_out: int,
    value: Float[Tensor, "heads classes features width"],
    out: Float[Tensor, "heads classes width features_out"],
) -> Float[Tensor, "..."]:
    r"""Higher-order attention with weights of one, HOT eq. 10 with :math:`\alpha^{h\mu} = B^\mu`, term by term."""
    nodes = x.shape[0]
    number = equality_patterns(nodes, order + order_out, device=x.device).reshape(nodes**order, nodes**order_out)
    flat = x.flatten(0, order - 1)
    result = x.new_zeros(nodes**order_out, out.shape[-1])
    for kind in range(value.shape[1]):
        alpha = (number == kind).to(x.dtype)
        for w_value, w_out in zip(value[:, kind], out[:, kind], strict=True):
            result = result + alpha.T @ (flat @ w_value @ w_out)
    return result.reshape(*[nodes] * order_out, -1)


def class_sizes(order: int, order_out: int, nodes: int) -> Int[Tensor, " classes"]:
    """How many inputs of each class an output has: what eq. 12 divides by where all weights are equal."""
    sizes: list[int] = []
    for partition in set_partitions(order + order_out):
        known = set(partition[order:])
        free = len(set(partition[:order]) - known)
        sizes.append(math.prod(max(nodes - len(known) - step, 0) for step in range(free)))
    return torch.tensor(sizes)


def uniform_attention(layer: EquivariantLinear, nodes: int) -> HigherOrderAttention:
    """Make normalised attention that is an equivariant linear map without bias on n nodes: HOT Theorem 1 with eq. 12.

    Queries are zero, so that the weights of a class are one over its size, and the values are multiplied by it.
    """
    weight = layer.weight.detach()
    made = HigherOrderAttention(
        layer.order_in, layer.order_out, layer.in_features, 1, device=weight.device, dtype=weight.dtype
    )
    sizes = class_sizes(layer.order_in, layer.order_out, nodes).to(weight)
    with torch.no_grad():
        for parameter in (*made.query.parameters(), *made.key.parameters()):
            parameter.zero_()
        made.value.copy_(torch.eye(layer.in_features).to(weight) * sizes[:, None, None])
        made.out.copy_(weight)
    return made


def chorded_cycle() -> Int[Tensor, "2 edges"]:
    """The six-cycle with a chord: nodes 0 and 3 have degree 3, the others 2."""
    one_way = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]])
    return torch.cat([one_way, one_way.flip(0)], 1)


def message_passing(
    x: Float[Tensor, "nodes features"],
    edge_index: Int[Tensor, "2 edges"],
    edge_attr: Float[Tensor, "edges edge_features"],
    message: Callable[[Tensor], Tensor],
) -> Float[Tensor, "nodes messages"]:
    r"""Pass messages by two maps of order-2 tensors with attention one: the construction of HOT Theorem 2.

    The first brings the features of both ends to their edge, by classes without a sum, and applies the message
    elementwise; the second sums over the edges of a node, by the one class :math:`\{\{i_1, j_1\}, \{i_2\}\}`:
    :math:`\sum_{u \in N(v)} M(x_v, x_u, e_{vu})`.
    """
    graph = Hyperedges.from_graph(x, edge_index, edge_attr)
    ends, own = x.shape[1], edge_attr.shape[1]
    spread = EquivariantLinear(2, 2, ends + own, 2 * ends + own, bias=False, device=x.device, dtype=x.dtype)
    edges = graph.indices[:, 0] != graph.indices[:, 1]
    with torch.no_grad():
        spread.weight.zero_()
        blocks = {(0, 0, 0, 1): (0, ends, 0), (0, 0, 1, 0): (0, ends, ends), (0, 1, 0, 1): (ends, own, 2 * ends)}
        for partition, (start, width, to) in blocks.items():
            weight = spread.weight[set_partitions(4).index(partition)]
            weight[start : start + width, to : to + width] = torch.eye(width).to(x)
        seen = cast("Hyperedges", spread(graph))
        sent = torch.where(edges[:, None], message(seen.values), 0)
        collect = EquivariantLinear(2, 1, sent.shape[1], sent.shape[1], bias=False, device=x.device, dtype=x.dtype)
        collect.weight.zero_()
        collect.weight[set_partitions(3).index((0, 1, 0))] = torch.eye(sent.shape[1]).to(x)
        nodes = torch.arange(x.shape[0], device=x.device)[:, None]
        return cast("Hyperedges", collect(seen.with_values(sent), to=nodes)).values


class _Counter(TorchDispatchMode):
    """Adds up what every operation does."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=result))
        elif not func.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.total += sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        return result


def operations(function: Callable[[], object]) -> int:
    """Count what a computation does on the CPU or elsewhere, without measuring time."""
    # Of products of matrices the floating-point operations by torch's own formulas; of every other operation that is
    # not a view, the numbers that it reads and writes. Attention is computed by its products, as fused kernels are not
    # counted on every device. A sort counts as its length, without its logarithm.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Counter() as counter:
        function()
    return counter.total


def degree(count: Callable[[int], int], least: int, most: int) -> int:
    """The degree of a count that is a polynomial in the size, by its differences."""
    # A slope between two sizes lies below the degree whatever it is, where the coefficients are positive; differences
    # of order p of a polynomial of degree p are constant, and those of order p + 1 are zero.
    values = [count(size) for size in range(least, least + most + 2)]
    found = 0
    while any(step := [after - before for before, after in pairwise(values)]):
        values, found = step, found + 1
    return found
