"""Which edges of a graph are missing? HGCN's protocol (Chami et al. 2019), with the controls that it needs.

A tenth of the edges is hidden to measure, a twentieth to choose by, each beside as many pairs that are none; message
passing sees the rest. The pairs beside the edges that are learned are none of these, but may be hidden edges: what
avoided those would tell where they are. An encoder gives every node 16 numbers, a decoder scores pairs:

    hgcn, lgcn, hgat      points of hyperbolic space, Fermi-Dirac decoder (r - d^2) / t on their distance
    twin                  HGCN's flat twin: the same linear maps and averages, the same decoder on flat points
    gcn, gat, sage, mlp   flat points of other encoders; the MLP does not see the graph
    resgcn                GCN as GAT and SAGE are built here, with batch norm and residuals
    gcn-bias, gat-bias .. flat points of 15 numbers, and the 16th of each node added to the score
    common                the number of common neighbours: nothing is trained

GAT and SAGE are those of ``experiments.models.message_passing``. All are trained alike; the validation pairs of seed 0
choose rate and dropout from one grid, those of each seed the epoch, and training ends when they have not improved for
``--patience`` epochs. ROC AUC and average precision.

    python -m experiments.link_prediction
    python -m experiments.link_prediction --dataset disease_lp --data ../shared/data --seeds 5
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn

from experiments.data import datasets, transfers
from experiments.engine import options, runs, tables
from experiments.engine.scores import average_precision, roc_auc
from experiments.models.baselines import MLP
from experiments.models.message_passing import Kind, MessagePassing
from holonomy.layers import GCN, FermiDiracDecoder
from holonomy.manifolds import Lorentz
from holonomy.models import HGCN
from holonomy.ops.propagation import averaging
from holonomy.optim import RiemannianAdam

CURVED: dict[str, Literal["hgcn", "lgcn", "hgat"]] = {"hgcn": "hgcn", "lgcn": "lgcn", "hgat": "hgat"}
CONVOLUTIONS: dict[str, Kind] = {"resgcn": "gcn", "gat": "gat", "sage": "sage"}
FLAT = ("twin", "gcn", *CONVOLUTIONS, "mlp")
MODELS = (*CURVED, *FLAT, *(f"{name}-bias" for name in FLAT), "common")
DATASETS = ("tree", "disease_lp", "airport", "cora", "pubmed")
RATES, DROPOUTS = (0.003, 0.01), (0.0, 0.3)
DIM = 16


class Twin(nn.Module):
    """HGCN's layers in flat space: linear maps, each followed by the average over a node and its neighbours."""

    def __init__(self, features: int, hidden: int, out: int, *, dropout: float) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(features, hidden), nn.Linear(hidden, out), nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Flat points (n, out)."""
        average = averaging(edge_index, len(x), x.dtype)
        return average(self.last(self.drop(torch.relu(average(self.first(self.drop(x)))))))


class Linker(nn.Module):
    """An encoder of the nodes and a decoder of pairs."""

    def __init__(self, model: str, features: int, dropout: float) -> None:
        super().__init__()
        name, _, self.bias = model.partition("-")
        self.hyperbolic = name in CURVED
        if self.hyperbolic:
            self.encoder: Any = HGCN(features, DIM, conv=CURVED[name], dropout=dropout)
        elif kind := CONVOLUTIONS.get(name):
            self.encoder = MessagePassing(kind, features, DIM, DIM, layers=2, level="node", dropout=dropout)
        else:
            kinds = {"twin": Twin, "gcn": GCN, "mlp": MLP}
            self.encoder = kinds[name](features, DIM, DIM, dropout=dropout)
        # In flat space only r and t of the decoder are read.
        self.decoder = FermiDiracDecoder(self.encoder.manifold_out if self.hyperbolic else Lorentz(-1.0))

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        """Logits of pairs (2, p)."""
        return self.scores(self.encoder(x, edge_index), pairs)

    def scores(self, points: Tensor, pairs: Tensor) -> Tensor:
        """Logits of pairs (2, p) of encoded nodes."""
        if self.hyperbolic:
            return self.decoder(points[pairs[0]], points[pairs[1]])
        raised = torch.zeros(())
        if self.bias:
            points, heights = points[:, 1:], points[:, 0]
            raised = heights[pairs].sum(0)
        squares = (points[pairs[0]] - points[pairs[1]]).square().sum(1)
        return (self.decoder.radius + raised - squares) * (-self.decoder.log_temperature).exp()


def tree(seed: int = 0, nodes: int = 500, features: int = 11) -> tuple[Tensor, Tensor]:
    """A random tree whose features change a little from parent to child: (n, features), (2, n - 1)."""
    rng = np.random.default_rng(seed)
    parent = transfers.grown(rng, nodes)
    x = rng.standard_normal((nodes, features))
    for node in range(1, nodes):
        x[node] = x[parent[node]] + x[node]
    pairs = np.stack([parent[1:], np.arange(1, nodes)])
    return torch.from_numpy(x / x.std(0)).float(), torch.from_numpy(pairs)


def load(name: str, folder: Path | None) -> tuple[Tensor, Tensor]:
    """Features, dense, and every edge once."""
    if name == "tree":
        return tree()
    data = datasets.prepared(datasets.load(name, folder), "row" if name in {"cora", "pubmed"} else "standard")
    x = data.x if data.x.layout == torch.strided else data.x.to_dense()
    return x, data.edge_index[:, data.edge_index[0] < data.edge_index[1]]


def numbered(edges: Tensor, nodes: int) -> Tensor:
    """One number for each edge, in order, as ``strangers`` looks them up."""
    low, high = edges.sort(dim=0).values
    return (low * nodes + high).sort().values


def strangers(taken: Tensor, nodes: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw pairs (2, count) that are none of the edges with these numbers."""
    found = taken.new_empty(2, 0)
    while found.shape[1] < count:
        ends = torch.randint(nodes, (2, count + count // 8 + 8), generator=generator)
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        number = low * nodes + high
        place = torch.searchsorted(taken, number).clamp(max=len(taken) - 1)
        new = (low != high) & (taken[place] != number)
        found = torch.cat([found, torch.stack([low[new], high[new]])], dim=1)
    return found[:, :count]


def split(edges: Tensor, nodes: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Edges and pairs that are none, to learn from, to choose by and to measure."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = edges[:, torch.randperm(edges.shape[1], generator=generator)]
    test, val = max(edges.shape[1] // 10, 1), max(edges.shape[1] // 20, 1)
    parts = dict(zip(("test", "val", "train"), shuffled.tensor_split([test, test + val], dim=1), strict=True))
    taken = numbered(edges, nodes)
    return {name: (part, strangers(taken, nodes, part.shape[1], generator)) for name, part in parts.items()}


def measured(logits: Tensor, count: int) -> dict[str, float]:
    """ROC AUC and average precision of logits, the true pairs first."""
    truth = torch.arange(len(logits)) < count
    return {"auc": roc_auc(logits, truth), "ap": average_precision(logits, truth)}


def common(both: Tensor, pairs: Tensor, nodes: int) -> Tensor:
    """How many neighbours the nodes of pairs (2, p) share, (p,)."""
    near = scipy.sparse.csr_array((np.ones(both.shape[1]), both.numpy()), shape=(nodes, nodes))
    return torch.from_numpy((near[pairs[0].numpy()] * near[pairs[1].numpy()]).sum(axis=1))


def train(
    model: str, x: Tensor, edges: Tensor, seed: int, rate: float, dropout: float, epochs: int, patience: int
) -> dict[str, Any]:
    """Train one model, and measure it at the epoch that the validation pairs like best."""
    parts = split(edges, len(x), seed)
    known, _ = parts["train"]
    both = torch.cat([known, known.flip(0)], dim=1)
    asked = {name: (torch.cat(parts[name], dim=1), parts[name][0].shape[1]) for name in ("val", "test")}
    if model == "common":
        return {name: measured(common(both, pairs, len(x)), count) for name, (pairs, count) in asked.items()} | {
            "parameters": 0
        }
    runs.seed_everything(seed)
    network = Linker(model, x.shape[1], dropout)
    optimizer = RiemannianAdam(network.parameters(), lr=rate)
    # Not all edges: negatives that are never a hidden edge would give it away.
    generator, taken = torch.Generator().manual_seed(seed), numbered(known, len(x))
    best: dict[str, Any] = {"val": {"auc": -1.0}, "epoch": 0}
    for epoch in range(1, epochs + 1):
        network.train()
        optimizer.zero_grad()
        pairs = torch.cat([known, strangers(taken, len(x), known.shape[1], generator)], dim=1)
        truth = (torch.arange(pairs.shape[1]) < known.shape[1]).float()
        loss = nn.functional.binary_cross_entropy_with_logits(network(x, both, pairs), truth)
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()} at epoch {epoch}: try a smaller learning rate")
        loss.backward()
        optimizer.step()
        if epoch % 5 == 0 or epoch == epochs:
            network.eval()
            with torch.no_grad():
                points = network.encoder(x, both)
                val, test = ((network.scores(points, pairs), count) for pairs, count in asked.values())
            found = measured(*val)
            if found["auc"] > best["val"]["auc"]:
                best = {"val": found, "test": measured(*test), "epoch": epoch}
            elif epoch - best["epoch"] >= patience:
                break
    return best | {"parameters": sum(parameter.numel() for parameter in network.parameters())}


def row(model: str, x: Tensor, edges: Tensor, run: runs.Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Search the grid with seed 0, then run all seeds."""

    def part(seed: int, rate: float, dropout: float) -> dict[str, Any]:
        key = f"{model}-{options.word(rate)}-{options.word(dropout)}-{seed}"
        return run.part(key, lambda: train(model, x, edges, seed, rate, dropout, *lasting))

    lasting = (arguments.epochs, arguments.patience)
    grid = list(itertools.product(arguments.rates, arguments.dropouts))[: 1 if model == "common" else None]
    chosen = grid[int(np.argmax([part(0, *point)["val"]["auc"] for point in grid]))]
    records = [part(seed, *chosen) for seed in range(arguments.seeds)]
    summary = {name: runs.summary([record["test"][name] for record in records]) for name in ("auc", "ap")}
    if not arguments.quiet:
        print(f"{model}: {100 * summary['auc']['mean']:.1f}", file=sys.stderr)
    return {"model": model, "rate": chosen[0], "dropout": chosen[1], "summary": summary, "seeds": records}


def text(content: Mapping[str, Any]) -> str:
    """The table."""
    lines = [f"{content['dataset']}: {content['nodes']} nodes, {content['edges']} edges; test pairs, %", ""]
    lines.append(f"{'':12s}{'ROC AUC':>14s}{'AP':>14s}{'parameters':>12s}")
    for one in content["rows"]:
        cells = "".join(f"{100 * s['mean']:8.1f} ± {100 * s['std']:3.1f}" for s in one["summary"].values())
        lines.append(f"{one['model']:12s}{cells}{one['seeds'][0]['parameters']:12d}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser what this script asks."""
    add = parser.add_argument
    add("--dataset", choices=DATASETS, default="tree", help="default tree, generated")
    add("--data", type=Path, metavar="FOLDER", help="folder of the npz files")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    add("--seeds", type=int, default=3, metavar="N", help="seeds 0 .. N-1 (default 3)")
    add("--epochs", type=int, default=500, metavar="N", help="at most (default 500)")
    add("--patience", type=int, default=100, metavar="N", help="epochs without improvement (default 100)")
    add("--rates", type=options.number, nargs="+", default=list(RATES), metavar="X", help=f"searched (default {RATES})")
    add("--dropouts", type=options.number, nargs="+", default=list(DROPOUTS), metavar="X", help=f"(default {DROPOUTS})")


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells one run from another."""
    if not min(arguments.rates) > 0:
        raise options.RefusedError(f"--rates must be positive, got {arguments.rates}")
    if not all(0 <= dropout <= 1 for dropout in arguments.dropouts):
        raise options.RefusedError(f"--dropouts must lie in [0, 1], got {arguments.dropouts}")
    # What cannot be read is refused before --overwrite removes anything.
    load(arguments.dataset, arguments.data)
    asked = {name: getattr(arguments, name) for name in ("dataset", "epochs", "patience")}
    return {**asked, "negatives": "none of the edges that are learned"}


def compute(arguments: argparse.Namespace, run: runs.Run) -> dict[str, Any]:
    """A row for each model."""
    x, edges = load(arguments.dataset, arguments.data)
    rows = [row(model, x, edges, run, arguments) for model in arguments.models]
    return {"dataset": arguments.dataset, "nodes": len(x), "edges": edges.shape[1], "rows": rows}


SCRIPT = tables.Script(
    module="experiments.link_prediction",
    about=__doc__ or "",
    options=add_options,
    config=config,
    compute=compute,
    text=text,
    folder="runs/links-{dataset}",
    at_least_one=("seeds", "epochs", "patience"),
    cpu_only=True,
)

main = functools.partial(tables.main, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
