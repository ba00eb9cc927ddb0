"""What a benchmark is: contenders at some sizes, what must be equal before any timing, and lines with their targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Case", "Contenders", "Figure", "Growth", "Line", "Step", "stepped"]

# One turn of a contender: it returns its outputs, then its gradients, and nothing else that it made stays alive.
Step = Callable[[], Sequence[Tensor]]
Contenders = dict[str, Step]


class Line(NamedTuple):
    """A ratio of two contenders at each size: the median over rounds, each ratio taken within a round.

    ``of`` is time, the peak memory of a turn above what was there before it, or its workspace: the same without the
    outputs and gradients that it returns. Targets are words such as ``"<= 0.9"``, by size; a note says what is compared
    or why a target is missed.
    """

    above: str
    below: str
    targets: Mapping[int, str] = {}
    of: Literal["time", "memory", "workspace"] = "time"
    note: str = ""

    @property
    def name(self) -> str:
        ratio = f"{self.above} / {self.below}"
        return ratio if self.of == "time" else f"{ratio}, {self.of}"


class Growth(NamedTuple):
    """How one contender grows: the exponent of its time in the size, and what one unit of size costs.

    ``per_unit`` holds targets for the cost of a unit at a size over its cost at the first size; bytes (peak memory of a
    turn) and microseconds of a unit are judged at the largest size.
    """

    of: str
    exponent: str = ""
    per_unit: Mapping[int, str] = {}
    bytes_per_unit: str = ""
    microseconds_per_unit: str = ""
    note: str = ""


class Figure(NamedTuple):
    """Any other number of a size and device: an error, a share."""

    name: str
    measure: Callable[[int, torch.device], float]
    targets: Mapping[int, str] = {}
    note: str = ""


class Case(NamedTuple):
    """What takes turns.

    ``contenders`` makes the seeded problem of one size on a device, and may leave a contender out where it cannot run;
    the steps of each group of names in ``equal`` return the same tensors, to ``tolerance`` times their length. The
    suite runs them at the size ``small``.
    """

    name: str
    title: str
    unit: str
    sizes: tuple[int, ...]
    contenders: Callable[[int, torch.device], Contenders]
    lines: tuple[Line | Growth | Figure, ...]
    equal: tuple[tuple[str, ...], ...] = ()
    tolerance: float = 1e-3
    devices: tuple[str, ...] = ("cpu", "cuda")
    small: int = 64


def stepped(function: Callable[[], Tensor], leaves: Sequence[Tensor] = ()) -> Step:
    """Forward, and backward to the leaves where there are any, with the same cotangent in every turn."""
    if not leaves:
        return lambda: [function().detach()]
    cotangents: list[Tensor] = []

    def step() -> list[Tensor]:
        out = function()
        if not cotangents:
            draw = torch.Generator().manual_seed(1)
            cotangents.append(torch.randn(out.shape, generator=draw).to(out))
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangents)]

    return step
