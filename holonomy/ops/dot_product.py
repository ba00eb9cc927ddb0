"""Scaled dot-product attention that returns zero for a query without a key, where torch returns nan or an average.

Torch's fused kernels are for four axes, and a mask that is as long as the queries slows them down: other batch axes are
made two, and a mask keeps its single row for all queries. They have no second derivative; where one is asked for, the
gradient is that of torch's reference. On the CPU so are results whose logits may be 1e5 or more in float32: a fused
gradient makes weights anew from logits and the logarithm of their sum, which such logits leave few digits; from 1e8 on
it is nan. The reference holds the weights of all pairs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from holonomy import _autograd
from holonomy._shapes import Bool, Float


def dot_product_attention(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch key dim"],
    value: Float[Tensor, "*batch key values"],
    allowed: Bool[Tensor, "*#batch #query key"] | None = None,
    *,
    bias: Float[Tensor, "*#batch #query #key"] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch query values"]:
    r"""Averages of the values with weights :math:`\mathrm{softmax}_j(s\, q_i \cdot k_j + b_{ij})`."""
    attend = partial(_attend, query, key, value, dropout_p=dropout, scale=scale)
    shape = (*query.shape[:-2], -1, key.shape[-2])
    if allowed is None:
        return attend(is_causal=is_causal) if bias is None else attend(bias.expand(shape))
    empty = ~allowed.any(-1, keepdim=True)
    # A query without a key attends to all keys, and its result is set to zero afterwards.
    hidden = ~(allowed | empty)
    # Numbers: a boolean mask would be turned into them after its expansion, once for every head.
    mask = torch.zeros_like(hidden, dtype=query.dtype) if bias is None else bias
    return attend(mask.masked_fill(hidden, -math.inf).expand(shape)).masked_fill(empty, 0.0)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    if _autograd.forward_mode():  # which the fused kernels do not have either
        return _reference(query, key, value, mask, **options)
    if query.dim() != 4 and (torch.compiler.is_compiling() or not _autograd.transformed()):
        mask = None if mask is None else _four_axes(mask)
        out = _attend(*map(_four_axes, (query, key, value)), mask=mask, **options)
        return out.reshape(*query.shape[:-1], value.shape[-1])
    if _too_large(query, key, options["scale"]):
        return _reference(query, key, value, mask, **options)
    out = functional.scaled_dot_product_attention(query, key, value, mask, **options)
    # The kernels have no gradient of a mask.
    fused = query.dim() == 4 and options["dropout_p"] == 0 and (mask is None or not mask.requires_grad)
    if fused and out.requires_grad and _autograd.supports_custom_backward(query, key, value):
        return _autograd.apply_function(
            _TwiceDifferentiable, out, query, key, value, partial(_reference, mask=mask, **options)
        )
    return out


def _too_large(query: Tensor, key: Tensor, scale: float | None) -> bool:
    """Whether float32, in which kernels add up, may have less than six binary digits of products after the point."""
    if torch.compiler.is_compiling() or _autograd.transformed() or query.device.type != "cpu":
        return False
    if not torch.is_grad_enabled() or not (query.requires_grad or key.requires_grad) or 0 in (*query.shape, *key.shape):
        return False
    channels = query.shape[-1]
    ends = (x.detach().aminmax() for x in (query, key))
    product = channels * math.prod(max(-low.item(), high.item()) for low, high in ends)
    logit = product * (channels**-0.5 if scale is None else abs(scale))
    return logit * torch.finfo(torch.promote_types(query.dtype, torch.float32)).eps > 2**-6


def _four_axes(x: Tensor) -> Tensor:
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


def _reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(query, key, value, mask, **options)


class _TwiceDifferentiable(torch.autograd.Function):
    """A result beside its inputs, which get the gradient of the reference where it is to be differentiated."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor, key: Tensor, value: Tensor, reference: Any) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.reference = reference
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return *grad_outputs, None, None, None, None
        wanted = ctx.needs_input_grad[1:4]
        return None, *_autograd.reference_gradients(ctx.reference, ctx.saved_tensors, grad_outputs[0], wanted), None
