"""The checklists of CONTRIBUTING.md, followed word by word on their toys in a copy of the tree.

A step is a sentence that ends in a colon before a block: a new file, lines after a line, or text in place of text. A
command is said to pass or to fail, and does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKLISTS = {
    section.partition("\n")[0]: section
    for section in re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    if "Passes: " in section
}
STEP = re.compile(
    r"New file `(?P<new>[^`]+)`:\n\n(?P<text>(?: +```python\n)(?:.*\n)*?) +```\n"
    r"|In `(?P<file>[^`]+)`, (?P<how>after|in place of) `(?P<old>[^\n]+)`:\n\n"
    r"(?P<lines>(?: +```python\n)(?:.*\n)*?) +```\n"
    r"|(?P<outcome>Passes|Fails): `pytest (?P<arguments>[^\n]+)`"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is changed, beside links to what is read."""
    for name in ("holonomy", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.name not in {"holonomy", "tests", ".git", ".venv"} and not (tmp_path / path.name).exists():
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def block(text: str) -> str:
    """The lines between the fences, as far left as the fence."""
    fence, _, body = text.partition("\n")
    indent = len(fence) - len(fence.lstrip())
    return "".join(line[indent:] if line.strip() else "\n" for line in body.splitlines(keepends=True))


def change(path: Path, how: str, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    if how == "after":
        assert f"\n{text}".count(f"\n{old}\n") == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
        text = f"\n{text}".replace(f"\n{old}\n", f"\n{old}\n{new}")[1:]
    else:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
        text = text.replace(old, new.strip("\n"))
    path.write_text(text, encoding="utf-8")


def outcome(tree: Path, arguments: str) -> tuple[int, str]:
    words = [word.strip('"') for word in re.findall(r'"[^"]+"|\S+', arguments)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=quick",
        *words,
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    environment = kept | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKLISTS)
def test_the_checklist_leads_to_code_that_the_suite_guards(tree: Path, name: str) -> None:
    """Until the case is registered a law fails, then it passes, and an error that is planted in the toy is noticed."""
    seen = []
    for step in STEP.finditer(CHECKLISTS[name]):
        if step["new"]:
            path = tree / step["new"]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block(step["text"]), encoding="utf-8")
        elif step["file"]:
            change(tree / step["file"], step["how"], step["old"], block(step["lines"]))
        else:
            status, said = outcome(tree, step["arguments"])
            assert status == (0 if step["outcome"] == "Passes" else 1), f"{step[0]}\n{textwrap.indent(said, '    ')}"
            seen.append(step["outcome"])
    assert seen.count("Passes") >= 1
    assert seen.count("Fails") >= 1


def test_there_is_a_checklist_for_each_kind_of_addition() -> None:
    assert set(CHECKLISTS) == {"A layer", "A model", "An operator with its fast form", "A manifold", "A claim"}
    blocks = sum(section.count("```python") for section in CHECKLISTS.values())
    assert blocks == sum(step["outcome"] is None for section in CHECKLISTS.values() for step in STEP.finditer(section))
