r"""Attention to pooled keys over chunks of rows, recomputed in the backward pass.

All chunks are written into the same few buffers: fresh memory takes longer to write than most of what is written to
compute. Equations 1 to 3 are those of :mod:`~holonomy.ops.performer.reference`. For the sums over keys
:math:`T = \sum_i (v_i, 1)^\top e^{\ell(k_i) - t}`, with a constant t and P the projection, the backward pass is

.. math::

    \partial \ell_f(k_i) &= e^{\ell_f(k_i) - t_f}\, \bigl((v_i, 1) \, \partial T\bigr)_f &\quad (4) \\
    \partial v_i &= e^{\ell(k_i) - t}\, (\partial T)^\top \text{ without its last column} &\quad (5) \\
    \partial k_i &= \partial \ell(k_i)\, P - k_i \textstyle\sum_f \partial \ell_f(k_i) &\quad (6)

because :math:`\ell_f(k) = w_f \cdot k - |k|^2/2` up to a constant. With p the softmax of equation 3, its logits have
the gradient

.. math:: \partial \ell_f(q_j) = p_{jf} \bigl( a_{jf} - \textstyle\sum_g p_{jg} a_{jg} \bigr), \qquad
    a_{jf} = \partial o_j \cdot M_f \quad (7)

and queries :math:`\partial q_j = \partial \ell(q_j)\, P` (their squared norms cancel).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy.ops.performer.reference import attend_pooled_reference, pool_keys_reference

# Rows of a chunk: their features of all heads take a few MiB.
_CHUNK = 512
_CHUNK_CUDA = 2**17
# Features of all rows from which on chunks are used: of fewer, the reference takes 0.8 of the time.
_FEWEST_FEATURES = 2**18


def use_chunks(x: Tensor, weight: Tensor, bias: Tensor, projection: Tensor, *others: Tensor) -> bool:
    """Whether to compute in chunks: where features are many, and a custom backward is supported."""
    supported = _autograd.supports_custom_backward(x, weight, bias, projection, *others)
    return supported and x.shape[0] * projection.shape[0] * weight.shape[1] >= _FEWEST_FEATURES * projection.shape[1]


def _starts(x: Tensor) -> tuple[range, int]:
    """Where chunks start, and how many rows a chunk has."""
    most = _CHUNK_CUDA if x.device.type == "cuda" else _CHUNK
    return range(0, x.shape[0], most), min(most, x.shape[0])


class ChunkedPooling(torch.autograd.Function):
    """The sums over keys of equations 1 and 2, relative to the largest logarithm of each feature."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, projection: Tensor, first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        """Sum over chunks of keys with a running maximum."""
        features, dim = projection.shape
        heads = weight.shape[1] // dim
        starts, most = _starts(x)
        key_buffer, phi_buffer = x.new_empty(most, weight.shape[1]), x.new_empty(most, heads * features)
        values_and_one = x.new_ones(most, last - first + 1)
        table = x.new_zeros(last - first + 1, heads * features)
        top = x.new_full((heads * features,), -torch.inf)
        for start in starts:
            rows = x[start : start + most]
            phi = _key_features(rows, weight, bias, projection, key_buffer, phi_buffer)
            # Streaming softmax: sums so far are rescaled to the new largest logarithm.
            highest = torch.maximum(top, phi.amax(0))
            table.mul_((top - highest).exp_())
            top = highest
            phi.sub_(top).exp_()
            block = values_and_one[: len(rows)]
            block[:, :-1] = rows[:, first:last]
            table.addmm_(block.mT, phi)
        top = top.view(heads, features)
        ctx.save_for_backward(x, weight, bias, projection, top)
        ctx.values = first, last
        # The constant -log sqrt(F) of the logarithms, which cancels in the table.
        shifted = top - math.log(features) / 2
        ctx.mark_non_differentiable(shifted)
        return shifted, table

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Equations 4 to 6."""
        x, weight, bias, projection, top = ctx.saved_tensors
        first, last = ctx.values
        grad = grad_outputs[1]
        wanted = (*ctx.needs_input_grad[:4], False, False)
        if _autograd.through_reference(grad) or wanted[3]:
            inputs = (x, weight, bias, projection, first, last)
            return _autograd.reference_gradients(lambda *args: pool_keys_reference(*args)[-1], inputs, grad, wanted)
        features, dim = projection.shape
        starts, most = _starts(x)
        key_buffer, phi_buffer = x.new_empty(most, weight.shape[1]), x.new_empty(most, top.numel())
        grad_logits_buffer, grad_key_buffer = torch.empty_like(phi_buffer), torch.empty_like(key_buffer)
        values_and_one = x.new_ones(most, last - first + 1)
        grad_values = grad[:-1].mT.contiguous()
        ones = x.new_ones(features, 1)
        grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        for start in starts:
            rows = x[start : start + most]
            count = len(rows)
            phi = _key_features(rows, weight, bias, projection, key_buffer, phi_buffer)
            phi.sub_(top.flatten()).exp_()
            block, grad_logits = values_and_one[:count], grad_logits_buffer[:count]
            dk = grad_key_buffer[:count]
            block[:, :-1] = rows[:, first:last]
            # Equation 4.
            torch.mm(block, grad, out=grad_logits)
            grad_logits.mul_(phi)
            # Equation 6, one head in each row; the product with ones sums over features.
            torch.mm(grad_logits.view(-1, features), projection, out=dk.view(-1, dim))
            k = key_buffer[:count].view(-1, dim)
            dk.view(-1, dim).sub_(k.mul_(grad_logits.view(-1, features) @ ones))
            # Keys are x W + b, and equation 5: values are columns of x.
            target = grad_x[start : start + most]
            torch.mm(dk, weight.mT, out=target)
            target[:, first:last].addmm_(phi, grad_values)
            grad_weight.addmm_(rows.mT, dk)
            grad_bias.add_(dk.sum(0))
        return grad_x, grad_weight, grad_bias, None, None, None


def _key_features(rows: Tensor, weight: Tensor, bias: Tensor, projection: Tensor, key: Tensor, phi: Tensor) -> Tensor:
    """Logarithms of the features of keys, without the constant, written over ``phi``; the keys over ``key``."""
    key, phi = key[: len(rows)], phi[: len(rows)]
    features, dim = projection.shape
    torch.addmm(bias, rows, weight, out=key)
    torch.mm(key.view(-1, dim), projection.mT, out=phi.view(-1, features))
    half_square = key.view(-1, dim).square() @ key.new_full((dim, 1), 0.5)
    phi.view(-1, features).sub_(half_square)
    return phi


class ChunkedAttention(torch.autograd.Function):
    """Equation 3."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        """Attend by chunks of queries."""
        x, weight, bias, projection, logs, means, direct = inputs
        ctx.save_for_backward(*inputs)
        starts, most = _starts(x)
        query_buffer, probs_buffer = x.new_empty(most, weight.shape[1]), x.new_empty(most, logs.numel())
        result = x.new_empty(x.shape[0], direct.shape[1])
        for start in starts:
            rows, out = x[start : start + most], result[start : start + most]
            probs = _softmax_over_features(rows, weight, bias, projection, logs, query_buffer, probs_buffer)
            torch.mm(rows, direct, out=out)
            out.addmm_(probs, means.flatten(0, 1))
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Equation 7, and the gradients of the maps."""
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        x, weight, bias, projection, logs, means, direct = inputs
        grad = grad_outputs[0]
        wanted = ctx.needs_input_grad[:7]
        if _autograd.through_reference(grad) or wanted[3]:
            return _autograd.reference_gradients(attend_pooled_reference, tuple(inputs), grad, wanted)
        features, dim = projection.shape
        starts, most = _starts(x)
        query_buffer, probs_buffer = x.new_empty(most, weight.shape[1]), x.new_empty(most, logs.numel())
        grad_logits_buffer = torch.empty_like(probs_buffer)
        flat = means.flatten(0, 1)
        grad_x = torch.empty_like(x)
        grad_weight, grad_bias, grad_logs = torch.zeros_like(weight), torch.zeros_like(bias), torch.zeros_like(logs)
        grad_means, grad_direct = torch.zeros_like(flat), torch.zeros_like(direct)
        for start in starts:
            rows, grad_rows = x[start : start + most], grad[start : start + most]
            probs = _softmax_over_features(rows, weight, bias, projection, logs, query_buffer, probs_buffer)
            grad_logits = grad_logits_buffer[: len(rows)]
            # a of equation 7, overwritten by the gradient of the logits.
            torch.mm(grad_rows, flat.mT, out=grad_logits)
            grad_means.addmm_(probs.mT, grad_rows)
            by_head = grad_logits.view(-1, features)
            weights = probs.view(-1, features)
            torch.ops.aten._softmax_backward_data.out(by_head, weights, -1, by_head.dtype, grad_input=by_head)  # noqa: SLF001
            # The logits are l(q) + L: L is a term at every query, and l(q) = q P^T.
            grad_logs.add_(grad_logits.sum(0).view_as(logs))
            dq = query_buffer[: len(rows)]
            torch.mm(by_head, projection, out=dq.view(-1, dim))
            # Queries are x W + b, and x enters equation 3 as x D.
            target = grad_x[start : start + most]
            torch.mm(dq, weight.mT, out=target)
            target.addmm_(grad_rows, direct.mT)
            grad_weight.addmm_(rows.mT, dq)
            grad_bias.add_(dq.sum(0))
            grad_direct.addmm_(rows.mT, grad_rows)
        return grad_x, grad_weight, grad_bias, None, grad_logs, grad_means.view_as(means), grad_direct


def _softmax_over_features(
    rows: Tensor, weight: Tensor, bias: Tensor, projection: Tensor, logs: Tensor, query: Tensor, probs: Tensor
) -> Tensor:
    """The softmax over features, written over ``probs``; the queries over ``query``."""
    query, probs = query[: len(rows)], probs[: len(rows)]
    features, dim = projection.shape
    torch.addmm(bias, rows, weight, out=query)
    torch.mm(query.view(-1, dim), projection.mT, out=probs.view(-1, features))
    probs.add_(logs.flatten())
    by_head = probs.view(-1, features)
    torch.softmax(by_head, -1, out=by_head)
    return probs
