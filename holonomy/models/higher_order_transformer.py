"""The higher-order transformer: encoder layers between tensors of any orders, HOT sections 3 and 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from holonomy import checks
from holonomy.layers import HigherOrderAttention, HigherOrderEncoderLayer
from holonomy.models.equivariant import EquivariantModel
from holonomy.models.levels import Level
from holonomy.ops.heads import head_count


class HigherOrderTransformer(EquivariantModel):
    r"""Encoder layers :math:`\mathrm{Enc}_{k\to l}` for any list of orders: HOT eqs. 8-21.

    ``model(x, edge_index, batch, edge_attr=edge_attr)`` takes graphs (first order 2), sets (first order 1) or
    :class:`~holonomy.structures.Hyperedges` and attends among what is there (HOT section 4.2);
    ``model.tensor(x, mask)`` takes dense tensors and attends among all tuples. ``orders=(2, 2, 0)`` is graph in,
    vector out, as ``level="graph"``; ``(1, 1, 2)`` is set to graph.

    Args:
        in_features: features of a node, or of an entry of the tensor.
        hidden_features: width of the layers.
        out_features: width of the result.
        level: what a row of the result belongs to, ``"graph"`` (the default), ``"node"`` or ``"edge"``.
        orders: order of the input, then of each layer's result, one layer between each two; ``(2, 2, last)`` if left
            out, with 0, 1 or 2 as the last for graphs, nodes or edges. Other orders must end with that of the level;
            without a level their last is read, and from 2 on the result is hyperedges.
        heads: number of heads.
        feedforward: width inside the feed-forward maps, twice ``hidden_features`` if left out.
        kernel: see :class:`~holonomy.layers.HigherOrderAttention`. With ``"softmax"`` time and memory grow with the
            square of a graph's nodes and edges, to 10 GB for 400 nodes and 3200 edges; ``"performer"`` is linear.
        query_features: see there.
        value_features: see there.
        sums: see there.
        random_features: see there.
        local: leave out the classes in which input and output share no node, except in a layer to order 0.
        dropout: probability that an entry of a branch is dropped in training.
        activation: of the feed-forward maps.
        entrywise: see :class:`~holonomy.layers.HigherOrderEncoderLayer`; of the maps before and after the layers, too.
        edge_features: attributes of an edge of a graph; an input of order 2 has ``in_features + edge_features``
            channels.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: if there are fewer than two orders, one before the last is 0, the last is not that of the level, or
            a number is out of range.

    >>> model = HigherOrderTransformer(3, 8, 1, level="node", heads=2)
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
        heads: int = 4,
        feedforward: int | None = None,
        kernel: Literal["softmax", "performer"] = "softmax",
        query_features: int | None = None,
        value_features: int | None = None,
        sums: Literal["coupled", "decoupled"] = "coupled",
        random_features: int | None = None,
        local: bool = False,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        entrywise: bool = False,
        edge_features: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        head_count(hidden_features, heads if None in (query_features, value_features) else 1, "hidden_features")
        checks.flags(local=local, entrywise=entrywise)
        width = 2 * hidden_features if feedforward is None else checks.positive_int("feedforward", feedforward)

        def layer(order_in: int, order_out: int) -> HigherOrderEncoderLayer:
            return HigherOrderEncoderLayer(
                order_in,
                order_out,
                hidden_features,
                heads,
                width,
                kernel=kernel,
                query_features=query_features,
                value_features=value_features,
                sums=sums,
                random_features=random_features,
                local=local and order_out > 0,
                dropout=dropout,
                activation=activation,
                entrywise=entrywise,
                device=device,
                dtype=dtype,
            )

        super().__init__(
            in_features,
            hidden_features,
            out_features,
            level=level,
            orders=orders,
            edge_features=edge_features,
            layer=layer,
            norm=True,
            entrywise=entrywise,
            device=device,
            dtype=dtype,
        )

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw other random features in every layer, from torch's seeded state by default; none for ``"softmax"``."""
        for module in self.modules():
            if isinstance(module, HigherOrderAttention):
                module.redraw(generator)
