"""Options and fixtures of the whole suite: where it runs, in which dtype, from which seed.

``pytest --device cuda --dtype float32`` runs the same laws elsewhere. Tests that need CUDA are
marked ``cuda``; where there is none, they and everything under ``--device cuda`` skip themselves.
``--hypothesis-profile=explore`` draws new and more examples; the default draws the same ones every time, so
that a red suite is red for everybody; ``quick`` draws one. ``--one-case`` runs each law on one case of each class.
The summary says on how many cases each law ran.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DTYPES = {"float32": torch.float32, "float64": torch.float64}

settings.register_profile(
    "suite",
    max_examples=40,
    deadline=None,
    derandomize=True,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("suite"), derandomize=False, max_examples=100)
settings.register_profile("quick", settings.get_profile("suite"), max_examples=1)
# An example that fails is not made smaller: what a mutant breaks nobody reads.
settings.register_profile("mutation", settings.get_profile("suite"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``, ``--dtype`` and ``--one-case``."""
    parser.addoption("--device", default="cpu", help="where the laws run: cpu, cuda, cuda:1, ...")
    parser.addoption("--dtype", choices=sorted(DTYPES), default=None, help="the laws' only dtype (default: both)")
    parser.addoption("--one-case", action="store_true", help="each law on the first case of each class")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--one-case`` keep, of each law, the first case of each class at each value of its other parameters."""
    if not config.getoption("--one-case"):
        return
    seen: set[tuple[object, ...]] = set()
    left_out = []
    for item in list(items):
        params = dict(getattr(getattr(item, "callspec", None), "params", {}))
        kind = getattr(params.pop("case", None), "kind", None)
        if kind is None:
            continue
        place = (item.path, item.originalname, kind, str(sorted(params.items(), key=str)))
        if place in seen:
            items.remove(item)
            left_out.append(item)
        seen.add(place)
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look at what was collected for no garbage again: it is most of what there is, and none of it."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line("markers", "slow: left out by make quick")
    config.addinivalue_line("markers", "cuda: needs a CUDA device, skips itself without one")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs CUDA where there is none; write down the case of a law for the summary."""
    if "case" in getattr(getattr(item, "callspec", None), "params", {}):
        item.user_properties.append(("law", (item.originalname, str(item.callspec.params["case"]))))
    wants = item.get_closest_marker("cuda") is not None
    wants = wants or item.config.getoption("--device").startswith("cuda")
    if wants and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say on how many cases each law ran."""
    ran = defaultdict(set)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", []):
                if name == "law":
                    ran[value[0]].add(value[1])
    if ran:
        terminalreporter.section("cases of each law")
    for law, cases in sorted(ran.items(), key=lambda item: len(item[1])):
        terminalreporter.line(f"{len(cases):4d} {law.removeprefix('test_').replace('_', ' ')}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that asks for ``dtype`` in each dtype asked for on the command line."""
    if "dtype" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--dtype")
        names = [chosen] if chosen else list(DTYPES)
        metafunc.parametrize("dtype", [DTYPES[name] for name in names], ids=names)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device given by ``--device``."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """Return a seeded generator on the device."""
    return torch.Generator(device).manual_seed(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same seed, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this one process, on which parameters can be sharded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
