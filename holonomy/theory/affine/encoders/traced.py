r"""Graph encoders of one's own, made of linear maps and ReLU: L18.

The encoder is called on a tensor that stands for all numbers :math:`c + G d + b`, with d in the unit ball and each
entry of :math:`|b|` at most that of a box. Every operation of torch that reaches the tensor has a rule here or is
refused, so that whatever the encoder's code does is either followed or not covered.

**L18.** A linear operation A takes c, the columns of G and the box to A c, A G and :math:`|A|` times the box.

*Proof.* The triangle inequality in each entry. QED

ReLU is that of L1: it takes c, the columns and the box to s times each, and half of an interval to the box.

Rounding of an operation with n terms is counted as 2n units of the sum of its absolute terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from holonomy.structures import Graph
from holonomy.theory.affine.arithmetic.entrywise import relu_lines
from holonomy.theory.affine.arithmetic.forms import ROUNDING, UNIT, Form, Noise
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.encoders.graph import GraphBranch, graph_branch, reading
from holonomy.theory.attention.projections import NotCoveredError

if TYPE_CHECKING:
    from jaxtyping import Float

_Map = Callable[[Any], Tensor]

_ATEN: Any = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {}


class TracedBranch(GraphBranch):
    """Any encoder of linear maps and ReLU at one input."""

    def __init__(self, encoder: nn.Module, x: Tensor, edge_index: Tensor | Graph) -> None:
        if torch.is_grad_enabled():
            raise NotCoveredError(
                f"graph_encoder must be a GCN or a Propagation where bounds are differentiated, got {type(encoder)}."
            )
        self.encoder, self.x, self.edge_index = encoder, x, edge_index
        self.result = encoder(x, edge_index)
        self._followed(x.new_zeros(0, *x.shape))  # what is not covered is refused before the work

    def _followed(self, columns: Tensor) -> _Traced:
        point = _traced(self.x, columns, ROUNDING * columns.abs().sum(0), shared=True)
        return _lifted(self.encoder(point, self.edge_index), len(columns))

    def enclose(self, noise: Noise, moving: Tensor, victim: Tensor, basis: Tensor, radius: Tensor) -> Form:
        """One problem after the other, all nodes of each."""
        each: list[tuple[Tensor, Tensor, Tensor]] = []
        for node, asked, moved in zip(moving.tolist(), victim.tolist(), basis.mT * radius[:, None, None], strict=True):
            columns = moved.new_zeros(len(moved), *self.x.shape)
            columns[:, node] = moved
            found = self._followed(columns)
            each.append((found.center[asked], found.columns[:, asked].mT, found.box[asked]))
        center, columns, box = map(torch.stack, zip(*each, strict=True))
        self.last = Form(noise, center, columns, box)
        return self.last

    def below(self, problem: int, rows: Tensor, bad: Tensor) -> Quadratic:
        """The bound of the enclosure: nothing better is known."""
        del bad
        center, columns, box = (part[problem] for part in (self.last.center, self.last.columns, self.last.box))
        unit = ROUNDING * rows.shape[-1]
        loss = rows.abs() @ (box * (1 + unit) + unit * (center.abs() + columns.abs().sum(-1)))
        return Quadratic.linear(rows @ center, rows @ columns, loss)

    def sharpen(self, problem: int) -> None:
        """Nothing."""
        del problem


@reading.register
def _(encoder: nn.Module, dim: int) -> list[Tensor]:
    del encoder
    return [torch.eye(dim).double()]


@graph_branch.register
def _(encoder: nn.Module, x: Tensor, edge_index: Tensor | Graph) -> GraphBranch:
    return TracedBranch(encoder, x, edge_index)


class _Traced(Tensor):
    """All numbers :math:`c + G d + b`.

    What features do not move is ``still``: c alone. ``shared`` says that another tensor may look at the same memory.
    """

    center: Float[Tensor, "..."]
    columns: Float[Tensor, "first ..."]
    box: Float[Tensor, "..."]
    still: bool
    shared: bool

    # Methods and functions of torch come down to operations, all of which are seen below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAssignmentType]

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs, schema = kwargs or {}, func._schema  # noqa: SLF001
        every = [part for part in tree_leaves((args, kwargs)) if isinstance(part, _Traced)]
        looks = any(part.alias_info is not None for part in schema.returns)
        alone = schema.is_mutable and isinstance(args[0], _Traced) and not args[0].shared
        if schema.is_mutable and not (alone and schema.arguments[0].is_write):
            raise NotCoveredError(f"graph_encoder must not overwrite what other tensors may share, got {func.name()}.")
        if all(part.still for part in every):
            found = func(*tree_map(_center, args), **tree_map(_center, kwargs))
            found = args[0] if schema.is_mutable else tree_map(partial(_lifted, first=len(every[0].columns)), found)
        elif func in _RULES:
            first = args[:1] if schema.is_mutable else ()
            found = _RULES[func](func, *first, *tree_map(_settled, args[len(first) :]), **tree_map(_settled, kwargs))
        else:
            raise NotCoveredError(f"graph_encoder must be made of linear maps and ReLU, got {func.name()}.")
        if looks and not schema.is_mutable:
            for part in (*every, *tree_leaves(found)):
                part.shared = True
        return found

    @property
    def mass(self) -> Tensor:
        return self.center.abs() + self.columns.abs().sum(0) + self.box


def _traced(center: Tensor, columns: Tensor, box: Tensor, *, still: bool = False, shared: bool = False) -> _Traced:
    make: Any = Tensor._make_wrapper_subclass  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    made = make(_Traced, center.shape, dtype=center.dtype, device=center.device)
    made.center, made.columns, made.box, made.still, made.shared = center, columns, box, still, shared
    return made


def _center(x: Any) -> Any:
    return x.center if isinstance(x, _Traced) else x


def _settled(x: Any) -> Any:
    """A plain tensor where features do not move it."""
    return x.center if isinstance(x, _Traced) and x.still else x


def _lifted(x: Any, first: int) -> Any:
    """A constant as what nothing moves."""
    if isinstance(x, _Traced) or not isinstance(x, Tensor):
        return x
    return _traced(x, x.new_zeros(first, *x.shape), torch.zeros_like(x), still=True)


def _mapped(x: _Traced, center: _Map, size: _Map | None = None, terms: int = 0) -> _Traced:
    """A linear operation of so many terms; ``size`` is that of absolute values, where it is another."""
    loose = x.box if terms == 0 else x.box * (1 + 2 * terms * UNIT) + 2 * terms * UNIT * x.mass
    value, moved = center(x.center), [center(column) for column in x.columns]
    columns = torch.stack(moved) if moved else value.new_zeros(0, *value.shape)
    return _traced(value, columns, (size or center)(loose))


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the rule of operations, each with its overload; a mark stands for the one that overwrites, too."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            packet, overload = name.strip("!").split(".")
            plain = getattr(getattr(_ATEN, packet), overload)
            _RULES[plain] = rule
            if name.endswith("!"):
                _RULES[getattr(getattr(_ATEN, f"{packet}_"), overload)] = partial(_overwritten, rule, plain)
        return rule

    return register


def _overwritten(rule: Callable[..., Any], plain: Any, func: Any, x: _Traced, *how: Any, **more: Any) -> _Traced:
    del func
    found = rule(plain, x, *how, **more)
    x.center, x.columns, x.box, x.still = found.center, found.columns, found.box, False
    return x


@_rule("view.default", "_unsafe_view.default")
def _reshaped(func: Any, x: _Traced, size: Sequence[int]) -> _Traced:
    del func
    return _mapped(x, lambda part: part.reshape(size))


@_rule("t.default", "transpose.int", "permute.default", "unsqueeze.default", "squeeze.dim", "expand.default")
@_rule("slice.Tensor", "select.int", "detach.default", "alias.default", "clone.default", "repeat.default")
@_rule("index_select.default", "index.Tensor", "gather.default")
def _picked(func: Any, x: Any, *how: Any, **more: Any) -> _Traced:
    if not isinstance(x, _Traced):
        raise NotCoveredError(f"graph_encoder must index by what features do not move, got {func.name()}.")
    return _mapped(x, lambda part: func(part, *how, **more))


@_rule("split.Tensor", "split_with_sizes.default", "unbind.int")
def _cut(func: Any, x: _Traced, *how: Any, **more: Any) -> list[_Traced]:
    numbers = (func(part, *how, **more) for part in (x.center, x.box, *x.columns))
    return [
        _traced(center, torch.stack(columns) if columns else center.new_zeros(0, *center.shape), box)
        for center, box, *columns in zip(*numbers, strict=True)
    ]


@_rule("sum.default", "sum.dim_IntList", "mean.default", "mean.dim")
def _totalled(func: Any, x: _Traced, *how: Any, **more: Any) -> _Traced:
    return _mapped(x, lambda part: func(part, *how, **more), terms=x.numel() + 1)


@_rule("cat.default", "stack.default")
def _beside(func: Any, parts: Sequence[Any], dim: int = 0) -> _Traced:
    first = max(len(part.columns) for part in parts if isinstance(part, _Traced))
    every = [_lifted(part, first) for part in parts]
    center, box = (func([getattr(part, name) for part in every], dim) for name in ("center", "box"))
    moved = [func([part.columns[i] for part in every], dim) for i in range(first)]
    return _traced(center, torch.stack(moved) if moved else center.new_zeros(0, *center.shape), box)


@_rule("new_zeros.default", "zeros_like.default", "new_ones.default", "ones_like.default", "new_full.default")
def _constant(func: Any, x: _Traced, *how: Any, **more: Any) -> _Traced:
    return _lifted(func(x.center, *how, **more), len(x.columns))


@_rule("_to_copy.default")
def _copied(func: Any, x: _Traced, **more: Any) -> _Traced:
    if more.get("dtype") not in (None, x.dtype):
        raise NotCoveredError(f"graph_encoder must keep the dtype of its features, got {more['dtype']}.")
    return _mapped(x, lambda part: func(part, **more))


@_rule("add.Tensor!", "sub.Tensor!")
def _added(func: Any, x: Any, y: Any, *, alpha: float = 1) -> _Traced:
    other = -alpha if func is _ATEN.sub.Tensor else alpha
    first = max(len(part.columns) for part in (x, y) if isinstance(part, _Traced))
    x, y = (_lifted(part if isinstance(part, Tensor) else torch.tensor(part).double(), first) for part in (x, y))
    shape = torch.broadcast_shapes(x.shape, y.shape)
    columns = _wide(x.columns, shape) + other * _wide(y.columns, shape)
    box = (x.box + abs(other) * y.box) * (1 + ROUNDING) + ROUNDING * (x.mass + abs(other) * y.mass)
    return _traced(x.center + other * y.center, columns, box)


def _wide(columns: Tensor, shape: Sequence[int]) -> Tensor:
    missing = len(shape) - (columns.ndim - 1)
    return columns.reshape(len(columns), *missing * (1,), *columns.shape[1:]).expand(len(columns), *shape)


@_rule("mul.Tensor!", "div.Tensor!", "mul.Scalar", "neg.default")
def _scaled(func: Any, x: Any, *by: Any) -> _Traced:
    if func is _ATEN.mul.Tensor and not isinstance(x, _Traced):
        x, by = by[0], (x,)
    if not isinstance(x, _Traced) or any(isinstance(part, _Traced) for part in by):
        raise NotCoveredError(f"graph_encoder must be linear but for ReLU, got {func.name()} by what features move.")
    return _mapped(x, lambda part: func(part, *by), lambda part: func(part, *map(abs, by)).abs(), 2)


@_rule("mm.default", "bmm.default")
def _multiplied(func: Any, x: Any, y: Any) -> _Traced:
    if isinstance(x, _Traced) and isinstance(y, _Traced):
        raise NotCoveredError(f"graph_encoder must be linear but for ReLU, got {func.name()} by what features move.")
    terms = x.shape[-1] + 1
    if isinstance(x, _Traced):
        return _mapped(x, lambda part: func(part, y), lambda part: func(part, y.abs()), terms)
    return _mapped(y, lambda part: func(x, part), lambda part: func(x.abs(), part), terms)


@_rule("addmm.default")
def _affine(func: Any, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> _Traced:
    del func
    return _added(_ATEN.add.Tensor, beta * bias, torch.mm(x, y), alpha=alpha)


@_rule("native_batch_norm.default", "_native_batch_norm_legit_no_training.default")
def _standardised(
    func: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *how: Any
) -> tuple[_Traced, Tensor, Tensor]:
    """By running statistics: a number and a shift for each entry."""
    if variance is None or (len(how) == 3 and how[0]):
        raise NotCoveredError(f"graph_encoder must normalise by running statistics, got {func.name()} of a batch.")
    gain = (variance + how[-1]).rsqrt() * (1.0 if weight is None else weight)
    mean, gain, shift = (
        part.view(-1, *(x.ndim - 2) * (1,)) for part in (mean, gain, torch.zeros_like(mean) if bias is None else bias)
    )
    found = _scaled(_ATEN.mul.Tensor, _added(_ATEN.sub.Tensor, x, mean), gain)
    found = _added(_ATEN.add.Tensor, found, shift)
    return found, mean.new_zeros(0), mean.new_zeros(0)


@_rule("index_add.default!", "scatter_add.default!")
def _gathered(func: Any, x: Any, dim: int, index: Tensor, source: Any, *, alpha: float = 1) -> _Traced:
    zero = torch.zeros_like(_center(x))
    if isinstance(source, _Traced):
        source = _mapped(source, lambda part: func(zero, dim, index, part), terms=source.shape[dim] + 1)
    else:
        source = func(zero, dim, index, source)
    return _added(_ATEN.add.Tensor, x, source, alpha=alpha)


@_rule("relu.default!")
def _rectified(func: Any, x: _Traced) -> _Traced:
    del func
    reach = (x.columns.norm(dim=0) + x.box) * (1 + ROUNDING) + ROUNDING * x.center.abs()
    slope, half, _ = relu_lines(x.center, reach)
    return _traced(slope * x.center + half, slope * x.columns, slope * x.box + half + ROUNDING * (x.mass + half))
