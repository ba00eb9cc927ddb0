r"""A tensor that stands for many: all numbers :math:`c + G d + b`, with d in a ball and \|b\| at most a box.

An encoder is called on it. Every operation of torch that reaches the tensor has a rule here or is refused.

**L18.** A linear operation A takes c, the columns of G and the box to A c, A G and :math:`|A|` times the box.

*Proof.* The triangle inequality in each entry. QED

ReLU is that of L1: it takes c, the columns and the box to s times each, and half of an interval to the box.

Rounding of an operation with n terms is counted as 2n units of the sum of its absolute terms.

Features of one node move few rows. Boxes are kept for these rows alone, columns for pairs of a row and a node that
moves it; an operation without a rule for some rows makes all of them, node by node, and drops those that do not move.
Rows that do not move are taken as float64 computes them. Where several nodes move, a row's columns of them share a ball
or fill one each, see :func:`~holonomy.theory.affine.certificate.certify_node`.

**What is read.** While the encoder adds and copies rows of features, a value is :math:`M X` plus what depends on
earlier products alone; M does not move. A product with W does not change with a perturbation across the columns of W
and of earlier ones. So W is noted, and the perturbation is followed in what the products and the transformer read; any
other operation reads all features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from holonomy._shapes import Float, Int
from holonomy.theory.affine.arithmetic.forms import UNIT
from holonomy.theory.attention.projections import NotCoveredError

_Map = Callable[[Any], Tensor] | Callable[[Any, Any], Tensor]

_ATEN: Any = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {}
# Of arguments: whether combinations of rows of features become others.
_KEEPS: dict[Any, Callable[..., bool]] = {}


@dataclass(frozen=True)
class Ball:
    """What d is: how many columns for each of how many nodes, and whether each node fills a ball of its own."""

    first: int
    nodes: int
    each: bool


class Traced(Tensor):
    """All numbers :math:`c + G d + b`.

    ``bounds`` are the box and the largest absolute values, as sums of those of all terms. ``pairs`` are the number of a
    row of the first axis times all nodes plus that of a node that moves it, in order, and ``rows`` those rows, with
    ``place`` from pairs to rows. What features do not move at all is ``still``: c alone.
    ``shared`` says that another tensor may look at the same memory. ``reads`` is there where rows are combinations of
    rows of features: the weights that such are multiplied with are noted in it.
    """

    ball: Ball
    center: Float[Tensor, "..."]
    columns: Float[Tensor, "first pair ..."]
    bounds: Float[Tensor, "2 row ..."]
    pairs: Int[Tensor, " pair"]
    rows: Int[Tensor, " moved"]
    place: Int[Tensor, " pair"]
    still: bool
    shared: bool
    reads: list[Tensor] | None

    # Methods and functions of torch come down to operations, all of which are seen below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAssignmentType]

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs, schema = kwargs or {}, func._schema  # noqa: SLF001
        every = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Traced)]
        looks = any(part.alias_info is not None for part in schema.returns)
        alone = schema.is_mutable and isinstance(args[0], Traced) and not args[0].shared
        if schema.is_mutable and not (alone and schema.arguments[0].is_write):
            raise NotCoveredError(f"graph_encoder must not overwrite what other tensors may share, got {func.name()}.")
        if all(part.still for part in every):
            found = func(*tree_map(nominal, args), **tree_map(nominal, kwargs))
            found = args[0] if schema.is_mutable else tree_map(partial(constant, ball=every[0].ball), found)
        elif func in _RULES:
            reads = _read(func, args, every)
            first = args[:1] if schema.is_mutable else ()
            found = _RULES[func](func, *first, *tree_map(_settled, args[len(first) :]), **tree_map(_settled, kwargs))
            if isinstance(found, Traced) and not found.still:
                found.reads = reads
        else:
            raise NotCoveredError(f"graph_encoder must be made of linear maps and ReLU, got {func.name()}.")
        if looks and not schema.is_mutable:
            for part in (*every, *tree_leaves(found)):
                part.shared = True
        return found

    @property
    def middle(self) -> Tensor:
        """The center of rows that move; a number without axes is a row."""
        return self.center[self.rows] if self.ndim else self.center[None]

    def total(self, part: Tensor) -> Tensor:
        """Sums over the pairs of each row."""
        return part.new_zeros(len(self.rows), *part.shape[1:]).index_add(0, self.place, part)

    def with_pairs(self, pairs: Tensor) -> Traced:
        """The same with more pairs."""
        if torch.equal(self.pairs, pairs):
            return self
        shape = self.ball.first, len(pairs), *self.shape[1:]
        columns = self.columns.new_zeros(1).expand(shape)  # no memory where nothing moves
        if len(self.pairs):
            columns = columns.index_copy(1, torch.searchsorted(pairs, self.pairs), self.columns)
        found = traced(self.ball, self.center, columns, self.bounds, pairs)
        still = torch.stack([torch.zeros_like(found.middle), found.middle.abs()])
        found.bounds = still.index_copy(1, torch.searchsorted(found.rows, self.rows), self.bounds)
        return found

    def by_nodes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """One node after the other: its number, the rows that it moves, and their columns."""
        nodes = self.pairs % self.ball.nodes
        for node in nodes.unique():
            moved = (nodes == node).nonzero().squeeze(1)
            yield node, self.rows[self.place[moved]], self.columns[:, moved]

    def of(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """The nodes that move a row, their columns, and its box."""
        some = self.rows[self.place] == row
        return self.pairs[some] % self.ball.nodes, self.columns[:, some], self.bounds[0, self.rows == row].sum(0)


def traced(
    ball: Ball, center: Tensor, columns: Tensor, bounds: Tensor, pairs: Tensor, *, still: bool = False
) -> Traced:
    """Make one."""
    make: Any = Tensor._make_wrapper_subclass  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    made = make(Traced, center.shape, dtype=center.dtype, device=center.device)
    made.ball, made.center, made.columns, made.bounds, made.pairs = ball, center, columns, bounds, pairs
    made.rows, made.place = (pairs // ball.nodes).unique_consecutive(return_inverse=True)
    made.still, made.shared, made.reads = still, False, None
    return made


def _read(func: Any, args: Sequence[Any], every: Sequence[Traced]) -> list[Tensor] | None:
    """Note what an operation reads of features, unless it makes combinations of rows of combinations of rows."""
    reads = next((part.reads for part in every if part.reads is not None), None)
    if reads is None or (func in _KEEPS and _KEEPS[func](*args)):
        return reads
    if func in {_ATEN.mm.default, _ATEN.addmm.default} and not any(map(moves, (args[-1], *args[:-2]))):
        reads.append(nominal(args[-1]).mT.to_dense())
    else:
        reads.extend(everything(part) for part in every if part.reads is not None)
    return None


def everything(x: Traced) -> Tensor:
    """Weights that read all features."""
    return torch.eye(x.shape[-1]).double()


def nominal(x: Any) -> Any:
    """The center, or what it is itself."""
    return x.center if isinstance(x, Traced) else x


def moves(x: Any) -> bool:
    """Whether features move it."""
    return isinstance(x, Traced) and not x.still


def _settled(x: Any) -> Any:
    """A plain tensor where features do not move it."""
    return x if moves(x) else nominal(x)


def constant(x: Any, ball: Ball) -> Any:
    """A constant as what nothing moves."""
    if isinstance(x, Traced) or not isinstance(x, Tensor):
        return x
    return traced(
        ball, x, x.new_zeros(ball.first, 0, *x.shape[1:]), x.new_zeros(2, 0, *x.shape[1:]), torch.arange(0), still=True
    )


def joined(x: Traced, center: Tensor, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Traced:
    """From each node that moves, the rows that it moves and their columns; without bounds."""
    shape = center.shape[1:]
    pairs = torch.cat([torch.arange(0), *(rows * x.ball.nodes + node for node, rows, _ in parts)])
    columns = torch.cat([x.columns.new_zeros(x.ball.first, 0, *shape), *(columns for *_, columns in parts)], 1)
    pairs, order = pairs.sort()
    return traced(x.ball, center, columns[:, order], center.new_zeros(2, 0, *shape), pairs)


def rounded(bounds: Tensor, terms: int) -> Tensor:
    """Bounds after an operation of so many terms."""
    box, size = bounds * (1 + 2 * terms * UNIT)
    return torch.stack([box + 2 * terms * UNIT * size, size])


def rowwise(
    x: Traced, operate: _Map, *by: Any, terms: int = 0, at: Callable[[Any, Tensor], Any] = lambda part, _: part
) -> Traced:
    """A linear operation of so many terms that takes each row to the same row.

    ``by`` are the constants whose absolute values bound it, ``at`` takes them to those for some rows.
    """
    apply: Any = operate
    bounds = apply(x.bounds, *(abs(at(part, x.rows)) for part in by)).abs()
    columns = apply(x.columns, *(at(part, x.rows[x.place]) for part in by))
    return traced(x.ball, apply(x.center, *by), columns, rounded(bounds, terms), x.pairs)


def mapped(x: Traced, operate: _Map, *by: Any, terms: int = 0) -> Traced:
    """Any linear operation of so many terms; ``by`` are the constants whose absolute values bound it."""
    apply: Any = operate
    sizes, value = list(map(abs, by)), apply(x.center, *by)

    def through(rows: Tensor, part: Tensor, by: Sequence[Any]) -> Tensor:
        found = apply(torch.zeros_like(x.center).index_copy(0, rows, part) if x.ndim else part[0], *by)
        return found if found.ndim else found[None]

    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for node, rows, columns in x.by_nodes():
        touched = through(rows, torch.ones(columns.shape[1:]).double(), sizes)
        some = touched.reshape(len(touched), math.prod(touched.shape[1:])).any(1).nonzero().squeeze(1)
        moved = [through(rows, column, by)[some] for column in columns]
        parts.append((node, some, torch.stack([*moved, touched[some]])[:-1]))
    found = joined(x, value, parts)
    if len(found.rows):
        still = torch.arange(len(x) if x.ndim else 1), x.center.abs() if x.ndim else x.center.abs()[None]
        box, size, center = (
            through(rows, part, sizes).abs()[found.rows] for rows, part in (*((x.rows, one) for one in x.bounds), still)
        )
        found.bounds = rounded(torch.stack([box, size + center]), terms)
    return found


def rule(*names: str, keeps: Callable[..., bool] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the rule of operations, each with its overload; a mark stands for the one that overwrites, too."""

    def register(one: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            packet, overload = name.strip("!").split(".")
            plain = getattr(getattr(_ATEN, packet), overload)
            rules = {plain: one}
            if name.endswith("!"):
                rules[getattr(getattr(_ATEN, f"{packet}_"), overload)] = partial(_overwritten, one, plain)
            _RULES.update(rules)
            _KEEPS.update(dict.fromkeys(rules, keeps) if keeps else {})
        return one

    return register


def _overwritten(one: Callable[..., Any], plain: Any, _: Any, x: Traced, *how: Any, **more: Any) -> Traced:
    found = one(plain, x, *how, **more)
    x.center, x.columns, x.bounds, x.still = found.center, found.columns, found.bounds, False
    x.pairs, x.rows, x.place = found.pairs, found.rows, found.place
    return x
