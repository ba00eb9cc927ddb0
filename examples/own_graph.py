"""Train on a graph of your own: early stopping, a model on disk, and predictions for a graph that was not seen.

A graph is an .npz file with ``x (n, features)``, ``edge_index (2, m)`` and classes ``y (n,)``, -1 where unknown.
Without a file a tree is drawn, whose classes are its branches.

    python -m examples.own_graph --graph mine.npz --out runs/mine
    python -m examples.own_graph --graph another.npz --out runs/mine --predict
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from holonomy import Hypformer, RiemannianAdam


def tree(nodes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features that say little, edges in both directions, and the branch of each node."""
    generator = torch.Generator().manual_seed(seed)
    parent, branch = [0, 0, 0, 0, 0], [0, 0, 1, 2, 3]
    for node in range(5, nodes):
        parent.append(int(torch.randint(max(1, node // 8), node, (), generator=generator)))
        branch.append(branch[parent[node]])
    down = torch.stack([torch.tensor(parent[1:]), torch.arange(1, nodes)])
    y = torch.tensor(branch)
    x = functional.one_hot(y, 4) + torch.randn(nodes, 4, generator=generator)
    return x, torch.cat([down, down.flip(0)], dim=1), y


def read(path: Path | None, nodes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The graph of a file, which may hold no pickled objects, or a drawn one."""
    if path is None:
        return tree(nodes, seed)
    with np.load(path, allow_pickle=False) as file:
        x, edge_index = torch.from_numpy(file["x"]).float(), torch.from_numpy(file["edge_index"]).long()
        return x, edge_index, torch.from_numpy(file["y"]).long()


def train(x: Tensor, edge_index: Tensor, y: Tensor, args: argparse.Namespace) -> tuple[dict[str, Tensor], dict]:
    """The weights of the epoch that is best on held-out nodes, and what they score."""
    known = (y >= 0).nonzero().flatten()
    order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(args.seed)).to(known.device)]
    learn, valid, test = order.tensor_split([int(0.3 * len(order)), int(0.6 * len(order))])
    sizes = {"in_features": x.shape[1], "hidden_features": args.hidden, "out_features": int(y.max()) + 1}
    torch.manual_seed(args.seed)
    model = Hypformer(**sizes, layers=1, heads=2, dropout=0.2, graph_weight=0.8, level="node").to(x.device)
    optimizer = RiemannianAdam(model.parameters(), lr=args.lr, weight_decay=0.005)
    best, since, scores, state = -1.0, 0, {}, {}
    for epoch in range(args.epochs):
        model.train()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x, edge_index)[learn], y[learn])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            right = (model.eval()(x, edge_index).argmax(-1) == y).float()
        since += 1
        if right[valid].mean().item() > best:
            best, since = right[valid].mean().item(), 0
            state = {name: value.clone() for name, value in model.state_dict().items()}
            # The test nodes choose nothing: their score is that of the epoch that the others choose.
            scores = {"epoch": epoch, "valid": best, "test": right[test].mean().item()}
        if epoch % 10 == 0:
            print(f"epoch {epoch:3d}  loss {loss.item():.3f}  held-out nodes {right[valid].mean().item():.3f}")
        if since >= args.patience:
            break
    return state, {"sizes": sizes, **scores}


def predict(x: Tensor, edge_index: Tensor, out: Path) -> Tensor:
    """Classes of a graph's nodes, by the model in a folder."""
    sizes = json.loads((out / "model.json").read_text(encoding="utf-8"))["sizes"]
    model = Hypformer(**sizes, layers=1, heads=2, graph_weight=0.8, level="node").to(x.device).eval()
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True, map_location=x.device))
    with torch.no_grad():
        return model(x, edge_index).argmax(-1)


def main(argv: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", type=Path, help="an .npz file; left out, a tree is drawn")
    parser.add_argument("--predict", action="store_true", help="with the model in --out, without training")
    parser.add_argument("--out", type=Path, default=Path("runs/own_graph"), help="where the model lies")
    parser.add_argument("--nodes", type=int, default=400, help="of the tree that is drawn")
    parser.add_argument("--hidden", type=int, default=16, help="dimension of the hyperboloids")
    parser.add_argument("--epochs", type=int, default=200, help="at most")
    parser.add_argument("--patience", type=int, default=40, help="epochs without a better score, then it stops")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the tree, the split and the weights")
    parser.add_argument("--device", default="cpu", help="such as cuda")
    args = parser.parse_args(argv)
    x, edge_index, y = (part.to(args.device) for part in read(args.graph, args.nodes, args.seed))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.predict:
        found = predict(x, edge_index, args.out)
        np.save(args.out / "predicted.npy", found.cpu().numpy())
        known = y >= 0
        scores = {"nodes": len(found), "right": (found == y)[known].float().mean().item() if known.any() else None}
    else:
        state, scores = train(x, edge_index, y, args)
        torch.save(state, args.out / "model.pt")
        (args.out / "model.json").write_text(json.dumps(scores), encoding="utf-8")
    print(scores)
    return scores


if __name__ == "__main__":
    main()
