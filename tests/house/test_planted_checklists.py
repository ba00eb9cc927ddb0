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
from collections.abc import Iterator
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


# A process that imports what no checklist changes once, and runs pytest on each tree that it is told in a fork.
SERVER = """
import os, sys, warnings
warnings.simplefilter("ignore")
import geoopt, mpmath, networkx, pytest, scipy.sparse, torch._dynamo
for line in sys.stdin:
    tree, log, *words = line.removesuffix("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        os.chdir(tree)
        warnings.resetwarnings()
        stream = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(stream, 1), os.dup2(stream, 2)
        status = pytest.main(words)
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is changed, compiled code included, beside links to what is read."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("holonomy", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    for path in ROOT.iterdir():
        if path.name not in {"holonomy", "tests", ".git", ".venv"}:
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def tree(copied: Path) -> Iterator[Path]:
    """The copy, whose sources are afterwards as they were before."""
    before = sources(copied)
    yield copied
    after = sources(copied)
    for path in after.keys() - before.keys():
        path.unlink()
    for path, text in before.items():
        if after[path] != text:
            path.write_text(text, encoding="utf-8")


def sources(folder: Path) -> dict[Path, str]:
    """Every file that a step may change."""
    paths = (path for name in ("holonomy", "tests") for path in (folder / name).rglob("*.py"))
    return {path: path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """The process that runs pytest, and keeps what it compiles."""
    named = ("PYTEST_", "COV_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(named)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | {"OMP_NUM_THREADS": "1"},
        text=True,
    ) as process:
        yield process
        process.communicate()


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


def new_modules(tree: Path) -> list[str]:
    paths = (path.relative_to(tree) for path in (tree / "holonomy").rglob("*.py"))
    return [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths if not (ROOT / path).exists()
    ]


def outcome(server: subprocess.Popen[str], tree: Path, arguments: str) -> tuple[int, str]:
    words = [word.strip('"') for word in re.findall(r'"[^"]+"|\S+', arguments)]
    log = tree / "log.txt"
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=quick"]
    # The types of what is new are executed: to decorate the whole library takes longer than the tests.
    packages = [*new_modules(tree), "beartype.beartype"]
    words.append(f"--jaxtyping-packages={','.join(packages)}")
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("\t".join([str(tree), str(log), *options, *words]) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline()), log.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKLISTS)
def test_the_checklist_leads_to_code_that_the_suite_guards(
    tree: Path, server: subprocess.Popen[str], name: str
) -> None:
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
            status, said = outcome(server, tree, step["arguments"])
            assert status == (0 if step["outcome"] == "Passes" else 1), f"{step[0]}\n{textwrap.indent(said, '    ')}"
            seen.append(step["outcome"])
    assert seen.count("Passes") >= 1
    assert seen.count("Fails") >= 1


def test_there_is_a_checklist_for_each_kind_of_addition() -> None:
    assert set(CHECKLISTS) == {"A layer", "A model", "An operator with its fast form", "A manifold", "A claim"}
    blocks = sum(section.count("```python") for section in CHECKLISTS.values())
    assert blocks == sum(step["outcome"] is None for section in CHECKLISTS.values() for step in STEP.finditer(section))
