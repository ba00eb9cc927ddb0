"""Which edges of a graph are missing? Points of hyperbolic space, and a decoder that reads their distances.

The graph is a tree whose features change a little from parent to child. A tenth of its edges is held out.
Features alone say as much about such edges: `experiments.link_prediction` has this control, and others.

    python -m examples.links
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from holonomy import RiemannianAdam
from holonomy.layers import FermiDiracDecoder
from holonomy.models import HGCN


def family(nodes: int, features: int) -> tuple[Tensor, Tensor]:
    """Return features (n, features), inherited with changes, and pairs of parent and child (2, n - 1)."""
    parent, x = [], torch.randn(nodes, features)
    for node in range(1, nodes):
        parent.append(int(torch.randint((node - 1) // 3, (node + 1) // 2, ())))
        x[node] += x[parent[-1]]
    return x / x.std(0), torch.stack([torch.tensor(parent), torch.arange(1, nodes)])


def strangers(nodes: int, edges: Tensor) -> Tensor:
    """Draw as many pairs as there are edges (2, m), none of them an edge."""
    drawn = torch.randint(nodes, (2, 4 * edges.shape[1]), device=edges.device).sort(dim=0).values
    new = (drawn[0] != drawn[1]) & ~torch.isin(drawn[0] * nodes + drawn[1], edges[0] * nodes + edges[1])
    return drawn[:, new][:, : edges.shape[1]]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/links"), help="folder of the scores and the picture")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    x, edges = (part.to(args.device) for part in family(args.nodes, features=11))
    order = torch.randperm(edges.shape[1], device=args.device)
    known, held_out = edges[:, order[len(order) // 10 :]], edges[:, order[: len(order) // 10]]
    both_ways = torch.cat([known, known.flip(0)], dim=1)

    encoder = HGCN(11, 16, conv="lgcn").to(args.device)
    decoder = FermiDiracDecoder(encoder.manifold_out).to(args.device)
    # Both hold the manifold, whose curvature learns: one module lists it once.
    optimizer = RiemannianAdam(nn.ModuleList([encoder, decoder]).parameters(), lr=0.005)
    truth = torch.tensor([1.0, 0.0], device=args.device).repeat_interleave(known.shape[1])
    for epoch in range(args.epochs):
        points = encoder(x, both_ways)
        pairs = torch.cat([known, strangers(args.nodes, known)], dim=1)
        loss = functional.binary_cross_entropy_with_logits(decoder(points[pairs[0]], points[pairs[1]]), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 20 == 0:
            print(f"epoch {epoch:3d}  loss {loss.item():.3f}")

    with torch.no_grad():
        points = encoder(x, both_ways)
        near, far = (decoder(points[a], points[b]) for a, b in (held_out, strangers(args.nodes, edges)))
    # The chance that a held-out edge has a higher score than a pair that is none: the area under the ROC curve.
    scores = {"auc": (near[:, None] > far).float().mean().item()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "links.json").write_text(json.dumps(scores), encoding="utf-8")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, part in (("held-out edges", near), ("pairs that are no edges", far)):
        axes.hist(part.sigmoid().cpu(), bins=25, range=(0, 1), density=True, alpha=0.6, label=name)
    axes.set(xlabel="probability of an edge", yticks=[], title=f"area under the ROC curve {scores['auc']:.3f}")
    axes.legend()
    figure.savefig(args.out / "links.png")
    print(scores)
    return scores


if __name__ == "__main__":
    main()
