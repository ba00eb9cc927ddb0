"""The lightweight maps of order-k tensors, HOT Prop. 2: of all classes without a sum, or of each entry by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float
from holonomy.layers.equivariant.linear import sparse
from holonomy.layers.equivariant.linear.layer import EquivariantLinear, check_dense
from holonomy.structures import Hyperedges, joint


class Entrywise(nn.Module):
    r"""Map every entry by itself, :math:`A_{\mathbf j} w + b`: the least of lightweight maps (HOT Prop. 2)."""

    def __init__(
        self,
        order: int,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.order = checks.nonnegative_int("order", order)
        self.in_features = checks.positive_int("in_features", in_features)
        self.out_features = checks.positive_int("out_features", out_features)
        self.weight = nn.Parameter(torch.empty(in_features, out_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, such that independent inputs of variance one give results of variance one."""
        with torch.no_grad():
            self.weight.normal_(std=1 / math.sqrt(self.in_features))
            self.bias.zero_()

    def forward(
        self, x: Float[Tensor, "..."] | Hyperedges, mask: Bool[Tensor, "*batch nodes"] | None = None
    ) -> Float[Tensor, "..."] | Hyperedges:
        """Map a dense tensor or hyperedges."""
        if isinstance(x, Hyperedges):
            if mask is not None:
                raise ValueError("mask must be None for hyperedges, which have no padding.")
            sparse.check_hyperedges(x, self.order, self.in_features, self)
            return x.with_values(x.values @ self.weight + self.bias)
        check_dense(x, self.order, self.in_features, mask, self)
        result = x @ self.weight + self.bias
        if mask is not None and self.order:
            result = torch.where(joint(mask, self.order)[..., None], result, 0)
        return result


def lightweight(
    order: int,
    in_features: int,
    out_features: int,
    *,
    entrywise: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Make a map of order-k tensors without sums: of all such classes, or of each entry by itself."""
    if entrywise:
        return Entrywise(order, in_features, out_features, device=device, dtype=dtype)
    return EquivariantLinear(order, order, in_features, out_features, lightweight=True, device=device, dtype=dtype)
