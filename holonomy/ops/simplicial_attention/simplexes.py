r"""Which simplexes take part in simplicial attention, and the tiles in which their logits are made.

A simplex is a query, a head :math:`k_1` and a tail :math:`(k_2, \dots, k_N)`; for N = 1 the head is a single dummy and
the tail :math:`k_1`. Tails are listed with the last index fastest, or by their latest node where attention is causal
or has a window: what some queries may see then is a stretch of the list. Masks are ``True`` where something takes part.

Causality and windows leave to each key an interval of queries that may see it, and to a tail the intersection of its
keys' intervals. That is all that the tiles here, and a kernel elsewhere, need to know of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Interval", "Simplexes", "Tile", "allowed", "list_simplexes", "reach", "steps_of", "tiles"]


class Interval(NamedTuple):
    """The queries that see a key or a tail: from ``opens`` to before ``closes``."""

    opens: Tensor
    closes: Tensor


class Tile(NamedTuple):
    """A block of logits: of some batch entries, queries, heads and tails.

    Attributes:
        batch: entries of the flattened batch.
        queries: rows.
        heads: columns.
        tails: a stretch of their list.
    """

    batch: slice
    queries: slice
    heads: slice
    tails: slice


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
        window: key m takes part if it is less than ``window[m - 1]`` places from the query; None for all.
        order_of_tails: where each tail of the list stands in row-major order, None if there; :func:`list_simplexes`.
        of_heads: the queries that see each head, None for all.
        of_tails: the queries that see each tail of the list, None for all.
    """

    sizes: tuple[int, ...]
    batch: torch.Size
    order: int
    heads: int
    tails: int
    mask: Tensor | None = None
    pair_mask: Tensor | None = None
    causal: bool = False
    window: tuple[int, ...] | None = None
    order_of_tails: Tensor | None = None
    of_heads: Interval | None = None
    of_tails: Interval | None = None


def list_simplexes(
    sizes: tuple[int, ...],
    batch: torch.Size,
    device: torch.device,
    *,
    mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, ...] | None = None,
) -> Simplexes:
    """List the tails."""
    order = len(sizes) - 1
    heads, of_tails = (sizes[1], sizes[2:]) if order > 1 else (1, sizes[1:])
    known = (sizes, batch, order, heads, math.prod(of_tails), mask, pair_mask, causal, window)
    found = Simplexes(*known)
    if not causal and window is None:
        return found
    each = [_interval(found, m, device) for m in range(1, order + 1)]
    tails = each[1:] or each
    opens = reduce(torch.maximum, torch.meshgrid(*(x.opens for x in tails), indexing="ij")).flatten()
    closes = reduce(torch.minimum, torch.meshgrid(*(x.closes for x in tails), indexing="ij")).flatten()
    listed = None
    if len(tails) > 1:
        at = torch.arange(sizes[0], device=device)
        listed = reduce(torch.maximum, torch.meshgrid(*(at for _ in tails), indexing="ij")).flatten()
        listed = listed.sort(stable=True).indices
        opens, closes = opens[listed], closes[listed]
    # Not by `_replace`, which the compiler of torch 2.6 does not know.
    return Simplexes(*known, listed, each[0] if order > 1 else None, Interval(opens, closes))


def _interval(simplexes: Simplexes, m: int, device: torch.device) -> Interval:
    """The queries that see key m, at each of its nodes."""
    at = torch.arange(simplexes.sizes[0], device=device)
    back, ahead = steps_of(simplexes, m)
    return Interval(at - ahead, at + back + 1)


def steps_of(simplexes: Simplexes, m: int) -> tuple[int, int]:
    """Tell how far key m may lie back of a query, and ahead of it."""
    far = simplexes.sizes[0] if simplexes.window is None else simplexes.window[m - 1] - 1
    return far, 0 if simplexes.causal else far


def reach(simplexes: Simplexes, queries: slice) -> tuple[slice, slice]:
    """Find the heads and the stretch of the list of tails outside of which none of some queries sees anything."""
    if simplexes.of_tails is None:
        return slice(0, simplexes.heads), slice(0, simplexes.tails)
    each = [steps_of(simplexes, m) for m in range(1, simplexes.order + 1)]
    tails, power = each[1:] or each, max(1, simplexes.order - 1)
    # The latest node of a tail is no further back than the key with the narrowest window may be.
    first = max(0, queries.start - min(back for back, _ in tails))
    last = min(simplexes.sizes[0], queries.stop + max(ahead for _, ahead in tails))
    heads = slice(0, 1)
    if simplexes.order > 1:
        back, ahead = each[0]
        heads = slice(max(0, queries.start - back), min(simplexes.heads, queries.stop + ahead))
    return heads, slice(first**power, last**power)


def tiles(simplexes: Simplexes, logits: int) -> Iterator[list[Tile]]:
    """Cut all logits into tiles, so that each has about ``logits``, but all tails of one query and head."""
    entries, queries = math.prod(simplexes.batch), simplexes.sizes[0]
    row, most = simplexes.heads * simplexes.tails, queries
    together = max(1, logits // (queries * row))
    if simplexes.window is not None and logits < queries * row:
        # As many queries as a window is wide: fewer would look at one key again and again, more at keys far from most.
        most = max(simplexes.window)
        heads, tails = reach(simplexes, slice(queries // 2, queries // 2 + most))
        row = (heads.stop - heads.start) * (tails.stop - tails.start)
    rows = min(queries, most, max(1, logits // row))
    for entry in range(0, entries, together):
        for query in range(0, queries, rows):
            some = slice(query, min(query + rows, queries))
            heads, tails = reach(simplexes, some)
            columns = max(1, logits // ((some.stop - some.start) * (tails.stop - tails.start)))
            yield [
                Tile(slice(entry, min(entry + together, entries)), some, slice(k, min(k + columns, heads.stop)), tails)
                for k in range(heads.start, heads.stop, columns)
            ]


def allowed(simplexes: Simplexes, tile: Tile) -> Tensor | None:
    """Which logits of a tile take part."""
    found: list[Tensor] = []
    if simplexes.of_tails is not None:
        at = torch.arange(tile.queries.start, tile.queries.stop, device=simplexes.of_tails.opens.device)[:, None]
        found.append(_seen(simplexes.of_tails, tile.tails, at)[None, :, None, :])
        if simplexes.of_heads is not None:
            found.append(_seen(simplexes.of_heads, tile.heads, at)[None, :, :, None])
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
    if simplexes.order_of_tails is None:
        return tails[..., tile.tails]
    return tails[..., simplexes.order_of_tails[tile.tails]]


def _seen(interval: Interval, some: slice, query: Tensor) -> Tensor:
    return (interval.opens[some] <= query) & (query < interval.closes[some])


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
