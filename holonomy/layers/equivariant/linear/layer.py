r"""Equivariant linear maps :math:`L_{k \to l}` of any orders: HOT eqs. 1-2 and 14-15, TokenGT definition 2.

.. math::
    L_{k \to l}(A)_{\mathbf j} = \sum_\mu \sum_{\mathbf i} B^\mu_{\mathbf i\mathbf j} A_{\mathbf i} w_\mu
    + \sum_\lambda C^\lambda_{\mathbf j} b_\lambda

The parameters belong to the papers' basis of exact equality patterns. They are turned into weights of the diagram basis
(:mod:`~holonomy.layers.equivariant.basis.partitions`), in which a class is a diagonal, a sum, a product and a
broadcast: the cost is that of the input and of the output, never :math:`n^{k+l}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from holonomy import _autograd, checks
from holonomy._autograd import eager
from holonomy._shapes import Bool, Float, Int, Int64
from holonomy.layers.equivariant.basis.orbits import Orbit, OrbitGroup, OutputPattern, groups, number_of_blocks, orbits
from holonomy.layers.equivariant.basis.partitions import bell, moebius_matrix, set_partitions
from holonomy.layers.equivariant.basis.recomputed import RecomputedBuffers
from holonomy.layers.equivariant.linear import dense, sparse
from holonomy.structures import Hyperedges, joint

# Of orders 5 and 4 the matrix between the two bases has 3.6 GB, of 5 and 5 it has 100.
_MOST_ORDERS = 8
# Sums over nodes are initialised as if a graph had this many, the largest that the variance is kept for: at most half
# of the variance of a result comes from sums then, and at fewer nodes less.
_NODES_AT_INIT = 500
# A map to order 0 has nothing but sums; theirs is kept in the middle, on a logarithmic scale, of 5 .. 500.
_NODES_AT_INIT_INVARIANT = 50


def _conversion(order_in: int, order_out: int, chosen: tuple[int, ...]) -> Int64[Tensor, "classes diagrams"]:
    """From the chosen classes to the diagrams that their weights go to, group by group."""
    diagrams = [index for group in groups(order_in, order_out, chosen) for row in group.classes for index in row]
    return moebius_matrix(order_in + order_out)[list(chosen)][:, diagrams]


def check_dense(x: Tensor, order: int, features: int, mask: Tensor | None, layer: nn.Module | None = None) -> None:
    """Refuse a dense tensor that is no order-k tensor of so many features, or a mask that does not fit it."""
    checks.floating("x", x)
    checks.dense("x", x)
    nodes = x.shape[-order - 1 : -1] if order else ()
    if x.ndim <= order or x.shape[-1] != features or any(count != x.shape[-2] for count in nodes):
        wanted = ", ".join(["*batch", *["nodes"] * order, f"features = {features}"])
        raise ValueError(f"x must have shape ({wanted}), got {tuple(x.shape)}.")
    checks.last_axis("x", x, features, "features", layer)
    if mask is not None:
        checks.node_mask(mask, x.shape[: x.ndim - order] if order else mask.shape)


class EquivariantMap(RecomputedBuffers):
    """A linear combination of chosen classes. :class:`EquivariantLinear` is that of all, or of the lightweight ones."""

    conversion: Tensor

    def __init__(
        self,
        order_in: int,
        order_out: int,
        in_features: int,
        out_features: int,
        *,
        choose: Callable[[Orbit], bool],
        bias: bool = True,
        normalise: Literal["counts"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.nonnegative_int("order_in", order_in)
        checks.nonnegative_int("order_out", order_out)
        if order_in + order_out > _MOST_ORDERS:
            came = f"{order_in} + {order_out}, which has {bell(order_in + order_out)} classes"
            raise ValueError(f"order_in + order_out must be at most {_MOST_ORDERS}, got {came}.")
        if normalise is not None:
            checks.one_of("normalise", normalise, ("counts",))
        self.order_in, self.order_out, self.normalise = order_in, order_out, normalise
        self.in_features = checks.positive_int("in_features", in_features)
        self.out_features = checks.positive_int("out_features", out_features)
        every = orbits(order_in, order_out)
        self.chosen = chosen = tuple(index for index, orbit in enumerate(every) if choose(orbit))
        self.orbits = tuple(every[index] for index in chosen)
        self.groups: tuple[OrbitGroup, ...] = groups(order_in, order_out, chosen)
        reached = {orbit.writes.pattern for orbit in self.orbits}
        rows = [row for row, pattern in enumerate(set_partitions(order_out)) if pattern in reached]
        self.patterns = tuple(set_partitions(order_out)[row] for row in rows)
        self.weight = nn.Parameter(torch.empty(len(chosen), in_features, out_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(len(rows), out_features, device=device, dtype=dtype)) if bias else None
        self.counts = sorted({_count_of(orbit) for orbit in self.orbits})
        for name, matrix in self._recomputed().items():
            self.register_buffer(name, matrix.to(self.weight), persistent=False)
        self.reset_parameters()

    def _recomputed(self) -> dict[str, Tensor]:
        partitions = set_partitions(self.order_out)
        rows = [partitions.index(pattern) for pattern in self.patterns]
        return {"conversion": self._conversion(), "bias_conversion": moebius_matrix(self.order_out)[rows][:, rows]}

    def _conversion(self) -> Tensor:
        """Classes with as many terms each; then the class, and the diagram that its weight goes to, group by group."""
        matrix = _conversion(self.order_in, self.order_out, self.chosen)
        if self.normalise is None:
            return matrix[None]
        of_pair = [_count_of(orbit) for orbit in self.orbits]
        return torch.stack(
            [matrix * matrix.new_tensor([c == count for c in of_pair])[:, None] for count in self.counts]
        )

    def reset_parameters(self) -> None:
        """Draw the weights anew, such that independent inputs of variance one give results of variance near one.

        At n = 500 sums have half of the variance, at fewer nodes less; a map to order 0, which has nothing but sums,
        keeps it at n = 50. With ``normalise="counts"`` the means are drawn for the same numbers of nodes.
        """
        nodes = _NODES_AT_INIT if self.order_out else _NODES_AT_INIT_INVARIANT
        local = {p: sum(q.writes.pattern == p and not _summed(q) for q in self.orbits) for p in self.patterns}
        sums = {p: sum(q.writes.pattern == p and _summed(q) > 0 for q in self.orbits) for p in self.patterns}
        with torch.no_grad():
            for rank, orbit in enumerate(self.orbits):
                pattern, terms = orbit.writes.pattern, nodes ** _summed(orbit)
                alike = sums[pattern] if _summed(orbit) else local[pattern]
                share = alike * (2 if sums[pattern] and local[pattern] else 1)
                scale = terms if self.normalise else 1 / terms
                if self.normalise and self.order_out:
                    scale = 1.0
                self.weight[rank].normal_(std=math.sqrt(scale / (share * self.in_features)))
            if self.bias is not None:
                self.bias.zero_()

    def _weights(self) -> list[Float[Tensor, "counts sources targets dim_in dim_out"]]:
        """The weights of the diagram basis, one tensor a group, in float32 at least: their gradients are larger."""
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        with torch.autocast(_autograd.autocast_device(weight), enabled=False):
            diagram = torch.einsum("fsp,sde->fpde", self.conversion.to(weight.dtype), weight)
        shapes = [(len(group.inputs), len(group.outputs)) for group in self.groups]
        parts = diagram.split([math.prod(shape) for shape in shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    def _multiply(
        self,
        table: Float[Tensor, "*slots sources dim_in"],
        weight: Float[Tensor, "counts sources targets dim_in dim_out"],
        scale: Float[Tensor, "*#slots counts"] | None,
    ) -> Float[Tensor, "*slots targets dim_out"]:
        counts, _, targets = weight.shape[:3]
        matrix = weight.permute(1, 3, 0, 2, 4).reshape(-1, counts * targets * self.out_features)
        shape = counts, targets, self.out_features
        if scale is None:
            return (table.flatten(-2) @ matrix.to(table.dtype)).unflatten(-1, shape)[..., 0, :, :]
        # The sum of many terms may leave the range of float16 before it is divided.
        with torch.autocast(_autograd.autocast_device(table), enabled=False):
            product = (table.flatten(-2) @ matrix.to(table.dtype)).unflatten(-1, shape)
            return (product * scale.to(table.dtype)[..., None, None]).sum(-3)

    def _widened(self, x: Float[Tensor, "... dim"]) -> tuple[Float[Tensor, "... dim"], torch.dtype]:
        """Features in float32 at least, in which sums are taken, and the dtype that a product with them has."""
        product = x.new_zeros(0, self.in_features) @ self.weight[0]
        return x.to(torch.promote_types(x.dtype, torch.float32)), product.dtype

    def _scale(self, sizes: Tensor) -> Tensor | None:
        """One over the number of terms of a class in graphs of these sizes, zero where there is none."""
        if self.normalise is None:
            return None
        columns: list[Tensor] = []
        for summed, taken in self.counts:
            steps = [(sizes - taken - step).clamp_min(0) for step in range(summed)]
            columns.append(torch.stack([torch.ones_like(sizes), *steps]).prod(0))
        terms = torch.stack(columns, -1)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return torch.where(terms > 0, 1 / terms.clamp_min(1).to(wide), 0)

    def _biases(self) -> Sequence[tuple[int, Tensor]]:
        if self.bias is None:
            return ()
        matrix = cast("Tensor", self.bias_conversion)
        return tuple(enumerate(matrix.t() @ self.bias))

    def forward(
        self,
        x: Float[Tensor, "..."] | Hyperedges,
        mask: Bool[Tensor, "*batch nodes"] | None = None,
        *,
        to: Int[Tensor, "tuples order_out"] | None = None,
    ) -> Float[Tensor, "..."] | Hyperedges:
        """Map a dense tensor or hyperedges.

        Args:
            x: dense ``(*batch, n, .., n, in_features)``, or hyperedges of order k.
            mask: dense only: ``(*batch, n)``, ``True`` at nodes. What padding holds has no effect, and the result is
                zero there.
            to: hyperedges only: ``(m', l)`` tuples of the result; by default the same hyperedges if k = l, else all
                tuples inside one of them (HOT section 4.2).

        Returns:
            Dense ``(*batch, n, .., n, out_features)``, or hyperedges of order l (order 0: one row a graph).

        Raises:
            ValueError: if shapes do not fit, or ``mask`` or ``to`` comes with the other kind of input.
        """
        if isinstance(x, Hyperedges):
            if mask is not None:
                raise ValueError("mask must be None for hyperedges, which have no padding.")
            return self._sparse(x, to)
        if to is not None:
            raise ValueError("to must be None for a dense tensor, whose result has every tuple.")
        return self._dense(x, mask)

    def _dense(self, x: Tensor, mask: Tensor | None) -> Tensor:
        check_dense(x, self.order_in, self.in_features, mask, self)
        if self.order_in == 0 and self.order_out > 0 and mask is None:
            raise ValueError("mask must be given for a map from order 0: nothing else says how many nodes there are.")
        if mask is not None and self.order_in > 0:
            x = torch.where(joint(mask, self.order_in)[..., None], x, 0)
        x, kind = self._widened(x)
        batch = x.shape[: x.ndim - 1 - self.order_in]
        nodes = x.shape[-2] if self.order_in else (0 if mask is None else mask.shape[-1])
        if self.normalise is None and self.order_in > 0:
            biases = [(self.patterns[index], row.to(x.dtype)) for index, row in self._biases()]
            weights = [weight.squeeze(0).to(x.dtype) for weight in self._weights()]
            result = dense.combine(x, weights, self.groups, self.order_out, biases)
        else:
            result = self._scaled(x, mask, batch, nodes)
        if mask is not None and self.order_out:
            result = torch.where(joint(mask, self.order_out)[..., None], result, 0)
        return result.to(kind)

    def _scaled(self, x: Tensor, mask: Tensor | None, batch: tuple[int, ...], nodes: int) -> Tensor:
        """The sums of each class divided by their number of terms, or broadcast from order 0."""
        parts: list[tuple[OutputPattern, Tensor]] = []
        scale = self._scale(x.new_full(batch, nodes, dtype=torch.int64) if mask is None else mask.sum(-1))
        for group, weight in zip(self.groups, self._weights(), strict=True):
            table = torch.stack(dense.reduce(x, group.inputs), -2)
            broadcast = None if scale is None else scale.reshape(*batch, *[1] * group.order, scale.shape[-1])
            product = self._multiply(table, weight, broadcast)
            parts += zip(group.outputs, product.unbind(-2), strict=True)
        for index, row in self._biases():
            parts.append((OutputPattern(self.patterns[index], ()), row.to(parts[0][1].dtype)))
        return dense.spread(parts, self.order_out, nodes)

    @eager
    def _sparse(self, x: Hyperedges, to: Tensor | None) -> Hyperedges:
        sparse.check_hyperedges(x, self.order_in, self.in_features, self)
        wanted = sparse.targets(x, to, self.order_out)
        tuples = wanted.indices.shape[0]
        plans = sparse.pruned_plans(x.plan, wanted, self.groups)
        scale = self._scale(torch.bincount(x.batch, minlength=x.num_graphs))
        values, kind = self._widened(x.values)
        result = values.new_zeros(tuples, self.out_features)
        for (plan, inputs, outputs), every in zip(plans, self._weights(), strict=True):
            if not inputs or not outputs:
                continue
            whole = (len(inputs), len(outputs)) == every.shape[1:3]
            weight = every if whole else every[:, inputs][:, :, outputs]
            table = sparse.collect(values, plan)
            if scale is None and plan.size > tuples // 2 and table.shape[1] * self.in_features < self.out_features:
                # About a slot a tuple, and narrow: looked up before the product, which is then added in place.
                for column, slots in enumerate(plan.outputs):
                    matrix = weight[0, :, column].flatten(0, 1).to(table.dtype)
                    result = slots.added(result, table.flatten(1).index_select(0, slots.slots) @ matrix)
            else:
                product = self._multiply(table, weight, None if scale is None else scale[plan.graphs])
                result = sparse.distribute(product, plan, result)
        for index, row in self._biases():
            fits = sparse.in_pattern(wanted.indices, self.patterns[index], exactly=False)
            result = result + fits[:, None].to(result.dtype) * row.to(result.dtype)
        return x.at(wanted.indices, result.to(kind))

    def extra_repr(self) -> str:
        """Orders, widths and number of classes, for ``repr``."""
        sizes = f"{self.order_in} -> {self.order_out}, {self.in_features} -> {self.out_features}"
        return f"{sizes}, classes={len(self.orbits)}, normalise={self.normalise!r}"


def _summed(orbit: Orbit) -> int:
    """How many blocks of the input a class sums over."""
    return number_of_blocks(orbit.reads.pattern) - len(orbit.reads.kept)


def _count_of(orbit: Orbit) -> tuple[int, int]:
    """What the number of terms of a class follows from: blocks summed over, and blocks of the output they avoid."""
    return _summed(orbit), number_of_blocks(orbit.writes.pattern)


class EquivariantLinear(EquivariantMap):
    r"""The general linear map of order-k to order-l tensors that commutes with permutations of nodes: HOT eqs. 1-2.

    The weights are ``(bell(k + l), in_features, out_features)`` and the biases ``(bell(l), out_features)``, in
    lexicographic order of restricted growth strings over the positions :math:`(i_1 .. i_k, j_1 .. j_l)`, in the
    orthogonal basis of exact equality patterns. l = 0 is the invariant map. With ``lightweight=True`` only the classes
    without a sum over inputs take part (HOT Prop. 2, eq. 14); a map to order 0 has none of these.

    Dense tensors and :class:`~holonomy.structures.Hyperedges` give the same result with the same ``state_dict``: a
    hyperedge that is not listed counts as zero (HOT eq. 15).

    Sums are exact up to the rounding of the dtype relative to the sum of all terms' sizes: a class that sums over
    "all others" is computed as a total minus what is excluded.

    Args:
        order_in: k, at least 0.
        order_out: l, at least 0.
        in_features: d.
        out_features: d'.
        bias: whether there are biases.
        lightweight: whether classes that sum over inputs are left out.
        normalise: ``"counts"`` divides the sum of each class by its number of terms in a graph of that size, so that
            results do not grow with n; by default sums are sums, as in the papers.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: if an order is negative, both together are more than 8, or lightweight leaves no class.

    >>> layer = EquivariantLinear(2, 1, 3, 4)
    >>> layer.weight.shape, layer.bias.shape, layer(torch.ones(8, 5, 5, 3)).shape
    (torch.Size([5, 3, 4]), torch.Size([1, 4]), torch.Size([8, 5, 4]))
    """

    def __init__(
        self,
        order_in: int,
        order_out: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        lightweight: bool = False,
        normalise: Literal["counts"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.floating_dtype(dtype)
        checks.nonnegative_int("order_in", order_in)
        checks.nonnegative_int("order_out", order_out)
        if lightweight and order_in > 0 and order_out == 0:
            raise ValueError("lightweight must be False for a map to order 0: every class of it sums over inputs.")
        super().__init__(
            order_in,
            order_out,
            in_features,
            out_features,
            choose=(lambda orbit: not _summed(orbit)) if lightweight else (lambda _: True),
            bias=bias,
            normalise=normalise,
            device=device,
            dtype=dtype,
        )
        checks.flags(bias=bias, lightweight=lightweight)
        self.lightweight = lightweight
