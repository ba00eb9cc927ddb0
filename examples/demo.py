"""The first minute: train a hyperbolic transformer, certify it, draw it.

Some species of a tree are sources: their trait is seen, and each has a gene of its own. The others inherited the trait
of the source next to them, or acquired that of the source with their gene, anywhere in the tree: attention finds it.
How far may the features of a species move before the model gives it another trait? The radii are proved.

    python -m examples.demo
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from holonomy import Hypformer, Lorentz, RiemannianAdam
from holonomy.layers import GCN
from holonomy.structures import join_graphs
from holonomy.theory import certified_radius

SPECIES, SOURCES, TRAITS, KINDS = 48, 8, 4, ("source", "inherited", "acquired")


def tree() -> dict[str, Tensor]:
    """Return parents (n,), kinds (n,), traits y (n,), features x (n, 15) and edges in both directions (2, m)."""
    parent = torch.tensor([0] + [int(torch.randint((one - 1) // 3, (one + 1) // 2, ())) for one in range(1, SPECIES)])
    source = torch.randperm(SPECIES) < SOURCES
    gene, trait_of = torch.randint(SOURCES, (SPECIES,)), torch.randint(TRAITS, (SOURCES,))
    gene[source] = torch.randperm(SOURCES)
    kind, y = torch.where(source, 0, 2), trait_of[gene]
    down = torch.stack([parent[1:], torch.arange(1, SPECIES)])
    edges = torch.cat([down, down.flip(0)], dim=1)
    for one in (~source).nonzero().flatten().tolist():
        beside = edges[0, (edges[1] == one) & source[edges[0]]]
        if len(beside) == 1 and torch.rand(()) < 0.6:
            kind[one], y[one] = 1, y[beside[0]]
    x = torch.cat([one_hot(kind, 3), one_hot(gene, SOURCES), source[:, None] * one_hot(y, TRAITS)], dim=1).float()
    return {"x": x, "edge_index": edges, "parent": parent, "kind": kind, "y": y}


def draw(one: dict[str, Tensor], nodes: Tensor, radii: Tensor) -> Figure:
    """Draw a tree on the Poincare disk, edges as geodesics: traits on the left, certified radii on the right."""
    parent = one["parent"].tolist()
    depth, size, angle, free = ([start] * SPECIES for start in (0.0, 1, 0.0, 0))
    for child in reversed(range(1, SPECIES)):
        size[parent[child]] += size[child]
    for child in range(1, SPECIES):  # a sector of its own, as wide as its subtree is large
        above, begin = parent[child], free[parent[child]]
        free[child], free[above] = begin, begin + size[child]
        depth[child], angle[child] = depth[above] + 0.8, 2 * math.pi * (begin + size[child] / 2) / SPECIES
    manifold, outward = Lorentz(-1.0), torch.polar(torch.tensor(depth), torch.tensor(angle))
    x = manifold.expmap0(torch.stack([0 * outward.real, outward.real, outward.imag], dim=1))
    ends = x[one["parent"]]
    ways = torch.stack([manifold.expmap(ends, t * manifold.logmap(ends, x)) for t in torch.linspace(0, 1, 20)], dim=1)
    lines = manifold.to_poincare(ways).numpy()
    figure = Figure(figsize=(13, 6.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, title in ((left, "traits by colour, sources large"), (right, "certified radii")):
        axes.add_collection(LineCollection(list(lines), colors="0.6", linewidths=1, zorder=1))
        axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor="0.4"))
        axes.set(xlim=(-1.03, 1.03), ylim=(-1.03, 1.03), aspect="equal", title=title)
        axes.set_axis_off()
    sizes = torch.where(one["kind"] == 0, 350, 90)
    left.scatter(*lines[:, -1].T, c=one["y"], s=sizes, cmap="Set1", vmax=8, edgecolors="white", zorder=2)
    shown = right.scatter(*lines[nodes, -1].T, c=radii, s=130, edgecolors="white", zorder=2)
    figure.colorbar(shown, ax=right, shrink=0.8, label="radius within which no change of its features alters the trait")
    return figure


def main(argv: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--certified", type=int, default=SPECIES, help="species to certify")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the numbers and the picture")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    batches = [join_graphs([tree() for _ in range(16)]) for _ in range(17)]
    *learn, test = [{name: part.to(args.device) for name, part in batch.items()} for batch in batches]
    encoder = GCN(15, 64, 64, layers=6, residual=True)
    model = Hypformer(15, 64, TRAITS, layers=1, power=3.0, graph_encoder=encoder, level="node").to(args.device)
    optimizer = RiemannianAdam(model.parameters(), lr=0.003)
    for step in range(args.steps):
        batch = learn[step % len(learn)]
        scores, asked = model(batch["x"], batch["edge_index"], batch["batch"]), batch["kind"] > 0
        loss = cross_entropy(scores[asked], batch["y"][asked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    with torch.no_grad():
        right = model.eval()(test["x"], test["edge_index"], test["batch"]).argmax(-1) == test["y"]
    shares = {KINDS[kind]: right[test["kind"] == kind].float().mean().item() for kind in (1, 2)}
    print("right answers on trees that were not seen:", shares)
    one, radii = tree(), torch.zeros(0)
    asked = (one["kind"] > 0).nonzero().flatten()[: args.certified]
    model, x = model.cpu().double(), one["x"].double()
    for part in asked.split(10):
        radii = torch.cat([radii, certified_radius(model, x, one["edge_index"], part)])
        print(f"certified {len(radii)} of {len(asked)} species")
    print(f"certified radii: {radii.min():.3f} to {radii.max():.3f}; one gene is exchanged for another by 1.41")
    found = {"right": shares, "radii": radii.tolist()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "demo.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw(one, asked, radii).savefig(args.out / "demo.png")
    print(f"numbers and the picture are in {args.out}")
    return found


if __name__ == "__main__":
    main()
