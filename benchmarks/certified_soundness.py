"""Certificates against a search for points that break them: small models of many options, three threats. None may.

    python -m benchmarks.certified_soundness --out benchmarks/results/certified_soundness.json

Each model is trained for some steps from its own seed. For each threat and some nodes, balls of about the certified
radius and of three times that are searched: random points of the sphere, then descent of the margins from all of them.
A point breaks a bound where a margin of the float64 model is below the certificate's. The file is written after each
model; called again, the benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.engine.runs import command_line, commit
from holonomy.layers import GCN, Propagation
from holonomy.models import Hypformer
from holonomy.theory.affine.arithmetic.ellipsoids import Threat
from holonomy.theory.affine.enclosure import Enclosure

NODES, FEATURES, HIDDEN, CLASSES = 10, 4, 8, 3
THREATS: tuple[Threat, ...] = ("node", "frobenius", "each")
OPTIONS: list[dict[str, Any]] = [
    {"layers": 1},
    {"layers": 1, "heads": 2, "power": 3.0, "graph_encoder": None},
    {"layers": 1, "average": "midpoint", "decoder": "mlr"},
    {"layers": 2, "heads": 2, "graph_encoder": None},
    {"layers": 2, "average": "midpoint", "norm_eps": 0.1, "decoder": "prototypes"},
    {"layers": 3, "norm_eps": 0.5, "graph_encoder": None},
    {"layers": 1, "attention": "softmax", "graph_encoder": None},
    {"layers": 2, "attention": "softmax", "heads": 4},
    {"layers": 2, "attention": "softmax", "similarity": "lorentz_squared", "heads": 2, "curvature": -2.0},
    {"layers": 2, "attention": "softmax", "similarity": "geodesic", "graph_encoder": None, "decoder": "mlr"},
    {"layers": 1, "graph_encoder": "propagation"},
    {"transformer": False, "graph_encoder": "residual"},
    {"layers": 2, "attention": "softmax", "heads": 2, "decoder": "prototypes", "norm_eps": 0.1},
    {"layers": 2, "heads": 2, "power": 1.5, "decoder": "mlr", "graph_encoder": "propagation"},
    {"layers": 1, "norm": "rms"},
    {"layers": 2, "norm": "rms", "attention": "softmax", "heads": 2, "decoder": "prototypes"},
    {"layers": 1, "graph_encoder": "own"},
    {"layers": 2, "heads": 2, "decoder": "mlr", "graph_encoder": "own"},
]


class Means(nn.Module):
    """A graph encoder that the library has no rule for: means of neighbours, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(FEATURES, HIDDEN)
        self.third, self.fourth = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Of the features ``(node, feature)``."""
        source, target = edge_index
        degree = target.bincount(minlength=len(x)).clamp(min=1)[:, None]
        means = torch.zeros_like(x).index_add(0, target, x[source]) / degree
        hidden = torch.relu(self.first(x) + self.second(means))
        means = torch.zeros_like(hidden).index_add(0, target, hidden[source]) / degree
        return self.third(hidden) + torch.relu(self.fourth(means))


def trained(options: dict[str, Any], seed: int) -> tuple[Hypformer, Tensor, Tensor]:
    """A model of float64 after some steps, its features and its edges, a random tree."""
    torch.manual_seed(seed)
    parents = torch.tensor([int(torch.randint(i, ())) for i in range(1, NODES)])
    edges = torch.stack([torch.arange(1, NODES), parents])
    edge_index = torch.cat([edges, edges.flip(0)], 1)
    encoders: dict[str, Callable[[], nn.Module]] = {
        "propagation": lambda: Propagation(FEATURES, HIDDEN, HIDDEN, steps=3),
        "residual": lambda: GCN(FEATURES, HIDDEN, HIDDEN, layers=3, residual=True),
        "own": Means,
    }
    named = options.get("graph_encoder", "gcn")
    encoder = encoders[named]() if named in encoders else named
    given: dict[str, Any] = {**options, "graph_encoder": encoder, "level": "node"}
    model = Hypformer(FEATURES, HIDDEN, CLASSES, **given).double()
    x, labels = torch.randn(NODES, FEATURES).double(), torch.randint(CLASSES, (NODES,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(25):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, edge_index), labels).backward()
        optimizer.step()
    return model.eval(), x, edge_index


def logits(model: Hypformer, x: Tensor, edge_index: Tensor, node: int) -> Callable[[Tensor], Tensor]:
    """The node's logits for many changes ``(change, node, feature)`` of all features: graphs side by side."""

    def of(change: Tensor) -> Tensor:
        graphs = torch.arange(len(change))
        edges = (edge_index[:, None] + NODES * graphs[:, None]).flatten(1)
        scores = model((x + change).flatten(0, 1), edges, graphs.repeat_interleave(NODES))
        return scores.unflatten(0, (-1, NODES))[:, node]

    return of


def kept(change: Tensor, threat: Threat, node: int, radius: float) -> Tensor:
    """The changes scaled into the ball of a threat."""
    if threat == "node":
        change = change * (torch.arange(NODES) == node)[:, None]
    size = change.norm(dim=-1, keepdim=True) if threat == "each" else change.norm(dim=(-2, -1), keepdim=True)
    return change * (radius / size.clamp(min=1e-300)).clamp(max=1.0)


def searched(
    function: Callable[[Tensor], Tensor], ball: tuple[Threat, int, float], target: int, points: int, seed: int
) -> tuple[Tensor, int]:
    """The least margin to each class over random points of a ball and descents from them; how many points."""
    threat, node, radius = ball
    generator = torch.Generator().manual_seed(seed)
    change = kept(torch.randn(points, NODES, FEATURES, generator=generator).double() * 1e6, threat, node, radius)
    least, tried = torch.full((CLASSES,), torch.inf).double(), 0
    others = [k for k in range(CLASSES) if k != target]
    aim = torch.tensor(others)[torch.arange(points) % len(others)]
    for step in range(6):
        change = change.detach().requires_grad_()
        scores = function(change)
        margins = scores[:, target, None] - scores
        least, tried = torch.minimum(least, margins.detach().amin(0)), tried + len(change)
        (grad,) = torch.autograd.grad(margins.gather(1, aim[: len(change), None]).sum(), change)
        pull = kept(grad * 1e30, threat, node, radius)
        change = kept(change - (2.0 if step < 2 else 0.3) * pull, threat, node, radius)
    return least, tried


def measured(options: dict[str, Any], seed: int, points: int) -> dict[str, Any]:
    """The record of one model."""
    model, x, edge_index = trained(options, seed)
    enclosure, balls = Enclosure(model, x, edge_index), list[dict[str, Any]]()
    for threat, node in itertools.product(THREATS, (0, 5)):
        target, one = enclosure.logits[node].argmax()[None], torch.tensor([node])
        radius = torch.tensor([0.4]).double()
        while not bool((enclosure.margins(one, one, radius, target, threat).best > 0).all()) and radius > 1e-6:
            radius = radius / 2
        for factor in (1.0, 3.0):
            found = enclosure.margins(one, one, radius * factor, target, threat)
            ball = (threat, node, radius.item() * factor)
            function = logits(model, x, edge_index, node)
            least, tried = searched(function, ball, int(target), points, seed + node)
            others = torch.arange(CLASSES) != target
            broken = [int((bound[0] > least)[others].sum()) for bound in (found.best, found.affine, found.cap)]
            margin = (enclosure.logits[node, target] - enclosure.logits[node])[others]
            share = ((margin - least[others]) / (margin - found.best[0][others])).amax().item()
            balls.append(
                {"threat": threat, "node": node, "radius": ball[2], "points": tried, "violations": sum(broken),
                 "change found / certified": share}
            )  # fmt: skip
    return {"options": str(options), "seed": seed, "balls": balls}


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over models, and how near the search came by threat."""
    balls = [ball for record in records for ball in record["balls"]]
    near = {t: sorted(b["change found / certified"] for b in balls if b["threat"] == t) for t in THREATS}
    return {
        "models": len(records), "balls": len(balls), "points": sum(b["points"] for b in balls),
        "violations": sum(b["violations"] for b in balls),
        "median change found / certified": {t: values[len(values) // 2] for t, values in near.items() if values},
        "largest change found / certified": {t: values[-1] for t, values in near.items() if values},
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Search; return 1 if a bound was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--models", type=int, default=36, help="how many models, each of its own seed (default 36)")
    parser.add_argument("--points", type=int, default=600, help="random points in each ball (default 600)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write, and to go on from")
    words = sys.argv[1:] if argv is None else argv
    given = parser.parse_args(words)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = json.loads(given.out.read_text("utf-8"))["records"] if given.out.exists() else []
    source = {"command": command_line("benchmarks.certified_soundness", words), "commit": commit()}
    for seed in range(len(records), given.models):
        records.append(measured(OPTIONS[seed % len(OPTIONS)], seed, given.points))
        measures = {"threads": torch.get_num_threads(), "summary": summary(records), "records": records}
        content = source | measures
        given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(records[-1], file=sys.stderr, flush=True)
    found = summary(records)
    print(json.dumps(found, indent=1))
    return int(found["violations"] > 0)


if __name__ == "__main__":
    sys.exit(main())
