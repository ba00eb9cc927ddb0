r"""What gradients written by hand share where points are made of space parts.

With :math:`t^2 = |s|^2 - 1/\kappa` a gradient :math:`(g_t, g_s)` of the point is :math:`g_s + g_t\, s / t` of its space
part and :math:`\sum g_t / (2 \kappa^2 t)` of the curvature.
"""

from __future__ import annotations

import torch

from holonomy import _autograd
from holonomy._shapes import Float

# Below, whole tensors stay in the cache, and a loop over chunks of rows buys nothing.
_FEWEST_ROWS = 2048
# Bytes of a chunk of rows: beside it the calls of a hundred operations take little time, and a cache holds some. The
# smaller chunks of hyperboloid.rowwise, whose operations are few, made a residual connection up to 1.5 times slower.
_CHUNK, _CHUNK_CUDA = 2**22, 2**26


def use_chunked(x: Float[torch.Tensor, "*batch dim"], rows: int) -> bool:
    """Whether to compute in chunks: from 2048 rows on, where a custom backward is supported."""
    return _autograd.supports_custom_backward(x) and rows >= _FEWEST_ROWS and x.numel() > 0


def use_custom_backward(rows: int, *tensors: torch.Tensor) -> bool:
    """Whether a gradient written by hand replaces that of autograd: as chunks do, and in what the compiler fuses."""
    if torch.compiler.is_compiling():
        return len({x.dtype for x in tensors}) == 1 and not torch.is_autocast_enabled(tensors[0].device.type)
    return _autograd.supports_custom_backward(*tensors) and use_chunked(tensors[0], rows)


def chunks(x: Float[torch.Tensor, "rows dim"]) -> list[slice]:
    """Rows that are computed at once where a custom backward is supported: of more, tables would leave the cache."""
    if not _autograd.supports_custom_backward(x):  # where the number of rows may be a symbol
        return [slice(None)]
    size = rows_of_chunk(x, x.shape[1])
    return [slice(start, start + size) for start in range(0, max(len(x), 1), size)]


def rows_of_chunk(x: torch.Tensor, width: int) -> int:
    """How many rows of so many entries a function of many operations computes at once."""
    size = _CHUNK_CUDA if x.device.type == "cuda" else _CHUNK
    return max(1, size // (max(width, 1) * x.element_size()))


def kept(*numbers: Float[torch.Tensor, "*shape"]) -> tuple[torch.Tensor, ...]:
    """Numbers of rows or columns that compiled code stores; it would compute them again for each entry."""
    return tuple(torch.stack(numbers).unbind()) if torch.compiler.is_compiling() else numbers


def scale_of(curvature: Float[torch.Tensor, "*one"]) -> Float[torch.Tensor, ""]:
    """One over the radius, in float64."""
    return curvature.reshape(()).neg().double().sqrt()


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
