"""Causal attention by sums, some rows at a time, each part after the sums over those before it.

A state is a named tuple of the sums and of their scales, which are constants: they cancel in every result. Where parts
are computed again in the backward pass, what is kept is the input and the state before each part: channels squared for
each head.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd


def part_by_part(
    attend: Callable[..., tuple[Tensor, Any]], rows: int, state: Any, *tables: Tensor | None
) -> tuple[Tensor, Any]:
    """Some rows of tables at a time, each part after the state of those before, outside of autocast."""
    found: list[Tensor] = []
    device = _autograd.autocast_device(next(table for table in tables if table is not None))
    with torch.autocast(device, enabled=False):
        # Not slices, whose gradients are as long as the whole.
        for part in zip(*(repeat(None) if table is None else table.split(rows, -2) for table in tables), strict=False):
            out, state = attend(state, *part)
            found.append(out)
    return found[0] if len(found) == 1 else torch.cat(found, -2), state


def recomputed_parts(
    attend: Callable[..., tuple[Tensor, Any]], rows: int, state: Any, *tables: Tensor | None, maps: tuple[Any, ...]
) -> Tensor:
    """The result of :func:`part_by_part`, of tables and then maps, with every part computed again for its gradient."""
    kind = type(state)

    def flat(*tensors: Any) -> tuple[Tensor, ...]:
        out, after = attend(kind(*tensors[: len(state)]), *tensors[len(state) :])
        return out, *(number.clone() for number in after)  # which are views of those of every chunk

    def step(before: Any, *part: Tensor | None) -> tuple[Tensor, Any]:
        out, sums, *scales = _autograd.recomputed(flat, *before, *part, *maps)
        return out, kind(sums, *(scale.detach() for scale in scales))

    return part_by_part(step, rows, state, *tables)[0]
