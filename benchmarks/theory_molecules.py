"""Curvature of molecules against their line graphs (Simplicial appendix F.2), on all of QM9.

    python -m benchmarks.theory_molecules --data FOLDER [--every 1] [--json FILE]

FOLDER holds qm9_graphs.npz. Shares of molecules whose line graph has the larger mean, and the larger least, curvature,
strictly and not strictly, for three curvatures, hydrogens as atoms of their own and not. Three minutes on one core.
With ``--every`` the result goes to a file that is named after it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from experiments.engine.runs import command_line, versions
from holonomy.theory.claims.molecules import read_molecules, shares_of
from holonomy.theory.graphs.curvature import FORMANS, Shares

RESULTS = Path(__file__).parent / "results" / "theory_molecules.json"


def rounded(shares: Shares) -> dict[str, float]:
    return {name: round(value, 6) for name, value in shares._asdict().items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take only every so many-th molecule")
    parser.add_argument("--json", type=Path, help="default: the committed result; with --every, a file named after it")
    options = parser.parse_args(arguments)
    part = "" if options.every == 1 else f"_every_{options.every}"
    target = options.json or RESULTS.with_stem(RESULTS.stem + part)
    if target.exists() and json.loads(target.read_text(encoding="utf-8"))["every"] < options.every:
        parser.error(f"argument --json: {target} holds a result on more molecules; name another file")
    torch.set_num_threads(1)
    arrays = np.load(options.data / "qm9_graphs.npz")
    command = command_line("benchmarks.theory_molecules", sys.argv[1:] if arguments is None else arguments)
    document: dict[str, object] = {"command": command, "versions": versions(), "every": options.every}
    for hydrogens in (False, True):
        graphs = read_molecules(arrays, every=options.every, hydrogens=hydrogens)
        density = [2 * each.bonds.shape[1] / (each.atoms * (each.atoms - 1)) for each in graphs if each.atoms > 1]
        kind = "with hydrogens" if hydrogens else "without hydrogens"
        found: dict[str, object] = {"edge_density": round(float(np.mean(density)), 4)}
        print(f"{kind}, {len(graphs)} molecules, edge density {found['edge_density']}")
        for form in FORMANS:
            found[form] = rounded(shares_of(graphs, form, torch.float32, "cpu"))
            print(f"  {form:10} {found[form]}", flush=True)
        document[kind] = found
    # Only now: a run that was stopped leaves the file as it was.
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
