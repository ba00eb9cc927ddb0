r"""Claims on certified nodes: the lemmas L1 to L4 and L9 of :mod:`holonomy.theory.affine`, and what follows of them.

Models have random weights and are small: a certificate knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.layers import GCN, HypLayerNorm
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import Hypformer
from holonomy.theory.affine.cap import farthest, least_products
from holonomy.theory.affine.certificate import NodeCertificate, certify_node
from holonomy.theory.certificates.certificate import certify
from holonomy.theory.claims.verdict import Claims, Draws, Trial

CLAIMS = Claims()  #: lemmas, and the statements of the certificate

_NODES, _FEATURES, _HIDDEN, _CLASSES = 6, 3, 6, 3
_TOLERANCE = numerics.tolerance(torch.float64).rtol
_ROUNDING = 2.0**12 * torch.finfo(torch.float64).eps
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"graph_encoder": None},
    {"graph_encoder": GCN(_FEATURES, _HIDDEN, _HIDDEN), "decoder": "mlr"},
    {"attention": "softmax", "graph_encoder": None},
    {"power": 3.0, "heads": 2, "decoder": "prototypes"},
    {"average": "midpoint", "norm_eps": 0.5},
)

_SMOOTH: dict[str, Any] = {"attention": "softmax", "similarity": "geodesic", "graph_encoder": None, "norm_eps": 1.0}

_Function = Callable[[Tensor], Tensor]


def random_model(draws: Draws, index: int) -> tuple[Hypformer, Tensor, Tensor]:
    """A model in evaluation, every parameter random, its features and a ring of nodes."""
    model = Hypformer(_FEATURES, _HIDDEN, _CLASSES, layers=1, **_OPTIONS[index % len(_OPTIONS)]).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            size = p.shape[-1] ** -0.5 if p.ndim > 1 else 0.2
            p.copy_(size * random_numbers(draws, *p.shape) + (1.0 if name.endswith("norm.weight") else 0.0))
    return model, random_numbers(draws, _NODES, _FEATURES), ring(_NODES)


def ring(nodes: int) -> Tensor:
    """Edges of a cycle, both ways."""
    here = torch.arange(nodes)
    before = here.roll(1)
    return torch.stack([torch.cat([here, before]), torch.cat([before, here])])


def random_numbers(draws: Draws, *shape: int) -> Tensor:
    """Normal ones in float64, in which a certificate computes."""
    return draws.normal(*shape).double().cpu()


def _least(margin: _Function, zero: Tensor, radius: float) -> float:
    """The least value that steps to where the gradient points find in a ball; the linear part is least there."""
    change, least = zero, margin(zero).item()
    for _ in range(6):
        change = change.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(margin(change), change)
        if not bool(gradient.norm() > 0):
            break
        change = -radius * gradient / gradient.norm()
        least = min(least, margin(change).item())
    return least


def _losses(
    drawn: tuple[Hypformer, Tensor, Tensor], index: int, share: float, *, together: bool
) -> tuple[NodeCertificate, dict[int, _Function], Tensor]:
    """A certificate, its ball a share of what moves, the margins over other classes by the change, and no change."""
    model, x, edge_index = drawn
    victim = index % _NODES
    rows = list(range(_NODES)) if together else [victim]
    radius = share * x[rows].norm().item()
    found = certify_node(model, x, edge_index, victim, radius, threat="frobenius" if together else "node")

    def over(other: int) -> _Function:
        def margin(change: Tensor) -> Tensor:
            logits = model(x.index_add(0, torch.tensor(rows), change), edge_index)[victim]
            return logits[found.target] - logits[other]

        return margin

    margins = {k: over(k) for k in range(_CLASSES) if k != found.target}
    return found, margins, torch.zeros(len(rows), _FEATURES).double()


@CLAIMS.add("certified.sound", "certify_node", "lower", axis="share", rounds=40)
def _sound(draws: Draws, index: int) -> Iterable[Trial]:
    """No change of features within the radius takes more from a margin than the certificate allows."""
    drawn = random_model(draws, index)
    share = 2.0**-13 if index % 2 else draws.logarithmic(0.001, 1.0)
    found, margins, zero = _losses(drawn, index, share, together=index % 3 == 2)
    for other, margin in margins.items():
        nominal = margin(zero).item()
        taken = nominal - _least(margin, zero, found.radius)
        yield Trial(taken, nominal - found.margins[other].item(), floor=_TOLERANCE, at={"share": share})


@CLAIMS.add(
    "certified.first_order",
    "certify_node",
    statement="Of one node that moves, certified over linear change tends to 1, its excess in proportion to the radius",
    rounds=15,
)
@CLAIMS.add(
    "certified.first_order_together",
    "certify_node",
    statement="The same of all nodes that move together, in a model of one block",
    together=True,
    rounds=15,
)
def _first_order(draws: Draws, index: int, *, together: bool = False) -> Iterable[Trial]:
    """How much more than the linear part and rounding a certificate takes: a third at most on a quarter of the ball."""
    drawn = random_model(draws, index)

    def taken_and_linear(share: float) -> Tensor:
        found, margins, zero = _losses(drawn, index, share, together=together)
        values = {other: margin(zero.requires_grad_()) for other, margin in margins.items()}
        slopes = [torch.autograd.grad(value, zero)[0].norm() for value in values.values()]
        taken = torch.stack([value - found.affine[other] for other, value in values.items()])
        return torch.stack([taken, found.radius * torch.stack(slopes)]).detach()

    def excess(share: float) -> Tensor:
        taken, linear = taken_and_linear(share)
        return torch.stack([(taken - rounding) / linear - 1, rounding / linear])

    taken, linear = taken_and_linear(2.0**-28)
    rounding = taken - linear  # in so small a ball nothing else is left
    for share in (2.0**-12, 2.0**-16, 2.0**-20):
        (larger, _), (smaller, rounded) = excess(share), excess(share / 4)
        if bool((smaller <= larger.abs() / 3).all()):
            break  # else a ReLU may have its kink in both balls, and be linear in smaller ones
    for more, less, floor in zip(larger.tolist(), smaller.tolist(), rounded.tolist(), strict=True):
        yield Trial(less, abs(more) / 3, floor=1000 * _TOLERANCE + floor / 100)


@CLAIMS.add(
    "certified.layer_wise",
    "H12",
    expected=False,
    note="blocks without weights have a small constant; with random weights it is the other way round",
    rounds=8,
)
def _layer_wise(draws: Draws, index: int) -> Iterable[Trial]:
    """Never worse than the product of the layers' hyperbolic constants."""
    # What the certificate allows to be taken from a margin, beside what a constant of the whole model does.
    model = Hypformer(_FEATURES, _HIDDEN, _CLASSES, layers=2, **_SMOOTH).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                without = index % 2 == 0 and "blocks" in name
                p.copy_(random_numbers(draws, *p.shape) * (0.0 if without else p.shape[-1] ** -0.5))
    x, radius = random_numbers(draws, _NODES, _FEATURES), 0.6 if index % 2 == 0 else draws.logarithmic(0.001, 1.0)
    constant = certify(model, radius, x=x, metric="l2", starts=0).constant
    found, logits = certify_node(model, x, None, 0, radius, threat="frobenius"), model(x)[0].detach()
    taken = (logits[found.target] - logits - found.margins)[torch.arange(_CLASSES) != found.target]
    yield Trial(taken.amax().item(), 2**0.5 * constant * radius)


@CLAIMS.add("certified.mixed", "L9", rounds=20)
def _mixed(draws: Draws, index: int) -> Iterable[Trial]:
    """Never worse than the cap by the last LayerNorm, nor than the enclosure."""
    drawn = random_model(draws, index)
    found, margins, zero = _losses(drawn, index, draws.logarithmic(0.01, 10.0), together=index % 3 == 2)
    for other, margin in margins.items():
        each = [margin(zero).item() - part[other].item() for part in (found.margins, found.affine, found.cap)]
        yield Trial(each[0], min(each[1:]), floor=_TOLERANCE)


@CLAIMS.add("certified.cap", "L9", "lower", rounds=60)
def _cap(draws: Draws, index: int) -> Iterable[Trial]:
    """Products with logarithms of what a LayerNorm gives, and their lengths, have the bounds of L9."""
    encoder = cast("HypformerEncoder", random_model(draws, 0)[0].encoder)
    norm = cast("HypLayerNorm", encoder.blocks[-1].get_submodule("norm_feedforward"))
    gain, shift = (norm.get_parameter(f"function.norm.{part}") for part in ("weight", "bias"))
    row = random_numbers(draws, _HIDDEN)
    with torch.no_grad():
        if index % 2:
            gain.fill_(1.0)
            shift.zero_()
            row = row - row.mean()
        far = torch.cat([-(row * gain)[None], random_numbers(draws, 200, _HIDDEN)])
        found = norm.manifold_out.logmap0(norm(norm.manifold_in.lift(100 * far)))[:, 1:]
        yield Trial((found @ -row).amax().item(), -least_products(encoder, row[None, None]).item())
        yield Trial(found.norm(dim=-1).amax().item(), farthest(encoder).item())


@CLAIMS.add("certified.secant", "L1", "lower", rounds=100)
def _secant(draws: Draws, index: int) -> Iterable[Trial]:
    """f(t) - st, s the secant, lies between its values at an end and where f has slope s."""
    functions: tuple[tuple[_Function, _Function], ...] = (
        (torch.cosh, torch.asinh),
        (torch.tanh, lambda s: (1 - s).sqrt().atanh()),
        (torch.reciprocal, lambda s: (-1 / s).sqrt()),
        (lambda t: t.relu().square(), lambda s: s / 2),
        (torch.asinh, lambda s: (1 / s.square() - 1).sqrt()),
    )
    function, turning = functions[index % len(functions)]
    low = draws.logarithmic(0.01, 3.0)
    ends = torch.tensor([low, low + draws.logarithmic(0.01, 3.0)], dtype=torch.float64)
    values = function(ends)
    slope = (values[1] - values[0]) / (ends[1] - ends[0])
    at = turning(slope).clamp(*ends)
    between = torch.stack([values[0] - slope * ends[0], function(at) - slope * at])
    t = torch.lerp(ends[0], ends[1], torch.linspace(0.0, 1.0, 99, dtype=torch.float64))
    off = (function(t) - slope * t - between.mean()).abs().amax()
    yield Trial(off.item(), (between[1] - between[0]).abs().item() / 2, floor=_ROUNDING)


@CLAIMS.add("certified.products", "L2", rounds=100)
def _products(draws: Draws, index: int) -> Iterable[Trial]:
    """(g.d) d lies in g/2 + (|g|/2) Ball for |d| <= 1, at the rim for |d| = 1."""
    g, d = random_numbers(draws, 4), random_numbers(draws, 4)
    d = d / d.norm() * (1.0 if index % 2 else draws.uniform(0.0, 1.0))
    yield Trial(((g @ d) * d - g / 2).norm().item(), g.norm().item() / 2)


@CLAIMS.add("certified.lengths", "L3", "equal", rounds=100)
def _lengths(draws: Draws, _: int) -> Iterable[Trial]:
    """For h = sqrt(a|y|^2 + b) and its linear part l, h - l = a dy'(I - a yy'/h0^2)dy / (h + l)."""
    y, change = random_numbers(draws, 4), random_numbers(draws, 4)
    a, b = draws.logarithmic(0.01, 10.0), draws.uniform(0.0, 3.0)
    start, end = (a * y @ y + b) ** 0.5, (a * (y + change) @ (y + change) + b) ** 0.5
    tangent = start + a * y @ change / start
    quadratic = a * (change @ change - a * (y @ change) ** 2 / start**2)
    yield Trial((end - tangent - quadratic / (end + tangent)).abs().item(), _ROUNDING * (end + start).item())


@CLAIMS.add("certified.lorentz_norms", "L4", "equal", rounds=100)
def _lorentz_norms(draws: Draws, _: int) -> Iterable[Trial]:
    """For the Lorentz norm L and its linear part l, l - L = |dZ across Z0|^2 / (L + l)."""
    metric = torch.diag(torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    space = random_numbers(draws, 2, 3)
    time = space.norm(dim=-1) * (1 + draws.logarithmic(0.001, 1.0))
    start, end = torch.cat([time[:, None], space], -1)
    norm, after = ((-(z @ metric @ z)).sqrt() for z in (start, end))
    tangent = -(start @ metric @ end) / norm
    across = end - start * (tangent / norm)
    identity = across @ metric @ across / (tangent + after)
    room = _ROUNDING * (time[0] * time[1] / norm + tangent).item()
    yield Trial((tangent - after - identity).abs().item(), room)
