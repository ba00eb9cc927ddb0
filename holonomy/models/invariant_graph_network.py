"""Invariant graph networks: equivariant linear layers and activations, TokenGT section 3, HOT section 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.layers import EquivariantLinear
from holonomy.models.equivariant import EquivariantModel
from holonomy.models.levels import Level
from holonomy.structures import Hyperedges, on_features


class _Activated(nn.Module):
    """An equivariant linear map, an activation and dropout."""

    def __init__(self, linear: EquivariantLinear, activation: Callable[[Tensor], Tensor], dropout: float) -> None:
        super().__init__()
        self.linear, self.activation, self.dropout = linear, activation, nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "..."] | Hyperedges,
        mask: Bool[Tensor, "*batch nodes"] | None = None,
        *,
        to: Int[Tensor, "tuples order_out"] | None = None,
    ) -> Float[Tensor, "..."] | Hyperedges:
        return on_features(self.dropout, on_features(self.activation, self.linear(x, mask, to=to)))


class InvariantGraphNetwork(EquivariantModel):
    r"""k-IGN: :math:`L \circ \sigma \circ L \circ \sigma \cdots` between tensors of any orders (Maron et al. 2019).

    With the highest order k it is as strong as k-WL. Called as :class:`~holonomy.models.HigherOrderTransformer` is:
    ``model(x, edge_index, batch, edge_attr=edge_attr)`` for graphs, sets and hyperedges, ``model.tensor(x, mask)`` for
    dense tensors; in the former, tuples that are not listed count as zero and have no result.

    Args:
        in_features: features of a node, or of an entry of the tensor.
        hidden_features: width of the layers.
        out_features: width of the result.
        level: what a row of the result belongs to, ``"graph"`` (the default), ``"node"`` or ``"edge"``.
        orders: order of the input, then of each layer's result, one layer between each two; ``(2, 2, last)`` if left
            out, with 0, 1 or 2 as the last for graphs, nodes or edges. Other orders must end with that of the level;
            without a level their last is read, and from 2 on the result is hyperedges.
        normalise: ``"counts"`` divides the sum of each class by its number of terms, which keeps activations apart
            from the number of nodes; by default sums are sums.
        activation: :math:`\sigma`.
        dropout: probability that an activation is dropped in training.
        entrywise: whether the maps before and after the layers map each entry by itself, see
            :class:`~holonomy.layers.HigherOrderEncoderLayer`.
        edge_features: attributes of an edge of a graph; an input of order 2 has ``in_features + edge_features``
            channels.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: if there are fewer than two orders, one before the last is 0, the last is not that of the level, or
            a number is out of range.

    >>> model = InvariantGraphNetwork(3, 8, 1, level="node")
    >>> model(torch.ones(3, 3), torch.tensor([[0, 1], [1, 0]])).shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        level: Level | None = None,
        orders: Sequence[int] | None = None,
        normalise: Literal["counts"] | None = None,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        dropout: float = 0.0,
        entrywise: bool = False,
        edge_features: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.in_range("dropout", dropout, 0.0, 1.0)
        checks.function("activation", activation)
        checks.flags(entrywise=entrywise)

        def layer(order_in: int, order_out: int) -> _Activated:
            linear = EquivariantLinear(
                order_in, order_out, hidden_features, hidden_features, normalise=normalise, device=device, dtype=dtype
            )
            return _Activated(linear, activation, dropout)

        super().__init__(
            in_features,
            hidden_features,
            out_features,
            level=level,
            orders=orders,
            edge_features=edge_features,
            layer=layer,
            norm=False,
            entrywise=entrywise,
            device=device,
            dtype=dtype,
        )
