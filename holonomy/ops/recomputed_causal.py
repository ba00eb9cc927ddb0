"""Causal attention by sums, some rows at a time, each part after the sums over those before it.

A state is a named tuple of the sums and of their scales, which are constants: they cancel in every result. Where parts
are computed again in the backward pass, what is kept is the input and the state before each part: channels squared for
each head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd


def part_by_part(
    attend: Callable[..., tuple[Tensor, Any]], rows: int, state: Any, table: Tensor, *others: Tensor | None
) -> tuple[Tensor, Any]:
    """Some rows of tables at a time, each part after the state of those before, outside of autocast."""
    found: list[Tensor] = []
    with torch.autocast(_autograd.autocast_device(table), enabled=False):
        parts = table.split(rows, -2)  # not slices, whose gradients are as long as the whole
        beside = [[None] * len(parts) if other is None else other.split(rows, -2) for other in others]
        for part in zip(parts, *beside, strict=True):
            out, state = attend(state, *part)
            found.append(out)
    return found[0] if len(found) == 1 else torch.cat(found, -2), state


def recomputed_parts(
    attend: Callable[..., tuple[Tensor, Any]],
    rows: int,
    state: Any,
    table: Tensor,
    *others: Tensor | None,
    maps: tuple[Any, ...],
) -> Tensor:
    """The result of :func:`part_by_part`, of tables and then maps, with every part computed again for its gradient."""
    kind = type(state)

    def flat(*tensors: Any) -> tuple[Tensor, ...]:
        out, after = attend(kind(*tensors[: len(state)]), *tensors[len(state) :])
        return out, *(number.clone() for number in after)  # which are views of those of every chunk

    def step(before: Any, *part: Tensor | None) -> tuple[Tensor, Any]:
        out, sums, *scales = _autograd.recomputed(flat, *before, *part, *maps)
        return out, kind(sums, *(scale.detach() for scale in scales))

    return part_by_part(step, rows, state, table, *others)[0]
