"""Which test runs which line of the library: the suite runs once, and coverage.py notes the lines test by test."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import pytest

from tests.mutation.mutants import ROOT

# What the suite runs for the map, and for every mutant. Not the experiments (they train for seconds in a process of
# their own), not what reads sources, not what compiles: a mutant that only these would notice counts as a survivor.
TESTS = (
    "holonomy",
    "tests/test_numerics.py",
    "tests/house/test_wrong_calls.py",
    "tests/fuzz/test_fuzz.py",
    "tests/distributed/test_streams.py",
    *(f"tests/{room}" for room in ("laws", "layers", "manifolds", "models", "optim", "structures", "theory")),
)
OPTIONS = ("-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist")


def suite_arguments(tests: Iterable[str] = TESTS) -> list[str]:
    """Return pytest's arguments for the tests that look for mutants."""
    return [*OPTIONS, *tests]


@dataclass
class CoverageMap:
    """The tests that passed, with their seconds, and for each line of a file the tests that ran it."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def tests_of(self, path: str, lines: tuple[int, int]) -> list[str]:
        """Return the tests that run any of the lines, the one with the most to say for its time first."""
        of_file = self.lines.get(path, {})
        found = {t for line in range(lines[0], lines[1] + 1) for t in of_file.get(line, ())}
        return self._one_of_each_first(sorted(found, key=lambda t: (self.seconds[t], t)))

    @staticmethod
    def _one_of_each_first(tests: list[str]) -> list[str]:
        """Order tests so that each test function comes once before any comes again with other parameters."""
        seen = defaultdict(int)
        rounds = []
        for at, test in enumerate(tests):
            function = test.partition("[")[0]
            rounds.append((seen[function], at, test))
            seen[function] += 1
        return [test for _, _, test in sorted(rounds)]

    def save(self, path: Path) -> None:
        """Write the map, the names of the tests once."""
        names = sorted(self.seconds)
        number = {name: i for i, name in enumerate(names)}
        lines = {p: {str(n): [number[t] for t in ts] for n, ts in of.items()} for p, of in self.lines.items()}
        text = json.dumps({"tests": names, "seconds": [round(self.seconds[n], 4) for n in names], "lines": lines})
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> CoverageMap:
        """Read a map that ``save`` wrote."""
        held = json.loads(path.read_text(encoding="utf-8"))
        names = held["tests"]
        lines = {p: {int(n): [names[t] for t in ts] for n, ts in of.items()} for p, of in held["lines"].items()}
        return cls(dict(zip(names, held["seconds"], strict=True)), lines)

    def merge(self, other: CoverageMap) -> None:
        """Add the tests of another map, of other tests."""
        self.seconds.update(other.seconds)
        for path, of in other.lines.items():
            mine = self.lines.setdefault(path, {})
            for line, tests in of.items():
                mine.setdefault(line, []).extend(tests)


class MapPlugin:
    """A pytest plugin that fills a map with the tests of one share of the suite."""

    def __init__(self, share: tuple[int, int]) -> None:
        self.map, self._share = CoverageMap(), share
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=[str(ROOT / "holonomy" / "*")])
        self._failed = set[str]()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep one share of the tests."""
        at, of = self._share
        items[:] = items[at::of]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note the lines and the seconds of one test."""
        self._coverage.start()
        self._coverage.switch_context(item.nodeid)
        start = time.process_time()
        try:
            return (yield)
        finally:
            self.map.seconds[item.nodeid] = time.process_time() - start
            self._coverage.stop()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which tests do not pass."""
        if report.outcome != "passed":
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Gather the lines of the tests that passed."""
        for name in self._failed:
            self.map.seconds.pop(name, None)
        data = self._coverage.get_data()
        for file in data.measured_files():
            of = {n: [t for t in ts if t in self.map.seconds] for n, ts in data.contexts_by_lineno(file).items()}
            self.map.lines[str(Path(file).relative_to(ROOT))] = {n: ts for n, ts in of.items() if ts}


def draw_map(share: tuple[int, int]) -> CoverageMap:
    """Run one share of the tests and return what they ran."""
    plugin = MapPlugin(share)
    pytest.main([*suite_arguments(), "--hypothesis-profile=quick", "--quiet"], plugins=[plugin])
    return plugin.map
