"""The suite checks the shapes of annotations at run time, which the library does not.

The library imports jaxtyping for type checkers only (``holonomy/_shapes.py``). The names of
an annotation are taken from the builtins, where jaxtyping's stand here. Pytest's option
``--jaxtyping-packages`` in pyproject.toml decorates every function of the library with :func:`checked`. With torch 2.6
its hook is taken out again: that ``torch.compile`` cannot read a decorated function, and that all layers compile is a
law of the suite.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype

# Where whole models are trained, the checks would take a quarter of the time and find what the laws find.
TRAINING = ("benchmarks", "distributed", "docs", "examples", "experiments")

for name in ("Bool", "Complex", "Float", "Inexact", "Int", "Int64", "Num", "Shaped"):
    setattr(builtins, name, getattr(jaxtyping, name))

if torch.__version__.startswith("2.6."):
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "jaxtyping._import_hook"]


made = cache(beartype)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check a function's types; one made inside of another is made anew at each call, which takes a millisecond.

    The check is made at the first call: making all of them takes every process of the suite two seconds.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return made(function)(*args, **kwargs)

    return function if "<locals>" in function.__qualname__ else call


@pytest.fixture
def without_shape_checks() -> Iterator[None]:
    """Run as a user does: the suite's own type checks would refuse a wrong argument first, and cannot be compiled."""
    jaxtyping.config.update("jaxtyping_disable", value=True)
    yield
    jaxtyping.config.update("jaxtyping_disable", value=False)


def undecorated(value: Any) -> Any:
    """What stood under a name before jaxtyping decorated it; the value itself, where it did not."""
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(undecorated(value.__func__))
    if isinstance(value, property):
        return property(*map(undecorated, (value.fget, value.fset, value.fdel)))
    decorated = inspect.isfunction(value) and value.__globals__["__name__"] == "jaxtyping._decorator"
    # Not __wrapped__, which a decorator of the library above has set to what stands below itself.
    return inspect.getclosurevars(value).nonlocals["fn"] if decorated else value


@cache
def decorated() -> list[tuple[Any, str, Any, Any]]:
    """The library's names for decorated functions: the module or class, the name, what stands under it, what stood."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "holonomy"]
    found = (value for module in modules for value in vars(module).values() if inspect.isclass(value))
    owners = {*modules, *(kind for kind in found if kind.__module__.startswith("holonomy"))}
    places = [(owner, name, value, undecorated(value)) for owner in owners for name, value in vars(owner).items()]
    return [place for place in places if place[2] is not place[3]]


@pytest.fixture
def without_decorators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the decorators of the checks off, too: torch.compile traces each, in a third of its time.

    A function inside of another is decorated where that one runs, and gets none meanwhile.
    """
    request.getfixturevalue("without_shape_checks")
    monkeypatch.setattr(jaxtyping, "jaxtyped", lambda **_: lambda function: function)
    for owner, name, _, plain in decorated():
        setattr(owner, name, plain)
    yield
    for owner, name, value, _ in decorated():
        setattr(owner, name, value)


@pytest.fixture(autouse=True)
def training_runs_as_a_user_does(request: pytest.FixtureRequest) -> None:
    """Leave the checks out in the rooms that train, and their decorators, which take an eighth of the time."""
    if {*TRAINING} & {*request.path.relative_to(Path(__file__).parent).parts}:
        request.getfixturevalue("without_decorators")
