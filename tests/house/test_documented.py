"""Every public name has its page in the documentation, a docstring, and lines in it that run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import holonomy

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
MODULES: list[ModuleType] = [holonomy] + [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(holonomy.__path__, "holonomy.")
    if not info.name.endswith("__main__")
]
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in getattr(module, "__all__", ())
    if callable(getattr(module, name))
}


def directives() -> set[str]:
    """Modules whose ``__all__`` a page of the documentation lists."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return set(re.findall(r"^\.\. automodule:: ([\w.]+)$", text, flags=re.MULTILINE))


def test_modules_say_what_is_public() -> None:
    silent = [m.__name__ for m in MODULES if m is not holonomy and not hasattr(m, "__all__")]
    assert silent == []


def test_every_public_name_is_on_a_page() -> None:
    shown = {
        id(getattr(module, name)) for module in map(importlib.import_module, directives()) for name in module.__all__
    }
    assert [name for name, thing in PUBLIC.items() if id(thing) not in shown] == []


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_docstring_runs(name: str) -> None:
    thing = PUBLIC[name]
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    if inspect.isfunction(thing) or inspect.isclass(thing):
        assert doctest.DocTestParser().get_examples(text), f"{name} shows no line that runs"


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
        for page in [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text("utf-8"))
        if not target.startswith(("http://", "https://")) and not (page.parent / target).exists()
    ]
    assert broken == []
