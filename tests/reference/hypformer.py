"""Hypformer again, from figure 4 and section 4.6, out of the loop-written layers; and TokenGT's tokens in its blocks.

``reference(module, *inputs, **probabilities)`` reads the module's parameters by name. Each probability is handed in by
the case, so that a dropout that the module lost is missed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import layers, models
from tests.reference import tokens
from tests.reference.hyperbolic import (
    Vector,
    affine,
    curvature,
    exp_htc,
    exponential,
    gcn,
    htc,
    layer_norm,
    learned_points,
    linear_attention,
    logarithm,
    mlr,
    point,
    positional_encoding,
    prototypes,
    residual,
    rms_norm,
    rowwise,
    softmax_attention,
    times,
)

Activation = Callable[[Tensor], Tensor]


def refined(space: Tensor, activation: Activation, dropout: float, kappa: Tensor, *, training: bool) -> Tensor:
    """An activation, then dropout, of the space parts: two refinements of eq. 21 at one curvature."""

    def mapped(p: Vector) -> Vector:
        out = [functional.dropout(activation(entry), dropout, training) for entry in p]
        return point(out, kappa)

    return rowwise(mapped, space)


def block(
    module: models.HypformerBlock,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    activation: Activation = torch.relu,
    norm_eps: float = 1e-5,
    memory: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    **masks: Any,
) -> Tensor:
    """One block of figure 4; a row of padding starts as zeros. ``masks`` are those of the attention.

    A memory takes the part of the tokens in the attention, or comes after them in one of its own.
    """
    after, memory = (None, memory) if module.cross_attention is None else (memory, None)
    if key_padding_mask is not None and memory is None:
        x = torch.where(key_padding_mask[..., None], 0.0, x)
    here, training = curvature(module.manifold_in), module.training

    def dropped(points: Tensor) -> Tensor:
        return refined(points[..., 1:], lambda entry: entry, dropout, here, training=training)

    attend = linear_attention if isinstance(module.attention, layers.HypLinearAttention) else softmax_attention
    if not isinstance(module.position, nn.Identity):
        x = positional_encoding(module.position, x)
    norm = layer_norm if isinstance(module.norm_attention, layers.HypLayerNorm) else rms_norm
    x = residual(module.residual, x, dropped(attend(module.attention, x, key_padding_mask, memory=memory, **masks)))
    x = norm(module.norm_attention, x, eps=norm_eps)
    if after is not None:
        ratio = (curvature(module.manifold_memory) / here).sqrt()
        after = rowwise(lambda p: point(times(ratio, p[1:]), here), after)
        found = attend(module.cross_attention, x, memory_key_padding_mask, memory=after)
        x = norm(module.norm_cross, residual(module.residual, x, dropped(found)), eps=norm_eps)
    first, refine, second, _ = module.feedforward
    hidden = htc(first, x)[..., 1:]
    hidden = refined(hidden, activation, dropout, curvature(refine.manifold_out), training=training)
    x = residual(module.residual, x, dropped(htc(second, hidden)))
    return norm(module.norm_feedforward, x, eps=norm_eps)


def encoder(
    module: nn.Module,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    *,
    place: Callable[[Tensor], Tensor] = lambda points: points,
    dropout: float = 0.0,
    output_dropout: float = 0.0,
    activation: Activation = torch.relu,
    norm_eps: float = 1e-5,
    **masks: Any,
) -> Tensor:
    """The hyperbolic branch: features to points of the last manifold; ``place`` moves them before the first block."""
    start = curvature(module.refine.manifold_out)
    x = place(refined(exp_htc(module.embedding, x)[..., 1:], activation, dropout, start, training=module.training))
    for each in module.blocks:
        x = block(each, x, key_padding_mask, dropout=dropout, activation=activation, norm_eps=norm_eps, **masks)
    kappa = curvature(module.blocks[-1].manifold_out)
    return refined(x[..., 1:], lambda entry: entry, output_dropout, kappa, training=module.training)


def hyp_transformer(
    module: models.HypTransformer,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    activation: Activation = torch.relu,
    norm_eps: float = 1e-5,
    **masks: Any,
) -> Tensor:
    """Each token at the midpoint of itself and the point of its place, then the blocks."""

    def place(points: Tensor) -> Tensor:
        if module.positions is None:
            return points
        return residual(module.residual, points, learned_points(module.positions)[: x.shape[-2]].expand_as(points))

    options = {"dropout": dropout, "activation": activation, "norm_eps": norm_eps}
    return encoder(module.encoder, x, key_padding_mask, place=place, **options, **masks)


def mixed(
    module: models.Hypformer, x: Tensor, edge_index: Tensor | None, graph_weight: float = 0.5, **options: Any
) -> Tensor:
    """(1 - w) log_o(x) + w g, the branches that are there; ``options`` are those of the encoder."""
    kappa = curvature(module.manifold_out)
    branches = []
    if module.encoder is not None:
        branches.append(rowwise(lambda p: logarithm(p, kappa), encoder(module.encoder, x, **options)))
    if module.graph_encoder is not None:
        branches.append(gcn(module.graph_encoder, x, edge_index, dropout=options["dropout"]))
    if len(branches) == 1:
        return branches[0]
    return (1 - graph_weight) * branches[0] + graph_weight * branches[1]


def decoded(module: nn.Module, tangent: Tensor) -> Tensor:
    """By the decoder that the class of the module's own says, on the tangent space or on points."""
    if isinstance(module.decoder, nn.Linear):
        return rowwise(lambda u: affine(module.decoder.weight, module.decoder.bias, u), tangent)
    decode = mlr if isinstance(module.decoder, layers.HypMLR) else prototypes
    return decode(module.decoder, points_of(module, tangent))


def points_of(module: nn.Module, tangent: Tensor) -> Tensor:
    kappa = curvature(module.manifold_out)
    return rowwise(lambda u: point(exponential(u, kappa), kappa), tangent)


def hypformer(
    module: models.Hypformer,
    x: Tensor,
    edge_index: Tensor | None = None,
    *,
    dropout: float = 0.0,
    output_dropout: float = 0.0,
    activation: Activation = torch.relu,
    norm_eps: float = 1e-5,
    graph_weight: float = 0.5,
) -> Tensor:
    options = {"dropout": dropout, "output_dropout": output_dropout, "activation": activation, "norm_eps": norm_eps}
    return decoded(module, mixed(module, x, edge_index, graph_weight, **options))


def hypformer_points(
    outer: nn.Module, x: Tensor, edge_index: Tensor, *, dropout: float = 0.0, output_dropout: float = 0.0
) -> Tensor:
    """What the decoder reads, as points."""
    tangent = mixed(outer.inner, x, edge_index, dropout=dropout, output_dropout=output_dropout)
    return points_of(outer.inner, tangent)


def hyp_tokengt(
    outer: nn.Module,
    x: Tensor,
    edge_index: Tensor,
    edge_attr: Tensor,
    identifiers: Tensor,
    *,
    dropout: float = 0.0,
    eigenvector_dropout: float = 0.0,
    activation: Activation = torch.relu,
) -> Tensor:
    """One graph: its tokens as tangent vectors, the blocks, and the decoder at [graph] or at the nodes."""
    module = outer.inner
    inputs = (x, edge_index, edge_attr, identifiers)
    rows = tokens.graph_tokens(module.tokenizer, *inputs, eigenvector_dropout=eigenvector_dropout)[0]
    rows = functional.dropout(rows, dropout, module.training)
    points = encoder(module.encoder, rows, dropout=dropout, activation=activation)
    read = points[:1] if module.level == "graph" else points[1 : 1 + len(x)]
    kappa = curvature(module.manifold_out)
    return decoded(module, rowwise(lambda p: logarithm(p, kappa), read))


def hyp_tokengt_points(outer: nn.Module, *inputs: Tensor, dropout: float = 0.0) -> Tensor:
    """What the decoder reads, as points."""
    module = outer.inner.inner
    rows = tokens.graph_tokens(module.tokenizer, *inputs)[0]
    rows = functional.dropout(rows, dropout, module.training)
    points = encoder(module.encoder, rows, dropout=dropout)
    return points[:1] if module.level == "graph" else points[1 : 1 + len(inputs[0])]


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    models.HypformerBlock: block,
    models.Hypformer: hypformer,
    models.HypTokenGT: hyp_tokengt,
    models.HypTransformer: hyp_transformer,
}
