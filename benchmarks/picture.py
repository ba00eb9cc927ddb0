"""Time and memory of a case's contenders against the size, both axes logarithmic, with the fitted exponents."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib as mpl

from benchmarks.case import Case
from benchmarks.measure import Measured, exponent
from experiments.engine import plots

__all__ = ["draw"]


def draw(case: Case, found: dict[int, Measured], path: Path) -> None:
    """One panel for time and one for memory."""
    names = list(dict.fromkeys(name for at in found.values() for name in at.seconds))
    with mpl.rc_context(plots.STYLE | {"svg.hashsalt": case.name, "svg.fonttype": "none"}):
        figure, (time, memory) = plots.figure_of(13, 5, 2)
        for place, name in enumerate(names):
            at = {size: measured for size, measured in found.items() if name in measured.seconds}
            seconds = {size: statistics.median(measured.seconds[name]) for size, measured in at.items()}
            peaks = {size: measured.memory[name].peak / 2**20 for size, measured in at.items() if measured.memory}
            for axes, values in ((time, seconds), (memory, peaks)):
                kept = {size: value for size, value in values.items() if value > 0}
                if kept:
                    fitted = f" (exponent {exponent(list(kept), list(kept.values())):.2f})" if len(kept) > 1 else ""
                    look = {"color": plots.PALETTE[place % 8], "marker": plots.MARKERS[place % 8]}
                    axes.loglog(list(kept), list(kept.values()), label=name + fitted, **look)
        for axes, label in ((time, "seconds"), (memory, "MiB at the highest")):
            axes.set(xlabel=case.unit, ylabel=label)
            axes.legend()
        figure.suptitle(case.title)
        figure.savefig(path, metadata={"Date": None})
