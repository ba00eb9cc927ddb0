"""Chromatic attention: time and memory against its arithmetic written out; encodings against PyTorch Geometric's.

Forward and backward, float32, one thread, in turn within one process; memory of each contender in a process of its
own. The arithmetic is written out twice: as graph transformers write it (scores clamped, exponentiated, masked,
messages and edge values summed apart, then divided), and as lean as it gets with whole tensors. Edges come as biases
and values, or as features under two linear maps, which is what a layer has.

    python -m benchmarks.chromatic [--graphs 128] [--nodes 32] [--channels 64] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.transforms import AddRandomWalkPE

from benchmarks.rounds import Ratio, add, in_children, interleaved, peak_above, report
from holonomy.layers import random_walk_node_encoding
from holonomy.layers.kernels.chromatic import chromatic_attention
from holonomy.structures import batches_by_size

HEADS = 4


def usual(
    query: Tensor, key: Tensor, value: Tensor, edge_bias: Tensor, edge_value: Tensor, mask: Tensor, *, heads: int,
    bias_map: Tensor | None = None, value_map: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """CSA eq. 7 as graph transformers write attention: scores are clamped for the exponential."""
    if bias_map is not None:
        edge_bias, edge_value = functional.linear(edge_bias, bias_map), functional.linear(edge_value, value_map)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (query, key, value))
    scores = torch.einsum("bihd,bjhd->bijh", q, k)[..., None] / math.sqrt(q.shape[-1])
    scores = torch.exp((scores + edge_bias.unflatten(-1, (heads, -1))).clamp(-5, 5))
    scores = scores * (mask[:, :, None] & mask[:, None, :])[..., None, None]
    messages = (scores * v[:, None]).sum(2) + (scores * edge_value.unflatten(-1, (heads, -1))).sum(2)
    return (messages / scores.sum(2)).flatten(-2)


def lean(
    query: Tensor, key: Tensor, value: Tensor, edge_bias: Tensor, edge_value: Tensor, mask: None, *, heads: int,
    bias_map: Tensor | None = None, value_map: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same in as few tensors of pairs times channels as torch's operations allow; it knows no mask."""
    del mask
    if bias_map is not None:
        edge_bias, edge_value = functional.linear(edge_bias, bias_map), functional.linear(edge_value, value_map)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (query, key, value))
    scores = torch.einsum("bihd,bjhd->bijh", q, k)[..., None] / math.sqrt(q.shape[-1])
    filters = (scores + edge_bias.unflatten(-1, (heads, -1))).softmax(2)
    return (filters * (v[:, None] + edge_value.unflatten(-1, (heads, -1)))).sum(2).flatten(-2)


CONTENDERS = {"as usual": usual, "lean": lean, "ours": chromatic_attention}


def problem(graphs: int, nodes: int, channels: int, edges: str) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Node tensors and edges with gradients, maps where edges are features, and a gradient of the result."""
    torch.manual_seed(0)
    of_nodes = [torch.randn(graphs, nodes, channels, requires_grad=True) for _ in range(3)]
    first = torch.randn(graphs, nodes, nodes, channels, requires_grad=True)
    grad = torch.randn(graphs, nodes, channels)
    if edges == "biases and values":
        return [*of_nodes, first, torch.randn_like(first, requires_grad=True)], {}, grad
    maps = {f"{name}_map": torch.randn(channels, channels, requires_grad=True) for name in ("bias", "value")}
    return [*of_nodes, first, first], maps, grad


def stepped(function: Callable[..., Tensor], tensors: list[Tensor], maps: dict[str, Tensor], grad: Tensor):
    """Forward and backward to everything."""
    leaves = list({id(x): x for x in (*tensors, *maps.values())}.values())
    mask = torch.ones(tensors[0].shape[:2], dtype=torch.bool) if function is usual else None

    def step() -> None:
        out = function(*tensors, mask, heads=HEADS, **maps)
        torch.autograd.grad(out, leaves, grad)

    return step


def times(options: argparse.Namespace) -> None:
    for edges in ("biases and values", "features"):
        tensors, maps, grad = problem(options.graphs, options.nodes, options.channels, edges)
        taken = interleaved({name: stepped(f, tensors, maps, grad) for name, f in CONTENDERS.items()}, options.rounds)
        setting = {
            "attention": "chromatic", "edges": edges, "graphs": options.graphs, "nodes": options.nodes,
            "channels": options.channels,
        }  # fmt: skip
        report(setting, taken, [Ratio("ours", "as usual", "<= 0.40"), Ratio("ours", "lean", "")], options.json)


def peak(name: str, edges: str, options: argparse.Namespace) -> float:
    """MiB at the highest, above inputs and their gradients, in this process."""
    tensors, maps, grad = problem(options.graphs, options.nodes, options.channels, edges)
    small = problem(1, 2, options.channels, edges)
    stepped(CONTENDERS[name], *small)()  # libraries load what they need
    kept = [torch.ones_like(x) for x in {id(x): x for x in (*tensors, *maps.values())}.values()]
    return peak_above(stepped(CONTENDERS[name], tensors, maps, grad), kept)


def memory(options: argparse.Namespace) -> None:
    sizes = [f"--{name}={getattr(options, name)}" for name in ("graphs", "nodes", "channels")]
    for edges in ("biases and values", "features"):
        found = in_children("benchmarks.chromatic", sizes, [[name, edges] for name in CONTENDERS])
        ratios = {name: found["ours"] / found[name] for name in ("as usual", "lean")}
        print(f"memory above input gradients, {edges}: " + ", ".join(f"{n} {m:.0f} MiB" for n, m in found.items()))
        print("  " + ", ".join(f"ours / {name} {ratio:.3f}" for name, ratio in ratios.items()) + "  target <= 0.25")
        setting = {"memory": "above input gradients", "edges": edges, "graphs": options.graphs, "nodes": options.nodes}
        add(options.json, setting, {"mebibytes": found, "ratios": ratios})


def encodings(options: argparse.Namespace) -> None:
    """Walks back to each node, p = 16, on a random graph of the size of Cora."""
    torch.manual_seed(0)
    one_way = torch.randint(2708, (2, 5278))
    one_way = one_way[:, one_way[0] != one_way[1]].unique(dim=1)
    edge_index = torch.cat([one_way, one_way.flip(0)], 1).unique(dim=1)
    data = Data(edge_index=edge_index, num_nodes=2708)
    taken = interleaved(
        {
            "PyTorch Geometric": lambda: AddRandomWalkPE(16)(data.clone()),
            "ours": lambda: random_walk_node_encoding(edge_index, 2708, 16),
        },
        3,
    )
    setting = {"encoding": "random walks of nodes", "nodes": 2708, "steps": 16}
    report(setting, taken, [Ratio("PyTorch Geometric", "ours", ">= 10")], options.json)


def padding(options: argparse.Namespace) -> None:
    """Work with padding over work without, on sizes distributed like molecules."""
    sizes = (23.2 + 4.5 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))).round().clamp(9, 37).long()
    for name, batches in (
        ("random", list(torch.randperm(10_000).split(128))),
        ("by size", batches_by_size(sizes, 128)),
    ):
        work = sum(len(batch) * int(sizes[batch].max()) ** 2 for batch in batches) / int(sizes.square().sum())
        print(f"padding, batches {name}: {work:.3f} of exact")
        add(options.json, {"padding": name, "batch": 128}, {"work": work})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peak", nargs=2, metavar=("NAME", "EDGES"), help="print the memory of one contender, in MiB")
    parser.add_argument("--json", help="also write the ratios there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print(peak(*options.peak, options))
        return
    times(options)
    memory(options)
    padding(options)
    encodings(options)


if __name__ == "__main__":
    main()
