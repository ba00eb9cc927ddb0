"""Sphinx: furo, MyST for the pages, Google docstrings for the reference."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from latex2mathml.converter import convert

from holonomy.theory import Claim
from holonomy.theory.claims.pictures import Picture

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]

project = _project["name"]
author = "the holonomy authors"
copyright = "2026, the holonomy authors"
release = version = _project["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = f"{project} {release}"
# Equations are MathML, made when the pages are: no script, and nothing from another server.
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
exclude_patterns = ["_build"]
default_role = "code"
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
# README links to files of the repository, which are no pages of the documentation.
suppress_warnings = ["myst.xref_missing"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Docstrings are written to be read in an editor: |x| is a norm, x_s the space part, a * b a product.
# reStructuredText would read substitutions, links and emphasis into them. What is emphasis is words, as *Proof.*
_literal = re.compile(
    r"(``.+?``|:[a-z:]+:`.+?`|`[^`]+`|\*\*\S(?:[^*]*\S)?\*\*|(?<![\w*])\*\w[\w ]*\.?\*(?![\w*])|^\s*\* )"
)
_special = re.compile(r"(?<!\\)([|*]|(?<=\w)_(?!\w))")


def _escape(_app: object, _what: str, _name: str, _obj: object, _opts: object, lines: list[str]) -> None:
    """Escape plain mathematics outside of literals, roles, doctests and directives."""
    in_doctest, block = False, None
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if block is not None and line.strip() and indent <= block:
            block = None
        if line.lstrip().startswith(".. "):
            block = indent
        in_doctest = line.lstrip().startswith(">>>") or (in_doctest and bool(line.strip()))
        if in_doctest or block is not None:
            continue
        parts = _literal.split(line)
        parts[::2] = [_special.sub(r"\\\1", part) for part in parts[::2]]
        lines[i] = "".join(parts)
        if line.rstrip().endswith("::"):
            block = indent


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _displayed(translator: HTML5Translator, node: nodes.math_block) -> None:
    text = node.astext()
    if "&" in text and r"\begin" not in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    translator.body.append(f'<div class="math">{convert(text, display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Write equations as MathML, and escape docstrings before napoleon reads their sections.

    Args:
        app: Sphinx.
    """
    # A table of claims is shown as their names, and not as a page of addresses of functions.
    Claim.__repr__ = lambda self: self.name
    Picture.__repr__ = lambda self: repr(self.title)
    app.add_html_math_renderer("mathml", (_inline, None), (_displayed, None))
    app.connect("autodoc-process-docstring", _escape, priority=100)
