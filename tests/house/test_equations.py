"""Every equation of pages and docstrings becomes MathML: whoever reads the pages needs no script and no network."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from latex2mathml.converter import convert

from tests.house.test_documented import PAGES, PUBLIC

ROOT = Path(__file__).parents[2]


def equations() -> list[str]:
    """Those of all pages, and of the docstrings of all that is public and of their modules."""
    found: list[str] = []
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += re.findall(r"\$\$(.+?)\$\$", text, flags=re.DOTALL)
        found += re.findall(r"(?<!\$)\$([^$]+)\$(?!\$)", re.sub(r"\$\$.+?\$\$", "", text, flags=re.DOTALL))
    documented = [*PUBLIC.values(), *{inspect.getmodule(thing) for thing in PUBLIC.values()}]
    for text in (inspect.getdoc(thing) or "" for thing in documented):
        found += re.findall(r":math:`([^`]+)`", text)
        found += re.findall(r"^ *\.\. math::((?:.|\n )*)", text, flags=re.MULTILINE)
    return found


def test_every_equation_is_written_out() -> None:
    every = equations()
    assert len(every) > 500
    for equation in every:
        written = convert(rf"\begin{{aligned}}{equation}\end{{aligned}}" if "&" in equation else equation)
        assert not re.search(r"\\[a-zA-Z]+", written), equation


def test_pages_ask_no_other_server_for_equations() -> None:
    assert "mathjax" not in (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
