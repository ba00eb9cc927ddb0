"""Curvature of molecules against their line graphs (Simplicial appendix F.2), on all of QM9.

    python -m benchmarks.theory_molecules --data FOLDER [--every 1] [--json FILE]

FOLDER holds qm9_graphs.npz. Shares of molecules whose line graph has the larger mean, and the larger least, curvature,
strictly and not strictly, for three curvatures, hydrogens as atoms of their own and not. Ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holonomy.theory.claims_graphs import with_hydrogens
from holonomy.theory.curvature import FORMANS, Shares, curvature_shares, incidence

RESULTS = Path(__file__).parent / "results" / "theory_molecules.json"
BATCH = 2000


def molecules(folder: Path, every: int, *, explicit: bool) -> list[tuple[Tensor, int]]:
    """Bonds and number of atoms, small molecules first."""
    raw = np.load(folder / "qm9_graphs.npz", allow_pickle=False)
    atoms, bonds = raw["num_nodes"].astype(int), raw["num_bonds"].astype(int)
    first_atom, first_bond = (np.concatenate([[0], counts.cumsum()]) for counts in (atoms, bonds))
    table, hydrogens = raw["bond_index"].astype(np.int64), raw["atom_feat"][:, 2].astype(np.int64)
    found = []
    for i in range(0, len(atoms), every):
        edges = torch.from_numpy(table[:, first_bond[i] : first_bond[i + 1]])
        held = torch.from_numpy(hydrogens[first_atom[i] : first_atom[i + 1]])
        found.append(with_hydrogens(edges, held) if explicit else (edges, int(atoms[i])))
    return sorted(found, key=lambda graph: graph[0].shape[1])


def padded(graphs: list[tuple[Tensor, int]]) -> Tensor:
    nodes, edges = max(n for _, n in graphs), max(e.shape[1] for e, _ in graphs)
    table = torch.zeros(len(graphs), nodes, edges)
    for row, (bonds, n) in zip(table, graphs, strict=True):
        row[:n, : bonds.shape[1]] = incidence(bonds, n, torch.float32)
    return table


def together(parts: list[Shares]) -> dict[str, float]:
    total = sum(part.graphs for part in parts)
    names = ("mean", "mean_weak", "least", "least_weak")
    return {"graphs": total} | {
        name: round(sum(getattr(part, name) * part.graphs for part in parts) / total, 6) for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take only every so many-th molecule")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, object] = {"every": options.every}
    for explicit in (False, True):
        graphs = molecules(options.data, options.every, explicit=explicit)
        density = [2 * e.shape[1] / (n * (n - 1)) for e, n in graphs if n > 1]
        kind = "with hydrogens" if explicit else "without hydrogens"
        shares: dict[str, list[Shares]] = {form: [] for form in FORMANS}
        for start in range(0, len(graphs), BATCH):
            table = padded(graphs[start : start + BATCH])
            for form in FORMANS:
                shares[form].append(curvature_shares(table, form))
            print(f"\r{kind}: {min(start + BATCH, len(graphs))} of {len(graphs)}", end="", flush=True)
        found = {form: together(parts) for form, parts in shares.items()}
        document[kind] = {"edge_density": round(float(np.mean(density)), 4), **found}
        print(f"\r{kind}, edge density {np.mean(density):.3f}", *(f"\n  {f:10} {s}" for f, s in found.items()))
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
