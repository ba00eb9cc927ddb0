r"""Simplicial attention along paths, all paths that end in the same step together.

A path :math:`k_0 \to \cdots \to k_N` has its last step :math:`k_{N-1} \to k_N` in common with every path that comes to
:math:`k_{N-1}`. Logits are inner products of features of that step with features of what came before, and values
products of the two likewise (:mod:`holonomy.ops.simplicial_attention.logits`; a block of two vectors changes places
with N - 1 others without a sign). So the k steps from a node are gathered once for some of the paths that come to it,
and n :math:`k^{N-1}` rows are gathered in place of n :math:`k^N`, a few groups at a time, forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy.ops.simplicial_attention.logits import Form, head_terms, tail_features

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["Groups", "gathered", "group_by_end", "grouped_paths"]

# Numbers that are gathered at a time: with what is made of them they fit the cache of a core.
_CHUNK = 2**18


class Groups(NamedTuple):
    """Paths without their last node, in groups of the same end.

    Attributes:
        node: the end of each group ``(groups,)``.
        members: which paths it has ``(groups, members)``; the number of all paths where there is none.
    """

    node: Tensor
    members: Tensor


def group_by_end(ends: Int[Tensor, " paths"], nodes: int, members: int) -> Groups:
    """Put paths of the same end into groups."""
    counts = torch.bincount(ends, minlength=nodes)
    groups = (counts + members - 1) // members
    order = ends.argsort(stable=True)
    at = ends[order]
    rank = torch.arange(len(ends), device=ends.device) - (counts.cumsum(0) - counts)[at]
    first = groups.cumsum(0) - groups
    node = torch.arange(nodes, device=ends.device).repeat_interleave(groups)
    found = order.new_full((len(node) * members,), len(ends))
    found[first[at] * members + rank] = order
    return Groups(node, found.unflatten(0, (-1, members)))


def gathered(
    function: Callable[..., Tensor],
    tables: Sequence[Tensor],
    indices: Sequence[Tensor | None],
    into: Int[Tensor, "..."],
    rows: int,
    chunk: int,
) -> Tensor:
    """A function of gathered rows, added up, some at a time; nothing is kept, all is gathered again on the way back."""
    return _autograd.apply_function(_Gathered, function, tuple(indices), into, rows, chunk, *tables)


def grouped_paths(
    keys: Sequence[Float[Tensor, "nodes dim"]],
    values: Sequence[Float[Tensor, "nodes values"]],
    steps: Int[Tensor, "nodes k"],
    scores: Float[Tensor, "nodes k"],
    *,
    form: Form,
    chunk: int,
) -> Float[Tensor, "nodes values"]:
    """Averages of values along paths."""
    order, (nodes, k) = len(values), steps.shape
    ends, bias = [torch.arange(nodes, device=steps.device)], scores
    for _ in range(order - 1):
        ends.append(steps[ends[-1]].flatten())
        bias = bias.flatten()[:, None] + scores[ends[-1]]
    # On average k paths of two nodes come to a node: smaller groups gather its steps more often, larger ones have gaps.
    node, own = group_by_end(ends[-1], nodes, 1 if order == 1 else k)
    far = steps[node]
    size = max(1, min(chunk, _CHUNK) // ((own.shape[1] + k) * max(keys[0].shape[1], values[0].shape[1])))

    # What the paths are before their last step, and that step. What is found for no path goes into a row too many.
    paths = len(ends[-1])
    some = own.masked_fill(own == paths, 0)
    before = [end.repeat_interleave(k ** (order - 1 - m))[some] for m, end in enumerate(ends[:-1])]
    tables = (keys, [*before, node, far])
    logits = gathered(partial(_logits, order=order, form=form), *tables, own, paths + 1, size)[:paths]
    logits = logits.view(nodes, -1) + bias.view(nodes, -1)
    empty = logits.isneginf().all(-1, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).view(-1, k)

    pivots = [] if order == 1 else [(values[-2], node)]
    tables, indices = zip((weights, some), *pivots, (values[-1], far), strict=True)
    if order > 1:  # paths with the same beginning are added up
        own, paths = own // k, paths // k
    mixed = gathered(_mixed, tables, indices, own, paths + 1, size)[:paths]
    for m in range(order - 2, 0, -1):
        mixed = (mixed * values[m - 1][ends[m]]).unflatten(0, (-1, k)).sum(1)
    return mixed


def _logits(*rows: Tensor, order: int, form: Form) -> Tensor:
    """Of groups: the inner products of what paths are before their last step with that step."""
    *before, pivot, far = rows
    step = reduce(torch.add, (left * right for left, right in head_terms(pivot[:, None], far, order=order, form=form)))
    if not before:
        return step.sum(-1)[:, None]
    return tail_features(before, order=order, form=form) @ step.mT


def _mixed(weights: Tensor, *rows: Tensor) -> Tensor:
    """Of groups: the averages, over the last step, of what is multiplied with the values of earlier steps."""
    *pivots, far = rows
    return weights @ (far if not pivots else pivots[0][:, None] * far)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        function: Callable[..., Tensor],
        indices: tuple[Tensor | None, ...],
        into: Tensor,
        rows: int,
        chunk: int,
        *tables: Tensor,
    ) -> Tensor:
        start, *others = _parts(into, chunk)
        made = function(*_rows(tables, indices, start))
        out = _add(made.new_zeros(rows, made.shape[-1]), into[start], made)
        for part in others:
            _add(out, into[part], function(*_rows(tables, indices, part)))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        ctx.function, ctx.indices, into, ctx.rows, ctx.chunk, *tables = inputs
        ctx.save_for_backward(into, *tables)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        into, *tables = ctx.saved_tensors
        wanted, grad = ctx.needs_input_grad[5:], grad_outputs[0]
        if torch.is_grad_enabled():

            def whole(*tables: Tensor) -> Tensor:
                made = ctx.function(*_rows(tables, ctx.indices, slice(None)))
                return _add(made.new_zeros(ctx.rows, made.shape[-1]), into, made)

            return *[None] * 5, *_autograd.by_definition(whole, tuple(tables), grad, wanted)
        found = [torch.zeros_like(table) if want else None for table, want in zip(tables, wanted, strict=True)]
        for part in _parts(into, ctx.chunk):
            rows = tuple(_rows(tables, ctx.indices, part))
            back = grad.index_select(0, into[part].flatten()).unflatten(0, into[part].shape)
            pulled = _autograd.by_definition(ctx.function, rows, back, wanted)
            for total, index, more in zip(found, ctx.indices, pulled, strict=True):
                if total is None:
                    continue
                if index is None:
                    total[part] = more
                else:
                    _add(total, index[part], more)
        return *[None] * 5, *found


def _add(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return total.index_add_(0, index.flatten(), rows.reshape(-1, rows.shape[-1]))


def _parts(into: Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, len(into), chunk)]


def _rows(tables: Sequence[Tensor], indices: Sequence[Tensor | None], part: slice) -> list[Tensor]:
    return [
        table[part] if index is None else table.index_select(0, index[part].flatten()).unflatten(0, index[part].shape)
        for table, index in zip(tables, indices, strict=True)
    ]
