r"""Higher-order attention :math:`\mathrm{Attn}_{k \to l}`: one attention for each equivalence class, HOT eqs. 10-21.

.. math::
    \mathrm{Attn}_{k\to l}(A)_{\mathbf j} = \sum_{h} \sum_\mu \sum_{\mathbf i}
    \alpha^{h\mu}_{\mathbf i\mathbf j} A_{\mathbf i} w^V_{h\mu} w^O_{h\mu}

Dense tensors and hyperedges share parameters and equations; only the evaluator differs.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._autograd import eager, may_bypass
from holonomy._shapes import Bool, Float, Int
from holonomy.layers.equivariant.basis.orbits import Orbit, OutputPattern, free_axes, number_of_blocks, reads_entries
from holonomy.layers.equivariant.basis.partitions import Partition
from holonomy.layers.equivariant.higher_order import batched, centering
from holonomy.layers.equivariant.higher_order import dense as dense_attention
from holonomy.layers.equivariant.higher_order.maps import Maps, by_class, classes_of
from holonomy.layers.equivariant.linear import dense, sparse
from holonomy.layers.equivariant.linear.layer import EquivariantMap, check_dense
from holonomy.ops.heads import head_count
from holonomy.ops.performer import redraw
from holonomy.structures import HyperedgePlan, Hyperedges, joint

# Random features of a narrow head.
_FEWEST = 64


def _name(pattern: Partition) -> str:
    return "order" + "".join(map(str, pattern))


class HigherOrderAttention(nn.Module):
    r"""Self-attention from order-k to order-l tensors that commutes with permutations of the nodes: HOT eqs. 10-21.

    Each class :math:`\mu` of the equivariant linear map (HOT eq. 1) gets an attention of its own: its query is an entry
    of the output's pattern, its keys are the entries of the input's pattern that share exactly the nodes of :math:`\mu`
    with it. Queries and keys have as many axes as their patterns have blocks (HOT Prop. 1) and come from lightweight
    equivariant maps, of which only the classes matter that reach tuples of different nodes. Where the output determines
    the key, its weight is one, and there is neither query nor key. A query of order 0 is a learned vector. Keys have no
    bias, to which softmax is invariant.

    ===================  ==========================================================================================
    ``kernel``           attention weights
    ===================  ==========================================================================================
    ``"softmax"``        :math:`\mathrm{softmax}_{\mathbf i}(q_{\mathbf j} \cdot k_{\mathbf i} / \sqrt{d_Q})`, each row
                         less its own maximum; as many products as pairs of entries
    ``"performer"``      the same by positive random features, HOT eqs. 18-20; linear in entries
    ===================  ==========================================================================================

    Random features are applied to keys minus the mean of keys and queries of their graph
    (:mod:`holonomy.layers.equivariant.higher_order.centering`): softmax is invariant to this shift, and the error of
    the approximation is two to four times smaller in trained layers.

    ``sums="decoupled"`` is the approximation of HOT eq. 21: a query attends to all keys of the pattern, whether they
    share its nodes or not. The coupled sums are exact, and linear by inclusion and exclusion. Their weights are
    differences: where the keys of a query have less than about 1e-14 of the weight of all keys of the graph, no
    accuracy is left and the class contributes zero. They are computed in float64. On hyperedges, only classes without
    shared nodes are differences; the others are sums in the dtype of the features, and in float32 contribute zero below
    about 1e-19 of the weight of all keys at the shared nodes.

    On hyperedges, the queries and keys of all classes come out of one product each, of what the nodes of a tuple have
    of their own. Decoupled, all classes are pooled together, from :attr:`together_from` hyperedges a graph on in chunks
    of rows that stay in cache (:mod:`holonomy.ops.performer`): the cost of a hyperedge does not grow. Coupled, what
    keys and queries share is multiplied out in small blocks
    (:mod:`holonomy.layers.equivariant.higher_order.packing`).

    Args:
        order_in: k, at least 1.
        order_out: l, at least 0.
        features: d, of input and output.
        heads: number of heads.
        kernel: softmax or its linear approximation.
        query_features: :math:`d_Q` of a head, ``features // heads`` if left out.
        value_features: :math:`d_V` of a head, ``features // heads`` if left out.
        sums: performer only, see above.
        random_features: performer only, number of random features; twice ``query_features`` if left out, but at least
            64: the 16 of a head of width 8 take a third of the time and learn somewhat less.
        local: whether classes in which input and output share no node are left out.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: if an order or a number is out of range, or no class is left.

    >>> attention = HigherOrderAttention(2, 1, 8, 2)
    >>> attention(torch.randn(3, 5, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    projection: Tensor | None
    together_from: int = 2**9
    """Decoupled: hyperedges of a graph, on average, from which on graphs are pooled one after the other."""

    def __init__(
        self,
        order_in: int,
        order_out: int,
        features: int,
        heads: int,
        *,
        kernel: Literal["softmax", "performer"] = "softmax",
        query_features: int | None = None,
        value_features: int | None = None,
        sums: Literal["coupled", "decoupled"] = "coupled",
        random_features: int | None = None,
        local: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(local=local)
        checks.floating_dtype(dtype)
        self.order_in = checks.positive_int("order_in", order_in)
        self.order_out = checks.nonnegative_int("order_out", order_out)
        self.features = checks.positive_int("features", features)
        self.heads = checks.positive_int("heads", heads)
        self.kernel = checks.one_of("kernel", kernel, ("softmax", "performer"))
        self.sums = checks.one_of("sums", sums, ("coupled", "decoupled"))
        if query_features is None or value_features is None:
            head_count(features, heads)
        if kernel == "softmax" and random_features is not None:
            raise ValueError(f"random_features must be None for the softmax kernel, got {random_features}.")
        if kernel == "softmax" and sums != "coupled":
            raise ValueError(f"sums must be 'coupled' for the softmax kernel, got {sums!r}.")
        share = features // heads
        self.query_features = checks.positive_int("query_features", share if query_features is None else query_features)
        self.value_features = checks.positive_int("value_features", share if value_features is None else value_features)
        self.classes = classes_of(order_in, order_out, local=local, coupled=sums == "coupled")
        if not self.classes.orbits:
            raise ValueError(f"local must be False for order_out = {order_out}: every class of it is global.")
        number, width = len(self.classes.orbits), heads * self.value_features
        self.value = nn.Parameter(torch.empty(number, features, width, device=device, dtype=dtype))
        ends = self.classes.by_input, self.classes.by_output
        keys, queries = ({p: len(found) for p, found in end.items()} for end in ends)
        self.query = nn.ModuleDict({_name(p): self._map(p, count, bias=True) for p, count in queries.items() if p})
        self.key = nn.ModuleDict({_name(p): self._map(p, count, bias=False) for p, count in keys.items()})
        constant = self.value.new_empty(queries.get((), 0) * heads * self.query_features)
        self.constant_query = nn.Parameter(constant) if order_out == 0 else None
        self.out = nn.Parameter(torch.empty(number, width, features, device=device, dtype=dtype))
        self.register_buffer("projection", None)
        if kernel == "performer":
            number = max(_FEWEST, 2 * self.query_features) if random_features is None else random_features
            shape = (checks.positive_int("random_features", number), self.query_features)
            self.register_buffer("projection", self.value.new_empty(shape))
        self.reset_parameters()

    def _map(self, pattern: Partition, classes: int, *, bias: bool) -> EquivariantMap:
        """A lightweight map to the stratum of a pattern: one entry for each tuple of different nodes, HOT Prop. 1."""
        return EquivariantMap(
            self.order_in,
            number_of_blocks(pattern),
            self.features,
            classes * self.heads * self.query_features,
            choose=reads_entries,
            bias=bias,
            device=self.value.device,
            dtype=self.value.dtype,
        )

    def reset_parameters(self) -> None:
        """Draw the values' and outputs' weights anew, such that a sum over the classes of a pattern has variance one.

        Queries of order 0 are drawn from the normal distribution, as they have no input; random features as by
        :meth:`redraw`.
        """
        self.redraw()
        with torch.no_grad():
            self.value.normal_(std=1 / math.sqrt(self.features))
            patterns = [orbit.writes.pattern for orbit in self.classes.orbits]
            for weight, pattern in zip(self.out, patterns, strict=True):
                alike = patterns.count(pattern)
                weight.normal_(std=1 / math.sqrt(alike * weight.shape[0]))
            if self.constant_query is not None:
                self.constant_query.normal_()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw other random features, by torch's seeded state by default; none where the kernel is ``"softmax"``."""
        redraw(self.projection, generator)

    def maps(self) -> Maps:
        """The matrices of all classes, for evaluators that take all together."""
        keys = {p: self._matrix(self.key, p) for p in self.classes.by_input}
        if self.constant_query is not None:
            nothing = torch.zeros_like(self.constant_query)
            queries = dict.fromkeys(self.classes.by_output, (self.constant_query[None], nothing))
        else:
            biases = {p: cast("Tensor", self.query[_name(p)].bias)[0] for p in self.classes.by_output}
            queries = {p: (self._matrix(self.query, p), bias) for p, bias in biases.items()}
        return Maps(self.value, self.out, keys, queries, self.heads, cast("Tensor", self.projection))

    @staticmethod
    def _matrix(end: nn.ModuleDict, pattern: Partition) -> Tensor:
        return cast("Tensor", end[_name(pattern)].weight).flatten(0, 1)

    def forward(
        self,
        x: Float[Tensor, "..."] | Hyperedges,
        mask: Bool[Tensor, "*batch nodes"] | None = None,
        *,
        support: Bool[Tensor, "..."] | None = None,
        to: Int[Tensor, "tuples order_out"] | None = None,
    ) -> Float[Tensor, "..."] | Hyperedges:
        """Attend.

        Arguments, result and errors are those of :meth:`holonomy.layers.EquivariantLinear.forward`. ``support``, dense
        only, is ``(*batch, n, .., n)``, ``True`` at the hyperedges that are there; others count as zero and are no keys
        (HOT eq. 17).
        """
        if isinstance(x, Hyperedges):
            if mask is not None or support is not None:
                raise ValueError("mask and support must be None for hyperedges, which list what is there.")
            return self._sparse(x, to)
        if to is not None:
            raise ValueError("to must be None for a dense tensor, whose result has every tuple.")
        return self._dense(x, mask, support)

    def _dense(self, x: Tensor, mask: Tensor | None, support: Tensor | None) -> Tensor:
        check_dense(x, self.order_in, self.features, mask, next(iter(self.key.values())) if self.key else None)
        nodes, batch = x.shape[-2], x.shape[: x.ndim - 1 - self.order_in]
        if nodes == 0:
            # No key and no row, or rows of zeros; the sum of nothing gives every parameter a gradient, zero.
            nothing = x.sum() + sum(parameter[:0].sum() for parameter in self.parameters())
            return x.new_zeros(*batch, *[0] * self.order_out, self.features) + nothing
        present = None if mask is None else joint(mask, self.order_in)
        if support is not None:
            checks.boolean("support", support, x.shape[:-1], "hyperedges", "(*batch, n, .., n) = ")
            present = support if present is None else present & support
        if present is not None:
            x = torch.where(present[..., None], x, 0)
        ins, outs = self.classes.by_input, self.classes.by_output
        if self.constant_query is not None:
            queries = by_class(dict.fromkeys(outs, self.constant_query.expand(*batch, -1)), outs)
        else:
            queries = by_class({p: self.query[_name(p)](x) for p in outs}, outs)
        keys = by_class({p: self.key[_name(p)](x) for p in ins}, ins)
        if self.projection is not None:
            means = centering.of_dense(x, self.classes.entries, present)
            for orbit, shift in centering.of_classes(self.classes, self.maps(), means).items():
                keys[orbit] = keys[orbit] - shift.unflatten(-1, (*[1] * number_of_blocks(orbit.reads.pattern), -1))
        sums: dict[Partition, Tensor] = {}
        for index, orbit in enumerate(self.classes.orbits):
            pattern = orbit.reads.pattern
            valid = dense_attention.different(nodes, number_of_blocks(pattern), x.device)
            if present is not None:
                valid = valid & dense.diagonal(present[..., None], pattern).squeeze(-1)
            value = dense.diagonal(x, pattern) @ self.value[index]
            value = value * valid[..., None].to(value.dtype)
            mixed = self._attend_dense(
                orbit, queries, keys, value, valid.expand(*batch, *valid.shape[-len(set(pattern)) :])
            )
            placed = mixed @ self.out[index]
            target = orbit.writes.pattern
            sums[target] = sums[target] + placed if target in sums else placed
        parts: list[tuple[OutputPattern, Tensor]] = []
        for pattern, total in sums.items():
            blocks = number_of_blocks(pattern)
            apart = dense_attention.different(nodes, blocks, x.device)[..., None].to(total.dtype)
            parts.append((OutputPattern(pattern, tuple(range(blocks))), total * apart))
        result = dense.spread(parts, self.order_out, nodes)
        if mask is not None and self.order_out:
            result = torch.where(joint(mask, self.order_out)[..., None], result, 0)
        return result

    def _attend_dense(
        self, orbit: Orbit, queries: dict[Orbit, Tensor], keys: dict[Orbit, Tensor], value: Tensor, valid: Tensor
    ) -> Tensor:
        """The mixed values of a class on the stratum of the output, heads side by side."""
        nodes = value.shape[-2]
        if not free_axes(orbit)[0]:
            return dense.place(value, orbit.writes.places, number_of_blocks(orbit.writes.pattern))
        query, key = queries[orbit], keys[orbit]
        if self.projection is None:
            mixed = dense_attention.softmax_class(orbit, query, key, value, valid, self.heads)
            return dense_attention.settle(mixed, orbit, nodes)
        return dense_attention.kernel_class(
            orbit, query, key, value, valid, self.heads, self.projection, self.classes.terms[orbit]
        )

    @eager
    def _sparse(self, x: Hyperedges, to: Tensor | None) -> Hyperedges:
        """All classes together: the keys of a pattern are one product, and so are its queries."""
        sparse.check_hyperedges(x, self.order_in, self.features, self)
        wanted = sparse.targets(x, to, self.order_out)
        maps, ends = self.maps(), batched.both_ends(self.classes, x, wanted)
        many = x.num_graphs > 0 and max(x.indices.shape[0], ends.rows) >= self.together_from * x.num_graphs
        by_weight = all(may_bypass(end, EquivariantMap) for end in (*self.query.values(), *self.key.values()))
        decoupled = self.sums == "decoupled"
        if decoupled and many and by_weight:
            return x.at(wanted.indices, batched.pooled(self.classes, maps, x, ends))
        if by_weight:
            keys = {p: ends.inputs[p].entries @ weight for p, weight in maps.keys.items()}
        else:
            keys = {p: self._at(self.key[_name(p)], x, ends.inputs[p].plan.tuples) for p in maps.keys}
        if by_weight or self.constant_query is not None:
            queries = {p: ends.outputs[p].entries @ weight + bias for p, (weight, bias) in maps.queries.items()}
        else:
            queries = {p: self._at(self.query[_name(p)], x, ends.outputs[p].plan.tuples) for p in maps.queries}
        if decoupled:
            return x.at(wanted.indices, batched.decoupled(self.classes, maps, x, ends, keys, queries))
        softmax = self.projection is None
        return x.at(wanted.indices, batched.coupled(self.classes, maps, x, ends, keys, queries, softmax=softmax))

    @staticmethod
    def _at(module: nn.Module, x: Hyperedges, where: HyperedgePlan) -> Tensor:
        return cast("Hyperedges", module(x, to=where.indices)).values

    def extra_repr(self) -> str:
        """Orders, heads and number of classes, for ``repr``."""
        orders = f"{self.order_in} -> {self.order_out}, features={self.features}, heads={self.heads}"
        return f"{orders}, kernel={self.kernel!r}, classes={len(self.classes.orbits)}"
