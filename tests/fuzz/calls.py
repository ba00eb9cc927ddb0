"""The manifold's methods and the public functions, each with the kinds of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.fuzz.domains import KINDS, Kind, Scene, scene
from tests.fuzz.judge import Call
from tests.fuzz.script import literal
from tests.fuzz.source import Source

__all__ = ["METHODS", "Target", "method", "settle"]

# Of each method of the manifold: the arguments with their kinds, the optional ones with a question mark, and whether
# the result is points.
METHODS = {
    "lift": "space:vector -> points",
    "space": "x:point",
    "time": "x:point",
    "ratio": "to:manifold",
    "dist": "x:first y:other keepdim:flag?",
    "dist0": "x:point keepdim:flag?",
    "cdist": "x:points y:points",
    "expmap": "x:first u:tangent -> points",
    "retr": "x:first u:tangent -> points",
    "geodesic_unit": "x:first u:unit t:arc -> points",
    "logmap": "x:first y:other",
    "expmap0": "u:tangent0 -> points",
    "logmap0": "y:point",
    "logmap0back": "x:point",
    "transp": "x:first y:other v:tangent",
    "transp0": "y:first u:tangent",
    "transp0back": "x:first u:tangent",
    "transp_follow_expmap": "x:first u:tangent v:tangent",
    "projx": "x:loose_ambient -> points",
    "proju": "x:first v:ambient",
    "egrad2rgrad": "x:first u:ambient",
    "inner": "x:first u:tangent v:tangent? keepdim:flag?",
    "norm": "u:tangent0 keepdim:flag?",
    "centroid": "x:some_points weights:weights? -> points",
    "rescale": "x:point to:manifold",
    "to_poincare": "x:point",
    "from_poincare": "p:ball -> points",
    "to_klein": "x:point",
    "from_klein": "p:ball -> points",
    "random": "size:size mean:mean? std:std? generator:generator? dtype:dtype? device:device? -> points",
    "random_normal": "size:size mean:mean? std:std? generator:generator? dtype:dtype? device:device? -> points",
    "origin": "size:size dtype:dtype? device:device? -> points",
}


@dataclass(frozen=True)
class Target:
    """A public name and how a call of it is drawn.

    Attributes:
        name: the public name.
        draw: makes a call from choices.
        weight: how often it is called, relative to others.
        opening: makes the first choices, which calls share where something is built for them.
    """

    name: str
    draw: Callable[[Source], Call]
    weight: float = 1.0
    opening: Callable[[Source], Any] = lambda source: None


def method(name: str) -> Target:
    """The target of a method of the manifold."""
    row, _, points = METHODS[name].partition(" -> ")

    def draw(source: Source) -> Call:
        fate = source.pick(("valid", "wrong", "doubtful", "valid", "wrong", "wrong"))
        drawn = scene(source)
        kinds = _drawn_arguments(drawn, row, every=fate != "valid")
        manifold = drawn.manifold
        call = Call(
            f"Lorentz.{name}",
            getattr(manifold, name),
            {argument: drawn.seen[argument] for argument in kinds},
            "manifold." + name,
            (f"manifold = {literal(manifold)}",),
            on=manifold if points else None,
            learned=(manifold.curvature_parameter.log_ratio,),
        )
        optional = {argument for argument, kind in _parsed(row).items() if kind.endswith("?")}
        settle(call, drawn, kinds, fate, optional)
        return call

    return Target(f"Lorentz.{name}", draw, 2.0)


def settle(call: Call, drawn: Scene, kinds: Mapping[str, Kind], fate: str, optional: set[str]) -> None:
    """Make one argument, seldom two, wrong or doubtful, or ask for gradients and a second evaluation."""
    source = drawn.source
    if fate == "valid":
        call.twice = source.rarely(6)
        if source.below(2):
            call.arguments = {name: _asking(value) for name, value in call.arguments.items()}
        return
    spoiled: dict[str, str] = {}
    for _ in range(1 + (fate == "wrong" and source.rarely(8))):
        if not call.arguments:
            break
        name = source.pick(list(call.arguments))
        changes = kinds[name].wrong if fate == "wrong" else kinds[name].doubtful
        if not changes or name in spoiled:
            continue
        how = source.pick(list(changes))
        if how == "none" and name in optional:
            continue
        changed = changes[how](drawn, call.arguments[name])
        if changed is not NotImplemented:
            call.arguments[name] = changed
            spoiled[name] = how
    call.wrong, call.doubtful = (spoiled, {}) if fate == "wrong" else ({}, spoiled)


def _asking(value: Any) -> Any:
    """A tensor as one that asks for gradients, in the same place of memory."""
    if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
        return value.detach().requires_grad_()
    return value


def _parsed(row: str) -> dict[str, str]:
    return dict(part.split(":") for part in row.split())


def _drawn_arguments(drawn: Scene, row: str, *, every: bool) -> dict[str, Kind]:
    """Draw the arguments of a row into the scene, and return their kinds."""
    kinds = {}
    for name, kind in _parsed(row).items():
        if kind.endswith("?") and not drawn.source.below(2) and not every:
            continue
        kinds[name] = KINDS[kind.removesuffix("?")]
        drawn.seen[name] = kinds[name].valid(drawn)
    return kinds
