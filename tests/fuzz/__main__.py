"""Random calls of every public class and function, from a seed: ``python -m tests.fuzz [--calls N] [NAME ...]``.

Failures are shrunk and printed as scripts; the figures go to ``--out``. A name is that of a target or its beginning.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import geoopt
import torch

from tests.fuzz.run import GROUP, Report, run, shrunk, targets

_TASK = 20  # groups of calls that a process makes at a time


def main() -> int:
    """Run, print, and return whether there were failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random calls of every public name.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scripts", type=int, default=20, help="how many failures are shrunk and printed as scripts")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    names = tuple(name for name in targets() if name.startswith(tuple(options.names))) if options.names else None
    if names == ():
        parser.error(f"NAME must begin one of {', '.join(targets())}")
    start = time.monotonic()
    report = _run(options, names, start)
    seconds = time.monotonic() - start
    _show(report, options.scripts)
    if options.out:
        options.out.write_text(json.dumps(_figures(report, options, seconds), indent=1) + "\n", encoding="utf-8")
    return bool(report.failures)


def _run(options: argparse.Namespace, names: tuple[str, ...] | None, start: float) -> Report:
    groups = -(-options.calls // GROUP)
    tasks = [range(first, min(first + _TASK, groups)) for first in range(0, groups, _TASK)]
    total, shown = Report(), start
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for report in pool.imap_unordered(partial(run, seed=options.seed, names=names), tasks):
            total.add(report)
            now = time.monotonic()
            if now - shown > 10:
                made, shown = total.calls.total(), now
                print(f"{now - start:5.0f} s {made:9,} calls {total.failures.total():7,} failures", flush=True)
            if now - start > options.seconds:
                break
    return total


def _show(report: Report, scripts: int) -> None:
    print(f"\n{report.calls.total():,} calls of {len(report.calls)} names: ", end="")
    print(", ".join(f"{number:,} {fate}" for fate, number in sorted(report.fates.items())))
    print(f"{report.failures.total():,} failures of {len(report.failures)} kinds")
    for place, (key, number) in enumerate(report.failures.most_common()):
        detail = " ".join(report.first[key].failure.detail.split())
        print(f"{number:7,} {key} | {detail[:120]}")
        if place < scripts:
            print("\n    " + shrunk(report.first[key]).replace("\n", "\n    ") + "\n", flush=True)


def _figures(report: Report, options: argparse.Namespace, seconds: float) -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": " ".join(["python -m tests.fuzz", *sys.argv[1:]]),
        "commit": commit,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "geoopt": geoopt.__version__},
        "seconds": round(seconds, 1),
        "processes": options.processes,
        "calls": report.calls.total(),
        "arguments": dict(report.fates.most_common()),
        "failures": report.failures.total(),
        "kinds_of_failure": dict(report.failures.most_common()),
        "names": dict(sorted(report.calls.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
