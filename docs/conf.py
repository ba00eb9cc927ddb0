"""Sphinx: furo, MyST for the pages, Google docstrings for the reference."""

from __future__ import annotations

import ast
import doctest
import re
import textwrap
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


# Letters that name a function, such as log, with no bracket after them.
_name = re.compile(
    r"(?<!<msub>)(?<!<msup>)(?<!<munder>)(?<!<msubsup>)(?<!<mfrac>)"
    r"(<(m[io])>[a-z]{3,}</\2>)(?=<(?:m[in]|msub|msup|msqrt|mfrac|mrow)>)"
)


def _mathml(text: str, display: str = "inline") -> str:
    """MathML, with the space between a function's name and its argument that LaTeX has and latex2mathml has not."""
    return _name.sub(r'\1<mspace width="0.17em"/>', convert(text, display=display))


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_mathml(node.astext()))
    raise nodes.SkipNode


def _displayed(translator: HTML5Translator, node: nodes.math_block) -> None:
    text = node.astext()
    if "&" in text and r"\begin" not in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    translator.body.append(f'<div class="math">{_mathml(text, "block")}</div>')
    raise nodes.SkipNode


def script_of(page: str) -> str:
    """A page whose lines run, as a script: its text becomes comments, and what the page shows is printed."""
    found: list[str] = []
    for part in doctest.DocTestParser().parse(page):
        if isinstance(part, doctest.Example):
            found.append(_printed(part))
        else:
            lines = (line for line in part.strip("\n").splitlines() if not line.startswith("```"))
            found.extend(f"# {line}".rstrip() + "\n" for line in lines)
    return "".join(found)


def _printed(example: doctest.Example) -> str:
    body = ast.parse(example.source).body
    if not (example.want and len(body) == 1 and isinstance(body[0], ast.Expr)):
        return example.source
    if example.source.count("\n") == 1 and "#" not in example.source:
        return f"print({example.source.strip()})\n"
    return f"print(\n{textwrap.indent(example.source, '    ')})\n"


# Pages with a script: one source, which the suite runs. A gallery of scripts would be a second one, with its own runs,
# and pages that are not tested where they are read.
_TUTORIALS = "guide/"


def _name_of(page: str) -> str:
    """The script's: beside one named geoopt.py nothing could import Geoopt."""
    return f"tutorial_{page}.py"


def _link_script(_app: object, page: str, source: list[str]) -> None:
    """Under the heading of a tutorial, its script."""
    if page.startswith(_TUTORIALS):
        name = _name_of(page.removeprefix(_TUTORIALS))
        head, _, rest = source[0].partition("\n")
        source[0] = f'{head}\n\n<p>This page as a script: <a href="{name}" download>{name}</a></p>\n{rest}'


def _write_scripts(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for page in (Path(app.srcdir) / _TUTORIALS).glob("*.md"):
            there = Path(app.outdir) / _TUTORIALS / _name_of(page.stem)
            there.write_text(script_of(page.read_text("utf-8")), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Write equations as MathML and tutorials as scripts; escape docstrings before napoleon reads their sections.

    Args:
        app: Sphinx.
    """
    # A table of claims is shown as their names, and not as a page of addresses of functions.
    Claim.__repr__ = lambda self: self.name
    Picture.__repr__ = lambda self: repr(self.title)
    app.add_html_math_renderer("mathml", (_inline, None), (_displayed, None))
    app.connect("autodoc-process-docstring", _escape, priority=100)
    app.connect("source-read", _link_script)
    app.connect("build-finished", _write_scripts)
