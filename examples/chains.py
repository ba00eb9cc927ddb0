"""Carry one bit along a chain: trained on chains of 20 nodes, tested on chains of 200.

Only the first node of a chain knows its class, and every node is asked for it. Attention from pairs of nodes to pairs
of nodes (orders 2 -> 2 -> 1) reaches all of them in one step; message passing goes as far as it has layers.

    python -m examples.chains
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
from holonomy.models import HGCN, HigherOrderTransformer


def chains(count: int, length: int) -> dict[str, Tensor]:
    """Draw chains side by side as one graph: features (nodes, 2), edges, the chain and the class of each node."""
    y, first = torch.randint(2, (count,)), length * torch.arange(count)
    x = torch.zeros(count * length, 2)
    x[first, y] = 1.0
    ahead = torch.arange(count * length).view(count, length)[:, :-1].flatten()
    edge_index = torch.stack([torch.cat([ahead, ahead + 1]), torch.cat([ahead + 1, ahead])])
    chain = torch.arange(count).repeat_interleave(length)
    return {"x": x, "edge_index": edge_index, "batch": chain, "y": y[chain]}


def train(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Train on fresh chains of 20 nodes."""
    optimizer = RiemannianAdam(model.parameters(), lr=0.003)
    for step in range(args.steps):
        graphs = {name: value.to(args.device) for name, value in chains(args.batch, 20).items()}
        y = graphs.pop("y")
        loss = functional.cross_entropy(model(**graphs), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    return model.eval()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="chains of a step")
    parser.add_argument("--length", type=int, default=200, help="of the chains to test on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/chains"), help="folder of the scores and the picture")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    models = {
        "attention": HigherOrderTransformer(2, 32, 2, level="node", kernel="performer"),
        "message passing": HGCN(2, 32, 2, layers=4, level="node"),
    }
    test = {name: value.to(args.device) for name, value in chains(10, args.length).items()}
    y = test.pop("y")
    figure, scores = Figure(figsize=(7, 3.5), layout="constrained"), {}
    axes = figure.subplots()
    for name, model in models.items():
        train(model.to(args.device), args)
        with torch.no_grad():
            right = (model(**test).argmax(-1) == y).float()
        scores[name] = right.mean().item()
        axes.plot(right.view(10, args.length).mean(0).cpu(), label=name)
    axes.set(xlabel="nodes from the one that knows", ylabel="right answers", ylim=(-0.05, 1.05))
    axes.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "chains.json").write_text(json.dumps(scores), encoding="utf-8")
    figure.savefig(args.out / "chains.png")
    print(scores)
    return scores


if __name__ == "__main__":
    main()
