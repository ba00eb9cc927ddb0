"""N-simplicial attention: time and memory against the algorithm written out, and paths against the number of tokens.

Forward and backward, float32, one thread, in turn within one process; memory of each contender in a process of its
own. The algorithm is written out with one matrix product for the logits and one for the values (``stored``), which is
what einsum makes of it at best.

    python -m benchmarks.simplicial [--nodes 64 128 256] [--channels 32] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.rounds import Ratio, add, in_children, interleaved, peak_above, report
from holonomy.layers import simplicial_attention, simplicial_path_attention

NEIGHBOURS = 8


def stored(keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Algorithm 2 of the paper at N = 2, all logits at once."""
    pairs = keys[0][:, :, None] * keys[1][:, None]
    logits = (pairs.flatten(1, 2) @ keys[2].mT).unflatten(1, pairs.shape[1:3]) / math.sqrt(keys[0].shape[-1])
    weights = logits.flatten(2).softmax(-1).unflatten(2, logits.shape[2:])
    inner = (weights.flatten(1, 2) @ values[1]).unflatten(1, pairs.shape[1:3])
    return (inner * values[0][:, None]).sum(2)


CONTENDERS = {"written out": stored, "ours": simplicial_attention}


def problem(nodes: int, channels: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    return tuple([torch.randn(1, nodes, channels, requires_grad=True) for _ in range(m)] for m in (3, 2))


def stepped(function: Callable[..., Tensor], keys: list[Tensor], values: list[Tensor]) -> Callable[[], None]:
    def step() -> None:
        torch.autograd.grad(function(keys, values).sum(), [*keys, *values])

    return step


def product_rate(size: int) -> float:
    """Floating-point operations a second of a matrix product, in the thread's own time."""
    a, b = torch.randn(size, 32), torch.randn(32, size)
    best = math.inf
    for _ in range(7):
        start = time.thread_time()
        a @ b
        best = min(best, time.thread_time() - start)
    return 2 * 32 * size**2 / best


def times(options: argparse.Namespace) -> None:
    for nodes in options.nodes:
        keys, values = problem(nodes, options.channels)
        taken = interleaved({name: stepped(f, keys, values) for name, f in CONTENDERS.items()}, options.rounds)
        setting = {"attention": "2-simplicial", "nodes": nodes, "channels": options.channels}
        report(setting, taken, [Ratio("ours", "written out", "<= 0.65 at 256 nodes")], options.json)
        # Two products of n^3 d forward; backward the logits again, and one for each of five factors.
        rate = 2 * 8 * nodes**3 * options.channels / min(taken["ours"])
        share = rate / product_rate(1024)
        print(f"  rate of a matrix product of the same depth: {share:.2f}  target >= 0.55")
        add(options.json, setting | {"measured": "rate over that of a matrix product"}, {"share": share})


def peak(name: str, options: argparse.Namespace) -> float:
    [nodes] = options.nodes
    keys, values = problem(nodes, options.channels)
    stepped(CONTENDERS[name], *problem(3, options.channels))()
    kept = [torch.ones_like(x) for x in (*keys, *values)]
    return peak_above(stepped(CONTENDERS[name], keys, values), kept)


def memory(options: argparse.Namespace) -> None:
    for nodes in options.nodes:
        words = ["--nodes", str(nodes), "--channels", str(options.channels)]
        found = in_children("benchmarks.simplicial", words, [[name] for name in CONTENDERS])
        ratio = found["ours"] / found["written out"]
        shown = ", ".join(f"{name} {mib:.1f} MiB" for name, mib in found.items())
        print(f"memory above gradients, {nodes} nodes: {shown}, ratio 1/{1 / ratio:.0f}  target <= 1/50 at 256")
        setting = {"memory": "above input gradients", "nodes": nodes, "channels": options.channels}
        add(options.json, setting, {"mebibytes": found, "ratio": ratio})


def paths(options: argparse.Namespace) -> None:
    """Time of a token along the paths of its 8 best neighbours, over that at the first length."""
    steps: dict[str, Callable[[], None]] = {}
    lengths = (1024, 4096, 16384)
    for nodes in lengths:
        keys, values = problem(nodes, options.channels)
        neighbours = torch.randint(nodes, (nodes, NEIGHBOURS))
        steps[str(nodes)] = stepped(
            lambda keys, values, near=neighbours: simplicial_path_attention(keys, values, near), keys, values
        )
    taken = interleaved(steps, options.rounds)
    per_token = {name: [seconds / int(name) for seconds in row] for name, row in taken.items()}
    first = str(lengths[0])
    setting = {"attention": "2-simplicial, paths of 8", "channels": options.channels, "measured": "time of a token"}
    report(setting, per_token, [Ratio(str(n), first, "flat") for n in lengths[1:]], options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", metavar="NAME", help="print the memory of one contender, in MiB")
    parser.add_argument("--json", help="also write the ratios there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print(peak(options.peak, options))
        return
    times(options)
    memory(options)
    paths(options)


if __name__ == "__main__":
    main()
