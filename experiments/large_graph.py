"""Train on a graph of 10^5 to 10^7 nodes: whole, in parts, by neighbours, in chunks of rows, or on several processes.

The graph is a degree-corrected block model with class-dependent features, generated on disk, or one in the folders of
OGB's node property prediction. Modes ``whole``, ``partitions`` and ``neighbours`` have a GCN beside the transformer, on
the graph, on random parts of it (the paper's protocol) or on sampled neighbourhoods; all three are tested on the whole
graph. Modes ``rows``, ``stream`` and ``batches`` read features that were propagated ahead of training, so that no part
loses an edge: in one pass over all rows, in chunks of a file, or in random parts of the rows, each of which makes a
step and attends within itself; they are tested with attention over all rows. Under torchrun the first two share the
rows among processes.

Hypformer is compared (``--model``) with its twin in Euclidean space and SGFormer in all modes, with a GCN in the first
three, and in the last three with an MLP of a node's own features, SGC (a linear map of the features propagated twice)
and SIGN (an MLP of those propagated zero, one and two times). Of several learning rates the best on validation nodes is
chosen. Mode ``bayes`` trains nothing: it says what can be known of the classes of a generated graph.

    python -m experiments.large_graph --nodes 100000 --mode whole
    python -m experiments.large_graph --nodes 100000 --mode partitions
    python -m experiments.large_graph --nodes 100000 --mode neighbours
    python -m experiments.large_graph --nodes 100000 --mode stream
    python -m experiments.large_graph --nodes 1000000 --mode batches --parts 10
    torchrun --nproc-per-node 2 -m experiments.large_graph --nodes 100000 --mode rows
    python -m experiments.large_graph --nodes 100000 --mode whole --model gcn --lr 0.005 0.02 0.08
    python -m experiments.large_graph --nodes 100000 --mode bayes
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

from experiments.data.best_accuracy import LEAST, best_accuracies
from experiments.data.large_graphs import STEPS, TEST, TRAIN, VALID, About, Rows, generate
from experiments.data.ogb import convert, source_of
from experiments.engine import options
from experiments.engine.options import RefusedError, guarded
from experiments.engine.runs import StaleError, commit, use_machine
from experiments.engine.scores import roc_auc
from experiments.models.at_scale import MODELS, OF_ROWS, TRANSFORMERS, build, files_of, parameters
from holonomy.distributed import stream, stream_backward, sum_gradients
from holonomy.optim import RiemannianAdam
from holonomy.structures import Graph, neighbour_batches, node_partitions

OF_GRAPHS = ("whole", "partitions", "neighbours")
MODES = (*OF_GRAPHS, "rows", "stream", "batches", "bayes")
FROM_FILES = ("stream", "batches")
# What a mode reads beside what every run does: a run is resumed with the same values.
READ = {"partitions": ("parts",), "neighbours": ("batch", "neighbours"), "stream": ("chunk",), "batches": ("parts",)}


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
    """One model in one mode: an epoch of training, and the share of test rows that are right."""

    def __init__(self, args: argparse.Namespace, lr: float, folder: Path, group: dist.ProcessGroup | None) -> None:
        self.args, self.group = args, group
        read = ("hidden", "layers", "seed", *READ.get(args.mode, ()))
        self.asked: dict[str, Any] = {"lr": lr, **{name: getattr(args, name) for name in read}}
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        self.about = About.read(folder)
        rows = range(self.about.nodes * rank // world, self.about.nodes * (rank + 1) // world)
        of_graph = args.mode in OF_GRAPHS
        files = files_of(args.model, STEPS, graph=of_graph)
        torch.manual_seed(args.seed)
        sizes = self.about.features * len(files), args.hidden, self.about.outputs, args.layers
        with options.of_the_command():
            self.model = build(args.model, *sizes, graph=of_graph).to(args.device)
            self.optimizer = RiemannianAdam(self.model.parameters(), lr=lr)
        self.chunks = Rows(folder, files, rows, args.chunk if args.mode in FROM_FILES else len(rows), args.device)
        whole = self.about.mapped(folder, "labels", "r"), self.about.mapped(folder, "split", "r")
        self.known = int((whole[0][whole[1] == TRAIN] >= 0).sum())
        self.tested = [code for code in (VALID, TEST) if (whole[1] == code).any()]
        if args.mode not in FROM_FILES:
            ((self.x, self.y, self.split),) = self.chunks
        self.edges: Any = None
        if args.mode == "neighbours":  # which are drawn on the CPU
            self.edges = self.about.incoming(folder)
        elif of_graph:
            edges = torch.from_numpy(np.array(self.about.mapped(folder, "edges", "r"))).to(args.device)
            self.edges = edges if args.mode == "partitions" else Graph(edges, self.about.nodes)

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Any]]:
        """Features, labels, what rows are for, and edges: of all nodes, or of one part after the other."""
        if self.args.mode == "batches":
            yield from ((*rows, None) for rows in self.chunks.parts(self.args.parts))
            return
        if self.args.mode == "partitions":
            drawn: Any = node_partitions(self.edges, self.about.nodes, self.args.parts)
        elif self.args.mode == "neighbours":
            seeds = (self.split == TRAIN).nonzero()[:, 0].cpu()
            drawn = neighbour_batches(self.edges, seeds, self.args.neighbours, self.args.batch)
        else:
            yield self.x, self.y, self.split, self.edges
            return
        for part in drawn:
            nodes = part.nodes.to(self.x.device)
            own = nodes[: part.batch_size]
            yield self.x[nodes], self.y[own], self.split[own], part.edge_index.to(self.x.device)

    def classified(self, x: Tensor, edges: Any, group: Any) -> Tensor:
        """Scores of rows; what mixes rows is told of the others."""
        return self.model(x, edges, group=group) if self.args.model in TRANSFORMERS else self.model(x, edges)

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
        loss = self.loss(self.classified(x, edges, self.group)[: len(y)], y, split)
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
                return self.loss(self.classified(chunk[0], None, group), *chunk[1:])

            return self.step(lambda: stream_backward(of, self.chunks, group=self.group))
        return sum(self.step(lambda part=part: self.backward(*part)) for part in self.parts())

    @torch.no_grad()
    def scores(self) -> dict[str, float]:
        """The metric of the graph on the rows that test and, under another name, on those that choose."""
        self.model.eval()
        if self.args.mode in FROM_FILES:
            scores = stream(lambda chunk, group: self.classified(chunk[0], None, group), self.chunks, group=self.group)
            parts = ((s, y, split) for s, (_, y, split) in zip(scores, self.chunks, strict=True))
        else:
            edges = self.edges
            if self.args.mode == "neighbours":
                edges = torch.stack([edges.node, edges.rows().to(edges.node.dtype)])
            if isinstance(edges, Tensor):
                edges = Graph(edges, self.about.nodes).to(self.args.device)
            parts = [(self.classified(self.x, edges, self.group), self.y, self.split)]
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


def prepared(args: argparse.Namespace, group: dist.ProcessGroup | None) -> tuple[str, Path]:
    """The name of the graph, and its folder, which is made if it is not there."""
    what = args.folder.resolve().name if args.folder else f"{args.nodes}"
    folder = args.out / (f"data-{what}" if args.folder else f"data-{what}-{args.seed}")
    if (group is None or group.rank() == 0) and not (folder / "graph.json").exists():
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
    return what, folder


def train(work: Work, name: str, group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Train, epoch by epoch, from where a killed run stopped; what was measured in each."""
    args, first = work.args, group is None or group.rank() == 0
    checkpoint, history = args.out / f"{name}.pt", []
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        _refuse_another(checkpoint, state.get("asked", {}), work.asked)
        try:
            work.model.load_state_dict(state["model"])
            work.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise StaleError(f"{checkpoint} does not fit this model ({str(error).splitlines()[0]})") from None
        torch.set_rng_state(state["random"])
        history = state["history"]
    for epoch in range(len(history), args.epochs):
        start, sent = time.process_time(), SentBytes()
        with sent:
            loss = work.epoch()
        seconds = total(time.process_time() - start, group)
        peak = total(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, group, dist.ReduceOp.MAX)
        record = {"epoch": epoch + 1, "loss": loss, "cpu_seconds": seconds, "peak_mib": peak, "bytes_sent": sent.count}
        last = epoch == args.epochs - 1
        if last or epoch % args.every == args.every - 1:
            with torch.random.fork_rng(devices=[]):  # how often one tests changes no training
                record |= work.scores()
        history.append(record)
        if first:
            said = "  ".join(f"{key} {value:.6g}" for key, value in record.items() if key != "epoch")
            print(f"{name} {epoch + 1}/{args.epochs}  {said}", flush=True)
            state = {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict(), "asked": work.asked}
            written = checkpoint.with_suffix(".tmp")
            torch.save({**state, "random": torch.get_rng_state(), "history": history}, written)
            written.replace(checkpoint)
    return history


def _refuse_another(checkpoint: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in before.items():
        if value != now[name]:
            raise StaleError(f"{checkpoint} holds a run with --{name} {value}: resume it as it was, got {now[name]}")


def searched(args: argparse.Namespace, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Train with each learning rate; the result of the one with the best validation score, and what others reached."""
    what, folder = prepared(args, group)
    size = "" if group is None else f"-{group.size()}"
    model = "" if args.model == "hypformer" else f"{args.model}-"
    name = f"{model}{args.mode}{size}-{what}"
    result: dict[str, Any] = {**vars(args), "processes": 1 if group is None else group.size(), "commit": commit()}
    best: dict[float, float] = {}
    for lr in args.lr:
        work = Work(args, lr, folder, group)
        if len(args.lr) > 1 and VALID not in work.tested:
            raise RefusedError(f"--lr must be one number where no node is for validation, got {args.lr}")
        history = train(work, name if len(args.lr) == 1 else f"{name}-{options.word(lr)}", group)
        chosen = max((record for record in history if "valid" in record), key=lambda r: r["valid"], default=None)
        if chosen and all(chosen["valid"] > other for other in best.values()):
            result |= {"chosen": {"lr": lr, **chosen}}
        best[lr] = chosen["valid"] if chosen else math.nan
        if chosen is None or result["chosen"]["lr"] == lr:
            result["history"] = history
    result |= {"valid_by_lr": best, "parameters": parameters(work.model)}
    if group is None or group.rank() == 0:
        text = json.dumps(result, default=str, indent=1)
        (args.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        if "chosen" in result:
            metric, chosen = work.about.metric, result["chosen"]
            print(f"{name}  {metric} {chosen[metric]:.4f} where valid is best, {chosen['valid']:.4f}")
    return result


def known(args: argparse.Namespace) -> dict[str, Any]:
    """What can be known of the classes of a generated graph."""
    what, folder = prepared(args, None)
    found = best_accuracies(folder)
    print("  ".join(f"{key} {value:.4f}" for key, value in found.items()))
    result = {**vars(args), "commit": commit(), "best": found}
    (args.out / f"bayes-{what}.json").write_text(json.dumps(result, default=str, indent=1) + "\n", encoding="utf-8")
    return result


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line and train."""
    parser = options.parser("experiments.large_graph", __doc__ or "")
    add = parser.add_argument
    add("--mode", choices=MODES, default="whole", help="default %(default)s")
    add("--model", choices=MODELS, default="hypformer", help="default %(default)s")
    for flag, default, text in (
        ("nodes", 100_000, "nodes of a generated graph, which has ten times as many edges"),
        ("epochs", 30, "epochs; one step each in modes whole, rows and stream"),
        ("every", 5, "epochs between two tests"),
        ("parts", 10, "parts of the nodes, for partitions and batches"),
        ("batch", 1000, "training nodes of a batch, for neighbours"),
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
    add("--neighbours", type=int, nargs="+", default=[10, 5], metavar="N", help="drawn in each step (default 10 5)")
    add(
        "--lr", type=options.number, nargs="+", default=[0.01], metavar="X", help="learning rates to try (default 0.01)"
    )
    add("--device", default="cpu", help="cpu, cuda, cuda:1 (default cpu)")
    add("--out", type=Path, default=Path("runs/large_graph"), metavar="FOLDER", help="data, checkpoints, results")
    add("--resume", action="store_true", help="go on where a run of this mode and size stopped")
    args = parser.parse_args(argv)
    if args.split and not args.folder:
        parser.error("--split needs --folder: a generated graph has one split")
    if args.folder and args.mode == "bayes":
        parser.error("--mode bayes needs a generated graph, whose model is known: leave --folder out")
    if args.nodes < LEAST and args.mode == "bayes":
        parser.error(f"--nodes must be at least {LEAST} for bayes, whose rule assumes few loops, got {args.nodes}")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and args.mode not in {"rows", "stream"}:
        parser.error("--mode must be rows or stream under torchrun, in which processes share the rows of a step")
    if args.model in OF_ROWS and args.mode in OF_GRAPHS:
        parser.error(f"--mode must be rows, stream or batches for {args.model}, which reads no edges, got {args.mode}")
    if args.model == "gcn" and args.mode not in OF_GRAPHS:
        parser.error(f"--mode must be whole, partitions or neighbours for gcn, which reads edges, got {args.mode}")
    options.at_least_one(args, "nodes", "epochs", "every", "parts", "batch", "chunk", "hidden", "layers")
    if min(args.neighbours) < 1:
        raise RefusedError(f"--neighbours must be at least 1, got {args.neighbours}")
    use_machine(None, args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.mode == "bayes":
        return known(args)
    if not several:
        return searched(args, None)
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device.startswith("cuda") else "gloo")
    try:
        return searched(args, dist.group.WORLD)
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
