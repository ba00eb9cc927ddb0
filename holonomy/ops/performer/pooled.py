r"""Linear attention of many heads over the same rows, where keys and queries are few linear maps of them.

.. math:: L_f = \log \sum_i e^{\ell_f(k_i)}, \qquad M_f = \sum_i \mathrm{softmax}_i(\ell_f(k_i))\, v_i, \qquad
    o_j = x_j D + \sum_f \mathrm{softmax}_f(\ell_f(q_j) + L_f)\, M_f

with :math:`\ell_f` of :mod:`~holonomy.ops.performer`, f over the random features of all heads. The plain
form is :func:`pooled_plainly` and :func:`attend_plainly`. The other one, which is chosen where everything is float32 or
float64 without autocast, takes rows in chunks and writes each into the same few buffers: fresh memory takes longer to
write than most of what is written here to compute. Backwards a chunk is computed again. That buys a third to a half of
the time, and memory, which is that of the rows. Second derivatives take the plain form.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy.ops.performer import log_features

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["attend", "attend_plainly", "pooled", "pooled_plainly"]

# Rows of a chunk: what all heads make of them is a few MiB.
_CHUNK = 512
_CHUNK_CUDA = 2**17


def pooled_plainly(
    x: Float[Tensor, "keys width"],
    weight: Float[Tensor, "width heads_dim"],
    bias: Float[Tensor, " heads_dim"],
    projection: Float[Tensor, "features dim"],
    first: int,
    last: int,
) -> tuple[Float[Tensor, "heads features"], Float[Tensor, "values_and_one heads_features"]]:
    """:func:`pooled` with everything written out."""
    logs = log_features((x @ weight + bias).unflatten(-1, (-1, projection.shape[1])), projection)
    top = logs.detach().amax(0)
    phi = (logs - top).exp().flatten(1)
    counted = torch.cat([x[:, first:last], torch.ones_like(x[:, :1])], -1)
    return top, counted.to(phi.dtype).mT @ phi


def pooled(
    x: Float[Tensor, "keys width"],
    weight: Float[Tensor, "width heads_dim"],
    bias: Float[Tensor, " heads_dim"],
    projection: Float[Tensor, "features dim"],
    first: int,
    last: int,
) -> tuple[Float[Tensor, "heads features"], Float[Tensor, "heads features values"]]:
    """What each feature of each head gathers from the keys: :math:`L_f` and :math:`M_f`."""
    if _autograd.by_hand(x, weight, bias, projection):
        top, table = _autograd.apply_function(_Pooled, x, weight, bias, projection, first, last)
    else:
        top, table = pooled_plainly(x, weight, bias, projection, first, last)
    table = table.unflatten(-1, top.shape)
    return top.detach() + table[-1].log(), (table[:-1] / table[-1]).movedim(0, -1)


def attend_plainly(
    x: Float[Tensor, "queries width"],
    weight: Float[Tensor, "width heads_dim"],
    bias: Float[Tensor, " heads_dim"],
    projection: Float[Tensor, "features dim"],
    logs: Float[Tensor, "heads features"],
    means: Float[Tensor, "heads features out"],
    direct: Float[Tensor, "width out"],
) -> Float[Tensor, "queries out"]:
    """:func:`attend` with everything written out."""
    query = (x @ weight + bias).unflatten(-1, (-1, projection.shape[1]))
    share = (log_features(query, projection, of_query=True) + logs).softmax(-1).flatten(1)
    return x @ direct + share.to(means.dtype) @ means.flatten(0, 1)


def attend(
    x: Float[Tensor, "queries width"],
    weight: Float[Tensor, "width heads_dim"],
    bias: Float[Tensor, " heads_dim"],
    projection: Float[Tensor, "features dim"],
    logs: Float[Tensor, "heads features"],
    means: Float[Tensor, "heads features out"],
    direct: Float[Tensor, "width out"],
) -> Float[Tensor, "queries out"]:
    r"""The sum of all heads at each query, :math:`x D + \sum_f \mathrm{softmax}_f(\ell_f(q) + L_f) M_f`."""
    inputs = (x, weight, bias, projection, logs, means, direct)
    return _autograd.apply_function(_Attend, *inputs) if _autograd.by_hand(*inputs) else attend_plainly(*inputs)


def _starts(x: Tensor) -> tuple[range, int]:
    """Where chunks start, and the rows of a chunk."""
    most = _CHUNK_CUDA if x.device.type == "cuda" else _CHUNK
    return range(0, x.shape[0], most), min(most, x.shape[0])


class _Pooled(torch.autograd.Function):
    """Chunks of keys, all relative to the largest logarithm so far."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, projection: Tensor, first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        features, dim = projection.shape
        heads = weight.shape[1] // dim
        starts, most = _starts(x)
        key, phi = x.new_empty(most, weight.shape[1]), x.new_empty(most, heads * features)
        counted = x.new_ones(most, last - first + 1)
        table = x.new_zeros(last - first + 1, heads * features)
        top = x.new_full((heads * features,), -torch.inf)
        for start in starts:
            rows = x[start : start + most]
            logs = _logs_of_keys(rows, weight, bias, projection, key, phi)
            highest = torch.maximum(top, logs.amax(0))
            table.mul_((top - highest).exp_())
            top = highest
            logs.sub_(top).exp_()
            here = counted[: len(rows)]
            here[:, :-1] = rows[:, first:last]
            table.addmm_(here.mT, logs)
        top = top.view(heads, features)
        ctx.save_for_backward(x, weight, bias, projection, top)
        ctx.values = first, last
        # The constant of the logarithms, which no sum sees.
        found = top - math.log(features) / 2
        ctx.mark_non_differentiable(found)
        return found, table

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, projection, top = ctx.saved_tensors
        first, last = ctx.values
        grad = grad_outputs[1]
        wanted = (*ctx.needs_input_grad[:4], False, False)
        if torch.is_grad_enabled() or wanted[3]:
            inputs = (x, weight, bias, projection, first, last)
            return _autograd.by_definition(lambda *given: pooled_plainly(*given)[-1], inputs, grad, wanted)
        features, dim = projection.shape
        starts, most = _starts(x)
        key, phi = x.new_empty(most, weight.shape[1]), x.new_empty(most, top.numel())
        slope, way = torch.empty_like(phi), torch.empty_like(key)
        counted = x.new_ones(most, last - first + 1)
        back = grad[:-1].mT.contiguous()
        norms = x.new_ones(features, 1)
        for_x, for_weight, for_bias = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        for start in starts:
            rows = x[start : start + most]
            count = len(rows)
            logs = _logs_of_keys(rows, weight, bias, projection, key, phi)
            logs.sub_(top.flatten()).exp_()
            here, steep, dk = counted[:count], slope[:count], way[:count]
            here[:, :-1] = rows[:, first:last]
            torch.mm(here, grad, out=steep)
            steep.mul_(logs)
            torch.mm(steep.view(-1, features), projection, out=dk.view(-1, dim))
            k = key[:count].view(-1, dim)
            dk.view(-1, dim).sub_(k.mul_(steep.view(-1, features) @ norms))
            target = for_x[start : start + most]
            torch.mm(dk, weight.mT, out=target)
            target[:, first:last].addmm_(logs, back)
            for_weight.addmm_(rows.mT, dk)
            for_bias.add_(dk.sum(0))
        return for_x, for_weight, for_bias, None, None, None


def _logs_of_keys(rows: Tensor, weight: Tensor, bias: Tensor, projection: Tensor, key: Tensor, phi: Tensor) -> Tensor:
    """Logarithms of the features of keys, without the constant, written over ``phi``; the keys over ``key``."""
    key, phi = key[: len(rows)], phi[: len(rows)]
    features, dim = projection.shape
    torch.addmm(bias, rows, weight, out=key)
    torch.mm(key.view(-1, dim), projection.mT, out=phi.view(-1, features))
    square = key.view(-1, dim).square() @ key.new_full((dim, 1), 0.5)
    phi.view(-1, features).sub_(square)
    return phi


class _Attend(torch.autograd.Function):
    """Chunks of queries, whose squared norms cancel."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        x, weight, bias, projection, logs, means, direct = inputs
        ctx.save_for_backward(*inputs)
        starts, most = _starts(x)
        query, share = x.new_empty(most, weight.shape[1]), x.new_empty(most, logs.numel())
        result = x.new_empty(x.shape[0], direct.shape[1])
        for start in starts:
            rows, out = x[start : start + most], result[start : start + most]
            phi = _shares(rows, weight, bias, projection, logs, query, share)
            torch.mm(rows, direct, out=out)
            out.addmm_(phi, means.flatten(0, 1))
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        x, weight, bias, projection, logs, means, direct = inputs
        grad = grad_outputs[0]
        wanted = ctx.needs_input_grad[:7]
        if torch.is_grad_enabled() or wanted[3]:
            return _autograd.by_definition(attend_plainly, tuple(inputs), grad, wanted)
        features, dim = projection.shape
        starts, most = _starts(x)
        query, share = x.new_empty(most, weight.shape[1]), x.new_empty(most, logs.numel())
        slope = torch.empty_like(share)
        flat = means.flatten(0, 1)
        for_x = torch.empty_like(x)
        for_weight, for_bias, for_logs = torch.zeros_like(weight), torch.zeros_like(bias), torch.zeros_like(logs)
        for_means, for_direct = torch.zeros_like(flat), torch.zeros_like(direct)
        for start in starts:
            rows, given = x[start : start + most], grad[start : start + most]
            phi = _shares(rows, weight, bias, projection, logs, query, share)
            steep = slope[: len(rows)]
            torch.mm(given, flat.mT, out=steep)
            for_means.addmm_(phi.mT, given)
            by_head = steep.view(-1, features)
            _through_softmax(by_head, phi.view(-1, features))
            for_logs.add_(steep.sum(0).view_as(logs))
            dq = query[: len(rows)]
            torch.mm(by_head, projection, out=dq.view(-1, dim))
            target = for_x[start : start + most]
            torch.mm(dq, weight.mT, out=target)
            target.addmm_(given, direct.mT)
            for_weight.addmm_(rows.mT, dq)
            for_bias.add_(dq.sum(0))
            for_direct.addmm_(rows.mT, given)
        return for_x, for_weight, for_bias, None, for_logs, for_means.view_as(means), for_direct


def _shares(
    rows: Tensor, weight: Tensor, bias: Tensor, projection: Tensor, logs: Tensor, query: Tensor, share: Tensor
) -> Tensor:
    """The softmax over features, written over ``share``; the queries over ``query``."""
    query, share = query[: len(rows)], share[: len(rows)]
    features, dim = projection.shape
    torch.addmm(bias, rows, weight, out=query)
    torch.mm(query.view(-1, dim), projection.mT, out=share.view(-1, features))
    share.add_(logs.flatten())
    by_head = share.view(-1, features)
    torch.softmax(by_head, -1, out=by_head)
    return share


def _through_softmax(grad: Tensor, share: Tensor) -> None:
    """The gradient of the logits, written over that of the softmax."""
    torch.ops.aten._softmax_backward_data.out(grad, share, -1, grad.dtype, grad_input=grad)  # noqa: SLF001
