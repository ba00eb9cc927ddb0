"""Sets and graphs in the two layouts that layers use, and the way between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

__all__ = ["PaddedGraphs"]


@dataclass(frozen=True)
class PaddedGraphs:
    """The nodes of several graphs, one graph a row, filled up with padding.

    Attributes:
        values: ``(graphs, nodes, features)``, zero at padding.
        padding: ``(graphs, nodes)``, ``True`` where there is no node: a ``key_padding_mask``.
        slots: ``(n,)``, the place of each node in the flattened first two axes.

    >>> graphs = PaddedGraphs.of(torch.ones(3, 2), torch.tensor([0, 1, 0]))
    >>> graphs.values.shape, graphs.slots.tolist()
    (torch.Size([2, 2, 2]), [0, 2, 1])
    """

    values: Float[Tensor, "graphs nodes features"]
    padding: Bool[Tensor, "graphs nodes"]
    slots: Int[Tensor, " n"]

    @staticmethod
    def of(x: Float[Tensor, "n features"], batch: Int[Tensor, " n"]) -> PaddedGraphs:
        """Lay the rows of ``x`` out by graph; nodes of one graph keep their order and need not be neighbours.

        Args:
            x: node features ``(n, features)``.
            batch: the graph of each node ``(n,)``, numbered from zero, as in PyTorch Geometric.

        Returns:
            The padded graphs; a number that no node bears is an empty graph.

        Raises:
            ValueError: if ``batch`` has not one entry a node.

        >>> graphs = PaddedGraphs.of(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 0]))
        >>> graphs.values.squeeze(-1).tolist(), graphs.padding.tolist()
        ([[1.0, 3.0], [2.0, 0.0]], [[False, False], [False, True]])
        """
        if batch.shape != x.shape[:1]:
            raise ValueError(f"batch must have shape (n = {x.shape[0]},), got {tuple(batch.shape)}.")
        sizes = torch.bincount(batch)
        graphs, widest = sizes.shape[0], int(sizes.max()) if batch.numel() else 0
        order = batch.argsort(stable=True)
        starts = sizes.cumsum(0) - sizes
        place = torch.empty_like(batch)
        place[order] = torch.arange(batch.shape[0], device=batch.device) - starts[batch[order]]
        slots = batch * widest + place
        padding = torch.ones(graphs * widest, dtype=torch.bool, device=x.device)
        padding[slots] = False
        values = x.new_zeros(graphs * widest, x.shape[-1]).index_copy(0, slots, x)
        return PaddedGraphs(values.unflatten(0, (graphs, widest)), padding.unflatten(0, (graphs, widest)), slots)

    def rows(self, values: Float[Tensor, "graphs nodes features"]) -> Float[Tensor, "n features"]:
        """Padded values back as rows, in the order of the nodes that came.

        Args:
            values: ``(graphs, nodes, features)`` in the layout of this object.

        Returns:
            Rows ``(n, features)``.

        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> graphs = PaddedGraphs.of(x, torch.tensor([0, 1, 0]))
        >>> torch.equal(graphs.rows(graphs.values), x)
        True
        """
        return values.flatten(0, 1)[self.slots]
