r"""The transformer branch of Hypformer, block by block, when one token moves or all do.

The token that is followed keeps all groups of noise. The others are held as :class:`TokenForms`: what moves each to
first order, and one ball for the rest. Where one token moves they stay until the first attention, and then follow it;
the rests of two tokens are taken to be independent.

After each LayerNorm but the last a form that is wider than all the LayerNorm can give is replaced by that (L9), so that
every later layer starts from a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from holonomy.theory.affine.attention.mixing import Heads, attended_among, chunks, heads_of
from holonomy.theory.affine.branch import fed, positioned
from holonomy.theory.affine.points import Scaled, settled, unscaled, within_sphere


@dataclass(frozen=True)
class Stream:
    """Where a block starts: the token that is followed, and all of them."""

    own: int
    point: Scaled
    tokens: TokenForms


def streamed(encoder: HypformerEncoder, stream: Stream, victim: int, threat: Threat, others: list[TokenForms]) -> Ratio:
    """The space part of the victim after all blocks; ``others`` are the tokens after each block, made where missing."""
    blocks = [cast("HypformerBlock", each) for each in encoder.blocks]
    noise = stream.point.space.noise
    for layer, number in zip(blocks, count()):
        name = f"block{number}"
        noise.owner = f"{name}.position"
        placed, scaled = _placed(layer, stream)
        noise.owner = f"{name}.attention"
        heads = heads_of(layer.attention, placed.tokens)
        if number < len(blocks) - 1:
            space = within_sphere(layer.norm_feedforward, _own(layer, name, placed, scaled, heads, threat).form())
            if len(others) == number:
                others.append(_rest(layer, name, placed, heads, threat))
            tokens = others[number].with_token(stream.own, space)
            stream = Stream(stream.own, unscaled(space, layer.manifold_out), tokens)
        elif victim == stream.own:
            return _own(layer, name, placed, scaled, heads, threat)
        else:
            query = unscaled(placed.tokens.form(torch.tensor([victim]), noise), layer.manifold_in)
            found = attended_among(layer.attention, query, heads, threat)
            return fed(layer, name, query, found)
    raise AssertionError


def _placed(layer: HypformerBlock, stream: Stream) -> tuple[Stream, Scaled]:
    """All tokens with their positions; the one that is followed also with its scale."""
    scaled = positioned(layer.position, stream.point)
    point = settled(scaled, layer.manifold_in)
    tokens = stream.tokens
    if tokens.everything:
        tokens = tokens_of([merged(_moved(layer, tokens.form(some))) for some in chunks(len(tokens.center))])
    else:
        center = layer.position(layer.manifold_in.lift(tokens.center))[:, 1:]
        tokens = TokenForms(center, tokens.which, tokens.first, tokens.rest)
    return Stream(stream.own, point, tokens.with_token(stream.own, point.space)), scaled


def _moved(layer: HypformerBlock, space: Form) -> Form:
    point = positioned(layer.position, unscaled(space, layer.manifold_in))
    return settled(point, layer.manifold_in).space


def _own(layer: HypformerBlock, name: str, placed: Stream, scaled: Scaled, heads: Heads, threat: Threat) -> Ratio:
    """The token that is followed."""
    if isinstance(layer.attention, HypLinearAttention) and not placed.tokens.everything:
        points = layer.manifold_in.lift(placed.tokens.center)
        crowd = crowd_of(layer.attention, points, torch.tensor([placed.own]))
        return fed(layer, name, scaled, attended(layer.attention, scaled, scaled, crowd))
    point = placed.point
    return fed(layer, name, point, attended_among(layer.attention, point, heads, threat))


def _rest(layer: HypformerBlock, name: str, placed: Stream, heads: Heads, threat: Threat) -> TokenForms:
    """All tokens after the block; what is said of the one that is followed is not read."""
    parts: list[TokenForms] = []
    for some in chunks(len(placed.tokens.center)):
        query = unscaled(placed.tokens.form(some), layer.manifold_in)
        found = attended_among(layer.attention, query, heads, threat)
        parts.append(merged(within_sphere(layer.norm_feedforward, fed(layer, name, query, found).form())))
    return tokens_of(parts)
