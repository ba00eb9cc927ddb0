r"""Multi-head hyperbolic attention at a cost linear in the nodes, Hypformer eqs. 14-19.

Points are ambient, ``(*batch, nodes, d + 1)``, time first: one big graph ``(nodes, d + 1)`` or a padded batch
``(batch, nodes, d + 1)`` with a key-padding mask ``(batch, nodes)``, ``True`` at padding, as in
:class:`torch.nn.MultiheadAttention`. Padding has no effect on other rows, whatever it holds, and comes out
as the origin. Heads are consecutive slices of the space part; their results are concatenated again
(eq. 21's concatenation).

Three curvatures: :math:`\kappa_1` where the input lies, :math:`\kappa_2` (``manifold_hidden``) of queries, keys and
values, :math:`\kappa_3` of the output. There is no output projection, as none is printed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._autograd import may_bypass
from holonomy._parts import Group
from holonomy._shapes import Bool, Float
from holonomy.layers.hyperbolic.linear import HTC, space_of
from holonomy.layers.hyperbolic.refinement import change_curvature, curvatures, resolve
from holonomy.manifolds import Lorentz, hyperboloid
from holonomy.manifolds.curvature import root_ratio
from holonomy.ops.heads import (
    check_memory,
    check_state,
    head_count,
    merge_heads,
    of_all_heads,
    refuse_shared_order,
    without_padding,
    without_queries,
)
from holonomy.ops.linear_attention import linear_attention_block, linear_average
from holonomy.ops.linear_attention.causal import LinearState, linear_attention_weights
from holonomy.ops.linear_attention.reference import AVERAGES, Average, power_features
from holonomy.ops.masks import refuse_pairs


class HypLinearAttention(nn.Module):
    r"""Linear attention in hyperbolic space, Hypformer eqs. 14-19, at a cost linear in the nodes.

    .. math::
        Q, K, V &= \mathrm{HTC}(X; W^{Q,K,V}, \kappa_1, \kappa_2), \qquad
        Q_s, K_s, V_s = \phi(Q_{[1:]}), \phi(K_{[1:]}), \phi(V_{[1:]}), \\
        \tilde Z_s &= \frac{Q_s (K_s^\top V_s)}{Q_s (K_s^\top 1)} + \psi(V_s), \qquad
        Z = \Big(\sqrt{(\kappa_2/\kappa_3) |\tilde Z_s|^2 - 1/\kappa_3},\; \sqrt{\kappa_2/\kappa_3}\, \tilde Z_s\Big)

    with :math:`\phi(e) = |\tilde e|/|\tilde e^p| \cdot \tilde e^p`, :math:`\tilde e = \mathrm{ReLU}(e)/t`, per
    head, and :math:`\psi` a linear layer of all heads together.

    **The scale t.** :math:`\phi` is homogeneous of degree one, so t cancels for Q and K and is applied in
    :math:`\phi(V)` only. It is learned as ``log_scale``, its logarithm (0 at first), so that it stays positive.

    **The average.** The paper averages space parts, which can increase distances by up to the cosh of the values'
    radius. ``average="midpoint"`` takes the Lorentzian midpoint of the values instead (eq. 4, with the same weights, of
    the points with space parts :math:`V_s` per head), which does not increase them. It is computed in float64 from the
    weights on, without a fast form.

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
        self.features, self.heads = features, head_count(features, heads)
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
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys dim_plus_1"] | None = None,
        group: Group | None = None,
    ) -> Float[Tensor, "*batch nodes dim_plus_1"]:
        r"""Points ``(*batch, nodes, d + 1)``; the origin where x is padding.

        ``x``, ``key_padding_mask``, ``is_causal``, ``memory`` and errors are those of
        :meth:`holonomy.layers.HypSoftmaxAttention.forward`. Causal attention is still linear in time and memory, and
        beside a memory the residual :math:`\psi(V_s)` is that of x. ``attn_mask`` must be None, for weights of single
        pairs are never made.

        ``group`` are processes that share the nodes: x, and ``memory`` if there is one, are the rows of this one. They
        attend to the rows of all, by one sum over processes of heads times :math:`d_h (d_h + 1)` numbers. Far out,
        where squares leave the range, gradients are not held within it. Another object is a TypeError, ``is_causal``
        beside it a ValueError.
        """
        checks.rows("x", x, self.features + 1, "features + 1", self.query)
        check_memory(x, memory, self.features + 1, is_causal=is_causal)
        refuse_pairs(attn_mask)
        if group is not None:
            refuse_shared_order(is_causal=is_causal)
        maps = (self.query, self.key, self.value)
        readable = all(may_bypass(htc, HTC) for htc in maps) and may_bypass(self.residual, nn.Linear)
        if self.average == "midpoint" or memory is not None or group is not None or not readable:
            start = self._start(x) if is_causal else None
            return self._attend(x, key_padding_mask, memory=memory, state=start, group=group)[0]
        before, hidden, out = curvatures(self.manifold_in, self.manifold_hidden, self.manifold_out)
        ratio, last = root_ratio(before, hidden), root_ratio(hidden, out)
        # Numbers are multiplied into weights, which are small where x is long. The feature map has degree one: t, and
        # the change of curvature of the result, are taken by the map of the values.
        factors = torch.stack([ratio, ratio, ratio * numerics.exp(-self.log_scale) * last]).to(self.log_scale.dtype)
        weight = (torch.stack([htc.weight for htc in maps]) * factors[:, None]).flatten(0, 1)
        bias = torch.stack([htc.bias for htc in maps if htc.bias is not None]) * factors
        x = without_padding(x, key_padding_mask)
        held, residual = hyperboloid.held(x, weight=weight), self.residual
        tensors = (held, weight, bias.flatten(), residual.weight, residual.bias * last, out)
        attend = partial(
            linear_attention_block, mask=key_padding_mask, heads=self.heads, power=self.power, is_causal=is_causal
        )
        return attend(*tensors) if _gradient_limit(x) == math.inf else numerics.bounded(attend, *tensors)

    def step(
        self,
        x: Float[Tensor, "*batch nodes dim_plus_1"],
        state: LinearState | None = None,
        key_padding_mask: Bool[Tensor, "*batch nodes"] | None = None,
    ) -> tuple[Float[Tensor, "*batch nodes dim_plus_1"], LinearState]:
        """The next tokens of a sequence and the state after them, see :meth:`holonomy.layers.HypSoftmaxAttention.step`.

        The state holds sums over keys: a step costs the same however many tokens came before.

        >>> from holonomy.manifolds import Lorentz
        >>> m = Lorentz(-1.0)
        >>> layer, x, state = HypLinearAttention(8, 2, m), m.lift(torch.randn(6, 8)), None
        >>> y = []
        >>> for token in x.split(1):
        ...     out, state = layer.step(token, state)
        ...     y.append(out)
        >>> torch.allclose(torch.cat(y), layer(x, is_causal=True), atol=1e-4)
        True
        """
        checks.rows("x", x, self.features + 1, "features + 1", self.query)
        start = self._start(x)
        out, after = self._attend(x, key_padding_mask, state=start if state is None else check_state(state, start))
        return out, cast("LinearState", after)

    def remember(
        self,
        memory: Float[Tensor, "*batch keys dim_plus_1"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
    ) -> LinearState:
        """The sums over keys and values of a memory, computed once for many calls of :meth:`recall`.

        A named tuple, batch axes first. ``memory`` are points ``(*batch, keys, d + 1)`` of ``manifold_in``;
        ``key_padding_mask`` ``(*batch, keys)`` is ``True`` at padding.
        """
        checks.rows("memory", memory, self.features + 1, "features + 1", self.query)
        return cast("LinearState", self._attend(memory, key_padding_mask, state=self._start(memory))[1])

    def recall(
        self, x: Float[Tensor, "*batch nodes dim_plus_1"], state: LinearState
    ) -> Float[Tensor, "*batch nodes dim_plus_1"]:
        """Attend to a memory, as ``forward`` with ``memory`` does.

        ``x`` are points ``(*batch, nodes, d + 1)`` of ``manifold_in``, ``state`` what :meth:`remember` returned of a
        memory with the same batch axes. A state of another layer is a TypeError, one of another batch or of other sizes
        a ValueError.

        >>> from holonomy.manifolds import Lorentz
        >>> m = Lorentz(-1.0)
        >>> layer, x, memory = HypLinearAttention(8, 2, m), m.lift(torch.randn(6, 8)), m.lift(torch.randn(3, 8))
        >>> torch.allclose(layer.recall(x, layer.remember(memory)), layer(x, memory=memory), atol=1e-4)
        True
        """
        checks.rows("x", x, self.features + 1, "features + 1", self.query)
        return self._attend(x, None, state=check_state(state, self._start(x)), recalled=True)[0]

    def weights(
        self,
        x: Float[Tensor, "*batch nodes dim_plus_1"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys dim_plus_1"] | None = None,
    ) -> Float[Tensor, "*batch heads nodes keys"]:
        r"""The weights of the average, :math:`q_i \cdot k_j` over their sum, at a cost of nodes times keys.

        Arguments are those of :meth:`forward`. Of ``(*batch, heads, nodes, keys)`` rows sum to one, or are zero where a
        query has no weight.
        """
        checks.rows("x", x, self.features + 1, "features + 1", self.query)
        refuse_pairs(attn_mask)
        check_memory(x, memory, self.features + 1, is_causal=is_causal)
        keys = without_padding(x if memory is None else memory, key_padding_mask)
        query = self._features(self.query, keys if memory is None else x)
        hidden = of_all_heads(key_padding_mask)
        found = linear_attention_weights(query, self._features(self.key, keys), hidden, is_causal=is_causal)
        return found if memory is not None else without_queries(found, key_padding_mask)

    def _start(self, x: Tensor) -> LinearState:
        """The state before the first token; midpoints are summed with their times, in float64."""
        channels = self.features // self.heads
        midpoint = self.average == "midpoint"
        dtype = torch.float64 if midpoint else self.log_scale.dtype
        like = x.new_empty(*x.shape[:-2], self.heads, 0, channels, dtype=dtype)
        return LinearState.empty(like, channels + midpoint)

    def _features(self, htc: HTC, x: Tensor, factor: Tensor | None = None) -> Float[Tensor, "*batch heads nodes dim"]:
        limit = _gradient_limit(x)
        space = space_of(htc, x, factor).unflatten(-1, (self.heads, -1))
        if limit == math.inf:
            found = power_features(space, self.power)
        else:
            held = numerics.gradient_within(space, limit)
            found = numerics.gradient_within(power_features(held, self.power), limit)
        return found.transpose(-3, -2)

    def _attend(
        self,
        x: Tensor,
        mask: Tensor | None,
        *,
        memory: Tensor | None = None,
        state: LinearState | None = None,
        group: Group | None = None,
        recalled: bool = False,
    ) -> tuple[Tensor, LinearState | None]:
        """Eqs. 14-19 one after the other; causally after a state, to which x adds no keys if it is recalled."""
        keys = without_padding(x if memory is None else memory, mask)
        query = self._features(self.query, keys if memory is None else x)
        key = query if recalled else self._features(self.key, keys)
        value = self._features(self.value, keys, numerics.exp(-self.log_scale))
        own = value if memory is None else self._features(self.value, x, numerics.exp(-self.log_scale))
        absent = torch.ones_like(x[..., 0], dtype=torch.bool) if recalled else mask
        hidden = of_all_heads(absent)
        curvature = self.manifold_hidden.curvature if self.average == "midpoint" else None
        attend = partial(linear_average, mask=hidden, state=state, curvature=curvature, group=group)
        average, state = attend(query, key, value)
        # Processes would not agree on whether to compute the sums once more.
        if group is None and min(_gradient_limit(x), _gradient_limit(keys)) < math.inf:
            average = numerics.bounded(lambda *each: attend(*each)[0], query, key, value)
        space = merge_heads(average) + self.residual(merge_heads(own))
        space = space if memory is not None else without_padding(space, mask)
        return change_curvature(space, self.manifold_hidden, self.manifold_out), state

    def extra_repr(self) -> str:
        """Heads and power, for ``repr``."""
        return f"heads={self.heads}, power={self.power}, average={self.average!r}"


def _gradient_limit(x: Float[Tensor, "*batch nodes ambient"]) -> float:
    """The largest gradient whose product with points stays in range."""
    # Infinite where none lies beyond rapidity 22, on a GPU, which would wait for the number, and under compilation.
    largest = torch.finfo(x.dtype).max
    farthest = float(x[..., 0].detach().amax()) if x.numel() and checks.costs_nothing_to_read(x) else 0.0
    return largest / farthest * 2.0**-12 if farthest > largest**0.25 else math.inf
