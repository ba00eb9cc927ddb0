"""The transformer branch of Hypformer on a ball of features: one token moves, the others stay."""

from __future__ import annotations

from typing import cast

import torch

from holonomy.layers import HRC, HTC, HypDropout, HypLinearAttention, HypPositionalEncoding, HypResidual
from holonomy.manifolds import Lorentz
from holonomy.models import HypformerBlock
from holonomy.theory.affine.attention import Crowd, attended
from holonomy.theory.affine.entrywise import asinhc_of_square
from holonomy.theory.affine.forms import Form, constant, times
from holonomy.theory.affine.points import Scaled, dropped, lifted, midpoint, normalised, refined, root, transformed
from holonomy.theory.affine.products import scale, squared_length
from holonomy.theory.attention.projections import NotCoveredError, as_stated

__all__ = ["block", "logarithm", "positioned", "unscaled"]


def unscaled(space: Form, manifold: Lorentz) -> Scaled:
    """A point whose scale is one."""
    one = torch.ones_like(space.center[:, :1])
    return lifted(space, constant(space.noise, one), one, manifold)


def positioned(layer: HypPositionalEncoding, point: Scaled) -> Scaled:
    """Eq. 20."""
    as_stated(layer, HypPositionalEncoding)
    place = lifted(transformed(layer.position, point), point.scale, point.floor, layer.manifold)
    return midpoint(point, place, layer.epsilon, layer.manifold)


def block(layer: HypformerBlock, name: str, query: Scaled, moving: Scaled, crowd: Crowd) -> Form:
    """One block from the positions on: the space part of the query's result, on ``layer.manifold_out``."""
    as_stated(layer, HypformerBlock)
    noise = query.space.noise
    noise.owner = f"{name}.attention"
    if not isinstance(layer.attention, HypLinearAttention):
        raise NotCoveredError(f"model must attend by HypLinearAttention, got {type(layer.attention).__name__}.")
    found = dropped(layer.drop, attended(layer.attention, query, moving, crowd))
    noise.owner = f"{name}.norm_attention"
    space = normalised(layer.norm_attention, _added(layer.residual, query, found))
    noise.owner = f"{name}.feedforward"
    point = unscaled(space, layer.manifold_in)
    widen, refine, narrow, drop = cast("tuple[HTC, HRC, HTC, HypDropout]", tuple(layer.feedforward))
    hidden = unscaled(refined(refine, transformed(widen, point)), refine.manifold_out)
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
    return scale(asinhc_of_square(times(squared_length(space), k * k)), space)
