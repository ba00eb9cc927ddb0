"""The price of hyperbolic space: a training step of Hypformer's encoder, forward and backward, beside its flat twin."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.case import Case, Contenders, Line, stepped
from benchmarks.plain import hyperbolic as plain
from holonomy import Lorentz
from holonomy.layers.hyperbolic.encoder import HypformerEncoder

__all__ = ["CASES"]

WIDTH, HEADS, HIDDEN, LAYERS = 64, 4, 256, 2
MIDPOINTS = "positions are midpoints, and residuals need times; in flat space both are means"
FUSED = "a compiled midpoint computes in float64 at every radius: what eager reads to choose float32, a graph can not"


def problem(
    count: int, device: torch.device, *, far: bool = False
) -> tuple[torch.Tensor, HypformerEncoder, plain.FlatEncoder, plain.FlatEncoder]:
    """Tokens whose space parts are about 1 long; or, as in trained models, half longer than 5, a few than 100."""
    torch.manual_seed(0)
    u = torch.randn(count, WIDTH, device=device) / 8
    if far:
        u = torch.asinh(5 * torch.randn(count, 1, device=device).exp()) * torch.nn.functional.normalize(u, dim=-1)
    flat, lean = (plain.FlatEncoder(WIDTH, HEADS, HIDDEN, LAYERS, lean=lean).to(device) for lean in (False, True))
    lean.load_state_dict(flat.state_dict())
    after = Lorentz(-1.0, learnable=True, device=device)
    ours = HypformerEncoder(WIDTH, WIDTH, after, layers=LAYERS, heads=HEADS, feedforward=HIDDEN, device=device)
    return u, ours, flat, lean


def contenders(count: int, device: torch.device, *, far: bool = False, reference: bool = True) -> Contenders:
    u, ours, flat, lean = problem(count, device, far=far)
    mine = list(ours.parameters())
    steps = {
        "Euclidean": stepped(partial(flat, u), list(flat.parameters())),
        "lean Euclidean": stepped(partial(lean, u), list(lean.parameters())),
        "ours": stepped(lambda: ours(ours.points(u)), mine),
    }
    return steps | ({"reference": stepped(partial(plain.encoder, ours, u), mine)} if reference else {})


def compiled(count: int, device: torch.device) -> Contenders:
    u, ours, flat, _ = problem(count, device)
    torch.compiler.reset()
    functions = {"Euclidean": (flat, flat), "ours": (ours, lambda u: ours(ours.points(u)))}
    steps: Contenders = {}
    for name, (model, function) in functions.items():
        learned = list(model.parameters())
        steps[name] = stepped(partial(function, u), learned)
        steps[f"{name}, compiled"] = stepped(partial(torch.compile(function, fullgraph=True), u), learned)
    return steps


CASES = (
    Case(
        name="training-step",
        title=f"forward and backward of {LAYERS} blocks, width {WIDTH}, {HEADS} heads, feed-forward {HIDDEN}",
        unit="tokens",
        sizes=(10_000,),
        contenders=contenders,
        lines=(
            Line("ours", "Euclidean", {10_000: "<= 1.05"}, note=MIDPOINTS),
            Line("ours", "lean Euclidean", {10_000: "<= 1.12"}, note=MIDPOINTS),
            Line("reference", "ours", {10_000: ">= 1.6"}),
            Line("ours", "Euclidean", of="memory"),
            Line("ours", "reference", of="memory"),
        ),
        equal=(("reference", "ours"), ("Euclidean", "lean Euclidean")),
    ),
    Case(
        name="training-step-far",
        title="the same, of tokens as far out as those of trained models",
        unit="tokens",
        sizes=(10_000,),
        contenders=partial(contenders, far=True),
        lines=(Line("ours", "Euclidean", note=MIDPOINTS), Line("reference", "ours")),
        equal=(("reference", "ours"), ("Euclidean", "lean Euclidean")),
    ),
    Case(
        name="training-step-alone",
        title="the same as the first without the reference, after whose large tables glibc keeps memory for all",
        unit="tokens",
        sizes=(10_000,),
        contenders=partial(contenders, reference=False),
        lines=(Line("ours", "Euclidean"), Line("ours", "lean Euclidean")),
        equal=(("Euclidean", "lean Euclidean"),),
    ),
    Case(
        name="compile-training-step",
        title=f"torch.compile(fullgraph=True) of the training step, {LAYERS} blocks, forward and backward",
        unit="tokens",
        sizes=(10_000,),
        contenders=compiled,
        lines=(
            Line("ours, compiled", "Euclidean, compiled", {10_000: "<= 1.10"}, note=FUSED),
            Line("Euclidean", "Euclidean, compiled"),
            Line("ours", "ours, compiled"),
            Line("ours, compiled", "Euclidean, compiled", of="memory"),
        ),
        equal=(("Euclidean", "Euclidean, compiled"), ("ours", "ours, compiled")),
    ),
)
