"""Riemannian gradient descent with momentum: Geoopt's rule, exact on the hyperboloid."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import geoopt
import torch
from torch import Tensor

from holonomy import checks, numerics
from holonomy.manifolds import hyperboloid
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


def _curvature(manifold: geoopt.Lorentz, like: Tensor) -> Tensor:
    return radius_of(manifold, like).square().reciprocal().neg().reshape(())


def _gradient(entry: Entry, manifold: geoopt.Manifold | None, decay: float) -> Tensor:
    """The Riemannian gradient, weight decay included: a tensor of its own."""
    x, kappa = entry.parameter, None
    if is_hyperboloid(manifold):
        kappa = _curvature(manifold, x)
        x = hyperboloid.lift(hyperboloid.space(x), kappa)
    # Geoopt's egrad2rgrad may write into its argument.
    gradient = torch.add(entry.grad, x, alpha=decay)
    if kappa is not None:
        return hyperboloid.egrad2rgrad(x, numerics.finite(gradient), kappa)
    return gradient if manifold is None else manifold.egrad2rgrad(x, gradient)


def _moved(
    x: Tensor, u: Tensor, along: Tensor | None, manifold: geoopt.Manifold | None
) -> tuple[Tensor, Tensor | None]:
    """The points that tangent vectors ``u`` lead to, and the momentum transported along."""
    if manifold is None:
        return x + u, along
    if is_hyperboloid(manifold):
        kappa, u = _curvature(manifold, x), numerics.finite(u)
        point = hyperboloid.expmap(x, u, kappa)
        return point, None if along is None else hyperboloid.transp(x, point, along, kappa)
    u = numerics.finite(u)
    point, transported = (manifold.retr(x, u), None) if along is None else manifold.retr_transp(x, u, along)
    return numerics.finite(point), transported


def _step(entry: Entry, manifold: geoopt.Manifold | None, group: dict[str, Any], *, first: bool) -> None:
    momentum = group["momentum"]
    direction, buffer = _gradient(entry, manifold, float(group["weight_decay"])), None
    if momentum:
        buffer = entry.state["momentum_buffer"]
        if first:
            buffer.copy_(direction)
        buffer.mul_(momentum).add_(direction, alpha=1 - group["dampening"])
        numerics.finite_(buffer)
        direction = torch.add(direction, buffer, alpha=momentum) if group["nesterov"] else buffer
    point, transported = _moved(entry.parameter, direction * -float(group["lr"]), buffer, manifold)
    entry.parameter.copy_(point)
    if buffer is not None and transported is not None:
        buffer.copy_(transported)


class RiemannianSGD(RiemannianOptimizer, geoopt.optim.RiemannianSGD):
    r"""Riemannian gradient descent with Geoopt's constructor, ``state_dict`` and steps.

    With :math:`g` the Riemannian gradient at the point :math:`x`, :math:`\mu` the momentum and :math:`\tau` the
    dampening, in each step

    .. math::
        m \leftarrow \mu m + (1 - \tau) g, \qquad u = -\mathrm{lr}\, m, \qquad x \leftarrow \exp_x(u),

    and :math:`m` is transported along; with ``nesterov`` :math:`u = -\mathrm{lr}\, (g + \mu m)`, without momentum
    :math:`u = -\mathrm{lr}\, g`. As in Geoopt, :math:`m` is :math:`g` before the first step, so that
    :math:`m = (1 + \mu - \tau)\, g` in it; in torch's SGD it is :math:`g`, also for parameters that are no points.
    Geoopt starts from the Euclidean gradient without weight decay, which on a manifold is no tangent vector: with
    momentum its steps are these once it has the momenta of the first one.
    ``weight_decay`` times the (ambient) parameter is added to the gradient first.

    Parameters on a ``geoopt.Lorentz`` are moved by this library's exponential map and transport, which are accurate far
    from the origin and for steps of any length; points of a :class:`holonomy.manifolds.Product` in each factor as
    points of it are. For other manifolds their own ``egrad2rgrad`` and ``retr_transp`` are called. Sparse gradients
    update only the rows that they contain, and the momenta of the others do not change; ``weight_decay`` must be 0
    there.

    Where the result is not Geoopt's: gradients are left as they are (Geoopt overwrites ``p.grad``), and on a manifold
    the momentum starts at the Riemannian gradient (in Geoopt at the Euclidean one, which is not tangent).

    Args:
        params: parameters, or dicts of parameter groups with options of their own.
        lr: step size, a number or a tensor with one element.
        momentum: factor of the momentum.
        dampening: share of the gradient that does not enter the momentum.
        weight_decay: multiple of the parameter added to its gradient.
        nesterov: look ahead along the momentum.
        stabilize: project points and momenta to their manifolds every so many steps (None: never);
            the hyperboloid does not need it.

    Raises:
        TypeError: if ``params`` is a module or a tensor, or a parameter is complex or what :func:`fully_shard` made of
            learned points.
        ValueError: if an option is out of its range, ``nesterov`` comes without momentum or with dampening, or a group
            asks for an option of torch's SGD that is not offered: ``maximize``, ``differentiable``, ``foreach``,
            ``fused``.

    >>> manifold = geoopt.Lorentz()
    >>> point = geoopt.ManifoldParameter(manifold.origin(1, 3), manifold=manifold)
    >>> optimizer = RiemannianSGD([point], lr=0.1, momentum=0.5)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     (point[0, 1:] - 1).square().sum().backward()
    ...     optimizer.step()
    >>> [round(x, 2) for x in point[0].tolist()]
    [1.73, 1.0, 1.0]
    """

    _not_offered = ("maximize", "differentiable", "foreach", "fused")
    _refused_in_states = ("maximize",)
    _needed_in_states = ("lr", "momentum", "dampening", "nesterov")
    _momentum = "momentum_buffer"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,  # noqa: FBT001, FBT002 - positional in torch and in Geoopt
        *,
        stabilize: int | None = None,
    ) -> None:
        params = parameters_or_groups(params)
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        self._check_options({"lr": lr, **options})
        # Geoopt types these by their defaults.
        call: Callable[..., None] = super().__init__
        call(params, lr, momentum, dampening, weight_decay, nesterov, stabilize=stabilize)

    def _check_options(self, group: dict[str, Any]) -> None:
        check_learning_rate(group["lr"])
        for name in ("momentum", "weight_decay"):
            checks.nonnegative(name, group[name])
        checks.finite_number("dampening", group["dampening"])
        checks.flags(nesterov=group["nesterov"])
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                "nesterov needs a positive momentum and no dampening, "
                f"got momentum {group['momentum']} and dampening {group['dampening']}."
            )

    def _step_group(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            # torch writes None where there is no momentum yet.
            first = bool(group["momentum"]) and state.get("momentum_buffer") is None
            if first:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            entry = entry_of(parameter, parameter.grad, state)
            for part, factor in by_factor(entry, manifold_of(parameter)):
                _step(part, factor, group, first=first)
            write_back(parameter, state, entry)
        if group["stabilize"] is not None and group["step"] % group["stabilize"] == 0:
            self.stabilize_group(group)
