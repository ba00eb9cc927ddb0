"""The runner of the interruptions, in a process of its own: it forks, which a process with threads must not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.examples.interruptions import COMMANDS, contents
from tests.examples.test_help import SCRIPTS

ROOT = Path(__file__).parents[2]


def test_a_run_killed_at_random_moments_ends_in_the_same_bits(tmp_path: Path) -> None:
    result = tmp_path / "interruptions.json"
    words = ["--kills", "2", "--examples", "hierarchy", "--json", str(result)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.examples.interruptions", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(result.read_text())["examples"]["hierarchy"]
    assert (row["kills"], row["equal"], row["different"]) == (2, True, [])
    # Six runs of two seeds, their models, lists and results, two tables of the whole, and its list.
    assert row["files"] > 20


def test_every_script_is_interrupted() -> None:
    assert COMMANDS.keys() == set(SCRIPTS)


def test_one_changed_bit_is_seen(tmp_path: Path) -> None:
    (tmp_path / "part.json").write_text('{"result": {"score": 0.5, "seconds": 1.5}, "sha256": "a"}')
    (tmp_path / "model.pt").write_bytes(b"weights")
    before = contents(tmp_path)
    (tmp_path / "part.json").write_text('{"result": {"score": 0.5, "seconds": 2.5}, "sha256": "b"}')
    assert contents(tmp_path) == before
    (tmp_path / "part.json").write_text('{"result": {"score": 0.5000000000000001, "seconds": 1.5}, "sha256": "a"}')
    assert contents(tmp_path) != before
