"""Contenders that take turns, so that whatever else the machine does meets all of them; ratios, never seconds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

WARM_UP = 3


class Ratio(NamedTuple):
    above: str
    below: str
    target: str = ""


def interleaved(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """The thread's own seconds of each contender in each round."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + WARM_UP):
        for name, contender in contenders.items():
            start = time.thread_time()
            contender()
            if turn >= WARM_UP:
                taken[name].append(time.thread_time() - start)
    return taken


def report(
    setting: dict[str, Any], taken: dict[str, list[float]], ratios: Iterable[Ratio], path: str | None = None
) -> None:
    """Print quartiles of the ratios within a round; with a path, add them to the JSON list there."""
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    rows = []
    for above, below, target in ratios:
        within = [a / b for a, b in zip(taken[above], taken[below], strict=True)]
        low, middle, high = statistics.quantiles(within, n=4)
        print(f"  {above + ' / ' + below:44}  {middle:6.2f}  [{low:.2f}, {high:.2f}]  {target and 'target ' + target}")
        rows.append({"ratio": f"{above} / {below}", "median": middle, "quartiles": [low, high], "target": target})
    if path is not None:
        add(path, setting, {"rounds": len(next(iter(taken.values()))), "ratios": rows})


def add(path: str | None, setting: dict[str, Any], measured: dict[str, Any]) -> None:
    """Put an entry into the JSON list at a path, in the place of the one of its setting; without a path nothing."""
    if path is None:
        return
    file = Path(path)
    done = json.loads(file.read_text("utf-8")) if file.exists() else []
    done = [entry for entry in done if entry["setting"] != setting]
    module = sys.modules["__main__"].__spec__
    command = " ".join(["python -m", module.name if module else "", *sys.argv[1:]])
    entry = {"setting": setting, "command": command, "torch": torch.__version__} | measured
    file.write_text(json.dumps([*done, entry], indent=1) + "\n", "utf-8")


def peak_above(step: Callable[[], Any], kept: list[Any]) -> float:
    """MiB that this process holds at the highest during a step, above what it holds with ``kept``, which is emptied."""
    # The highest memory of the process, and a fresh start for it; a child inherits its parent's ru_maxrss.
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    before = _highest()
    kept.clear()
    step()
    return _highest() - before


def _highest() -> float:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def in_children(module: str, words: list[str], asked: list[list[str]]) -> dict[str, float]:
    """MiB that a benchmark prints for ``--peak NAME ...``, each in a process of its own, by the first of the words."""
    found: dict[str, float] = {}
    for names in asked:
        child = [sys.executable, "-m", module, *words, "--peak", *names]
        done = subprocess.run(child, capture_output=True, text=True, check=True)
        found[names[0]] = max(float(done.stdout), 0.0)
    return found
