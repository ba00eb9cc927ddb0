"""Hyperbolic layers as multiples of ``nn.Linear`` of the same width, three learnable curvatures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.case import Case, Contenders, Line, Step, stepped
from holonomy import Lorentz
from holonomy.layers import (
    HTC,
    HypActivation,
    HypLayerNorm,
    HypLinearAttention,
    HypPositionalEncoding,
    HypResidual,
    HypRMSNorm,
    LorentzPLFC,
    TangentLinear,
)
from holonomy.layers.hyperbolic.midpoint import add_and_norm

__all__ = ["CASES"]

FEATURES = 64
LAYERS = (
    "HTC",
    "HypActivation",
    "HypLayerNorm",
    "HypResidual",
    "HypPositionalEncoding",
    "HypLinearAttention",
    "TangentLinear",
    "LorentzPLFC",
)


def contenders(nodes: int, device: torch.device) -> Contenders:
    torch.manual_seed(0)
    first, hidden, last = (Lorentz(-1.0, learnable=True, device=device) for _ in range(3))
    flat = torch.randn(nodes, FEATURES, device=device)
    x, branch = first.lift(flat).detach(), hidden.lift(flat.flip(0)).detach()

    def of(layer: nn.Module, *inputs: Tensor) -> Step:
        leaves = [t.detach().requires_grad_() for t in inputs]
        learned = [p for p in layer.parameters() if p.requires_grad]
        return stepped(lambda: layer(*leaves), [*leaves, *learned])

    made = (
        HTC(FEATURES, FEATURES, first, hidden),
        HypActivation(torch.relu, first, hidden),
        HypLayerNorm(FEATURES, first, hidden),
        HypResidual(first, hidden),
        HypPositionalEncoding(FEATURES, first),
        HypLinearAttention(FEATURES, 4, first, last, manifold_hidden=hidden),
        TangentLinear(FEATURES, FEATURES, first, hidden),
        LorentzPLFC(FEATURES, FEATURES, first, hidden),
    )
    inputs = {"HypResidual": (x, branch)}
    steps = {name: of(layer.to(device), *inputs.get(name, (x,))) for name, layer in zip(LAYERS, made, strict=True)}
    return {"Linear": of(nn.Linear(FEATURES, FEATURES, device=device), flat)} | steps


def norms(nodes: int, device: torch.device) -> Contenders:
    """The midpoint of a residual connection and its norm: one after the other, and in one formula."""
    torch.manual_seed(0)
    first, last = (Lorentz(-1.0, learnable=True, device=device) for _ in range(2))
    spaces = [torch.randn(nodes, FEATURES, device=device).requires_grad_() for _ in range(2)]
    residual, steps = HypResidual(first), {}
    for kind in (HypLayerNorm, HypRMSNorm):
        norm = kind(FEATURES, first, last, device=device)

        def apart(norm: HypLayerNorm | HypRMSNorm = norm) -> Tensor:
            return norm(residual(*map(first.lift, spaces)))

        def at_once(norm: HypLayerNorm | HypRMSNorm = norm) -> Tensor:
            return add_and_norm(residual, norm, *map(first.lift, spaces))

        leaves = [*spaces, *norm.parameters()]
        steps[kind.__name__], steps[f"{kind.__name__}, one formula"] = stepped(apart, leaves), stepped(at_once, leaves)
    return steps


CASES = (
    Case(
        name="layers",
        title=f"hyperbolic layers, {FEATURES} features, over nn.Linear, forward and backward",
        unit="nodes",
        sizes=(10_000,),
        contenders=contenders,
        lines=(
            *(Line(name, "Linear") for name in LAYERS),
            Line("TangentLinear", "HTC", {10_000: "<= 1.3"}),
            Line("LorentzPLFC", "HTC"),
        ),
    ),
    Case(
        name="norms",
        title=f"a residual and its norm in one formula, {FEATURES} features, forward and backward",
        unit="nodes",
        sizes=(1_000, 10_000),
        contenders=norms,
        lines=(
            Line("HypLayerNorm, one formula", "HypLayerNorm"),
            Line("HypRMSNorm, one formula", "HypRMSNorm"),
            Line("HypRMSNorm, one formula", "HypLayerNorm, one formula"),
        ),
        equal=tuple((name, f"{name}, one formula") for name in ("HypLayerNorm", "HypRMSNorm")),
    ),
)
