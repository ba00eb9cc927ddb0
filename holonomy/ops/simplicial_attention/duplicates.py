"""Which tokens of a set repeat an earlier one, for operators that count equal tokens once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def find_duplicates(
    x: Float[Tensor, "*batch tokens features"], key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None
) -> Bool[Tensor, "*batch tokens"]:
    """Tell which tokens are equal to an earlier one, up to 16 units in the last place of the largest entry."""
    x, tokens = x.detach(), x.shape[-2]
    if tokens < 2:
        return x.new_zeros(x.shape[:-1], dtype=torch.bool)
    # No two entries of the direction are equal, so that tokens with the same entries in another order lie apart.
    direction = torch.arange(1, x.shape[-1] + 1, device=x.device).to(torch.float32).cos().to(x.dtype)
    place = (x * direction).sum(-1)
    if key_padding_mask is not None:
        place = place.masked_fill(key_padding_mask, torch.inf)
    order = place.argsort(dim=-1, stable=True)
    row = x.gather(-2, order[..., None].expand(x.shape))
    apart = (row[..., 1:, :] - row[..., :-1, :]).abs().amax(-1)
    same = apart <= 16 * torch.finfo(x.dtype).eps * row[..., 1:, :].abs().amax(-1)
    if key_padding_mask is not None:
        same = same & ~key_padding_mask.gather(-1, order)[..., 1:]
    # Runs of equal tokens, and the first token of each run.
    run = torch.nn.functional.pad(~same, (1, 0)).cumsum(-1)
    first = torch.full_like(order, tokens).scatter_reduce(-1, run, order, "amin")
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, order != first.gather(-1, run))
