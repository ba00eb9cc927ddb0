"""Validation of arguments: one clear sentence for each bad shape, dtype or value.

Public functions and constructors call it; what they call checks nothing again. Shape checks are free and may run in
``forward``. Values are read in constructors, where something is computed once, and where nothing waits for them: on a
CPU, outside of ``torch.compile`` and of the transformations of ``torch.func``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from holonomy._autograd import autocast_device, batched, traced, transformed

_Choice = TypeVar("_Choice", bound=str)


def positive_int(name: str, value: int) -> int:
    """``value``, if it is a positive integer, of Python or of NumPy, as torch takes sizes."""
    _number(name, value, Integral, "a positive integer")
    if value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value}.")
    return int(value)


def nonnegative_int(name: str, value: int) -> int:
    """``value``, if it is an integer from zero on: an order, or a size that may be none."""
    _number(name, value, Integral, "an integer from 0 on")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}.")
    return int(value)


def row(name: str, value: int, count: int, meaning: str) -> int:
    """The row that an integer names, negative ones from the end."""
    _number(name, value, Integral, "an integer")
    if not -count <= value < count:
        raise ValueError(f"{name} must lie in [-{count}, {meaning} = {count}), got {value}.")
    return value % count


def in_range(name: str, value: float, low: float, high: float) -> float:
    """``value``, if it is a number in ``[low, high]``."""
    _number(name, value, Real, f"a number in [{low}, {high}]")
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}.")
    return value


def flags(**named: bool) -> None:
    """Refuse what is neither True nor False, such as ``"no"``, which Python takes as true."""
    for name, value in named.items():
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name} must be True or False, got {_in_one_line(value)}.")


def finite_negative(name: str, value: float | Tensor) -> float:
    """``value``, if it is a finite negative number, or a tensor of one that does not learn."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    if not (math.isfinite(value) and value < 0):
        raise ValueError(f"{name} must be finite and negative, got {value}.")
    return float(value)


def positive(name: str, value: float) -> float:
    """``value``, if it is a positive finite number."""
    _number(name, value, Real, "a positive number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value}.")
    return value


def numbers(**named: float) -> None:
    """Refuse anything but real numbers; infinities and nan are some."""
    for name, value in named.items():
        if not isinstance(value, Real):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name} must be a number, got {_in_one_line(value)}.")


def finite_number(name: str, value: float) -> float:
    """``value``, if it is a finite number."""
    in_range(name, value, -math.inf, math.inf)
    if math.isinf(value):
        raise ValueError(f"{name} must be finite, got {value}.")
    return value


def nonnegative(name: str, value: float) -> float:
    """``value``, if it is a finite number and not negative."""
    _number(name, value, Real, "a number, not negative")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and not negative, got {value}.")
    return value


def size(shape: Sequence[int]) -> None:
    """Refuse anything but a shape of points: integers, of which the last is at least 1."""
    if not all(isinstance(entry, SupportsIndex) for entry in shape):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"size must be integers, got {tuple(shape)}.")
    if not shape or min(shape) < 0 or shape[-1] < 1:
        raise ValueError(f"size must be a shape (..., d + 1), got {tuple(shape)}.")


def one_of(name: str, value: _Choice, choices: Collection[str]) -> _Choice:
    """``value``, if it is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {_in_one_line(value)}.")
    return value


def sequence(name: str, values: object, meaning: str, kind: type | UnionType = object) -> list[Any]:
    """The entries of a sequence or another iterable; a string and a mapping are refused."""
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of {meaning}, got {_in_one_line(values)}.")
    entries = list(values)
    for entry in entries:
        if not isinstance(entry, kind):
            raise TypeError(f"{name} must be a sequence of {meaning}, got {_in_one_line(entry)} in it.")
    return entries


def _number(name: str, value: object, kind: type, meaning: str) -> None:
    """Refuse what is no number of a kind, of Python or of NumPy; nor is True or False."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {meaning}, got {_in_one_line(value, typed=kind is Integral)}.")


def _in_one_line(value: object, *, typed: bool = False) -> str:
    """A value, or its type where it is longer than a line, as a tensor is."""
    written, kind = repr(value), type(value).__name__
    if "\n" in written or len(written) > 80:
        return f"a {kind}"
    return f"{written} of type {kind}" if typed else written


def generator(value: torch.Generator | None) -> None:
    """Refuse anything but a source of random numbers."""
    if value is not None and not isinstance(value, torch.Generator):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"generator must be a torch.Generator, got {_in_one_line(value)}.")


def last_axis(
    name: str, x: Tensor, size: int, meaning: str, layer: nn.Module | None = None, *, sparse: bool = False
) -> None:
    """Refuse a tensor whose last axis has not ``size`` entries, or that a layer cannot multiply with."""
    floating(name, x)
    if not sparse:
        dense(name, x)
    if x.ndim == 0 or x.shape[-1] != size:
        raise ValueError(f"{name} must have shape (..., {meaning} = {size}), got {tuple(x.shape)}.")
    if x.layout == torch.strided:
        _fits_layer(layer, name, x)


def rows(name: str, x: Tensor, size: int, meaning: str, layer: nn.Module | None = None) -> None:
    """Refuse a tensor that has no axis of rows before a last axis of ``size`` entries, as :func:`last_axis` does."""
    floating(name, x)
    dense(name, x)
    if x.ndim < 2 or x.shape[-1] != size:
        raise ValueError(f"{name} must have shape (*batch, n, {meaning} = {size}), got {tuple(x.shape)}.")
    _fits_layer(layer, name, x)


def matrix(name: str, x: Tensor, rows: str, columns: str, width: int | None = None) -> None:
    """Refuse anything but a dense floating-point matrix."""
    floating(name, x)
    dense(name, x)
    if x.ndim != 2 or width not in (None, x.shape[1]):
        size = "" if width is None else f" = {width}"
        raise ValueError(f"{name} must have shape ({rows}, {columns}{size}), got {tuple(x.shape)}.")


def padding_mask(name: str, mask: Tensor, shape: Sequence[int]) -> None:
    """Refuse a mask that is not boolean or does not have one entry a token."""
    boolean(name, mask, shape, "padding", "(*batch, n) = ")


def node_mask(mask: Tensor, shape: Sequence[int]) -> None:
    """Refuse a mask of nodes that is not boolean or does not have one entry a node."""
    boolean("mask", mask, shape, "nodes")


def boolean(name: str, mask: Tensor, shape: Sequence[int] | None, at: str, symbols: str = "") -> None:
    """Refuse what is not boolean or has another shape."""
    tensor(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean, True at {at}, got {mask.dtype}.")
    if shape is not None:
        shaped(name, mask, shape, symbols)
    elif mask.ndim == 0:
        raise ValueError(f"{name} must have shape (*batch, n), got ().")


def broadcasting_mask(name: str, mask: Tensor, shape: Sequence[int], axes: int, symbols: str) -> None:
    """Refuse a mask that is not boolean or does not broadcast to a shape, of which it must have the last axes."""
    tensor(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean, got {mask.dtype}.")
    broadcasting(name, mask, shape, axes, symbols)


def broadcasting(name: str, x: Tensor, shape: Sequence[int], axes: int, symbols: str) -> None:
    """Refuse a tensor that does not broadcast to a shape, of which it must have the last axes."""
    fits = zip(reversed(x.shape), reversed(shape), strict=False)
    if not axes <= x.ndim <= len(shape) or any(size not in (1, wanted) for size, wanted in fits):
        raise ValueError(f"{name} must broadcast to {symbols} = {tuple(shape)}, got {tuple(x.shape)}.")


def shaped(name: str, x: Tensor, wanted: Sequence[int], symbols: str = "") -> None:
    """Refuse anything but a dense tensor of a shape."""
    tensor(name, x)
    dense(name, x)
    if tuple(x.shape) != tuple(wanted):
        raise ValueError(f"{name} must have shape {symbols}{tuple(wanted)}, got {tuple(x.shape)}.")


def function(name: str, value: object) -> None:
    """Refuse anything but a function; a class, too, which makes another object of a tensor."""
    if isinstance(value, type) or not callable(value):
        came = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be callable, got {came}.")


def tensor(name: str, x: object) -> None:
    """Refuse anything but a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")


def floating(name: str, x: Tensor) -> None:
    """Refuse anything but a tensor of real floating-point numbers."""
    tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}.")


def floating_dtype(dtype: torch.dtype | None, *, needed: bool = False) -> None:
    """Refuse a dtype that is not one of real floating-point numbers, and None where one is needed."""
    right = dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype is None and not needed
    if not right:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}.")


def vectors(least: int = 1, /, **named: Tensor) -> None:
    """Refuse anything but dense floating-point vectors of one width, whose other axes broadcast."""
    shapes: dict[str, torch.Size] = {}
    for name, x in named.items():
        floating(name, x)
        dense(name, x)
        if x.ndim == 0 or x.shape[-1] < least:
            raise ValueError(f"{name} must have shape (..., width), got {tuple(x.shape)}.")
        for other, shape in shapes.items():
            if x.shape[-1] != shape[-1] or not all(
                a in (b, 1) or b == 1 for a, b in zip(reversed(x.shape), reversed(shape), strict=False)
            ):
                wanted = f"(..., {shape[-1]}) that broadcasts with {tuple(shape)}"
                raise ValueError(f"{name} must have a shape {wanted}, that of {other}, got {tuple(x.shape)}.")
        shapes[name] = x.shape


def finite(name: str, x: Tensor, least: float = -math.inf) -> None:
    """Refuse infinities, nan and numbers below ``least``, where they can be read without waiting."""
    _all_finite(name, x, "finite" if math.isinf(least) else f"finite and at least {least:g}", lambda x: x >= least)


def nonzero(name: str, x: Tensor) -> None:
    """Refuse zero vectors, which have no direction, where they can be read without waiting."""
    if x.numel() and costs_nothing_to_read(x) and not bool((x.detach() != 0).any(-1).all()):
        raise ValueError(f"{name} must have a direction, got a zero vector.")


def above_zero(name: str, x: Tensor) -> None:
    """Refuse infinities, nan, zero and negative numbers, where they can be read without waiting."""
    _all_finite(name, x, "positive and finite", lambda x: x > 0)


def _all_finite(name: str, x: Tensor, wanted: str, right: Callable[[Any], Any]) -> None:
    """Refuse numbers that are not finite or not right, and say how many there are and where the first one is."""
    if x.numel() == 0 or not costs_nothing_to_read(x):
        return
    x = x.detach()
    # nan, if there is one, is both.
    if all(math.isfinite(bound) and right(bound) for bound in map(float, x.aminmax())):
        return
    wrong = ~(x.isfinite() & right(x))
    first = wrong.nonzero()[0].tolist()
    came = f"{x[tuple(first)].item():g}"
    if x.numel() > 1:
        came = f"{int(wrong.sum())} of {x.numel()} numbers that are not, the first {came} at {first}"
    raise ValueError(f"{name} must be {wanted}, got {came}.")


def in_ball(x: Tensor, curvature: Tensor, slack: float) -> None:
    """Refuse points outside of the ball of radius ``1/sqrt(-curvature)``, where they can be read without waiting."""
    if x.numel() and costs_nothing_to_read(x) and costs_nothing_to_read(curvature.detach()):
        radius = (-float(curvature.detach())) ** -0.5
        farthest = float(torch.linalg.vector_norm(x.detach().to(torch.float64), dim=-1).amax())
        if not farthest <= radius * (1 + slack):
            raise ValueError(f"p must lie in the ball of radius {radius:g}, got a point of length {farthest:g}.")


def integers(name: str, x: Tensor, *, unsigned: bool = False) -> None:
    """Refuse anything but a dense tensor of integers that torch can compare, a boolean one too: it may mean a mask."""
    tensor(name, x)
    dense(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {x.dtype}.")
    if not unsigned and x.dtype in {torch.uint16, torch.uint32, torch.uint64}:
        raise TypeError(f"{name} must hold integers that torch compares, as those of .long(), got {x.dtype}.")


def array(name: str, x: object) -> None:
    """Refuse anything but a tensor or a NumPy array, in memory or mapped to it."""
    if not isinstance(x, Tensor | np.ndarray):
        raise TypeError(f"{name} must be a tensor or a NumPy array, got {type(x).__name__}.")


def apart(name: str, written: Any, other: str, read: Any) -> None:
    """Refuse to write to what shares memory with an array that is read until the end."""
    if np.shares_memory(_as_numpy(written), _as_numpy(read)):
        raise ValueError(f"{name} must share no memory with {other}, which is read until the end, got one that does.")


def _as_numpy(x: Any) -> np.ndarray:
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()  # NumPy knows no bfloat16


def dense(name: str, x: Tensor) -> None:
    """Refuse a sparse tensor, where there is no product of it."""
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}.")


def device(name: str, value: torch.device | str) -> None:
    """Refuse anything but a device: a dtype, say, which ``torch.Tensor.to`` would take."""
    if not isinstance(value, torch.device | str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be a torch.device or its name, got {_in_one_line(value)}.")


def on_device(device: torch.device, **named: Tensor) -> None:
    """Refuse tensors that lie on another device, where torch may look up what is not there."""
    for name, x in named.items():
        if x.device != device:
            raise ValueError(f"{name} must be on the device {device} of the other arguments, got {x.device}.")


def codes(name: str, x: Tensor, count: int, meaning: str, least: int = 0) -> None:
    """Refuse numbers that are looked up in a table and are not in it, where they can be read without waiting."""
    integers(name, x)
    if costs_nothing_to_read(x) and (outside := _outside(x, count, least)):
        raise ValueError(f"{name} must lie in [{least}, {meaning} = {count}), got {outside}.")


def unread(module: object, advice: str, **of_edges: object) -> None:
    """Refuse features or weights of edges that a module does not read."""
    for name, given in of_edges.items():
        if given is not None:
            kind = {"edge_attr": "features", "edge_weight": "weights"}[name]
            raise ValueError(
                f"{name} must be None with {type(module).__name__}, which reads no {kind} of edges; {advice}."
            )


def edge_attr(given: Tensor | None, features: int) -> None:
    """Refuse features of edges that are missing, or that have no use."""
    if given is None and features:
        raise ValueError(f"edge_attr must have shape (edges, edge_features = {features}), got None.")
    if given is not None and not features:
        tensor("edge_attr", given)
        raise ValueError(f"edge_attr must be None in what was made without edge_features, got {tuple(given.shape)}.")


def edge_types(edge_attr: Tensor, count: int, edge_index: Tensor) -> None:
    """Refuse types of other edges."""
    codes("edge_attr", edge_attr, count, "edge_types")
    on_device(edge_index.device, edge_attr=edge_attr)
    shaped("edge_attr", edge_attr, edge_index.shape[1:], "(edges,) = ")


def membership(batch: Tensor, nodes: int) -> None:
    """Refuse anything but the graph of each node. It reads the values, which layouts of graphs read anyway."""
    integers("batch", batch)
    if batch.shape != (nodes,):
        raise ValueError(f"batch must have shape (n = {nodes},), got {tuple(batch.shape)}.")
    if _can_be_read(batch) and batch.numel() and int(batch.min()) < 0:
        raise ValueError(f"batch must number graphs from 0 on, got {int(batch.min())}.")


def number_of_graphs(batch: Tensor | None, num_graphs: int | None) -> int:
    """How many graphs there are: one, as many as ``batch`` numbers, or more where the last ones have no node."""
    seen = 1 if batch is None else int(batch.max()) + 1 if batch.numel() else 0
    if num_graphs is None:
        return seen
    if nonnegative_int("num_graphs", num_graphs) < seen:
        raise ValueError(f"num_graphs must be at least the {seen} that batch numbers, got {num_graphs}.")
    return num_graphs


def only_with_batch(num_graphs: int | None, batch: Tensor | None) -> None:
    """Refuse a number of graphs where one graph came."""
    if num_graphs is not None and batch is None:
        raise ValueError(f"num_graphs must be None without batch, got {num_graphs}.")


def nodes(x: Tensor, batch: Tensor | None = None) -> None:
    """Refuse features of nodes and the graphs of nodes that do not fit together."""
    floating("x", x)
    if x.ndim != 2:
        raise ValueError(f"x must have shape (nodes, features), got {tuple(x.shape)}.")
    if batch is not None:
        membership(batch, x.shape[0])
        on_device(x.device, batch=batch)


def graph(x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None, batch: Tensor | None = None) -> None:
    """Refuse nodes, edges, their features and the graphs of nodes that do not fit together."""
    # The nodes that edges name are checked where they can be read without waiting.
    nodes(x, batch)
    _edge_list(edge_index)
    on_device(x.device, edge_index=edge_index)
    if edge_attr is not None:
        floating("edge_attr", edge_attr)
        dense("edge_attr", edge_attr)
        if edge_attr.ndim != 2 or edge_attr.shape[0] != edge_index.shape[1]:
            wanted = f"(edges = {edge_index.shape[1]}, features)"
            raise ValueError(f"edge_attr must have shape {wanted}, got {tuple(edge_attr.shape)}.")
        on_device(x.device, edge_attr=edge_attr)
    if costs_nothing_to_read(edge_index) and (batch is None or costs_nothing_to_read(batch)):
        edges(edge_index, x.shape[0], batch)


def edges(edge_index: Tensor, n: int, batch: Tensor | None = None, name: str = "edge_index") -> None:
    """Refuse anything but a list of edges between n nodes. It reads the values: for what is computed once."""
    nonnegative_int("n", n)
    _edge_list(edge_index, name)
    if edge_index.is_meta:
        return
    if outside := _outside(edge_index, n):
        raise ValueError(f"{name} must name nodes in [0, n = {n}), got {outside}.")
    if batch is not None:
        source, target = batch[edge_index.long()]
        across = source != target
        if bool(across.any()):
            edge = tuple(edge_index[:, across][:, 0].tolist())
            raise ValueError(f"edge_index must join nodes of one graph, got the edge {edge}.")


def _edge_list(edge_index: Tensor, name: str = "edge_index") -> None:
    tensor(name, edge_index)
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"{name} must have shape (2, edges), got {tuple(edge_index.shape)}.")
    integers(name, edge_index)


def _fits_layer(layer: nn.Module | None, name: str, x: Tensor) -> None:
    own = [] if layer is None else [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    if own and x.device != own[0].device:
        raise ValueError(f"{name} must be on the device of the layer, {own[0].device}, got {x.device}.")
    if own and x.dtype != own[0].dtype and not torch.is_autocast_enabled(autocast_device(x)):
        raise TypeError(f"{name} must have the dtype of the layer, {own[0].dtype}, got {x.dtype}.")


def _outside(x: Tensor, count: int, least: int = 0) -> str:
    """The smallest and the largest number, where one is not in [least, count), or the only one."""
    if x.numel() == 0 or traced():
        return ""
    smallest, largest = (int(value) for value in x.aminmax())
    if least <= smallest <= largest < count:
        return ""
    return f"{smallest}" if smallest == largest else f"{smallest} .. {largest}"


def _can_be_read(x: Tensor) -> bool:
    # A fake tensor, with which torch traces, has a device and no values; it is of another class, as a parameter too.
    without_values = torch.compiler.is_compiling() or transformed() or type(x) not in (Tensor, nn.Parameter)
    return not (without_values or x.is_meta or batched(x))


def costs_nothing_to_read(x: Tensor) -> bool:
    """Whether values can be read without waiting for another device."""
    return x.device.type == "cpu" and _can_be_read(x)


def rewritten(x: Tensor, before: Tensor) -> bool:
    """Whether numbers are others than before. Torch does not count what NumPy, another process or ``.data`` writes."""
    return costs_nothing_to_read(x) and not torch.equal(x, before)
