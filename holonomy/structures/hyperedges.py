"""Padded sets and graphs, hypergraphs as lists of node tuples, and the ways between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
from torch import Tensor

from holonomy import checks
from holonomy._autograd import eager

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

__all__ = ["Hyperedges", "PaddedGraphs", "batches_by_size", "join_graphs", "joint", "on_features"]


@dataclass(frozen=True)
class PaddedGraphs:
    """The nodes of several graphs, one graph a row, filled up with padding.

    Attributes:
        values: ``(graphs, nodes, features)``, zero at padding.
        padding: ``(graphs, nodes)``, ``True`` where there is no node: a ``key_padding_mask``.
        slots: ``(n,)``, the place of each node in the flattened first two axes.

    >>> graphs = PaddedGraphs.of(torch.ones(3, 2), torch.tensor([0, 1, 0]))
    >>> graphs.values.shape, graphs.slots.tolist()
    (torch.Size([2, 2, 2]), [0, 2, 1])
    """

    values: Float[Tensor, "graphs nodes features"]
    padding: Bool[Tensor, "graphs nodes"]
    slots: Int[Tensor, " n"]

    @staticmethod
    def of(x: Float[Tensor, "n features"], batch: Int[Tensor, " n"], num_graphs: int | None = None) -> PaddedGraphs:
        """Lay the rows of ``x`` out by graph; nodes of one graph keep their order and need not be neighbours.

        Args:
            x: node features ``(n, features)``.
            batch: the graph of each node ``(n,)``, numbered from zero, as in PyTorch Geometric.
            num_graphs: their number, where some at the end have no node.

        Returns:
            The padded graphs; a number that no node bears is an empty graph.

        Raises:
            ValueError: if ``x`` is not a row a node, ``batch`` has not one entry a node, or numbers more graphs.

        >>> graphs = PaddedGraphs.of(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 0]))
        >>> graphs.values.squeeze(-1).tolist(), graphs.padding.tolist()
        ([[1.0, 3.0], [2.0, 0.0]], [[False, False], [False, True]])
        """
        checks.matrix("x", x, "n", "features")
        checks.membership(batch, x.shape[0])
        batch = batch.long()
        graphs = checks.number_of_graphs(batch, num_graphs)
        sizes = torch.bincount(batch, minlength=graphs)
        widest = int(sizes.max()) if batch.numel() else 0
        slots = batch * widest + _place_in_graph(batch, sizes)
        padding = torch.ones(graphs * widest, dtype=torch.bool, device=x.device)
        padding[slots] = False
        values = x.new_zeros(graphs * widest, x.shape[-1]).index_copy(0, slots, x)
        return PaddedGraphs(values.unflatten(0, (graphs, widest)), padding.unflatten(0, (graphs, widest)), slots)

    def rows(self, values: Float[Tensor, "graphs nodes features"]) -> Float[Tensor, "n features"]:
        """Padded values back as rows, in the order of the nodes that came.

        Args:
            values: ``(graphs, nodes, features)`` in the layout of this object.

        Returns:
            Rows ``(n, features)``.

        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> graphs = PaddedGraphs.of(x, torch.tensor([0, 1, 0]))
        >>> torch.equal(graphs.rows(graphs.values), x)
        True
        """
        return values.flatten(0, 1)[self.slots]

    def pairs(self, rows: Shaped[Tensor, " pairs *features"]) -> Shaped[Tensor, " graphs nodes nodes *features"]:
        """Lay out what is known of each pair of nodes of a graph, with zeros where there is padding.

        Args:
            rows: ``(pairs, ...)``: graph after graph, a row for each pair (i, j) of its nodes, j running faster. An
                ``(n, n, ...)`` tensor of each graph, its first two axes flattened, concatenated.

        Returns:
            ``(graphs, nodes, nodes, ...)``.

        Raises:
            ValueError: if there is not one row a pair.

        >>> graphs = PaddedGraphs.of(torch.ones(3, 1), torch.tensor([0, 1, 1]))
        >>> graphs.pairs(torch.arange(1, 6)).tolist()
        [[[1, 0], [0, 0]], [[2, 3], [4, 5]]]
        """
        there = joint(~self.padding, 2)
        where = there.flatten().nonzero().squeeze(1)
        if rows.shape[0] != where.shape[0]:
            raise ValueError(f"rows must be one for each of the {where.shape[0]} pairs, got {rows.shape[0]}.")
        laid_out = rows.new_zeros(there.numel(), *rows.shape[1:]).index_copy(0, where, rows)
        return laid_out.unflatten(0, there.shape)


# Plans that hyperedges keep, the oldest making room: a few models' worth, so that those who ask the same hyperedges
# for ever new tuples do not fill the memory.
_PLANS = 256


def _changes(*tensors: Tensor) -> tuple[int, ...] | None:
    """How often torch has changed tensors in place; None where one is of inference mode, in which nobody counts."""
    return None if any(x.is_inference() for x in tensors) else tuple(x._version for x in tensors)


class _Plans:
    """What was computed for hyperedges, and how often their tensors had been changed before.

    It is no dict: sharding looks for tensors in the dicts of what a module returns, and plans refer to one another.
    """

    def __init__(self, indices: Tensor, batch: Tensor) -> None:
        self.changes = _changes(indices, batch)
        self.found: dict[Hashable, tuple[tuple[Tensor, ...], Any]] = {}


@dataclass(frozen=True, eq=False)
class Hyperedges:
    """The hyperedges of one or several hypergraphs with a feature vector each: a sparse order-k tensor.

    A hyperedge of order k is k nodes, the same ones in another order being another hyperedge. Order 2 are the
    entries of an adjacency matrix: a graph has its node features at the loops (v, v) and its edge features at
    (u, v), listed in both directions. Order 0 is one row a graph.

    Where layers look for a hyperedge's neighbours is planned once and kept. ``indices`` and ``batch`` must therefore
    stay as they are: layers refuse hyperedges whose tensors were changed in place.

    Attributes:
        indices: ``(m, k)`` nodes of each hyperedge, in any order, none twice.
        values: ``(m, features)``.
        num_nodes: n, of all graphs together.
        batch: ``(n,)``, the graph of each node, numbered from zero; one graph where it is not given.
        num_graphs: their number, where some at the end have no node.

    Raises:
        TypeError: if indices are not int64.
        ValueError: if shapes do not fit, an index is out of range, a hyperedge is listed twice or joins two graphs.

    >>> edges = Hyperedges(torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 3), num_nodes=2)
    >>> edges.order, edges.to_dense()[0].shape
    (2, torch.Size([1, 2, 2, 3]))
    """

    indices: Int[Tensor, "edges order"]
    values: Float[Tensor, "edges features"]
    num_nodes: int
    batch: Int[Tensor, " nodes"] | None = None
    num_graphs: int = 0
    _plans: _Plans = field(init=False, repr=False)

    def __post_init__(self) -> None:
        checks.integers("indices", self.indices)
        checks.floating("values", self.values)
        checks.nonnegative_int("num_nodes", self.num_nodes)
        checks.nonnegative_int("num_graphs", self.num_graphs)
        if self.batch is not None:
            checks.membership(self.batch, self.num_nodes)
        batch = self.indices.new_zeros(self.num_nodes) if self.batch is None else self.batch.long()
        graphs = checks.number_of_graphs(self.batch, self.num_graphs or None)
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "num_graphs", max(graphs, 1))
        object.__setattr__(self, "_plans", _Plans(self.indices, batch))
        _check_indices(self.indices, self.num_nodes, batch, self.num_graphs)
        if self.values.ndim != 2 or self.values.shape[0] != self.indices.shape[0]:
            raise ValueError(
                f"values must have shape (edges = {self.indices.shape[0]}, features), got {tuple(self.values.shape)}."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_plans"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Plans are found by the ids of tuples, which are those of others in a copy and in another process.
        self.__dict__.update(state, _plans=_Plans(state["indices"], state["batch"]))

    def _replaced(self, **tensors: Tensor) -> Hyperedges:
        """The same with other tensors, unchecked; plans stay where only the features are others."""
        other = object.__new__(Hyperedges)
        other.__dict__.update(self.__dict__, **tensors)
        if tensors.keys() != {"values"}:
            other.__dict__["_plans"] = _Plans(other.indices, other.membership)
        return other

    @property
    def order(self) -> int:
        """How many nodes a hyperedge has."""
        return self.indices.shape[1]

    @property
    def membership(self) -> Int[Tensor, " nodes"]:
        """The graph of each node: ``batch``, which is never None once the hyperedges are made."""
        return cast("Tensor", self.batch)

    @property
    def graphs(self) -> Int[Tensor, " edges"]:
        """The graph of each hyperedge."""
        return self.graphs_of(self.indices)

    def graphs_of(self, indices: Int[Tensor, "tuples order"]) -> Int[Tensor, " tuples"]:
        """The graph of each tuple of nodes; the graphs themselves for order 0.

        Args:
            indices: ``(m, k)`` nodes.

        Returns:
            ``(m,)`` graphs.

        >>> edges = Hyperedges(torch.tensor([[0], [1]]), torch.ones(2, 1), 2, torch.tensor([0, 1]))
        >>> edges.graphs_of(torch.tensor([[1, 1]]))
        tensor([1])
        """
        if indices.shape[1] == 0:
            return torch.arange(self.num_graphs, device=indices.device)
        return self.membership[indices[:, 0]]

    def with_values(self, values: Float[Tensor, "edges dim"]) -> Hyperedges:
        """The same hyperedges with other features; nothing is checked again, and what was planned for them stays.

        Args:
            values: ``(m, features)``.

        Returns:
            The hyperedges.

        >>> edges = Hyperedges(torch.tensor([[0], [1]]), torch.ones(2, 1), 2)
        >>> edges.with_values(torch.zeros(2, 4)).values.shape
        torch.Size([2, 4])
        """
        return self._replaced(values=values)

    def at(self, indices: Int[Tensor, "tuples order"], values: Float[Tensor, "tuples dim"]) -> Hyperedges:
        """Other tuples of the same nodes; nothing is checked, and what is planned for them stays with these ones.

        Args:
            indices: ``(m', l)`` nodes, none twice.
            values: ``(m', features)``.

        Returns:
            The hyperedges.

        >>> edges = Hyperedges(torch.tensor([[0], [1]]), torch.ones(2, 1), 2)
        >>> edges.at(torch.tensor([[0, 1]]), torch.ones(1, 1)).order
        2
        """
        other = self.planned("at", lambda: self._replaced(indices=indices, values=values.detach()[:0]), indices)
        return other.with_values(values)

    @eager
    def planned(self, key: Hashable, make: Callable[[], Any], *tuples: Tensor) -> Any:
        """What depends on the hyperedges, and on other tuples, but not on features: computed once and kept for a while.

        Args:
            key: what it is.
            make: a function without arguments that computes it.
            *tuples: what else it depends on; it is computed anew where torch has changed one of them in place.

        Returns:
            The result.

        Raises:
            ValueError: if ``indices`` or ``batch`` was changed in place since the hyperedges were made of it.

        >>> Hyperedges(torch.tensor([[0]]), torch.ones(1, 1), 1).planned("answer", lambda: 42)
        42
        """
        own, others = _changes(self.indices, self.membership), _changes(*tuples)
        if own != self._plans.changes:
            raise ValueError("indices and batch must not change once hyperedges are made of them; make new ones.")
        if own is None or others is None:
            return make()
        found, where = self._plans.found, (key, tuple(map(id, tuples)), others)
        if where not in found:
            if len(found) >= _PLANS:
                found.pop(next(iter(found)))
            # A plan made in inference mode would be of no use in training, where it may be asked for next.
            with torch.inference_mode(mode=False), torch.no_grad():
                # The tuples are kept along: as long as this plan lives, nothing else can have their ids.
                found[where] = tuples, make()
        return found[where][1]

    def to(self, device: torch.device | str) -> Hyperedges:
        """Move everything to a device.

        Args:
            device: where to.

        Returns:
            The hyperedges there; what was planned is planned anew.

        >>> Hyperedges(torch.tensor([[0]]), torch.ones(1, 1), 1).to("cpu").values.device
        device(type='cpu')
        """
        moved = {name: getattr(self, name).to(device) for name in ("indices", "values", "batch")}
        return self._replaced(**moved)

    def projected(self, order: int) -> Int[Tensor, "tuples order"]:
        """The tuples of another order whose nodes all lie in one hyperedge: E' of HOT section 4.2.

        Args:
            order: l; the same order gives the hyperedges themselves, order 0 one empty tuple a graph.

        Returns:
            ``(m', l)``, none twice, in ascending order where they are new.

        >>> Hyperedges(torch.tensor([[0, 2]]), torch.ones(1, 1), 3).projected(1)
        tensor([[0],
                [2]])
        """
        if checks.nonnegative_int("order", order) == self.order:
            return self.indices
        if order == 0:
            return self.indices.new_zeros(self.num_graphs, 0)
        if self.order == 0:
            raise ValueError("order must be 0 for the projection of hyperedges without nodes.")

        def project() -> Tensor:
            choices = product(range(self.order), repeat=order)
            return _distinct(torch.cat([self.indices[:, list(choice)] for choice in choices]), self.num_nodes)

        return self.planned(("projected", order), project)

    @staticmethod
    def from_graph(
        x: Float[Tensor, "nodes dim"],
        edge_index: Int[Tensor, "2 edges"],
        edge_attr: Float[Tensor, "edges edge_dim"] | None = None,
        batch: Int[Tensor, " nodes"] | None = None,
        num_graphs: int = 0,
    ) -> Hyperedges:
        """A graph as hyperedges of order 2: nodes are loops ``[x, 0]``, edges ``[0, edge_attr]``, HOT section 4.4.

        Edges that are listed twice add up, and the attributes of a self-loop join the features of its node. Without
        attributes an edge has the single feature 1.

        Args:
            x: node features ``(n, d)``.
            edge_index: ``(2, m)``, both directions listed.
            edge_attr: ``(m, d')``.
            batch: ``(n,)``, the graph of each node.
            num_graphs: their number, where some at the end have no node.

        Returns:
            Hyperedges with ``d + d'`` features, the n loops first.

        Raises:
            ValueError: if shapes do not fit, an index is out of range or an edge joins two graphs.

        >>> edges = Hyperedges.from_graph(torch.zeros(2, 1), torch.tensor([[0, 1, 0], [1, 0, 1]]))
        >>> edges.indices.tolist(), edges.values[:, 1].tolist()
        ([[0, 0], [1, 1], [0, 1], [1, 0]], [0.0, 0.0, 2.0, 1.0])
        """
        checks.graph(x, edge_index, edge_attr, batch)
        checks.dense("x", x)
        nodes = x.shape[0]
        attributes = x.new_ones(edge_index.shape[1], 1) if edge_attr is None else edge_attr.to(x.dtype)
        at_nodes = torch.cat([x, x.new_zeros(nodes, attributes.shape[1])], 1)
        at_edges = torch.cat([x.new_zeros(attributes.shape[0], x.shape[1]), attributes], 1)
        with torch.inference_mode(mode=False):  # in which no plan would be kept
            loops = torch.arange(nodes, device=x.device)[:, None].expand(nodes, 2)
            indices, place = _each_once(torch.cat([loops, edge_index.t()]), nodes)
            batch = None if batch is None else batch.clone()
        values = x.new_zeros(indices.shape[0], at_nodes.shape[1]).index_add(0, place, torch.cat([at_nodes, at_edges]))
        return Hyperedges(indices, values, nodes, batch, num_graphs)

    @staticmethod
    def from_dense(x: Float[Tensor, "graphs ..."], mask: Bool[Tensor, "graphs nodes"] | None = None) -> Hyperedges:
        """Every tuple of nodes of dense tensors: the complete hypergraphs.

        Args:
            x: ``(graphs, n, .., n, features)``, at least one axis of nodes.
            mask: ``(graphs, n)``, ``True`` at nodes; without one, everything is.

        Returns:
            Hyperedges in lexicographic order, nodes numbered through the graphs.

        Raises:
            ValueError: if shapes do not fit.

        >>> Hyperedges.from_dense(torch.zeros(2, 3, 3, 1)).indices.shape
        torch.Size([18, 2])
        """
        checks.floating("x", x)
        checks.dense("x", x)
        if x.ndim < 3 or len(set(x.shape[1:-1])) > 1:
            raise ValueError(f"x must have shape (graphs, n, .., n, features), got {tuple(x.shape)}.")
        graphs, width, order = x.shape[0], x.shape[1], x.ndim - 2
        if mask is not None:
            checks.boolean("mask", mask, (graphs, width), "nodes", "(graphs, n) = ")
        if mask is None:
            mask = x.new_ones(graphs, width, dtype=torch.bool)
        present = joint(mask, order)
        with torch.inference_mode(mode=False):  # in which no plan would be kept
            number = mask.flatten().cumsum(0).reshape(graphs, width) - 1
            where = present.nonzero()
            indices = torch.stack([number[where[:, 0], where[:, axis + 1]] for axis in range(order)], 1)
            batch = mask.nonzero()[:, 0]
        return Hyperedges(indices, x[present], int(mask.sum()), batch, graphs)

    def to_dense(self) -> tuple[Float[Tensor, "graphs ..."], Bool[Tensor, "graphs nodes"]]:
        """Lay the hyperedges out as padded tensors with zeros where there is none.

        Returns:
            ``(graphs, n, .., n, features)`` and the mask ``(graphs, n)``, ``True`` at nodes.

        >>> edges = Hyperedges(torch.tensor([[0, 1]]), torch.ones(1, 1), 2)
        >>> edges.to_dense()[0].squeeze().tolist()
        [[0.0, 1.0], [0.0, 0.0]]
        """
        batch = self.membership
        sizes = torch.bincount(batch, minlength=self.num_graphs)
        width = int(sizes.max())
        place = _place_in_graph(batch, sizes)
        mask = torch.arange(width, device=place.device) < sizes[:, None]
        dense = self.values.new_zeros(self.num_graphs, *[width] * self.order, self.values.shape[1])
        where = (self.graphs, *(place[self.indices[:, axis]] for axis in range(self.order)))
        return dense.index_put(where, self.values), mask


def join_graphs(graphs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several graphs as one, as PyTorch Geometric batches them: what models take.

    Args:
        graphs: each has ``"x"`` with a row a node, ``"edge_index"`` with its own numbers of nodes, and whatever else
            the first one has; it is concatenated along its first axis, numbers are stacked.

    Returns:
        The same names, ``"edge_index"`` renumbered, and ``"batch"``, the graph of each node.

    Raises:
        ValueError: if there is no graph.

    >>> edge = torch.tensor([[0, 1], [1, 0]])
    >>> batch = join_graphs([{"x": torch.ones(2, 1), "edge_index": edge}] * 2)
    >>> batch["edge_index"].tolist(), batch["batch"].tolist()
    ([[0, 1, 2, 3], [1, 0, 3, 2]], [0, 0, 1, 1])
    """
    graphs = checks.sequence("graphs", graphs, "mappings with 'x'", Mapping)
    if not graphs:
        raise ValueError("graphs must be at least one, got none.")
    if any(not {"x", *graphs[0]} <= graph.keys() for graph in graphs):
        raise ValueError(f"graphs must have 'x' and what the first one has, got {[list(graph) for graph in graphs]}.")
    sizes = [graph["x"].shape[0] for graph in graphs]
    joined: dict[str, Tensor] = {}
    for name, first in graphs[0].items():
        every = [graph[name] for graph in graphs]
        if name == "edge_index":
            starts = accumulate(sizes[:-1], initial=0)
            joined[name] = torch.cat([edges + start for edges, start in zip(every, starts, strict=True)], 1)
        else:
            joined[name] = torch.cat(every) if first.ndim else torch.stack(every)
    each = torch.tensor(sizes, device=joined["x"].device)
    joined["batch"] = torch.arange(len(graphs), device=each.device).repeat_interleave(each)
    return joined


def batches_by_size(
    sizes: Sequence[int] | Int[Tensor, " graphs"],
    batch_size: int,
    *,
    padding: float = 1.05,
    generator: torch.Generator | None = None,
) -> list[Int[Tensor, " batch"]]:
    r"""Batches of graphs of similar sizes, for layers whose work is the square of the largest one of a batch.

    Graphs are ordered by size plus a random number, and cut into batches, which come in random order. The random
    number has the widest range, of those that halve the largest size, for which the work of all batches with their
    padding, :math:`\sum_b |b|\, n_{\max}^2`, is at most ``padding`` times that without, :math:`\sum n^2`: what the
    bound allows goes into mixing. Where there are so few graphs that even those of nearest size go over it, batches
    end earlier.

    Args:
        sizes: number of nodes of each graph.
        batch_size: most graphs of a batch.
        padding: the bound, at least 1; infinity for batches without regard to size.
        generator: source of the random numbers, torch's seeded state if left out.

    Returns:
        The numbers of the graphs of each batch.

    Raises:
        ValueError: if ``batch_size`` is not positive or ``padding`` is less than 1.

    >>> sorted(sorted(batch.tolist()) for batch in batches_by_size([5, 9, 5, 9], 2))
    [[0, 2], [1, 3]]
    """
    checks.positive_int("batch_size", batch_size)
    checks.in_range("padding", padding, 1.0, math.inf)
    checks.generator(generator)
    if not isinstance(sizes, Tensor):
        sizes = torch.tensor(checks.sequence("sizes", sizes, "integers", SupportsIndex), device="cpu")
    if sizes.ndim != 1:
        raise ValueError(f"sizes must have shape (graphs,), got {tuple(sizes.shape)}.")
    sizes = sizes.cpu()
    if len(sizes):
        checks.integers("sizes", sizes)
        if int(sizes.min()) < 0:
            raise ValueError(f"sizes must be at least 0, got {int(sizes.min())}.")
    sizes = sizes.long()  # squares leave the range of small integers
    device = None if generator is None else generator.device
    noise = torch.rand(len(sizes), generator=generator, device=device, dtype=torch.float64).cpu()
    if len(sizes) == 0:
        return []
    limit, spread = padding * float(sizes.square().sum()), float(sizes.max())
    batches = _by_size(sizes, noise * spread, batch_size)
    while _padded_work(sizes, batches) > limit and spread >= 1:
        spread /= 2
        batches = _by_size(sizes, noise * spread, batch_size)
    if _padded_work(sizes, batches) > limit:
        batches = [part for batch in batches for part in _divided(sizes, batch, padding)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator, device=device).tolist()]


def _by_size(sizes: Tensor, noise: Tensor, batch_size: int) -> list[Tensor]:
    return list((sizes + noise).argsort().split(batch_size))


def _padded_work(sizes: Tensor, batches: list[Tensor]) -> float:
    return float(sum(len(batch) * int(sizes[batch].max()) ** 2 for batch in batches))


def _divided(sizes: Tensor, batch: Tensor, padding: float) -> list[Tensor]:
    """Parts of an ascending batch, of which none goes over the bound."""
    cuts, count, exact = [0], 0, 0
    for place, size in enumerate(sizes[batch].tolist()):
        count, exact = count + 1, exact + size**2
        if count * size**2 > padding * exact:
            cuts.append(place)
            count, exact = 1, size**2
    return [batch[start:end] for start, end in zip(cuts, [*cuts[1:], len(batch)], strict=True)]


def joint(mask: Bool[Tensor, "*batch nodes"], order: int) -> Bool[Tensor, "..."]:
    """Which tuples consist of nodes only.

    Args:
        mask: ``(*batch, n)``, ``True`` at nodes.
        order: k.

    Returns:
        ``(*batch, n, .., n)``, without a node axis for order 0.

    >>> joint(torch.tensor([True, False]), 2).tolist()
    [[True, False], [False, False]]
    """
    checks.boolean("mask", mask, None, "nodes")
    if checks.nonnegative_int("order", order) == 0:
        return mask.new_ones(mask.shape[:-1])
    batch, width = mask.shape[:-1], mask.shape[-1]
    axes = (mask.reshape(*batch, *[1] * axis, width, *[1] * (order - 1 - axis)) for axis in range(order))
    return reduce(torch.logical_and, axes)


def on_features(function: Callable[[Tensor], Tensor], x: Tensor | Hyperedges) -> Tensor | Hyperedges:
    """Apply a function of feature vectors to a dense tensor or to the values of hyperedges.

    Args:
        function: of ``(..., features)``.
        x: what it is applied to.

    Returns:
        The same kind as came.

    >>> on_features(torch.relu, torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    checks.function("function", function)
    if isinstance(x, Hyperedges):
        return x.with_values(function(x.values))
    checks.tensor("x", x)
    return function(x)


def _place_in_graph(batch: Tensor, sizes: Tensor) -> Tensor:
    """Number the nodes of each graph from zero, in the order in which they come."""
    order = batch.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes
    place = torch.empty_like(batch)
    place[order] = torch.arange(batch.shape[0], device=batch.device) - starts[batch[order]]
    return place


def _repeated(indices: Tensor, num_nodes: int) -> Tensor:
    """The tuples that are listed more than once."""
    number = _numbers(indices, num_nodes)
    if number is None:
        unique, counts = indices.unique(dim=0, return_counts=True)
        return unique[counts > 1]
    ordered, row = number.sort()
    return indices[row[1:][ordered[1:] == ordered[:-1]]]


def _each_once(pairs: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The pairs without repetitions, in the order in which they first come, and the place of each listed one."""
    distinct, which = (pairs[:, 0] * num_nodes + pairs[:, 1]).unique(return_inverse=True)
    rows = torch.arange(pairs.shape[0], device=pairs.device)
    first = torch.full_like(distinct, pairs.shape[0]).scatter_reduce(0, which, rows, "amin")
    first, order = first.sort()
    return pairs[first], order.argsort()[which]


def _distinct(indices: Tensor, num_nodes: int) -> Tensor:
    """Each tuple once, in ascending order."""
    number = _numbers(indices, num_nodes)
    if number is None:
        return indices.unique(dim=0)
    return number.unique()[:, None] // _places(indices, num_nodes) % max(num_nodes, 1)


def _numbers(indices: Tensor, num_nodes: int) -> Tensor | None:
    """One number a tuple, in the order of tuples, where they fit: sorting those is some forty times as fast as rows."""
    if num_nodes ** indices.shape[1] >= 2**63:
        return None
    return (indices * _places(indices, num_nodes)).sum(1)


def _places(indices: Tensor, num_nodes: int) -> Tensor:
    return indices.new_tensor([num_nodes**place for place in reversed(range(indices.shape[1]))])


def _check_indices(indices: Tensor, num_nodes: int, batch: Tensor, num_graphs: int) -> None:
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must be of dtype torch.int64, got {indices.dtype}.")
    if indices.ndim != 2:
        raise ValueError(f"indices must have shape (edges, order), got {tuple(indices.shape)}.")
    if indices.shape[1] == 0:
        if indices.shape[0] != num_graphs:
            raise ValueError(f"indices of order 0 must have one row a graph ({num_graphs}), got {indices.shape[0]}.")
        return
    if indices.shape[0] == 0:
        return
    if int(indices.min()) < 0 or int(indices.max()) >= num_nodes:
        raise ValueError(
            f"indices must lie in [0, num_nodes = {num_nodes}), got {int(indices.min())} .. {int(indices.max())}."
        )
    again = _repeated(indices, num_nodes)
    if again.shape[0]:
        raise ValueError(f"indices must not list a hyperedge twice, got {tuple(again[0].tolist())} more than once.")
    graphs = batch[indices]
    if bool((graphs != graphs[:, :1]).any()):
        row = int((graphs != graphs[:, :1]).any(1).nonzero()[0])
        raise ValueError(f"indices must join nodes of one graph, got {tuple(indices[row].tolist())} across two.")
