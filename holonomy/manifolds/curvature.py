"""Curvature: one number, negative by construction, exact at construction, learnable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holonomy import checks, numerics

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["Curvature"]

# kappa stays within a factor exp(+-20), about 5e8, of its initial value.
_LOG_RANGE = 20.0


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
        ValueError: if ``value`` is not finite and negative, or so extreme that its dtype could not follow it.

    >>> Curvature(-0.5).value
    tensor([-0.5000])
    """

    initial: Tensor

    def __init__(
        self,
        value: float,
        *,
        learnable: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        value = checks.finite_negative("curvature", float(value))
        initial = torch.full((1,), value, device=device, dtype=dtype)
        extremes = initial * torch.exp(initial.new_tensor([-_LOG_RANGE, _LOG_RANGE]))
        if not bool((extremes.isfinite() & (extremes < 0)).all()):
            raise ValueError(
                f"curvature must stay finite and negative in {initial.dtype} when scaled by exp(+-{_LOG_RANGE:.0f}), "
                f"got {value}."
            )
        self.register_buffer("initial", initial)
        self.log_ratio = nn.Parameter(torch.zeros_like(initial), requires_grad=learnable)

    @property
    def value(self) -> Float[Tensor, " 1"]:
        """The curvature, a tensor ``(1,)``, differentiable in ``log_ratio``."""
        # In float64, so that gradients from points at the end of the dtype saturate instead of overflowing.
        exponent = _LOG_RANGE * torch.tanh(numerics.widen(self.log_ratio) / _LOG_RANGE)
        return numerics.narrow(numerics.widen(self.initial) * torch.exp(exponent), self.initial.dtype)

    def extra_repr(self) -> str:
        """The value now and whether it learns.

        Returns:
            What stands between the brackets of ``repr``.
        """
        return f"value={self.value.item():.6g}, learnable={self.log_ratio.requires_grad}"
