r"""The layers of a Hypformer block but its attention, and what stands before and after the blocks.

Decoders take tangent vectors u at the origin. The point :math:`\exp_o(u)` has the space part
:math:`u \sinh(k|u|)/(k|u|)` (L1 in :math:`|u|^2`, L2), and its time is a length (L3). Both hyperbolic decoders are then
a function of one linear form for each class (L1).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from holonomy.layers import (
    HRC,
    HTC,
    ExpMapHTC,
    HypDropout,
    HypLinearAttention,
    HypMLR,
    HypPositionalEncoding,
    HypPrototypes,
    HypResidual,
    HypSoftmaxAttention,
)
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.layers.hyperbolic.feedforward import FeedForward
from holonomy.manifolds import Lorentz
from holonomy.models import HypformerBlock
from holonomy.theory.affine.arithmetic.entrywise import arsinh, asinhc_of_square, minus_squared_arcosh, sinhc_of_square
from holonomy.theory.affine.arithmetic.forms import Form, constant
from holonomy.theory.affine.arithmetic.products import scale, squared_length
from holonomy.theory.affine.arithmetic.ratios import Ratio
from holonomy.theory.affine.points import (
    Scaled,
    above,
    bias_of,
    dropped,
    lifted,
    midpoint,
    normalised,
    refined,
    root,
    transformed,
)
from holonomy.theory.attention.projections import NotCoveredError, as_stated
from holonomy.theory.certificates.refinements import parts
from holonomy.theory.certificates.regions import refuse_inner_curvature, refuse_other_curvature, refuse_without_ends
from holonomy.theory.certificates.stretching import ends_of

_FEEDFORWARD = (HTC, HRC, HTC, HypDropout)
# What changes nothing in evaluation.
_STILL = (nn.Dropout, nn.Identity)
# The farthest hyperplanes of HypMLR, in curvature radii.
_FARTHEST = 300.0


def refuse_jumps(encoder: HypformerEncoder) -> None:
    """Refuse layers that read points of one curvature as points of another, and feed-forwards of other layers."""
    as_stated(encoder, HypformerEncoder)
    as_stated(encoder.embedding, ExpMapHTC)
    before = _passed(encoder.embedding.manifold_out, "", {"refine": encoder.refine})
    for number, module in enumerate(encoder.blocks):
        name, block = f"block{number}.", cast("HypformerBlock", module)
        as_stated(block, HypformerBlock)
        _refuse_feedforward(f"{name}feedforward", block.feedforward)
        start, attention = _passed(before, name, {"position": block.position}), block.attention
        if not isinstance(attention, HypLinearAttention | HypSoftmaxAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NotCoveredError(
                f"model must attend by HypLinearAttention or HypSoftmaxAttention, got {type(attention).__name__}."
            )
        refuse_other_curvature(root(start).item(), root(block.manifold_in).item(), name[:-1])
        inner = {part: getattr(attention, part) for part in ("query", "key", "value")}
        refuse_inner_curvature(inner, attention.manifold_in, attention.manifold_hidden, f"{name}attention")
        residual = {"residual": block.residual}
        _passed(start, name, {"attention": attention, "drop": block.drop, **residual})
        start = _passed(start, name, {**residual, "norm_attention": block.norm_attention})
        _passed(start, f"{name}feedforward.", {**dict(block.feedforward.named_children()), **residual})
        before = _passed(start, name, {**residual, "norm_feedforward": block.norm_feedforward})
    _passed(before, "", {"drop": encoder.drop})


def _passed(before: Lorentz, name: str, layers: dict[str, nn.Module]) -> Lorentz:
    """Where points end that layers are passed one after the other."""
    for part, layer in layers.items():
        refuse_without_ends(layer, name + part)
        source, target = ends_of(layer)
        refuse_other_curvature(root(before).item(), root(cast("Lorentz", source)).item(), name + part)
        before = cast("Lorentz", target)
    return before


def refuse_output(drop: nn.Module) -> None:
    """Refuse an activation after the last norm: the cap is what that norm gives."""
    if not isinstance(drop, HypDropout) or not all(isinstance(step, _STILL) for step in parts(drop.function)):
        found = type(drop.function if isinstance(drop, HRC) else drop).__name__
        raise NotCoveredError(f"encoder.drop must be HypDropout of nn.Dropout, got {found}.")


def _refuse_feedforward(name: str, layer: nn.Module) -> None:
    if type(layer) not in (FeedForward, nn.Sequential) or len(cast("nn.Sequential", layer)) != len(_FEEDFORWARD):
        kinds = ", ".join(kind.__name__ for kind in _FEEDFORWARD)
        raise NotCoveredError(f"{name} must be an nn.Sequential of {kinds}, got {type(layer).__name__}.")


def positioned(layer: nn.Module, point: Scaled) -> Scaled:
    """Eq. 20."""
    as_stated(layer, HypPositionalEncoding)
    layer = cast("HypPositionalEncoding", layer)
    place = lifted(transformed(layer.position, point), point.scale, point.floor, layer.manifold)
    return midpoint(point, place, layer.epsilon, layer.manifold)


def fed(layer: HypformerBlock, name: str, query: Scaled, found: Form) -> Ratio:
    """One block after the attention, whose result comes times the query's scale: a space part on ``manifold_out``."""
    noise = query.space.noise
    noise.owner = f"{name}.norm_attention"
    found = dropped(layer.drop, found)
    scaled = normalised(layer.norm_attention, _added(layer.residual, query, found))
    point = lifted(scaled.over, scaled.under, scaled.floor, layer.manifold_in)
    noise.owner = f"{name}.feedforward"
    widen, refine, narrow, drop = cast("tuple[HTC, HRC, HTC, HypDropout]", tuple(layer.feedforward))
    hidden = lifted(refined(refine, transformed(widen, point)), point.scale, point.floor, refine.manifold_out)
    found = dropped(drop, transformed(narrow, hidden))
    noise.owner = f"{name}.norm_feedforward"
    return normalised(layer.norm_feedforward, _added(layer.residual, point, found))


def _added(layer: HypResidual, point: Scaled, branch: Form) -> Scaled:
    as_stated(layer, HypResidual)
    manifold = layer.manifold_out
    if any(each is not manifold for each in (layer.manifold_in, layer.manifold_branch)):
        raise NotCoveredError("model must have a HypResidual of one manifold.")
    return midpoint(point, lifted(branch, point.scale, point.floor, manifold), layer.epsilon, manifold)


def logarithm(space: Form, manifold: Lorentz) -> Form:
    r"""The logarithm at the origin: :math:`y \operatorname{arsinh}(k |y|)/(k |y|)`."""
    k = root(manifold)
    return scale(asinhc_of_square(squared_length(space) * (k * k)), space)


def refuse_decoder(decoder: nn.Module) -> None:
    """Refuse a decoder that is not covered."""
    for kind in (nn.Linear, HypMLR, HypPrototypes):
        if isinstance(decoder, kind):
            as_stated(decoder, kind)
            return
    raise NotCoveredError(f"decoder must be linear, HypMLR or HypPrototypes, got {type(decoder).__name__}.")


def decoded(decoder: Any, tangent: Form, manifold: Lorentz) -> Form:
    """The logits of a tangent vector."""
    if isinstance(decoder, nn.Linear):
        return tangent.linear(decoder.weight.double(), bias_of(decoder))
    k = root(manifold)
    point = above(scale(sinhc_of_square(squared_length(tangent) * (k * k)), tangent), manifold)
    return _hyperplanes(decoder, point) if isinstance(decoder, HypMLR) else _prototypes(decoder, point)


def _hyperplanes(decoder: HypMLR, point: Form) -> Form:
    weight, k = decoder.weight.double(), root(decoder.manifold)
    size = weight.norm(dim=-1, keepdim=True)
    normal = weight / torch.where(size > 0, size, 1.0)
    shift = (k * decoder.offset.double()).clamp(-_FARTHEST, _FARTHEST)
    plane = torch.cat([-shift.tanh()[:, None], normal], dim=-1)
    return arsinh(point.linear(plane) * (k * shift.cosh())) * (size.squeeze(-1) / k)


def _prototypes(decoder: HypPrototypes, point: Form) -> Form:
    k = root(decoder.manifold)
    points = decoder.prototypes().double()
    rows = torch.cat([points[:, :1], -points[:, 1:]], dim=-1) * (k * k)
    # -c <x, p> - 1 is cosh of the distance, less one.
    apart = point.linear(rows) + constant(point.noise, -torch.ones_like(rows[:, 0]).expand(len(point.center), -1))
    strength = decoder.log_scale.double().exp()
    return minus_squared_arcosh(apart) * (strength / (k * k))
