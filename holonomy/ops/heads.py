"""Steps that all multi-head attentions share: heads to batch axes and back, and zeros at padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from holonomy import checks

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["head_count", "merge_heads", "split_heads", "without_padding"]


def head_count(features: int, heads: int) -> int:
    """Check that heads divide the features."""
    checks.positive_int("features", features)
    checks.positive_int("heads", heads)
    if features % heads:
        raise ValueError(f"features must be a multiple of heads, got {features} and {heads}.")
    return heads


def split_heads(space: Float[Tensor, "*batch nodes dim"], heads: int) -> Float[Tensor, "*batch heads nodes channels"]:
    """Heads are consecutive slices of the channels; their axis comes before that of the nodes."""
    return space.unflatten(-1, (heads, -1)).transpose(-3, -2)


def merge_heads(heads: Float[Tensor, "*batch heads nodes channels"]) -> Float[Tensor, "*batch nodes dim"]:
    """The inverse of :func:`split_heads`."""
    return heads.transpose(-3, -2).flatten(-2)


def without_padding(
    x: Float[Tensor, "*batch nodes dim"], mask: Bool[Tensor, "*batch nodes"] | None
) -> Float[Tensor, "*batch nodes dim"]:
    """Zero where there is padding."""
    if mask is None:
        return x
    checks.padding_mask("key_padding_mask", mask, x.shape[:-1])
    return x.masked_fill(mask[..., None], 0.0)
