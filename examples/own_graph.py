"""Train on graphs of your own: a DataLoader, early stopping, a model on disk, and predictions for unseen graphs.

A graph is an .npz file with ``x (n, features)``, ``edge_index (2, m)`` and classes ``y (n,)``, -1 where unknown; a
graph to predict needs no y. Without a file a tree is drawn, whose classes are its branches.

    python -m examples.own_graph --graph mine.npz --out runs/mine
    python -m examples.own_graph --graph several/*.npz --out runs/several
    python -m examples.own_graph --graph another.npz --out runs/several --predict
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from holonomy import Hypformer, RiemannianAdam, checks
from holonomy.structures import join_graphs


def tree(nodes: int, seed: int) -> dict[str, torch.Tensor]:
    """Features that say little, edges in both directions, and the branch of each node."""
    generator = torch.Generator().manual_seed(seed)
    parent, branch = [0, 0, 0, 0, 0], [0, 0, 1, 2, 3]
    for node in range(5, nodes):
        parent.append(int(torch.randint(max(1, node // 8), node, (), generator=generator)))
        branch.append(branch[parent[node]])
    down = torch.stack([torch.tensor(parent[1:]), torch.arange(1, nodes)])
    x = functional.one_hot(y := torch.tensor(branch), 4) + torch.randn(nodes, 4, generator=generator)
    return {"x": x, "edge_index": torch.cat([down, down.flip(0)], dim=1), "y": y}


def read(path: Path) -> dict[str, torch.Tensor]:
    """The graph of a file, which may hold no pickled objects."""
    with np.load(path, allow_pickle=False) as file:
        if not {"x", "edge_index"} <= set(file):
            raise ValueError(f"{path} must hold x and edge_index, got {list(file)}.")
        x, edge_index = torch.from_numpy(file["x"]).float(), torch.from_numpy(file["edge_index"])
        y = torch.from_numpy(file["y"]) if "y" in file else torch.full((len(x),), -1)
    checks.finite(f"x of {path}", x)
    checks.integers(f"y of {path}", y)
    checks.shaped(f"y of {path}", y, x.shape[:1], "(nodes,) = ")
    return {"x": x, "edge_index": edge_index, "y": y.long()}


def split(y: torch.Tensor, seed: int) -> torch.Tensor:
    """What each node is for: 0 to learn from, 1 to stop by, 2 for the test, -1 if its class is unknown."""
    role = torch.bucketize(torch.rand(len(y), generator=torch.Generator().manual_seed(seed)), torch.tensor([0.3, 0.6]))
    return torch.where(y >= 0, role, -1)


def train(graphs: list[dict[str, torch.Tensor]], args: argparse.Namespace) -> dict:
    """Keep the weights of the epoch that is best on held-out nodes; say what they score."""
    torch.manual_seed(args.seed)
    graphs = [{**graph, "role": split(graph["y"], args.seed)} for graph in graphs]
    every = {name: part.to(args.device) for name, part in join_graphs(graphs).items()}
    if not {0, 1} <= set(every["role"].tolist()):
        raise ValueError(f"y must be known for nodes to learn from and to stop by, got {int((every['y'] >= 0).sum())}.")
    sizes = {"in_features": every["x"].shape[-1], "hidden_features": 16, "out_features": 1 + int(every["y"].max())}
    model = Hypformer(**sizes, layers=1, heads=2, dropout=0.2, graph_weight=0.8, level="node").to(args.device)
    optimizer = RiemannianAdam(model.parameters(), lr=0.01, weight_decay=0.005)
    batches = DataLoader(graphs, batch_size=8, shuffle=True, collate_fn=join_graphs)
    scores = {"valid": -1.0}
    for epoch in range(args.epochs):
        model.train()
        for batch in batches:
            x, edge_index, y, role, of = (part.to(args.device) for part in batch.values())
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x, edge_index, of)[role == 0], y[role == 0], reduction="sum") / len(y)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = model.eval()(every["x"], every["edge_index"], every["batch"]).argmax(-1) == every["y"]
        valid, test = (right[every["role"] == role].float().mean().item() for role in (1, 2))
        if valid > scores["valid"]:  # the test nodes choose nothing
            scores = {"sizes": sizes, "epoch": epoch, "valid": valid, "test": test}
            torch.save(model.state_dict(), args.out / "model.pt")
            (args.out / "model.json").write_text(json.dumps(scores), encoding="utf-8")
            print(f"epoch {epoch:3d}  loss {loss.item():.3f}  held-out nodes {valid:.3f}")
        if epoch - scores["epoch"] >= args.patience:
            break
    return scores


@torch.no_grad()
def predict(graphs: list[dict[str, torch.Tensor]], args: argparse.Namespace) -> dict:
    """Write the classes of all nodes by the model in a folder; of those that are known, say how many are right."""
    sizes = json.loads((args.out / "model.json").read_text(encoding="utf-8"))["sizes"]
    model = Hypformer(**sizes, layers=1, heads=2, graph_weight=0.8, level="node").to(args.device).eval()
    model.load_state_dict(torch.load(args.out / "model.pt", weights_only=True, map_location=args.device))
    x, edge_index, y, of = (part.to(args.device) for part in join_graphs(graphs).values())
    found = model(x, edge_index, of).argmax(-1)
    np.savez(args.out / "predicted.npz", y=found.cpu().numpy(), graph=of.cpu().numpy())
    known = y >= 0
    return {"nodes": len(found)} | ({"right": (found == y)[known].float().mean().item()} if known.any() else {})


def main(argv: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", type=Path, nargs="+", help="one .npz file or more; left out, a tree is drawn")
    parser.add_argument("--predict", action="store_true", help="with the model in --out, without training")
    parser.add_argument("--out", type=Path, default=Path("runs/own_graph"), help="folder of model.pt, predicted.npz")
    parser.add_argument("--nodes", type=int, default=400, help="of the tree that is drawn")
    parser.add_argument("--epochs", type=int, default=200, help="at most")
    parser.add_argument("--patience", type=int, default=40, help="epochs without a better score, then it stops")
    parser.add_argument("--seed", type=int, default=0, help="of the tree, the split and the weights")
    parser.add_argument("--device", default="cpu", help="such as cuda")
    args = parser.parse_args(argv)
    graphs = [read(path) for path in args.graph] if args.graph else [tree(args.nodes, args.seed)]
    args.out.mkdir(parents=True, exist_ok=True)
    print(scores := predict(graphs, args) if args.predict else train(graphs, args))
    return scores


if __name__ == "__main__":
    main()
