"""A number for each of many graphs: molecules drawn at random, whose bonds and rings decide it.

Chromatic attention sees how random walks connect any two atoms. The graphs are dictionaries of tensors, and torch's
own DataLoader joins them.

    python -m examples.molecules
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from holonomy.layers import random_walk_encoding
from holonomy.models import ChromaticGraphTransformer
from holonomy.structures import join_graphs

ATOMS, BONDS, STEPS = 4, 3, 8


def molecule() -> dict[str, Tensor]:
    """Draw a tree of 6 to 14 atoms with up to three more bonds, each of which closes a ring."""
    atoms = int(torch.randint(6, 15, ()))
    pairs = {(int(torch.randint(max(0, atom - 3), atom, ())), atom) for atom in range(1, atoms)}
    for _ in range(int(torch.randint(4, ()))):
        low, high = sorted(torch.randperm(atoms)[:2].tolist())
        pairs.add((low, high))
    edges, kinds = torch.tensor(sorted(pairs)).T, torch.randint(ATOMS, (atoms,))
    bonds = torch.randint(BONDS, (len(pairs),))
    polar = (kinds[edges[0]] != kinds[edges[1]]) & (bonds == 0)
    edge_index = torch.cat([edges, edges.flip(0)], dim=1)
    return {
        "x": functional.one_hot(kinds, ATOMS).float(),
        "edge_index": edge_index,
        "edge_attr": bonds.repeat(2),
        "walks": random_walk_encoding(edge_index, atoms, STEPS).flatten(0, 1),  # a row for each pair of atoms
        "y": polar.sum().float() + 2 * (len(pairs) - atoms + 1),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--molecules", type=int, default=1000, help="to learn from; a fifth as many to test")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/molecules"), help="folder of the error and the picture")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    graphs = [molecule() for _ in range(args.molecules + args.molecules // 5)]
    learn, test = graphs[: args.molecules], join_graphs(graphs[args.molecules :])
    mean, deviation = join_graphs(learn)["y"].mean(), join_graphs(learn)["y"].std()
    model = ChromaticGraphTransformer(ATOMS, 32, 1, edge_types=BONDS, steps=STEPS, layers=3, pooling="sum")
    model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    loader = DataLoader(learn, batch_size=32, shuffle=True, collate_fn=join_graphs)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=args.epochs * len(loader))
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            inputs = {name: value.to(args.device) for name, value in batch.items()}
            y = (inputs.pop("y") - mean) / deviation
            loss = functional.l1_loss(model(**inputs)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch:2d}  loss {loss.item():.3f}")

    y, inputs = test.pop("y"), {name: value.to(args.device) for name, value in test.items()}
    with torch.no_grad():
        said = mean + deviation * model.eval()(**inputs)[:, 0].cpu()
    scores = {"error": (said - y).abs().mean().item(), "error of the mean": (mean - y).abs().mean().item()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "molecules.json").write_text(json.dumps(scores), encoding="utf-8")
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(y, said, s=12)
    axes.axline((0, 0), slope=1, color="0.7", zorder=0)
    axes.set(xlabel="true", ylabel="predicted", title=f"mean absolute error {scores['error']:.2f}")
    figure.savefig(args.out / "molecules.png")
    print(scores)
    return scores


if __name__ == "__main__":
    main()
