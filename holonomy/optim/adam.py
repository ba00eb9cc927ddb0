"""Riemannian Adam: Geoopt's rule, with Euclidean tensors fused and hyperboloid tables stacked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import geoopt
import torch
from torch import Tensor
from torch.optim.adam import adam

from holonomy import checks, numerics
from holonomy._autograd import eager
from holonomy.manifolds import Product
from holonomy.optim.optimizer import RiemannianOptimizer
from holonomy.optim.parameters import (
    Entry,
    by_factor,
    check_learning_rate,
    entry_of,
    is_hyperboloid,
    manifold_of,
    parameters_or_groups,
    radius_of,
    write_back,
)
from holonomy.optim.tables import Rows, Rule, step_tables

# Devices on which torch has a fused Adam since 2.6.
_FUSED_DEVICES = frozenset({"cpu", "cuda"})

_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")


def _step_euclidean(entries: list[Entry], group: dict[str, Any], step: int) -> None:
    """Torch's Adam on lists of tensors that share device, dtype and step count."""
    device = entries[0].parameter.device
    lists = [
        [entry.parameter for entry in entries],
        [entry.grad for entry in entries],
        [entry.state["exp_avg"] for entry in entries],
        [entry.state["exp_avg_sq"] for entry in entries],
        [entry.state["max_exp_avg_sq"] for entry in entries] if group["amsgrad"] else [],
    ]
    beta1, beta2 = map(float, group["betas"])
    options: dict[str, Any] = {
        "amsgrad": group["amsgrad"],
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": False,
    }
    # The fused kernel walks through memory: every tensor of a parameter in the same order.
    if device.type in _FUSED_DEVICES and all(t.is_contiguous() for part in lists for t in part):
        # Called past torch.optim.adam.adam, which counts every parameter's steps in a tensor.
        kernel: Callable[..., None] = torch._fused_adam_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        count = torch.full((), float(step), dtype=torch.float32, device=device)
        kernel(*lists, [count] * len(entries), lr=_rate(group["lr"], device), **options)
    else:
        before = list(torch.full((len(entries),), step - 1.0, dtype=torch.float32, device="cpu").unbind())
        call: Callable[..., None] = adam
        call(*lists, before, foreach=True, lr=float(group["lr"]), **options)


def _step_generic(entry: Entry, manifold: geoopt.Manifold, rule: Rule, *, amsgrad: bool) -> None:
    """Geoopt's step through the manifold's own methods."""
    parameter, grad, state, _ = entry
    exp_avg, second = state["exp_avg"], state["exp_avg_sq"]
    # A copy in any case: Geoopt's egrad2rgrad may write into its argument.
    grad = manifold.egrad2rgrad(parameter, torch.add(grad, parameter, alpha=rule.decay))
    if getattr(manifold, "ndim", None) == 1:  # of longer rows the square would not fit
        grad = numerics.within(grad, math.sqrt(torch.finfo(grad.dtype).max) / 2)
    exp_avg.mul_(rule.beta1).add_(grad, alpha=1 - rule.beta1)
    square = manifold.component_inner(parameter, grad)
    second.mul_(rule.beta2).add_(square, alpha=1 - rule.beta2)
    if amsgrad:
        second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
    direction = numerics.safe_div(exp_avg, second.sqrt().add_(rule.eps))
    point, momentum = manifold.retr_transp(parameter, numerics.finite(-rule.rate * direction), exp_avg)
    parameter.copy_(numerics.finite(point))
    exp_avg.copy_(momentum)


def _rule(group: dict[str, Any], step: int, device: torch.device) -> Rule:
    beta1, beta2 = map(float, group["betas"])
    # (m / c1) / (sqrt(v / c2) + eps) = (m sqrt(c2) / c1) / (sqrt(v) + eps sqrt(c2))
    correction1, root2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
    return Rule(
        rate=_rate(group["lr"], device) * (root2 / correction1),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"] * root2,
        decay=group["weight_decay"],
    )


def _rate(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """The learning rate; one that lives on a device beside the parameters is not waited for."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu" and device.type != "cpu":
        return lr.reshape(()).to(device)
    return float(lr)


def _start(parameter: Tensor, state: dict[str, Any], *, amsgrad: bool) -> None:
    """Zero moments; on the hyperboloid the second ones are one number a row, seen in full shape."""
    state.setdefault("step", 0)
    manifold = manifold_of(parameter)
    of_rows = is_hyperboloid(manifold)
    layout = torch.contiguous_format if isinstance(manifold, Product) else torch.preserve_format
    for name in ("exp_avg", *(_SECOND_MOMENTS if amsgrad else _SECOND_MOMENTS[:1])):
        if name in state:
            continue
        if of_rows:
            width = parameter.shape[-1] if name == "exp_avg" else 1
            zeros = parameter.detach().new_zeros((*parameter.shape[:-1], width))
            state[name] = zeros.expand(parameter.shape)
        else:
            state[name] = torch.zeros_like(parameter, memory_format=layout)


def _check_seconds(state: dict[str, Any]) -> None:
    """Refuse second moments of points that differ between coordinates."""
    for name in _SECOND_MOMENTS:
        # Geoopt's are equal up to the rounding of vector and scalar instructions.
        if name in state and not torch.allclose(
            state[name], state[name][..., :1], numerics.tolerance(state[name].dtype).rtol, 0.0, equal_nan=True
        ):
            raise ValueError(
                f"{name} must be one number for each point, got a number for each coordinate: "
                "the state is that of an optimizer that knows no manifolds."
            )


def _rows(entry: Entry, point: Tensor, radius: Tensor, *, amsgrad: bool) -> Rows:
    state = entry.state
    return Rows(
        point=point,
        momentum=state["exp_avg"].view(point.shape),
        grad=entry.grad.reshape(point.shape),
        second=state["exp_avg_sq"][..., :1].view(-1, 1),
        largest=state["max_exp_avg_sq"][..., :1].view(-1, 1) if amsgrad else None,
        radius=radius,
    )


class RiemannianAdam(RiemannianOptimizer, geoopt.optim.RiemannianAdam):
    r"""Riemannian Adam with Geoopt's constructor, ``state_dict`` and result, and many times faster.

    With :math:`g` the Riemannian gradient at the point :math:`x`, in each step

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) \langle g, g\rangle_x, \qquad
        u = -\mathrm{lr}\, \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon},

    then :math:`x \leftarrow \exp_x(u)` and :math:`m` is transported along. On a Euclidean parameter
    :math:`\langle g, g\rangle` is taken per coordinate and this is Adam; on a manifold there is one
    :math:`v` a point. ``weight_decay`` times the (ambient) parameter is added to the gradient first.

    * **Euclidean parameters** go to torch's fused kernel, all of them in one call.
    * **Parameters on a** ``geoopt.Lorentz`` (:class:`holonomy.manifolds.Lorentz` is one), rows of
      shape ``(..., d+1)``, are moved by a closed form that adds multiples of ``x`` and ``m``; small tables of one width
      are stacked, whatever their curvatures. The space parts of points and tangent vectors are read, and their times
      computed from the current curvature. Where that curvature learns, a warning names
      :class:`~holonomy.manifolds.LorentzPoints`, which follows it.
    * **Points of a** :class:`holonomy.manifolds.Product` are moved in each factor as points of it are.
    * **Every other manifold** is asked for its own ``egrad2rgrad``, ``component_inner`` and
      ``retr_transp``, as Geoopt does.

    **Sparse gradients** (``sparse=True`` of :class:`~holonomy.manifolds.LorentzEmbedding` or
    :class:`torch.nn.Embedding`) update only the rows that they contain: the moments of the others do not change, and
    the bias correction counts the steps of the table, as in :class:`torch.optim.SparseAdam` and Geoopt's sparse
    optimizer. ``weight_decay`` must be 0 there.

    Where the result is not Geoopt's: gradients are left as they are (Geoopt overwrites ``p.grad``).
    On the hyperboloid Geoopt takes every vector shorter than 1e-4 to be that long, so that points
    without a gradient drift outwards and short steps transport wrongly; here they stay, and are
    transported exactly. A step too long for the dtype ends at its largest numbers, a gradient whose
    square would overflow counts as the longest whose square does not, and a row whose second moment
    and ``eps`` are both zero stays where it is: finite gradients give finite points. A gradient that
    is ``nan`` gives ``nan``.
    Neighbouring float32 points lie ``eps * time`` apart across the radius, so that beyond some 1e5
    radii of curvature float32 tables move by their rounding; float64 ones beyond 1e13.

    The second moments of a hyperboloid table are stored as one number a row, seen in the table's
    shape; ``state_dict`` writes them out in full. Either optimizer loads what the other saved.

    Args:
        params: parameters, or dicts of parameter groups with options of their own.
        lr: step size, a number or a tensor with one element.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: multiple of the parameter added to its gradient.
        amsgrad: divide by the largest second moment so far.
        stabilize: project points and momenta to their manifolds every so many steps (None: never);
            the hyperboloid does not need it.

    Raises:
        TypeError: if ``params`` is a module or a tensor, or a parameter is complex or what :func:`fully_shard` made of
            learned points.
        ValueError: if an option is out of its range, or a group asks for an option of torch's Adam
            that Geoopt accepts and ignores: ``maximize``, ``capturable``, ``differentiable``,
            ``decoupled_weight_decay``, ``foreach``, ``fused``.

    >>> manifold = geoopt.Lorentz()
    >>> point = geoopt.ManifoldParameter(manifold.origin(1, 3), manifold=manifold)
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = RiemannianAdam([point, weight], lr=0.1)
    >>> for _ in range(200):
    ...     optimizer.zero_grad()
    ...     loss = (point[0, 1:] - weight).square().sum() + (weight - 1).square().sum()
    ...     loss.backward()
    ...     optimizer.step()
    >>> [round(x, 2) for x in point[0].tolist()]
    [1.73, 1.0, 1.0]
    """

    _not_offered = ("maximize", "capturable", "differentiable", "decoupled_weight_decay", "foreach", "fused")
    # With these a state of torch's Adam would go on differently.
    _refused_in_states = ("maximize", "decoupled_weight_decay")
    _needed_in_states = ("lr", "betas", "eps", "amsgrad")
    _momentum = "exp_avg"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = numerics.ADAM_EPS,
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002 - positional in torch and in Geoopt
        *,
        stabilize: int | None = None,
    ) -> None:
        params = parameters_or_groups(params)
        self._check_options({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad})
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, stabilize=stabilize)

    def _check_options(self, group: dict[str, Any]) -> None:
        check_learning_rate(group["lr"])
        for name in ("eps", "weight_decay"):
            checks.nonnegative(name, group[name])
        betas = checks.sequence("betas", group["betas"], "two numbers", Real)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {tuple(betas)}.")
        checks.flags(amsgrad=group["amsgrad"])

    @eager
    def _step_group(self, group: dict[str, Any]) -> None:
        euclidean: defaultdict[Any, list[Entry]] = defaultdict(list)
        tables: defaultdict[Any, list[Rows]] = defaultdict(list)
        radii: dict[Any, Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        moved = self._counted(group)
        parts = [part for parameter, entry in moved for part in by_factor(entry, manifold_of(parameter))]
        for entry, manifold in parts:
            parameter = entry.parameter
            key = parameter.device, parameter.dtype, entry.state["step"]
            if manifold is None:
                # Sharded tensors and others do not go into one call of torch.
                euclidean[*key, type(parameter)].append(entry)
            elif is_hyperboloid(manifold):
                width = parameter.shape[-1]
                point = parameter.detach().reshape(-1, width)
                if (manifold, *key) not in radii:
                    radii[manifold, *key] = radius_of(manifold, point)
                rows = _rows(entry, point, radii[manifold, *key], amsgrad=group["amsgrad"])
                tables[*key, width].append(rows)
                if point.data_ptr() != parameter.data_ptr():
                    copies.append((parameter, point.view(parameter.shape)))
                # Of a product's columns the first is stepped, and Geoopt's state has the others alike.
                seconds = [entry.state[name] for name in _SECOND_MOMENTS if name in entry.state]
                copies += [(second[..., 1:], second[..., :1]) for second in seconds if second.stride(-1)]
            else:
                rule = _rule(group, entry.state["step"], parameter.device)
                _step_generic(entry, manifold, rule, amsgrad=group["amsgrad"])
        for (_, _, step, _), entries in euclidean.items():
            _step_euclidean(entries, group, step)
        for (device, _, step, _), of_width in tables.items():
            step_tables(of_width, _rule(group, step, device))
        for target, source in copies:
            target.copy_(source)
        for parameter, entry in moved:
            write_back(parameter, self.state[parameter], entry)
        every = group["stabilize"]
        if every is not None and any(entry.state["step"] % every == 0 for _, entry in moved):
            self.stabilize_group(group)

    def _counted(self, group: dict[str, Any]) -> list[tuple[Tensor, Entry]]:
        """The parameters that have a gradient, and what moves of each; their steps count one more."""
        found: list[tuple[Tensor, Entry]] = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if len(state) < (4 if group["amsgrad"] else 3):
                _start(parameter, state, amsgrad=group["amsgrad"])
            state["step"] += 1
            found.append((parameter, entry_of(parameter, parameter.grad, state)))
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for parameter in group["params"]:
                moments = self.state.get(parameter)
                if not moments:
                    continue
                # torch makes a float32 tensor of the count; beta**step needs more digits than that.
                moments["step"] = int(moments["step"])
                manifold = manifold_of(parameter)
                for part, factor in by_factor(Entry(parameter, parameter, moments), manifold):
                    if is_hyperboloid(factor):
                        _check_seconds(part.state)
                for name in ("exp_avg", *_SECOND_MOMENTS):
                    if name not in moments or manifold is None:
                        continue
                    if is_hyperboloid(manifold) and name in _SECOND_MOMENTS:
                        row = moments[name][..., :1].clone(memory_format=torch.contiguous_format)
                        moments[name] = row.expand(parameter.shape)
                    else:
                        moments[name] = moments[name].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """The state in Geoopt's format, every tensor in the shape of its parameter."""
        result = super().state_dict()
        for index, moments in result["state"].items():
            result["state"][index] = {
                name: value.contiguous() if name in _SECOND_MOMENTS else value for name, value in moments.items()
            }
        return result
