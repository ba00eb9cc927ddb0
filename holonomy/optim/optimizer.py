"""What Riemannian Adam and gradient descent share: groups of parameters that are checked, and the loop of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from geoopt.optim.mixin import OptimMixin
from torch import Tensor

from holonomy import checks
from holonomy.optim.parameters import (
    Entry,
    by_factor,
    check_gradients,
    check_parameter,
    follow,
    manifold_of,
    stabilize,
)


class RiemannianOptimizer(OptimMixin, torch.optim.Optimizer):
    """An optimizer of Geoopt whose options are checked and whose groups are stepped by ``_step_group``."""

    # Options of torch that Geoopt's constructor takes and then ignores, and those that a state must not have.
    _not_offered: ClassVar[tuple[str, ...]]
    _refused_in_states: ClassVar[tuple[str, ...]]
    # Options that every state has, but one of another kind of optimizer.
    _needed_in_states: ClassVar[tuple[str, ...]]
    # Under which name a state has what is transported along.
    _momentum: ClassVar[str]

    def _check_options(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _step_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in every optimizer of torch.

        Args:
            param_group: ``params``, and the options in which the group differs from the rest.

        Raises:
            TypeError: if a parameter is complex, or ``stabilize`` not an integer.
            ValueError: if an option is out of its range, or the group asks for one that is not offered here.
        """
        for name in self._not_offered:
            if param_group.get(name):
                raise ValueError(f"{name} is not offered by {type(self).__name__}, got {param_group[name]!r}.")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
            if group["stabilize"] is not None:
                checks.positive_int("stabilize", group["stabilize"])
            for parameter in group["params"]:
                check_parameter(parameter)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; the gradients are not changed.

        The state of a parameter that was moved to another dtype or device follows it.

        Args:
            closure: computes the loss anew, calls ``backward`` and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: if a gradient is neither dense nor that of whole rows of a table, or is sparse where
                ``weight_decay`` is not 0, or a parameter has another shape than its gradient or its momentum; no
                parameter has moved then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_gradients(self)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None and (state := self.state.get(parameter)):
                follow(parameter, state, self._momentum)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    @torch.no_grad()
    def stabilize_group(self, group: dict[str, Any]) -> None:
        """Project points and momenta of a group, one of ``param_groups``, to their manifolds.

        On the hyperboloid this makes the time coordinates anew from the space parts.
        """
        for parameter in group["params"]:
            entry = Entry(parameter, parameter, self.state.get(parameter, {}))
            for part, manifold in by_factor(entry, manifold_of(parameter)):
                if manifold is not None:
                    stabilize(part.parameter, part.state.get(self._momentum), manifold)

    def __getstate__(self) -> dict[str, Any]:
        # Copies take groups, too.
        return {**super().__getstate__(), "_stabilize": vars(self)["_stabilize"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Options that torch's optimizers and Geoopt's sparse ones do not have.
        for group in state["param_groups"]:
            for name in self._refused_in_states:
                if group.get(name):
                    raise ValueError(
                        f"{name} must be left out of a state for {type(self).__name__}, got {group[name]!r}."
                    )
            for name in self._needed_in_states:
                # SparseAdam, whose state serves, has neither of these two; NAdam, RAdam and Adamax have one.
                sparse = name == "amsgrad" and "weight_decay" not in group
                if name not in group and not sparse:
                    raise ValueError(
                        f"{name} must be in each group of a state for {type(self).__name__}, got {sorted(group)}."
                    )
            group.setdefault("weight_decay", 0.0)
            group.setdefault("stabilize", vars(self).get("_stabilize"))
        super().__setstate__(state)
        # Torch compares numbers of parameters only, and its fused kernel reads past the end of a shorter moment.
        for parameter in (each for group in self.param_groups for each in group["params"]):
            for name, x in self.state.get(parameter, {}).items():
                if isinstance(x, Tensor) and x.ndim and x.shape != parameter.shape:
                    raise ValueError(
                        f"{name} must have the shape of its parameter, {tuple(parameter.shape)}, got {tuple(x.shape)}."
                    )
