"""Graphs of any size in a folder: features, labels and splits in files that are read some rows at a time, and edges.

``features0`` float32 ``(nodes, features)``, ``features1`` and ``features2`` the same propagated once and twice,
``edges`` int32 ``(2, edges)`` in both directions, ``sources`` int32 ``(edges,)`` the same sorted by target, of which
those of each node begin at ``start`` int64 ``(nodes + 1,)``, ``labels`` int16 ``(nodes, columns)``, -1 where unknown,
``split`` int8 ``(nodes,)``, and ``graph.json``, which is written last: where it is, the folder is whole. A generated
graph has ``means.npy`` beside them, the mean of the features of each class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holonomy.distributed import propagate_rows
from holonomy.structures import Neighbours, sort_edges

CLASSES, FEATURES, STEPS, DEGREE, ALIKE, SIGNAL = 10, 32, 2, 10, 0.5, 0.15
UNUSED, TRAIN, VALID, TEST = range(4)
RUN = 256


class About(NamedTuple):
    """What a folder holds."""

    nodes: int
    features: int
    outputs: int
    edges: int
    columns: int = 1
    metric: Literal["accuracy", "ROC-AUC"] = "accuracy"
    source: str = ""

    @classmethod
    def read(cls, folder: Path) -> About:
        return cls(**json.loads((folder / "graph.json").read_text(encoding="utf-8")))

    def layout(self, name: str) -> tuple[Any, tuple[int, ...]]:
        """Dtype and shape of a file."""
        if name.startswith("features"):
            return np.float32, (self.nodes, self.features)
        return {
            "edges": (np.int32, (2, self.edges)),
            "sources": (np.int32, (self.edges,)),
            "start": (np.int64, (self.nodes + 1,)),
            "labels": (np.int16, (self.nodes, self.columns)),
            "split": (np.int8, (self.nodes,)),
        }[name]

    def incoming(self, folder: Path) -> Neighbours:
        """The sorted edges, which stay in their file."""
        return Neighbours(*(torch.from_numpy(self.mapped(folder, name, "c")) for name in ("start", "sources")))

    def mapped(self, folder: Path, name: str, mode: Literal["r", "c", "w+"]) -> np.memmap[Any, Any]:
        """A file of the folder, to be read (by torch, which asks for memory that it might write: "c") or written."""
        dtype, shape = self.layout(name)
        return np.memmap(folder / name, dtype, mode, shape=shape)

    def finish(self, folder: Path) -> None:
        """Sort the edges, propagate the features, and say that the folder is whole."""
        incoming = sort_edges(self.mapped(folder, "edges", "r"), self.nodes, self.mapped(folder, "sources", "w+"))
        self.mapped(folder, "start", "w+")[:] = incoming.start
        for before, after in pairwise(range(STEPS + 1)):
            x = self.mapped(folder, f"features{before}", "r")
            propagate_rows(incoming, x, self.mapped(folder, f"features{after}", "w+"))
        (folder / "graph.json").write_text(json.dumps(self._asdict()) + "\n", encoding="utf-8")


def generate(folder: Path, nodes: int, seed: int, chunk: int = 2**18) -> None:
    """Write a degree-corrected block model with class-dependent features, some rows at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    about = About(nodes, FEATURES, CLASSES, nodes * DEGREE)
    rng = np.random.default_rng(seed)
    label = rng.integers(CLASSES, size=nodes).astype(np.int8)
    means = SIGNAL * rng.normal(size=(CLASSES, FEATURES))
    np.save(folder / "means.npy", means)
    x, edges = about.mapped(folder, "features0", "w+"), about.mapped(folder, "edges", "w+")
    for start in range(0, nodes, chunk):
        of = label[start : start + chunk]
        x[start : start + chunk] = means[of] + rng.normal(size=(len(of), FEATURES))
    order = np.argsort(label, kind="stable")
    ends = np.cumsum(rng.pareto(2.5, nodes)[order] + 1)  # nodes of one class lie beside each other
    borders = np.concatenate([[0.0], ends[np.bincount(label, minlength=CLASSES).cumsum() - 1]])
    for start in range(0, nodes * DEGREE // 2, chunk):
        count = min(chunk, nodes * DEGREE // 2 - start)
        # Numbers in order are found seven times as fast where a table is larger than a cache.
        one = order[np.searchsorted(ends, np.sort(rng.random(count)) * ends[-1])]
        alike, of, place = rng.random(count) < ALIKE, label[one], rng.random(count)
        within = borders[of] + place * (borders[of + 1] - borders[of])
        at = np.where(alike, within, place * ends[-1])
        by_place = at.argsort()
        one, other = one[by_place], order[np.searchsorted(ends, at[by_place])]
        edges[:, 2 * start : 2 * (start + count)] = [np.r_[one, other], np.r_[other, one]]
    about.mapped(folder, "labels", "w+")[:, 0] = label
    use = np.array([TRAIN, VALID, *[TEST] * 8])
    about.mapped(folder, "split", "w+")[:] = use[np.arange(nodes) % len(use)]  # nodes have no order
    about.finish(folder)


class Rows:
    """Rows of a folder in chunks, read anew each time: features, labels, and what they are for."""

    def __init__(self, folder: Path, files: Sequence[int], rows: range, chunk: int, device: str) -> None:
        self.folder, self.files, self.rows, self.chunk, self.device = folder, files, rows, chunk, device
        self.about = About.read(folder)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for start in self.rows[:: self.chunk]:
            yield self._read_all(slice(start, min(start + self.chunk, self.rows.stop)))

    def parts(self, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The rows in random parts, for each of which short runs of rows are read."""
        starts = torch.tensor(self.rows[::RUN])
        for part in starts[torch.randperm(len(starts))].tensor_split(min(count, len(starts))):
            runs = [self._read_all(slice(first, min(first + RUN, self.rows.stop))) for first in part.tolist()]
            features, labels, split = (torch.cat(each) for each in zip(*runs, strict=True))
            yield features, labels, split

    def _read_all(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        features = torch.cat([self._read(f"features{i}", rows) for i in self.files], 1)
        return features, self._read("labels", rows).long(), self._read("split", rows)

    def _read(self, name: str, rows: slice) -> Tensor:
        """Rows of a file, which is not mapped: pages of it would count as memory of this process."""
        dtype, shape = self.about.layout(name)
        width = math.prod(shape[1:]) * np.dtype(dtype).itemsize
        found = np.fromfile(
            self.folder / name, dtype, (rows.stop - rows.start) * math.prod(shape[1:]), offset=width * rows.start
        )
        return torch.from_numpy(found).view(-1, *shape[1:]).to(self.device)
