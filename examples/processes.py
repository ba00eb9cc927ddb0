"""Many graphs on several processes: by which rule did a tree grow? The losses are those of one process.

Trees have 5 to 80 nodes. Each process takes graphs of every batch, about as many nodes as the others, and the loss is
the mean over the graphs of all. Curvatures learn. Any number of processes has the same losses, as float64 shows.

    torchrun --nproc-per-node 2 -m examples.processes
    python -m examples.processes
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from holonomy import Hypformer, RiemannianAdam
from holonomy.distributed import GraphBatchSampler, mean_over_processes
from holonomy.structures import join_graphs


def tree(number: int) -> dict[str, Tensor]:
    """Draw a tree whose next node is a child of any node, or, in class 1, of one with many neighbours."""
    nodes, rich = int(5 * 16 ** torch.rand(()).item()), number % 2
    neighbours, parent = [0], []
    for node in range(1, nodes):
        weight = torch.tensor(neighbours) * rich + 1.0 - rich if node > 1 else torch.ones(1)
        parent.append(int(weight.multinomial(1)))
        neighbours[parent[-1]] += 1
        neighbours.append(1)
    down = torch.stack([torch.tensor(parent), torch.arange(1, nodes)])
    x = torch.tensor(neighbours, dtype=torch.float64).log()[:, None]
    return {"x": x, "edge_index": torch.cat([down, down.flip(0)], 1), "y": torch.tensor(rich)}


def train(args: argparse.Namespace) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device(args.device)
    torch.manual_seed(args.seed)  # the same graphs and the same weights on every process
    graphs = [tree(number) for number in range(args.graphs + args.graphs // 4)]
    learn, test = graphs[: args.graphs], join_graphs(graphs[args.graphs :])
    sizes = [len(graph["x"]) for graph in learn]
    sampler = GraphBatchSampler(sizes, args.batch, seed=args.seed)
    loader = DataLoader(learn, batch_sampler=sampler, collate_fn=join_graphs)
    model = Hypformer(1, 16, 2, layers=1, heads=2, level="graph", dtype=torch.float64).to(device)
    called = DistributedDataParallel(model)
    optimizer = RiemannianAdam(called.parameters(), lr=args.lr)
    losses, most = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            inputs = {name: value.to(device) for name, value in batch.items()}
            y = inputs.pop("y")
            loss = mean_over_processes(cross_entropy(called(**inputs), y, reduction="none"), dist.group.WORLD)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            nodes = torch.zeros(world, device=device)
            nodes[rank] = len(inputs["x"])
            dist.all_reduce(nodes)
            most = max(most, (nodes.max() / nodes.mean()).item())
        if rank == 0:
            print(f"epoch {epoch:2d}  loss {losses[-1]:.3f}")
    y, inputs = test.pop("y"), {name: value.to(device) for name, value in test.items()}
    with torch.no_grad():
        right = (model.eval()(**inputs).argmax(-1).cpu() == y).float().mean().item()
    return {"processes": world, "right": right, "most nodes over mean": most, "losses": losses}


def main(argv: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=1000, help="to learn from; a fourth as many to test")
    parser.add_argument("--batch", type=int, default=50, help="graphs of a batch, of all processes together")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda: one for each process")
    parser.add_argument("--out", type=Path, default=Path("runs/processes"), help="folder of the losses")
    args = parser.parse_args(argv)

    backend = "nccl" if args.device.startswith("cuda") else "gloo"
    alone = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)
    try:
        scores = train(args)
        if dist.get_rank() == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "processes.json").write_text(json.dumps(scores), encoding="utf-8")
            print({name: value for name, value in scores.items() if name != "losses"})
    finally:
        dist.destroy_process_group()
    return scores


if __name__ == "__main__":
    main()
