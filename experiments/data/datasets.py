"""Graphs for node classification: a generated epidemic on a tree, and real graphs from npz files.

Node indices run over rows of ``x``; every edge stands in ``edge_index`` in both directions. The
real files and their protocols are described in the ``README.md`` beside them. Everything a file can
get wrong ends in one sentence (``FileNotFoundError`` or ``RefusedError``).
"""

from __future__ import annotations

import dataclasses
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from experiments.data import feature_graphs
from experiments.engine.options import RefusedError

Metric = Literal["accuracy", "f1"]

# What each dataset can be read as; the first protocol is the default.
PROTOCOLS: dict[str, tuple[str, ...]] = {
    "tree": ("stratified",),
    "cora": ("random", "public"),
    "citeseer": ("random", "public"),
    "pubmed": ("random", "public"),
    "airport": ("clean", "leaky", "unseen"),
    "disease_lp": ("split",),
    "chameleon": ("geomgcn",),
    "digits": feature_graphs.NEIGHBOURS,
    "topics": feature_graphs.NEIGHBOURS,
}
Plain = Any
METRICS: tuple[Metric, ...] = ("accuracy", "f1")


@dataclasses.dataclass(frozen=True)
class NodeData:
    """One graph, its node labels, and the nodes to train, select and test on.

    Attributes:
        name: dataset and protocol, as they appear in tables.
        x: node features (n, d), dense or sparse CSR.
        edge_index: (2, m) int64, each edge in both directions.
        y: class of each node, (n,) int64; meaningless for nodes outside the three lists.
        train: node indices with labels to learn from; a node listed twice counts twice.
        val: node indices that choose the epoch and the hyper-parameters.
        test: node indices that are only ever measured.
        num_classes: number of classes.
        metric: ``"accuracy"``, or ``"f1"`` of class ``positive``.
        positive: the class whose F1 is taken.
        also: further test lists by name, measured by the same model.
        note: what a reader of the results must know about the protocol.
    """

    name: str
    x: Tensor
    edge_index: Tensor
    y: Tensor
    train: Tensor
    val: Tensor
    test: Tensor
    num_classes: int
    metric: Metric = "accuracy"
    positive: int = 1
    also: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.x.shape[0]

    @property
    def num_features(self) -> int:
        """Number of columns of ``x``."""
        return self.x.shape[1]

    def __post_init__(self) -> None:
        n = self.num_nodes
        if self.metric not in METRICS:
            raise RefusedError(f"metric must be one of {METRICS}, got {self.metric!r}")
        if self.edge_index.dim() != 2 or self.edge_index.shape[0] != 2:
            raise RefusedError(f"edge_index must have shape (2, m), got {tuple(self.edge_index.shape)}")
        if tuple(self.y.shape) != (n,):
            raise RefusedError(f"y must have shape ({n},), one class a node, got {tuple(self.y.shape)}")
        check_range(self.name, "edge_index", self.edge_index, n)
        check_range(self.name, "y", self.y, self.num_classes)
        lists = {"train": self.train, "val": self.val, "test": self.test, **self.also}
        for key, nodes in lists.items():
            if nodes.numel() == 0:
                raise RefusedError(f"{self.name}: the list of {key} nodes is empty")
            check_range(self.name, key, nodes, n)

    def score(self, logits: Tensor, nodes: Tensor) -> float:
        """Return accuracy or F1 of the predictions ``argmax logits`` on the listed nodes."""
        predicted, truth = logits[nodes].argmax(dim=-1), self.y[nodes]
        if self.metric == "accuracy":
            return float((predicted == truth).double().mean())
        hit, real = predicted == self.positive, truth == self.positive
        both = int((hit & real).sum())
        total = int(hit.sum()) + int(real.sum())
        return 2 * both / total if total else 0.0


def row_normalise(x: Tensor) -> Tensor:
    """Divide each row by the sum of its magnitudes; a row of zeros stays. Sparse in, sparse out."""
    if x.layout == torch.sparse_csr:
        counts = x.crow_indices().diff()
        rows = torch.repeat_interleave(torch.arange(x.shape[0]), counts)
        sums = torch.zeros(x.shape[0], dtype=x.dtype).index_add_(0, rows, x.values().abs())
        return sparse_rows(x.crow_indices(), x.col_indices(), x.values() / sums[rows], tuple(x.shape))
    sums = x.abs().sum(dim=1, keepdim=True)
    return x / torch.where(sums > 0, sums, torch.ones_like(sums))


def standardise(x: Tensor, factor: float = 1.0, *, indicators: bool = False) -> Tensor:
    """Bring each measured column to mean 0 and deviation ``factor``.

    A column of zeros and ones is an indicator and stays as it is unless ``indicators`` is true (the degree
    classes of airport: scaled like measurements they outweigh them in a distance). A constant column
    becomes 0. All nodes count, test nodes too: the task is transductive, and no label is read.
    """
    if x.layout != torch.strided:
        raise RefusedError("features='standard' needs dense features: centring would fill the zeros of sparse ones")
    centred = x.double() - x.double().mean(dim=0)
    spread = centred.square().mean(dim=0).sqrt()
    # A constant column leaves rounding noise after centring; dividing by it would blow the noise up.
    constant = spread <= torch.finfo(x.dtype).eps * x.double().abs().amax(dim=0)
    scaled = factor * centred / torch.where(constant, torch.ones_like(spread), spread) * ~constant
    kept = ((x == 0) | (x == 1)).all(dim=0) & (not indicators)
    return torch.where(kept, x, scaled.to(x.dtype))


def prepared(data: NodeData, features: str = "raw", scale: float = 1.0) -> NodeData:
    """Return the data with other features.

    Args:
        data: as loaded.
        features: ``"raw"``; ``"row"``, rows of sum 1; ``"standard"``, measured columns standardised, or
            ``"columns"``, indicator columns too.
        scale: a factor on raw and row-normalised features, the deviation of standardised ones.

    Returns:
        The data with these features.
    """
    match features:
        case "raw":
            x = data.x
        case "row":
            x = row_normalise(data.x)
        case "standard" | "columns":
            return dataclasses.replace(data, x=standardise(data.x, scale, indicators=features == "columns"))
        case _:
            raise RefusedError(f"features must be raw, row, standard or columns, got {features!r}")
    if scale != 1.0:
        x = x * scale
    return dataclasses.replace(data, x=x)


def sparse_rows(indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Build a CSR tensor, its invariants checked."""
    with warnings.catch_warnings():
        # torch announces once per process that CSR is in beta; the operations used here are
        # settled.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)
        return torch.sparse_csr_tensor(indptr, indices, values, size=shape, check_invariants=True)


def sir_tree(
    nodes: int = 1200,
    *,
    seed: int = 0,
    split_seed: int = 0,
    children: int = 10,
    features: int = 11,
    infection: float = 0.9,
    recovery: float = 0.3,
    resistant: float = 0.25,
    noise: float = 0.8,
) -> NodeData:
    """Let an infection spread over a random tree, and ask which nodes it reached.

    Every node draws 1 to ``children`` children until the tree is full. A node is resistant with chance
    ``resistant``, then its susceptibility is s ~ U(0, 0.2), else s ~ U(0.6, 1). The root is infected first;
    in every step an infected node infects each neighbour v that was never infected with chance
    ``infection`` * s_v, then recovers for good with chance ``recovery``, until nobody is infected: the SIR
    model (Kermack and McKendrick 1927; Anderson and May 1991). The features are independent noisy readings
    of s; the label is 1 where the infection came by. An epidemic that reaches less than 25 % or more than
    60 % of the nodes is drawn anew. The score is the F1 of class 1. This is the recipe of the Disease data
    of Chami et al. (2019), whose numbers are not published.

    Args:
        nodes: size of the tree, at least 20.
        seed: seed of tree, epidemic and noise.
        split_seed: seed of the split: 30 / 10 / 60 % of each class to train, select and test.
        children: largest number of children.
        features: number of noisy readings.
        infection: chance to infect a fully susceptible neighbour in one step.
        recovery: chance to recover in one step.
        resistant: share of resistant nodes.
        noise: deviation of a reading from s.

    Returns:
        The tree; node 0 is the root and every other node comes after its parent.

    Raises:
        ValueError: if the tree is too small, or the infection never reaches a share in these bounds.
    """
    if nodes < 20:
        raise RefusedError(f"nodes must be at least 20, got {nodes}")
    rng = np.random.default_rng(seed)
    parent = _random_tree(nodes, children, rng)
    child = np.arange(1, nodes)
    neighbours: list[list[int]] = [[] for _ in range(nodes)]
    for a, b in zip(parent[1:], child, strict=True):
        neighbours[a].append(int(b))
        neighbours[b].append(int(a))
    for _ in range(1000):
        weak = rng.random(nodes) < resistant
        susceptibility = np.where(weak, rng.uniform(0.0, 0.2, nodes), rng.uniform(0.6, 1.0, nodes))
        reached = _epidemic(neighbours, susceptibility, infection, recovery, rng)
        if 0.25 <= reached.mean() <= 0.6:
            break
    else:
        raise RefusedError(
            f"infection={infection} and recovery={recovery} never reached between 25 and 60 % "
            f"of a tree of {nodes} nodes; choose them nearer to 0.9 and 0.3"
        )
    x = susceptibility[:, None] + noise * rng.standard_normal((nodes, features))
    y = torch.from_numpy(reached.astype(np.int64))
    pairs = torch.from_numpy(np.stack([parent[1:], child]).astype(np.int64))
    split = stratified_split(y, (0.3, 0.1), seed=split_seed)
    return NodeData(
        "tree",
        torch.from_numpy(x).float(),
        both_directions(pairs),
        y,
        *split,
        num_classes=2,
        metric="f1",
        note="generated: SIR epidemic from the root of a random tree; F1 of the infected nodes",
    )


def _random_tree(nodes: int, children: int, rng: np.random.Generator) -> np.ndarray:
    parent = np.full(nodes, -1, dtype=np.int64)
    following, owner = 1, 0
    while following < nodes:
        end = min(nodes, following + int(rng.integers(1, children + 1)))
        parent[following:end] = owner
        following, owner = end, owner + 1
    return parent


def _epidemic(
    neighbours: Sequence[Sequence[int]],
    susceptibility: np.ndarray,
    infection: float,
    recovery: float,
    rng: np.random.Generator,
) -> np.ndarray:
    reached = np.zeros(len(neighbours), dtype=bool)
    reached[0] = True
    infected = [0]
    while infected:
        caught = []
        for node in infected:
            for other in neighbours[node]:
                if not reached[other] and rng.random() < infection * susceptibility[other]:
                    reached[other] = True
                    caught.append(other)
        infected = [node for node in infected if rng.random() >= recovery] + caught
    return reached


def stratified_split(y: Tensor, shares: tuple[float, float], *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split nodes into train, val and test; the first two hold the given shares of each class."""
    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for label in y.unique():
        members = (y == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        first = max(1, round(shares[0] * len(members)))
        second = first + max(1, round(shares[1] * len(members)))
        for part, chosen in zip(parts, (members[:first], members[first:second], members[second:]), strict=True):
            part.append(chosen)
    train, val, test = (torch.cat(part).sort().values for part in parts)
    return train, val, test


def both_directions(pairs: Tensor) -> Tensor:
    """Return each pair (u, v) of a (2, m) tensor as u -> v and v -> u, (2, 2m)."""
    return torch.cat([pairs, pairs.flip(0)], dim=1)


def load(name: str, folder: str | Path | None = None, *, protocol: str | None = None, seed: int = 0) -> NodeData:
    """Load a dataset by name.

    Args:
        name: ``"tree"`` or ``"topics"`` (generated), ``"digits"`` (scikit-learn's) or a file of the folder: one of
            ``PROTOCOLS``.
        folder: where the npz files lie; not needed for these three.
        protocol: which split; the first of ``PROTOCOLS[name]`` by default. *random*: 20 random
            nodes per class / 500 / 1000, one split, as Hypformer's released scripts draw it;
            *public*: the Planetoid split; *clean*, *split*: the file's split number ``seed`` mod 5;
            *leaky*: airport as the released code splits it, where 225 of 506 test nodes are also
            training nodes; *unseen*: trained the same way, tested on the 238 others only; *k5* to *k20*:
            each row of features joined to so many nearest ones.
        seed: which split, where there are several.

    Returns:
        The dataset.

    Raises:
        FileNotFoundError: if the folder or the file is not there.
        ValueError: if the name or protocol is unknown, or the file is not what it should be.
    """
    if name not in PROTOCOLS:
        raise RefusedError(f"dataset must be one of {', '.join(PROTOCOLS)}, got {name!r}")
    protocol = protocol or PROTOCOLS[name][0]
    if protocol not in PROTOCOLS[name]:
        raise RefusedError(f"protocol of {name} must be one of {', '.join(PROTOCOLS[name])}, got {protocol!r}")
    if name == "tree":
        return sir_tree(split_seed=seed)
    if name in {"digits", "topics"}:
        return _of_features(name, protocol, seed)
    if folder is None:
        raise FileNotFoundError(f"{name} is read from {name}.npz: say where it lies with --data FOLDER")
    folder = Path(folder)
    match name:
        case "cora" | "citeseer" | "pubmed":
            return _citation(name, folder, protocol)
        case "airport":
            return _airport(folder, protocol, seed)
        case "chameleon":
            return _chameleon(folder, seed)
        case _:
            return _disease(folder, seed)


def _of_features(name: str, protocol: str, seed: int) -> NodeData:
    x, y, edge_index = feature_graphs.joined(name, protocol)
    train, val, test = stratified_split(y, (0.5, 0.25), seed=seed)
    return NodeData(
        name=f"{name}/{protocol}",
        x=x,
        edge_index=edge_index,
        y=y,
        train=train,
        val=val,
        test=test,
        num_classes=int(y.max()) + 1,
        note="no graph is given: each row of features is joined to its nearest ones; 50 / 25 / 25 % of each class",
    )


def _citation(name: str, folder: Path, protocol: str) -> NodeData:
    path = folder / f"{name}.npz"
    raw = read_npz(
        path,
        {
            "x_indptr": "i1",
            "x_indices": "i1",
            "x_shape": "i1",
            "edge_index": "i2",
            "y": "i1",
            "labelled": "b1",
            "num_classes": "i0",
            "train_idx": "i1",
            "val_idx": "i1",
            "test_idx": "i1",
        },
        optional={"x_data": "f1"},
    )
    x = _csr(path, raw)
    labelled = torch.from_numpy(raw["labelled"])
    if protocol == "public":
        lists = [raw[f"{part}_idx"] for part in ("train", "val", "test")]
        note = "public Planetoid split"
    else:
        keys = [f"{name}_{part}" for part in ("train", "val", "test")]
        released = read_npz(folder / "released_splits.npz", dict.fromkeys(keys, "i1"))
        lists = [released[key] for key in keys]
        note = "the released scripts' random split (20 per class / 500 / 1000), one for every run"
    y = torch.from_numpy(raw["y"].astype(np.int64))
    if labelled.shape != y.shape:
        raise RefusedError(f"{path}: labelled must have the shape {tuple(y.shape)} of y, got {tuple(labelled.shape)}")
    train, val, test = (torch.from_numpy(part.astype(np.int64)) for part in lists)
    for part, nodes in {"train": train, "val": val, "test": test}.items():
        check_range(str(path), part, nodes, len(y))
    # Fifteen nodes of citeseer have no label (y is 0 there): they are neither learnt nor scored.
    train, val, test = (part[labelled[part]] for part in (train, val, test))
    edges = torch.from_numpy(raw["edge_index"].astype(np.int64))
    return _from_file(
        path,
        name=f"{name}/{protocol}",
        x=x,
        edge_index=both_directions(edges),
        y=y,
        train=train,
        val=val,
        test=test,
        num_classes=int(raw["num_classes"]),
        note=note,
    )


def _airport(folder: Path, protocol: str, seed: int) -> NodeData:
    path = folder / "airport.npz"
    raw = read_npz(path, {"x": "f2", "y": "i1", "edge_index": "i2", "split": "i2", "num_classes": "i0"})
    y = torch.from_numpy(raw["y"].astype(np.int64))
    pairs = torch.from_numpy(raw["edge_index"].astype(np.int64))
    check_range(str(path), "edge_index", pairs, len(y))
    edge_index = both_directions(pairs)
    degree = torch.bincount(edge_index[0], minlength=len(y))
    # The inputs of HGCN and Hypformer: 4 columns, the degree as 0, 1, 2, 3, 4 or 5 and more, and a 1.
    position = torch.nn.functional.one_hot(degree.clamp(max=5), 6).float()
    numbers = torch.from_numpy(raw["x"].astype(np.float32))
    if numbers.shape[0] != len(y):
        raise RefusedError(f"{path}: x must have {len(y)} rows, one for each entry of y, got {numbers.shape[0]}")
    x = torch.cat([numbers, position, torch.ones(len(y), 1)], dim=1)
    also: dict[str, Tensor] = {}
    if protocol == "clean":
        train, val, test = _numbered_split(path, raw["split"], seed, len(y))
        note = "clean split: train, val and test nodes disjoint"
    else:
        keys = [f"airport_{part}" for part in ("train", "val", "test", "unseen_test")]
        released = read_npz(folder / "released_splits.npz", dict.fromkeys(keys, "i1"))
        train, val, test, unseen = (torch.from_numpy(released[key].astype(np.int64)) for key in keys)
        if protocol == "leaky":
            also = {"unseen": unseen}
            note = "LEAKY split of the released code: 225 of its 506 test nodes are training nodes"
        else:
            test = unseen
            note = "trained as in the leaky split, tested on its 238 nodes in neither train nor val"
    return _from_file(
        path,
        name=f"airport/{protocol}",
        x=x,
        edge_index=edge_index,
        y=y,
        train=train,
        val=val,
        test=test,
        num_classes=int(raw["num_classes"]),
        also=also,
        note=note,
    )


def _disease(folder: Path, seed: int) -> NodeData:
    path = folder / "disease_lp.npz"
    raw = read_npz(path, {"x": "f2", "y": "i1", "edge_index": "i2", "split": "i2", "num_classes": "i0"})
    y = torch.from_numpy(raw["y"].astype(np.int64))
    train, val, test = _numbered_split(path, raw["split"], seed, len(y))
    edges = torch.from_numpy(raw["edge_index"].astype(np.int64))
    return _from_file(
        path,
        name="disease_lp",
        x=torch.from_numpy(raw["x"].astype(np.float32)),
        edge_index=both_directions(edges),
        y=y,
        train=train,
        val=val,
        test=test,
        num_classes=int(raw["num_classes"]),
        metric="f1",
        note="HGCN's rule: val / test hold 10 / 60 % of the smaller class from each class",
    )


def _chameleon(folder: Path, seed: int) -> NodeData:
    path = folder / "chameleon.npz"
    form = {"x_indptr": "i1", "x_indices": "i1", "x_shape": "i1", "edge_index": "i2", "y5": "i1", "split_geomgcn": "i2"}
    raw = read_npz(path, form)
    y = torch.from_numpy(raw["y5"].astype(np.int64))
    train, val, test = _numbered_split(path, raw["split_geomgcn"], seed, len(y))
    return _from_file(
        path,
        name="chameleon",
        x=_csr(path, raw),
        edge_index=both_directions(torch.from_numpy(raw["edge_index"].astype(np.int64))),
        y=y,
        train=train,
        val=val,
        test=test,
        num_classes=5,
        note="quintiles of monthly visits; Geom-GCN's splits, 48 / 32 / 20 %",
    )


def _from_file(path: Path, **fields: Plain) -> NodeData:
    try:
        return NodeData(**fields)
    except ValueError as error:
        raise RefusedError(f"{path}: {error}") from None


def _numbered_split(path: Path, split: np.ndarray, seed: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    if split.shape[1] != nodes or split.shape[0] == 0 or not np.isin(split, (0, 1, 2)).all():
        raise RefusedError(
            f"{path}: split must have shape (seeds, {nodes}) and hold 0, 1 or 2 (train, val, test), "
            f"got shape {split.shape} with values {split.min(initial=0)} to {split.max(initial=0)}"
        )
    row = torch.from_numpy(split[seed % len(split)])
    train, val, test = ((row == part).nonzero().flatten() for part in range(3))
    return train, val, test


def _csr(path: Path, raw: Mapping[str, np.ndarray]) -> Tensor:
    shape = tuple(int(size) for size in raw["x_shape"])
    indptr, indices = (raw[key].astype(np.int64) for key in ("x_indptr", "x_indices"))
    values = raw["x_data"].astype(np.float32) if "x_data" in raw else np.ones(len(indices), np.float32)
    if len(shape) != 2 or len(indptr) != shape[0] + 1 or len(values) != len(indices):
        raise RefusedError(
            f"{path}: the sparse features do not fit together: x_shape {shape}, x_indptr of length "
            f"{len(indptr)}, x_indices of length {len(indices)}, {len(values)} values"
        )
    # torch wants the columns of each row in order; the files do not promise it.
    rows = np.repeat(np.arange(shape[0]), np.clip(np.diff(indptr), 0, len(indices) + 1)) if len(indptr) else indptr
    if len(rows) != len(indices) or indptr[0] != 0 or (len(indices) and indices.max() >= shape[1]):
        raise RefusedError(f"{path}: x_indptr and x_indices do not describe a sparse matrix of shape {shape}")
    order = np.lexsort((indices, rows))
    try:
        return sparse_rows(*(torch.from_numpy(part) for part in (indptr, indices[order], values[order])), shape)
    except RuntimeError as error:
        raise RefusedError(f"{path}: x_indptr and x_indices do not describe a sparse matrix: {error}") from None


def read_npz(
    path: Path, required: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Read arrays from an npz file and check their kinds and numbers of axes.

    Args:
        path: the file.
        required: key to kind and number of axes: ``"i2"`` is an integer array with two axes,
            ``"f1"`` a floating-point one with one, ``"b1"`` a boolean one, ``"t1"`` one of texts.
        optional: the same, for keys that may be absent.

    Returns:
        The arrays by key.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not an npz file, or truncated, or an array is absent or of another
            kind.
    """
    wanted = {**required, **(optional or {})}
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.name} in the folder {path.parent}")
    try:
        # No pickles: a data file must not be able to run code. Opened here, because numpy leaves a file
        # that it cannot read open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {key: _of_this_machine(archive[key]) for key in wanted if key in archive}
    except (*BROKEN, AttributeError, TypeError) as error:  # the last two where it holds a single array
        reason = str(error) or type(error).__name__
        raise RefusedError(
            f"{path} cannot be read: it is truncated or not an npz file of plain arrays ({reason})"
        ) from None
    for key, form in wanted.items():
        if key in arrays:
            _check_array(path, key, arrays[key], form)
        elif key in required:
            raise RefusedError(f"{path}: the array {key!r} is missing")
    return arrays


# What numpy and zipfile raise for a broken file.
BROKEN = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)
_KINDS: dict[str, tuple[str, type]] = {
    "i": ("an integer", np.integer),
    "f": ("a floating-point", np.floating),
    "b": ("a boolean", np.bool_),
    "t": ("a text", np.character),
}


def _of_this_machine(array: np.ndarray) -> np.ndarray:
    """The same numbers in the byte order that torch reads, and texts that are bytes read as UTF-8."""
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _check_array(path: Path, key: str, array: np.ndarray, form: str) -> None:
    said, kind = _KINDS[form[0]]
    if not np.issubdtype(array.dtype, kind) or array.ndim != int(form[1:]):
        raise RefusedError(
            f"{path}: {key} must be {said} array with {form[1:]} axes, got {array.dtype} of shape {array.shape}"
        )
    if key in {"edge_index", "bond_index"} and array.shape[0] != 2:
        raise RefusedError(f"{path}: {key} must have shape (2, edges), got {array.shape}")
    if form[0] == "f" and not (np.abs(array) <= np.finfo(np.float32).max).all():
        raise RefusedError(f"{path}: {key} holds values that are not finite in float32")


def check_range(where: str, key: str, values: Tensor, limit: int) -> None:
    """Refuse numbers that are not between 0 and a limit."""
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= limit):
        raise RefusedError(
            f"{where}: {key} must lie between 0 and {limit - 1}, got {int(values.min())} to {int(values.max())}"
        )


def from_pyg(data: object, *, name: str = "pyg", metric: Metric = "accuracy") -> NodeData:
    """Take over a PyTorch Geometric ``Data`` object with node masks.

    Only its attributes are read, so nothing here imports PyTorch Geometric. Its ``edge_index`` is
    used as it is: an undirected graph already holds both directions there.

    Args:
        data: has ``x``, ``edge_index``, ``y``, and ``train_mask``, ``val_mask``, ``test_mask``.
        name: the name for tables.
        metric: ``"accuracy"`` or ``"f1"`` (of class 1).

    Returns:
        The same graph.

    Raises:
        ValueError: if an attribute is missing or the masks hold several splits.
    """
    fields = ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask")
    missing = [field for field in fields if getattr(data, field, None) is None]
    if missing:
        raise ValueError(f"data must have {', '.join(fields)}; missing: {', '.join(missing)}")
    masks = [getattr(data, f"{part}_mask") for part in ("train", "val", "test")]
    if any(mask.dim() != 1 for mask in masks):
        raise ValueError("the masks hold several splits, shape (n, splits): choose one column of each")
    train, val, test = (mask.nonzero().flatten() for mask in masks)
    y = data.y.reshape(-1).long()
    return NodeData(
        name,
        data.x,
        data.edge_index,
        y,
        train,
        val,
        test,
        num_classes=int(y.max()) + 1,
        metric=metric,
    )
