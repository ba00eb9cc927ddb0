"""From a set to a graph: which points of the plane are neighbours in their Delaunay triangulation?

Whether two points are joined depends on all others. Attention from points to pairs of points (orders 1 -> 1 -> 2)
answers for every pair at once.

    python -m examples.sets
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import scipy.spatial
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from holonomy.models import HigherOrderTransformer


def triangulated(sets: int, points: int) -> tuple[Tensor, Tensor]:
    """Return points of the unit square (sets, points, 2), and which of them are joined (sets, points, points)."""
    places, joined = torch.rand(sets, points, 2), torch.zeros(sets, points, points, dtype=torch.bool)
    for one, graph in zip(places, joined, strict=True):
        corners = torch.from_numpy(scipy.spatial.Delaunay(one.numpy()).simplices).long()
        for a, b in ((0, 1), (1, 2), (2, 0)):
            graph[corners[:, a], corners[:, b]] = graph[corners[:, b], corners[:, a]] = True
    return places, joined


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=1000, help="to learn from; a tenth as many to test")
    parser.add_argument("--points", type=int, default=15, help="of each set")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/sets"), help="folder of the scores and the picture")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    places, joined = (part.to(args.device) for part in triangulated(args.sets + args.sets // 10, args.points))
    pairs = ~torch.eye(args.points, dtype=torch.bool, device=args.device)
    model = HigherOrderTransformer(2, 32, 1, orders=(1, 1, 2)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.006)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.006, total_steps=args.epochs * math.ceil(args.sets / 8))
    for epoch in range(args.epochs):
        for chosen in torch.randperm(args.sets, device=args.device).split(8):
            logits = model.tensor(places[chosen])[..., 0]
            loss = functional.binary_cross_entropy_with_logits(logits[:, pairs], joined[chosen][:, pairs].float())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch:2d}  loss {loss.item():.3f}")

    places, joined = places[args.sets :], joined[args.sets :]
    with torch.no_grad():
        logits = model.eval().tensor(places)[..., 0]
    said = (logits + logits.mT > 0) & pairs

    def f1(said: Tensor) -> float:
        return (2 * (said & joined).sum() / (said.sum() + joined.sum())).item()

    scores = {"f1": f1(said), "f1 of joining all": f1(pairs.expand_as(joined))}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "sets.json").write_text(json.dumps(scores), encoding="utf-8")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    kinds = {"right": ("0.6", said & joined), "too much": ("C3", said & ~joined), "missing": ("C0", joined & ~said)}
    for number, axes in enumerate(figure.subplots(1, 3)):
        xy = places[number].cpu()
        for name, (colour, found) in kinds.items():
            ends = xy[found[number].triu().nonzero().cpu()]  # (edges, 2, 2)
            axes.add_collection(LineCollection(list(ends.numpy()), colors=colour, label=name, zorder=1))
        axes.scatter(*xy.T, c="black", s=12, zorder=2)
        axes.set_axis_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(args.out / "sets.png")
    print(scores)
    return scores


if __name__ == "__main__":
    main()
