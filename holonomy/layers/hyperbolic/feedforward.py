"""The feed-forward of a Hypformer block: HTC, refinement, HTC, dropout (section 4.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks
from holonomy._autograd import may_bypass
from holonomy._shapes import Float
from holonomy.layers.hyperbolic.linear import HTC
from holonomy.layers.hyperbolic.refinement import HRC, HypDropout, curvatures, drop_some, rescale_space
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.curvature import root_ratio
from holonomy.ops.lorentz.lifted_linear import lifted_linear


class ActivationDropout(nn.Module):
    """Two refinements in a row, merged into one as below eq. 21."""

    def __init__(self, activation: Callable[[Tensor], Tensor], dropout: float) -> None:
        super().__init__()
        checks.function("activation", activation)
        self.activation = activation
        self.dropout = nn.Dropout(checks.in_range("dropout", dropout, 0.0, 1.0))

    def refinements(self) -> tuple[Callable[[Tensor], Tensor], ...]:
        """Both, in order."""
        return self.activation, self.dropout

    def forward(self, space: Tensor) -> Tensor:
        """Apply both."""
        return self.dropout(self.activation(space))


class FeedForward(nn.Sequential):
    """HTC, HRC, HTC, HypDropout."""

    # Hidden points are never put together, and ReLU is taken in place: that saves half of the memory, and more of the
    # time.

    def forward(self, x: Float[Tensor, "*batch ambient"]) -> Float[Tensor, "*batch ambient_out"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Apply the four."""
        widen, refine, narrow, drop = cast("tuple[HTC, HRC, HTC, HypDropout]", tuple(self))
        if not (may_bypass(widen, HTC) and may_bypass(refine, HRC) and may_bypass(narrow, HTC)):
            return super().forward(x)
        # Each curvature is read once.
        here, hidden, there, last = curvatures(
            widen.manifold_in, widen.manifold_out, narrow.manifold_in, narrow.manifold_out
        )
        checks.last_axis("x", x, widen.in_features + 1, "in_features + 1", widen)
        weight, bias = widen.affine(ratio=root_ratio(here, hidden))
        wide = functional.linear(hyperboloid.held(x, weight=weight), weight, bias)
        # Positive factors, those of dropout and of the curvatures, may come before ReLU as well.
        relu = _is_relu(refine.function)
        wide = cast("ActivationDropout", refine.function).dropout(wide) if relu else refine.function(wide)
        wide = rescale_space(wide, refine.manifold_in, refine.manifold_out)
        weight, bias = narrow.affine(ratio=root_ratio(there, last))
        bias = wide.new_zeros(narrow.out_features) if bias is None else bias
        return drop_some(drop, lifted_linear(wide, weight, bias, there, last, relu=relu))


def _is_relu(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether a refinement is ReLU and torch's dropout."""
    if not may_bypass(function, ActivationDropout):
        return False
    activation, dropout = cast("ActivationDropout", function).refinements()
    relu = activation in (torch.relu, functional.relu) or may_bypass(activation, nn.ReLU)
    return relu and may_bypass(dropout, nn.Dropout)
