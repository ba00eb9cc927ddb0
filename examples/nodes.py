"""Which community is a node in? A hyperbolic transformer on one graph, trained on a tenth of its nodes.

Features are noisy, and most edges stay within a community.

    python -m examples.nodes
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from holonomy import Hypformer, RiemannianAdam
from holonomy.manifolds import tangent_pca


def communities(nodes: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (n, 16), edges in both directions (2, m), and the community of each node (n,)."""
    y = torch.randint(classes, (nodes,))
    chance = torch.where(y[:, None] == y, 30 / nodes, 2 / nodes)
    edges = (torch.rand(nodes, nodes) < chance).triu(1).nonzero().T
    x = torch.randn(classes, 16)[y] + 2 * torch.randn(nodes, 16)
    return x, torch.cat([edges, edges.flip(0)], dim=1), y


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/nodes"), help="folder of the score and the picture")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    x, edge_index, y = (part.to(args.device) for part in communities(args.nodes, classes=5))
    order = torch.randperm(args.nodes, device=args.device)
    known, test = order[: args.nodes // 10], order[args.nodes // 10 :]
    model = Hypformer(16, 32, 5, layers=1, heads=2, dropout=0.3).to(args.device)
    optimizer = RiemannianAdam(model.parameters(), lr=0.01, weight_decay=0.001)
    for epoch in range(args.epochs):
        model.train()
        loss = functional.cross_entropy(model(x, edge_index)[known], y[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0:
            print(f"epoch {epoch:3d}  loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():
        right = (model(x, edge_index).argmax(-1) == y)[test].float().mean().item()
        manifold = model.manifold_out
        # The points that the decoder reads, in the two directions from their mean in which they differ most.
        disk = manifold.to_poincare(tangent_pca(model.embed(x, edge_index), manifold)) * (-manifold.curvature).sqrt()
    scores = {"right": right, "largest community": y.bincount().max().item() / args.nodes}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "nodes.json").write_text(json.dumps(scores), encoding="utf-8")
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*disk.T.cpu(), c=y.cpu(), cmap="tab10", s=12)
    axes.set(title=f"{right:.1%} of the communities are right", xlim=(-1, 1), ylim=(-1, 1), aspect="equal")
    figure.savefig(args.out / "nodes.png")
    print(scores)
    return scores


if __name__ == "__main__":
    main()
