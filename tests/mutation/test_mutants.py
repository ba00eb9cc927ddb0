"""The runner sees what is there to be seen: planted errors are killed, an unchanged function is not."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.mutation.__main__ import EQUIVALENT
from tests.mutation.mutants import ROOT, all_mutants, code_of, mutants_of, on_new_lines, sample

SOURCE = textwrap.dedent('''
    """A module."""

    from __future__ import annotations

    LIMIT = 3


    def small(x: float, *, by: float = 2.0) -> float:
        """Say nothing of 5."""
        if x < 0:
            raise ValueError(f"x must be at least {0}, got {x + 1}")
        return -x * by
''')


def test_only_what_a_function_does_is_changed() -> None:
    assert [(m.function, m.what) for m in mutants_of(SOURCE, "x.py")] == [
        ("small", "Lt -> LtE"),
        ("small", "0 -> 1"),
        ("small", "Mult -> Div"),
        ("small", "USub dropped"),
    ]


def test_every_mutant_of_a_file_differs_from_the_source() -> None:
    mutants = [m for m in all_mutants() if m.path == "holonomy/numerics.py"]
    assert len(mutants) > 100
    for mutant in mutants[::10]:
        assert code_of(mutant) != code_of(mutant, changed=False)


def test_names_are_unique_and_reasons_are_sentences() -> None:
    mutants = all_mutants()
    assert len({m.name for m in mutants}) == len(mutants)
    reasons = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    assert all(reason.endswith(".") for reason in reasons.values())
    assert set(reasons) <= {m.name for m in mutants}, "a line that a reason is given for has changed"


def test_a_sample_is_spread_evenly_and_repeats() -> None:
    mutants = all_mutants()
    chosen = sample(mutants, 100, seed=3)
    places = [mutants.index(m) for m in chosen]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert chosen == sample(mutants, 100, seed=3)
    assert max(gaps) - min(gaps) <= 1


def test_a_line_that_moved_is_not_new() -> None:
    mutants = mutants_of(SOURCE, "x.py")
    before = {line.strip() for line in SOURCE.replace("x * by", "x + by").splitlines()}
    assert {m.text for m in on_new_lines(mutants, before)} == {"return -x * by"}
    assert on_new_lines(mutants, {line.strip() for line in SOURCE.splitlines()}) == []


def test_planted_errors_are_killed_and_the_controls_pass(tmp_path: Path) -> None:
    """The whole way on one function: the map, the fork, the code put in, the verdict."""
    script = """
        import sys
        from tests.mutation.coverage_map import CoverageMap
        from tests.mutation.mutants import mutants_of, ROOT
        from tests.mutation.runner import MutationPlugin, try_mutants

        path = "holonomy/numerics.py"
        wanted = [m for m in mutants_of((ROOT / path).read_text(), path) if m.function == "widest_rapidity"]
        by_name = {f"tests/test_numerics.py::test_ends_of_the_range[{d}]": 0.1 for d in ("float32", "float64")}
        lines = {n: list(by_name) for m in wanted for n in range(m.lines[0], m.lines[1] + 1)}
        held = CoverageMap(by_name, {path: lines})
        found = []
        plugin = MutationPlugin(held, wanted, controls=wanted[:1], seconds=60, processes=2, done=found.append)
        try_mutants(plugin, ["tests/test_numerics.py"])
        print("RESULTS", [o.result for o in found])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "1 of 1 controls pass" in done.stdout
    results = ast.literal_eval(done.stdout.split("RESULTS", 1)[1].strip())
    assert "killed" in results
