"""What a registered case is, and the setting (sizes, curvatures, dtype, device) that it is built in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from holonomy.manifolds import Lorentz
from tests.reference import REFERENCES


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


def described(options: dict[str, Any]) -> str:
    """Name options for a report, functions by their names: an address would differ from one process to the next."""
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())


Make = Callable[[Setting], nn.Module]
Inputs = Callable[[Setting], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One public class at one value of each option.

    Attributes:
        name: what the test report shows.
        kind: the class.
        make: the module, from a setting.
        inputs: its inputs.
        source: index of the manifold that the input lies on, None for raw features.
        target: index of the manifold that the output lies on, None where it is no point.
        random: whether training mode draws random numbers.
        nodewise: whether the rows of the input may be permuted, and the output's follow.
        true_gradient: whether the gradient is the derivative; a router's is not, by its docstring.
        any_radius: whether every finite input must give a finite output; else only those of logits up to 1e4.
    """

    name: str
    kind: type[nn.Module]
    make: Make
    inputs: Inputs
    source: int | None = 0
    target: int | None = 0
    random: bool = False
    nodewise: bool = True
    true_gradient: bool = True
    any_radius: bool = True

    def build(self, setting: Setting) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return module and inputs, drawn from the seed that is set."""
        return self.make(setting).to(setting.device), self.inputs(setting)

    @property
    def reference(self) -> Callable[..., Tensor] | None:
        """The loop-written formula, where there is one."""
        return REFERENCES.get(self.kind)
