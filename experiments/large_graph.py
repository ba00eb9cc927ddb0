"""Train Hypformer on a graph of 10^5 to 10^7 nodes: whole, in parts, in chunks of rows, or on several processes.

The graph is a degree-corrected block model with class-dependent features, generated on disk, or one in the folders of
OGB's node property prediction. Modes ``whole`` and ``partitions`` have a GCN beside the transformer, on the graph or on
random parts of it (the paper's protocol). Modes ``rows`` and ``stream`` read features that were propagated ahead of
training, in one pass over all rows or in chunks of a file; under torchrun they share the rows among processes.

    python -m experiments.large_graph --nodes 100000 --mode whole
    python -m experiments.large_graph --nodes 100000 --mode partitions
    python -m experiments.large_graph --nodes 100000 --mode stream
    torchrun --nproc-per-node 2 -m experiments.large_graph --nodes 100000 --mode rows
    python -m experiments.large_graph --folder dataset/ogbn_arxiv --mode whole
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.data.large_graphs import STEPS, TEST, TRAIN, VALID, About, Rows, generate
from experiments.data.ogb import convert, source_of
from experiments.engine.options import RefusedError, guarded
from experiments.engine.scores import roc_auc
from holonomy.distributed import stream, stream_backward, sum_gradients
from holonomy.models import Hypformer
from holonomy.optim import RiemannianAdam
from holonomy.structures import Graph, node_partitions


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this process hands to collectives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
            self.count += sum(x.numel() * x.element_size() for x in tensors)
        return func(*args, **(kwargs or {}))


class Accuracy:
    """The share of rows whose class is found, over all processes."""

    def __init__(self) -> None:
        self.right, self.known = 0, 0

    def add(self, scores: Tensor, y: Tensor) -> None:
        known = y[:, 0] >= 0
        self.right += int((scores.argmax(-1) == y[:, 0])[known].sum())
        self.known += int(known.sum())

    def value(self, group: dist.ProcessGroup | None) -> float:
        return total(self.right, group) / max(total(self.known, group), 1)


class Areas:
    """The mean area under the ROC curves of tasks that have both answers, over all processes."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def add(self, scores: Tensor, y: Tensor) -> None:
        self.rows.append(torch.stack([scores.double(), y.double()], -1).cpu())

    def value(self, group: dist.ProcessGroup | None) -> float:
        scores, y = gathered(torch.cat(self.rows), group).unbind(-1)
        both = [task for task in range(y.shape[1]) if {0, 1} <= {*y[:, task].tolist()}]
        areas = [roc_auc(scores[known, task], y[known, task] == 1) for task in both for known in [y[:, task] >= 0]]
        return sum(areas) / len(areas) if areas else math.nan


def gathered(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all processes, one after the other."""
    if group is None:
        return x
    counts = torch.zeros(group.size(), dtype=torch.int64)
    counts[group.rank()] = len(x)
    dist.all_reduce(counts, group=group)
    rows = x.new_zeros(int(counts.sum()), *x.shape[1:])
    start = int(counts[: group.rank()].sum())
    rows[start : start + len(x)] = x
    dist.all_reduce(rows, group=group)
    return rows


class Work:
    """One mode: an epoch of training, and the share of test rows that are right."""

    def __init__(self, args: argparse.Namespace, folder: Path, group: dist.ProcessGroup | None) -> None:
        self.args, self.group = args, group
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        self.about = About.read(folder)
        rows = range(self.about.nodes * rank // world, self.about.nodes * (rank + 1) // world)
        gcn = args.mode in {"whole", "partitions"}
        files = 1 if gcn else STEPS + 1
        torch.manual_seed(args.seed)
        self.model = Hypformer(
            self.about.features * files,
            args.hidden,
            self.about.outputs,
            layers=args.layers,
            heads=2,
            graph_encoder="gcn" if gcn else None,
        ).to(args.device)
        self.optimizer = RiemannianAdam(self.model.parameters(), lr=args.lr)
        self.chunks = Rows(folder, files, rows, args.chunk if args.mode == "stream" else len(rows), args.device)
        whole = self.about.mapped(folder, "labels", "r"), self.about.mapped(folder, "split", "r")
        self.known = int((whole[0][whole[1] == TRAIN] >= 0).sum())
        self.tested = [code for code in (VALID, TEST) if (whole[1] == code).any()]
        if args.mode != "stream":
            ((self.x, self.y, self.split),) = self.chunks
        if gcn:
            edges = torch.from_numpy(np.array(self.about.mapped(folder, "edges", "r"))).to(args.device)
            self.edges: Any = Graph(edges, self.about.nodes) if args.mode == "whole" else edges

    def parts(self, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor, Any]]:
        """Features, labels, what rows are for, and edges: of all nodes, or of one part after the other."""
        if self.args.mode != "partitions":
            yield self.x, self.y, self.split, getattr(self, "edges", None)
            return
        for part in node_partitions(self.edges, self.about.nodes, self.args.parts, generator=generator):
            yield self.x[part.nodes], self.y[part.nodes], self.split[part.nodes], part.edge_index

    def loss(self, scores: Tensor, y: Tensor, split: Tensor) -> Tensor:
        """What these rows add to the mean over all labels that train."""
        scores, y = scores[split == TRAIN], y[split == TRAIN]
        if self.about.metric == "accuracy":
            summed = nn.functional.cross_entropy(scores, y[:, 0], ignore_index=-1, reduction="sum")
        else:
            known = (y >= 0).to(scores)
            summed = nn.functional.binary_cross_entropy_with_logits(scores, y * known, known, reduction="sum")
        return summed / self.known

    def backward(self, x: Tensor, y: Tensor, split: Tensor, edges: Any) -> Tensor:
        loss = self.loss(self.model(x, edges, group=self.group), y, split)
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
    def scores(self) -> dict[str, float]:
        """The metric of the graph on the rows that test and, under another name, on those that choose."""
        self.model.eval()
        tests = torch.Generator().manual_seed(self.args.seed)  # training draws the same with and without tests
        if self.args.mode == "stream":
            scores = stream(lambda chunk, group: self.model(chunk[0], group=group), self.chunks, group=self.group)
            parts = ((s, y, split) for s, (_, y, split) in zip(scores, self.chunks, strict=True))
        else:
            parts = ((self.model(x, edges, group=self.group), y, split) for x, y, split, edges in self.parts(tests))
        found = {code: METRICS[self.about.metric]() for code in self.tested}
        for scores, y, split in parts:
            for code, metric in found.items():
                metric.add(scores[split == code], y[split == code])
        self.model.train()
        names = {VALID: "valid", TEST: self.about.metric}
        return {names[code]: metric.value(self.group) for code, metric in found.items()}


METRICS: dict[str, Any] = {"accuracy": Accuracy, "ROC-AUC": Areas}


def total(value: float, group: dist.ProcessGroup | None, how: Any = dist.ReduceOp.SUM) -> float:
    """A number of this process, over all processes."""
    found = torch.tensor(value, dtype=torch.float64)
    if group is not None:
        dist.all_reduce(found, how, group)
    return found.item()


def train(args: argparse.Namespace, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Train, epoch by epoch, from where a killed run stopped; the result."""
    what = args.folder.resolve().name if args.folder else f"{args.nodes}"
    folder = args.out / (f"data-{what}" if args.folder else f"data-{what}-{args.seed}")
    first = group is None or group.rank() == 0
    if first and not (folder / "graph.json").exists():
        # In a process of its own, so that its memory does not count.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            if args.folder:
                process.submit(convert, args.folder, folder, args.split).result()
            else:
                process.submit(generate, folder, args.nodes, args.seed).result()
    if group is not None:
        dist.barrier(group)
    if args.folder and About.read(folder).source != source_of(args.folder, args.split):
        raise RefusedError(
            f"{folder} must hold the graph of --folder and --split, or be removed, got {About.read(folder).source}"
        )
    work = Work(args, folder, group)
    size = "" if group is None else f"-{group.size()}"
    name = f"{args.mode}{size}-{what}"
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
            record |= work.scores()
        history.append(record)
        if first:
            said = "  ".join(f"{key} {value:.6g}" for key, value in record.items())
            print(f"{name} {epoch + 1}/{args.epochs}  {said}", flush=True)
            state = {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}
            written = checkpoint.with_suffix(".tmp")
            torch.save({**state, "random": torch.get_rng_state(), "history": history}, written)
            written.replace(checkpoint)
    result = {**vars(args), "processes": 1 if group is None else group.size(), "history": history}
    if VALID in work.tested:
        result["chosen"] = max((record for record in history if "valid" in record), key=lambda record: record["valid"])
    if first:
        text = json.dumps(result, default=str, indent=1)
        (args.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        if "chosen" in result:
            metric = work.about.metric
            print(
                f"{name}  {metric} {result['chosen'][metric]:.4f} where valid is best, {result['chosen']['valid']:.4f}"
            )
    return result


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", choices=["whole", "partitions", "rows", "stream"], default="whole", help="default %(default)s")
    for flag, default, text in (
        ("nodes", 100_000, "nodes of a generated graph, which has ten times as many edges"),
        ("epochs", 30, "epochs; one step each, but for partitions"),
        ("every", 5, "epochs between two tests"),
        ("parts", 10, "parts of the nodes, for partitions"),
        ("chunk", 2**16, "rows of a chunk, for stream"),
        ("hidden", 32, "dimension of the hyperbolic spaces"),
        ("layers", 1, "blocks"),
        ("seed", 0, "of the data and of the weights"),
    ):
        add(f"--{flag}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    add(
        "--folder",
        type=Path,
        help="a graph in the layout of OGB, such as dataset/ogbn_arxiv, in place of a generated one",
    )
    add("--split", metavar="NAME", help="which of the splits in that folder, if it has several")
    add("--lr", type=float, default=0.01, metavar="X", help="learning rate (default 0.01)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 (default cpu)")
    add("--out", type=Path, default=Path("runs/large_graph"), metavar="FOLDER", help="data, checkpoints, results")
    add("--resume", action="store_true", help="go on where a run of this mode and size stopped")
    args = parser.parse_args(argv)
    if args.split and not args.folder:
        parser.error("--split needs --folder: a generated graph has one split")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and args.mode in {"whole", "partitions"}:
        parser.error("--mode must be rows or stream under torchrun: edges join rows of different processes")
    args.out.mkdir(parents=True, exist_ok=True)
    if not several:
        return train(args, None)
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device.startswith("cuda") else "gloo")
    try:
        return train(args, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def command() -> int:
    """The command, whose refusals are one sentence."""

    def body() -> int:
        main()
        return 0

    return guarded(body)


if __name__ == "__main__":
    sys.exit(command())
