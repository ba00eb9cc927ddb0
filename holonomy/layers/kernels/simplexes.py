r"""Which simplexes take part in simplicial attention, and the tiles in which their logits are made.

A simplex is a query, a head :math:`k_1` and a tail :math:`(k_2, \dots, k_N)`; for N = 1 the head is a single dummy and
the tail :math:`k_1`. Tails are listed with the last index fastest, or by their latest node where attention is causal:
what a query may see then is a beginning of the list. Masks are ``True`` where something takes part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Simplexes", "Tile", "allowed", "list_simplexes", "tiles"]


class Tile(NamedTuple):
    """A block of logits: of some batch entries, queries and heads, with the first ``tails`` tails.

    Attributes:
        batch: entries of the flattened batch.
        queries: rows.
        heads: columns.
        tails: how many tails, from the first.

    >>> Tile(slice(0, 1), slice(0, 3), slice(0, 3), 9).tails
    9
    """

    batch: slice
    queries: slice
    heads: slice
    tails: int


class Simplexes(NamedTuple):
    r"""All simplexes that the masks allow.

    Attributes:
        sizes: numbers of nodes :math:`n_0, \dots, n_N`.
        batch: shape of the batch.
        order: N.
        heads: how many there are.
        tails: how many there are.
        mask: broadcasts to ``(*batch, n_0, .., n_N)``, or None.
        pair_mask: broadcasts to ``(*batch, n_0, n_1)``, or None.
        causal: whether keys later than the query take no part.
        order_of_tails: where each tail of the list stands in row-major order, None if there; :func:`list_simplexes`.
        latest: the latest node of each tail where attention is causal, else None.

    >>> simplexes = list_simplexes((4, 3, 2), torch.Size([5]), torch.device("cpu"))
    >>> simplexes.order, simplexes.heads, simplexes.tails
    (2, 3, 2)
    """

    sizes: tuple[int, ...]
    batch: torch.Size
    order: int
    heads: int
    tails: int
    mask: Tensor | None = None
    pair_mask: Tensor | None = None
    causal: bool = False
    order_of_tails: Tensor | None = None
    latest: Tensor | None = None


def list_simplexes(
    sizes: tuple[int, ...],
    batch: torch.Size,
    device: torch.device,
    *,
    mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    causal: bool = False,
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
    >>> list_simplexes((2, 2, 2, 2), torch.Size(), device, causal=True).latest
    tensor([0, 1, 1, 1])
    """
    order = len(sizes) - 1
    heads, of_tails = (sizes[1], sizes[2:]) if order > 1 else (1, sizes[1:])
    order_of_tails = latest = None
    if causal:
        axes = [torch.arange(size, device=device) for size in of_tails]
        latest = reduce(torch.maximum, torch.meshgrid(*axes, indexing="ij")).flatten()
        if len(axes) > 1:
            latest, order_of_tails = latest.sort(stable=True)
    return Simplexes(sizes, batch, order, heads, math.prod(of_tails), mask, pair_mask, causal, order_of_tails, latest)


def tiles(simplexes: Simplexes, logits: int) -> Iterator[list[Tile]]:
    """Cut all logits into tiles, so that each has about ``logits``, but all tails of one query and head.

    Args:
        simplexes: all of them.
        logits: the number to hold at a time.

    Yields:
        The tiles of one block of queries, over all heads that they may attend to.

    >>> blocks = list(tiles(list_simplexes((3, 4, 5), torch.Size([2]), torch.device("cpu")), 20))
    >>> len(blocks), len(blocks[0])
    (6, 1)
    """
    entries, queries = math.prod(simplexes.batch), simplexes.sizes[0]
    row = simplexes.heads * simplexes.tails
    together = max(1, logits // (queries * row))
    rows = min(queries, max(1, logits // row))
    columns = simplexes.heads if row <= logits else max(1, logits // simplexes.tails)
    for entry in range(0, entries, together):
        for query in range(0, queries, rows):
            some = slice(query, min(query + rows, queries))
            seen = some.stop if simplexes.causal else None
            heads = simplexes.heads if seen is None or simplexes.order == 1 else seen
            tails = simplexes.tails if seen is None else seen ** max(1, simplexes.order - 1)
            yield [
                Tile(slice(entry, min(entry + together, entries)), some, slice(k, min(k + columns, heads)), tails)
                for k in range(0, heads, columns)
            ]


def allowed(simplexes: Simplexes, tile: Tile) -> Tensor | None:
    """Which logits of a tile take part.

    Args:
        simplexes: all of them.
        tile: of :func:`tiles`.

    Returns:
        Boolean, broadcasting to ``(batch, queries, heads, tails)`` of the tile, or None if all do.

    >>> pairs = torch.eye(2, dtype=torch.bool)
    >>> simplexes = list_simplexes((2, 2), torch.Size(), pairs.device, pair_mask=pairs)
    >>> [block] = tiles(simplexes, 100)
    >>> allowed(simplexes, block[0])[0, :, 0]
    tensor([[ True, False],
            [False,  True]])
    """
    found: list[Tensor] = []
    if simplexes.latest is not None:
        at = torch.arange(tile.queries.start, tile.queries.stop, device=simplexes.latest.device)[:, None]
        found.append((simplexes.latest[: tile.tails] <= at)[None, :, None, :])
        if simplexes.order > 1:
            heads = torch.arange(tile.heads.start, tile.heads.stop, device=at.device)
            found.append((heads <= at)[None, :, :, None])
    if simplexes.pair_mask is not None:
        pair = _block(simplexes, simplexes.pair_mask, tile, (simplexes.sizes[0], simplexes.sizes[1]))
        tails = pair
        for _ in range(simplexes.order - 2):
            tails = (tails[..., :, None] & pair[..., None, :]).flatten(-2)
        found.append(_listed(simplexes, tails, tile)[:, :, None, :])
        if simplexes.order > 1:
            found.append(pair[..., tile.heads][..., None])
    if simplexes.mask is not None:
        whole = _block(simplexes, simplexes.mask, tile, simplexes.sizes)
        whole = whole[:, :, None] if simplexes.order == 1 else whole[:, :, tile.heads]
        found.append(_listed(simplexes, whole.flatten(3), tile))
    return reduce(torch.logical_and, found) if found else None


def _listed(simplexes: Simplexes, tails: Tensor, tile: Tile) -> Tensor:
    listed = tails if simplexes.order_of_tails is None else tails[..., simplexes.order_of_tails[: tile.tails]]
    return listed[..., : tile.tails]


def _block(simplexes: Simplexes, mask: Tensor, tile: Tile, sizes: tuple[int, ...]) -> Tensor:
    """The tile's batch entries and queries of a mask that broadcasts: no more of it is ever made whole."""
    axes = len(sizes)
    mask = mask[(None,) * max(0, len(simplexes.batch) + axes - mask.dim())]
    mask = mask.expand(*mask.shape[:-axes], *sizes).narrow(-axes, tile.queries.start, _length(tile.queries))
    if mask.dim() == axes:
        return mask[None]
    left = torch.arange(tile.batch.start, tile.batch.stop, device=mask.device)
    index: list[Tensor] = []
    for size, own in zip(reversed(simplexes.batch), reversed(mask.shape[:-axes]), strict=True):
        index.insert(0, left % size if own > 1 else torch.zeros_like(left))
        left = left // size
    return mask[tuple(index)]


def _length(part: slice) -> int:
    return part.stop - part.start
