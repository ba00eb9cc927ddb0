"""Train Hypformer on a graph of 10^5 to 10^7 nodes: whole, in parts, in chunks of rows, or on several processes.

The graph is a degree-corrected block model with class-dependent features, generated on disk. Modes ``whole`` and
``partitions`` have a GCN beside the transformer, on the graph or on random parts of it (the paper's protocol). Modes
``rows`` and ``stream`` read features that were propagated ahead of training, in one pass over all rows or in chunks of
a file; under torchrun they share the rows among processes.

    python -m experiments.large_graph --nodes 100000 --mode whole
    python -m experiments.large_graph --nodes 100000 --mode partitions
    python -m experiments.large_graph --nodes 100000 --mode stream
    torchrun --nproc-per-node 2 -m experiments.large_graph --nodes 100000 --mode rows
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from holonomy.distributed import propagate_rows, stream, stream_backward, sum_gradients
from holonomy.models import Hypformer
from holonomy.optim import RiemannianAdam
from holonomy.structures import Graph, node_partitions

CLASSES, FEATURES, STEPS, DEGREE, ALIKE, SIGNAL = 10, 32, 2, 10, 0.5, 0.15


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this process hands to collectives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
            self.count += sum(x.numel() * x.element_size() for x in tensors)
        return func(*args, **(kwargs or {}))


def generate(folder: Path, nodes: int, seed: int, chunk: int = 2**18) -> None:
    """Write classes, edges in both directions, and features with their propagations, some rows at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    label = rng.integers(CLASSES, size=nodes).astype(np.int8)
    means = SIGNAL * rng.normal(size=(CLASSES, FEATURES))
    shape = nodes, FEATURES
    x = [np.memmap(folder / f"features{step}", np.float32, "w+", shape=shape) for step in range(STEPS + 1)]
    for start in range(0, nodes, chunk):
        of = label[start : start + chunk]
        x[0][start : start + chunk] = means[of] + rng.normal(size=(len(of), FEATURES))
    order = np.argsort(label, kind="stable")
    ends = np.cumsum(rng.pareto(2.5, nodes)[order] + 1)  # nodes of one class lie beside each other
    borders = np.concatenate([[0.0], ends[np.bincount(label, minlength=CLASSES).cumsum() - 1]])
    edges = np.memmap(folder / "edges", np.int32, "w+", shape=(2, nodes * DEGREE))
    for start in range(0, nodes * DEGREE // 2, chunk):
        count = min(chunk, nodes * DEGREE // 2 - start)
        one = order[np.searchsorted(ends, rng.random(count) * ends[-1])]
        alike, of, place = rng.random(count) < ALIKE, label[one], rng.random(count)
        within = borders[of] + place * (borders[of + 1] - borders[of])
        other = order[np.searchsorted(ends, np.where(alike, within, place * ends[-1]))]
        edges[:, 2 * start : 2 * (start + count)] = [np.r_[one, other], np.r_[other, one]]
    graph = Graph(torch.from_numpy(np.array(edges)), nodes)
    for before, after in pairwise(x):
        propagate_rows(graph, before, after)
    label.tofile(folder / "labels")  # written last: the data are whole


class Rows:
    """Rows of the files in chunks, read anew each time: features, classes, and whether a row trains."""

    def __init__(self, folder: Path, files: int, rows: range, chunk: int, device: str) -> None:
        self.folder, self.files, self.rows, self.chunk, self.device = folder, files, rows, chunk, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for start in self.rows[:: self.chunk]:
            count = min(self.chunk, self.rows.stop - start)
            each = (
                np.fromfile(self.folder / f"features{i}", np.float32, FEATURES * count, offset=4 * FEATURES * start)
                for i in range(self.files)
            )
            x = torch.cat([torch.from_numpy(part).view(count, FEATURES) for part in each], 1)
            y = torch.from_numpy(np.fromfile(self.folder / "labels", np.int8, count, offset=start)).long()
            train = torch.arange(start, start + count) % 10 == 0  # nodes have no order
            yield x.to(self.device), y.to(self.device), train.to(self.device)


class Work:
    """One mode: an epoch of training, and the share of test rows that are right."""

    def __init__(self, args: argparse.Namespace, folder: Path, group: dist.ProcessGroup | None) -> None:
        self.args, self.group = args, group
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        rows = range(args.nodes * rank // world, args.nodes * (rank + 1) // world)
        gcn = args.mode in {"whole", "partitions"}
        files = 1 if gcn else STEPS + 1
        torch.manual_seed(args.seed)
        self.model = Hypformer(
            FEATURES * files, args.hidden, CLASSES, layers=args.layers, heads=2, graph_encoder="gcn" if gcn else None
        ).to(args.device)
        self.optimizer = RiemannianAdam(self.model.parameters(), lr=args.lr)
        self.chunks = Rows(folder, files, rows, args.chunk if args.mode == "stream" else len(rows), args.device)
        if args.mode != "stream":
            ((self.x, self.y, self.train),) = self.chunks
        if gcn:
            edges = torch.from_numpy(np.fromfile(folder / "edges", np.int32).reshape(2, -1)).to(args.device)
            self.edges: Any = Graph(edges, args.nodes) if args.mode == "whole" else edges

    def parts(self, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor, Any]]:
        """Features, classes, what trains, and edges: of all nodes, or of one part after the other."""
        if self.args.mode != "partitions":
            yield self.x, self.y, self.train, getattr(self, "edges", None)
            return
        for part in node_partitions(self.edges, self.args.nodes, self.args.parts, generator=generator):
            yield self.x[part.nodes], self.y[part.nodes], self.train[part.nodes], part.edge_index

    def loss(self, scores: Tensor, y: Tensor, train: Tensor) -> Tensor:
        """What these rows add to the mean over all rows that train."""
        summed = nn.functional.cross_entropy(scores[train], y[train], reduction="sum")
        return summed / len(range(0, self.args.nodes, 10))

    def backward(self, x: Tensor, y: Tensor, train: Tensor, edges: Any) -> Tensor:
        loss = self.loss(self.model(x, edges, group=self.group), y, train)
        loss.backward()
        return loss.detach()

    def step(self, backward: Callable[[], Tensor]) -> float:
        self.optimizer.zero_grad()
        loss = backward()
        if self.group is not None:
            sum_gradients(self.model, self.group)
            dist.all_reduce(loss, group=self.group)
        self.optimizer.step()
        return loss.item()

    def epoch(self) -> float:
        """The mean loss of one pass over the rows; of parts, each makes a step."""
        if self.args.mode == "stream":

            def of(chunk: Any, group: Any) -> Tensor:
                return self.loss(self.model(chunk[0], group=group), *chunk[1:])

            return self.step(lambda: stream_backward(of, self.chunks, group=self.group))
        return sum(self.step(lambda part=part: self.backward(*part)) for part in self.parts())

    @torch.no_grad()
    def accuracy(self) -> float:
        """The share of the rows that do not train whose class is found."""
        self.model.eval()
        tests = torch.Generator().manual_seed(self.args.seed)  # training draws the same with and without tests
        if self.args.mode == "stream":
            scores = stream(lambda chunk, group: self.model(chunk[0], group=group), self.chunks, group=self.group)
            pairs = ((s, y, train) for s, (_, y, train) in zip(scores, self.chunks, strict=True))
        else:
            pairs = ((self.model(x, edges, group=self.group), y, train) for x, y, train, edges in self.parts(tests))
        right = torch.stack([(scores.argmax(-1) == y)[~train].sum() for scores, y, train in pairs]).sum()
        if self.group is not None:
            dist.all_reduce(right, group=self.group)
        self.model.train()
        return int(right) / (self.args.nodes - len(range(0, self.args.nodes, 10)))


def total(value: float, group: dist.ProcessGroup | None, how: Any = dist.ReduceOp.SUM) -> float:
    """A number of this process, over all processes."""
    found = torch.tensor(value, dtype=torch.float64)
    if group is not None:
        dist.all_reduce(found, how, group)
    return found.item()


def train(args: argparse.Namespace, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Train, epoch by epoch, from where a killed run stopped; the result."""
    folder = args.out / f"data-{args.nodes}-{args.seed}"
    first = group is None or group.rank() == 0
    if first and not (folder / "labels").exists():
        # In a process of its own, so that its memory does not count.
        process = multiprocessing.get_context("spawn").Process(target=generate, args=(folder, args.nodes, args.seed))
        process.start()
        process.join()
    if group is not None:
        dist.barrier(group)
    work = Work(args, folder, group)
    size = "" if group is None else f"-{group.size()}"
    name = f"{args.mode}{size}-{args.nodes}"
    checkpoint, history = args.out / f"{name}.pt", []
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        work.model.load_state_dict(state["model"])
        work.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        history = state["history"]
    for epoch in range(len(history), args.epochs):
        start, sent = time.process_time(), SentBytes()
        with sent:
            loss = work.epoch()
        seconds = total(time.process_time() - start, group)
        peak = total(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, group, dist.ReduceOp.MAX)
        record = {"loss": loss, "cpu_seconds": seconds, "peak_mib": peak, "bytes_sent": sent.count}
        last = epoch == args.epochs - 1
        if last or epoch % args.every == args.every - 1:
            record["accuracy"] = work.accuracy()
        history.append(record)
        if first:
            said = "  ".join(f"{key} {value:.6g}" for key, value in record.items())
            print(f"{name} {epoch + 1}/{args.epochs}  {said}", flush=True)
            state = {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}
            written = checkpoint.with_suffix(".tmp")
            torch.save({**state, "random": torch.get_rng_state(), "history": history}, written)
            written.replace(checkpoint)
    result = {**vars(args), "processes": 1 if group is None else group.size(), "history": history}
    if first:
        text = json.dumps(result, default=str, indent=1)
        (args.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return result


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", choices=["whole", "partitions", "rows", "stream"], default="whole", help="default %(default)s")
    for flag, default, text in (
        ("nodes", 100_000, "nodes of the graph, which has ten times as many edges"),
        ("epochs", 30, "epochs; one step each, but for partitions"),
        ("every", 5, "epochs between two tests"),
        ("parts", 10, "parts of the nodes, for partitions"),
        ("chunk", 2**16, "rows of a chunk, for stream"),
        ("hidden", 32, "dimension of the hyperbolic spaces"),
        ("layers", 1, "blocks"),
        ("seed", 0, "of the data and of the weights"),
    ):
        add(f"--{flag}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    add("--lr", type=float, default=0.01, metavar="X", help="learning rate (default 0.01)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 (default cpu)")
    add("--out", type=Path, default=Path("runs/large_graph"), metavar="FOLDER", help="data, checkpoints, results")
    add("--resume", action="store_true", help="go on where a run of this mode and size stopped")
    args = parser.parse_args(argv)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and args.mode in {"whole", "partitions"}:
        parser.error("--mode must be rows or stream under torchrun: edges join rows of different processes")
    args.out.mkdir(parents=True, exist_ok=True)
    if not several:
        return train(args, None)
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    try:
        return train(args, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
