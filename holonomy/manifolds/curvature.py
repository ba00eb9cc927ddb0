"""Curvature: one number, negative by construction, exact at construction, learnable; and the origin it goes with."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import geoopt
import torch
from geoopt.utils import size2shape
from torch import Tensor, nn

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Float

# kappa stays within a factor exp(+-20), about 5e8, of its initial value.
_LOG_RANGE = 20.0
# What the gradient of one use may be, of the largest number, for those of a thousand uses to have a sum.
_SHARE = 2.0**-10


class Curvature(nn.Module):
    r"""Sectional curvature :math:`\kappa < 0` of a hyperbolic space.

    .. math:: \kappa = \kappa_0 \exp\bigl(20 \tanh(\theta / 20)\bigr)

    :math:`\theta` starts at zero, so that the initial value is exact, and near zero it is the logarithm of
    :math:`\kappa/\kappa_0`: a step of 0.01 changes the curvature by one percent, whatever its size. The hyperbolic
    tangent keeps the curvature negative and finite after an optimizer step of any size, infinite ones included.

    Both tensors have shape ``(1,)``, since sharded training refuses parameters without an axis.

    Args:
        value: the initial curvature, finite and negative.
        learnable: whether ``log_ratio`` (the angle above) receives a gradient.
        device: where the tensors live.
        dtype: their dtype, as for any module of ``torch.nn``.

    Attributes:
        initial: buffer ``(1,)``, :math:`\kappa_0`.
        log_ratio: parameter ``(1,)``, :math:`\theta`.

    Raises:
        TypeError: if ``value`` is no number.
        ValueError: if ``value`` is not finite and negative, or so extreme that its dtype could not follow it.

    >>> Curvature(-0.5).value
    tensor([-0.5000])
    """

    initial: Tensor

    def __init__(
        self,
        value: float | Tensor,
        *,
        learnable: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(learnable=learnable)
        value = checks.finite_negative("curvature", value)
        checks.floating_dtype(dtype)
        kind = torch.empty(0, dtype=dtype).dtype
        limits, reach = torch.finfo(kind), math.exp(_LOG_RANGE)
        if not limits.smallest_normal * reach <= -value <= limits.max / reach:
            raise ValueError(
                f"curvature must stay finite and negative in {kind} when scaled by exp(+-{_LOG_RANGE:.0f}), "
                f"got {value}."
            )
        initial = torch.full((1,), value, device=device, dtype=dtype)
        self._parameters = _OneReplacement()
        self.register_buffer("initial", initial)
        self.log_ratio = nn.Parameter(torch.zeros_like(initial), requires_grad=bool(learnable))

    @property
    def value(self) -> Float[Tensor, " 1"]:
        """The curvature, a tensor ``(1,)``, differentiable in ``log_ratio``."""
        if torch.compiler.is_compiling():
            return _value(self.initial, self.log_ratio)
        return _autograd.apply_function(_Value, self.initial, self.log_ratio)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        state, prefix, errors = args[0], args[1], args[-1]
        initial = state.get(f"{prefix}initial")
        # Torch compares shapes; a space of positive curvature would be loaded without a word.
        if type(initial) is Tensor and not initial.is_meta and not _is_curvature(initial):
            errors.append(f"{prefix}initial must be a finite and negative curvature, got {initial}.")
            return
        super()._load_from_state_dict(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", *_: Any, **__: Any
    ) -> Generator[tuple[str, nn.Module], Any, None]:
        """This module once, under the first of its names, even where torch asks for duplicates.

        ``torch.func.functional_call`` swaps tensors under every name and restores them in the same order. Under the
        second name of a shared module it finds, and later restores, the tensor that it swapped in under the first.
        """
        return super().named_modules(memo, prefix)

    def extra_repr(self) -> str:
        """The value now and whether it learns, for ``repr``."""
        value = "on the meta device" if self.initial.is_meta else f"{self.value.item():.6g}"
        return f"value={value}, learnable={self.log_ratio.requires_grad}"


class _OneReplacement(dict[str, Any]):
    """Parameters of which none is replaced twice: ``functional_call`` could not restore it."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self and not isinstance(self[name], nn.Parameter) and not isinstance(value, nn.Parameter):
            raise ValueError(
                f"functional_call must be given {name} of a shared curvature under one name, that of "
                "named_parameters(), got two."
            )
        super().__setitem__(name, value)


def root_ratio(curvature: Float[Tensor, "*one"], to: Float[Tensor, "*one"]) -> Float[Tensor, "*one"]:
    r""":math:`\sqrt{\kappa/\kappa'}`: the roots first, for the quotient may leave the range where its root does not."""
    return curvature.neg().sqrt() / to.neg().sqrt()


def origin(
    manifold: geoopt.Manifold, size: tuple[Any, ...], dtype: torch.dtype, device: torch.device | str
) -> geoopt.ManifoldTensor:
    """Where a manifold projects zeros to, repeated to a shape."""
    shape = size2shape(*size)
    checks.size(shape)
    checks.floating_dtype(dtype)
    with torch.no_grad():
        return manifold_tensor(manifold.projx(torch.zeros(shape, dtype=dtype, device=device)), manifold)


def manifold_tensor(x: Tensor, manifold: geoopt.Manifold) -> geoopt.ManifoldTensor:
    """Points as Geoopt's tensor, of which it types neither the constructor nor the keyword."""
    return geoopt.ManifoldTensor(x, manifold=manifold)  # pyright: ignore[reportCallIssue]


def _is_curvature(initial: Tensor) -> bool:
    dense = initial.layout == torch.strided and initial.is_floating_point()
    return dense and bool((initial.isfinite() & (initial < 0)).all())


def _value(initial: Tensor, log_ratio: Tensor) -> Tensor:
    exponent = _LOG_RANGE * torch.tanh(numerics.widen(log_ratio) / _LOG_RANGE)
    return numerics.narrow(numerics.widen(initial) * torch.exp(exponent), initial.dtype)


class _Value(torch.autograd.Function):
    """The same as one node of the graph, read dozens of times in a pass over small graphs; gradients saturate."""

    generate_vmap_rule = True

    @staticmethod
    def forward(initial: Tensor, log_ratio: Tensor) -> Tensor:
        exponent = _LOG_RANGE * torch.tanh(log_ratio.double() / _LOG_RANGE)
        return (initial.double() * torch.exp(exponent)).to(initial.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)
        ctx.save_for_forward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor]:
        log_ratio, value = ctx.saved_tensors
        limit = torch.finfo(log_ratio.dtype).max * _SHARE
        return None, (grad_outputs[0].double() * _rate(log_ratio, value)).clamp(-limit, limit).to(log_ratio.dtype)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        log_ratio, value = ctx.saved_tensors
        along = tangents[1]
        rate = torch.zeros_like(value) if along is None else along.double() * _rate(log_ratio, value)
        return numerics.saturated(rate, value.dtype)


def _rate(log_ratio: Tensor, value: Tensor) -> Tensor:
    """The derivative of the value by the angle, in float64."""
    return value.double() * (1 - torch.tanh(log_ratio.double() / _LOG_RANGE).square())
