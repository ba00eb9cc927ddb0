"""Certified nodes: radii beside the smallest attacks found, CPU time a node, and points that break a bound (none may).

    python -m experiments.node_classification --seeds 5 --out runs/tree
    python -m benchmarks.certified_nodes --run runs/tree --nodes 50 --out tree.json
    python -m benchmarks.certified_nodes --run runs/tree --seed 1 --nodes 50 --out tree_1.json
    python -m benchmarks.certified_nodes --run runs/cora --dataset cora --data ../shared/data --out cora.json

The model is that of one seed of a run of ``experiments.node_classification``; medians of models of different seeds
differ by a tenth. With ``--threat frobenius`` the features of all nodes move together. With more than one block, or
softmax attention, attacks are searched for on a copy in which all other tokens stay after the first block, and then
lengthened until the model itself changes its class; points that break a bound are looked for by ``python -m
benchmarks.certified_soundness --out FILE``. The file is written after each node; called again, the benchmark goes on
where it was.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from experiments import node_classification
from experiments.data import datasets
from experiments.engine.attacks import (
    Logits,
    followed_logits,
    own_logits,
    random_directions,
    smallest_attack,
    whole_logits,
)
from experiments.engine.options import RefusedError, guarded
from experiments.engine.runs import command_line, commit, read_json
from holonomy.models import Hypformer
from holonomy.theory.affine.arithmetic.ellipsoids import Threat
from holonomy.theory.affine.enclosure import Enclosure
from holonomy.theory.affine.search import largest_radii

# Nodes whose radii are searched for side by side.
_TOGETHER = 64
# A change that is certified over the largest one found, in balls of such a part of a node's norm.
_CHANGES = ("change at 1%", "change at 10%")
# The largest radius that is tried.
_FARTHEST = 100.0


def lengthened(enclosure: Enclosure, node: int, change: Tensor) -> float:
    """The length at which a change along a direction, from the given length on, changes the model's own class."""
    target = enclosure.logits[node].argmax()
    for factor in (1.0, 1.01, 1.03, 1.1, 1.3, 2.0):
        moved = enclosure.x.index_add(0, torch.tensor([node]), factor * change[None])
        with torch.no_grad():
            if enclosure.model(moved, enclosure.edge_index)[node].argmax() != target:
                return factor * change.norm().item()
    return torch.inf


def searched(
    enclosure: Enclosure,
    logits: Logits,
    node: int,
    radius: float,
    points: int,
    generator: torch.Generator,
    threat: Threat = "node",
) -> dict[str, Any]:
    """Random and ascended points of a ball: how many are below the bound of a margin, and how many were tried.

    ``change`` is what the certificate says the least margin may lose, over the most that it lost at a point.
    """
    target = enclosure.logits[node].argmax()
    one = torch.tensor([node])
    found = enclosure.margins(one, one, enclosure.x.new_tensor([radius]), target[None], threat)
    dim, broken, tried, worst = moved(enclosure, threat), 0, 0, found.best[0].argmin()
    nominal = enclosure.logits[node, target] - enclosure.logits[node, worst]
    least = nominal
    change = random_directions(points, dim, generator) * radius
    for step in range(20):
        change = change.detach().requires_grad_()
        scores = logits(change)
        margins = scores[:, target, None] - scores
        for bound in (found.best, found.affine, found.cap):
            below = (margins < bound).scatter(1, target.expand(len(margins), 1), value=False)
            broken += int(below.any(-1).sum())
        tried += len(change)
        least = torch.minimum(least, margins.detach()[:, worst].amin())
        (grad,) = torch.autograd.grad(margins[:, worst].sum(), change)
        pull = grad / grad.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        change = change[: max(points // 20, 4)] - (0.5 if step < 10 else 0.1) * radius * pull[: max(points // 20, 4)]
        change = change * (radius / change.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    lost = (nominal - found.best[0, worst]) / (nominal - least)
    return {"violations": broken, "points": tried, "change": lost.item()}


def moved(enclosure: Enclosure, threat: Threat) -> int:
    """How many numbers move."""
    return enclosure.x.shape[1] if threat == "node" else enclosure.x.numel()


def measured(
    enclosure: Enclosure, node: int, found: tuple[float, float, float], steps: int, points: int, threat: Threat = "node"
) -> dict[str, Any]:
    """The record of one node, from its radius, the one without the cap, and the time of the first."""
    generator = torch.Generator().manual_seed(node)
    x, (radius, without, seconds) = enclosure.x, found
    target = int(enclosure.logits[node].argmax())
    one = torch.tensor([node])
    bounds = enclosure.margins(one, one, enclosure.x.new_tensor([radius]), torch.tensor([target]), threat).best
    record = {"radius": radius, "without_cap": without, "cpu_seconds": seconds, "violations": 0, "points": 0}
    record["margin"] = bounds.amin().item()
    if threat == "node" and enclosure.one_by_one("node"):
        change = smallest_attack(followed_logits(enclosure, node), x.shape[1], target, steps, generator, lines=20)
        return record | {"attack": lengthened(enclosure, node, change)}
    logits, dim = (own_logits if threat == "node" else whole_logits)(enclosure, node), moved(enclosure, threat)
    off = (logits(x.new_zeros(1, dim))[0] - enclosure.logits[node]).abs().amax().item()
    size = x[node].norm().item()
    for name, ball in (("", radius), ("", without), (" at 1%", 0.01 * size), (" at 10%", 0.1 * size)):
        tried = searched(enclosure, logits, node, ball, points, generator, threat)
        record["violations"] += tried["violations"]
        record["points"] += tried["points"]
        if name:
            record["change" + name] = tried["change"]
    lines = 200 if threat == "node" else 4
    attack = smallest_attack(logits, dim, target, steps, generator, lines).norm().item()
    return record | {"attack": attack, "off": off}


def rounding(enclosure: Enclosure, draws: int = 10) -> dict[str, float]:
    """How far margins of the model in float32 are from those in float64, all nodes moving by 0.3 in random directions.

    The features are numbers of float32, so that only the arithmetic of the two differs.
    """
    generator, found = torch.Generator().manual_seed(0), list[Tensor]()
    single = copy.deepcopy(enclosure.model).float()
    for _ in range(draws):
        x = (enclosure.x + 0.3 * random_directions(len(enclosure.x), enclosure.x.shape[1], generator)).float()
        with torch.no_grad():
            off = enclosure.model(x.double(), enclosure.edge_index) - single(x, enclosure.edge_index).double()
        found.append((off[:, :, None] - off[:, None]).abs().amax((1, 2)))
    off = torch.cat(found)
    return {"points": len(off), "median": off.median().item(), "largest": off.max().item()}


def summary(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Medians over nodes, and sums."""

    def median(values: list[float]) -> float:
        return torch.tensor(values, dtype=torch.float64).quantile(0.5).item()

    rows = list(records.values())
    changes = {name: torch.tensor([row[name] for row in rows if name in row]).double() for name in _CHANGES}
    shares = torch.tensor([0.5, 0.9, 1.0]).double()
    return {
        "nodes": len(rows),
        "median ratio": median([row["radius"] / row["attack"] for row in rows]),
        "median ratio without cap": median([row["without_cap"] / row["attack"] for row in rows]),
        "median radius": median([row["radius"] for row in rows]),
        "median attack": median([row["attack"] for row in rows]),
        "median CPU seconds": median([row["cpu_seconds"] for row in rows]),
        "points": sum(row["points"] for row in rows),
        "violations": sum(row["violations"] for row in rows),
    } | {f"{name}, median, 90%, all": part.quantile(shares).tolist() for name, part in changes.items() if len(part)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 1 if a bound was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of experiments.node_classification")
    parser.add_argument("--dataset", default="tree", help="what it was trained on (default tree)")
    parser.add_argument("--data", type=Path, help="folder of the npz files")
    parser.add_argument("--seed", type=int, default=0, help="of the run's models (default 0)")
    parser.add_argument("--threat", choices=("node", "frobenius"), default="node", help="what moves (default node)")
    parser.add_argument("--nodes", type=int, default=50, help="random test nodes (default 50)")
    parser.add_argument("--steps", type=int, default=120, help="of each attack (default 120)")
    parser.add_argument("--points", type=int, default=400, help="random points in each ball (default 400)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write, and to go on from")
    words = sys.argv[1:] if argv is None else argv
    given = parser.parse_args(words)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    about = read_json(given.run / "results.json")
    name, _, protocol = about["dataset"].partition("/")
    if (about["model"], name) != ("hypformer", given.dataset):
        raise RefusedError(f"--run must be of hypformer on {given.dataset}, got {about['model']} on {name}")
    settings = node_classification.Settings(**about["settings"])
    data = datasets.load(name, given.data, protocol=protocol or None, seed=given.seed)
    data = datasets.prepared(data, settings.features, settings.scale)
    model = cast("Hypformer", node_classification.build("hypformer", settings, data))
    model.load_state_dict(torch.load(given.run / f"part-seed-{given.seed}.model.pt", weights_only=True))
    enclosure = Enclosure(model.eval(), data.x, data.edge_index)
    chosen = data.test[torch.randperm(len(data.test), generator=torch.Generator().manual_seed(0))[: given.nodes]]
    whose = {"dataset": given.dataset, "seed": given.seed, "threat": given.threat}
    source = {"command": command_line("benchmarks.certified_nodes", words), "commit": commit()} | whose
    before: dict[str, Any] = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {}
    if before and any(({"seed": 0, "threat": "node"} | before)[name] != value for name, value in whose.items()):
        parser.error(f"--out must be a file of the same dataset, seed and threat, or a new one, got {given.out}.")
    records: dict[str, Any] = before.get("records", {})
    off = rounding(enclosure)
    missing = torch.tensor([node for node in chosen.tolist() if str(node) not in records], dtype=torch.long)
    for nodes in missing.split(1 if enclosure.one_by_one(given.threat) else _TOGETHER):
        began, classes = time.process_time(), enclosure.logits[nodes].argmax(-1)
        radii = largest_radii(enclosure, nodes, classes, _FARTHEST, given.threat)
        seconds = (time.process_time() - began) / len(nodes)
        without = largest_radii(enclosure, nodes, classes, _FARTHEST, given.threat, cap=False)
        for node, one, other in zip(nodes.tolist(), radii.tolist(), without.tolist(), strict=True):
            records[str(node)] = measured(
                enclosure, node, (one, other, seconds), given.steps, given.points, given.threat
            )
            content = source | {
                "settings": dataclasses.asdict(settings),
                "threads": torch.get_num_threads(),
                "summary": summary(records),
                "rounding": off,
                "records": records,
            }
            given.out.write_text(json.dumps(content, indent=1), encoding="utf-8")
            print(node, records[str(node)], file=sys.stderr, flush=True)
    found = summary(records)
    print(json.dumps(found, indent=1))
    return int(found["violations"] > 0)


if __name__ == "__main__":
    sys.exit(guarded(main, "the same command goes on"))
