"""Equivariant layers: against the sums written out, and the cost of an edge as graphs grow.

Forward and backward, float32, one thread, in turn within one process. ``--edges`` counts the hyperedges of a random
graph with four edges a node; attention is :class:`~holonomy.layers.HigherOrderAttention` 2 -> 2 with all 15 classes.

    python -m benchmarks.equivariant [--edges 10000 100000 1000000] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.rounds import Ratio, interleaved, report
from holonomy.layers import EquivariantLinear, HigherOrderAttention, set_partitions
from holonomy.structures import Hyperedges


def basis_tensors(nodes: int) -> Tensor:
    """The 15 basis tensors of 2 -> 2, HOT eq. 2, as n^4 zeros and ones."""
    i = torch.arange(nodes)
    grid = torch.stack(torch.meshgrid(i, i, i, i, indexing="ij"))
    exact = []
    for pattern in set_partitions(4):
        fits = torch.ones(nodes, nodes, nodes, nodes, dtype=torch.bool)
        for a in range(4):
            for b in range(a):
                fits &= (grid[a] == grid[b]) == (pattern[a] == pattern[b])
        exact.append(fits)
    return torch.stack(exact).float()


def stepped(function, *leaves: Tensor):
    """A function of nothing: forward, and backward to the leaves."""

    def step() -> None:
        torch.autograd.grad(function().square().sum(), leaves)

    return step


def written_out(nodes: int, features: int, rounds: int, path: str | None) -> None:
    """HOT eq. 1 by an einsum over its basis tensors, against the layer."""
    torch.manual_seed(0)
    layer = EquivariantLinear(2, 2, features, features)
    x = torch.randn(1, nodes, nodes, features, requires_grad=True)
    basis = basis_tensors(nodes)
    bias = torch.stack([torch.eye(nodes), 1 - torch.eye(nodes)])

    def plain() -> Tensor:
        summed = torch.einsum("pijkl,bijd->bpkld", basis, x)
        return torch.einsum("bpkld,pde->bkle", summed, layer.weight) + torch.einsum("pkl,pe->kle", bias, layer.bias)

    torch.testing.assert_close(layer(x), plain(), rtol=1e-3, atol=1e-2)
    leaves = (x, *layer.parameters())
    taken = interleaved({"written out": stepped(plain, *leaves), "ours": stepped(lambda: layer(x), *leaves)}, rounds)
    report({"layer": "2 -> 2", "nodes": nodes, "features": features}, taken, [Ratio("written out", "ours", "")], path)


def random_graph(edges: int, features: int) -> Hyperedges:
    """Loops and three edges a node, about as many hyperedges as asked for."""
    nodes = edges // 4
    pairs = torch.randint(nodes, (edges - nodes, 2))
    loops = torch.arange(nodes)[:, None].expand(nodes, 2)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    indices = torch.cat([loops, pairs]).unique(dim=0)
    return Hyperedges(indices, torch.randn(indices.shape[0], features), nodes)


def growth(sizes: list[int], features: int, rounds: int, kinds: list[str], *, forward: bool, path: str | None) -> None:
    """Time and memory an edge; the peak is that of the process, so that one size a process is told apart."""
    for edges in sizes:
        for sums in kinds:
            torch.manual_seed(0)
            graph = random_graph(edges, features)
            layer = HigherOrderAttention(2, 2, features, 4, kernel="performer", sums=sums)
            best = float("inf")
            for _ in range(rounds):
                start = time.thread_time()
                with torch.set_grad_enabled(not forward):
                    loss = layer(graph).values.square().mean()
                if not forward:
                    loss.backward()
                best = min(best, time.thread_time() - start)
            count = graph.indices.shape[0]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            passes = "forward" if forward else "forward and backward"
            print(
                f"{sums:10s} {passes} {count:9,d} edges  {1e6 * best / count:7.2f} us an edge  {peak / 2**30:.2f} GiB"
            )
            setting = {"attention": "2 -> 2", "sums": sums, "features": features, "passes": passes, "edges": count}
            measured = {"microseconds_per_edge": 1e6 * best / count, "process_peak_bytes": peak, "rounds": rounds}
            if path is not None:
                add(path, setting | measured)


def add(path: str, entry: dict) -> None:
    """Put an entry behind those of a JSON list."""
    file = Path(path)
    done = json.loads(file.read_text("utf-8")) if file.exists() else []
    file.write_text(json.dumps([*done, entry | {"torch": torch.__version__}], indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 32])
    parser.add_argument("--edges", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--sums", nargs="+", choices=["decoupled", "coupled"], default=["decoupled", "coupled"])
    parser.add_argument("--forward", action="store_true", help="attention forward only, without gradients")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="also write the ratios there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for nodes in options.nodes:
        written_out(nodes, options.features, options.rounds, options.json)
    rounds, kinds = min(options.rounds, 3), options.sums
    growth(options.edges, options.features, rounds, kinds, forward=options.forward, path=options.json)


if __name__ == "__main__":
    main()
