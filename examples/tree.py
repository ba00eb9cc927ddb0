"""A tree embedded in the hyperbolic plane, so that distances are numbers of hops.

A point a node, moved by RiemannianAdam; the curvature learns beside the points. The control has flat points.

    python -m examples.tree
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from holonomy import Lorentz, LorentzEmbedding, RiemannianAdam


def grown(nodes: int) -> tuple[list[int], Tensor]:
    """Return the parent of each node of a random tree (node 0 is its own), and hops between all nodes (n, n)."""
    parent, hops = [0], torch.zeros(nodes, nodes)
    for node in range(1, nodes):
        parent.append(int(torch.randint((node - 1) // 3, (node + 1) // 2, ())))
        hops[node, :node] = hops[:node, node] = hops[parent[node], :node] + 1
    return parent, hops


def drawing(parent: list[int], depth: Tensor) -> Tensor:
    """Return places (n, 2) to start from: as far out as a node is deep, each subtree in a sector of its own."""
    nodes = range(1, len(parent))
    leaves, begin, used = [0] * len(parent), [0] * len(parent), [0] * len(parent)
    for node in (*reversed(nodes), 0):
        leaves[node] = max(leaves[node], 1)
        leaves[parent[node]] += leaves[node] if node else 0
    for node in nodes:
        begin[node] = used[node] = used[parent[node]]
        used[parent[node]] += leaves[node]
    angle = (torch.tensor(begin) + torch.tensor(leaves) / 2) * (2 * math.pi / leaves[0])
    return 0.5 * depth[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)


def fit(places: nn.Module, distance: Callable[[Tensor, Tensor], Tensor], hops: Tensor, steps: int) -> float:
    """Train until distances are hops, in relative terms; return the mean relative error."""
    i, j = torch.triu_indices(len(hops), len(hops), offset=1, device=hops.device)
    optimizer = RiemannianAdam(places.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    error = torch.zeros(())
    for step in range(steps):
        x = places(torch.arange(len(hops), device=hops.device))
        error = distance(x[i], x[j]) / hops[i, j] - 1
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step:4d}  error {error.abs().mean().item():.3f}")
    return error.abs().mean().item()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/tree"), help="folder of the errors and the picture")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    parent, hops = grown(args.nodes)
    start, hops = drawing(parent, hops[0]), hops.to(args.device)
    manifold = Lorentz(-1.0, learnable=True)
    points = manifold.expmap0(functional.pad(start, (1, 0)))
    places = LorentzEmbedding.from_pretrained(points, manifold, freeze=False).to(args.device)
    errors = {"hyperbolic": fit(places, manifold.dist, hops, args.steps)}
    flat = nn.Embedding.from_pretrained(start, freeze=False).to(args.device)
    errors["flat"] = fit(flat, lambda x, y: (x - y).norm(dim=-1), hops, args.steps)
    errors["curvature"] = manifold.curvature.item()

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tree.json").write_text(json.dumps(errors), encoding="utf-8")
    with torch.no_grad():
        x = places(torch.arange(args.nodes, device=args.device))
        parents = x[parent]
        # Each edge is the shortest way, and bends on the disk.
        ways = [manifold.expmap(parents, t * manifold.logmap(parents, x)) for t in torch.linspace(0, 1, 20)]
        lines = manifold.to_poincare(torch.stack(ways, 1)) * math.sqrt(-manifold.curvature.item())
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    axes.plot(torch.linspace(-math.pi, math.pi, 200).cos(), torch.linspace(-math.pi, math.pi, 200).sin(), "0.7")
    for line in lines.cpu():
        axes.plot(*line.T, color="0.5", linewidth=0.8)
    axes.scatter(*lines[:, -1].T.cpu(), c=hops[0].cpu(), s=20, zorder=2)
    axes.set(title=f"two numbers a node keep distances to {errors['hyperbolic']:.0%}", aspect="equal")
    axes.set_axis_off()
    figure.savefig(args.out / "tree.png")
    print(errors)
    return errors


if __name__ == "__main__":
    main()
