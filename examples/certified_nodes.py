"""Train for certificates: how far may the features of a node move before its prediction can change?

A small Hypformer learns the branches of a tree twice: by cross-entropy alone, then with a hinge on the differentiable
certificate of some nodes a step. Of nodes that trained nothing, by radius: what is certified right for every change of
the node's own features, and what an attack leaves right, which no certificate exceeds.

    python -m examples.certified_nodes
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

from holonomy import Hypformer
from holonomy.theory import certified_accuracy, margin_bounds

SHARES, TRAINED, CLASSES, FEATURES = [0.0, 0.01, 0.03, 0.1, 0.2], 0.1, 4, 8
Data = tuple[Tensor, Tensor, Tensor]


def tree(nodes: int, seed: int) -> Data:
    """Return features that say something of the branch, edges in both directions, and the branch of each node."""
    generator, child = torch.Generator().manual_seed(seed), torch.arange(CLASSES, nodes)
    above = CLASSES * (1 + (torch.rand(len(child), generator=generator) * (child // CLASSES)).long())
    down = torch.stack([torch.cat([torch.zeros(CLASSES - 1).long(), child - above]), torch.arange(1, nodes)])
    y = torch.arange(nodes) % CLASSES
    x = 1.5 * one_hot(y, FEATURES) + torch.randn(nodes, FEATURES, generator=generator)
    return x, torch.cat([down, down.flip(0)], dim=1), y


def train(data: Data, learn: Tensor, radius: float, args: argparse.Namespace) -> Hypformer:
    """A model; with a radius above zero, one that is trained to be certified within it."""
    x, edges, y = data
    torch.manual_seed(args.seed)
    model = Hypformer(FEATURES, 8, CLASSES, layers=1, level="node").to(x.device).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(args.epochs):
        optimizer.zero_grad()
        loss = cross_entropy(model(x, edges)[learn], y[learn])
        # The ball grows from a third of the epochs on: a bound on one that is far too large teaches a constant.
        share = min(1.0, 2 * epoch / args.epochs - 0.6)
        if radius and share > 0:
            some = learn[torch.randperm(len(learn))[:20].to(x.device)]
            bounds = margin_bounds(model, x, edges, some, share * radius, y[some])
            loss = loss + torch.relu(0.5 - bounds.amin(-1)).mean().to(x.device)
        loss.backward()
        optimizer.step()
        if epoch % 20 == 0:
            print(f"epoch {epoch:3d}  loss {loss.item():.3f}")
    return model


def moved(model: Hypformer, data: Data, nodes: Tensor, changes: Tensor) -> Tensor:
    """Logits of nodes whose own features change: as many copies of the graph, side by side."""
    x, edges, _ = data
    copies = torch.arange(len(nodes), device=x.device)
    features = x.repeat(len(nodes), 1).index_add(0, copies * len(x) + nodes, changes)
    many = (edges[:, None] + len(x) * copies[:, None]).flatten(1)
    return model(features, many, copies.repeat_interleave(len(x)))[copies * len(x) + nodes]


def attacked(model: Hypformer, data: Data, nodes: Tensor, radius: float) -> float:
    """The share of nodes that stay right on three ascents of the best other logit less the own one."""
    nodes, y = nodes.repeat(3), data[2]
    own, right = one_hot(y[nodes], CLASSES).bool(), torch.ones_like(nodes) > 0
    change = radius * normalize(torch.randn(len(nodes), FEATURES)).to(y.device)
    for _ in range(10):
        scores = moved(model, data, nodes, change.requires_grad_())
        gap = scores.masked_fill(own, -torch.inf).amax(-1) - scores[own]
        right &= gap < 0
        ascent = normalize(*torch.autograd.grad(gap.sum(), change))
        change = radius * normalize(change.detach() + radius / 2 * ascent)
    return right.view(3, -1).all(0).float().mean().item()


def main(argv: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/certified_nodes"), help="folder of the result")
    parser.add_argument("--nodes", type=int, default=120, help="of the tree; a third trains nothing and is measured")
    parser.add_argument("--epochs", type=int, default=120, help="steps of training")
    parser.add_argument("--seed", type=int, default=0, help="of the tree, the split, the weights and the attack")
    parser.add_argument("--device", default="cpu", help="such as cuda; certificates are computed on the processor")
    args = parser.parse_args(argv)

    data = x, edges, y = tuple(part.to(args.device) for part in tree(args.nodes, args.seed))
    order = torch.randperm(args.nodes, generator=torch.Generator().manual_seed(args.seed)).to(args.device)
    (test, learn), norm = order.split([args.nodes // 3, args.nodes - args.nodes // 3]), x.norm(dim=-1).mean().item()
    radii = norm * torch.tensor(SHARES)
    found, figure = {"shares": SHARES, "norm": norm}, Figure((11, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("cross-entropy", "certificates too"), strict=True):
        model = train(data, learn, TRAINED * norm * (name != "cross-entropy"), args)
        clean = (model(x, edges).argmax(-1) == y)[test].float().mean().item()
        certified = certified_accuracy(model, x, edges, test, y[test], radii).tolist()
        left = [attacked(model, data, test, radius) for radius in radii.tolist()]
        found[name] = {"clean": clean, "certified": certified, "attacked": left}
        print(f"{name}: accuracy {clean:.3f}; within 1, 3 and 10 % of the norm of features:")
        for label, values in (("certified", certified), ("attacked", left)):
            print(f"  {label:10}" + "".join(f"{value:8.3f}" for value in values[1:4]))
            axes.plot(SHARES, values, marker=".", label=label)
        axes.set(title=f"trained by {name}", xlabel="radius / typical norm of features", ylim=(0, 1))
    axes.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "certified.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    figure.savefig(args.out / "certified.png")
    return found


if __name__ == "__main__":
    main()
