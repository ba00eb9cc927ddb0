"""Puts a mutant into a running process and runs the tests that its line is covered by.

The suite is collected once. For every mutant the process forks: the child replaces the code of the function, wherever
the interpreter holds it, runs the tests until one fails and says by its exit status what came of it. A test that runs
out of its time kills nothing.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType

import pytest

from tests.mutation.coverage_map import TESTS, CoverageMap, suite_arguments
from tests.mutation.mutants import ROOT, Mutant, code_of

_SURVIVED, _KILLED, _NOT_PUT_IN, _BROKEN = range(4)
_MEMORY = 12 << 30


@dataclass(frozen=True)
class Outcome:
    """What came of one mutant.

    Attributes:
        mutant: the mutant.
        result: ``killed``, ``survived``, ``no test`` (no test runs the line), ``out of time`` or
            ``broken`` (it could not be put in).
        tests: how many tests run the line.
        by: the test that failed, or why the mutant could not be tried.
    """

    mutant: Mutant
    result: str
    tests: int
    by: str = ""


def put_in(path: str, code: CodeType) -> int:
    """Replace the code of every function object that was made from this place of this file; return how many."""
    file, changed = str(ROOT / path), 0
    for function in gc.get_objects():
        # Not isinstance: it asks objects for their class, and some warn when they are asked.
        if type(function) is FunctionType and function.__code__.co_filename == file:
            old = function.__code__
            if (old.co_qualname, old.co_firstlineno) == (code.co_qualname, code.co_firstlineno):
                function.__code__ = code
                changed += 1
    return changed


class MutationPlugin:
    """A pytest plugin that tries mutants in place of running the suite.

    Args:
        coverage_map: which tests run which line; ``None`` runs all tests on every mutant.
        mutants: what to try.
        seconds: how long the tests of one mutant may compute.
        processes: how many children run at once.
        done: called with each outcome, in the order they come.
        controls: places where the unchanged code is put in first; unless all of their tests pass, no mutant is tried.
    """

    def __init__(
        self,
        coverage_map: CoverageMap | None,
        mutants: Iterable[Mutant],
        *,
        seconds: float,
        processes: int,
        done: Callable[[Outcome], None],
        controls: Iterable[Mutant] = (),
    ) -> None:
        self._map, self._mutants, self._controls = coverage_map, list(mutants), list(controls)
        self._seconds, self._processes, self._done = seconds, processes, done
        self._failed = ""
        self._children = dict[int, tuple[Mutant, list[str], int]]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Fork once for each mutant."""
        if session.testsfailed:
            raise session.Failed(f"{session.testsfailed} files of tests could not be collected")
        self._items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()
        failed = list[Outcome]()
        self._try_all(self._controls, failed.append, changed=False)
        failed = [o for o in failed if o.result in ("killed", "broken")]
        for outcome in failed:
            print(f"control {outcome.result}: {outcome.mutant.name} {outcome.by}", flush=True)
        print(f"{len(self._controls) - len(failed)} of {len(self._controls)} controls pass", flush=True)
        if not failed:
            self._try_all(self._mutants, self._done, changed=True)
        return True

    def _try_all(self, mutants: list[Mutant], done: Callable[[Outcome], None], *, changed: bool) -> None:
        for mutant in mutants:
            covering = self._map.tests_of(mutant.path, mutant.lines) if self._map else self._items
            tests = [t for t in covering if t in self._items]
            if not tests:
                done(Outcome(mutant, "no test", 0))
                continue
            while len(self._children) >= self._processes:
                done(self._wait())
            self._fork(mutant, tests, changed=changed)
        while self._children:
            done(self._wait())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note, in a child, that a test failed."""
        if report.failed:
            self._failed = report.nodeid

    def _fork(self, mutant: Mutant, tests: list[str], *, changed: bool) -> None:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status, said = _BROKEN, ""
            try:
                status = self._try(mutant, tests, changed=changed)
                said = self._failed
            except BaseException:
                said = traceback.format_exc()
                raise
            finally:
                os.write(writing, said[-4000:].encode())
                os._exit(status)
        os.close(writing)
        self._children[child] = (mutant, tests, reading)

    def _try(self, mutant: Mutant, tests: list[str], *, changed: bool) -> int:
        """Run the tests on the mutant; in a child only."""
        resource.setrlimit(resource.RLIMIT_CPU, (int(self._seconds), int(self._seconds) + 5))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.dup2(nothing, sys.stderr.fileno())
        gc.unfreeze()
        if not put_in(mutant.path, code_of(mutant, changed=changed)):
            return _NOT_PUT_IN
        for name in tests:
            item = self._items[name]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self._failed:
                return _KILLED
        return _SURVIVED

    def _wait(self) -> Outcome:
        child, status = os.wait()
        mutant, tests, reading = self._children.pop(child)
        with os.fdopen(reading, "rb") as pipe:
            by = pipe.read().decode()
        if os.WIFSIGNALED(status):
            slow = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
            result, by = ("out of time", "") if slow else ("killed", f"signal {os.WTERMSIG(status)}")
        else:
            names = {_SURVIVED: "survived", _KILLED: "killed", _NOT_PUT_IN: "broken", _BROKEN: "broken"}
            result = names[os.WEXITSTATUS(status)]
        return Outcome(mutant, result, len(tests), by)


def try_mutants(plugin: MutationPlugin, tests: Iterable[str] = TESTS) -> None:
    """Collect the suite and try the plugin's mutants."""
    arguments = [*suite_arguments(tests), "--hypothesis-profile=mutation", "--capture=no", "-p", "no:terminal"]
    pytest.main(arguments, plugins=[plugin])
