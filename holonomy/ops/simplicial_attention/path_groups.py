r"""Simplicial attention along paths, with all paths that end in the same step computed together.

A path :math:`k_0 \to \cdots \to k_N` shares its last step :math:`k_{N-1} \to k_N` with all other paths that reach
:math:`k_{N-1}`. Logits are inner products of features of that step with features of the earlier nodes, and values are
products of the two in the same way (:mod:`holonomy.ops.simplicial_attention.logits`; moving a block of two vectors past
N - 1 others does not change the sign of a determinant). So the k steps from a node are gathered once for a group of
paths that reach it: n :math:`k^{N-1}` rows are gathered instead of n :math:`k^N`, some groups at a time, and again in
the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy._shapes import Float, Int
from holonomy.ops.masks import masked_softmax
from holonomy.ops.simplicial_attention.logits import Form, first_key_terms, other_keys_features
from holonomy.structures.padded import place_in_run

# Numbers that are gathered in one chunk: with the results they fit in the cache of a core.
_CHUNK = 2**18


class Groups(NamedTuple):
    """Paths without their last node, in groups that end at the same node."""

    node: Tensor  # the end of each group (groups,)
    members: Tensor  # the paths of each group (groups, members); free places have the number of all paths


def group_by_end(ends: Int[Tensor, " paths"], nodes: int, members: int) -> Groups:
    """Put paths that end at the same node into groups."""
    counts = torch.bincount(ends, minlength=nodes)
    groups = (counts + members - 1) // members
    order = ends.argsort(stable=True)
    at = ends[order]
    rank = place_in_run(at, counts)
    first = groups.cumsum(0) - groups
    node = torch.arange(nodes, device=ends.device).repeat_interleave(groups)
    found = order.new_full((len(node) * members,), len(ends))
    found[first[at] * members + rank] = order
    return Groups(node, found.unflatten(0, (-1, members)))


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
    # On average k paths of two nodes reach a node: smaller groups gather its steps more often, larger ones have gaps.
    node, members = group_by_end(ends[-1], nodes, 1 if order == 1 else k)
    far = steps[node]
    size = max(1, min(chunk, _CHUNK) // ((members.shape[1] + k) * max(keys[0].shape[1], values[0].shape[1])))

    # The earlier nodes of each path, and its last step. Results of free places go into an extra last row.
    paths = len(ends[-1])
    some = members.masked_fill(members == paths, 0)
    before = [end.repeat_interleave(k ** (order - 1 - m))[some] for m, end in enumerate(ends[:-1])]
    of_paths, indices = partial(_logits, order=order, form=form), (*before, node, far)
    logits = _autograd.apply_function(_Gathered, of_paths, indices, members, paths + 1, size, *keys)[:paths]
    logits = logits.view(nodes, -1) + bias.view(nodes, -1)
    weights = masked_softmax(logits, logits.isneginf().all(-1, keepdim=True), None).view(-1, k)

    pivots = [] if order == 1 else [(values[-2], node)]
    tables, indices = zip((weights, some), *pivots, (values[-1], far), strict=True)
    if order > 1:  # sum over paths with the same earlier nodes
        members, paths = members // k, paths // k
    mixed = _autograd.apply_function(_Gathered, _mixed, indices, members, paths + 1, size, *tables)[:paths]
    for m in range(order - 2, 0, -1):
        mixed = (mixed * values[m - 1][ends[m]]).unflatten(0, (-1, k)).sum(1)
    return mixed


def _logits(*rows: Tensor, order: int, form: Form) -> Tensor:
    """For each group, inner products of features of the earlier nodes with those of the last step."""
    *before, pivot, far = rows
    step = reduce(
        torch.add, (left * right for left, right in first_key_terms(pivot[:, None], far, order=order, form=form))
    )
    if not before:
        return step.sum(-1)[:, None]
    return other_keys_features(before, order=order, form=form) @ step.mT


def _mixed(weights: Tensor, *rows: Tensor) -> Tensor:
    """For each group, averages over the last step, which are multiplied with the values of earlier steps."""
    *pivots, far = rows
    return weights @ (far if not pivots else pivots[0][:, None] * far)


class _Gathered(torch.autograd.Function):
    """Sum of a function of gathered rows, by chunks that are gathered again for its gradient."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        function, indices, into, rows, chunk, *tables = inputs
        start, *others = _chunks(into, chunk)
        made = function(*_rows(tables, indices, start))
        out = _add(made.new_zeros(rows, made.shape[-1]), into[start], made)
        for chunk_rows in others:
            _add(out, into[chunk_rows], function(*_rows(tables, indices, chunk_rows)))
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
        if _autograd.through_reference(grad):

            def whole(*tables: Tensor) -> Tensor:
                made = ctx.function(*_rows(tables, ctx.indices, slice(None)))
                return _add(made.new_zeros(ctx.rows, made.shape[-1]), into, made)

            return *[None] * 5, *_autograd.reference_gradients(whole, tuple(tables), grad, wanted)
        found = [torch.zeros_like(table) if want else None for table, want in zip(tables, wanted, strict=True)]
        for chunk_rows in _chunks(into, ctx.chunk):
            rows = tuple(_rows(tables, ctx.indices, chunk_rows))
            grad_out = grad.index_select(0, into[chunk_rows].flatten()).unflatten(0, into[chunk_rows].shape)
            # The function of this chunk is differentiated by autograd; gathering becomes adding.
            grad_rows = _autograd.reference_gradients(ctx.function, rows, grad_out, wanted)
            for total, index, more in zip(found, ctx.indices, grad_rows, strict=True):
                if total is None:
                    continue
                if index is None:
                    total[chunk_rows] = more
                else:
                    _add(total, index[chunk_rows], more)
        return *[None] * 5, *found


def _add(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return total.index_add_(0, index.flatten(), rows.reshape(-1, rows.shape[-1]))


def _chunks(into: Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, len(into), chunk)]


def _rows(tables: Sequence[Tensor], indices: Sequence[Tensor | None], chunk_rows: slice) -> list[Tensor]:
    return [
        table[chunk_rows]
        if index is None
        else table.index_select(0, index[chunk_rows].flatten()).unflatten(0, index[chunk_rows].shape)
        for table, index in zip(tables, indices, strict=True)
    ]
