"""Attention among tokens in order, to a memory, and with masks of pairs: the loops, called as the cases call layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests import reference

__all__ = ["called"]


def called(
    outer: nn.Module,
    *inputs: Tensor,
    dropout: float = 0.0,
    activation: Callable[[Tensor], Tensor] | None = None,
    norm_eps: float | None = None,
) -> Tensor:
    """The formula of the inner module, with the arguments that the outer one makes, and options of a case."""
    positional, named = outer.arguments(*inputs)
    given = {"dropout": dropout, "activation": activation, "norm_eps": norm_eps}
    options: dict[str, Any] = {name: value for name, value in given.items() if value}
    return reference.REFERENCES[type(outer.inner)](outer.inner, *positional, **named, **options)
