r"""Determinant logits and rotary positions: Simplicial section 2.4; lower orders: appendix F.1.

.. math:: L_{m_0 \dots m_N} = \sum_a \det\bigl[ K_0[m_0]^{(a)}, \dots, K_N[m_N]^{(a)} \bigr]

over chunks of N+1 channels. Printed are floor(d/N) chunks, which overrun d channels: it must be floor(d/(N+1)). The
logits do not change under one rotation of SO(N+1) per chunk, and change their sign under a reflection. Rotating the
token at position p by :math:`R^p` makes them depend on differences of positions only if R is one rotation of
SO(N+1); the usual pairs of channels do not for N = 2. Equal arguments give zero; at N = 1 the form is antisymmetric,
so it is no ordinary attention.

Appendix F.1: with :math:`K^{(2)} = V^{(2)} = 1`, 2-simplicial attention is ordinary attention. With a row of ones
appended to both it is the mixture :math:`(Z_1 A_1 + Z_2 A_2) / (Z_1 + Z_2)` of both orders, Z their softmax masses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy._shapes import Float


def determinant_logits(keys: Float[Tensor, "slots n d"]) -> Float[Tensor, "..."]:
    """Sum determinants over chunks, as they are defined."""
    slots, tokens, channels = keys.shape
    chunks = channels // slots
    split = keys[..., : chunks * slots].unflatten(-1, (chunks, slots))
    places = [split[m].reshape(*[1] * m, tokens, *[1] * (slots - 1 - m), chunks, slots) for m in range(slots)]
    return torch.linalg.det(torch.stack(torch.broadcast_tensors(*places), -2)).sum(-1)


def rotation(size: int, *, generator: torch.Generator) -> Float[Tensor, "size size"]:
    """Draw a rotation of SO(size)."""
    skew = torch.randn(size, size, generator=generator, dtype=torch.float64)
    # The exponential is orthogonal up to rounding that grows with the angles: its last digits are made so.
    turn, upper = torch.linalg.qr(torch.linalg.matrix_exp(skew - skew.mT))
    return turn * upper.diagonal().sign()


def rotate_chunks(
    x: Float[Tensor, "n d"], turn: Float[Tensor, "size size"], positions: Float[Tensor, " n"]
) -> Float[Tensor, "n d"]:
    """Turn every chunk of each token by the power of a rotation that is its position."""
    size = turn.shape[0]
    whole = x.shape[-1] // size * size
    powers = torch.stack([torch.linalg.matrix_power(turn, int(p)) for p in positions])
    turned = torch.einsum("nij,ncj->nci", powers, x[:, :whole].unflatten(-1, (-1, size))).flatten(1)
    return torch.cat([turned, x[:, whole:]], -1)


def with_ones(x: Float[Tensor, "n d"]) -> Float[Tensor, "m d"]:
    """Append a row of ones, for the factor that then drops out of a product (appendix F.1)."""
    return torch.cat([x, torch.ones_like(x[:1])])


def mixture_of_orders(
    keys: Float[Tensor, "3 n d"], values: Float[Tensor, "2 n d_v"], scale: float
) -> tuple[Float[Tensor, "n d_v"], Float[Tensor, "n d_v"]]:
    """Evaluate appendix F.1 twice: 2-simplicial attention with rows of ones, and the mixture that it should be."""
    query, first, second = keys
    one, two = values
    logits = scale * torch.einsum("qd,jd,kd->qjk", query, first, with_ones(second))
    weights = logits.flatten(1).softmax(1).reshape(logits.shape)
    whole = torch.einsum("qjk,jv,kv->qv", weights, one, with_ones(two))
    pairs, triples = scale * query @ first.mT, logits[..., :-1].flatten(1)
    products = torch.einsum("jv,kv->jkv", one, two).flatten(0, 1)
    masses = torch.stack([pairs.logsumexp(1), triples.logsumexp(1)]).softmax(0)[..., None]
    return whole, masses[0] * (pairs.softmax(1) @ one) + masses[1] * (triples.softmax(1) @ products)
