r"""A tensor that stands for many: all numbers :math:`c + G d + b`, with d in a ball and \|b\| at most a box.

An encoder is called on it. Every operation of torch that reaches the tensor has a rule here or is refused.

**L18.** A linear operation A takes c, the columns of G and the box to A c, A G and :math:`|A|` times the box.

*Proof.* The triangle inequality in each entry. QED

ReLU is that of L1: it takes c, the columns and the box to s times each, and half of an interval to the box.

Rounding of an operation with n terms is counted as 2n units of the sum of its absolute terms.

Features of one node move few rows. Columns and boxes are kept for these rows alone; an operation without a rule for
some rows makes all of them and drops those that do not move. Rows that do not move are taken as float64 computes them.

**What is read.** While the encoder adds and copies rows of features, a value is :math:`M X` plus what depends on
earlier products alone; M does not move. A product with W does not change with a perturbation across the columns of W
and of earlier ones. So W is noted, and the perturbation is followed in what the products and the transformer read; any
other operation reads all features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from holonomy.theory.affine.arithmetic.forms import UNIT
from holonomy.theory.attention.projections import NotCoveredError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_Map = Callable[[Any], Tensor] | Callable[[Any, Any], Tensor]

_ATEN: Any = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {}
# Of arguments: whether combinations of rows of features become others.
_KEEPS: dict[Any, Callable[..., bool]] = {}


class Traced(Tensor):
    """All numbers :math:`c + G d + b`.

    ``columns`` and ``box`` are those of ``rows`` of the first axis, in order; others do not move. What features do not
    move at all is ``still``: c alone. ``shared`` says that another tensor may look at the same memory. ``reads`` is
    there where rows are combinations of rows of features: the weights that such are multiplied with are noted in it.
    """

    center: Float[Tensor, "..."]
    columns: Float[Tensor, "first ..."]
    box: Float[Tensor, "..."]
    rows: Int[Tensor, " moved"]
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
            found = args[0] if schema.is_mutable else tree_map(partial(constant, first=len(every[0].columns)), found)
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

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Center, columns and box of some rows in order, all that move among them."""
        if not self.ndim:
            return self.center, self.columns, self.box
        if torch.equal(self.rows, rows):
            return self.center[rows], self.columns, self.box
        place = torch.searchsorted(rows, self.rows)
        columns = self.columns.new_zeros(len(self.columns), len(rows), *self.shape[1:])
        box = self.box.new_zeros(len(rows), *self.shape[1:])
        return self.center[rows], columns.index_copy(1, place, self.columns), box.index_copy(0, place, self.box)

    def moved(self, part: Any) -> Any:
        """The rows that move of a constant that has them all; another constant as it is."""
        every = isinstance(part, Tensor) and part.ndim == self.ndim > 0 and len(part) == len(self.center)
        return part[self.rows] if every else part


def traced(
    center: Tensor, columns: Tensor, box: Tensor, rows: Tensor, *, still: bool = False, shared: bool = False
) -> Traced:
    """Make one; a number without axes has no rows."""
    make: Any = Tensor._make_wrapper_subclass  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    made = make(Traced, center.shape, dtype=center.dtype, device=center.device)
    made.center, made.columns, made.box, made.rows = center, columns, box, rows
    made.still, made.shared, made.reads = still, shared, None
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


def constant(x: Any, first: int) -> Any:
    """A constant as what nothing moves."""
    if isinstance(x, Traced) or not isinstance(x, Tensor):
        return x
    none = x[:0] if x.ndim else x
    return traced(x, x.new_zeros(first, *none.shape), torch.zeros_like(none), all_rows(none), still=True)


def all_rows(x: Tensor) -> Tensor:
    """The numbers of all rows."""
    return torch.arange(len(x) if x.ndim else 0)


def with_rows(center: Tensor, columns: Sequence[Tensor], box: Tensor, loss: Tensor) -> Traced:
    """From columns and boxes of all rows, and what rounding adds to the boxes of those that move."""
    wide = torch.stack([*columns, box])
    if not center.ndim:
        return traced(center, wide[:-1], box + loss, all_rows(center))
    rows = (wide != 0).transpose(0, 1).flatten(1).any(1).nonzero().squeeze(1)
    return traced(center, wide[:-1, rows], (box + loss)[rows], rows)


def largest(center: Tensor, columns: Tensor, box: Tensor) -> Tensor:
    """The largest absolute values."""
    return center.abs() + columns.abs().sum(0) + box


def _rounded(center: Tensor, columns: Tensor, box: Tensor, terms: int) -> Tensor:
    """The box before an operation of so many terms."""
    return box if terms == 0 else box * (1 + 2 * terms * UNIT) + 2 * terms * UNIT * largest(center, columns, box)


def mapped(x: Traced, operate: _Map, *by: Any, terms: int = 0, some: Sequence[Any] | None = None) -> Traced:
    """A linear operation of so many terms; ``by`` are the constants whose absolute values bound it.

    Where it takes each row to the same row, ``some`` are the constants for the rows that move.
    """
    apply: Any = operate
    value, sizes = apply(x.center, *by), list(map(abs, by))
    if some is not None:
        box = apply(_rounded(*x.at(x.rows), terms), *map(abs, some)).abs()
        return traced(value, apply(x.columns, *some), box, x.rows)
    every = x.at(all_rows(x))
    box = apply(every[2], *sizes).abs()
    loss = apply(_rounded(*every, terms) - every[2], *sizes).abs()
    return with_rows(value, [apply(column, *by) for column in every[1]], box, loss)


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


def _overwritten(one: Callable[..., Any], plain: Any, func: Any, x: Traced, *how: Any, **more: Any) -> Traced:
    del func
    found = one(plain, x, *how, **more)
    x.center, x.columns, x.box, x.rows, x.still = found.center, found.columns, found.box, found.rows, False
    return x
