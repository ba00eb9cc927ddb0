"""The Triton kernels on a CUDA device: against chunked and compiled torch, and as shares of what the card can do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.case import Case, Contenders, Line, Step, stepped
from benchmarks.plain.simplicial import two_simplicial_attention
from holonomy.layers import simplicial_attention
from holonomy.ops.simplicial_attention import TILE

__all__ = ["CASES"]

HEADS, CHANNELS = 8, 32
WINDOW = (512, 32)


def tensors(count: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for _ in range(count)]


def products(simplexes: int, device: torch.device, dtype: torch.dtype) -> Step:
    """As many operations as attention takes, forward and backward, in matrix products at the card's own rate.

    Two products of d multiplications a simplex forward; backward the logits again, and one for each of five factors.
    """
    a, b = torch.randn(2, 4096, 4096, device=device, dtype=dtype)
    count = max(1, round(8 * HEADS * simplexes * CHANNELS / 4096**3))

    def step() -> list[Tensor]:
        for _ in range(count):
            torch.mm(a, b)
        return []

    return step


def simplicial(dtype: torch.dtype) -> Callable[[int, torch.device], Contenders]:
    def contenders(nodes: int, device: torch.device) -> Contenders:
        leaves = tensors(5, (HEADS, nodes, CHANNELS), device, dtype)
        keys, values = leaves[:3], leaves[3:]
        steps = {
            "triton": stepped(lambda: simplicial_attention(keys, values), leaves),
            "chunked": stepped(lambda: simplicial_attention(keys, values, tile=64 * TILE), leaves),
            "matrix products": products(nodes**3, device, dtype),
        }
        if nodes <= 512:  # 4 GiB of logits
            compiled = torch.compile(two_simplicial_attention, fullgraph=True)
            steps["compiled"] = stepped(lambda: compiled(keys, values), leaves)
        return steps

    return contenders


def windowed(nodes: int, device: torch.device) -> Contenders:
    leaves = tensors(5, (HEADS, nodes, CHANNELS), device, torch.bfloat16)
    options = {"causal": True, "window": WINDOW}
    return {
        "triton": stepped(lambda: simplicial_attention(leaves[:3], leaves[3:], **options), leaves),
        "chunked": stepped(lambda: simplicial_attention(leaves[:3], leaves[3:], tile=64 * TILE, **options), leaves),
        "matrix products": products(nodes * WINDOW[0] * WINDOW[1], device, torch.bfloat16),
    }


def simplicial_case(name: str, dtype: torch.dtype, tolerance: float) -> Case:
    kind = str(dtype).removeprefix("torch.")
    return Case(
        name=name,
        title=f"2-simplicial attention, {HEADS} heads of {CHANNELS} channels, {kind}, forward and backward",
        unit="tokens",
        sizes=(512, 1024, 2048),
        contenders=simplicial(dtype),
        lines=(
            Line("chunked", "triton", {2048: ">= 1.3"}),
            Line("compiled", "triton", note="which keeps all logits"),
            Line("matrix products", "triton", note="share of the card's measured rate of matrix products"),
        ),
        equal=(("chunked", "triton"), ("compiled", "triton")),
        tolerance=tolerance,
        devices=("cuda",),
    )


CASES = (
    simplicial_case("triton-simplicial", torch.float32, 1e-3),
    simplicial_case("triton-simplicial-bfloat16", torch.bfloat16, 5e-2),
    Case(
        name="triton-simplicial-window",
        title=f"2-simplicial attention, causal, windows of {WINDOW}, {HEADS} heads of {CHANNELS} channels, bfloat16",
        unit="tokens",
        sizes=(4096, 16_384),
        contenders=windowed,
        lines=(
            Line("chunked", "triton", {16_384: ">= 1.3"}),
            Line("matrix products", "triton", note="share of the card's measured rate of matrix products"),
        ),
        equal=(("chunked", "triton"),),
        tolerance=5e-2,
        devices=("cuda",),
    ),
)
