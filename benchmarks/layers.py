"""Hyperbolic layers, forward and backward, as multiples of ``nn.Linear`` of the same width within one process.

Float32, one thread, three learnable curvatures. Time is the thread's own.

    python -m benchmarks.layers [--nodes 10000] [--features 64] [--rounds 25] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.rounds import Ratio, interleaved, report
from holonomy import Lorentz
from holonomy.layers import HTC, HypActivation, HypLayerNorm, HypLinearAttention, HypPositionalEncoding, HypResidual


def contenders(nodes: int, features: int) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    first, hidden, last = (Lorentz(-1.0, learnable=True) for _ in range(3))
    flat = torch.randn(nodes, features)
    x, branch = first.lift(flat).detach(), hidden.lift(flat.flip(0)).detach()

    def pair(layer: nn.Module, *inputs: Tensor) -> Callable[[], None]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        gradient = torch.randn_like(layer(*leaves))
        return lambda: layer(*leaves).backward(gradient)

    return {
        "Linear": pair(nn.Linear(features, features), flat),
        "HTC": pair(HTC(features, features, first, hidden), x),
        "HypActivation": pair(HypActivation(torch.relu, first, hidden), x),
        "HypLayerNorm": pair(HypLayerNorm(features, first, hidden), x),
        "HypResidual": pair(HypResidual(first, hidden), x, branch),
        "HypPositionalEncoding": pair(HypPositionalEncoding(features, first), x),
        "HypLinearAttention": pair(HypLinearAttention(features, 4, first, last, manifold_hidden=hidden), x),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", help="also write the ratios there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    taken = interleaved(contenders(options.nodes, options.features), options.rounds)
    ratios = [Ratio(name, "Linear") for name in taken if name != "Linear"]
    report({"nodes": options.nodes, "features": options.features}, taken, ratios, options.json)


if __name__ == "__main__":
    main()
