"""Contenders that take turns, so that whatever else the machine does meets all of them; ratios, never seconds."""

from __future__ import annotations

import json
import statistics
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
        file = Path(path)
        done = json.loads(file.read_text("utf-8")) if file.exists() else []
        done = [entry for entry in done if entry["setting"] != setting]
        module = sys.modules["__main__"].__spec__
        entry = {
            "setting": setting,
            "command": " ".join(["python -m", module.name if module else "", *sys.argv[1:]]),
            "torch": torch.__version__,
            "rounds": len(next(iter(taken.values()))),
            "ratios": rows,
        }
        file.write_text(json.dumps([*done, entry], indent=1) + "\n", "utf-8")
