"""What the library's sources must not contain, and what its distribution must."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import holonomy

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "holonomy").rglob("*.py"))
BUILTINS = {"print", "open", "input", "breakpoint", "eval", "exec", "globals", "__import__"}
ATTRIBUTES = {
    *("environ", "getenv", "putenv"),
    *("cuda", "get_default_dtype", "set_default_dtype", "set_default_device", "manual_seed"),
    *("read_text", "write_text", "read_bytes", "write_bytes"),
}
MODULES = {
    "argparse",
    "io",
    "logging",
    "os",
    "pathlib",
    "pdb",
    "random",
    "subprocess",
    "sys",
    "time",
}


def eps_literals(source: str) -> list[str]:
    """Numbers in code (not in docstrings) below a thousandth, or spelled ``1e-..``."""
    numbers = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NUMBER
    ]
    return [
        text
        for text in numbers
        if re.search(r"[eE]-", text) or (re.fullmatch(r"[\d._]+", text) and 0 < float(text.replace("_", "")) < 0.001)
    ]


def outside_world(source: str) -> list[str]:
    """Names by which a library would touch files, the terminal, the environment or global state."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Attribute(attr="Generator")), attr="manual_seed"):
                pass  # of a generator of its own
            case ast.Name(id=name) if name in BUILTINS:
                found.append(name)
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                found.append(name)
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(name)) if name.split(".")[0] in MODULES:
                found.append(name)
            case _:
                pass
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x.clamp_min(1e-15)", ["1e-15"]),
        ("x + .00001", [".00001"]),
        ("eps: float = 1E-6", ["1E-6"]),
        ("lr = 0.001; big = 1e6; half = 0.5; zero = 0.0; n = 1_000", []),
        ('"""A tolerance of 1e-5."""', []),
    ],
)
def test_eps_grep_bites(source: str, found: list[str]) -> None:
    assert eps_literals(source) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("print(x)", ["print"]),
        ("import os.path", ["os.path"]),
        ("from os import environ", ["os"]),
        ("torch.manual_seed(0)", ["manual_seed"]),
        ("g = torch.Generator().manual_seed(0)", []),
        ("x.cuda()", ["cuda"]),
        ("with open(p) as f: pass", ["open"]),
        ("y = x.to(z.device)", []),
        ('"""Opens nothing: open(p), print(x)."""', []),
    ],
)
def test_outside_world_grep_bites(source: str, found: list[str]) -> None:
    assert outside_world(source) == found


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_eps_literal_outside_numerics(path: Path) -> None:
    if path == ROOT / "holonomy" / "numerics.py":
        assert eps_literals(path.read_text(encoding="utf-8")), "the guards live here"
    else:
        assert eps_literals(path.read_text(encoding="utf-8")) == []


# The report command of theory is for a user at a terminal.
SPEAKING = {ROOT / "holonomy" / "theory" / name for name in ("__main__.py", "claims/report.py")}
# Layers are drawn by their constructors, from torch's seeded state, which is forked for them.
# So is dropout, which every pass over a chunk draws again.
FORKED = {
    ROOT / "holonomy" / "theory" / "claims" / "verdict.py": ["manual_seed"],
    ROOT / "holonomy" / "distributed" / "streaming.py": ["manual_seed"],
}
SILENT = [path for path in LIBRARY if path not in SPEAKING]


@pytest.mark.parametrize("path", SILENT, ids=lambda p: str(p.relative_to(ROOT)))
def test_library_leaves_the_world_alone(path: Path) -> None:
    assert outside_world(path.read_text(encoding="utf-8")) == FORKED.get(path, [])


def test_every_module_opens_with_what_it_is() -> None:
    for path in LIBRARY:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize("folder", ["holonomy", "examples", "experiments"])
def test_nobody_imports_tests_or_benchmarks(folder: str) -> None:
    pattern = re.compile(r"^\s*(from|import) (tests|benchmarks)\b", flags=re.MULTILINE)
    assert pattern.search("import tests.cases")
    guilty = [p for p in (ROOT / folder).rglob("*.py") if pattern.search(p.read_text("utf-8"))]
    assert guilty == []


def test_every_folder_of_tests_is_a_package() -> None:
    """pytest then names a test by its path, and two files may have the same name."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_curvature_is_converted_to_k_in_one_file() -> None:
    """Only lorentz.py says k = -1/kappa (DESIGN)."""
    pattern = re.compile(r"-\s*1(\.0)?\s*/\s*(self\.)?k\b|\bk\s*=\s*-\s*1(\.0)?\s*/")
    places = {
        p.name
        for p in LIBRARY
        if any(
            pattern.search(ast.unparse(statement))
            for statement in ast.walk(ast.parse(p.read_text(encoding="utf-8")))
            if isinstance(statement, ast.Assign | ast.Return)
        )
    }
    assert places <= {"lorentz.py"}


def test_import_needs_only_the_four_dependencies() -> None:
    """In a process where the extras cannot be imported, the library imports and runs."""
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {
            "beartype", "hypll", "hypothesis", "jaxtyping", "matplotlib", "mpmath_", "pytest",
            "torch_geometric",
        }:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib, pkgutil, holonomy
for module in pkgutil.walk_packages(holonomy.__path__, "holonomy."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(holonomy.__version__)
"""
    done = subprocess.run(
        [sys.executable, "-W", "always", "-W", "error::UserWarning:holonomy", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{holonomy.__version__}\n"
    assert "jit.script" not in done.stderr  # which a user of PyTorch 2.14 would read at each import


SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, GROUPS = SETTINGS["project"], SETTINGS["dependency-groups"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


def test_version_is_stated_once_and_the_same() -> None:
    assert PROJECT["version"] == holonomy.__version__
    assert f"## {holonomy.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_core_dependencies() -> None:
    names = {canonicalize_name(Requirement(r).name) for r in PROJECT["dependencies"]}
    assert names == {"torch", "geoopt", "numpy", "scipy", "jaxtyping"}
    assert PROJECT["requires-python"] == ">=3.11"


def test_every_package_of_the_environment_is_pinned() -> None:
    """From the extras and the groups of developers on, each requirement of a requirement has its exact version."""
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    sets = [*PROJECT["optional-dependencies"].values(), *GROUPS.values()]
    queue = [*PROJECT["dependencies"], "pip", *(r for one in sets for r in one if isinstance(r, str))]
    seen: set[str] = set()
    missing: set[str] = set()
    while queue:
        requirement = Requirement(queue.pop())
        name = canonicalize_name(requirement.name)
        marked = [
            requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            for extra in ("", *requirement.extras)
        ]
        if not any(marked) or name in seen:
            continue
        seen.add(name)
        # torch's wheel for GPUs brings these along, its wheel for CPUs does not.
        if name.startswith(("nvidia-", "cuda-")):
            continue
        if name not in pins:
            missing.add(name)
            continue
        needed = importlib.metadata.requires(name) or []
        for text in needed:
            inner = Requirement(text)
            extra_names = ("", *requirement.extras)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extra_names):
                inner.marker = None
                queue.append(str(inner))
    assert not missing
    assert not {name for name in pins if name.startswith(("nvidia-", "cuda-"))}
    assert len(seen) > 50, "the walk found the environment"


def test_nothing_names_a_registry() -> None:
    names = ["constraints.txt", "pyproject.toml", "Makefile", "hatch_build.py", "CITATION.cff", "SECURITY.md"]
    names += [".ci/run", ".pre-commit-config.yaml", ".readthedocs.yaml", ".github/workflows/*.yml"]
    for path in (path for name in names for path in ROOT.glob(name)):
        # The action that publishes is named after the index, and names no host.
        text = path.read_text(encoding="utf-8").replace("pypa/gh-action-pypi-publish", "")
        assert not re.search(r"index-url|find-links|https?://|pypi", text, flags=re.IGNORECASE), path


def test_nothing_names_a_machine() -> None:
    """No absolute path of the machine a file was written on."""
    pattern = re.compile(r"(?<![\w.~])/" + r"(work|root|opt|home|Users|mnt)/\w")
    assert pattern.search("cd " + "/" + "home/me")
    suffixes = {".py", ".md", ".toml", ".txt", ".yml", ".json", ".csv"}
    folders = ["holonomy", "tests", "examples", "experiments", "benchmarks", "docs", ".ci", ".github"]
    files = [p for name in folders for p in (ROOT / name).rglob("*") if p.suffix in suffixes]
    files += [p for p in ROOT.iterdir() if p.suffix in suffixes] + [ROOT / "Makefile", ROOT / ".ci" / "run"]
    guilty = [
        str(p.relative_to(ROOT)) for p in files if "_build" not in p.parts and pattern.search(p.read_text("utf-8"))
    ]
    assert guilty == []


def test_workflows_run_code_that_cannot_be_moved() -> None:
    """Each action by its commit, with no more permissions than it needs."""
    folder = ROOT / ".github" / "workflows"
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.yml")}
    assert set(texts) == {"test.yml", "docs.yml", "release.yml"}
    used = [(name, action) for name, text in texts.items() for action in re.findall(r"uses: (.+)", text)]
    assert len(used) >= 8
    assert not [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", one[1])]
    for name, text in texts.items():
        read = yaml.safe_load(text)
        assert read["permissions"] == {"contents": "read"}
        more = [job["permissions"] for job in read["jobs"].values() if "permissions" in job]
        assert more == ([{"id-token": "write"}] if name == "release.yml" else [])
        assert "secrets." not in text


def test_files_for_the_outside_say_what_the_project_says() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["authors"] == PROJECT["authors"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks}
    assert tools == set(re.findall(r"^\t@\$\(BIN\)/(ruff|lint-imports|pydoclint|pyright)\b", makefile, re.MULTILINE))
    pages = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    assert pages["build"]["commands"][0] == "make docs"
