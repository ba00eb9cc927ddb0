"""Performer attention (FAVOR+) beside torch's exact softmax attention, and beside its formula as published."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import Case, Contenders, Growth, Line, stepped
from benchmarks.plain.performer import favor_attention
from holonomy.ops.performer import orthogonal_projection, performer_attention
from holonomy.ops.performer.causal import PerformerState, performer_attention_after

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


def causal(nodes: int, device: torch.device) -> Contenders:
    """In order, beside torch's, attention to all tokens, and sums that are kept for the way back."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, nodes, WIDTH, generator=draw).to(device).requires_grad_() for _ in range(3))
    w = orthogonal_projection(FEATURES, WIDTH, generator=draw).to(device)
    start = PerformerState.empty(v, w)
    return {
        "SDPA": stepped(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v)),
        "all tokens": stepped(lambda: performer_attention(q, k, v, w), (q, k, v)),
        "kept": stepped(lambda: performer_attention_after(q, k, v, w, None, start)[0], (q, k, v)),
        "ours": stepped(lambda: performer_attention(q, k, v, w, is_causal=True), (q, k, v)),
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
    Case(
        name="causal-performer",
        title=f"causal performer_attention, {HEADS} heads x {WIDTH}, {FEATURES} features, forward and backward",
        unit="tokens",
        sizes=(1024, 4096, 16384),
        contenders=causal,
        lines=(
            Line("ours", "SDPA", {16384: "<= 0.3"}, note="torch's skips later keys"),
            Line("ours", "all tokens", note="scales of each feature at each token"),
            Line("ours", "kept", {16384: "<= 0.5"}, of="memory"),
            Line("ours", "kept"),
            Growth("ours", exponent="<= 1.1"),
        ),
        equal=(("kept", "ours"),),
    ),
)
