"""The first minute: train a hyperbolic transformer, compare it, certify it, draw it.

1. Which trait has a species? Some species of a tree are sources: their trait is seen, and each has a gene of its own.
   The others inherited the trait of the source next to them, or acquired that of the source with their gene, wherever
   in the tree it is. A graph convolution finds the first kind; attention finds the second, too.
2. How far may the features of a species move before the model gives it another trait? Radii that are proved.
3. A map of the tree: two numbers a species, whose distances on the hyperbolic plane are hops.
4. What do the papers claim, and what holds? Three verdicts.

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
from torch import Tensor, nn
from torch.nn import functional

from holonomy import Hypformer, Lorentz, LorentzEmbedding, RiemannianAdam
from holonomy.layers import GCN
from holonomy.structures import join_graphs
from holonomy.theory import certified_radius, verify

SPECIES, SOURCES, TRAITS = 48, 8, 4
KINDS = ("source", "inherited", "acquired")
CLAIMS = ("distances.closure", "hyperbolic.midpoint", "distances.naive")


def tree() -> dict[str, Tensor]:
    """Draw a tree: parents (n,), kinds (n,), traits y (n,), features x (n, 15) and edges in both directions."""
    parent = torch.tensor([0] + [int(torch.randint((one - 1) // 3, (one + 1) // 2, ())) for one in range(1, SPECIES)])
    source = torch.zeros(SPECIES, dtype=torch.bool)
    source[torch.randperm(SPECIES)[:SOURCES]] = True
    gene, trait_of = torch.randint(SOURCES, (SPECIES,)), torch.randint(TRAITS, (SOURCES,))
    gene[source] = torch.randperm(SOURCES)
    kind, y = torch.where(source, 0, 2), trait_of[gene]
    down = torch.stack([parent[1:], torch.arange(1, SPECIES)])
    edges = torch.cat([down, down.flip(0)], dim=1)
    for one in (~source).nonzero().flatten().tolist():
        beside = edges[0, (edges[1] == one) & source[edges[0]]]
        if len(beside) == 1 and torch.rand(()) < 0.6:
            kind[one], y[one] = 1, y[beside[0]]
    seen = functional.one_hot(y, TRAITS) * source[:, None]
    x = torch.cat([functional.one_hot(kind, 3), functional.one_hot(gene, SOURCES), seen], dim=1).float()
    return {"x": x, "edge_index": edges, "parent": parent, "kind": kind, "y": y}


def logits(model: nn.Module, trees: dict[str, Tensor]) -> Tensor:
    """Scores of the traits of all species; a transformer looks within a tree, a convolution along edges."""
    batch = [trees["batch"]] if isinstance(model, Hypformer) else []
    return model(trees["x"], trees["edge_index"], *batch)


def train(model: nn.Module, trees: list[dict[str, Tensor]], steps: int) -> None:
    """Learn the traits of all species that are no sources."""
    optimizer = RiemannianAdam(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20) * (1 - step / steps))
    model.train()
    for step in range(steps):
        part = trees[step % len(trees)]
        asked = part["kind"] > 0
        loss = functional.cross_entropy(logits(model, part)[asked], part["y"][asked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"  step {step:3d}  loss {loss.item():.3f}")


def drawing(parent: list[int]) -> Tensor:
    """Return places (n, 2) to start a map from: as far out as a species is deep, each subtree in a sector."""
    depth, leaves, begin = [0] * SPECIES, [0] * SPECIES, [0] * SPECIES
    for one in reversed(range(1, SPECIES)):
        leaves[one] = max(leaves[one], 1)
        leaves[parent[one]] += leaves[one]
    used = list(begin)
    for one in range(1, SPECIES):
        depth[one], begin[one] = depth[parent[one]] + 1, used[parent[one]]
        used[one], used[parent[one]] = begin[one], begin[one] + leaves[one]
    angle = (torch.tensor(begin) + torch.tensor(leaves) / 2) * (2 * math.pi / leaves[0])
    return 0.5 * torch.tensor(depth)[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)


def mapped(parent: list[int], steps: int) -> tuple[LorentzEmbedding, float]:
    """Return places on the hyperbolic plane, and the mean relative error of their distances."""
    hops = torch.zeros(SPECIES, SPECIES)
    for one in range(1, SPECIES):
        hops[one, :one] = hops[:one, one] = hops[parent[one], :one] + 1
    manifold = Lorentz(-1.0, learnable=True)
    start = manifold.expmap0(functional.pad(drawing(parent), (1, 0)))
    places = LorentzEmbedding.from_pretrained(start, manifold, freeze=False)
    optimizer = RiemannianAdam(places.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    i, j = torch.triu_indices(SPECIES, SPECIES, offset=1)
    error = torch.zeros(())
    for _ in range(steps):
        x = places(torch.arange(SPECIES))
        error = manifold.dist(x[i], x[j]) / hops[i, j] - 1
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
        schedule.step()
    return places, error.abs().mean().item()


@torch.no_grad()
def draw(places: LorentzEmbedding, one: dict[str, Tensor], nodes: Tensor, radii: Tensor) -> Figure:
    """Draw the tree on the Poincare disk, its edges as geodesics: traits on the left, certified radii on the right."""
    manifold, x = places.manifold, places(torch.arange(SPECIES))
    ends = x[one["parent"]]
    ways = torch.stack([manifold.expmap(ends, t * manifold.logmap(ends, x)) for t in torch.linspace(0, 1, 20)], dim=1)
    lines = manifold.to_poincare(ways) * (-manifold.curvature).sqrt()
    figure = Figure(figsize=(13, 6.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.add_collection(LineCollection(list(lines.numpy()), colors="0.6", linewidths=1, zorder=1))
        axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor="0.4"))
        axes.set(xlim=(-1.03, 1.03), ylim=(-1.03, 1.03), aspect="equal")
        axes.set_axis_off()
    xy = lines[:, -1]
    for number, (name, marker, size) in enumerate(zip(KINDS, "*oD", (300, 100, 80), strict=True)):
        mine = one["kind"] == number
        colours = [f"C{trait}" for trait in one["y"][mine].tolist()]
        left.scatter(*xy[mine].T, c=colours, marker=marker, s=size, edgecolors="white", zorder=2)
        left.scatter([], [], c="0.5", marker=marker, s=size, label=name)
    left.legend(loc="lower left", frameon=False)
    left.set_title("four traits by colour")
    shown = right.scatter(*xy[nodes].T, c=radii, s=130, edgecolors="white", zorder=2)
    figure.colorbar(shown, ax=right, shrink=0.8, label="radius within which no change of its features alters the trait")
    right.set_title("certified radii")
    return figure


def main(argv: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--certified", type=int, default=SPECIES, help="species to certify")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the numbers and the picture")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    trees = [join_graphs([tree() for _ in range(16)]) for _ in range(18)]
    trees = [{name: value.to(args.device) for name, value in part.items()} for part in trees]
    learn, test, one = trees[:16], trees[16:], tree()
    features, convolutions = one["x"].shape[1], {"layers": 6, "residual": True}
    encoder = GCN(features, 64, 64, **convolutions)
    transformer = Hypformer(features, 64, TRAITS, layers=1, power=3.0, graph_encoder=encoder, level="node")
    print("1. Which trait has a species? Right answers on trees that were not seen:")
    found: dict = {"right": {}}
    for name, model in (("transformer", transformer), ("convolution", GCN(features, 64, TRAITS, **convolutions))):
        train(model.to(args.device), learn, args.steps)
        with torch.no_grad():
            right = torch.cat([logits(model.eval(), part).argmax(-1) == part["y"] for part in test]).float()
        kind = torch.cat([part["kind"] for part in test])
        found["right"][name] = {KINDS[number]: right[kind == number].mean().item() for number in (1, 2)}
        print(f"  {name}", *(f"{kind} {share:.1%}" for kind, share in found["right"][name].items()), sep="  ")

    asked = (one["kind"] > 0).nonzero().flatten()[: args.certified]
    radii = certified_radius(transformer.cpu().double().eval(), one["x"].double(), one["edge_index"], asked)
    found["radii"] = radii.tolist()
    print("2. How far may the features of a species move before its trait changes? A gene is exchanged by 1.41.")
    print(f"  proved: {radii.min():.3f} to {radii.max():.3f}, median {radii.median():.3f}")
    places, found["error of the map"] = mapped(one["parent"].tolist(), args.steps)
    print(f"3. Two numbers a species keep the distances of a tree to {found['error of the map']:.1%}.")
    print("4. What do the papers claim, and what holds?")
    found["claims"] = {verdict.claim: verdict.holds for verdict in verify(CLAIMS)}
    for claim, holds in found["claims"].items():
        print(f"  {'holds' if holds else 'FAILS'}  {claim}")

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "demo.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw(places, one, asked, radii).savefig(args.out / "disk.png")
    print(f"numbers and the picture are in {args.out}")
    return found


if __name__ == "__main__":
    main()
