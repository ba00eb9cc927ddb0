"""Hyperbolic attention against its Euclidean twins, the reference modules' arithmetic, and torch's own attention."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.case import Case, Contenders, Growth, Line, stepped
from benchmarks.plain import hyperbolic as plain
from holonomy import Lorentz
from holonomy.layers import HypLinearAttention, HypSoftmaxAttention
from holonomy.ops.linear_attention import linear_attention_block

__all__ = ["CASES"]

WIDTH, HEADS = 64, 4
MOST_PAIRS, MOST_FOR_SOFTMAX = 4_000, 50_000
MOST_OF_SUMS, MOST_CAUSAL_PAIRS = 10_000, 10_000


def manifolds(device: torch.device) -> list[Lorentz]:
    """Three learnable curvatures: of the input, of queries, keys and values, of the output."""
    return [Lorentz(kappa, learnable=True, device=device) for kappa in (-1.0, -0.8, -1.2)]


def same_kernel(layer: plain.FlatAttention, x: Tensor) -> Tensor:
    """The twin in flat space through the library's own kernel: what is left is the price of hyperbolic space."""
    maps = (layer.query, layer.key, layer.value)
    weight, bias = torch.cat([m.weight for m in maps]), torch.cat([m.bias for m in maps])
    residual = (layer.residual.weight, layer.residual.bias)
    return linear_attention_block(x, weight, bias, *residual, heads=layer.heads, power=layer.power)


def linear(count: int, device: torch.device) -> Contenders:
    torch.manual_seed(0)
    x = torch.randn(count, WIDTH, device=device) / 4
    before, hidden, after = manifolds(device)
    layer = HypLinearAttention(WIDTH, HEADS, before, after, manifold_hidden=hidden, device=device)
    flat = plain.FlatAttention(WIDTH, HEADS).to(device)
    points = before.lift(x).detach().requires_grad_()
    x.requires_grad_()
    ours, theirs = [points, *layer.parameters()], [x, *flat.parameters()]
    return {
        "Euclidean": stepped(partial(flat, x), theirs),
        "Euclidean, our kernel": stepped(partial(same_kernel, flat, x), theirs),
        "reference": stepped(partial(plain.linear_attention, layer, points), ours),
        "ours": stepped(partial(layer, points), ours),
    }


def softmax(count: int, device: torch.device) -> Contenders:
    """The squared Lorentzian distance, which is a scaled dot product of time and space together.

    Heads of 15 make points of 16 coordinates, as wide as those of torch's attention beside them; torch's kernel takes
    1.3 times as long at 17 as at 16, which is what heads of 16 pay.
    """
    torch.manual_seed(0)
    before, hidden, after = manifolds(device)
    layers, points = {}, {}
    for channels in (15, 16):
        width = HEADS * channels
        layers[channels] = HypSoftmaxAttention(
            width, HEADS, before, after, manifold_hidden=hidden, similarity="lorentz_squared", device=device
        )
        points[channels] = before.lift(torch.randn(count, width, device=device) / 4).detach().requires_grad_()
    x = torch.randn(count, WIDTH, device=device).requires_grad_()
    maps = torch.nn.Linear(WIDTH, 3 * WIDTH, device=device)
    leaves = {channels: [points[channels], *layer.parameters()] for channels, layer in layers.items()}
    found = {
        "SDPA": stepped(partial(sdpa, maps, x), [x, *maps.parameters()]),
        "ours": stepped(partial(layers[15], points[15]), leaves[15]),
        "ours, heads of 16": stepped(partial(layers[16], points[16]), leaves[16]),
    }
    if count <= MOST_PAIRS:
        found["reference"] = stepped(partial(plain.softmax_attention, layers[15], points[15]), leaves[15])
    return found


def sdpa(maps: torch.nn.Linear, x: Tensor, *, is_causal: bool = False) -> Tensor:
    q, k, v = maps(x).view(x.shape[0], 3, HEADS, -1).permute(1, 2, 0, 3)
    mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=is_causal)
    return mixed[0].transpose(0, 1).flatten(-2)


def causal(count: int, device: torch.device) -> Contenders:
    """Both attentions in order, beside torch's, linear attention to all tokens, and sums at each token."""
    torch.manual_seed(0)
    x = torch.randn(count, WIDTH, device=device) / 4
    before, hidden, after = manifolds(device)
    layer = HypLinearAttention(WIDTH, HEADS, before, after, manifold_hidden=hidden, device=device)
    points = before.lift(x).detach().requires_grad_()
    leaves = [points, *layer.parameters()]
    found = {
        "ours": stepped(partial(layer, points, is_causal=True), leaves),
        "ours, all tokens": stepped(partial(layer, points), leaves),
    }
    if count <= MOST_OF_SUMS:
        found["reference"] = stepped(partial(plain.linear_attention, layer, points, is_causal=True), leaves)
    if count <= MOST_CAUSAL_PAIRS:
        maps = torch.nn.Linear(WIDTH, 3 * WIDTH, device=device)
        x.requires_grad_()
        found["SDPA"] = stepped(partial(sdpa, maps, x, is_causal=True), [x, *maps.parameters()])
        # Points of 16 coordinates, as wide as torch's heads.
        width = HEADS * 15
        softmax = HypSoftmaxAttention(
            width, HEADS, before, after, manifold_hidden=hidden, similarity="lorentz_squared", device=device
        )
        narrow = before.lift(torch.randn(count, width, device=device) / 4).detach().requires_grad_()
        found["softmax"] = stepped(partial(softmax, narrow, is_causal=True), [narrow, *softmax.parameters()])
    return found


def growing(count: int, device: torch.device) -> Contenders:
    """Linear attention at any size, softmax attention as far as a turn of it takes less than a minute."""
    names = {"linear": linear, "softmax": softmax} if count <= MOST_FOR_SOFTMAX else {"linear": linear}
    return {name: build(count, device)["ours"] for name, build in names.items()}


CASES = (
    Case(
        name="hyperbolic-linear-attention",
        title=f"hyperbolic linear attention, {HEADS} heads of {WIDTH // HEADS}, forward and backward",
        unit="tokens",
        sizes=(10_000, 50_000, 200_000),
        contenders=linear,
        lines=(
            Line("ours", "Euclidean", {10_000: "<= 0.90", 50_000: "<= 0.75", 200_000: "<= 0.30"}),
            Line(
                "ours",
                "Euclidean, our kernel",
                dict.fromkeys((10_000, 50_000, 200_000), "<= 1.12"),
                note="rows of 65 numbers, time coordinates, and three curvatures with their gradients",
            ),
            Line("reference", "ours", {10_000: ">= 1.4", 50_000: ">= 1.8"}),
            Line("ours", "reference", {50_000: "<= 0.12"}, of="memory"),
        ),
        equal=(("reference", "ours"), ("Euclidean", "Euclidean, our kernel")),
    ),
    Case(
        name="hyperbolic-softmax-attention",
        title=f"hyperbolic softmax attention, {HEADS} heads of 15 + 1, forward and backward",
        unit="tokens",
        sizes=(1_000, 2_000, 4_000),
        contenders=softmax,
        lines=(
            Line("ours", "SDPA", {2_000: "<= 1.08"}, note="points of 16 coordinates beside 16 channels; whole layers"),
            Line("ours, heads of 16", "SDPA"),
            Line("reference", "ours"),
            Line("ours", "reference", of="memory"),
        ),
        equal=(("reference", "ours"),),
    ),
    Case(
        name="hyperbolic-causal-attention",
        title=f"causal hyperbolic attention, {HEADS} heads of {WIDTH // HEADS}, forward and backward",
        unit="tokens",
        sizes=(1_000, 10_000, 50_000),
        contenders=causal,
        lines=(
            Line("ours", "SDPA", {10_000: "<= 0.5"}, note="whole layers; torch's skips later keys"),
            Line("softmax", "SDPA", note="points of 16 coordinates beside 16 channels; whole layers"),
            Line("ours", "ours, all tokens", note="weights inside of each chunk, which the other form does not make"),
            Line("ours", "reference", of="memory"),
            Line("reference", "ours"),
            Growth("ours", exponent="<= 1.1", bytes_per_unit="<= 1500"),
        ),
        equal=(("reference", "ours"),),
    ),
    Case(
        name="hyperbolic-attention-growth",
        title=f"hyperbolic attention in the number of tokens, {HEADS} heads of {WIDTH // HEADS}, forward and backward",
        unit="tokens",
        sizes=(10_000, 50_000, 100_000, 1_000_000),
        contenders=growing,
        lines=(
            Growth("linear", exponent="<= 1.1", bytes_per_unit="<= 700"),
            Growth("softmax"),
            Line("softmax", "linear"),
        ),
    ),
)
