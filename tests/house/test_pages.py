"""The check of built pages notices each mistake; the drawings are those that their script makes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


GOOD = """<html><body><h1 id="top">One</h1><h2>Two</h2><p>a * b <code>**kwargs</code>
<a href="other.html#place">x</a> <a href="#top">y</a> <a href="https://host/page">z</a></p>
<img src="p.png" alt="a picture"></body></html>"""
OTHER = '<html><body><h1>Other</h1><p id="place">here</p></body></html>'


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ""),
        ("other.html#place", "nothing.html", "leads nowhere"),
        ("other.html#place", "other.html#gone", "names no place"),
        ('"#top"', '"#bottom"', "names no place"),
        ('alt="a picture"', 'alt=""', "has no description"),
        ('src="p.png"', 'src="https://host/p.png"', "loads https://host/p.png"),
        ("<h2>Two</h2>", "<h3>Two</h3>", "h3 comes after h1"),
        ("<h2>Two</h2>", "<h1>Two</h1>", "2 first headings"),
        ("a * b", "a **bold** word", "is left in the text"),
        ("a * b", "see :class:`HTC`", "is left in the text"),
        ("a * b", "see [this](page.md)", "is left in the text"),
    ],
)
def test_the_check_of_pages_notices(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    (tmp_path / "index.html").write_text(GOOD.replace(old, new, 1) if old else GOOD, encoding="utf-8")
    (tmp_path / "other.html").write_text(OTHER, encoding="utf-8")
    (tmp_path / "p.png").write_bytes(b"")
    found = script("check_pages").complaints(tmp_path)
    assert len(found) == bool(said), found
    assert all(said in line for line in found)


@pytest.mark.parametrize("name", ["hyperboloid", "disk"])
def test_drawings_are_those_of_their_script(name: str) -> None:
    assert getattr(script("pictures"), name)() == (ROOT / "docs" / "_static" / f"{name}.svg").read_text(
        encoding="utf-8"
    )


def test_the_script_of_a_page_runs_what_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """And prints what it shows, so that both have one source."""
    pytest.importorskip("sphinx")
    page = "# Two\n\nText.\n\n```python\n>>> a = 1\n>>> a + 1  # the sum\n2\n>>> a\n1\n>>> _ = a\n\n```\n\nEnd.\n"
    made = script("conf").script_of(page)
    exec(compile(made, "page", "exec"), {})
    assert capsys.readouterr().out == "2\n1\n"
    assert [line for line in made.splitlines() if line.startswith("#")] == [
        "# # Two",
        "#",
        "# Text.",
        "#",
        "#",
        "# End.",
    ]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guide").glob("*.md")), ids=lambda path: path.stem)
def test_every_tutorial_is_a_script_and_saves_the_picture_that_the_gallery_shows(page: Path) -> None:
    pytest.importorskip("sphinx")
    made = script("conf").script_of(page.read_text("utf-8"))
    compile(made, page.name, "exec")
    assert made.count("print(") > 1
    shown = f"_static/guide/{page.stem}.png"
    assert f'savefig(folder / "{page.stem}.png"' in made
    assert f"(../{shown})" in made
    assert f"({shown})" in (ROOT / "docs" / "gallery.md").read_text("utf-8")
    assert (ROOT / "docs" / shown).stat().st_size
