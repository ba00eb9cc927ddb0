"""Few tuples of nodes at a time: the keys and queries that share nodes, packed into blocks of equal width.

A slot is what a key and a query may share: a node, or a tuple of them. Slots with few keys and queries are packed
into blocks, several in each; the heavy ones are left to tables. Which pairs of a block count is a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holonomy._shapes import Bool, Int
from holonomy.layers.equivariant.linear import sparse
from holonomy.structures.padded import place_in_run

# Entries of a block: the first width at which nearly all queries have their slots in one.
_WIDTHS = (16, 32, 64)
_HEAVY_SHARE = 0.05


@dataclass(frozen=True)
class Blocks:
    """Keys and queries of each block."""

    query_rows: Int[Tensor, "blocks width"]  # (blocks, width); any row where the mask is False for all keys
    key_rows: Int[Tensor, "blocks width"]  # (blocks, width), likewise
    mask: Bool[Tensor, "blocks width width"]  # (blocks, query, key), which pairs count
    of_queries: Int[Tensor, " queries"]  # the slot of each query
    of_keys: Int[Tensor, " keys"]  # the slot of each key
    count: int  # their number
    heavy: Int[Tensor, " heavy"]  # the queries whose slot is too heavy for a block, which are in none


def pack(sizes: Int[Tensor, "slots kinds"], width: int) -> Int[Tensor, " slots"]:
    """Put slots into blocks one after the other, a new one where any of its kinds of entries would be too many."""
    slots = sizes.shape[0]
    ends = torch.cat([sizes.new_zeros(1, sizes.shape[1]), sizes.cumsum(0)])
    # Where a block that starts at a slot ends; then which slots are reached from the first, by doubling.
    columns = [torch.searchsorted(end, end + width, right=True) - 1 for end in ends.mT.contiguous()]
    jump = torch.stack(columns).amin(0)
    first = torch.zeros_like(jump, dtype=torch.bool)
    first[0] = True
    # After step t, `first` has the first 2^t blocks and `jump` leads 2^t blocks on.
    for _ in range(slots.bit_length()):
        first[jump[first]] = True
        jump = jump[jump]
    return first[:slots].cumsum(0) - 1


def class_blocks(
    keys: Int[Tensor, "keys key_order"],
    queries: Int[Tensor, "queries query_order"],
    kept: tuple[int, ...],
    places: tuple[int, ...],
    others: tuple[tuple[int, int], ...],
    num_nodes: int,
) -> Blocks:
    """Pack the pairs of a key and a query that share some nodes, and none of some others."""
    of_key, of_query = sparse.tuple_codes(keys, kept, num_nodes), sparse.tuple_codes(queries, places, num_nodes)
    # Slots are numbered by what they share; keys and queries of one number meet.
    distinct, slots = torch.cat([of_key, of_query]).unique(return_inverse=True)
    slots = slots.split([len(of_key), len(of_query)])
    sizes = torch.stack([torch.bincount(slot, minlength=len(distinct)) for slot in slots], 1)
    met = (sizes > 0).all(1)
    width = next((w for w in _WIDTHS if _heavy(sizes, met, w)[slots[1]].sum() <= _HEAVY_SHARE * len(queries)), 64)
    # A slot that fills more than a block goes to tables; one without a key or without a query is left out.
    heavy = _heavy(sizes, met, width)
    light = met & ~heavy
    blocks = torch.zeros_like(distinct)
    if bool(light.any()):
        blocks[light] = pack(sizes[light], width)
    count = int(blocks.max()) + 1 if bool(light.any()) else 0
    rows = [_rows(slot, light, blocks, count, width) for slot in slots]
    # Blocks hold several slots: entries of different slots do not meet, nor do those that share a node beside it.
    mask = _same(slots[0], slots[1], *rows)
    for a, b in others:
        mask &= ~_same(keys[:, a], queries[:, b], *rows)
    taken = [row.clamp_min(0) for row in rows]
    left = heavy[slots[1]].nonzero()[:, 0]
    return Blocks(taken[1], taken[0], mask, slots[1], slots[0], len(distinct), left)


def _heavy(sizes: Tensor, met: Tensor, width: int) -> Tensor:
    return met & (sizes > width).any(1)


def _rows(slots: Tensor, light: Tensor, blocks: Tensor, count: int, width: int) -> Tensor:
    """The rows of each block, -1 where there are no more."""
    result = slots.new_full((count * width,), -1)
    rows = light[slots].nonzero()[:, 0]
    of_row, order = slots[rows].sort(stable=True)
    rows, of_row = rows[order], blocks[of_row]
    # The place within a block is the rank in it, the rows of a slot side by side.
    result[of_row * width + place_in_run(of_row, torch.bincount(of_row, minlength=count))] = rows
    return result.view(count, width)


def _same(of_key: Tensor, of_query: Tensor, key_rows: Tensor, query_rows: Tensor) -> Tensor:
    """``(blocks, query, key)``: which entries agree, and both are there."""
    here = (key_rows >= 0)[:, None] & (query_rows >= 0)[:, :, None]
    return here & (of_key[key_rows][:, None] == of_query[query_rows][:, :, None])
