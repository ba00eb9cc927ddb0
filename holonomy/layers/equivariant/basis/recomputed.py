"""Buffers that follow from a constructor's arguments, and are therefore in no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class RecomputedBuffers(nn.Module):
    """A module with buffers that follow from its arguments, and are made anew when it leaves the meta device."""

    # Neither :meth:`torch.nn.Module.to_empty` nor ``load_state_dict(assign=True)`` would bring them.

    def _recomputed(self) -> dict[str, Tensor]:
        """The buffers by name, on any device and in any dtype."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RecomputedBuffers:  # noqa: FBT001, FBT002
        away = self._away()
        super()._apply(fn, recurse)
        if away:
            self._hold()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self._away():
            self._hold()

    def _away(self) -> bool:
        return any(buffer.is_meta for buffer in self.buffers(recurse=False))

    def _hold(self) -> None:
        device = next(self.parameters(recurse=False)).device
        if device.type != "meta":
            for name, value in self._recomputed().items():
                self._buffers[name] = value.to(device=device, dtype=getattr(self, name).dtype)
