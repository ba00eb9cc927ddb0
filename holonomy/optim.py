r"""Riemannian Adam: Geoopt's rule, with Euclidean tensors fused and hyperboloid tables stacked.

A point of the hyperboloid :math:`\langle x, x\rangle = 1/\kappa = -k` is held as ``(time, space)``.
In the chart of its space part the metric is :math:`G = I - e e^T` with :math:`e = x_s / t`, and its
inverse :math:`I + x_s x_s^T / k`. The step therefore adds up gradients as *covectors* ``w`` of that
chart, whose Riemannian length :math:`|w|^2 + (x_s \cdot w)^2 / k` is a sum of squares: nothing
cancels, however far out the point lies. The new point and the transported momentum are then
combinations of ``x`` and ``w`` whose coefficients are one number a row.

The file has the mathematics first, then the sorting of tensors into blocks, then the optimizer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import geoopt
import torch
from torch import Tensor
from torch.optim.adam import adam

from holonomy import checks, numerics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxtyping import Float
    from torch.optim.optimizer import ParamsT

__all__ = ["RiemannianAdam"]

# Elements of one block on the CPU: its few working copies stay in cache, and a block of this size
# hides the cost of dispatching some sixty operations. Elsewhere launches cost more than bandwidth.
_BLOCK_ELEMENTS = 2**17
_DEVICE_BLOCK_ELEMENTS = 2**26

# Devices on which torch has a fused Adam since 2.6.
_FUSED_DEVICES = frozenset({"cpu", "cuda"})

_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")

# Options of torch's Adam that Geoopt's constructor takes and then ignores.
_NOT_OFFERED = ("maximize", "capturable", "differentiable", "decoupled_weight_decay")

_Entry = tuple[Tensor, dict[str, Any]]


class _Rule(NamedTuple):
    """Adam's constants at one step: ``rate`` and ``scale2`` have the bias corrections in them."""

    rate: float | Tensor
    beta1: float
    beta2: float
    scale2: float
    eps: float
    decay: float


class _Rows(NamedTuple):
    """Rows of hyperboloid tables, changed in place; second moments are one number a row."""

    point: Tensor
    momentum: Tensor
    grad: Tensor
    second: Tensor
    largest: Tensor | None
    k: Tensor


def _dot(a: Float[Tensor, "rows d"], b: Float[Tensor, "rows d"]) -> Float[Tensor, "rows 1"]:
    return (a * b).sum(-1, keepdim=True)


def _length(x: Float[Tensor, "rows d"]) -> Float[Tensor, "rows 1"]:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _plain_step(rows: _Rows, rule: _Rule) -> bool:
    """One step in the rows' own dtype and memory, for points and gradients of ordinary size.

    Returns False, with nothing changed, if a row is too far out or too long for squares and
    rounding in this dtype: :func:`_careful_step` is the same formula without that limit.
    """
    x, m, g, second, largest, k = rows
    beta1, root_k = rule.beta1, k.sqrt()
    space, momentum = x[:, 1:], m[:, 1:]
    time = torch.hypot(_length(space), root_k)
    # The total derivative in the space chart, weight decay (of the ambient vector) included.
    covector = torch.addcmul(g[:, 1:], space, g[:, :1] / time + 2 * rule.decay)
    product = space * covector
    radial = product.sum(-1, keepdim=True) / root_k
    size = torch.hypot(_length(covector), radial)
    lean = torch.mul(space, momentum, out=product).sum(-1, keepdim=True) / time
    # w = beta1 (momentum as covector) + (1 - beta1) covector, and its component along x.
    w = torch.lerp(momentum, covector, 1 - beta1, out=covector)
    w.addcmul_(space, lean / time * -beta1)
    radial = radial * (1 - beta1) + lean * root_k / time * beta1
    length = torch.hypot(_length(w), radial)
    new_second = torch.lerp(second, size.square(), 1 - rule.beta2)
    seen = new_second if largest is None else torch.maximum(largest, new_second)
    pace = rule.rate / (seen * rule.scale2).sqrt_().add_(rule.eps)
    angle = pace * length / root_k
    if not numerics.is_ordinary(time / root_k, angle, size, length):
        return False
    second.copy_(new_second)
    if largest is not None:
        largest.copy_(seen)
    cosh, sinh = torch.cosh(angle), torch.sinh(angle)
    pace = pace * numerics.safe_div(sinh, angle)
    turn = (cosh * radial - sinh * length) / root_k
    torch.mul(w, cosh, out=momentum).addcmul_(space, turn)
    torch.mul(turn, time, out=m[:, :1])
    # cosh - 1 as a square and one addition to x: small steps keep their digits.
    along = 2 * torch.sinh(angle / 2).square() - pace * radial / root_k
    space.add_(w.mul_(-pace).addcmul_(space, along))
    torch.hypot(_length(space), root_k, out=x[:, :1])
    return True


def _careful_step(rows: _Rows, rule: _Rule) -> None:
    """The step of :func:`_plain_step` in float64, finite for whatever finite numbers come in."""
    dtype = rows.point.dtype
    x, m, g, k = (numerics.widen(t) for t in (rows.point, rows.momentum, rows.grad, rows.k))
    space, root_k = x[:, 1:], k.sqrt()
    time = numerics.hypot(numerics.norm(space, keepdim=True), root_k)
    e, stretch = space / time, time / root_k
    g = numerics.finite(g)
    covector = numerics.finite(g[:, 1:] + g[:, :1] * e + 2 * rule.decay * space)
    pull = numerics.finite(_dot(e, covector))
    radial = numerics.finite(pull * stretch)
    size = numerics.hypot(numerics.norm(covector, keepdim=True), radial)
    # A second moment that the dtype cannot hold stays at its largest number.
    square = size.clamp(max=math.sqrt(torch.finfo(dtype).max)).square()
    rows.second.lerp_(numerics.narrow(square, dtype), 1 - rule.beta2)
    seen = rows.second
    if rows.largest is not None:
        seen = torch.maximum(rows.largest, seen, out=rows.largest)
    lean = _dot(e, m[:, 1:])
    w = (1 - rule.beta1) * covector + rule.beta1 * (m[:, 1:] - lean * e)
    radial = (1 - rule.beta1) * radial + rule.beta1 * lean / stretch
    length = numerics.hypot(numerics.norm(w, keepdim=True), radial)
    # The new point is (cosh - p sinh) x - root_k sinh q, a unit vector of the momentum (p, q).
    p, q = numerics.safe_div(radial, length), numerics.safe_div(w, length)
    pace = numerics.safe_div(
        torch.as_tensor(rule.rate, dtype=k.dtype, device=k.device),
        (numerics.widen(seen) * rule.scale2).sqrt() + rule.eps,
    )
    room = numerics.widest_rapidity(k.dtype) - time.log()
    room = room.clamp(min=1.0, max=numerics.widest_rapidity(dtype))
    angle = torch.minimum(numerics.finite(pace * length / root_k), room)
    cosh, sinh = torch.cosh(angle), torch.sinh(angle)
    along = 2 * torch.sinh(angle / 2).square() - p * sinh
    new_space = numerics.shrink(space + along * space - root_k * sinh * q, dtype)
    new_time = numerics.hypot(numerics.norm(new_space, keepdim=True), root_k)
    flow = numerics.finite(cosh * q + (p * cosh - sinh) / root_k * space)
    limit = numerics.safe_div(k.new_tensor(torch.finfo(dtype).max / 4), numerics.norm(flow, keepdim=True))
    new_momentum = flow * torch.minimum(length, limit)
    rows.point.copy_(numerics.narrow(torch.cat((new_time, new_space), dim=-1), dtype))
    slope = _dot(new_space / new_time, new_momentum)
    rows.momentum.copy_(numerics.narrow(torch.cat((slope, new_momentum), dim=-1), dtype))


def _advance(rows: _Rows, rule: _Rule) -> None:
    # Whether rows are ordinary is read back from the tensors: free on the CPU, a stall elsewhere.
    plain = rows.point.device.type == "cpu" and rows.point.dtype in {torch.float32, torch.float64}
    if not (plain and _plain_step(rows, rule)):
        _careful_step(rows, rule)


def _blocks(tables: list[_Rows]) -> Iterator[list[_Rows]]:
    """Tables of one width, dtype and device: long ones in slices, short ones in stacks."""
    device, width = tables[0].point.device, tables[0].point.shape[1]
    limit = _BLOCK_ELEMENTS if device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    most = max(1, limit // width)
    stack: list[_Rows] = []
    height = 0
    for table in tables:
        count = len(table.point)
        if count > most // 2:
            for start in range(0, count, most):
                cut = slice(start, start + most)
                yield [_Rows(*(t if t is None else t[cut] for t in table[:-1]), table.k)]
            continue
        if height + count > most:
            yield stack
            stack, height = [], 0
        stack.append(table)
        height += count
    if height:
        yield stack


def _step_tables(tables: list[_Rows], rule: _Rule) -> None:
    for block in _blocks(tables):
        if len(block) == 1:
            _advance(block[0], rule)
            continue
        counts = [len(table.point) for table in block]
        points, momenta, grads, seconds, largest, ks = map(list, zip(*block, strict=True))
        stacked = _Rows(
            point=torch.cat(points),
            momentum=torch.cat(momenta),
            grad=torch.cat(grads),
            second=torch.cat(seconds),
            largest=None if largest[0] is None else torch.cat(largest),
            k=torch.cat([k.expand(n, 1) for k, n in zip(ks, counts, strict=True)]),
        )
        _advance(stacked, rule)
        torch._foreach_copy_(points, stacked.point.split(counts))
        torch._foreach_copy_(momenta, stacked.momentum.split(counts))
        torch._foreach_copy_(seconds, stacked.second.split(counts))
        if stacked.largest is not None:
            torch._foreach_copy_(largest, stacked.largest.split(counts))


def _step_euclidean(entries: list[_Entry], group: dict[str, Any], step: int) -> None:
    """torch's Adam on lists of tensors that share device, dtype and step count."""
    device = entries[0][0].device
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    lists = [[p for p, _ in entries], [_grad(p) for p, _ in entries]]
    lists += [[state[name] for _, state in entries] for name in names]
    lists += [[]] * (5 - len(lists))
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
        count = torch.full((), float(step), dtype=torch.float32, device=device)
        rate = _rate(group["lr"], device)
        torch._fused_adam_(*lists, [count] * len(entries), lr=rate, **options)
    else:
        before = torch.full((len(entries),), step - 1.0, dtype=torch.float32).unbind()
        adam(*lists, list(before), foreach=True, lr=float(group["lr"]), **options)


def _step_generic(
    parameter: Tensor, state: dict[str, Any], manifold: geoopt.Manifold, rule: _Rule
) -> None:
    """Geoopt's step through the manifold's own methods."""
    exp_avg, second = state["exp_avg"], state["exp_avg_sq"]
    # A copy in any case: Geoopt's egrad2rgrad may write into its argument.
    grad = torch.add(_grad(parameter), parameter, alpha=rule.decay)
    grad = manifold.egrad2rgrad(parameter, grad)
    exp_avg.mul_(rule.beta1).add_(grad, alpha=1 - rule.beta1)
    square = manifold.component_inner(parameter, grad)
    second.mul_(rule.beta2).add_(square, alpha=1 - rule.beta2)
    if "max_exp_avg_sq" in state:
        second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
    direction = exp_avg / (second * rule.scale2).sqrt_().add_(rule.eps)
    point, momentum = manifold.retr_transp(parameter, -rule.rate * direction, exp_avg)
    parameter.copy_(point)
    exp_avg.copy_(momentum)


def _rule(group: dict[str, Any], step: int, device: torch.device) -> _Rule:
    beta1, beta2 = map(float, group["betas"])
    return _Rule(
        rate=_rate(group["lr"], device) / (1 - beta1**step),
        beta1=beta1,
        beta2=beta2,
        scale2=1 / (1 - beta2**step),
        eps=group["eps"],
        decay=group["weight_decay"],
    )


def _rate(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """The learning rate; one that lives on a device beside the parameters is not waited for."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu" and device.type != "cpu":
        return lr.reshape(()).to(device)
    return float(lr)


def _grad(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    grad = parameter.grad
    assert grad is not None
    return grad


def _manifold(parameter: Tensor) -> geoopt.Manifold | None:
    """The manifold of a parameter; None where it is Euclidean."""
    if not isinstance(parameter, geoopt.ManifoldTensor):
        return None
    manifold = parameter.manifold
    return None if type(manifold) is geoopt.Euclidean else manifold


def _is_table(manifold: geoopt.Manifold | None) -> bool:
    return isinstance(manifold, geoopt.Lorentz) and manifold.k.numel() == 1


def _rows(table: Tensor, point: Tensor, state: dict[str, Any], k: Tensor) -> _Rows:
    width = table.shape[-1]
    largest = state.get("max_exp_avg_sq")
    return _Rows(
        point=point,
        momentum=state["exp_avg"].view(-1, width),
        grad=_grad(table).reshape(-1, width),
        second=state["exp_avg_sq"][..., :1].view(-1, 1),
        largest=None if largest is None else largest[..., :1].view(-1, 1),
        k=k.detach().reshape(1, 1).to(point),
    )


class RiemannianAdam(geoopt.optim.RiemannianAdam):
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
      shape ``(..., d+1)``, are moved by a closed form that adds multiples of ``x`` and ``m``; tables
      of one width are stacked, whatever their curvatures. A point and a tangent vector are read by
      their space part, and time is made anew from the curvature as it is now.
    * **Every other manifold** is asked for its own ``egrad2rgrad``, ``component_inner`` and
      ``retr_transp``, as Geoopt does.

    Where the result is not Geoopt's: gradients are left as they are (Geoopt overwrites ``p.grad``).
    On the hyperboloid Geoopt takes every vector shorter than 1e-4 to be that long, so that points
    without a gradient drift outwards and short steps transport wrongly; here they stay, and are
    transported exactly. A step too long for the dtype ends at its largest numbers, a second moment
    that would overflow stays at them, and a row whose second moment and ``eps`` are both zero stays
    where it is: finite gradients give finite points. A gradient that is ``nan`` gives ``nan``.

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
        TypeError: if a parameter is complex.
        ValueError: if an option is out of its range, or a group asks for an option of torch's Adam
            that Geoopt accepts and ignores: ``maximize``, ``capturable``, ``differentiable``,
            ``decoupled_weight_decay``.

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

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = numerics.ADAM_EPS,
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002 - positional in torch and in Geoopt
        *,
        stabilize: int | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, stabilize=stabilize)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in every optimizer of torch.

        Args:
            param_group: ``params``, and the options in which the group differs from the rest.

        Raises:
            TypeError: if a parameter is complex.
            ValueError: if the group asks for an option that is not offered here.
        """
        for name in _NOT_OFFERED:
            if param_group.get(name):
                raise ValueError(f"{name} is not offered by RiemannianAdam, got {param_group[name]!r}.")
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                checks.floating("params", parameter)
        except TypeError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; the gradients are not changed.

        Args:
            closure: computes the loss anew, calls ``backward`` and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: if a gradient is sparse; no parameter has moved then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"RiemannianAdam takes dense gradients, got one of layout {parameter.grad.layout} "
                        f"for a parameter of shape {tuple(parameter.shape)}."
                    )
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        euclidean: defaultdict[Any, list[_Entry]] = defaultdict(list)
        tables: defaultdict[Any, list[_Rows]] = defaultdict(list)
        elsewhere: list[tuple[Tensor, Tensor]] = []
        due = False
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            manifold = _manifold(parameter)
            state = self._advanced_state(parameter, table=_is_table(manifold), amsgrad=group["amsgrad"])
            step = state["step"]
            due = due or (group["stabilize"] is not None and step % group["stabilize"] == 0)
            device = parameter.device
            if manifold is None:
                euclidean[device, parameter.dtype, step].append((parameter, state))
            elif _is_table(manifold):
                width = parameter.shape[-1]
                point = parameter.detach().reshape(-1, width)
                tables[device, parameter.dtype, step, width].append(
                    _rows(parameter, point, state, manifold.k)
                )
                if point.data_ptr() != parameter.data_ptr():
                    elsewhere.append((parameter, point))
            else:
                _step_generic(parameter, state, manifold, _rule(group, step, device))
        for (_, _, step), entries in euclidean.items():
            _step_euclidean(entries, group, step)
        for (device, _, step, _), rows in tables.items():
            _step_tables(rows, _rule(group, step, device))
        for parameter, point in elsewhere:
            parameter.copy_(point.view_as(parameter))
        if due:
            self.stabilize_group(group)

    def _advanced_state(self, parameter: Tensor, *, table: bool, amsgrad: bool) -> dict[str, Any]:
        state = self.state[parameter]
        state.setdefault("step", 0)
        state["step"] += 1
        for name in ("exp_avg", *(_SECOND_MOMENTS if amsgrad else _SECOND_MOMENTS[:1])):
            if name in state:
                continue
            if table:
                shape = (*parameter.shape[:-1], parameter.shape[-1] if name == "exp_avg" else 1)
                zeros = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
                state[name] = zeros.expand(parameter.shape)
            else:
                state[name] = torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def stabilize_group(self, group: dict[str, Any]) -> None:
        """Project the points and momenta of a group to their manifolds.

        On the hyperboloid this makes the time coordinates anew from the space parts.

        Args:
            group: one of ``param_groups``.
        """
        for parameter in group["params"]:
            manifold, state = _manifold(parameter), self.state.get(parameter)
            if manifold is None or not state:
                continue
            exp_avg = state["exp_avg"]
            if _is_table(manifold):
                space, momentum = numerics.widen(parameter[..., 1:]), numerics.widen(exp_avg[..., 1:])
                root_k = manifold.k.detach().to(space).sqrt()
                time = numerics.hypot(numerics.norm(space, keepdim=True), root_k)
                parameter[..., :1] = numerics.narrow(time, parameter.dtype)
                exp_avg[..., :1] = numerics.narrow(_dot(space / time, momentum), parameter.dtype)
            else:
                parameter.copy_(manifold.projx(parameter))
                exp_avg.copy_(manifold.proju(parameter, exp_avg))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for parameter in group["params"]:
                moments = self.state.get(parameter)
                if not moments:
                    continue
                # torch makes a float32 tensor of the count; beta**step needs more digits than that.
                moments["step"] = int(moments["step"])
                if not _is_table(_manifold(parameter)):
                    continue
                moments["exp_avg"] = moments["exp_avg"].contiguous()
                for name in _SECOND_MOMENTS:
                    if name in moments:
                        row = moments[name][..., :1].clone(memory_format=torch.contiguous_format)
                        moments[name] = row.expand(parameter.shape)

    def state_dict(self) -> dict[str, Any]:
        """The state in Geoopt's format, every tensor in the shape of its parameter.

        Returns:
            ``state`` and ``param_groups``, as in every optimizer of torch.
        """
        result = super().state_dict()
        for index, moments in result["state"].items():
            result["state"][index] = {
                name: value.contiguous() if name in _SECOND_MOMENTS else value
                for name, value in moments.items()
            }
        return result
