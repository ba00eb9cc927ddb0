"""2-simplicial attention against the algorithm written out, and along paths of neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.case import Case, Contenders, Growth, Line, Step, stepped
from benchmarks.plain.simplicial import two_simplicial_attention
from holonomy.layers import simplicial_attention, simplicial_path_attention

__all__ = ["CASES"]

CHANNELS = 32
NEIGHBOURS = 8
RATE = "matrix products / ours is the share of their rate: exponentials, running sums and products of keys are the rest"
GATHERED = "the steps of a node are gathered once for some of the paths that come to it, a few at a time"


def problem(nodes: int, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, nodes, CHANNELS, generator=draw).to(device).requires_grad_() for _ in range(5)]
    return tensors[:3], tensors[3:]


def products(nodes: int, device: torch.device) -> Step:
    """As many operations as attention takes forward and backward, in matrix products of its depth.

    Two products of n^3 d forward; backward the logits again, and one for each of five factors.
    """
    a, b = torch.randn(1024, CHANNELS, device=device), torch.randn(CHANNELS, 1024, device=device)
    count = max(1, round(8 * nodes**3 / 1024**2))

    def step() -> list[Tensor]:
        for _ in range(count):
            torch.mm(a, b)
        return []

    return step


def exact(nodes: int, device: torch.device) -> Contenders:
    keys, values = problem(nodes, device)
    functions = {"written out": two_simplicial_attention, "ours": simplicial_attention}
    steps = {
        name: stepped(lambda function=function: function(keys, values), [*keys, *values])
        for name, function in functions.items()
        if name == "ours" or nodes <= 256  # 4 GiB beyond
    }
    return steps | {"matrix products": products(nodes, device)}


def along_paths(nodes: int, device: torch.device) -> Contenders:
    keys, values = problem(nodes, device)
    near = torch.randint(nodes, (nodes, NEIGHBOURS), generator=torch.Generator().manual_seed(0)).to(device)
    return {"ours": stepped(lambda: simplicial_path_attention(keys, values, near), [*keys, *values])}


CASES = (
    Case(
        name="simplicial",
        title=f"2-simplicial attention, exact, one head of {CHANNELS} channels, forward and backward",
        unit="tokens",
        sizes=(64, 128, 256, 512),
        contenders=exact,
        lines=(
            Line("ours", "written out", {256: "<= 0.65"}),
            Line("ours", "written out", {256: "<= 0.02"}, of="workspace"),
            Line("matrix products", "ours", {256: ">= 0.55"}, note=RATE),
            Growth("ours"),
        ),
        equal=(("written out", "ours"),),
    ),
    Case(
        name="simplicial-paths",
        title=f"2-simplicial attention along the paths of {NEIGHBOURS} neighbours, forward and backward",
        unit="tokens",
        sizes=(1024, 4096, 16_384, 32_768),
        contenders=along_paths,
        lines=(Growth("ours", "<= 1.1", {4096: "<= 1.1"}, microseconds_per_unit="<= 38", note=GATHERED),),
    ),
)
