"""The layers of a Hypformer block but its attention, and what stands before and after the blocks."""

from __future__ import annotations

from typing import cast

from torch import nn

from holonomy.layers import HRC, HTC, HypDropout, HypPositionalEncoding, HypResidual
from holonomy.manifolds import Lorentz
from holonomy.models import HypformerBlock
from holonomy.theory.affine.arithmetic.entrywise import asinhc_of_square
from holonomy.theory.affine.arithmetic.forms import Form, times
from holonomy.theory.affine.arithmetic.products import scale, squared_length
from holonomy.theory.affine.points import (
    Scaled,
    dropped,
    lifted,
    midpoint,
    normalised,
    refined,
    root,
    transformed,
    unscaled,
    within_sphere,
)
from holonomy.theory.attention.projections import NotCoveredError, as_stated


def positioned(layer: nn.Module, point: Scaled) -> Scaled:
    """Eq. 20."""
    as_stated(layer, HypPositionalEncoding)
    layer = cast("HypPositionalEncoding", layer)
    place = lifted(transformed(layer.position, point), point.scale, point.floor, layer.manifold)
    return midpoint(point, place, layer.epsilon, layer.manifold)


def fed(layer: HypformerBlock, name: str, query: Scaled, found: Form, *, last: bool) -> Form:
    """One block after the attention, whose result comes times the query's scale: a space part on ``manifold_out``."""
    noise = query.space.noise
    noise.owner = f"{name}.norm_attention"
    found = dropped(layer.drop, found)
    space = within_sphere(layer.norm_attention, normalised(layer.norm_attention, _added(layer.residual, query, found)))
    noise.owner = f"{name}.feedforward"
    point = unscaled(space, layer.manifold_in)
    widen, refine, narrow, drop = cast("tuple[HTC, HRC, HTC, HypDropout]", tuple(layer.feedforward))
    hidden = unscaled(refined(refine, transformed(widen, point)), refine.manifold_out)
    found = dropped(drop, transformed(narrow, hidden))
    noise.owner = f"{name}.norm_feedforward"
    space = normalised(layer.norm_feedforward, _added(layer.residual, point, found))
    return space if last else within_sphere(layer.norm_feedforward, space)


def _added(layer: HypResidual, point: Scaled, branch: Form) -> Scaled:
    as_stated(layer, HypResidual)
    manifold = layer.manifold_out
    if any(each is not manifold for each in (layer.manifold_in, layer.manifold_branch)):
        raise NotCoveredError("model must have a HypResidual of one manifold.")
    return midpoint(point, lifted(branch, point.scale, point.floor, manifold), layer.epsilon, manifold)


def logarithm(space: Form, manifold: Lorentz) -> Form:
    r"""The logarithm at the origin: :math:`y \operatorname{arsinh}(k |y|)/(k |y|)`."""
    k = root(manifold)
    return scale(asinhc_of_square(times(squared_length(space), k * k)), space)
