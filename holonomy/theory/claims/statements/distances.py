r"""Claims on distances: Hypformer Propositions 4.1 and 4.2, and the naive change of curvature, eq. 8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holonomy import numerics
from holonomy.layers import HRC, HTC, HypActivation, HypLayerNorm
from holonomy.manifolds import Lorentz
from holonomy.theory.certificates.distances import DistanceScaling, boost, distance_scaling, naive_change
from holonomy.theory.certificates.stretching import Ends
from holonomy.theory.claims.pictures import Picture, Trials
from holonomy.theory.claims.verdict import Claims, Draws, Trial, filled

CLAIMS = Claims()  #: claims on distances and changes of curvature

# The maps that are drawn, by their number.
_ISOMETRIES = ("identity", "orthogonal map", "boost")
_GENERAL = ("linear map", "ReLU", "LayerNorm")


def _curvatures(draws: Draws) -> tuple[Lorentz, Lorentz]:
    first, second = (Lorentz(-draws.logarithmic(0.1, 10.0), **draws.factory_kwargs) for _ in range(2))
    return first, second


def _points(draws: Draws, manifold: Lorentz, count: int, features: int, radius: float = 2.0) -> Tensor:
    u = draws.normal(count, features) * (radius / features**0.5)
    return manifold.lift(u / (-manifold.curvature).sqrt())


@CLAIMS.add("distances.closure", "Hypformer Prop. 4.1", "equal", rounds=200)
def _closure(draws: Draws, index: int) -> Iterable[Trial]:
    """HTC and HRC send points of one hyperboloid to points of the other, to rounding."""
    # Off the hyperboloid by no more than the rounding of the squares that cancel.
    source, target = _curvatures(draws)
    features = draws.integer(1, 8)
    x = _points(draws, source, 16, features, draws.logarithmic(0.01, 20.0))
    if index % 2:
        layer: nn.Module = HTC(features, features, source, target, **draws.factory_kwargs)
        layer = filled(layer, weight=draws.normal(features, features + 1))
    else:
        layer = HRC(partial(nn.functional.linear, weight=draws.normal(features, features)), source, target)
    with torch.no_grad():
        y = layer(x)
    c = -target.curvature
    off = (c * (y[..., 1:].square().sum(-1) - y[..., 0].square()) + 1).abs()
    room = 8 * (features + 4) * torch.finfo(draws.dtype).eps * c * y[..., 0].square()
    worst = (off / room).argmax()
    yield Trial(off[worst].item(), room[worst].item())


@CLAIMS.add("distances.isometries", "Hypformer Prop. 4.2", "equal", rounds=150)
def _isometries(draws: Draws, index: int) -> Iterable[Trial]:
    """The identity, orthogonal maps and boosts scale all distances by the root of the ratio of curvatures."""
    source, target = _curvatures(draws)
    features = draws.integer(2, 6)
    x = _points(draws, source, 12, features)
    layer = _isometry(index % 3, draws, source, target, features)
    found = distance_scaling(layer, x)
    off = max(abs(found.least / found.expected - 1), abs(found.largest / found.expected - 1))
    seen = _seen(found) if index < len(_ISOMETRIES) else {}
    yield Trial(off, numerics.tolerance(draws.dtype).rtol, at={"kind": float(index % 3)}, seen=seen)


def _isometry(kind: int, draws: Draws, source: Lorentz, target: Lorentz, features: int) -> nn.Module:
    """The identity, an orthogonal map, a boost."""
    if kind == 0:
        return HRC(nn.Identity(), source, target)
    if kind == 1:
        turn = torch.linalg.qr(draws.normal(features, features).double()).Q.to(draws.dtype)
        return HRC(partial(nn.functional.linear, weight=turn), source, target)
    layer = HTC(features, features, source, target, bias=False, **draws.factory_kwargs)
    return filled(layer, weight=boost(0.5 * draws.normal(features)))


def _seen(found: DistanceScaling) -> Mapping[str, Tensor]:
    """Distances before, and after in units in which an isometry changes nothing."""
    return {"before": found.before, "after": found.after / found.expected}


@CLAIMS.add(
    "distances.general",
    "Hypformer Prop. 4.2, as printed",
    expected=False,
    note="linear maps, ReLU and LayerNorm change the order of triples",
    rounds=60,
)
def _general(draws: Draws, index: int) -> Iterable[Trial]:
    """HTC and HRC keep the order of distances, whatever the function."""
    source, target = _curvatures(draws)
    features = draws.integer(2, 8)
    x = _points(draws, source, 16, features)
    layers: list[nn.Module] = [
        HTC(features, features, source, target, **draws.factory_kwargs),
        HypActivation(torch.relu, source, target),
        HypLayerNorm(features, source, target, elementwise_affine=False, **draws.factory_kwargs),
    ]
    layer = layers[index % 3]
    if isinstance(layer, HTC):
        layer = filled(layer, weight=draws.normal(features, features + 1))
    found = distance_scaling(layer, x)
    note = f"{found.flipped:.1%} of the triples of 16 points change order"
    seen = _seen(found) if index < len(_GENERAL) else {}
    yield Trial(found.flipped, 0.0, at={"kind": float(index % 3)}, note=note, seen=seen)


@CLAIMS.add("distances.naive", "Hypformer eq. 8", expected=False)
def _naive(draws: Draws) -> Iterable[Trial]:
    """Keeping the space part and making time again keeps the order of distances."""
    # On a line, x = 1 is nearer to 0 than to 2.2 before, and nearer to 2.2 after.
    source, target = (Lorentz(k, **draws.factory_kwargs) for k in (-1.0, -1 / 10_000))
    line = source.lift(torch.tensor([[1.0], [0.0], [2.2]], **draws.factory_kwargs))
    moved = naive_change(line, target)
    (_, low, high), (_, after_low, after_high) = source.cdist(line, line)[0], target.cdist(moved, moved)[0]
    # The claim: the ratio stays on the same side of one.
    inverted = (low / high > 1) != (after_low / after_high > 1)
    note = f"from 1 to 0 and to 2.2: {low:.4f} > {high:.4f} before, {after_low:.4f} < {after_high:.4f} after"
    plane = _points(draws, source, 12, 2)
    seen = _seen(distance_scaling(partial(naive_change, target=target), plane, ends=Ends(source, target)))
    yield Trial(float(inverted), 0.0, note=note, seen=seen)


def _scatter(axes: Sequence[Any], trials: Trials) -> None:
    panels = (
        ("distances.isometries", _ISOMETRIES, "isometries"),
        ("distances.general", _GENERAL, "other maps"),
        ("distances.naive", ("space part kept",), "eq. 8, naive"),
    )
    for plot, (claim, names, title) in zip(axes, panels, strict=True):
        shown = [t for t in trials[claim] if t.seen]
        for trial, name in zip(shown, names, strict=False):
            before, after = (trial.seen[key].cpu() for key in ("before", "after"))
            plot.plot(before.tolist(), after.tolist(), ".", markersize=3, label=name)
        plot.axline((0, 0), slope=1, color="0.7", linewidth=1, zorder=0)
        plot.set(xlabel="distance before", title=title)
        plot.legend(fontsize="small")
    axes[0].set_ylabel(r"after, over $\sqrt{\kappa / \kappa'}$")


PICTURES: tuple[Picture, ...] = (
    Picture(
        "Distances before and after a change of curvature",
        "Each dot is a pair of points. Isometries of unit coordinates scale all distances alike (Proposition 4.2); "
        "other maps of HTC and HRC do not, nor does keeping the space part.",
        ("distances.isometries", "distances.general", "distances.naive"),
        _scatter,
        3,
    ),
)
"""The picture of changes of curvature."""
