"""Many graphs held as one: chains, generated molecules, and real molecules from npz files.

Nodes and edges of all graphs stand one after another; ``take`` cuts out a batch, as PyTorch Geometric holds it:
``x``, ``edge_index`` with both directions of every edge, ``edge_attr``, and ``batch``, the graph of each node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from experiments.data.datasets import both_directions, check_range, read_npz
from experiments.engine.options import RefusedError
from holonomy.layers import laplacian_identifiers

HARTREE_IN_MEV = 27211.386


class Batch(NamedTuple):
    """Some graphs: node features, edges, edge features, the graph of each node, what is asked, node identifiers."""

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    batch: Tensor
    y: Tensor
    identifiers: Tensor

    def inputs(self) -> dict[str, Tensor | None]:
        """Return what a model is called with; None for edge features that have no column."""
        edge_attr = self.edge_attr if self.edge_attr.shape[1] else None
        return {"x": self.x, "edge_index": self.edge_index, "batch": self.batch, "edge_attr": edge_attr}


@dataclasses.dataclass(frozen=True)
class GraphSet:
    """Graphs, one after another.

    Attributes:
        x: node features (N, d).
        edge_index: (2, M) int64, node numbers within the graph, both directions.
        edge_attr: edge features (M, e); e = 0 where there are none.
        nodes: number of nodes of each graph, (g,).
        edges: number of columns of ``edge_index`` of each graph, (g,).
        y: one row a graph, (g, ..), or one a node, (N, ..).
        per_node: whether ``y`` has a row for each node.
        identifiers: of the nodes, (N, p), for models of tokens; None stands for p = 0.
    """

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    nodes: Tensor
    edges: Tensor
    y: Tensor
    per_node: bool = False
    identifiers: Tensor | None = None

    def __post_init__(self) -> None:
        rows = self.x.shape[0] if self.per_node else len(self.nodes)
        if int(self.nodes.sum()) != self.x.shape[0] or int(self.nodes.min()) < 1:
            raise RefusedError(f"nodes must be positive and sum up to the {self.x.shape[0]} rows of x")
        if int(self.edges.sum()) != self.edge_index.shape[1] or self.edge_index.shape[1] != self.edge_attr.shape[0]:
            raise RefusedError(f"edges must sum up to the {self.edge_index.shape[1]} columns of edge_index")
        if self.y.shape[0] != rows:
            raise RefusedError(f"y must have {rows} rows, got {self.y.shape[0]}")
        limit = self.nodes.repeat_interleave(self.edges)
        if bool((self.edge_index < 0).any() | (self.edge_index >= limit).any()):
            raise RefusedError("edge_index must hold node numbers within each graph")

    def __len__(self) -> int:
        return len(self.nodes)

    def take(self, chosen: Tensor) -> Batch:
        """Cut out the graphs with the given numbers (b,), in this order."""
        chosen = chosen.to(self.nodes.device)
        rows, batch = ranges(self.nodes, chosen)
        columns, owner = ranges(self.edges, chosen)
        count = self.nodes[chosen]
        edge_index = self.edge_index[:, columns] + (count.cumsum(0) - count)[owner]
        y = self.y[rows if self.per_node else chosen]
        identifiers = self.x.new_zeros(len(rows), 0) if self.identifiers is None else self.identifiers[rows]
        return Batch(self.x[rows], edge_index, self.edge_attr[columns], batch, y, identifiers)

    def subset(self, chosen: Tensor) -> GraphSet:
        """Keep the graphs with the given numbers."""
        rows, columns = ranges(self.nodes, chosen)[0], ranges(self.edges, chosen)[0]
        return dataclasses.replace(
            self,
            x=self.x[rows],
            edge_index=self.edge_index[:, columns],
            edge_attr=self.edge_attr[columns],
            nodes=self.nodes[chosen],
            edges=self.edges[chosen],
            y=self.y[rows if self.per_node else chosen],
            identifiers=None if self.identifiers is None else self.identifiers[rows],
        )

    def identified(self, dim: int) -> GraphSet:
        """Give every node its Laplacian identifier, computed once for all epochs."""
        whole = self.take(torch.arange(len(self)))
        vectors = laplacian_identifiers(whole.edge_index, len(self.x), dim, batch=whole.batch, dtype=self.x.dtype)
        return dataclasses.replace(self, identifiers=vectors)

    def batches(self, size: int) -> list[Batch]:
        """Cut all graphs into batches, in order."""
        return [self.take(chosen) for chosen in torch.arange(len(self)).split(size)]


def ranges(counts: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the chosen parts where parts of these sizes follow each other, and each row's part."""
    start, size = (counts.cumsum(0) - counts)[chosen], counts[chosen]
    owner = torch.arange(len(chosen), device=size.device).repeat_interleave(size)
    return start[owner] + torch.arange(len(owner), device=size.device) - (size.cumsum(0) - size)[owner], owner


def chains(count: int, length: int, *, seed: int) -> GraphSet:
    """Chains whose class only the first node knows; every node is asked for it (HOT section 5).

    The class, 0 for one half of the chains and 1 for the other, is the one-hot feature of the first node; the others'
    features are zero. Who always gives the same answer has a micro F1 of 1/2 and a macro F1 of 1/3.

    Args:
        count: number of chains.
        length: nodes of each.
        seed: seed of the order.

    Returns:
        The chains, y (nodes,) the class.
    """
    label = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % 2
    x = torch.zeros(count, length, 2)
    x[:, 0] = functional.one_hot(label, 2).float()
    link = both_directions(torch.stack([torch.arange(length - 1), torch.arange(1, length)]))
    return GraphSet(
        x.flatten(0, 1),
        link.repeat(1, count),
        torch.zeros(count * link.shape[1], 0),
        torch.full((count,), length),
        torch.full((count,), link.shape[1]),
        label.repeat_interleave(length),
        per_node=True,
    )


def random_molecules(count: int, *, seed: int, atoms: int = 4, bonds: int = 3) -> GraphSet:
    """Generated stand-ins for molecules, with a property that nodes, bonds and rings decide together.

    A random tree of 6 to 14 nodes of valence at most 4, and up to 3 more bonds, each of which closes a ring. The
    property counts the bonds of kind 0 between atoms of different kinds, plus twice the rings.

    Args:
        count: number of graphs.
        seed: seed of everything.
        atoms: kinds of atoms.
        bonds: kinds of bonds.

    Returns:
        The graphs: one-hot kinds of atoms and bonds, y (count, 1).
    """
    rng = np.random.default_rng(seed)
    kinds, pairs, types, target = [], [], [], []
    for _ in range(count):
        kind = rng.integers(0, atoms, int(rng.integers(6, 15)))
        pair, rings = _skeleton(len(kind), int(rng.integers(0, 4)), rng)
        bond = rng.integers(0, bonds, len(pair))
        differ = kind[pair[:, 0]] != kind[pair[:, 1]]
        target.append(float((differ & (bond == 0)).sum() + 2 * rings))
        kinds.append(kind)
        pairs.append(pair)
        types.append(bond)
    return molecules(
        functional.one_hot(torch.from_numpy(np.concatenate(kinds)), atoms).float(),
        torch.from_numpy(np.concatenate(pairs).T.copy()),
        functional.one_hot(torch.from_numpy(np.concatenate(types)), bonds).float(),
        torch.tensor([len(kind) for kind in kinds]),
        torch.tensor([len(pair) for pair in pairs]),
        torch.tensor(target)[:, None],
    )


def _skeleton(nodes: int, extra: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    degree = np.zeros(nodes, dtype=np.int64)
    joined: set[tuple[int, int]] = set()
    for node in range(1, nodes):
        parent = int(rng.choice(np.flatnonzero(degree[:node] < 4)))
        joined.add((parent, node))
        degree[[parent, node]] += 1
    for _ in range(extra):
        a, b = sorted(rng.choice(nodes, 2, replace=False).tolist())
        if (a, b) not in joined and max(degree[[a, b]]) < 4:
            joined.add((a, b))
            degree[[a, b]] += 1
    return np.array(sorted(joined)), len(joined) - nodes + 1


def molecules(x: Tensor, bonds: Tensor, bond_attr: Tensor, nodes: Tensor, counts: Tensor, y: Tensor) -> GraphSet:
    """Make a set of molecules whose bonds (2, m) are listed once; each gets its other direction beside it."""
    both = torch.stack([bonds, bonds.flip(0)], dim=2).flatten(1)
    return GraphSet(x, both, bond_attr.repeat_interleave(2, dim=0), nodes, 2 * counts, y)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A set of graphs cut into three, the property standardised by the training part.

    Attributes:
        train: to learn from.
        val: chooses the epoch.
        test: measured once.
        mean: of the property in the training part, taken off ``y`` in all three.
        deviation: by which ``y`` is divided; multiplies an error back into the property's unit.
    """

    train: GraphSet
    val: GraphSet
    test: GraphSet
    mean: float
    deviation: float

    @classmethod
    def cut(cls, graphs: GraphSet, parts: Sequence[Tensor], identifier: int) -> Parts:
        """Cut, standardise, and give the nodes identifiers of this width."""
        mean, deviation = moments(graphs.y[parts[0]])
        scaled = dataclasses.replace(graphs, y=((graphs.y.double() - mean) / deviation).float())
        train, val, test = (scaled.subset(part).identified(identifier) for part in parts)
        return cls(train, val, test, mean, deviation)


def moments(y: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of a property; 1 for the deviation where there is none to divide by."""
    y = y.double()
    return float(y.mean()), (float(y.std()) if len(y) > 1 else 0.0) or 1.0


def read_molecules(dataset: str, folder: Path | None, train: int, tests: int) -> tuple[GraphSet, list[list[Tensor]]]:
    """Read or draw molecules and say which are to train, to validate and to test with.

    Args:
        dataset: ``"generated"``, ``"zinc"``, ``"qm9"`` or ``"esol"``.
        folder: where the npz files lie.
        train: training molecules, the first ones; 0 takes all.
        tests: the same for validation, and for the test.

    Returns:
        The molecules, and the numbers of each part, for each split that there is.

    Raises:
        FileNotFoundError: if there is no folder where one is needed.
    """
    if dataset == "generated":
        sizes = (train or 5000, tests or 1000, tests or 1000)
        return random_molecules(sum(sizes), seed=0), [list(torch.arange(sum(sizes)).split(sizes))]
    if folder is None:
        raise FileNotFoundError(f"{dataset} is read from npz files: say where they lie with --data FOLDER")
    graphs, splits = {"zinc": zinc, "qm9": qm9, "esol": esol}[dataset](folder)
    if splits.shape[-1] != len(graphs):
        raise RefusedError(f"split must have an entry for each of {len(graphs)} molecules, got {splits.shape[-1]}")
    limits = (train, tests, tests)
    parts = [
        [(split == part).nonzero().flatten()[: most or None] for part, most in enumerate(limits)]
        for split in splits.reshape(-1, len(graphs))
    ]
    return graphs, parts


def zinc(folder: Path) -> tuple[GraphSet, Tensor]:
    """Read ZINC (12000 molecules, penalised logP) and its split, 0 train, 1 val, 2 test."""
    path = folder / "zinc12k.npz"
    raw = read_npz(
        path,
        {"num_nodes": "i1", "num_bonds": "i1", "atom_type": "i1", "bond_index": "i2", "bond_type": "i1", "y": "f1",
         "split": "i1"},
    )  # fmt: skip
    whole = {key: torch.from_numpy(raw[key].astype(np.int64)) for key in raw if key != "y"}
    graphs = molecules(
        _one_hot(path, "atom_type", whole["atom_type"], 28),
        whole["bond_index"],
        _one_hot(path, "bond_type - 1", whole["bond_type"] - 1, 3),
        whole["num_nodes"],
        whole["num_bonds"],
        torch.from_numpy(raw["y"].astype(np.float64))[:, None],
    )
    return graphs, whole["split"]


def qm9(folder: Path) -> tuple[GraphSet, Tensor]:
    """Read QM9's heavy-atom graphs with the HOMO-LUMO gap in meV, and a split, 0 train, 1 val, 2 test."""
    path = folder / "qm9_graphs.npz"
    raw = read_npz(
        path,
        {"num_nodes": "i1", "num_bonds": "i1", "atom_feat": "i2", "bond_index": "i2", "bond_type": "i1", "split": "i1"},
    )
    targets = read_npz(folder / "qm9_targets.npz", {"y": "f2"})["y"]
    for name, array, least in (("atom_feat", raw["atom_feat"], 3), ("y of the targets", targets, 8)):
        if array.shape[1] < least:
            raise RefusedError(f"{path}: {name} must have {least} columns at least, got shape {array.shape}")
    gap = targets[:, 7]
    whole = {key: torch.from_numpy(raw[key].astype(np.int64)) for key in raw}
    number, charge, hydrogens = whole["atom_feat"].T[:3]
    # Atomic numbers 6 to 9, charges -1 to 1 (stored plus 8), 0 to 4 hydrogens.
    sizes = ((number - 6, 4), (charge - 7, 3), (hydrogens, 5))
    x = torch.cat([_one_hot(path, "atom_feat", value, size) for value, size in sizes], dim=1)
    graphs = molecules(
        x,
        whole["bond_index"],
        _one_hot(path, "bond_type - 1", whole["bond_type"] - 1, 4),
        whole["num_nodes"],
        whole["num_bonds"],
        torch.from_numpy(HARTREE_IN_MEV * gap.astype(np.float64)).float()[:, None],
    )
    return graphs, whole["split"]


def esol(folder: Path) -> tuple[GraphSet, Tensor]:
    """Read ESOL (1128 molecules, measured log of solubility) and its three splits, 0 train, 1 val, 2 test."""
    path = folder / "esol.npz"
    raw = read_npz(
        path,
        {"num_nodes": "i1", "num_bonds": "i1", "atom_feat": "i2", "bond_index": "i2", "bond_type": "i1", "y": "f1",
         "split": "i2"},
    )  # fmt: skip
    whole = {key: torch.from_numpy(raw[key].astype(np.int64)) for key in raw if key != "y"}
    if not raw["atom_feat"].size:
        raise RefusedError(f"{path}: atom_feat must have a row for each atom and columns, got {raw['atom_feat'].shape}")
    # Element, charge, hydrogens, whether aromatic, degree: the values that occur, in order, as one-hot vectors.
    columns = [column.unique(return_inverse=True) for column in whole["atom_feat"].T]
    x = torch.cat([functional.one_hot(place, len(values)) for values, place in columns], dim=1).float()
    graphs = molecules(
        x,
        whole["bond_index"],
        _one_hot(path, "bond_type - 1", whole["bond_type"] - 1, 4),
        whole["num_nodes"],
        whole["num_bonds"],
        torch.from_numpy(raw["y"].astype(np.float32))[:, None],
    )
    return graphs, whole["split"]


def _one_hot(path: Path, key: str, numbers: Tensor, size: int) -> Tensor:
    check_range(str(path), key, numbers, size)
    return functional.one_hot(numbers, size).float()
