"""What is built from the sources: a wheel whose types a checker knows, and a source archive whose tests can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
USER = """
import torch
from holonomy.layers import HTC
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer

manifold = Lorentz(-1.0)
x = manifold.lift(torch.randn(5, 3))
reveal_type(x)
layer = HTC(3, 4, manifold)
reveal_type(layer(x))
reveal_type(layer.forward(x))
reveal_type(manifold.dist(x, x))
reveal_type(Hypformer(3, 8, 2, graph_encoder=None).forward)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both archives."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_a_checker_knows_the_types_of_the_installed_wheel(built: Path, tmp_path: Path) -> None:
    """With no package beside it but those that it asks for."""
    packages = tmp_path / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(packages)
        metadata = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        wanted = message_from_string(wheel.read(metadata).decode()).get_all("Requires-Dist", [])
    for requirement in map(Requirement, wanted):
        if requirement.marker is None:
            found = find_spec(requirement.name)
            assert found is not None
            assert found.origin is not None
            (packages / requirement.name).symlink_to(Path(found.origin).parent)
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    settings = {"venvPath": str(tmp_path), "venv": "venv", "include": ["user.py"], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [str(Path(sys.executable).parent / "pyright"), "--outputjson", "--project", str(tmp_path)]
    said = json.loads(subprocess.run(command, capture_output=True, check=False, text=True).stdout)
    messages = [entry["message"] for entry in said["generalDiagnostics"]]
    assert said["summary"]["errorCount"] == 0, messages
    types = [message for message in messages if message.startswith("Type of")]
    assert len(types) == 5
    assert not [message for message in types if "Unknown" in message]
    assert [message.endswith('is "Tensor"') for message in types] == [True, False, True, True, False], types


def test_the_source_archive_has_all_that_its_tests_read(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = ["holonomy", "tests", "examples", "benchmarks", "docs", ".ci"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [ROOT / name for name in ("conftest.py", "constraints.txt", "Makefile", "pyproject.toml", "README.md")]
    made = {"__pycache__", "_build"}
    missing = [str(path.relative_to(ROOT)) for path in files if not made.intersection(path.parts)]
    assert not set(missing) - held


def test_tests_run_from_the_unpacked_source_archive(built: Path, tmp_path: Path) -> None:
    """Two files: one imports the library and the benchmarks, the other reads what lies beside them."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = next(tmp_path.iterdir())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/manifolds/test_charts.py"]
    command += ["tests/benchmarks/test_results.py", "--hypothesis-profile=quick"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    environment |= {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
