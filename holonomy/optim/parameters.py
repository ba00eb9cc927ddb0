"""What a Riemannian optimizer asks of parameters: on which manifold they lie, and which rows have a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard, cast

import geoopt
import numpy as np
import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._shapes import Float
from holonomy.manifolds import Lorentz, Product
from holonomy.manifolds.hyperboloid.views import dot


class Entry(NamedTuple):
    """What one step moves: a parameter, or copies of some of its ``rows``; their gradient and their state."""

    parameter: Tensor
    grad: Tensor
    state: dict[str, Any]
    rows: Tensor | None = None


def parameters_or_groups(params: object) -> list[Any]:
    """The list of what an optimizer is given; one clear sentence where it is something else."""
    if isinstance(params, Tensor | nn.Module):
        raise TypeError(
            f"params must be an iterable of parameters, like module.parameters(), got a {type(params).__name__}."
        )
    given = checks.sequence(
        "params", cast("Iterable[Any]", params), "parameters or groups of them", Tensor | dict | tuple
    )
    if not given:
        raise ValueError("params must be parameters or groups of them, at least one, got none.")
    return list(given)


def check_parameter(parameter: Tensor) -> None:
    """Refuse what has lost its manifold, warn of what will."""
    checks.floating("params", parameter)
    if getattr(parameter, "sharded_points", False):
        raise TypeError(
            "params must not hold learned points that fully_shard has cut up, which have no manifold: name them in "
            f"its ignored_params, got shards of shape {tuple(parameter.shape)}."
        )
    manifold = manifold_of(parameter)
    factors = [factor for factor, _ in manifold.factors] if isinstance(manifold, Product) else [manifold]
    if any(_learns(each) for each in factors):
        follows = "ProductEmbedding" if isinstance(manifold, Product) else "LorentzPoints"
        warnings.warn(
            f"params hold a point of {manifold}, which it leaves when the curvature moves: use "
            f"holonomy.manifolds.{follows}, which follows.",
            stacklevel=6,
        )


def _learns(manifold: object) -> bool:
    """Whether the curvature of a hyperboloid, which its points cannot follow, receives gradients."""
    if isinstance(manifold, Lorentz):
        return manifold.curvature_parameter.log_ratio.requires_grad
    return isinstance(manifold, geoopt.Lorentz) and cast("Tensor", manifold.k).requires_grad


def check_learning_rate(lr: object) -> None:
    """A number or a tensor with one element, not negative."""
    one = isinstance(lr, Tensor) and lr.numel() == 1
    checks.nonnegative("lr", cast("float", cast("Tensor", lr).item() if one else lr))


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Refuse, before anything moves, gradients that no step is defined for."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            check_shape("grad", grad, parameter)
            if grad.layout == torch.strided:
                continue
            if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1 or grad.dense_dim() != 1:
                raise RuntimeError(
                    f"{type(optimizer).__name__} takes dense gradients and those of sparse embeddings (whole rows of "
                    f"a table), got one of layout {grad.layout} for a parameter of shape {tuple(parameter.shape)}."
                )
            if group["weight_decay"]:
                raise RuntimeError(
                    f"weight_decay must be 0 where a gradient is sparse, as rows that are not touched do not move, "
                    f"got {group['weight_decay']}."
                )


def check_shape(name: str, x: Tensor, parameter: Tensor) -> None:
    """Refuse what torch compares by number only: its fused kernel goes past the end of a shorter tensor."""
    if x.shape != parameter.shape:
        raise RuntimeError(
            f"{name} must have the shape of its parameter, {tuple(parameter.shape)}, got {tuple(x.shape)}."
        )


def follow(parameter: Tensor, state: dict[str, Any], name: str) -> None:
    """Bring a state after a parameter that was moved to another dtype or device, as ``load_state_dict`` brings one."""
    kept = state.get(name)
    if kept is None:
        return
    check_shape(name, kept, parameter)
    if kept.dtype == parameter.dtype and kept.device == parameter.device:
        return
    for each, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            # One number a row that is seen in the shape of the table stays one.
            of_rows = value.ndim > 0 and not value.stride(-1)
            there = (value[..., :1] if of_rows else value).to(parameter.device, parameter.dtype)
            state[each] = there.expand(parameter.shape) if of_rows else there


def manifold_of(parameter: Tensor) -> geoopt.Manifold | None:
    """The manifold of a parameter; None where it is Euclidean."""
    if not isinstance(parameter, geoopt.ManifoldTensor):
        return None
    manifold = parameter.manifold
    return None if type(manifold) is geoopt.Euclidean else manifold


def is_hyperboloid(manifold: geoopt.Manifold | None) -> TypeGuard[geoopt.Lorentz]:
    """Whether one number says the curvature."""
    # Geoopt's k may hold one number a row, which its own methods understand in some shapes only.
    return isinstance(manifold, Lorentz) or (
        isinstance(manifold, geoopt.Lorentz) and cast("Tensor", manifold.k).numel() == 1
    )


def radius_of(manifold: geoopt.Lorentz, like: Tensor) -> Float[Tensor, "1 1"]:
    """The radius of curvature; ours is computed in the dtype of the points, where Geoopt's k ends."""
    if isinstance(manifold, Lorentz):
        found = manifold.curvature.to(like).neg().rsqrt()
    else:
        found = cast("Tensor", manifold.k).to(like).sqrt()
    return found.reshape(1, 1)


def entry_of(parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> Entry:
    """All of a parameter, or the rows that a sparse gradient names, each once."""
    if not grad.is_sparse:
        return Entry(parameter, grad, state)
    rows, values = _named_once(grad)
    own = {
        name: _taken(value, rows) if isinstance(value, Tensor) and value.ndim else value
        for name, value in state.items()
    }
    return Entry(_taken(parameter.detach().as_subclass(Tensor), rows), values, own, rows)


def _named_once(grad: Tensor) -> tuple[Tensor, Tensor]:
    """``coalesce``: the rows that a sparse gradient names, ascending, and their sums."""
    # On a CPU in a third of torch's time: sorted sixteen bits at a time, and most rows are not added to anything.
    given = grad._values()  # noqa: SLF001
    if grad.is_coalesced() or not grad._nnz() or given.device.type != "cpu":  # noqa: SLF001
        grad = grad.coalesce()
        return grad.indices()[0], grad.values()
    named = grad._indices()[0].numpy()  # noqa: SLF001
    order = np.argsort(named.astype(np.uint16), kind="stable")
    for shift in range(16, int(named.max()).bit_length(), 16):
        order = order[np.argsort((named >> shift).astype(np.uint16)[order], kind="stable")]
    named = named[order]
    first = np.append(True, named[1:] != named[:-1])
    starts, again = np.flatnonzero(first), np.flatnonzero(~first)
    values = given.index_select(0, torch.from_numpy(order[starts]))
    place = np.searchsorted(starts, again, side="right") - 1
    values.index_add_(0, torch.from_numpy(place), given.index_select(0, torch.from_numpy(order[again])))
    return torch.from_numpy(named[starts]), values


def _taken(table: Tensor, rows: Tensor) -> Tensor:
    """Copies of some rows; one number a row that is seen in the shape of the table stays one."""
    if table.ndim > 1 and not table.stride(-1):
        return table[..., :1].index_select(0, rows).expand(len(rows), *table.shape[1:])
    return table.index_select(0, rows)


def by_factor(entry: Entry, manifold: geoopt.Manifold | None) -> list[tuple[Entry, geoopt.Manifold | None]]:
    """An entry and its manifold; of points of a product the columns of each factor, as views."""
    if not isinstance(manifold, Product):
        return [(entry, manifold)]
    point = entry.parameter.detach().as_subclass(Tensor)
    found: list[tuple[Entry, geoopt.Manifold | None]] = []
    for (factor, _), part in zip(manifold.factors, manifold.slices, strict=True):
        state = {name: x[..., part] if isinstance(x, Tensor) and x.ndim else x for name, x in entry.state.items()}
        found.append((Entry(point[..., part], entry.grad[..., part], state), factor))
    return found


def write_back(parameter: Tensor, state: dict[str, Any], entry: Entry) -> None:
    """Put stepped copies back in their rows."""
    if entry.rows is None:
        return
    parameter.detach().as_subclass(Tensor).index_copy_(0, entry.rows, entry.parameter)
    for name, value in entry.state.items():
        if isinstance(value, Tensor) and value.ndim:
            # Where one number a row is seen in the shape of the table, that column is all there is.
            stop = value.shape[-1] if state[name].stride(-1) else 1
            state[name][..., :stop].index_copy_(0, entry.rows, value[..., :stop])


def stabilize(point: Tensor, momentum: Tensor | None, manifold: geoopt.Manifold) -> None:
    """Project points and their momenta, where there are some, to a manifold, in place."""
    if not is_hyperboloid(manifold):
        point.copy_(manifold.projx(point))
        if momentum is not None:
            momentum.copy_(manifold.proju(point, momentum))
        return
    space = numerics.widen(point[..., 1:])
    radius = radius_of(manifold, space).view(1)
    time = numerics.hypot(numerics.norm(space, keepdim=True), radius)
    point[..., :1] = numerics.narrow(time, point.dtype)
    if momentum is not None:
        momentum[..., :1] = numerics.narrow(dot(space / time, numerics.widen(momentum[..., 1:])), point.dtype)
