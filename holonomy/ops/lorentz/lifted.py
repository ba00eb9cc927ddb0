r"""What gradients written by hand share where points are made of space parts.

With :math:`t^2 = |s|^2 - 1/\kappa` a gradient :math:`(g_t, g_s)` of the point is :math:`g_s + g_t\, s / t` of its space
part and :math:`\sum g_t / (2 \kappa^2 t)` of the curvature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from holonomy import _autograd

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["curvature_gradient", "space_gradient", "use_chunked"]

# Below, whole tensors stay in the cache, and a loop over chunks of rows buys nothing.
_FEWEST_ROWS = 2048


def use_chunked(x: Float[torch.Tensor, "*batch dim"], rows: int) -> bool:
    """Whether to compute in chunks: from 2048 rows on, where a custom backward is supported."""
    return _autograd.supports_custom_backward(x) and rows >= _FEWEST_ROWS and x.numel() > 0


def space_gradient(
    grad: Float[torch.Tensor, "rows ambient"], point: Float[torch.Tensor, "rows ambient"]
) -> Float[torch.Tensor, "rows dim"]:
    """The gradient of the space part alone, from that of time and space."""
    return torch.addcmul(grad[:, 1:], point[:, 1:] / point[:, :1], grad[:, :1])


def curvature_gradient(
    grad: Float[torch.Tensor, "rows ambient"],
    point: Float[torch.Tensor, "rows ambient"],
    curvature: Float[torch.Tensor, "*one"],
) -> Float[torch.Tensor, "*one"]:
    """The gradient of the curvature through the time coordinates."""
    return (grad[:, 0] / point[:, 0]).sum() / (2 * curvature.square())
