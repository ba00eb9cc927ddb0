"""What a registered case is, the setting (sizes, curvatures, dtype, device) it is built in, and how it is shaken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from geoopt import ManifoldParameter
from torch import Tensor, nn

from holonomy.manifolds import Lorentz, Product, hyperboloid
from tests.reference import REFERENCES

__all__ = ["Case", "Inputs", "Make", "Setting", "shaken"]


@dataclass
class Setting:
    """Sizes, curvatures and types of one example; manifolds are made once, so that layers can share them."""

    nodes: int = 5
    features: int = 6
    curvatures: tuple[float, ...] = (-1.0, -0.3, -2.5)
    radius: float = 1.0
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    manifolds: dict[int, Lorentz] = field(default_factory=dict)

    @property
    def factory(self) -> dict[str, Any]:
        """Device and dtype, for constructors."""
        return {"device": self.device, "dtype": self.dtype}

    def manifold(self, index: int) -> Lorentz:
        """Return the manifold of the given curvature, learnable."""
        if index not in self.manifolds:
            self.manifolds[index] = Lorentz(self.curvatures[index], learnable=True, **self.factory)
        return self.manifolds[index]

    def vectors(self, *shape: int) -> Tensor:
        """Return normal vectors times the radius, the first one zero where the radius is not one."""
        x = torch.randn(*shape, **self.factory) * self.radius
        if self.radius != 1.0:
            x[..., :1, :] = 0.0
        return x

    def points(self, *shape: int, index: int = 0) -> Tensor:
        """Return points of a manifold, detached from its curvature."""
        return self.manifold(index).lift(self.vectors(*shape)).detach()

    def edges(self) -> Tensor:
        """Return a ring with a chord, both directions."""
        i = torch.arange(self.nodes, device=self.device)
        pairs = torch.stack([i, (i + 1) % self.nodes])
        chord = torch.tensor([[0], [self.nodes // 2]], device=self.device)
        one_way = torch.cat([pairs, chord], dim=1)
        one_way = one_way[:, one_way[0] != one_way[1]]
        return torch.cat([one_way, one_way.flip(0)], dim=1).unique(dim=1)

    def padding(self) -> Tensor:
        """Return a key-padding mask of two graphs, the last node of the second being none."""
        mask = torch.zeros(2, self.nodes, dtype=torch.bool, device=self.device)
        mask[1, -1] = True
        return mask


Options = Mapping[str, Any]
Make = Callable[[Setting, Options], nn.Module]
Inputs = Callable[[Setting], tuple[Tensor, ...]]

# Options that make training draw random numbers, and options by which the order of the nodes has a meaning.
_DRAWN = ("p", "dropout", "attention_dropout", "output_dropout", "stochastic_depth")
_ORDERED = ("causal", "window", "rope", "steps")


@dataclass(frozen=True, eq=False)
class Case:
    """One public class at one value of each option.

    Attributes:
        kind: the class.
        options: what its constructor is given beside sizes and manifolds.
        make: the module, from a setting and the options.
        inputs: its inputs, from a setting.
        note: what else tells this case from others of the class.
        target: the attribute of the module that is the manifold of the output, None where the output is no point.
        random: whether training mode draws random numbers, though no option says so.
        in_order: whether it is called so that the order of the nodes has a meaning.
        routed: whether paths are chosen by scores, of which many are zero and the first of equal ones counts.
        any_radius: whether every finite input must give a finite output; else only those of logits up to 1e4.
        most_nodes: the largest number of nodes that this case is built with.
        first_node: where in the rows of the result those of the nodes begin, None where axes of it are theirs alone.
        formula: the loop-written formula, where the module is not called as its class is.
    """

    kind: type[nn.Module]
    options: Options
    make: Make
    inputs: Inputs
    note: str = ""
    target: str | None = None
    random: bool = False
    in_order: bool = False
    routed: bool = False
    any_radius: bool = False
    most_nodes: int = 9
    first_node: int | None = None
    formula: Callable[..., Tensor] | None = None

    @cached_property
    def name(self) -> str:
        """What the test report shows; functions by their names, for an address differs between processes."""
        options = [f"{name}={getattr(value, '__name__', value)}" for name, value in self.options.items()]
        return f"{self.kind.__name__}[{', '.join([*options, *([self.note] if self.note else [])])}]"

    def __repr__(self) -> str:
        """The name, for a falsifying example."""
        return self.name

    @property
    def drawn(self) -> bool:
        """Whether training mode draws random numbers."""
        return self.random or any(self.options.get(name) for name in _DRAWN)

    @property
    def ordered(self) -> bool:
        """Whether the order of the nodes has a meaning, so that a permutation changes more than the order."""
        return self.in_order or self.routed or any(self.options.get(name) for name in _ORDERED)

    @property
    def reference(self) -> Callable[..., Tensor] | None:
        """The loop-written formula, which has probabilities from the case: the module may have lost them."""
        formula = self.formula or REFERENCES.get(self.kind)
        if formula is None:
            return None
        parameters = inspect.signature(formula).parameters.values()
        asked = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        return partial(formula, **{name: self.options[name] for name in asked if name in self.options})

    def build(self, setting: Setting) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return the shaken module and inputs, drawn from the seed that is set."""
        setting.nodes = min(setting.nodes, self.most_nodes)
        module = shaken(self.make(setting, self.options).to(setting.device))
        return module, self.inputs(setting)


def shaken(module: nn.Module) -> nn.Module:
    """Move every parameter and running statistic at random within its domain: as initialised, many are zero or one.

    Curvatures are moved with the rest, so a setting's curvatures are only about those of the module.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if isinstance(parameter, ManifoldParameter) and isinstance(parameter.manifold, Product):
                moved = parameter + 0.3 * torch.randn_like(parameter)
                parameter.copy_(parameter.manifold.lift(parameter.manifold.without_times(moved)))
            elif isinstance(parameter, ManifoldParameter):  # on the unit hyperboloid
                space = parameter[..., 1:] + 0.3 * torch.randn_like(parameter[..., 1:])
                parameter.copy_(hyperboloid.lift(space, space.new_tensor([-1.0])))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
            elif name.endswith("num_batches_tracked"):
                buffer.fill_(3)
    return module
