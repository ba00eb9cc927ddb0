"""Causal attention by sums, some rows at a time, each computed again in the backward pass from the sums before it.

What is kept is the input, and the state at the beginning of each part: channels squared for each head. The way back
goes from the last part to the first: a part takes the gradient of its result and of the sums after it, and gives that
of its rows, of the maps, and of the sums before it.

A state is a named tuple of the sums and of their scales, which are constants: they cancel in every result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd

if TYPE_CHECKING:
    from holonomy.ops.linear_attention.causal import LinearState
    from holonomy.ops.performer.causal import PerformerState


class CausalOptions(NamedTuple):
    """The arguments that are no tensors."""

    rows: int  # how many are computed at once
    attend: Callable[..., tuple[Tensor, Any]]  # of rows, mask, state, maps: the result, the next state
    start: LinearState | PerformerState  # before the first row


class RecomputedCausalAttention(torch.autograd.Function):
    """Of rows, their mask, maps and :class:`CausalOptions`, the result, then the states before each part."""

    @staticmethod
    def forward(x: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        """Attend."""
        mask, *maps, options = inputs
        state: Any = options.start
        states, found = [], []
        for part, hidden in _parts(options.rows, x, mask):
            states.append(state)
            out, state = options.attend(part, hidden, state, *maps)
            found.append(out)
        return torch.cat(found, -2), *(torch.stack(each) for each in zip(*states, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the inputs and the states."""
        ctx.options = inputs[-1]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:-1], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate by chunks, or all rows at once where the gradient itself will be differentiated."""
        options, wanted = ctx.options, ctx.needs_input_grad[:-1]
        saved = ctx.saved_tensors
        inputs, kept = saved[: len(wanted)], saved[len(wanted) :]
        x, mask, *maps = inputs
        if _autograd.through_reference(grad_outputs[0]):

            def reference(x: Tensor, mask: Tensor | None, *maps: Tensor | None) -> Tensor:
                return options.attend(x, mask, options.start, *maps)[0]

            return *_autograd.reference_gradients(reference, tuple(inputs), grad_outputs[0], wanted), None
        of_x, of_sums = torch.empty_like(x), torch.zeros_like(kept[0][0])
        of_maps = [torch.zeros_like(each) if asked else None for each, asked in zip(maps, wanted[2:], strict=True)]
        parts = zip(*(each.split(options.rows, -2) for each in (x, of_x, grad_outputs[0])), strict=True)
        masks = _parts(options.rows, x, mask)
        states = (type(options.start)(*each) for each in zip(*kept, strict=True))
        for (rows, into, grad), (_, hidden), state in reversed([*zip(parts, masks, states, strict=True)]):
            rows, before = rows.detach().requires_grad_(), state.sums.detach().requires_grad_()  # noqa: PLW2901
            leaves = [
                each if gathered is None else each.detach().requires_grad_()
                for each, gathered in zip(maps, of_maps, strict=True)
            ]
            there = [rows, before, *(each for each, w in zip(leaves, wanted[2:], strict=True) if w)]
            with torch.enable_grad():
                out, after = options.attend(rows, hidden, state._replace(sums=before), *leaves)
            of_rows, of_sums, *found = torch.autograd.grad((out, after.sums), there, (grad, of_sums))
            into.copy_(of_rows)
            for gathered, each in zip((each for each in of_maps if each is not None), found, strict=True):
                gathered.add_(each)
        return of_x, None, *of_maps, None


def part_by_part(
    attend: Callable[..., tuple[Tensor, Any]], rows: int, state: Any, *tables: Tensor
) -> tuple[Tensor, Any]:
    """Some rows of tables at a time, each part after the state of those before, outside of autocast."""
    found: list[Tensor] = []
    with torch.autocast(_autograd.autocast_device(tables[0]), enabled=False):
        # Not slices, whose gradients are as long as the whole.
        for part in zip(*(table.split(rows, -2) for table in tables), strict=True):
            out, state = attend(state, *part)
            found.append(out)
    return found[0] if len(found) == 1 else torch.cat(found, -2), state


def _parts(rows: int, x: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    parts = x.split(rows, -2)
    masks = [None] * len(parts) if mask is None else mask.split(rows, -1)
    return [*zip(parts, masks, strict=True)]
