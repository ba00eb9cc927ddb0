r"""Which simplexes take part in simplicial attention, and the tiles in which their logits are made.

A simplex is a query, a head :math:`k_1` and a tail :math:`(k_2, \dots, k_N)`; for N = 1 the head is a single dummy and
the tail :math:`k_1`. Tails are listed with the last index fastest, or by their latest node where attention is causal:
what a query may see then is a beginning of the list. Masks are ``True`` where something takes part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

__all__ = ["Simplexes", "Tile"]


@dataclass(frozen=True)
class Tile:
    """A block of logits: of some batch entries, queries and heads, with the first ``tails`` tails.

    Attributes:
        batch: entries of the flattened batch.
        queries: rows.
        heads: columns.
        tails: how many tails, from the first.
    """

    batch: slice
    queries: slice
    heads: slice
    tails: int


@dataclass(frozen=True)
class Simplexes:
    r"""All simplexes that the masks allow.

    Attributes:
        sizes: numbers of nodes :math:`n_0, \dots, n_N`.
        batch: shape of the batch.
        mask: broadcasts to ``(*batch, n_0, .., n_N)``, or None.
        pair_mask: broadcasts to ``(*batch, n_0, n_1)``, or None.
        causal: whether keys later than the query take no part.
        order_of_tails: where each tail of the list stands in row-major order, or None if there; see :meth:`of`.
        latest: the latest node of each tail where attention is causal, else None.
    """

    sizes: tuple[int, ...]
    batch: torch.Size
    mask: Tensor | None = None
    pair_mask: Tensor | None = None
    causal: bool = False
    order_of_tails: Tensor | None = None
    latest: Tensor | None = None

    @staticmethod
    def of(
        sizes: tuple[int, ...],
        batch: torch.Size,
        device: torch.device,
        *,
        mask: Tensor | None,
        pair_mask: Tensor | None,
        causal: bool,
    ) -> Simplexes:
        """List the tails.

        Args:
            sizes: numbers of nodes.
            batch: shape of the batch.
            device: of the masks.
            mask: of simplexes.
            pair_mask: of a query and each of its keys.
            causal: whether keys later than the query take no part.

        Returns:
            The simplexes.

        >>> device = torch.device("cpu")
        >>> Simplexes.of((2, 2, 2, 2), torch.Size(), device, mask=None, pair_mask=None, causal=True).latest
        tensor([0, 1, 1, 1])
        """
        if not causal:
            return Simplexes(sizes, batch, mask, pair_mask)
        axes = [torch.arange(size, device=device) for size in sizes[min(2, len(sizes) - 1) :]]
        latest = reduce(torch.maximum, torch.meshgrid(*axes, indexing="ij")).flatten()
        if len(axes) == 1:
            return Simplexes(sizes, batch, mask, pair_mask, causal=True, latest=latest)
        latest, listed = latest.sort(stable=True)
        return Simplexes(sizes, batch, mask, pair_mask, causal=True, order_of_tails=listed, latest=latest)

    @property
    def order(self) -> int:
        """N."""
        return len(self.sizes) - 1

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.sizes[1] if self.order > 1 else 1

    @property
    def tails(self) -> int:
        """Number of tails."""
        return math.prod(self.sizes[min(2, self.order) :])

    def tiles(self, logits: int) -> Iterator[list[Tile]]:
        """Cut all logits into tiles, so that each has about ``logits``, but all tails of one query and head.

        Args:
            logits: the number to hold at a time.

        Yields:
            The tiles of one block of queries, over all heads that they may attend to.

        >>> blocks = list(Simplexes((3, 4, 5), torch.Size([2])).tiles(20))
        >>> len(blocks), len(blocks[0])
        (6, 1)
        """
        entries, queries = math.prod(self.batch), self.sizes[0]
        row = self.heads * self.tails
        together = max(1, logits // (queries * row))
        rows = min(queries, max(1, logits // row))
        columns = self.heads if row <= logits else max(1, logits // self.tails)
        for entry in range(0, entries, together):
            for query in range(0, queries, rows):
                some = slice(query, min(query + rows, queries))
                seen = some.stop if self.causal else None
                heads = self.heads if seen is None or self.order == 1 else seen
                tails = self.tails if seen is None else seen ** max(1, self.order - 1)
                yield [
                    Tile(slice(entry, min(entry + together, entries)), some, slice(k, min(k + columns, heads)), tails)
                    for k in range(0, heads, columns)
                ]

    def allowed(self, tile: Tile) -> Tensor | None:
        """Which logits of a tile take part.

        Args:
            tile: of :meth:`tiles`.

        Returns:
            Boolean, broadcasting to ``(batch, queries, heads, tails)`` of the tile, or None if all do.

        >>> simplexes = Simplexes((2, 2), torch.Size(), pair_mask=torch.eye(2, dtype=torch.bool))
        >>> [block] = simplexes.tiles(100)
        >>> simplexes.allowed(block[0])[0, :, 0]
        tensor([[ True, False],
                [False,  True]])
        """
        found: list[Tensor] = []
        if self.latest is not None:
            at = torch.arange(tile.queries.start, tile.queries.stop, device=self.latest.device)[:, None]
            found.append((self.latest[: tile.tails] <= at)[None, :, None, :])
            if self.order > 1:
                heads = torch.arange(tile.heads.start, tile.heads.stop, device=at.device)
                found.append((heads <= at)[None, :, :, None])
        if self.pair_mask is not None:
            pair = self._block(self.pair_mask, tile, (self.sizes[0], self.sizes[1]))
            tails = pair
            for _ in range(self.order - 2):
                tails = (tails[..., :, None] & pair[..., None, :]).flatten(-2)
            found.append(self._listed(tails, tile)[:, :, None, :])
            if self.order > 1:
                found.append(pair[..., tile.heads][..., None])
        if self.mask is not None:
            simplexes = self._block(self.mask, tile, self.sizes)
            simplexes = simplexes[:, :, None] if self.order == 1 else simplexes[:, :, tile.heads]
            found.append(self._listed(simplexes.flatten(3), tile))
        return reduce(torch.logical_and, found) if found else None

    def _listed(self, tails: Tensor, tile: Tile) -> Tensor:
        listed = tails if self.order_of_tails is None else tails[..., self.order_of_tails[: tile.tails]]
        return listed[..., : tile.tails]

    def _block(self, mask: Tensor, tile: Tile, sizes: tuple[int, ...]) -> Tensor:
        """The tile's batch entries and queries of a mask that broadcasts: no more of it is ever made whole."""
        axes = len(sizes)
        mask = mask[(None,) * max(0, len(self.batch) + axes - mask.dim())]
        mask = mask.expand(*mask.shape[:-axes], *sizes).narrow(-axes, tile.queries.start, _length(tile.queries))
        if mask.dim() == axes:
            return mask[None]
        left = torch.arange(tile.batch.start, tile.batch.stop, device=mask.device)
        index: list[Tensor] = []
        for size, own in zip(reversed(self.batch), reversed(mask.shape[:-axes]), strict=True):
            index.insert(0, left % size if own > 1 else torch.zeros_like(left))
            left = left // size
        return mask[tuple(index)]


def _length(part: slice) -> int:
    return part.stop - part.start
