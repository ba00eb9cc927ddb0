"""Attention among tokens in order, to a memory, and with masks of pairs: the loops, called as the cases call layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests import reference

__all__ = ["called"]


def called(outer: nn.Module, *inputs: Tensor, dropout: float = 0.0) -> Tensor:
    """The formula of the inner module, with the arguments that the outer one makes of its own."""
    positional, named = outer.arguments(*inputs)
    options: dict[str, Any] = {"dropout": dropout} if dropout else {}
    return reference.REFERENCES[type(outer.inner)](outer.inner, *positional, **named, **options)
