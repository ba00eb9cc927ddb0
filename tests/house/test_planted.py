"""Each tool of the house fails on a planted violation and passes on its clean counterpart.

A tree of a few lines is laid out beside a copy of pyproject.toml, so that what is tried is the
configuration the library is held to and not a tool's default.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOC = '"""A module."""\n\nfrom __future__ import annotations\n'
FUTURE = "from __future__ import annotations\n"


def plant(root: Path, files: dict[str, str]) -> None:
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, root / name)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")


def run(root: Path, tool: str, *arguments: str) -> tuple[int, str]:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    main = {
        "importlinter": ["-c", "from importlinter.cli import lint_imports_command as c; c()"],
        "pydoclint": ["-m", "pydoclint.main"],
    }
    done = subprocess.run(
        [sys.executable, *main.get(tool, ["-m", tool]), *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))},
    )
    return done.returncode, done.stdout + done.stderr


CLEAN = '''
"""A module."""

from __future__ import annotations


def twice(x: float) -> float:
    """Twice the argument.

    Args:
        x: Any number.

    Returns:
        2x.
    """
    return 2 * x
'''


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("ANN001", "x: float)", "x)"),
        ("D103", '    """Twice the argument.\n\n    Args:\n        x: Any number.\n', "    # "),
        ("T201", "return 2 * x", "print(x)\n    return 2 * x"),
        ("FIX002", "return 2 * x", "return 2 * x  # TODO: thrice"),
        ("ERA001", "return 2 * x", "# x = 3 * x\n    return 2 * x"),
        ("FBT001", "x: float)", "x: float, fast: bool)"),
        ("E501", "Any number.", "Any number" + " whatever" * 12),
        ("F841", "return 2 * x", "y = x\n    return 2 * x"),
        ("TID252", "annotations\n", "annotations\n\nfrom . import checks\n"),
        ("TID253", "annotations\n", "annotations\n\nfrom jaxtyping import Float\n"),
        ("S307", "return 2 * x", "return eval(str(x))"),
    ],
)
def test_ruff_lint(tmp_path: Path, rule: str, old: str, new: str) -> None:
    assert old in CLEAN
    text = CLEAN.replace(old, new, 1)
    if rule == "D103":
        text = CLEAN[: CLEAN.index('    """Twice')] + "    return 2 * x\n"
    plant(tmp_path, {"holonomy/__init__.py": CLEAN, "holonomy/planted.py": text})
    status, output = run(tmp_path, "ruff", "check", "--no-cache", "holonomy/__init__.py")
    assert status == 0, output
    status, output = run(tmp_path, "ruff", "check", "--no-cache", "holonomy/planted.py")
    assert status == 1, output
    assert rule in output, output


def test_ruff_format(tmp_path: Path) -> None:
    plant(tmp_path, {"holonomy/__init__.py": CLEAN, "planted.py": CLEAN.replace("2 * x", "2*x")})
    assert run(tmp_path, "ruff", "format", "--no-cache", "--check", "holonomy")[0] == 0
    status, output = run(tmp_path, "ruff", "format", "--no-cache", "--check", "planted.py")
    assert status == 1, output


OPERATORS, FORMS = ("linear_attention", "chromatic_attention", "performer"), ("__init__", "chunked")
WINGS = ("attention", "certificates", "expressivity", "graphs")
LIBRARY = {
    f"holonomy/{name}": DOC
    for name in (
        "__init__.py",
        "_autograd.py",
        "numerics.py",
        "checks.py",
        "optim/__init__.py",
        "manifolds/__init__.py",
        "manifolds/hyperboloid/__init__.py",
        "manifolds/lorentz.py",
        "structures.py",
        "layers/__init__.py",
        "ops/__init__.py",
        *(f"ops/{operator}/{name}.py" for operator in OPERATORS for name in FORMS),
        *(f"layers/{room}/__init__.py" for room in ("hyperbolic", "equivariant", "tokens", "chromatic", "simplicial")),
        "layers/encodings.py",
        "layers/substructures.py",
        "layers/graph.py",
        "models/__init__.py",
        "theory/__init__.py",
        *(f"theory/{wing}/__init__.py" for wing in WINGS),
        "theory/claims/__init__.py",
    )
} | {
    # What is allowed, all at once.
    "holonomy/manifolds/lorentz.py": "import geoopt\nfrom holonomy import _autograd, checks, numerics\n",
    "holonomy/layers/hyperbolic/__init__.py": "from holonomy import manifolds, ops\n",
    "holonomy/models/__init__.py": "from holonomy import layers, manifolds\n",
    "holonomy/optim/__init__.py": "from holonomy import manifolds\n",
    "holonomy/theory/__init__.py": "from holonomy import layers, models, optim\n",
}


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        (None, None),
        ("numerics.py", "holonomy.manifolds"),
        ("_autograd.py", "holonomy.numerics"),
        ("checks.py", "holonomy.structures"),
        ("manifolds/lorentz.py", "holonomy.layers"),
        ("manifolds/lorentz.py", "holonomy.optim"),
        ("manifolds/lorentz.py", "holonomy.structures"),
        ("manifolds/hyperboloid/__init__.py", "geoopt"),
        ("structures.py", "holonomy.layers"),
        ("layers/graph.py", "holonomy.models"),
        ("layers/graph.py", "holonomy.optim"),
        ("ops/__init__.py", "holonomy.layers"),
        ("layers/hyperbolic/__init__.py", "holonomy.ops.linear_attention.chunked"),
        ("layers/tokens/__init__.py", "holonomy.layers.simplicial"),
        ("theory/graphs/__init__.py", "holonomy.theory.claims"),
        ("layers/graph.py", "torch_geometric"),
        ("models/__init__.py", "holonomy.theory"),
        ("models/__init__.py", "holonomy.optim"),
        ("models/__init__.py", "examples"),
        ("models/__init__.py", "experiments"),
        ("optim/__init__.py", "holonomy.layers"),
        ("unlisted.py", "holonomy.layers"),
    ],
)
def test_import_contracts(tmp_path: Path, importer: str | None, imported: str | None) -> None:
    files = dict(LIBRARY)
    if importer is not None:
        files[f"holonomy/{importer}"] = f"{DOC}\nimport {imported}\n"
    plant(tmp_path, files)
    status, output = run(tmp_path, "importlinter", "--no-cache", "--no-logo")
    assert "Analyzed" in output, output
    assert status == (0 if importer is None else 1), output


def test_pyright_strict(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "holonomy/__init__.py": CLEAN,
            "holonomy/untyped.py": FUTURE + "def f(x):\n    return x\n",
            "holonomy/mistyped.py": FUTURE + "def g(x: int) -> str:\n    return x\n",
            "holonomy/private.py": FUTURE + "def h() -> None:\n    def unused() -> None: ...\n",
        },
    )
    python = ("--pythonpath", sys.executable)
    status, output = run(tmp_path, "pyright", *python, "holonomy/__init__.py")
    assert status == 0, output
    status, output = run(tmp_path, "pyright", *python, *map(str, tmp_path.glob("holonomy/[ump]*.py")))
    assert status == 1, output
    for rule in ("reportMissingParameterType", "reportReturnType", "reportUnusedFunction"):
        assert rule in output, output


def test_pydoclint(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "holonomy/__init__.py": CLEAN,
            "argument.py": CLEAN.replace("x: Any", "y: Any"),
            "returns.py": CLEAN.replace("    Returns:\n        2x.\n", ""),
        },
    )
    assert run(tmp_path, "pydoclint", "holonomy")[0] == 0
    for name, rule in (("argument.py", "DOC103"), ("returns.py", "DOC201")):
        status, output = run(tmp_path, "pydoclint", name)
        assert status == 1, output
        assert rule in output, output


SHAPES = '''
"""A library of two functions and a module.

>>> 1 + 1
2
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float


def add(x: Float[Tensor, "*batch dim"], y: Float[Tensor, " dim"]) -> Float[Tensor, "*batch dim"]:
    return x + y


def warn(*, aloud: bool) -> None:
    if aloud:
        warnings.warn("planted", UserWarning, stacklevel=1)


class Layer(nn.Module):
    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return x if x.ndim == 2 else x[..., :1]
'''

CALLS = """
from __future__ import annotations

import pytest
import torch

import holonomy

BAD = {bad}


def test_argument_shape():
    holonomy.add(torch.ones(2, 3), torch.ones(1 if BAD else 3))


def test_argument_dtype():
    holonomy.add(torch.ones(2, 3), torch.ones(3, dtype=torch.int64 if BAD else torch.float64))


def test_returned_shape():
    holonomy.Layer()(torch.ones(2, 2, 3) if BAD else torch.ones(2, 3))


def test_warning():
    holonomy.warn(aloud=BAD)


@pytest.mark.xfail
def test_expected_failure():
    assert BAD
"""


@pytest.mark.parametrize("bad", [False, True])
def test_pytest_executes_shapes_and_warnings(tmp_path: Path, bad: bool) -> None:
    library = SHAPES.replace("\n2\n", "\n3\n") if bad else SHAPES
    plant(
        tmp_path,
        {"holonomy/__init__.py": library, "tests/test_calls.py": CALLS.format(bad=bad)},
    )
    _, output = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "holonomy", "tests")
    outcome = "6 failed" if bad else "5 passed, 1 xfailed"
    assert re.search(rf"^{outcome} in ", output, flags=re.MULTILINE), output
