"""What a browser would trip over on the built pages: ``python docs/check_pages.py docs/_build/html``.

Links and anchors lead somewhere, pictures have a description, headings come in order, nothing is loaded from another
server, and no mark of the source is left in the text.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["Page", "complaints"]

_LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
_CODE = {"code", "pre", "script", "style", "title", "math", "svg"}
# Emphasis, roles, links and equations that were meant to be something else.
_LEFT = re.compile(r"\*\*[^\W\d]|:[a-z]+:`|\]\([\w./]+\)|\$\$|\\\(|`{1,3}\w")


class Page(HTMLParser):
    """Links, anchors, headings, pictures and text of one page."""

    def __init__(self, text: str) -> None:
        """Read the page.

        Args:
            text: HTML.
        """
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.headings: list[int] = []
        self.bare: list[str] = []
        self.left: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Write down what a tag refers to."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if found.get(_LOADED.get(tag, "")) and found.get("rel") not in {"index", "search", "next", "prev", "canonical"}:
            self.loaded.append(found[_LOADED[tag]])
        if tag == "img" and not found.get("alt", "").strip():
            self.bare.append(found.get("src", ""))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag in _CODE:
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Leave code."""
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        """Write down what is left of the source."""
        if not self._inside:
            self.left += _LEFT.findall(data)


def complaints(root: Path) -> list[str]:
    """Everything that is wrong with the pages under a folder.

    Args:
        root: of the built pages.

    Returns:
        One line each.
    """
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.html"))}
    found: list[str] = []
    for path, page in pages.items():
        name = path.relative_to(root.resolve())
        found += [f"{name}: {target} {why}" for target in page.links if (why := _dead(path, target, pages))]
        found += [f"{name}: loads {target}" for target in page.loaded if urlsplit(target).netloc]
        found += [f"{name}: {target} has no description" for target in page.bare]
        found += [f"{name}: {mark!r} is left in the text" for mark in page.left]
        if "_modules" not in name.parts and name.name not in {"genindex.html", "search.html", "py-modindex.html"}:
            steps = zip(page.headings, page.headings[1:], strict=False)
            found += [f"{name}: h{b} comes after h{a}" for a, b in steps if b > a + 1]
            found += [f"{name}: has {page.headings.count(1)} first headings"] if page.headings.count(1) != 1 else []
    return found


def _dead(path: Path, target: str, pages: dict[Path, Page]) -> str:
    parts = urlsplit(target)
    if parts.scheme:
        return "" if parts.scheme in {"http", "https", "mailto"} else "is of no known kind"
    there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not there.exists():
        return "leads nowhere"
    if parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
        return "names no place on its page"
    return ""


if __name__ == "__main__":
    wrong = complaints(Path(sys.argv[1]))
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    sys.exit(bool(wrong))
