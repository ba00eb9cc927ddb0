"""``python -m tests.mutation map`` and ``run`` are ``make mutation``; ``try NAME`` looks at single mutants."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

from tests.mutation.coverage_map import TESTS, CoverageMap
from tests.mutation.mutants import ROOT, all_mutants, lines_at, on_new_lines, sample
from tests.mutation.runner import MutationPlugin, Outcome, try_mutants

MAP = ROOT / "runs" / "mutation" / "map.json"
OUTCOMES = ROOT / "runs" / "mutation" / "outcomes.jsonl"
EQUIVALENT = ROOT / "tests" / "mutation" / "equivalent.json"
RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"


def main(arguments: list[str]) -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("map", help="run the suite once and note which test runs which line")
    drawing.add_argument("--processes", type=int, default=2)
    running = commands.add_parser("run", help="try a sample of all mutants, or go on with one")
    running.add_argument("--mutants", type=int, default=1000)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--seconds", type=float, default=120.0, help="CPU time that the tests of one mutant have")
    running.add_argument("--processes", type=int, default=2)
    running.add_argument("--controls", type=int, default=20, help="how many unchanged functions are put in first")
    running.add_argument("--again", action="store_true", help="try those that survived once more")
    running.add_argument("--since", metavar="COMMIT", help="only on lines that stood nowhere in the library at COMMIT")
    running.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    trying = commands.add_parser("try", help="try the mutants whose name contains a text")
    trying.add_argument("name")
    trying.add_argument("tests", nargs="*", help="what to run (default: the tests that the map names)")
    options = parser.parse_args(arguments)
    MAP.parent.mkdir(parents=True, exist_ok=True)
    if options.command == "map":
        return _map(options.processes)
    return _run(options) if options.command == "run" else _try(options.name, options.tests)


def _try(name: str, tests: list[str]) -> int:
    """Try the mutants whose name contains a text and say what came of each."""
    wanted = [m for m in all_mutants() if name in m.name]

    def say(outcome: Outcome) -> None:
        print(f"{outcome.result:11s} {outcome.mutant.name} {outcome.by}", flush=True)

    coverage_map = None if tests else CoverageMap.load(MAP)
    plugin = MutationPlugin(coverage_map, wanted, controls=wanted[:1], seconds=120.0, processes=1, done=say)
    try_mutants(plugin, tests or TESTS)
    return 0


def _map(processes: int) -> int:
    """Draw the shares of the map side by side and put them together."""
    shares = [MAP.with_suffix(f".{i}") for i in range(processes)]
    command = "import sys; from pathlib import Path; from tests.mutation.coverage_map import draw_map; "
    command += "draw_map((int(sys.argv[1]), int(sys.argv[2]))).save(Path(sys.argv[3]))"
    arguments = [[sys.executable, "-c", command, str(i), str(processes), str(s)] for i, s in enumerate(shares)]
    running = [subprocess.Popen(a, cwd=ROOT) for a in arguments]
    if sum(p.wait() for p in running):
        return 1
    whole = CoverageMap()
    for share in shares:
        whole.merge(CoverageMap.load(share))
        share.unlink()
    whole.save(MAP)
    print(f"{len(whole.seconds)} tests, {sum(map(len, whole.lines.values()))} lines: {MAP.relative_to(ROOT)}")
    return 0


def _run(options: argparse.Namespace) -> int:
    """Try the controls, then the mutants that have no outcome yet; say what survived."""
    coverage_map, mutants = CoverageMap.load(MAP), all_mutants()
    offered = mutants if options.since is None else on_new_lines(mutants, lines_at(options.since))
    chosen = sample(offered, options.mutants, options.seed)
    outcomes = _outcomes()
    done = {n for n, o in outcomes.items() if o["result"] == "killed" or not options.again}
    left = [m for m in chosen if m.name not in done]

    def note(outcome: Outcome) -> None:
        held = {**asdict(outcome), "name": outcome.mutant.name}
        outcomes[outcome.mutant.name] = held
        with OUTCOMES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(held) + "\n")
        killed = sum(o["result"] == "killed" for o in outcomes.values())
        print(
            f"{len(outcomes):5d} {killed / len(outcomes):6.1%} {outcome.result:11s} {outcome.mutant.name}", flush=True
        )

    limits = {"seconds": options.seconds, "processes": options.processes}
    controls = sample(chosen, options.controls, 1)
    try_mutants(MutationPlugin(coverage_map, left, controls=controls, done=note, **limits))
    chosen_outcomes = [outcomes[m.name] for m in chosen if m.name in outcomes]
    counts = Counter(o["result"] for o in chosen_outcomes)
    print(dict(counts))
    for name in _reasons().keys() - {m.name for m in mutants}:
        print(f"{EQUIVALENT.name} names a line that is no more: {name}")
    if options.write:
        _write(options, chosen_outcomes)
    return 0


def _reasons() -> dict[str, str]:
    """Return why a mutant changes nothing that a user sees, by its name."""
    return json.loads(EQUIVALENT.read_text(encoding="utf-8"))


def _outcomes() -> dict[str, dict[str, Any]]:
    """Return the last outcome of every mutant that was tried."""
    if not OUTCOMES.exists():
        return {}
    held = map(json.loads, OUTCOMES.read_text(encoding="utf-8").splitlines())
    return {h["name"]: h for h in held}


def _write(options: argparse.Namespace, outcomes: list[dict[str, Any]]) -> None:
    """Write the figures and what survived; a survivor that changes nothing that a user sees stands with its reason."""
    killed = [o for o in outcomes if o["result"] == "killed"]
    survived, reasons = [o for o in outcomes if o["result"] != "killed"], _reasons()
    equivalent = {o["name"]: reasons[o["name"]] for o in survived if o["name"] in reasons}
    rooms = Counter((o["mutant"]["path"].split("/")[1], o["result"] == "killed") for o in outcomes)
    table = {
        room: {"mutants": rooms[room, True] + rooms[room, False], "killed": rooms[room, True]}
        for room in sorted({r for r, _ in rooms})
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    since = f" --since {options.since}" if options.since else ""
    held = {
        "command": f"python -m tests.mutation run --mutants {options.mutants} --seed {options.seed}{since} --write",
        "commit": commit.stdout.strip(),
        "mutants": len(outcomes),
        "killed": len(killed),
        "share": round(len(killed) / len(outcomes), 4),
        "share_without_equivalent": round(len(killed) / (len(outcomes) - len(equivalent)), 4),
        "rooms": table,
        "survived": [
            {"name": o["name"], "result": o["result"], "tests": o["tests"]}
            for o in survived
            if o["name"] not in equivalent
        ],
        "equivalent": equivalent,
    }
    RESULTS.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
