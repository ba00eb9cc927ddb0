r"""Molecules for the claims on curvature: QM9 from its arrays, and molecule-like graphs where they are not at hand.

A molecule is its bonds ``(2, m)``, each once, and its number of atoms. Hydrogens are atoms of their own, as the edge
density of 0.12 in Simplicial appendix F.2 says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holonomy.theory.claims.verdict import Draws
from holonomy.theory.graphs.curvature import Forman, Shares, curvature_shares, incidence

_BATCH = 500


class Molecule(NamedTuple):
    """A graph of atoms."""

    bonds: Tensor  # (2, m), each once
    atoms: int  # n


def molecule(draws: Draws, atoms: int) -> tuple[Tensor, Tensor]:
    """Draw a molecule-like graph: a tree of degree at most four with rings of five or six closed."""
    degree = [0] * atoms
    parent = [0] * atoms
    bonds: list[tuple[int, int]] = []
    for atom in range(1, atoms):
        free = [other for other in range(max(0, atom - 4), atom) if degree[other] < 4]
        parent[atom] = free[draws.integer(0, len(free) - 1)]
        bonds.append((parent[atom], atom))
        degree[atom] += 1
        degree[parent[atom]] += 1
    for _ in range(draws.integer(0, 2)):
        start = end = draws.integer(0, atoms - 1)
        for _ in range(draws.integer(4, 5)):  # up the tree as far as a ring of five or six goes
            end = parent[end]
        if end != start and max(degree[start], degree[end]) < 4 and (end, start) not in bonds:
            bonds.append((end, start))
            degree[start] += 1
            degree[end] += 1
    hydrogens = torch.tensor([max(0, 4 - d - draws.integer(0, 1)) for d in degree])
    return torch.tensor(bonds).T, hydrogens


def with_hydrogens(bonds: Tensor, hydrogens: Tensor) -> Molecule:
    """Make hydrogens atoms of their own."""
    heavy = hydrogens.shape[0]
    holders = torch.arange(heavy).repeat_interleave(hydrogens)
    total = heavy + holders.shape[0]
    return Molecule(torch.cat([bonds, torch.stack([holders, torch.arange(heavy, total)])], 1), total)


def draw_molecules(draws: Draws, count: int) -> list[Molecule]:
    """Draw molecule-like graphs of five to nine heavy atoms, with their hydrogens."""
    return [with_hydrogens(*molecule(draws, draws.integer(5, 9))) for _ in draws.rounds(count)]


def read_molecules(arrays: Mapping[str, Any], *, every: int = 1, hydrogens: bool = True) -> tuple[Molecule, ...]:
    """Read QM9 from the arrays of ``qm9_graphs.npz``: atoms and bonds of each molecule, one after the other."""
    atoms, bonds, held, ends = (
        arrays[name].astype(np.int64) for name in ("num_nodes", "num_bonds", "atom_feat", "bond_index")
    )
    first_atom, first_bond = (np.concatenate([[0], counts.cumsum()]) for counts in (atoms, bonds))
    found: list[Molecule] = []
    for i in range(0, len(atoms), every):
        edges = torch.from_numpy(ends[:, first_bond[i] : first_bond[i + 1]])
        count = torch.from_numpy(held[first_atom[i] : first_atom[i + 1], 2])
        found.append(with_hydrogens(edges, count) if hydrogens else Molecule(edges, int(atoms[i])))
    return tuple(sorted(found, key=lambda each: each.bonds.shape[1]))


def shares_of(
    graphs: Sequence[tuple[Tensor, int]], form: Forman, dtype: torch.dtype, device: torch.device | str
) -> Shares:
    """Compare the curvature of molecules with that of their line graphs, some hundreds together."""
    parts = [
        curvature_shares(_padded(graphs[start : start + _BATCH], dtype).to(device), form)
        for start in range(0, len(graphs), _BATCH)
    ]
    total = sum(part.graphs for part in parts)
    sums = (sum(part[column] * part.graphs for part in parts) for column in range(4))
    mean, mean_weak, least, least_weak = (part / max(total, 1) for part in sums)
    return Shares(mean, mean_weak, least, least_weak, total)


def _padded(graphs: Sequence[tuple[Tensor, int]], dtype: torch.dtype) -> Tensor:
    nodes, edges = max(atoms for _, atoms in graphs), max(bonds.shape[1] for bonds, _ in graphs)
    table = torch.zeros(len(graphs), nodes, edges, dtype=dtype)
    for row, (bonds, atoms) in zip(table, graphs, strict=True):
        row[:atoms, : bonds.shape[1]] = incidence(bonds, atoms, dtype)
    return table
