r"""The transformer branch of Hypformer, block by block, when one token moves or all do.

The token that is followed keeps all groups of noise. The others are held as :class:`TokenForms`: what moves each to
first order, and one ball for the rest. Where one token moves they stay until the first attention, and then follow it;
the rests of two tokens are taken to be independent.

After each LayerNorm but the last a form that is wider than all the LayerNorm can give is replaced by that (L9), so that
every later layer starts from a bound.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import cast

import torch

from holonomy.layers import HypLinearAttention
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import HypformerBlock
from holonomy.theory.affine.arithmetic.ellipsoids import Threat, TokenForms, merged, tokens_of
from holonomy.theory.affine.arithmetic.forms import Form
from holonomy.theory.affine.arithmetic.ratios import Ratio
from holonomy.theory.affine.attention.linear import attended, crowd_of
from holonomy.theory.affine.attention.mixing import Around, attended_among, chunks, heads_of
from holonomy.theory.affine.branch import fed, positioned
from holonomy.theory.affine.points import Scaled, settled, unscaled, within_sphere


def streamed(
    encoder: HypformerEncoder,
    own: int,
    point: Scaled,
    victim: int,
    threat: Threat,
    around: list[Around],
) -> Ratio:
    """The space part of the victim after all blocks, the token that is followed being at ``point`` before the first.

    ``around`` is what is known of the first blocks, of one at least; the others are added to it. Where all tokens move,
    it is the same whichever token is followed.
    """
    blocks = [cast("HypformerBlock", each) for each in encoder.blocks]
    noise = point.space.noise
    for layer, number in zip(blocks, count()):
        name = f"block{number}"
        noise.owner = f"{name}.position"
        scaled = positioned(layer.position, point)
        point = settled(scaled, layer.manifold_in)
        noise.owner = f"{name}.attention"
        here = around[number].with_token(layer.attention, own, point.space)
        if number < len(blocks) - 1:
            space = within_sphere(layer.norm_feedforward, _own(layer, name, own, (scaled, point), here, threat).form())
            if len(around) == number + 1:
                rest = _rest(layer, name, here if threat == "node" else around[number], threat)
                around.append(around_of(blocks[number + 1], rest))
            point = unscaled(space, layer.manifold_out)
        elif victim == own:
            return _own(layer, name, own, (scaled, point), here, threat)
        else:
            query = unscaled(here.tokens.form(torch.tensor([victim]), noise), layer.manifold_in)
            found = attended_among(layer.attention, query, here, threat)
            return fed(layer, name, query, found)
    raise AssertionError


def around_of(layer: HypformerBlock, tokens: TokenForms) -> Around:
    """All tokens of a block, before their positions; of the one that is followed anything may be said."""
    if tokens.everything:
        tokens = tokens_of([merged(_moved(layer, tokens.form(some))) for some in chunks(len(tokens.center))])
    else:
        tokens = replace(tokens, center=layer.position(layer.manifold_in.lift(tokens.center))[:, 1:])
    return heads_of(layer.attention, tokens)


def _moved(layer: HypformerBlock, space: Form) -> Form:
    point = positioned(layer.position, unscaled(space, layer.manifold_in))
    return settled(point, layer.manifold_in).space


def _own(
    layer: HypformerBlock, name: str, own: int, points: tuple[Scaled, Scaled], here: Around, threat: Threat
) -> Ratio:
    """The token that is followed, from its point with its scale and without."""
    scaled, point = points
    if isinstance(layer.attention, HypLinearAttention) and not here.tokens.everything:
        places = layer.manifold_in.lift(here.tokens.center)
        crowd = crowd_of(layer.attention, places, torch.tensor([own]))
        return fed(layer, name, scaled, attended(layer.attention, scaled, scaled, crowd))
    return fed(layer, name, point, attended_among(layer.attention, point, here, threat))


def _rest(layer: HypformerBlock, name: str, here: Around, threat: Threat) -> TokenForms:
    """All tokens after the block; of the one that is followed anything may be said."""
    parts: list[TokenForms] = []
    for some in chunks(len(here.tokens.center)):
        query = unscaled(here.tokens.form(some), layer.manifold_in)
        found = attended_among(layer.attention, query, here, threat)
        parts.append(merged(within_sphere(layer.norm_feedforward, fed(layer, name, query, found).form())))
    return tokens_of(parts)
