"""Every public name has its page in the documentation, a docstring, and lines in it that run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import typing
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import holonomy

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
MODULES: list[ModuleType] = [holonomy] + [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(holonomy.__path__, "holonomy.")
    if not info.name.endswith("__main__")
]
# What users import from; whatever else a module lists is for its neighbours and has one line.
ROOMS = ("", ".manifolds", ".structures", ".optim", ".distributed", ".layers", ".models", ".theory")
PUBLIC = {
    f"{thing.__module__}.{name}": thing
    for room in ROOMS
    for module in [importlib.import_module(f"holonomy{room}")]
    for name in module.__all__
    for thing in [getattr(module, name)]
    if inspect.isclass(thing) or inspect.isfunction(thing)
}


def functions_of(module: ModuleType) -> dict[str, FunctionType]:
    """Every function that a module defines, the methods of its classes included."""
    found: dict[str, FunctionType] = {}
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        members = vars(thing).items() if inspect.isclass(thing) else [("", thing)]
        for member, value in members:
            function = inspect.unwrap(getattr(value, "__func__", value))
            # A named tuple's __new__ is made by Python, in a namespace without builtins.
            if inspect.isfunction(function) and member != "__new__":
                found[f"{module.__name__}.{name}.{member}".rstrip(".")] = function
    return found


def shown() -> list[object]:
    """What the pages list: the ``__all__`` of a package, what a file defines, or a class or function by itself."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    things: list[object] = []
    for kind, name in re.findall(r"^\.\. auto(module|class|function):: ([\w.]+)$", text, flags=re.MULTILINE):
        if kind == "module":
            module = importlib.import_module(name)
            own = [public for public, thing in vars(module).items() if getattr(thing, "__module__", "") == name]
            things += [getattr(module, public) for public in getattr(module, "__all__", own)]
        else:
            module_name, _, attribute = name.rpartition(".")
            things.append(getattr(importlib.import_module(module_name), attribute))
    return things


def test_packages_publish_names_that_exist_once() -> None:
    """Only packages list names; in a file an underscore says what is for the file alone."""
    for module in MODULES:
        names = getattr(module, "__all__", ())
        assert len(set(names)) == len(names)
        assert [name for name in names if not hasattr(module, name)] == []


def test_every_public_name_is_on_a_page() -> None:
    known = {id(thing) for thing in shown()}
    assert [name for name, thing in PUBLIC.items() if id(thing) not in known] == []


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_docstring_runs(name: str) -> None:
    thing = PUBLIC[name]
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    if inspect.isfunction(thing) or inspect.isclass(thing):
        assert doctest.DocTestParser().get_examples(text), f"{name} shows no line that runs"


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_every_annotation_is_executed(module: ModuleType) -> None:
    """beartype passes over a name it cannot find, and with it over the shapes of the whole function.

    So whatever an annotation names is imported at run time; only jaxtyping's own names may wait for
    the type checker, for conftest.py brings them.
    """
    unknown: dict[str, str] = {}
    for name, function in functions_of(module).items():
        try:
            typing.get_type_hints(function)
        except NameError as error:
            unknown[name] = str(error)
    assert unknown == {}


def test_public_methods_say_what_they_do() -> None:
    bare = [
        f"{name}.{method}"
        for name, thing in PUBLIC.items()
        if inspect.isclass(thing)
        for method, function in vars(thing).items()
        if inspect.isfunction(function) and not method.startswith("_") and not function.__doc__
    ]
    assert bare == []


def test_readme_example_runs_in_the_suite() -> None:
    """pytest collects README.md (see testpaths); here it is made sure that there is something to run."""
    examples = doctest.DocTestParser().get_examples((ROOT / "README.md").read_text("utf-8"))
    assert len(examples) >= 8
    assert any(example.want for example in examples)


def test_links_within_the_repository_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [*PAGES, *ROOT.glob("*.md")]
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text("utf-8"))
        if not target.startswith(("http://", "https://")) and not (page.parent / target).exists()
    ]
    assert broken == []


def test_architecture_names_what_is_there() -> None:
    """Every file and folder that the page names exists; a test's planted name does not."""
    places = {str(p.relative_to(ROOT)) + "/" * p.is_dir() for p in ROOT.rglob("*") if ".venv" not in p.parts}

    def known(name: str) -> bool:
        return any(f"/{place}".endswith(f"/{name}") for place in places)

    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = {name for name in re.findall(r"`([\w/.]+)`", page) if name.endswith((".py", "/"))}
    assert len(named) > 40
    assert [name for name in sorted(named) if not known(name)] == []
    assert not known("ops/nothing.py")
