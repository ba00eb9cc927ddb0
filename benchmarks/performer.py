"""Performer attention (FAVOR+) beside torch's exact softmax attention, and beside its formula as published."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import Case, Contenders, Growth, Line, stepped
from benchmarks.plain.performer import favor_attention
from holonomy.ops.performer import orthogonal_projection, performer_attention

__all__ = ["CASES"]

HEADS, WIDTH, FEATURES = 4, 32, 64


def contenders(nodes: int, device: torch.device) -> Contenders:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, nodes, WIDTH, generator=draw).to(device).requires_grad_() for _ in range(3))
    w = orthogonal_projection(FEATURES, WIDTH, generator=draw).to(device)
    return {
        "SDPA": stepped(lambda: scaled_dot_product_attention(q, k, v), (q, k, v)),
        "published form": stepped(lambda: favor_attention(q, k, v, w), (q, k, v)),
        "ours": stepped(lambda: performer_attention(q, k, v, w), (q, k, v)),
    }


CASES = (
    Case(
        name="performer",
        title=f"performer_attention, {HEADS} heads x {WIDTH}, {FEATURES} features, forward and backward",
        unit="tokens",
        sizes=(256, 512, 1024, 2048, 4096),
        contenders=contenders,
        lines=(
            Line("ours", "SDPA", {1024: "<= 0.35", 4096: "<= 0.08"}),
            Line("ours", "published form"),
            Line("ours", "SDPA", of="workspace"),
            Growth("ours", exponent="<= 1.1"),
        ),
        equal=(("published form", "ours"),),
    ),
)
