"""Every claim of holonomy.theory over many random draws and ascents: verdict, median and worst ratio, by order N.

    python -m benchmarks.theory [--draws 10000] [--seconds 20] [--claims NAME ...] [--data FOLDER]

The claims on attention are measured on at least ``--draws`` random inputs for each N = 1, 2, 3, ascents besides; claims
without N on as many, but in about ``--seconds`` each; inputs that are fixed stay what they are; claims on molecules are
judged on all of QM9 where ``--data`` names the folder of qm9_graphs.npz. After each claim the file is written: a run
that was killed continues where it stopped, unless ``--fresh``. An hour on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.engine.runs import command_line, commit, versions
from holonomy.theory import Claim, Draws, Trial, select
from holonomy.theory.claims.molecules import read_molecules
from holonomy.theory.claims.report import said, statement

RESULTS = Path(__file__).parent / "results" / "theory.json"


def summary(trials: Sequence[Trial]) -> dict[str, object]:
    ratios = [trial.ratio for trial in trials if trial.counts]
    finite = [ratio for ratio in ratios if math.isfinite(ratio)]
    return {
        "draws": sum(trial.at.get("climbed", 0.0) == 0 for trial in trials),
        "climbed": sum(trial.at.get("climbed", 0.0) > 0 for trial in trials),
        "counted": len(ratios),
        "median": statistics.median(finite) if finite else None,
        "worst": max(finite) if finite else None,
    }


def needed(claim: Claim, draws: int, seconds: float, seed: int) -> float:
    """The budget at which the rarest N is drawn often enough, or which takes that many seconds without N."""
    started = time.perf_counter()
    trials = claim.measure(Draws(seed, budget=1.0))[1]
    once = time.perf_counter() - started
    drawn = [trial for trial in trials if not trial.at.get("climbed", 0.0)]
    orders = {trial.at["N"] for trial in trials if "N" in trial.at}
    rarest = min((sum(trial.at.get("N") == order for trial in drawn) for order in orders), default=len(drawn))
    wanted = max(1.0, 1.05 * draws / max(rarest, 1))
    return wanted if orders else min(wanted, max(1.0, seconds / once))


def measured(claim: Claim, draws: Draws) -> dict[str, object]:
    started = time.perf_counter()
    verdict, trials = claim.measure(draws)
    orders = sorted({trial.at["N"] for trial in trials if "N" in trial.at})
    return {
        "source": claim.source,
        "statement": statement(claim, verdict),
        "verdict": said(verdict),
        "note": verdict.note,
        "budget": round(draws.budget, 2),
        "all": summary(trials),
        **{f"N={order:g}": summary([t for t in trials if t.at.get("N") == order]) for order in orders},
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--claims", nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="folder of qm9_graphs.npz")
    parser.add_argument("--fresh", action="store_true", help="forget what is in the file")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"draws": options.draws, "seconds": options.seconds, "seed": options.seed, "dtype": "float64"}
    command = command_line("benchmarks.theory", sys.argv[1:])
    document: dict[str, Any] = {"command": command, "versions": versions(), "settings": settings, "claims": {}}
    if options.json.exists() and not options.fresh:
        before = json.loads(options.json.read_text(encoding="utf-8"))
        if before["settings"] == settings:
            document = before
    done: dict[str, Any] = document["claims"]
    claims = select(options.claims)
    molecules = None if options.data is None else read_molecules(np.load(options.data / "qm9_graphs.npz"))
    for index, claim in enumerate(claims, 1):
        if claim.name not in done:
            fixed = claim.judged_on is not None and molecules is not None
            budget = 1.0 if fixed else needed(claim, options.draws, options.seconds, options.seed)
            draws = Draws(options.seed, options.device, budget=budget, molecules=molecules)
            done[claim.name] = measured(claim, draws) | {"commit": commit(), "date": time.strftime("%Y-%m-%d")}
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        found = done[claim.name]
        line = f"[{index:2}/{len(claims)}] {claim.name:32} {found['verdict']:16}"
        print(line, *(f"{key} {value}" for key, value in found["all"].items()), f"{found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
