"""What is built from the sources: a wheel whose types a checker knows, and a source archive whose tests can run."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path

import hatchling
import pytest
from packaging.requirements import Requirement

from hatch_build import description
from tests.house.test_documented import ROOMS as PLACES

ROOT = Path(__file__).parents[2]
TOOLS = str(Path(hatchling.__file__).parents[1])
ROOMS = {f"holonomy{room}": importlib.import_module(f"holonomy{room}") for room in PLACES}
# The call of a module is Any, as of every module of torch; its `forward` is not.
USER = """
import torch
from holonomy.layers import HTC
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer

manifold = Lorentz(-1.0)
x = manifold.lift(torch.randn(5, 3))
reveal_type(x)
reveal_type(HTC(3, 4, manifold).forward(x))
reveal_type(manifold.dist(x, x))
reveal_type(Hypformer(3, 8, 2).forward(x))
"""


def signatures() -> list[str]:
    """A line for the type of every public name, and of every public method that the library defines."""
    lines = [f"import {room}" for room in ROOMS]
    for room, module in ROOMS.items():
        for name in module.__all__:
            thing = getattr(module, name)
            lines.append(f"reveal_type({room}.{name})")
            for member, _ in inspect.getmembers(thing) if inspect.isclass(thing) else []:
                owner = next((base for base in thing.__mro__ if member in vars(base)), object)
                if owner.__module__.startswith("holonomy") and (member == "__init__" or not member.startswith("_")):
                    lines.append(f"reveal_type({room}.{name}.{member})")
    return lines


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both archives."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module", params=["*.whl", "*.tar.gz"])
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """An environment that had nothing in it, with one of the archives."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--quiet"]
    command += ["--no-deps", "--no-index", "--no-build-isolation", str(next(built.glob(request.param)))]
    # pip runs in that environment, where the tools of a build from sources are not.
    environment = os.environ | {"PYTHONPATH": TOOLS}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return home


ALONE = """
import importlib.metadata, os, sys
import torch, geoopt
before = {name.partition(".")[0] for name in sys.modules}
import holonomy
loaded = {name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
assert loaded <= {"holonomy", "scipy"}, loaded
assert holonomy.__file__.startswith(sys.prefix), holonomy.__file__
assert importlib.metadata.version("holonomy") == holonomy.__version__
assert os.path.exists(os.path.join(os.path.dirname(holonomy.__file__), "py.typed"))
manifold = holonomy.Lorentz(-1.0)
x = manifold.random(5, 4)
print(holonomy.Hypformer(5, 8, 3)(torch.randn(4, 5), torch.tensor([[0, 1], [1, 2]])).shape)
print(manifold.dist(x, x).max().item())
"""


def test_an_empty_environment_runs_what_was_installed(installed: Path, tmp_path: Path) -> None:
    """And the import brings in no package that torch and Geoopt have not, but SciPy."""
    command = [str(installed / "bin" / "python"), "-W", "ignore", "-c", ALONE]
    environment = os.environ | {"PYTHONPATH": TOOLS}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([4, 3])\n0.0\n"


def revealed(source: str, home: Path, folder: Path) -> dict[str, str]:
    """What pyright says of each line, with nothing in reach but an environment and the packages its wheel asks for."""
    (folder / "user.py").write_text(source, encoding="utf-8")
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "basic"}), encoding="utf-8")
    environment = os.environ | {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    pyright = Path(sys.executable).parent / "pyright"
    command = [str(pyright), "--outputjson", str(folder / "user.py")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, text=True)
    said = json.loads(done.stdout)
    assert said["summary"]["errorCount"] == 0, said
    lines = source.splitlines()
    return {lines[entry["range"]["start"]["line"]]: entry["message"] for entry in said["generalDiagnostics"]}


@pytest.fixture(scope="module")
def typed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and links to the packages that the wheel asks for."""
    home = tmp_path_factory.mktemp("typed")
    venv.create(home, with_pip=False)
    packages = home / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
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
    return home


def test_a_checker_knows_what_a_user_computes(typed: Path, tmp_path: Path) -> None:
    types = list(revealed(USER, typed, tmp_path).values())
    assert len(types) == 4
    assert {message.partition(" is ")[2] for message in types} == {'"Tensor"'}, types


def test_a_checker_knows_every_public_signature(typed: Path, tmp_path: Path) -> None:
    """Without the types of a package that the wheel forgot to ask for, this fails."""
    lines = signatures()
    types = revealed("\n".join(lines), typed, tmp_path)
    assert len(types) == len(lines) - len(ROOMS) > 400
    # An alias has the signature of the method that it overrides, and Geoopt has no types.
    manifolds = ("Lorentz", "manifolds.Lorentz", "manifolds.Product", "manifolds.Sphere")
    aliases = {f"reveal_type(holonomy.{manifold}.random)" for manifold in manifolds}
    assert {line for line, message in types.items() if "Unknown" in message} == aliases
    (typed / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "jaxtyping").unlink()
    assert not all('is "Tensor"' in message for message in revealed(USER, typed, tmp_path).values())


def test_the_description_has_no_link_that_leads_nowhere(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        text = wheel.read(name).decode()
    assert "](docs/" not in text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs/_static/" in readme
    released = description(readme, "https://host/who/what", "0123abc")
    assert "](https://host/who/what/raw/0123abc/docs/_static/demo.png)" in released
    assert "](https://host/who/what/blob/0123abc/docs/guide/own_graph.md)" in released
    assert "](docs/" not in released


def test_the_source_archive_has_all_that_its_tests_read(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = ["holonomy", "tests", "examples", "experiments", "benchmarks", "docs", ".ci"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [
        path for path in ROOT.iterdir() if path.is_file() and path.name not in {".git", ".gitattributes", ".gitignore"}
    ]
    made = {"__pycache__", "_build"}
    missing = [str(path.relative_to(ROOT)) for path in files if not made.intersection(path.parts)]
    assert not set(missing) - held


def test_tests_run_from_the_unpacked_source_archive(built: Path, tmp_path: Path) -> None:
    """Two files: one imports the library and the benchmarks, the other reads what lies beside them."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = next(tmp_path.iterdir())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/manifolds/test_charts.py"]
    # Without executing types, which would take longer to prepare than both files take.
    command += ["tests/benchmarks/test_results.py", "--hypothesis-profile=quick", "--jaxtyping-packages="]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    environment |= {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
