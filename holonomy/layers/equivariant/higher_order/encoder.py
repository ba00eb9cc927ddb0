"""The higher-order encoder layer: attention, then an equivariant feed-forward map, HOT eqs. 8-9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.layers.equivariant.higher_order.attention import HigherOrderAttention
from holonomy.layers.equivariant.linear.entrywise import lightweight
from holonomy.layers.equivariant.linear.layer import check_dense
from holonomy.layers.equivariant.linear.sparse import check_hyperedges, distinct_targets
from holonomy.structures import Hyperedges, joint, on_features


class HigherOrderEncoderLayer(nn.Module):
    r"""Attention and feed-forward map from order-k to order-l tensors, HOT eqs. 8-9, normalised before each.

    .. math::
        Y &= [A +] \, \mathrm{Attn}_{k\to l}(\mathrm{LN}(A)), \\
        \mathrm{Enc}_{k\to l}(A) &= Y + L^2_{l\to l}(\sigma(L^1_{l\to l}(\mathrm{LN}(Y))))

    The input is added only if k = l, as in eq. 5 for sets; HOT eq. 10 adds none. The maps :math:`L^1, L^2` are
    lightweight (HOT Prop. 2): of all classes without a sum, or, ``entrywise``, of the one that reads the entry itself.

    Args:
        order_in: k, at least 1.
        order_out: l, at least 0.
        features: d, of input and output.
        heads: number of heads.
        hidden: width between the two maps.
        kernel: see :class:`~holonomy.layers.HigherOrderAttention`.
        query_features: see there.
        value_features: see there.
        sums: see there.
        random_features: see there.
        local: see there.
        dropout: probability that an entry of either branch is dropped in training.
        activation: :math:`\sigma`.
        entrywise: whether :math:`L^1` and :math:`L^2` map each entry by itself. Other entries on the same nodes are not
            read: right for hyperedges of which a set of nodes has one, for which most of the weights would not learn,
            and all be drawn too small.
        device: of the parameters.
        dtype: of the parameters.

    >>> HigherOrderEncoderLayer(1, 2, 8, 2, 16)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 5, 8])
    """

    def __init__(
        self,
        order_in: int,
        order_out: int,
        features: int,
        heads: int,
        hidden: int,
        *,
        kernel: Literal["softmax", "performer"] = "softmax",
        query_features: int | None = None,
        value_features: int | None = None,
        sums: Literal["coupled", "decoupled"] = "coupled",
        random_features: int | None = None,
        local: bool = False,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        entrywise: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(local=local, entrywise=entrywise)
        checks.floating_dtype(dtype)
        self.order_in, self.order_out, self.features = order_in, order_out, features
        checks.function("activation", activation)
        self.activation = activation
        self.attention = HigherOrderAttention(
            order_in,
            order_out,
            features,
            heads,
            kernel=kernel,
            query_features=query_features,
            value_features=value_features,
            sums=sums,
            random_features=random_features,
            local=local,
            device=device,
            dtype=dtype,
        )
        self.norm_attention = nn.LayerNorm(features, device=device, dtype=dtype)
        self.norm_feedforward = nn.LayerNorm(features, device=device, dtype=dtype)
        checks.positive_int("hidden", hidden)
        self.expand = lightweight(order_out, features, hidden, entrywise=entrywise, device=device, dtype=dtype)
        self.contract = lightweight(order_out, hidden, features, entrywise=entrywise, device=device, dtype=dtype)
        self.dropout = nn.Dropout(checks.in_range("dropout", dropout, 0.0, 1.0))

    def forward(
        self,
        x: Float[Tensor, "..."] | Hyperedges,
        mask: Bool[Tensor, "*batch nodes"] | None = None,
        *,
        to: Int[Tensor, "tuples order_out"] | None = None,
    ) -> Float[Tensor, "..."] | Hyperedges:
        """Attend and transform.

        Arguments and errors are those of :meth:`holonomy.layers.HigherOrderAttention.forward`, without ``support``, and
        ``to`` is for another order only. A tuple that it lists twice counts once, and has two rows.
        """
        same = self.order_in == self.order_out
        if same and to is not None:
            raise ValueError("to must be None where the order stays the same: the result is added to the input.")
        if isinstance(x, Hyperedges):
            check_hyperedges(x, self.order_in, self.features, self.norm_attention)
        else:
            check_dense(x, self.order_in, self.features, mask, self.norm_attention)
            if mask is not None:
                x = torch.where(joint(mask, self.order_in)[..., None], x, 0)
        once, place = to, None
        if to is not None and isinstance(x, Hyperedges):
            once, place = distinct_targets(x, to, self.order_out)
        mixed = on_features(self.dropout, self.attention(on_features(self.norm_attention, x), mask, to=once))
        if same:
            mixed = _added(x, mixed)
        hidden = on_features(self.activation, self.expand(on_features(self.norm_feedforward, mixed), mask))
        out = _added(mixed, on_features(self.dropout, self.contract(hidden, mask)))
        if to is None or place is None:
            return out
        return cast("Hyperedges", out).at(to, cast("Hyperedges", out).values[place])


def _added(x: Tensor | Hyperedges, y: Tensor | Hyperedges) -> Tensor | Hyperedges:
    if isinstance(x, Hyperedges) and isinstance(y, Hyperedges):
        return y.with_values(x.values + y.values)
    return cast("Tensor", x) + cast("Tensor", y)
