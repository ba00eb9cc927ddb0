"""Tuples of nodes, and what layers work out of them: where they meet and which of them are equal."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from holonomy import _autograd, checks
from holonomy._autograd import eager
from holonomy._shapes import Int

# Plans that a plan keeps of other tuples, a few models' worth: ever new tuples do not fill the memory.
_MOST_CHILDREN = 64


class HyperedgePlan:
    """The tuples of nodes of :class:`Hyperedges`, which layers search and sort once and keep the result.

    Hyperedges on the same tuples share a plan: make one, keep it beside a data set, and give it features with
    :meth:`Hyperedges.of`. The tensors must stay as they are; a plan whose tensors were changed in place is refused.

    Arguments are attributes, too: ``batch`` is zeros, and ``num_graphs`` as many as it numbers, where it is not given.

    Args:
        indices: ``(m, k)`` nodes of each hyperedge, in any order, none twice.
        num_nodes: n, of all graphs together.
        batch: ``(n,)``, the graph of each node, numbered from zero; one graph where it is not given.
        num_graphs: their number, where some at the end have no node.

    Raises:
        TypeError: if indices are not int64.
        ValueError: if shapes do not fit, an index is out of range, a hyperedge is listed twice or joins two graphs.

    >>> plan = HyperedgePlan(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> plan
    HyperedgePlan(order=2, edges=2, num_nodes=2, num_graphs=1)
    """

    def __init__(
        self,
        indices: Int[Tensor, "edges order"],
        num_nodes: int,
        batch: Int[Tensor, " nodes"] | None = None,
        num_graphs: int = 0,
    ) -> None:
        checks.integers("indices", indices)
        checks.nonnegative_int("num_nodes", num_nodes)
        checks.nonnegative_int("num_graphs", num_graphs)
        if batch is not None:
            checks.membership(batch, num_nodes)
            checks.on_device(indices.device, batch=batch)
        graphs = checks.number_of_graphs(batch, num_graphs or None)
        batch = indices.new_zeros(num_nodes) if batch is None else batch.long()
        _check_indices(indices, num_nodes, batch, graphs)
        self._hold(indices, num_nodes, batch, graphs)

    def _hold(
        self, indices: Tensor, num_nodes: int, batch: Tensor, num_graphs: int, parent: HyperedgePlan | None = None
    ) -> None:
        self.indices, self.num_nodes, self.batch, self.num_graphs = indices, num_nodes, batch, num_graphs
        self._made_at, self._before = self.changes(), (indices.clone(), batch.clone())
        # Plans refer strongly to those made of them only: without circles, what a batch planned is freed with it.
        self._parent = None if parent is None else weakref.ref(parent)
        self._children: deque[HyperedgePlan] = deque(maxlen=_MOST_CHILDREN)
        self._results: WeakKeyDictionary[HyperedgePlan, dict[Hashable, Any]] = WeakKeyDictionary()

    def changes(self) -> tuple[int, int] | None:
        """How often torch has changed the tensors in place; None for those of inference mode, which does not count."""
        if self.indices.is_inference() or self.batch.is_inference():
            return None
        return self.indices._version, self.batch._version

    def unchanged(self) -> bool:
        """Whether the tensors are as they were when the plan was made; off the CPU, as far as torch counts."""
        if self.changes() != self._made_at:
            return False
        return not any(map(checks.rewritten, (self.indices, self.batch), self._before))

    def require_unchanged(self) -> None:
        """Refuse tensors that were changed in place."""
        if not self.unchanged():
            raise ValueError("indices and batch must not change once hyperedges are made of them; make new ones.")

    @property
    def order(self) -> int:
        """How many nodes a hyperedge has."""
        return self.indices.shape[1]

    @property
    def graphs(self) -> Int[Tensor, " edges"]:
        """The graph of each hyperedge; the graphs themselves for order 0."""
        if self.order == 0:
            return torch.arange(self.num_graphs, device=self.indices.device)
        return self.batch[self.indices[:, 0]]

    @property
    def nodes(self) -> HyperedgePlan:
        """The plan of every node by itself, of order 1."""
        return self.computed(
            "nodes", lambda: self.at(torch.arange(self.num_nodes, device=self.indices.device)[:, None])
        )

    @eager
    def at(self, indices: Int[Tensor, "tuples order"]) -> HyperedgePlan:
        """The plan of other tuples ``(m', l)`` of the same nodes, none twice; nothing is checked.

        It is the same plan at every call with the same unchanged tensor.

        >>> plan = HyperedgePlan(torch.tensor([[0], [1]]), 2)
        >>> pairs = torch.tensor([[0, 1]])
        >>> plan.at(pairs).order, plan.at(pairs) is plan.at(pairs)
        (2, True)
        """
        parent = None if self._parent is None else self._parent()
        for plan in (self, parent, *self._children):
            if plan is not None and plan.indices is indices and plan.changes() is not None and plan.unchanged():
                return plan
        plan = self._unchecked(indices, self.num_nodes, self.batch, self.num_graphs, self)
        self._children.append(plan)
        return plan

    def projected(self, order: int) -> HyperedgePlan:
        """The plan of the tuples ``(m', l)`` of order l whose nodes all lie in one hyperedge: E' of HOT section 4.2.

        None twice, in ascending order where they are new. The same order gives this plan, order 0 one empty tuple a
        graph; hyperedges without nodes are not projected to an order above 0, which is a ValueError.

        >>> HyperedgePlan(torch.tensor([[0, 2]]), 3).projected(1).indices
        tensor([[0],
                [2]])
        """
        if checks.nonnegative_int("order", order) == self.order:
            return self
        if self.order == 0:
            raise ValueError(f"order must be 0 for the projection of hyperedges without nodes, got {order}.")

        def project() -> HyperedgePlan:
            if order == 0:
                return self.at(self.indices.new_zeros(self.num_graphs, 0))
            choices = product(range(self.order), repeat=order)
            return self.at(_distinct(torch.cat([self.indices[:, list(c)] for c in choices]), self.num_nodes))

        return self.computed(("projected", order), project)

    @eager
    def computed(self, key: Hashable, make: Callable[[], Any], other: HyperedgePlan | None = None) -> Any:
        """What ``make()`` gives, which depends on these tuples and not on features: computed once for a key and kept.

        Where it also depends on the tuples of an ``other`` plan, it is kept as long as that plan lives. It is a
        ValueError if ``indices`` or ``batch`` was changed in place since a plan was made of it.

        >>> HyperedgePlan(torch.tensor([[0]]), 1).computed("answer", lambda: 42)
        42
        """
        other = self if other is None else other
        self.require_unchanged()
        other.require_unchanged()
        if self.changes() is None or other.changes() is None:
            return make()
        results = self._results.setdefault(other, {})
        if key not in results:
            with _autograd.kept():
                results[key] = make()
        return results[key]

    def to(self, device: torch.device | str) -> HyperedgePlan:
        """Move the tuples to a device; what layers computed of them is computed anew there.

        It is a ValueError if ``indices`` or ``batch`` was changed in place.

        >>> HyperedgePlan(torch.tensor([[0]]), 1).to("cpu").indices.device
        device(type='cpu')
        """
        checks.device("device", device)
        self.require_unchanged()
        return self._unchecked(self.indices.to(device), self.num_nodes, self.batch.to(device), self.num_graphs)

    @staticmethod
    def _unchecked(
        indices: Tensor, num_nodes: int, batch: Tensor, num_graphs: int, parent: HyperedgePlan | None = None
    ) -> HyperedgePlan:
        plan = object.__new__(HyperedgePlan)
        plan._hold(indices, num_nodes, batch, num_graphs, parent)
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy starts without results, and with nothing checked.
        self.require_unchanged()
        return self._unchecked, (self.indices, self.num_nodes, self.batch, self.num_graphs)

    def __repr__(self) -> str:
        sizes = f"edges={self.indices.shape[0]}, num_nodes={self.num_nodes}, num_graphs={self.num_graphs}"
        return f"HyperedgePlan(order={self.order}, {sizes})"


def tuple_codes(indices: Int[Tensor, "tuples order"], num_nodes: int) -> Int[Tensor, " tuples"] | None:
    """One number a tuple, ascending as tuples do, where 63 bits hold them: sorting these is forty times as fast."""
    if num_nodes ** indices.shape[1] >= 2**63:
        return None
    # The tuple read as a number in base num_nodes.
    code = indices.new_zeros(indices.shape[0], dtype=torch.int64)
    for column in indices.unbind(1):
        code = code * num_nodes + column
    return code


def repeated(indices: Tensor, num_nodes: int) -> Tensor:
    """The tuples that are listed more than once."""
    codes = tuple_codes(indices, num_nodes)
    if codes is None:
        unique, counts = indices.unique(dim=0, return_counts=True)
        return unique[counts > 1]
    ordered, row = codes.sort()
    return indices[row[1:][ordered[1:] == ordered[:-1]]]


def each_once(tuples: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The tuples without repetitions, in the order in which they first come, and the place of each listed one."""
    codes = tuple_codes(tuples, num_nodes)
    if codes is None:
        distinct, which = tuples.unique(dim=0, return_inverse=True)
    else:
        distinct, which = codes.unique(return_inverse=True)
    rows = torch.arange(tuples.shape[0], device=tuples.device)
    first = torch.full_like(rows[: len(distinct)], len(rows)).scatter_reduce(0, which, rows, "amin")
    first, order = first.sort()
    return tuples[first], order.argsort()[which]


def _distinct(indices: Tensor, num_nodes: int) -> Tensor:
    """Each tuple once, in ascending order."""
    codes = tuple_codes(indices, num_nodes)
    if codes is None:
        return indices.unique(dim=0)
    digits = indices.new_tensor([num_nodes**place for place in reversed(range(indices.shape[1]))])
    return codes.unique()[:, None] // digits % max(num_nodes, 1)


def _check_indices(indices: Tensor, num_nodes: int, batch: Tensor, num_graphs: int) -> None:
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must be of dtype torch.int64, got {indices.dtype}.")
    if indices.ndim != 2:
        raise ValueError(f"indices must have shape (edges, order), got {tuple(indices.shape)}.")
    if indices.shape[1] == 0:
        if indices.shape[0] != num_graphs:
            raise ValueError(f"indices of order 0 must have one row a graph ({num_graphs}), got {indices.shape[0]}.")
        return
    check_nodes("indices", indices, num_nodes, batch)
    again = repeated(indices, num_nodes)
    if again.shape[0]:
        raise ValueError(f"indices must not list a hyperedge twice, got {tuple(again[0].tolist())} more than once.")


def check_nodes(name: str, tuples: Tensor, num_nodes: int, batch: Tensor) -> None:
    """Refuse tuples of nodes that are not there, or not of one graph."""
    if tuples.numel() == 0:
        return
    low, high = int(tuples.min()), int(tuples.max())
    if low < 0 or high >= num_nodes:
        raise ValueError(f"{name} must lie in [0, num_nodes = {num_nodes}), got {low} .. {high}.")
    graphs = batch[tuples]
    across = (graphs != graphs[:, :1]).any(1)
    if bool(across.any()):
        row = tuple(tuples[int(across.nonzero()[0])].tolist())
        raise ValueError(f"{name} must join nodes of one graph, got {row} across two.")
