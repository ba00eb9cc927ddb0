"""Kill every experiment at random moments, resume it, and compare what it leaves with an uninterrupted run, bit by bit.

    python -m tests.experiments.interruptions [--kills 24] [--seed 0] [--experiments NAME ...] [--json FILE] [--fresh]

Each runs at toy size, in a process forked from this one, and gets ``kill -9`` at a moment drawn from the time that the
uninterrupted run takes; then the same command goes on with ``--resume``, and is killed again, up to three
times. What must agree is every file in the folder, the result that ``--json`` writes, and that nothing else is left:
numbers to the last bit, without the seconds that were measured.

The file of ``--json`` is written after every kill and every comparison. The same command counts on from it, and runs
only what is missing; kills of a run that was not compared, and rows of another commit, are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.engine import runs

USUAL = "--seeds 2 --checkpoint-every 1 --no-pictures --quiet --threads 1"
SMALL = "--hidden 8 --heads 2 --epochs 3"
MOLECULES = "--train 12 --tests 6 --budget 0 --layers 1 --steps 4 --walk-features 4"
NODES = "--hidden 8 --feedforward 8 --graph-hidden 8 --graph-layers 2 --quiet --threads 1"
COMMANDS = {
    "attention_in_colors": f"{SMALL} {MOLECULES} --molecules 4 --channels 2 --checkpoint-every 1 --quiet --threads 1",
    "acquired_traits": "--seeds 1 --steps 3 --no-pictures --quiet --threads 1",
    "certified_training": "--seeds 1 --epochs 3 --measured 2 --draws 4 --quiet --threads 1",
    "characters": f"{USUAL} {SMALL} --texts 40 --tests 10 --length 8 --models hyperbolic flat-bfloat16",
    "digits": f"{USUAL} --hidden 4 --heads 1 --layers 1 --batch 100 --epochs 2 --lr 0.003 0.01",
    "equivariant_basis": f"{USUAL} --hidden 16 --head-features 4 --epochs 3 --graphs 8 --tests 4 --least 4 --most 5 "
    "--models lap-types random-first",
    "graph_regression": f"{USUAL} {SMALL} --train 12 --tests 6 --models hot tokengt gin",
    "hierarchy": f"{USUAL} --nodes 30 --epochs 6 --evaluate-every 3 --dims 2 --models learned euclidean --lrs 0.1 0.3",
    "hyperedge_prediction": f"{USUAL} {SMALL} --models hot mlp",
    "hypernymy": "--nodes 60 --dims 2 --shares 0.5 --seeds 2 --steps 5 --models fixed cones dot --quiet --threads 1",
    "label_trees": "--nodes 10 --dims 2 --seeds 2 --steps 4 --quiet --threads 1",
    "linear_maps": "--problems 2 --rapidities 1 2 --most 5 --quiet --threads 1",
    "link_prediction": "--seeds 2 --epochs 4 --models lgcn gcn-bias common --quiet --threads 1",
    "long_range_chains": f"{USUAL} {SMALL} --chains 6 --length 6 --test-length 9 --models hot gat --lr 0.001 0.003",
    "mixed_curvature": "--sets 2 --points 12 --noises 0.05 --seeds 1 --steps 3 --quiet --threads 1",
    "molecules": f"{USUAL} {SMALL} {MOLECULES} --models csa-rings gin",
    "node_classification": f"{NODES} --seeds 1 --epochs 20 --patience 20 --checkpoint-every 2 --no-pictures "
    "--baseline all",
    "node_tokens": f"{USUAL} {SMALL} --identifier 8 --models tokengt-seb gcn",
    "set_to_graph": f"{USUAL} {SMALL} --dataset delaunay-30 --train 6 --tests 4 --models hot-performer gnn5",
    "stochastic_blocks": f"{USUAL} {SMALL} --train 4 --tests 2 --patterns 2 --budget 0 --layers 1 --steps 4 "
    "--walk-features 4 --models csa gcn",
    "table": f"{NODES} --seeds 2 --epochs 12 --patience 12 --grid lr=0.003,0.01 --models hypformer gcn",
    "phylogeny": "--trees 2 --species 12 --sites 20 --dims 2 3 --hypformer-dims 2 --steps 5 --quiet --threads 1",
    "tree_maps": "--nodes 12 --dims 2 3 --seeds 2 --steps 20 --quiet --threads 1",
    "triples": f"{USUAL} {SMALL} --sequences 64 --tests 16 --tokens 6 --models pairwise distinct",
}
MOST_KILLS_OF_A_RUN = 3
# What says how long a run took and what was typed, not what came of it; a checksum is one of those, too.
MEASURED = {"seconds", "processor_seconds", "sha256", "command", "date", "commit"}


def words_of(name: str, folder: Path) -> list[str]:
    """The command line of an experiment that leaves everything in a folder."""
    if name == "table":
        return [*COMMANDS[name].split(), "--work", str(folder / "work"), "--out", str(folder)]
    result = [] if name in {"attention_in_colors", "node_classification"} else ["--json", str(folder / "result.json")]
    return [*COMMANDS[name].split(), "--out", str(folder / "run"), *result]


def started(name: str, words: Sequence[str], log: Path) -> int:
    """Fork a process that runs an experiment; return its number. Nothing computed before could break a fork."""
    main = importlib.import_module(f"experiments.{name}").main
    process = os.fork()
    if process == 0:
        # Whatever happens, this process must not go on with what its parent does.
        code = 1
        try:
            with log.open("w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                code = main(words)
        finally:
            os._exit(code)
    return process


def killed(name: str, words: Sequence[str], log: Path, after: float = math.inf) -> bool:
    """Run an experiment and kill it after so many seconds; False if it came to its end before."""
    process, start, status = started(name, words, log), time.monotonic(), None
    while status is None:
        ended, raw = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(raw)
        elif time.monotonic() - start > after:
            os.kill(process, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        else:
            time.sleep(0.001)
    if status not in {0, -signal.SIGKILL}:
        raise RuntimeError(f"{name} ended with {status}: {log.read_text('utf-8')[-1000:]}")
    return status != 0


def unmeasured(content: Any) -> Any:
    """JSON content without what a clock measured, and without what names it."""
    if isinstance(content, dict):
        return {key: unmeasured(value) for key, value in content.items() if key not in MEASURED}
    return [unmeasured(value) for value in content] if isinstance(content, list) else content


def contents(folder: Path) -> dict[str, object]:
    """Every file below a folder: JSON without what was measured, all else as it is."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: unmeasured(json.loads(path.read_text("utf-8"))) if path.suffix == ".json" else path.read_bytes()
        for name, path in files.items()
    }


def interrupted(
    name: str, kills: int, seed: int, row: dict[str, Any], folder: Path, say: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Kill an experiment until so many kills are counted, from those of a row on; tell the row after every kill."""
    log, whole, part = folder / "log.txt", folder / "whole", folder / "part"
    folder.mkdir()
    start = time.monotonic()
    killed(name, words_of(name, whole), log)
    span, wanted = time.monotonic() - start, contents(whole)
    # The same command goes on with a table.
    resume = [] if name == "table" else ["--resume"]
    row = {"command": f"python -m experiments.{name} {COMMANDS[name]}", "kills": 0, "runs": 0, "different": []} | row
    row |= {"pending": 0, "files": len(wanted), "equal": not row["different"], "seconds_uninterrupted": round(span, 2)}
    while row["kills"] < kills:
        # Each run has its own random numbers, so that a later start draws other moments than the runs before it.
        rng = random.Random(f"{seed} {name} {row['runs']}")
        words, most = words_of(name, part), min(rng.randint(1, MOST_KILLS_OF_A_RUN), kills - row["kills"])
        # The result is written last: where it is, the run came to its end, whether it was killed then or not.
        while not any((part / result).exists() for result in ("result.json", "tree.json")):
            after, start = rng.uniform(0, span) if row["pending"] < most else math.inf, time.monotonic()
            if not killed(name, words, log, after):
                # On a busy machine one run takes longer than another: kills stay within what the last whole one took.
                span = span if "--resume" in words else time.monotonic() - start
                break
            row, words = row | {"pending": row["pending"] + 1}, words_of(name, part) + resume
            say(row)
        found = contents(part)
        different = {*row["different"], *(file for file in {*wanted, *found} if found.get(file) != wanted.get(file))}
        row |= {"kills": row["kills"] + row["pending"], "pending": 0, "runs": row["runs"] + 1}
        row |= {"different": sorted(different), "equal": not different}
        say(row)
        shutil.rmtree(part)
    return row


def interruptions(
    kills: int,
    seed: int,
    names: Sequence[str],
    rows: Mapping[str, dict[str, Any]],
    say: Callable[[str, dict[str, Any]], object],
) -> None:
    """Kill each experiment so many times, less those of its row; tell its name and row after every kill."""
    with tempfile.TemporaryDirectory() as folder:
        # Torch imports it with the first optimizer: here once, and not again in every process that is forked.
        importlib.import_module("torch._dynamo")
        for name in names:
            row = rows.get(name, {})
            if row.get("kills", 0) < kills:
                interrupted(name, kills, seed, row, Path(folder) / name, lambda found, name=name: say(name, found))


def line(name: str, row: Mapping[str, Any], kills: int) -> str:
    """What a row says, on one line."""
    verdict = "equal" if row["equal"] else f"DIFFERENT in {', '.join(row['different'])}"
    return f"{name:22s} {row['kills']} + {row['pending']} of {kills} kills, {row['runs']} runs compared: {verdict}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if every run ended as an uninterrupted one."""
    words = list(sys.argv[1:] if argv is None else argv)
    described = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.experiments.interruptions", description=described)
    parser.add_argument("--kills", type=int, default=24, metavar="N", help="of each experiment (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--experiments", nargs="+", choices=list(COMMANDS), default=list(COMMANDS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of it there, and count on from it")
    parser.add_argument("--fresh", action="store_true", help="begin anew instead")
    arguments = parser.parse_args(words)
    versions, rows = runs.versions(), dict[str, dict[str, Any]]()
    if arguments.json and arguments.json.exists() and not arguments.fresh:
        before = json.loads(arguments.json.read_text("utf-8")).get("experiments", {})
        rows = {name: row for name, row in before.items() if row.get("commit") == versions["commit"]}

    def say(name: str, row: dict[str, Any]) -> None:
        rows[name] = row | {"commit": versions["commit"]}
        sys.stdout.write(line(name, row, arguments.kills) + "\n")
        sys.stdout.flush()
        if arguments.json:
            content = {
                "command": runs.command_line("tests.experiments.interruptions", words),
                "versions": versions,
                "kills": sum(row["kills"] for row in rows.values()),
                "equal": all(row["equal"] for row in rows.values()),
                "experiments": dict(sorted(rows.items())),
            }
            runs.write_json(arguments.json, content)

    interruptions(arguments.kills, arguments.seed, arguments.experiments, rows, say)
    return 0 if all(rows[name]["equal"] for name in arguments.experiments) else 1


if __name__ == "__main__":
    sys.exit(main())
