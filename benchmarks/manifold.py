"""The hyperboloid's functions beside Geoopt's, and a linear layer beside HypLL's.

Both start from space parts, so that gradients are the same total derivatives. Ours compute float32 points in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import geoopt
import torch
from hypll.manifolds.poincare_ball import Curvature, PoincareBall
from hypll.nn import HLinear
from hypll.tensors import ManifoldTensor
from torch import Tensor

from benchmarks.case import Case, Contenders, Line, stepped
from holonomy import Lorentz
from holonomy.layers import HTC

__all__ = ["CASES"]

FEATURES = 64
NOTE = "float64 inside, in chunks that stay in the cache: right where Geoopt's formulas cancel"
# Of two points x, y and a tangent vector u at x.
FUNCTIONS: dict[str, Callable[[geoopt.Lorentz, Tensor, Tensor, Tensor], Tensor]] = {
    "dist": lambda m, x, y, _: m.dist(x, y),
    "expmap": lambda m, x, _, u: m.expmap(x, u),
    "logmap": lambda m, x, y, _: m.logmap(x, y),
    "transp": lambda m, x, y, u: m.transp(x, y, u),
    "expmap0": lambda m, _, __, u: m.expmap0(torch.nn.functional.pad(u[..., 1:], (1, 0))),
    "logmap0": lambda m, x, _, __: m.logmap0(x),
}
# Which of x, y, u a function reads.
USES = {
    "dist": (True, True, False),
    "expmap": (True, False, True),
    "logmap": (True, True, False),
    "transp": (True, True, True),
    "expmap0": (False, False, True),
    "logmap0": (True, False, False),
}


def functions(count: int, device: torch.device) -> Contenders:
    draw = torch.Generator().manual_seed(0)
    spaces = [(torch.randn(count, FEATURES, generator=draw) / 8).to(device).requires_grad_() for _ in range(3)]
    manifolds = {"ours": Lorentz(-1.0, device=device), "geoopt": geoopt.Lorentz(k=1.0).to(device)}
    lift = manifolds["ours"].lift

    def of(manifold: geoopt.Lorentz, function: Callable[..., Tensor]) -> Tensor:
        x, y, direction = spaces
        ambient = lift(x)
        time = (x * direction).sum(-1, keepdim=True) / ambient[..., :1]
        return function(manifold, ambient, lift(y), torch.cat([time, direction], -1))

    steps: Contenders = {}
    for name, function in FUNCTIONS.items():
        used = [z for z, taken in zip(spaces, USES[name], strict=True) if taken]
        for library, manifold in manifolds.items():
            steps[f"{name}, {library}"] = stepped(lambda m=manifold, f=function: of(m, f), used)
    return steps


def linear(count: int, device: torch.device) -> Contenders:
    """Each on points of its own model of hyperbolic space."""
    torch.manual_seed(0)
    flat = torch.randn(count, FEATURES, device=device) / 16
    manifold, ball = Lorentz(-1.0, device=device), PoincareBall(Curvature(1.0)).to(device)
    ours = HTC(FEATURES, FEATURES, manifold, device=device)
    theirs = HLinear(FEATURES, FEATURES, manifold=ball).to(device)
    x, inner = manifold.lift(flat).requires_grad_(), flat.clone().requires_grad_()
    learned = [inner, theirs.z.tensor, theirs.bias]
    return {
        "HTC": stepped(lambda: ours(x), [x, *(p for p in ours.parameters() if p.requires_grad)]),
        "HLinear, HypLL": stepped(lambda: theirs(ManifoldTensor(inner, manifold=ball)).tensor, learned),
    }


CASES = (
    Case(
        name="manifold",
        title=f"functions of points of {FEATURES} dimensions, forward and backward",
        unit="points",
        sizes=(10_000,),
        contenders=functions,
        lines=tuple(Line(f"{name}, ours", f"{name}, geoopt", note=NOTE) for name in FUNCTIONS),
        equal=tuple((f"{name}, geoopt", f"{name}, ours") for name in FUNCTIONS),
        tolerance=5e-3,
    ),
    Case(
        name="hyperbolic-linear-layer",
        title=f"a hyperbolic linear layer, {FEATURES} features, forward and backward",
        unit="points",
        sizes=(10_000,),
        contenders=linear,
        lines=(
            Line("HLinear, HypLL", "HTC", note="HypLL's layer is another one, in the Poincare ball"),
            Line("HLinear, HypLL", "HTC", of="memory"),
        ),
    ),
)
