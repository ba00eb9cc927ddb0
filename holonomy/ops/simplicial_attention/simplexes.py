r"""Which simplexes take part in simplicial attention, and the tiles in which their logits are computed.

A simplex is a query, a first key :math:`k_1` and the other keys :math:`(k_2, \dots, k_N)`; for N = 1 the first key is a
single dummy and the other keys are :math:`k_1`. Here "others" are the tuples of other keys, listed with the last index
fastest; with causality or a window they are sorted by their latest node instead, so that a block of queries sees a
slice of the list. Masks are ``True`` where a simplex takes part. By place, queries are the last of the keys.

Causality and windows give each key an interval of queries that see it, and a tuple of keys the intersection of their
intervals. The tiles here and the Triton kernels need no more than these intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """The queries that see a key or a tuple of keys: from ``opens`` to before ``closes``."""

    opens: Tensor
    closes: Tensor


class Tile(NamedTuple):
    """A block of logits: of some batch entries, queries, first keys and tuples of other keys."""

    batch: slice  # entries of the flattened batch
    queries: slice  # rows
    first_keys: slice  # columns
    others: slice  # a slice of their list


class Simplexes(NamedTuple):
    r"""All simplexes that the masks allow."""

    sizes: tuple[int, ...]  # numbers of nodes n_0, ..., n_N
    batch: torch.Size  # shape of the batch
    order: int  # N
    first_keys: int  # how many there are
    others: int  # how many there are
    mask: Tensor | None = None  # broadcasts to (*batch, n_0, .., n_N), or None
    pair_mask: Tensor | None = None  # broadcasts to (*batch, n_0, n_1), or None
    causal: bool = False  # whether keys later than the query are left out
    # Key m takes part if it is less than window[m - 1] places from the query; None for all.
    window: tuple[int, ...] | None = None
    # Row-major index of each tuple of the list, None if the list is in row-major order.
    order_of_others: Tensor | None = None
    of_first_keys: Interval | None = None  # the queries that see each first key, None for all
    of_others: Interval | None = None  # the queries that see each tuple of the list, None for all


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
    """List the tuples of other keys."""
    order = len(sizes) - 1
    first_keys, of_others = (sizes[1], sizes[2:]) if order > 1 else (1, sizes[1:])
    known = (sizes, batch, order, first_keys, math.prod(of_others), mask, pair_mask, causal, window)
    found = Simplexes(*known)
    if not causal and window is None:
        return found
    each = [_interval(found, m, device) for m in range(1, order + 1)]
    others = each[1:] or each
    opens = reduce(torch.maximum, torch.meshgrid(*(x.opens for x in others), indexing="ij")).flatten()
    closes = reduce(torch.minimum, torch.meshgrid(*(x.closes for x in others), indexing="ij")).flatten()
    listed = None
    if len(others) > 1:
        at = torch.arange(sizes[1], device=device)
        listed = reduce(torch.maximum, torch.meshgrid(*(at for _ in others), indexing="ij")).flatten()
        listed = listed.sort(stable=True).indices
        opens, closes = opens[listed], closes[listed]
    # Not by `_replace`, which the compiler of torch 2.6 does not know.
    return Simplexes(*known, listed, each[0] if order > 1 else None, Interval(opens, closes))


def _interval(simplexes: Simplexes, m: int, device: torch.device) -> Interval:
    """The queries that see key m, at each of its nodes."""
    at = torch.arange(simplexes.sizes[1], device=device) - _earlier(simplexes)
    back, ahead = steps_of(simplexes, m)
    return Interval(at - ahead, at + back + 1)


def _earlier(simplexes: Simplexes) -> int:
    """How many keys lie before the first query."""
    return simplexes.sizes[1] - simplexes.sizes[0]


def steps_of(simplexes: Simplexes, m: int) -> tuple[int, int]:
    """How many places key m may lie before a query, and after it."""
    far = simplexes.sizes[1] if simplexes.window is None else simplexes.window[m - 1] - 1
    return far, 0 if simplexes.causal else far


def reach(simplexes: Simplexes, queries: slice) -> tuple[slice, slice]:
    """The first keys and the slice of the list of others that contain all that a block of queries sees."""
    if simplexes.of_others is None:
        return slice(0, simplexes.first_keys), slice(0, simplexes.others)
    each = [steps_of(simplexes, m) for m in range(1, simplexes.order + 1)]
    others, power = each[1:] or each, max(1, simplexes.order - 1)
    # The list is sorted by the latest node, which no window allows further back than the narrowest one does.
    # Tuples of p keys with all nodes before n are the first n^p of the list.
    begin, end = queries.start + _earlier(simplexes), queries.stop + _earlier(simplexes)
    first = max(0, begin - min(back for back, _ in others))
    last = min(simplexes.sizes[1], end + max(ahead for _, ahead in others))
    first_keys = slice(0, 1)
    if simplexes.order > 1:
        back, ahead = each[0]
        first_keys = slice(max(0, begin - back), min(simplexes.first_keys, end + ahead))
    return first_keys, slice(first**power, last**power)


def tiles(simplexes: Simplexes, logits: int) -> Iterator[list[Tile]]:
    """Cut all logits into tiles of about ``logits`` entries, with all others of at least one query and first key."""
    entries, queries = math.prod(simplexes.batch), simplexes.sizes[0]
    row, most = simplexes.first_keys * simplexes.others, queries
    together = max(1, logits // (queries * row))
    if simplexes.window is not None and logits < queries * row:
        # As many queries as the window is wide: fewer would read each key more often, more would read masked keys.
        most = max(simplexes.window)
        first_keys, others = reach(simplexes, slice(queries // 2, queries // 2 + most))
        row = (first_keys.stop - first_keys.start) * (others.stop - others.start)
    most = min(most, max(1, logits // row))
    rows = min(queries, most)
    for entry in range(0, entries, together):
        batch = slice(entry, min(entry + together, entries))
        for query in range(0, queries, rows):
            some = slice(query, min(query + rows, queries))
            first_keys, others = reach(simplexes, some)
            columns = max(1, logits // ((some.stop - some.start) * (others.stop - others.start)))
            yield [
                Tile(batch, some, slice(k, min(k + columns, first_keys.stop)), others)
                for k in range(first_keys.start, first_keys.stop, columns)
            ]


def allowed(simplexes: Simplexes, tile: Tile) -> Tensor | None:
    """Which logits of a tile take part, None for all."""
    found: list[Tensor] = []
    if simplexes.of_others is not None:
        at = torch.arange(tile.queries.start, tile.queries.stop, device=simplexes.of_others.opens.device)[:, None]
        found.append(_seen(simplexes.of_others, tile.others, at)[None, :, None, :])
        if simplexes.of_first_keys is not None:
            found.append(_seen(simplexes.of_first_keys, tile.first_keys, at)[None, :, :, None])
    if simplexes.pair_mask is not None:
        pair = _block(simplexes, simplexes.pair_mask, tile, (simplexes.sizes[0], simplexes.sizes[1]))
        # A tuple is there if each of its keys is.
        others = pair
        for _ in range(simplexes.order - 2):
            others = (others[..., :, None] & pair[..., None, :]).flatten(-2)
        found.append(_listed(simplexes, others, tile)[:, :, None, :])
        if simplexes.order > 1:
            found.append(pair[..., tile.first_keys][..., None])
    if simplexes.mask is not None:
        whole = _block(simplexes, simplexes.mask, tile, simplexes.sizes)
        whole = whole[:, :, None] if simplexes.order == 1 else whole[:, :, tile.first_keys]
        found.append(_listed(simplexes, whole.flatten(3), tile))
    return reduce(torch.logical_and, found) if found else None


def _listed(simplexes: Simplexes, others: Tensor, tile: Tile) -> Tensor:
    if simplexes.order_of_others is None:
        return others[..., tile.others]
    return others[..., simplexes.order_of_others[tile.others]]


def _seen(interval: Interval, some: slice, query: Tensor) -> Tensor:
    return (interval.opens[some] <= query) & (query < interval.closes[some])


def _block(simplexes: Simplexes, mask: Tensor, tile: Tile, sizes: tuple[int, ...]) -> Tensor:
    """The tile's batch entries and queries of a mask that broadcasts; the rest of it is not expanded."""
    axes = len(sizes)
    mask = mask[(None,) * max(0, len(simplexes.batch) + axes - mask.dim())]
    mask = mask.expand(*mask.shape[:-axes], *sizes)[(..., tile.queries, *[slice(None)] * (axes - 1))]
    if mask.dim() == axes:
        return mask[None]
    left = torch.arange(tile.batch.start, tile.batch.stop, device=mask.device)
    index: list[Tensor] = []
    for size, own in zip(reversed(simplexes.batch), reversed(mask.shape[:-axes]), strict=True):
        index.insert(0, left % size if own > 1 else torch.zeros_like(left))
        left = left // size
    return mask[tuple(index)]
