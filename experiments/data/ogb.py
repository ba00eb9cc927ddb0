"""A graph of OGB's node property prediction, read from its folder without the package and without pickles.

    NAME/raw/    edge.csv.gz (m, 2), node-feat.csv.gz (n, d), node-label.csv.gz (n, tasks), num-node-list.csv.gz and
                 num-edge-list.csv.gz; in ogbn-proteins edge-feat.csv.gz (m, d) in place of features of nodes
    NAME/raw/    of ogbn-papers100M: data.npz with edge_index (2, m), node_feat (n, d), num_nodes_list, num_edges_list;
                 node-label.npz with node_label
    NAME/split/SCHEME/    train.csv.gz, valid.csv.gz, test.csv.gz: numbers of nodes

Files are streamed: text some lines at a time, arrays of an npz file some numbers at a time, whether they are compressed
or not; none of them is in memory as a whole, but labels. What is written is a folder of
:mod:`experiments.data.large_graphs`. Every edge is written in both directions, so that one that stands in the file in
both counts twice. Labels in one column are classes, judged by accuracy; those in several are tasks of yes and no,
judged by the mean area under their ROC curves. Nodes without features have the means of those of their edges.
"""

from __future__ import annotations

import contextlib
import gzip
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.data.datasets import BROKEN
from experiments.data.large_graphs import TEST, TRAIN, UNUSED, VALID, About
from experiments.engine.options import RefusedError

NUMBERS = 2**20  # of one block
# Where a block stands, rows and columns, and its numbers.
Block = tuple[slice, slice, np.ndarray[Any, Any]]


class Table(NamedTuple):
    """Numbers in rows and columns: a compressed text without a head, or an array of an npz file."""

    path: Path
    array: str | None

    def exists(self) -> bool:
        if self.array is None or not self.path.is_file():
            return self.path.is_file()
        with self.refusing(), zipfile.ZipFile(self.path) as archive:
            return f"{self.array}.npy" in archive.namelist()

    def shape(self) -> tuple[int | None, int]:
        """Rows, which of a text only its end tells, and columns."""
        if self.array is None:
            return None, next((block.shape[1] for *_, block in self.pieces()), 0)
        with self.refusing(), zipfile.ZipFile(self.path) as archive, archive.open(f"{self.array}.npy") as stream:
            return header(stream)[0]

    def pieces(self) -> Iterator[Block]:
        """Blocks in the order in which they lie in the file."""
        if not self.exists():
            name = self.path.name if self.array is None else f"{self.path.name} with the array {self.array}"
            raise RefusedError(f"{self.path.parent} must hold {name}, as the folders of OGB do, got none")
        with self.refusing():
            if self.array is None:
                with gzip.open(self.path, "rt", encoding="ascii") as stream:
                    yield from of_text(stream)
            else:
                with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.array}.npy") as stream:
                    yield from of_array(stream)

    def blocks(self, rows: int, columns: int) -> Iterator[Block]:
        """The same, which must make up a table of this shape."""
        seen = 0
        for at, across, block in self.pieces():
            seen += block.size
            if at.stop > rows or across.stop > columns:
                raise RefusedError(f"{self.path} must have shape {(rows, columns)}, got {at.stop, across.stop} or more")
            yield at, across, block
        if seen != rows * columns:
            raise RefusedError(f"{self.path} must have shape {(rows, columns)}, got {seen} numbers")

    def check(self, block: np.ndarray[Any, Any], below: int | None = None) -> None:
        """Refuse numbers that float32 does not hold or, where they number something, not whole ones from 0 on."""
        if below is None:
            good, wanted = np.abs(block) <= np.finfo(np.float32).max, "finite numbers of float32"
        else:
            good = (block >= 0) & (block < below) & (block == np.floor(block))
            wanted = f"whole numbers from 0 to {below - 1}"
        if not good.all():
            raise RefusedError(f"{self.path} must hold {wanted}, got {block[~good][0]}")

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Say of a broken file which it is."""
        try:
            yield
        except RefusedError:
            raise
        except BROKEN as error:
            kind = "text of numbers, compressed by gzip" if self.array is None else "an npz file of plain arrays"
            raise RefusedError(f"{self.path} must be {kind}, got one with this: {error}") from None


def of_text(stream: Any) -> Iterator[Block]:
    """Blocks of whole rows."""
    start = 0
    while lines := stream.readlines(8 * NUMBERS):
        block = np.loadtxt(lines, delimiter=",", ndmin=2, comments=None)
        yield slice(start, start + len(block)), slice(0, block.shape[1]), block
        start += len(block)


def header(stream: Any) -> tuple[tuple[int, int], bool, Any]:
    """The shape of the array that follows, of one column if it has one axis; whether columns follow rows; its dtype."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, by_column, dtype = np.lib.format.read_array_header_2_0(stream)
    if dtype.kind not in "iuf" or len(shape) not in {1, 2}:
        raise ValueError(f"an array of shape {shape} and dtype {dtype}")
    return (*shape, 1)[:2], by_column, dtype


def of_array(stream: Any) -> Iterator[Block]:
    """Blocks of the array that follows, parts of one row where it is long."""
    shape, by_column, dtype = header(stream)
    high, wide = shape[::-1] if by_column else shape
    columns = max(1, min(wide, NUMBERS))
    rows = max(1, NUMBERS // columns)
    for top in range(0, high, rows):
        for left in range(0, wide, columns):
            at, across = slice(top, min(top + rows, high)), slice(left, min(left + columns, wide))
            size = at.stop - at.start, across.stop - across.start
            block = np.frombuffer(stream.read(size[0] * size[1] * dtype.itemsize), dtype).reshape(size)
            yield (across, at, block.T) if by_column else (at, across, block)


class Folder:
    """A folder as OGB's package leaves it."""

    def __init__(self, path: Path) -> None:
        self.path, self.raw = path, path / "raw"
        if not self.raw.is_dir():
            raise RefusedError(f"{path} must hold the folder raw, as the folders of OGB do, got none")
        self.arrays = (self.raw / "data.npz").is_file()
        self.nodes = self._count("num-node-list", "num_nodes_list")
        self.edges = self._count("num-edge-list", "num_edges_list")

    def table(self, text: str, array: str, file: str = "data") -> Table:
        """A table by its name as text and as an array."""
        return Table(self.raw / f"{file}.npz", array) if self.arrays else Table(self.raw / f"{text}.csv.gz", None)

    def _count(self, text: str, array: str) -> int:
        table = self.table(text, array)
        found = np.concatenate([np.empty(0), *(block.ravel() for *_, block in table.pieces())])
        table.check(found, 2**31)
        if len(found) != 1 or found[0] == 0:
            raise RefusedError(f"{table.path} must hold the size of one graph, got {found.tolist()}")
        return int(found[0])

    def labels(self) -> np.ndarray[Any, Any]:
        """Labels ``(nodes, columns)``, -1 where there is none."""
        table = self.table("node-label", "node_label", "node-label")
        width = table.shape()[1]
        labels = np.full((self.nodes, width), -1, np.int16)
        for rows, columns, block in table.blocks(self.nodes, width):
            known = ~np.isnan(block)
            table.check(block[known], 2**15 if width == 1 else 2)
            labels[rows, columns][known] = block[known]
        return labels

    def split(self, scheme: str | None) -> np.ndarray[Any, Any]:
        """What each node is for."""
        schemes = sorted(path.name for path in (self.path / "split").glob("*/"))
        if scheme is None and len(schemes) != 1:
            raise RefusedError(f"{self.path / 'split'} must hold one folder, or --split name one, got {schemes}")
        of = np.full(self.nodes, UNUSED, np.int8)
        for name, code in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
            table = Table(self.path / "split" / (scheme or schemes[0]) / f"{name}.csv.gz", None)
            nodes = np.concatenate([np.empty(0), *(block.ravel() for *_, block in table.pieces())])
            table.check(nodes, self.nodes)
            rows = nodes.astype(np.int64)
            if not len(rows) or len(np.unique(rows)) < len(rows) or (of[rows] != UNUSED).any():
                raise RefusedError(f"{table.path} must hold nodes, each in one list once, got {len(rows)} of them")
            of[rows] = code
        return of


def write_edges(source: Folder, edges: np.ndarray[Any, Any]) -> None:
    """Each edge and, after all of them, each the other way."""
    table = source.table("edge", "edge_index")
    for rows, columns, block in table.blocks(*((2, source.edges) if source.arrays else (source.edges, 2))):
        table.check(block, source.nodes)
        ends, places = (rows, columns) if source.arrays else (columns, rows)
        back = slice(source.edges + places.start, source.edges + places.stop)
        for end, numbers in zip(range(2)[ends], block if source.arrays else block.T, strict=True):
            edges[end, places] = edges[1 - end, back] = numbers


def write_features(source: Folder, edges: np.ndarray[Any, Any], x: np.ndarray[Any, Any]) -> None:
    """Features of nodes, or the means of those of their edges."""
    table = source.table("node-feat", "node_feat")
    if table.exists():
        for rows, columns, block in table.blocks(*x.shape):
            table.check(block)
            x[rows, columns] = block
        return
    table = source.table("edge-feat", "edge_feat")
    total = np.zeros(x.shape)
    for rows, columns, block in table.blocks(source.edges, x.shape[1]):
        table.check(block)
        for end in edges[:, rows]:
            np.add.at(total[:, columns], end, block)
    count = np.bincount(edges[0], minlength=source.nodes)
    x[:] = total / np.maximum(count, 1)[:, None]


def source_of(path: Path, scheme: str | None) -> str:
    """What a converted graph is of."""
    return f"{path.resolve()}, split {scheme or 'of its own'}"


def convert(path: Path, folder: Path, scheme: str | None = None) -> None:
    """Write a graph of OGB's as :mod:`experiments.data.large_graphs` reads it."""
    source = Folder(path)
    labels, split = source.labels(), source.split(scheme)
    known = labels[(split == TRAIN)[:, None] & (labels >= 0)]
    if not len(known):
        raise RefusedError(f"{path} must have labels of nodes to train on, got none")
    features = [source.table(f"{kind}-feat", f"{kind}_feat") for kind in ("node", "edge")]
    features = [table for table in features if table.exists()]
    if not features:
        raise RefusedError(f"{source.raw} must hold features of nodes or of edges, got neither")
    tasks, wide = labels.shape[1], features[0].shape()[1]
    if wide == 0:
        raise RefusedError(f"{features[0].path} must hold a feature at least, got none")
    about = About(
        source.nodes,
        wide,
        outputs=int(labels.max()) + 1 if tasks == 1 else tasks,
        edges=2 * source.edges,
        columns=tasks,
        metric="accuracy" if tasks == 1 else "ROC-AUC",
        source=source_of(path, scheme),
    )
    folder.mkdir(parents=True, exist_ok=True)
    about.mapped(folder, "labels", "w+")[:] = labels
    about.mapped(folder, "split", "w+")[:] = split
    edges = about.mapped(folder, "edges", "w+")
    write_edges(source, edges)
    write_features(source, edges, about.mapped(folder, "features0", "w+"))
    about.finish(folder)
