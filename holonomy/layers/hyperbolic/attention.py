r"""Multi-head hyperbolic attention: linear (Hypformer eqs. 14-19) and softmax (eqs. 3-5).

Points are ambient, ``(*batch, nodes, d + 1)``, time first: one big graph ``(nodes, d + 1)`` or a padded batch
``(batch, nodes, d + 1)`` with a key-padding mask ``(batch, nodes)``, ``True`` at padding, as in
:class:`torch.nn.MultiheadAttention`. Padding has no effect on other rows, whatever it holds, and comes out
as the origin. Heads are consecutive slices of the space part; their results are concatenated again
(eq. 21's concatenation).

Three curvatures: :math:`\kappa_1` where the input lies, :math:`\kappa_2` (``manifold_hidden``) of queries, keys and
values, :math:`\kappa_3` of the output. Neither attention has an output projection, as none is printed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._autograd import may_bypass
from holonomy.layers.hyperbolic.linear import HTC, space_of
from holonomy.layers.hyperbolic.refinement import change_curvature, curvatures, resolve
from holonomy.manifolds import Lorentz, hyperboloid
from holonomy.ops.heads import head_count, merge_heads, split_heads, without_padding
from holonomy.ops.linear_attention import linear_attention_block
from holonomy.ops.linear_attention.reference import AVERAGES, Average, linear_attention, linear_midpoint, power_features
from holonomy.ops.softmax_attention import (
    SIMILARITIES,
    Similarity,
    hyperbolic_softmax_attention,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["HypLinearAttention", "HypSoftmaxAttention"]


class HypLinearAttention(nn.Module):
    r"""Linear attention in hyperbolic space, Hypformer eqs. 14-19, at a cost linear in the nodes.

    .. math::
        Q, K, V &= \mathrm{HTC}(X; W^{Q,K,V}, \kappa_1, \kappa_2), \qquad
        Q_s, K_s, V_s = \phi(Q_{[1:]}), \phi(K_{[1:]}), \phi(V_{[1:]}), \\
        \tilde Z_s &= \frac{Q_s (K_s^\top V_s)}{Q_s (K_s^\top 1)} + \psi(V_s), \qquad
        Z = \Big(\sqrt{(\kappa_2/\kappa_3) |\tilde Z_s|^2 - 1/\kappa_3},\; \sqrt{\kappa_2/\kappa_3}\, \tilde Z_s\Big)

    with :math:`\phi(e) = |\tilde e|/|\tilde e^p| \cdot \tilde e^p`, :math:`\tilde e = \mathrm{ReLU}(e)/t`, per
    head, and :math:`\psi` a linear layer of all heads together.

    **The scale t.** :math:`\phi` is homogeneous of degree one: t cancels in the quotient as far as it comes with Q
    and K, and would have no gradient there. It is applied where it acts, in :math:`\phi(V)`, and learned as
    ``log_scale``, its logarithm (0 at first), so that it stays positive.

    **The average.** The paper averages space parts, which stretches distances by up to the cosh of the values' radius.
    ``average="midpoint"`` takes the Lorentzian midpoint of the values instead (eq. 4, with the same weights, as points
    above :math:`V_s` per head), which stretches none. It runs as plain operations, in float64 from the weights on.

    A row whose weights are all zero (no positive query or no matching key) has zero average and keeps
    :math:`\psi(V_s)`. The layer is discontinuous there, as the formula is.

    Args:
        features: d, a multiple of ``heads``.
        heads: number of heads.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_3`; ``manifold_in`` if ``None``.
        manifold_hidden: where Q, K, V lie, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        power: p, at least 1; larger is sharper.
        average: of space parts, or the midpoint.
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz, hyperboloid
    >>> m, to = Lorentz(-1.0), Lorentz(-0.5)
    >>> z = HypLinearAttention(8, 2, m, to)(m.lift(torch.randn(6, 8)))
    >>> torch.allclose(z[:, :1], to.time(z))
    True
    """

    def __init__(
        self,
        features: int,
        heads: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        manifold_hidden: Lorentz | None = None,
        power: float = 2.0,
        average: Average = "space",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.heads = head_count(features, heads)
        checks.in_range("power", power, -math.inf, math.inf)
        if not (math.isfinite(power) and power >= 1):
            raise ValueError(f"power must be finite and at least 1, got {power}.")
        self.power = power
        checks.one_of("average", average, AVERAGES)
        self.average: Average = average
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        _, self.manifold_hidden = resolve(self.manifold_in, manifold_hidden, "manifold_hidden")
        self.query, self.key, self.value = (
            HTC(features, features, manifold_in, self.manifold_hidden, device=device, dtype=dtype) for _ in range(3)
        )
        self.residual = nn.Linear(features, features, device=device, dtype=dtype)
        self.log_scale = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(
        self,
        x: Float[Tensor, "*batch nodes dim_plus_1"],
        key_padding_mask: Bool[Tensor, "*batch nodes"] | None = None,
    ) -> Float[Tensor, "*batch nodes dim_plus_1"]:
        """Attend.

        Args:
            x: points ``(*batch, nodes, d + 1)`` on ``manifold_in``.
            key_padding_mask: ``(*batch, nodes)``, ``True`` at padding.

        Returns:
            Points ``(*batch, nodes, d + 1)`` on ``manifold_out``; the origin at padding.
        """
        checks.rows("x", x, self.query.in_features + 1, "features + 1", self.query)
        maps = (self.query, self.key, self.value)
        readable = all(may_bypass(htc, HTC) for htc in maps) and may_bypass(self.residual, nn.Linear)
        if self.average == "midpoint" or not readable:
            return self._attend(without_padding(x, key_padding_mask), key_padding_mask)
        before, hidden, out = curvatures(self.manifold_in, self.manifold_hidden, self.manifold_out)
        ratio, last = (before / hidden).sqrt(), (hidden / out).sqrt()
        # Numbers are multiplied into weights, which are small where x is long. The feature map has degree one: t, and
        # the change of curvature of the result, are taken by the map of the values.
        factors = torch.stack([ratio, ratio, ratio * numerics.exp(-self.log_scale) * last]).to(self.log_scale.dtype)
        weight = torch.stack([htc.weight for htc in maps]) * factors[:, None]
        bias = torch.stack([htc.bias for htc in maps if htc.bias is not None]) * factors
        x = without_padding(x, key_padding_mask)
        tensors = (
            hyperboloid.held(x),
            weight.flatten(0, 1),
            bias.flatten(),
            self.residual.weight,
            self.residual.bias * last,
            out,
        )
        attend = partial(linear_attention_block, mask=key_padding_mask, heads=self.heads, power=self.power)
        return attend(*tensors) if _steepest(x) == math.inf else numerics.bounded(attend, *tensors)

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Eqs. 14-19 one after the other."""
        limit = _steepest(x)

        def features(htc: HTC, factor: Tensor | None = None) -> Tensor:
            space = space_of(htc, x, factor).unflatten(-1, (self.heads, -1))
            if limit == math.inf:
                return power_features(space, self.power)
            return numerics.gradient_within(power_features(numerics.gradient_within(space, limit), self.power), limit)

        query, key, value = (
            features(self.query),
            features(self.key),
            features(self.value, numerics.exp(-self.log_scale)),
        )
        hidden = None if mask is None else mask[..., None, :]
        by_head = (query.transpose(-3, -2), key.transpose(-3, -2), value.transpose(-3, -2))
        if self.average == "midpoint":
            average = linear_midpoint(*by_head, hidden, curvature=self.manifold_hidden.curvature)
        else:
            average = linear_attention(*by_head, hidden)
        space = without_padding(merge_heads(average) + self.residual(value.flatten(-2)), mask)
        return change_curvature(space, self.manifold_hidden, self.manifold_out)

    def extra_repr(self) -> str:
        """Heads and power, for ``repr``.

        Returns:
            The line that ``repr`` shows.
        """
        return f"heads={self.heads}, power={self.power}, average={self.average!r}"


def _steepest(x: Float[Tensor, "*batch nodes ambient"]) -> float:
    """What gradients may be for their products with points beyond rapidity 22; infinite where none is there.

    Gradients of queries are as long as values are, and those of weights are sums of their products with points.
    """
    largest = torch.finfo(x.dtype).max
    farthest = float(x[..., 0].detach().amax()) if x.numel() and checks.costs_nothing_to_read(x) else 0.0
    return largest / farthest * 2.0**-12 if farthest > largest**0.25 else math.inf


class HypSoftmaxAttention(nn.Module):
    r"""Softmax attention in hyperbolic space, Hypformer eqs. 3-5.

    Queries, keys and values are HTC of x; in each head the weights are
    :math:`a_{ij} = \mathrm{softmax}_j(-D(q_i, k_j)/\sqrt{d'})`, d' the channels of a head, and the values are combined
    by the Lorentzian midpoint. D is, by ``similarity``, the squared geodesic distance (eq. 5 as printed), the squared
    Lorentzian distance (the released code), or the geodesic distance (whose Lipschitz constant needs no bound on the
    radius).

    Args:
        features: d, a multiple of ``heads``.
        heads: number of heads.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_3`; ``manifold_in`` if ``None``.
        manifold_hidden: where queries, keys and values lie, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        similarity: ``"geodesic_squared"``, ``"lorentz_squared"`` or ``"geodesic"``.
        dropout: probability that an attention weight is dropped in training.
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz, hyperboloid
    >>> m = Lorentz(-1.0)
    >>> layer = HypSoftmaxAttention(8, 2, m, similarity="lorentz_squared")
    >>> layer(m.lift(torch.randn(3, 5, 8)), torch.zeros(3, 5, dtype=torch.bool)).shape
    torch.Size([3, 5, 9])
    """

    def __init__(
        self,
        features: int,
        heads: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        manifold_hidden: Lorentz | None = None,
        similarity: Similarity = "geodesic_squared",
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.heads = head_count(features, heads)
        checks.one_of("similarity", similarity, SIMILARITIES)
        self.similarity: Similarity = similarity
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        _, self.manifold_hidden = resolve(self.manifold_in, manifold_hidden, "manifold_hidden")
        self.query, self.key, self.value = (
            HTC(features, features, manifold_in, self.manifold_hidden, device=device, dtype=dtype) for _ in range(3)
        )

    def forward(
        self,
        x: Float[Tensor, "*batch nodes dim_plus_1"],
        key_padding_mask: Bool[Tensor, "*batch nodes"] | None = None,
    ) -> Float[Tensor, "*batch nodes dim_plus_1"]:
        """Attend.

        Args:
            x: points ``(*batch, nodes, d + 1)`` on ``manifold_in``.
            key_padding_mask: ``(*batch, nodes)``, ``True`` at padding.

        Returns:
            Points ``(*batch, nodes, d + 1)`` on ``manifold_out``; the origin at padding.
        """
        checks.rows("x", x, self.query.in_features + 1, "features + 1", self.query)
        x = without_padding(x, key_padding_mask)
        query, key, value = (split_heads(space_of(htc, x), self.heads) for htc in (self.query, self.key, self.value))
        space = merge_heads(
            hyperbolic_softmax_attention(
                query,
                key,
                value,
                None if key_padding_mask is None else key_padding_mask[..., None, :],
                curvature=self.manifold_hidden.curvature,
                similarity=self.similarity,
                dropout=self.dropout if self.training else 0.0,
            )
        )
        space = without_padding(space, key_padding_mask)
        return change_curvature(space, self.manifold_hidden, self.manifold_out)

    def extra_repr(self) -> str:
        """Heads and similarity, for ``repr``.

        Returns:
            The line that ``repr`` shows.
        """
        return f"heads={self.heads}, similarity={self.similarity!r}, dropout={self.dropout}"
