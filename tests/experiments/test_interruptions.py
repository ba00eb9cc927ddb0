"""The runner of the interruptions, in a process of its own: it forks, which a process with threads must not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.__main__ import scripts
from tests.experiments.interruptions import COMMANDS, contents

ROOT = Path(__file__).parents[2]


def test_a_run_killed_at_random_moments_ends_in_the_same_bits(tmp_path: Path) -> None:
    result = tmp_path / "interruptions.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.experiments.interruptions", "--json", str(result)]
    command += ["--experiments", "triples", "--kills"]

    def run(kills: int) -> tuple[list[str], dict[str, Any]]:
        done = subprocess.run([*command, str(kills)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines(), json.loads(result.read_text())["experiments"]["triples"]

    told, row = run(1)
    # A line for each kill and for each run that was compared.
    assert len(told) == row["kills"] + row["runs"]
    assert (row["kills"], row["equal"], row["different"]) == (1, True, [])
    # Four runs of two seeds, their models, lists and results, two tables of the whole, and its list.
    assert row["files"] > 10
    # What was started after a kill, and stopped before its comparison, is not counted; the rest is not run again.
    content = json.loads(result.read_text())
    content["experiments"]["triples"]["pending"] = 1
    result.write_text(json.dumps(content))
    told, more = run(2)
    assert (more["kills"], more["pending"], len(told)) == (2, 0, 1 + more["runs"] - row["runs"])


def test_every_script_is_interrupted() -> None:
    # The other one is stopped and resumed by its own tests.
    found = {name.removeprefix("experiments.") for name in scripts(ROOT / "experiments")}
    assert COMMANDS.keys() == found - {"large_graph"}


def test_one_changed_bit_is_seen(tmp_path: Path) -> None:
    (tmp_path / "part.json").write_text('{"result": {"score": 0.5, "seconds": 1.5}, "sha256": "a"}')
    (tmp_path / "model.pt").write_bytes(b"weights")
    before = contents(tmp_path)
    (tmp_path / "part.json").write_text('{"result": {"score": 0.5, "seconds": 2.5}, "sha256": "b"}')
    assert contents(tmp_path) == before
    (tmp_path / "part.json").write_text('{"result": {"score": 0.5000000000000001, "seconds": 1.5}, "sha256": "a"}')
    assert contents(tmp_path) != before
