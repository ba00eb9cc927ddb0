"""Hypformer's layers written out, as released modules compute them, and their twins in flat space.

Each operation is one of torch's and makes its tensor. Functions read the parameters of the library's layers, so that
the weights are the same. Equations are Hypformer's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import Lorentz
from holonomy.layers import HTC, HypLayerNorm, HypLinearAttention, HypSoftmaxAttention
from holonomy.layers.hyperbolic.block import HypformerBlock
from holonomy.layers.hyperbolic.encoder import HypformerEncoder

__all__ = [
    "FlatAttention",
    "FlatEncoder",
    "encoder",
    "linear_attention",
    "softmax_attention",
]

_TINY = 1e-12


def lift(space: Tensor, manifold: Lorentz) -> Tensor:
    """Eq. 1: the time coordinate, concatenated."""
    time = ((space**2).sum(-1, keepdim=True) - 1 / manifold.curvature).sqrt()
    return torch.cat([time, space], -1)


def htc(layer: HTC, x: Tensor) -> Tensor:
    """Eq. 9: a linear layer of the whole point, its time, and the change of curvature of both."""
    here = lift(functional.linear(x, layer.weight, layer.bias), layer.manifold_in)
    return here * (layer.manifold_in.curvature / layer.manifold_out.curvature).sqrt()


def features(e: Tensor, power: float, scale: Tensor) -> Tensor:
    """Eq. 19 per head, with both norms."""
    tilde = torch.relu(e) / scale
    powered = tilde**power
    return tilde.norm(dim=-1, keepdim=True) / (powered.norm(dim=-1, keepdim=True) + _TINY) * powered


def linear_attention(layer: HypLinearAttention, x: Tensor, *, is_causal: bool = False) -> Tensor:
    """Eqs. 14-19, with the time coordinates of queries, keys and values; causally with the sums up to each token."""
    scale = layer.log_scale.exp()
    points = (htc(projection, x) for projection in (layer.query, layer.key, layer.value))
    q, k, v = (features(p[..., 1:].unflatten(-1, (layer.heads, -1)), layer.power, scale) for p in points)
    if is_causal:
        context = torch.einsum("nhc,nhd->nhcd", k, v).cumsum(0)
        numerator = torch.einsum("nhc,nhcd->nhd", q, context)
        denominator = torch.einsum("nhc,nhc->nh", q, k.cumsum(0))[..., None]
    else:
        context = torch.einsum("nhc,nhd->hcd", k, v)
        numerator = torch.einsum("nhc,hcd->nhd", q, context)
        denominator = torch.einsum("nhc,hc->nh", q, k.sum(0))[..., None]
    space = (numerator / (denominator + _TINY)).flatten(-2) + layer.residual(v.flatten(-2))
    here = lift(space, layer.manifold_hidden)
    return here * (layer.manifold_hidden.curvature / layer.manifold_out.curvature).sqrt()


def softmax_attention(layer: HypSoftmaxAttention, x: Tensor) -> Tensor:
    """Eqs. 3-5 with the squared Lorentzian distance: all scores at once, the midpoint by its inner product."""
    points = (htc(projection, x) for projection in (layer.query, layer.key, layer.value))
    spaces = (p[..., 1:].unflatten(-1, (layer.heads, -1)).transpose(0, 1) for p in points)
    q, k, v = (lift(space, layer.manifold_hidden) for space in spaces)
    flipped = torch.cat([-q[..., :1], q[..., 1:]], -1)
    kappa = layer.manifold_hidden.curvature
    scores = -(2 / kappa - 2 * flipped @ k.mT) / math.sqrt(q.shape[-1] - 1)
    total = scores.softmax(-1) @ v
    inner = -(total[..., :1] ** 2) + (total[..., 1:] ** 2).sum(-1, keepdim=True)
    middle = total / (-kappa * inner.abs()).sqrt()
    here = lift(middle[..., 1:].transpose(0, 1).flatten(-2), layer.manifold_hidden)
    return here * (layer.manifold_hidden.curvature / layer.manifold_out.curvature).sqrt()


def midpoint(x: Tensor, y: Tensor, manifold: Lorentz) -> Tensor:
    """Eq. 20: the sum over its Lorentzian length."""
    total = x + y
    inner = -(total[..., :1] ** 2) + (total[..., 1:] ** 2).sum(-1, keepdim=True)
    return total / (-manifold.curvature * inner.abs()).sqrt()


def layer_norm(layer: HypLayerNorm, x: Tensor) -> Tensor:
    """Eqs. 13 and 21."""
    norm: nn.LayerNorm = layer.function.norm
    here = lift(norm(x[..., 1:]), layer.manifold_in)
    return here * (layer.manifold_in.curvature / layer.manifold_out.curvature).sqrt()


def block(layer: HypformerBlock, x: Tensor) -> Tensor:
    """Section 4.6, figure 4, without dropout."""
    widen, _, narrow, _ = layer.feedforward
    x = midpoint(x, htc(layer.position.position, x), layer.manifold_in)
    attended = linear_attention(layer.attention, x)
    x = layer_norm(layer.norm_attention, midpoint(x, attended, layer.manifold_in))
    hidden = htc(widen, x)
    hidden = lift(torch.relu(hidden[..., 1:]), layer.manifold_feedforward)
    return layer_norm(layer.norm_feedforward, midpoint(x, htc(narrow, hidden), layer.manifold_in))


def encoder(layer: HypformerEncoder, u: Tensor) -> Tensor:
    """Section 4.6: the exponential map at the origin (eq. 22), HTC, HRC with ReLU, blocks."""
    start = layer.embedding.manifold_in
    root = (-start.curvature).sqrt()
    length = u.norm(dim=-1, keepdim=True)
    x = torch.cat([torch.cosh(root * length) / root, torch.sinh(root * length) * u / (root * length)], -1)
    x = lift(torch.relu(htc(layer.embedding, x)[..., 1:]), layer.embedding.manifold_out)
    for one in layer.blocks:
        x = block(one, x)
    return x


class FlatAttention(nn.Module):
    """Linear attention with the feature map of eq. 19 on Euclidean features: eqs. 14-17 without curvature.

    ``lean`` leaves out the length of the queries, which cancels.
    """

    def __init__(self, width: int, heads: int, power: float = 2.0, *, lean: bool = False) -> None:
        super().__init__()
        self.heads, self.power, self.lean = heads, power, lean
        self.query, self.key, self.value, self.residual = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return flat_linear_attention(self, x)


def flat_linear_attention(layer: FlatAttention, x: Tensor) -> Tensor:
    one = x.new_ones(1)
    maps = (layer.query, layer.key, layer.value)
    q, k, v = (projection(x).unflatten(-1, (layer.heads, -1)).transpose(0, 1) for projection in maps)
    q = torch.relu(q) ** layer.power if layer.lean else features(q, layer.power, one)
    k, v = features(k, layer.power, one), features(v, layer.power, one)
    average = q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT + _TINY)
    average, v = (part.transpose(0, 1).flatten(-2) for part in (average, v))
    return average + layer.residual(v)


class FlatBlock(nn.Module):
    """A block of Hypformer with every curvature gone: in flat space the midpoint of two points is their mean."""

    def __init__(self, width: int, heads: int, hidden: int, *, lean: bool = False) -> None:
        super().__init__()
        self.position = nn.Linear(width, width)
        self.attention = FlatAttention(width, heads, lean=lean)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.position(x)) / 2
        x = self.first((x + self.attention(x)) / 2)
        return self.second((x + self.narrow(torch.relu(self.widen(x)))) / 2)


class FlatEncoder(nn.Module):
    """``HypformerEncoder`` with every curvature gone."""

    def __init__(self, width: int, heads: int, hidden: int, layers: int, *, lean: bool = False) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(FlatBlock(width, heads, hidden, lean=lean) for _ in range(layers)))

    def forward(self, u: Tensor) -> Tensor:
        return self.blocks(torch.relu(self.entry(u)))
